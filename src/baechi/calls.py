"""How a model is called and what it returns, as flat lists of tensors and a structure beside them.

The rest of Baechi sees only flat tensors. Keyword arguments, nested containers, dataclasses and
`transformers.ModelOutput` are taken apart here, on the way in, and put together here, on the way
out, so that every rung of the tracing ladder traces the same flat function.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import EllipsisType, NoneType
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from baechi.autocast import Autocast
from baechi.errors import InputError
from baechi.objects import Contents, Watched, can_hold, contents, empty, is_container, refill
from baechi.signatures import canonical_arguments, signature_of

_PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_TAKEN_APART = (
    "Tensors are found in tuples, lists, dicts, named tuples, dataclasses and what is registered "
    "with torch.utils._pytree; pass and return those."
)


@final
class _Slot:
    """Where a tensor was in a structure."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@final
@dataclass(frozen=True)
class _Object:
    """A list, a dict, or an object of any class such as a cache of keys, without its tensors."""

    like: Any
    contents: Contents
    values: "Structure"

    def fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        """A new object of the class that holds these; its `__init__` does not run."""
        value = empty(self.like)
        objects.append(value)
        refill(value, self.contents, self.values._fill(tensors, objects))
        return value


@final
@dataclass(frozen=True)
class _Again:
    """An object that is known already, by its number."""

    number: int


@final
@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors; `fill` puts tensors back.

    Attributes:
        leaves: Tensor slots and constants, in pytree order.
        spec: How pytree puts them together.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def n_tensors(self) -> int:
        """How many tensors `fill` takes."""
        return sum(isinstance(leaf, _Slot) for leaf in self._flat())

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves that are no tensors, with None in the tensors' places."""
        return tuple(None if isinstance(leaf, _Slot) else leaf for leaf in self._flat())

    def _flat(self) -> Iterator[Any]:
        for leaf in self.leaves:
            if isinstance(leaf, _Object):
                yield from leaf.values._flat()
            else:
                yield leaf

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for what is nested in the same way, in objects of the same classes."""
        inner = (leaf for leaf in self.leaves if isinstance(leaf, _Object))
        rows = ((type(leaf.like), leaf.contents, leaf.values.form) for leaf in inner)
        return (str(self.spec), *rows)

    def fill(self, tensors: Sequence[Any], objects: Sequence[Any] = ()) -> Any:
        """The nested value with `tensors` in its slots, and `objects` where these were given."""
        return self._fill(tensors, list(objects))

    def _fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        leaves = [_filled(leaf, tensors, objects) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _filled(leaf: Any, tensors: Sequence[Any], objects: list[Any]) -> Any:
    if isinstance(leaf, _Object):
        return leaf.fill(tensors, objects)
    if isinstance(leaf, _Again):
        return objects[leaf.number]
    return tensors[leaf.index] if isinstance(leaf, _Slot) else leaf


def flatten(
    value: Any,
    is_tensor: Callable[[Any], bool],
    *,
    objects: bool = False,
    given: Sequence[Any] = (),
) -> tuple[list[Any], Structure]:
    """The tensors of a nested value, in order, and the structure around them.

    Args:
        value: Tuples, lists, dicts, dataclasses, and what pytree knows, of anything.
        is_tensor: Which leaves are tensors.
        objects: Whether to look into objects of other classes too: `fill` makes new ones.
        given: Objects that `fill` is given instead.
    """
    parts = _Parts(is_tensor, objects, given)
    return parts.tensors, parts.structure(value)


@final
class _Parts:
    """The tensors and objects of what is taken apart, in the order that they are found in."""

    def __init__(
        self, is_tensor: Callable[[Any], bool], look_into: bool, given: Sequence[Any] = ()
    ) -> None:
        self.tensors: list[Any] = []
        self.objects: list[Any] = list(given)
        self._is_tensor = is_tensor
        self._look_into = look_into
        self._number = {id(each): i for i, each in enumerate(given)}

    def structure(self, value: Any) -> Structure:
        return self._structure(value, is_container)

    def arguments(self, positional: tuple[Any, ...], named: dict[str, Any]) -> Structure:
        """Of a call, where the dict of named arguments is nobody's."""
        return self._structure(
            (positional, named), lambda value: value is not named and is_container(value)
        )

    def _structure(self, value: Any, is_leaf: Callable[[Any], bool]) -> Structure:
        leaves, spec = pytree.tree_flatten(value, is_leaf)
        return Structure(tuple(map(self._slot, leaves)), spec)

    def _slot(self, leaf: Any) -> Any:
        if self._is_tensor(leaf):
            self.tensors.append(leaf)
            return _Slot(len(self.tensors) - 1)
        if not (_is_object(leaf) if self._look_into else _is_plain_object(leaf)):
            return leaf
        if id(leaf) in self._number:
            return _Again(self._number[id(leaf)])
        self._number[id(leaf)] = len(self.objects)
        self.objects.append(leaf)
        what, values = contents(leaf)
        return _Object(empty(leaf), what, self.structure(values))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors, _ = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return tensors


def _is_plain(value: Any) -> bool:
    """Whether a trace may hold the value as it is."""
    return isinstance(value, (*_PLAIN, _Again, Contents)) or callable(value)


def _is_object(value: Any) -> bool:
    """Whether the value can be looked into."""
    return _is_plain_object(value) or (not _is_plain(value) and can_hold(value))


def _is_plain_object(value: Any) -> bool:
    """Whether it is one that is all that it holds: a list, a dict, a dataclass."""
    return is_container(value) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | _Again | Contents)
    )


@final
@dataclass(frozen=True)
class Call:
    """One call of a model, canonical: `f(1, b=2)` and `f(a=1, b=2)` are the same call.

    Attributes:
        tensors: The tensors among the arguments, in order.
        structure: The arguments `(args, kwargs)` without them.
        autocast: What was on.
        objects: The caller's lists, dicts and objects that hold them, in order.
    """

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    autocast: Autocast
    objects: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal keys can run the same traced program: shapes, layouts, constants, autocast."""
        shapes = tuple((tensor.shape, tensor.dtype, _layout(tensor)) for tensor in self.tensors)
        constants = tuple((type(c).__name__, repr(c)) for c in self.structure.constants)
        return (self.structure.form, constants, shapes, self.autocast)

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name per tensor."""
        positional, named = self.structure.fill(self.tensors)
        labels = (*(f"args.{i}" for i in range(len(positional))), *named)
        seen: set[int] = set()
        return tuple(
            ".".join((label, *path))
            for label, value in zip(labels, (*positional, *named.values()), strict=True)
            for path in _paths(value, seen)
        )

    @property
    def shapes(self) -> str:
        """`input [2, 8], mask [8]`, for people."""
        rows = zip(self.names, self.tensors, strict=True)
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in rows)


def _layout(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Its strides where they matter: whether `contiguous` copies follows from them, for one.

    None stands for a contiguous tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)


def canonical_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
    """The call `model(*args, **kwargs)` in canonical form.

    Raises:
        InputError: The arguments do not fit the signature of `model.forward`.
    """
    if not isinstance(args, tuple | list):
        raise InputError(
            f"the example arguments are a {type(args).__name__}; give a tuple of positional "
            "arguments, such as `(x,)`, and a dict of keyword arguments."
        )
    if not isinstance(kwargs, Mapping | None):
        raise InputError(
            f"the example keyword arguments are a {type(kwargs).__name__}; give a dict from names "
            'to values, such as `{"mask": mask}`.'
        )
    signature = signature_of(model.forward)
    try:
        bound = signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise InputError(
            f"the arguments do not fit {type(model).__name__}.forward{signature}: {error}. "
            "Give what one real call of the model gets."
        ) from None
    positional, named = canonical_arguments(signature, bound)
    parts = _Parts(lambda leaf: isinstance(leaf, torch.Tensor), look_into=True)
    structure = parts.arguments(positional, named)
    for constant in structure.constants:
        if not _is_plain(constant):
            raise InputError(
                f"an argument of {type(model).__name__}.forward holds a "
                f"{type(constant).__name__}, which cannot be looked into: its tensors would be "
                f"frozen into the trace. {_TAKEN_APART}"
            )
    return Call(tuple(parts.tensors), structure, Autocast.current(), tuple(parts.objects))


def _paths(value: Any, seen: set[int]) -> Iterator[tuple[str, ...]]:
    """Where each tensor is, in the order of `_Parts`."""
    rows, _ = pytree.tree_flatten_with_path(value, is_container)
    for path, leaf in rows:
        keys = tuple(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        if isinstance(leaf, torch.Tensor):
            yield keys
        elif _is_object(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            what, values = contents(leaf)
            for label, held in zip(what.labels, values, strict=True):
                yield from ((*keys, str(label), *inner) for inner in _paths(held, seen))


def flat_model(
    model: nn.Module,
    call: Call,
    around: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
) -> tuple[nn.Module, list[Structure]]:
    """The model as a module from flat tensors to flat tensors, for every rung to trace.

    Args:
        model: The model.
        call: The call whose structure it takes.
        around: What a run of the model's forward happens in.

    Returns:
        The module, whose `forward` has one argument per tensor of the call and whose only
        submodule is `model`; and a list that gets the structure around its outputs, at each run:
        of what forward returns, and of how it changes the objects of the call.
    """
    returned: list[Structure] = []
    structure = call.structure

    def run(model: nn.Module, tensors: Sequence[Any]) -> tuple[Any, ...]:
        args, kwargs = structure.fill(tensors)
        parts = _Parts(_is_traceable, look_into=True)
        parts.arguments(args, kwargs)
        watched = Watched(parts.objects)
        if around is None:
            result = model(*args, **kwargs)
        else:
            with around(model):
                result = model(*args, **kwargs)
        left = (result, watched.changes())
        outputs, shell = flatten(left, _is_traceable, objects=True, given=watched.objects)
        for constant in shell.constants:
            if not _is_plain(constant):
                raise TypeError(
                    f"forward returns a {type(constant).__name__}, which cannot be looked into. "
                    f"{_TAKEN_APART}"
                )
        returned.append(shell)
        return tuple(outputs)

    # fx reads the arguments from the code object of the class's forward: varargs would be one.
    names = [f"x{i}" for i in range(len(call.tensors))]
    scope: dict[str, Any] = {"run": run}
    arguments, values = ", ".join(["self", *names]), "".join(f"{name}, " for name in names)
    exec(f"def forward({arguments}): return run(self.model, ({values}))", scope)
    module = type("FlatModel", (nn.Module,), {"forward": scope["forward"]})()
    module.training = model.training
    module.model = model
    return module, returned


def _is_traceable(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.fx.Proxy)
