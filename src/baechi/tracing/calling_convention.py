"""Arguments and results of a model as flat lists of tensors, each with its structure.

The rest of Baechi sees only flat tensors. Keyword arguments, nested containers, dataclasses and
`transformers.ModelOutput` are taken apart here, on the way in, and put together here, on the way
out, so that every rung of the tracing ladder traces the same flat function.
"""

import functools
import inspect
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import nn

from baechi.errors import InputError
from baechi.torch_support.torch_internals import hooks_of
from baechi.torch_support.tracer_internals import has_own_operators, layers_fuse
from baechi.tracing.guards import Autocast
from baechi.tracing.pytrees import (
    MARK,
    Number,
    ObjectChanges,
    Parts,
    Structure,
    is_plain,
    is_record,
    mark_paths,
)

_TAKEN_APART = (
    "Tensors are found in tuples, lists, dicts, named tuples, dataclasses without slots and what "
    "is registered with torch.utils._pytree; pass and return those."
)
# Whether what this thread runs of a model is for Baechi, which traces or has a worker there: then
# the model and its parts run as they are, though they are placed.
INSIDE: Final[ContextVar[bool]] = ContextVar("inside", default=False)
# Arguments whose structure is made once; of floats 0.0 equals -0.0, and is another.
_SIMPLE: Final = frozenset((torch.Tensor, type(None), bool, int, str))
# Values that equal others which are alike, and references to what is looked at elsewhere.
_EQUAL_OR_NOT: Final = frozenset(
    (type, ABCMeta, torch.dtype, torch.device, torch.Size, weakref.ref)
)
_MOST_KINDS: Final = 256  # classes of models of which it is known how they are called
_FUNCTIONS: Final = (type, FunctionType, BuiltinFunctionType, MethodType)


@contextmanager
def inside() -> Iterator[None]:
    """Run the block as a part of a trace or of a placed step."""
    token = INSIDE.set(True)
    try:
        yield
    finally:
        INSIDE.reset(token)


@final
@dataclass(frozen=True)
class Call:
    """One call of a model, canonical: `f(1, b=2)` and `f(a=1, b=2)` are the same call.

    Hooks see how a model is called, so one that has any is called as the caller did. So is one of a
    class with a `__call__` of its own.

    Attributes:
        tensors: The tensors among the arguments, in order.
        structure: The arguments `(args, kwargs)` without them.
        autocast: The state of autocast.
        objects: The caller's lists, dicts and objects that hold them, in order.
        dims: The dimension along which each tensor is a part of a batch, None for one that is
            whole; empty where all are.
        may_ask: Whether forward may ask for values of the tensors. Not where other micro-batches,
            of which one trace is, would answer otherwise.
        defaults: The dtype that torch gives to what forward makes without naming one, and whether
            torch's layers may be fused.
    """

    tensors: tuple[torch.Tensor, ...]
    structure: Structure
    autocast: Autocast
    objects: tuple[Any, ...] = ()
    dims: tuple[int | None, ...] = ()
    may_ask: bool = True
    defaults: tuple[torch.dtype, bool] = field(
        default_factory=lambda: (torch.get_default_dtype(), layers_fuse())
    )

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal keys can run the same traced program: shapes, layouts, constants, modes."""
        shapes = [(tensor.shape, tensor.dtype, layout_of(tensor)) for tensor in self.tensors]
        constants = [(type(c).__name__, shown(c)) for c in self.structure.constants]
        rows = (*constants, *shapes)
        modes = (self.autocast, self.defaults)
        return (self.structure.form, rows, modes, self.dims, self.may_ask)

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name per tensor."""
        places = set(self.structure.places)
        found = [label for i, label in enumerate(self._labels) if i not in places]
        carried = range(len(self.tensors) - len(found))
        return (*found, *(f"number {i}" for i in carried))

    @property
    def numbered(self) -> dict[str, Any]:
        """The constants by readable names, in the order of `structure.places`."""
        constants, labels = self.structure.constants, self._labels
        return {labels[place]: constants[place] for place in self.structure.places}

    @functools.cached_property
    def _labels(self) -> list[str]:
        """A readable name for each tensor and constant."""
        marks = self.structure.mapped(lambda _: MARK)
        positional, named = marks.fill([MARK] * len(self.tensors))
        labels = (*(f"args.{i}" for i in range(len(positional))), *named)
        seen: set[int] = set()
        return [
            ".".join((label, *path))
            for label, value in zip(labels, (*positional, *named.values()), strict=True)
            for path in mark_paths(value, seen)
        ]

    def with_numbers(self, places: Sequence[int]) -> "Call":
        """The call with some of its numbers, by their places among the constants, in tensors.

        Each has a tensor after the others. An int is the first size of an empty one: a tracer that
        has symbols for sizes has one for the number then. A float is the value of one.
        """
        if not places:
            return self
        count, first, constants = iter(self.structure.places), len(self.tensors), []

        def change(constant: Any) -> Any:
            if next(count) not in places:
                return constant
            constants.append(constant)
            return Number(first + len(constants) - 1)

        structure = self.structure.mapped(change)
        carriers = (
            torch.tensor(number, dtype=torch.float64)
            if isinstance(number, float)
            else torch.empty(number, 0)
            for number in constants
        )
        return replace(self, tensors=(*self.tensors, *carriers), structure=structure)

    @property
    def shapes(self) -> str:
        """`input [2, 8], mask [8]`, for people."""
        rows = zip(self.names, self.tensors, strict=True)
        return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in rows)


def own_objects(model: nn.Module, call: Call) -> Call:
    """The call with objects that are not the caller's, which shall not change."""
    args, kwargs = call.structure.fill(call.tensors)
    return replace(call, objects=canonical_call(model, args, kwargs).objects)


def beside(model: nn.Module, call: Call) -> Call:
    """The call with its tensors on the model's device, since tracing needs a single device."""
    home = next((t.device for t in [*model.parameters(), *model.buffers()]), None)
    if home is None or home.type == "meta" or all(t.device == home for t in call.tensors):
        return call
    rows = (
        t if t.is_meta else t.detach().to(home).requires_grad_(t.requires_grad)
        for t in call.tensors
    )
    return replace(call, tensors=tuple(rows))


def look(value: Any, depth: int = 12) -> Any:
    """Equal for values that are alike to a model.

    Of objects, such as a cache of keys or a batch of graphs, it is what they hold.

    Raises:
        TypeError: An object that may be anything, or one inside of too many others.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return value.shape, value.dtype, value.device
    if value is None or kind in (bool, int, float, str):
        return kind, value
    if kind in _EQUAL_OR_NOT:
        return kind if kind is weakref.ref else value
    if depth == 0:
        raise TypeError
    if kind in (list, tuple):
        return kind, *[look(each, depth - 1) for each in value]
    if kind is not dict:
        if not is_record(value):
            raise TypeError
        value = vars(value)
    return kind, *value, *[look(each, depth - 1) for each in value.values()]


def changes(before: Call, now: Call) -> list[str]:
    """What is new in the arguments of a call: `timestep is 450 (was 540)`."""
    if before.structure.form != now.structure.form:
        return ["its arguments are nested in another way, or there are others"]
    old = before.numbered
    rows = [
        f"{name} is {value!r} (was {old[name]!r})"
        for name, value in now.numbered.items()
        if name in old and not isinstance(old[name], Number) and shown(value) != shown(old[name])
    ]
    shapes = zip(now.names, now.tensors, before.tensors, strict=False)
    return rows + [
        f"{name} has {list(mine.shape)} (was {list(theirs.shape)})"
        for name, mine, theirs in shapes
        if mine.shape != theirs.shape
    ]


def shown(constant: Any) -> str | int:
    """Equal for equal constants; an object that can be called, as a module, equals itself alone."""
    if callable(constant) and not isinstance(constant, _FUNCTIONS):
        return id(constant)  # the trace keeps it
    return repr(constant)


def layout_of(tensor: torch.Tensor) -> tuple[int, ...] | torch.layout | None:
    """Its strides where they matter: whether `contiguous` copies follows from them, for one.

    None stands for a contiguous tensor.
    """
    if tensor.layout is not torch.strided:
        return tensor.layout
    if tensor.is_contiguous():
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
    kind: Any = type(model)
    if _has_own_call(kind):
        return _call(model, tuple(args), dict(kwargs or {}))
    forward, given = model.forward, (*args, *(kwargs or {}).values())
    function = getattr(forward, "__func__", None)
    names = tuple(kwargs or ())
    order = (
        _order_in(inspect.signature(forward), len(args), names)
        if function is None
        else _order(function, len(args), names)
    )
    if order is None:
        signature = inspect.signature(forward)
        try:
            signature.bind(*args, **(kwargs or {}))
        except TypeError as error:
            raise InputError(
                f"the arguments do not fit {type(model).__name__}.forward{signature}: {error}. "
                "Give what one real call of the model gets."
            ) from None
    positional, named = order or ((), ())
    if hooks_of(model, "_forward_hooks") or hooks_of(model, "_forward_pre_hooks"):
        return _call(model, tuple(args), dict(kwargs or {}))
    return _call(model, tuple([given[i] for i in positional]), {n: given[i] for n, i in named})


@functools.lru_cache(_MOST_KINDS)
def _has_own_call(kind: Any) -> bool:
    """True if a class has a `__call__` of its own, whose signature may be another."""
    calls = (each for each in kind.__mro__ if "__call__" in vars(each))
    own = (each for each in calls if each.__module__.partition(".")[0] != "baechi")
    return next(own) is not nn.Module


def _call(model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Call:
    """The call with these arguments; raises an `InputError` if a trace could not hold them."""
    given = (*positional, *named.values())
    kinds = tuple(map(type, given))
    if _SIMPLE.issuperset(kinds):
        tensors = tuple([value for value in given if type(value) is torch.Tensor])
        rest = tuple([None if type(value) is torch.Tensor else value for value in given])
        structure = _simple(len(positional), tuple(named), kinds, rest)
        return Call(tensors, structure, Autocast.current())
    parts = Parts(look_into=True)
    structure = parts.arguments(positional, named)
    for tensor in parts.tensors:
        if type(tensor) is not torch.Tensor and has_own_operators(type(tensor)):
            raise InputError(
                f"an argument of {type(model).__name__}.forward is a {type(tensor).__name__}, "
                "whose own __torch_function__ a placed model would not run. Give its values, "
                "x.as_subclass(torch.Tensor)."
            )
    strange = _strange(structure)
    if strange:
        raise InputError(
            f"an argument of {type(model).__name__}.forward holds a {strange}, which cannot be "
            f"looked into: its tensors would be frozen into the trace. {_TAKEN_APART} Or place the "
            "submodule that gets tensors alone: model.part = baechi.place(model.part, devices)."
        )
    return Call(tuple(parts.tensors), structure, Autocast.current(), tuple(parts.objects))


def flat_model(
    model: nn.Module,
    call: Call,
    around: Callable[[nn.Module, Sequence[Any]], AbstractContextManager[Any]] | None = None,
    check: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
) -> tuple[nn.Module, list[Structure]]:
    """The model as a module from flat tensors to flat tensors, for every rung to trace.

    Args:
        model: The model.
        call: The call whose structure it takes.
        around: A context for each run of the model's forward, on these tensors.
        check: Is called with the tensors and the outputs of each run.

    Returns:
        The module, whose `forward` has one argument per tensor of the call and whose only
        submodule is `model`; and a list that gets the structure around its outputs, at each run:
        of what forward returns, and of how it changes the objects of the call.
    """
    returned: list[Structure] = []
    structure = call.structure

    def run(model: nn.Module, tensors: Sequence[Any]) -> tuple[Any, ...]:
        args, kwargs = structure.fill(tensors)
        parts = Parts(look_into=True)
        parts.arguments(args, kwargs)
        changes = ObjectChanges(parts.objects)
        with nullcontext() if around is None else around(model, tensors):
            result = model(*args, **kwargs)
        left = Parts(look_into=True, given=changes.objects)
        shell = left.structure((result, changes.found()))
        strange = _strange(shell)
        if strange:
            raise TypeError(
                f"forward returns a {strange}, which cannot be looked into. {_TAKEN_APART}"
            )
        if check is not None:
            check(tensors, left.tensors)
        returned.append(shell)
        return tuple(left.tensors)

    # fx reads the arguments from the code object of the class's forward: varargs would be one.
    names = [f"x{i}" for i in range(len(call.tensors))]
    scope: dict[str, Any] = {"run": run}
    arguments, values = ", ".join(["self", *names]), "".join(f"{name}, " for name in names)
    exec(f"def forward({arguments}): return run(self.model, ({values}))", scope)
    module = type("FlatModel", (nn.Module,), {"forward": scope["forward"]})()
    module.training = model.training
    module.model = model
    return module, returned


def _strange(structure: Structure) -> str:
    """The class of a leaf that a trace cannot hold; empty if there is none."""
    rows = (type(leaf).__name__ for leaf in structure.constants if not is_plain(leaf))
    return next(rows, "")


@functools.lru_cache(maxsize=256)
def _simple(n: int, names: tuple[str, ...], kinds: tuple[type, ...], rest: tuple[Any, ...]) -> Any:
    """The structure of such arguments, of which n have no name; None is in the tensors' places."""
    rows = zip(kinds, rest, strict=True)
    values = [torch.empty(0) if kind is torch.Tensor else value for kind, value in rows]
    return Parts().arguments(tuple(values[:n]), dict(zip(names, values[n:], strict=True)))


_Order = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]


@functools.lru_cache(maxsize=256)
def _order(function: Callable[..., Any], n: int, names: tuple[str, ...]) -> _Order | None:
    """The same of a method's function: cached, since every call needs it."""
    return _order_in(inspect.signature(MethodType(function, object())), n, names)


def _order_in(signature: inspect.Signature, n: int, names: tuple[str, ...]) -> _Order | None:
    """The places among those given of the arguments without a name, and of those with one.

    Given are n without a name and then some with one. As many get a name as the signature allows,
    in its order. None if they do not fit.
    """
    try:
        bound = signature.bind(*range(n), **{name: n + i for i, name in enumerate(names)})
    except TypeError:
        return None
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    has_rest = any(kinds[name] is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments)
    positional: list[int] = []
    named: dict[str, int] = {}
    for name, value in bound.arguments.items():
        kind = kinds[name]
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)  # in the caller's order, which forward sees
        elif kind is inspect.Parameter.POSITIONAL_ONLY or (
            has_rest and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(value)
        else:
            named[name] = value
    return tuple(positional), tuple(named.items())
