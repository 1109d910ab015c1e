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
from baechi.objects import Watched
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
@dataclass(frozen=True)
class _DataclassNode:
    """A dataclass instance that pytree does not know, taken apart."""

    kind: type
    names: tuple[str, ...]


@final
class _Slot:
    """Where a tensor was in a structure."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@final
@dataclass(frozen=True)
class _Object:
    """An object of any class, such as a cache of keys and values, without its tensors."""

    kind: type
    attributes: "Structure"

    def fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        """A new object of the class, with these attributes; its `__init__` does not run."""
        value: Any = object.__new__(self.kind)
        objects.append(value)
        vars(value).update(self.attributes._fill(tensors, objects))
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
                yield from leaf.attributes._flat()
            else:
                yield leaf

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for what is nested in the same way, in objects of the same classes."""
        inner = (leaf for leaf in self.leaves if isinstance(leaf, _Object))
        return (str(self.spec), *((leaf.kind, leaf.attributes.form) for leaf in inner))

    def fill(self, tensors: Sequence[Any], objects: Sequence[Any] = ()) -> Any:
        """The nested value with `tensors` in its slots, and `objects` where these were given."""
        return self._fill(tensors, list(objects))

    def _fill(self, tensors: Sequence[Any], objects: list[Any]) -> Any:
        leaves = [_filled(leaf, tensors, objects) for leaf in self.leaves]
        return _rebuild(pytree.tree_unflatten(leaves, self.spec))


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
        leaves, spec = pytree.tree_flatten(_take_apart(value))
        return Structure(tuple(map(self._slot, leaves)), spec)

    def _slot(self, leaf: Any) -> Any:
        if self._is_tensor(leaf):
            self.tensors.append(leaf)
            return _Slot(len(self.tensors) - 1)
        if not (self._look_into and _is_object(leaf)):
            return leaf
        if id(leaf) in self._number:
            return _Again(self._number[id(leaf)])
        self._number[id(leaf)] = len(self.objects)
        self.objects.append(leaf)
        return _Object(type(leaf), self.structure(dict(vars(leaf))))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors, _ = flatten(value, lambda leaf: isinstance(leaf, torch.Tensor))
    return tensors


def _take_apart(value: Any) -> Any:
    """`value` with every dataclass that pytree does not know replaced by a tuple it knows."""
    if _is_plain_dataclass(value):
        names = tuple(f.name for f in dataclasses.fields(value) if f.init)
        parts = [_take_apart(getattr(value, name)) for name in names]
        return (_DataclassNode(type(value), names), *parts)
    if type(value) in (list, tuple):
        return type(value)(_take_apart(item) for item in value)
    if type(value) is dict:
        return {key: _take_apart(item) for key, item in value.items()}
    return value


def _rebuild(value: Any) -> Any:
    """The inverse of `_take_apart`."""
    if type(value) is tuple and value and isinstance(value[0], _DataclassNode):
        node = value[0]
        return node.kind(**dict(zip(node.names, map(_rebuild, value[1:]), strict=True)))
    if type(value) in (list, tuple):
        return type(value)(_rebuild(item) for item in value)
    if type(value) is dict:
        return {key: _rebuild(item) for key, item in value.items()}
    return value


def _is_plain(value: Any) -> bool:
    """Whether a trace may hold the value as it is."""
    return isinstance(value, (*_PLAIN, _DataclassNode, _Again)) or callable(value)


def _is_object(value: Any) -> bool:
    """Whether the value can be looked into."""
    return not _is_plain(value) and hasattr(value, "__dict__")


def _is_plain_dataclass(value: Any) -> bool:
    known = type(value) in pytree.SUPPORTED_NODES
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not known


@final
@dataclass(frozen=True)
class Call:
    """One call of a model, canonical: `f(1, b=2)` and `f(a=1, b=2)` are the same call.

    Attributes:
        tensors: The tensors among the arguments, in order.
        structure: The arguments `(args, kwargs)` without them.
        names: A readable name per tensor.
        autocast: What was on.
        objects: The caller's objects that the structure looks into, in order.
    """

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    names: tuple[str, ...]
    autocast: Autocast
    objects: tuple[Any, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal keys can run the same traced program: shapes, layouts, constants, autocast."""
        shapes = tuple((tensor.shape, tensor.dtype, _layout(tensor)) for tensor in self.tensors)
        constants = tuple((type(c).__name__, repr(c)) for c in self.structure.constants)
        return (self.structure.form, constants, shapes, self.autocast)

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
    structure = parts.structure((positional, named))
    for constant in structure.constants:
        if not _is_plain(constant):
            raise InputError(
                f"an argument of {type(model).__name__}.forward holds a "
                f"{type(constant).__name__}, which cannot be looked into: its tensors would be "
                f"frozen into the trace. {_TAKEN_APART}"
            )
    names = tuple(map(_readable, _paths((positional, named), set())))
    objects = tuple(parts.objects)
    return Call(tuple(parts.tensors), structure, names, Autocast.current(), objects)


def _paths(value: Any, seen: set[int]) -> Iterator[tuple[str, ...]]:
    """Where each tensor is, in the order of `_Parts`."""
    rows, _ = pytree.tree_flatten_with_path(_take_apart(value))
    for path, leaf in rows:
        keys = tuple(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)
        if isinstance(leaf, torch.Tensor):
            yield keys
        elif _is_object(leaf) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from ((*keys, *inner) for inner in _paths(dict(vars(leaf)), seen))


def _readable(path: tuple[str, ...]) -> str:
    """`input_ids` for `(1, 'input_ids')`, `args.0` for `(0, 0)`."""
    return ".".join(path[1:] if path[0] == "1" else ("args", *path[1:]))


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
        parts.structure((args, kwargs))
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
