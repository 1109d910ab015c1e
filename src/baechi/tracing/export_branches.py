"""Eager branches of a model while `torch.export` runs it: see `docs/runtime.md`, "Which branches".

`torch.compiler.is_exporting()` and `is_compiling()` return a flag (2.11 to 2.13), which
`torch.export` sets. Here it is a number whose truth value depends on the calling code: replacing
the functions would miss code that imported them by name, and `torch._dynamo.is_compiling` and the
like, which return the flag. Where the eager branch cannot be traced, the last caller before the
error gets True (`give_way`).

Reading a fake tensor's value is an error, except where it is known (`KnownValues`): made of shapes
and constants alone it is the same in every call of these shapes. Known values are computed on the
CPU: they are the same on every device.

Where sizes are symbols, values are those of the example's sizes. Integers and flags among the
arguments are known, too, but of these forward may ask truth values alone: `if mask.all():`. Each
question that depends on a symbol or an argument is kept with its answer (`Question`): the trace
holds where the answer is the same.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from baechi.torch_support.symbolic_sizes import hint, is_backed
from baechi.torch_support.torch_internals import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    refusals,
    untraced,
    version_of,
)


@final
class EagerBranches:
    """The answers given to a model's code in one trace, over all its attempts."""

    def __init__(self) -> None:
        self._exporting: dict[tuple[CodeType, int], str] = {}
        self._last: tuple[CodeType, int] | None = None
        self._known = KnownValues()
        self.nested = False  # whether there is a compiler inside, which reads what is around it
        self._all = False

    def __str__(self) -> str:
        """The functions that see an export, for the list of attempts."""
        names = "the model" if self._all else ", ".join(dict.fromkeys(self._exporting.values()))
        return f", export branches of {names}" if names else ""

    def give_way(self) -> bool:
        """After an error, let one more caller see the export, then all; False if all do already."""
        if self._all or not (self._last or self._known.answered or self.nested):
            return False
        if self.nested or self._last is None or self._last in self._exporting:
            self._all = True
        else:
            self._exporting[self._last] = self._last[0].co_qualname
        return True

    @property
    def questions(self) -> "tuple[Question, ...]":
        """What the last trace asked that depends on symbolic sizes or on arguments."""
        return tuple(self._known.questions)

    @contextmanager
    def taken(
        self, tensors: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Run the model's Python inside a tracer, whose arguments stand for those of an example."""
        self._last = None
        known = self._known = KnownValues()
        if self._all:
            yield
            return
        known.give(tensors, examples)
        flag = _Flag()
        flag.branches, flag.thread = self, threading.get_ident()

        class Meta(type(FakeTensor)):  # type: ignore[misc]
            def __instancecheck__(cls, value: Any) -> bool:
                return isinstance(value, FakeTensor) and not known.answers(value)

        class Shown(FakeTensor, metaclass=Meta):
            """Tensors as the model's code sees them: fake, except where their value is known."""

        def seen(name: str) -> Any:
            if name != "FakeTensor":
                raise AttributeError(f"module 'torch._subclasses' has no attribute {name!r}")
            mine = threading.get_ident() == flag.thread
            is_torch = _is_torch(sys._getframe(1).f_globals)
            return Shown if mine and not is_torch else FakeTensor

        script = torch.jit.ScriptFunction
        call = script.__call__

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            # The check is in C++, on behalf of the caller. While exporting, the Python that was
            # scripted runs; otherwise the compiled code, parts of which autograd cannot see.
            if threading.get_ident() != flag.thread:
                return call(function, *args, **kwargs)
            with patch.object(torch.compiler, "_is_exporting_flag", True):
                return call(function, *args, **kwargs)

        with (
            patch.object(torch.compiler, "_is_compiling_flag", flag),
            patch.object(torch.compiler, "_is_exporting_flag", flag),
            patch.object(script, "__call__", scripted),
            _seen_through(torch._subclasses, "FakeTensor", seen),
            known,
        ):
            try:
                yield
            except refusals():  # of one inside, as in `torch.cond`: it reads all of this
                self.nested = True
                raise

    def answer(self, code: CodeType, instruction: int) -> bool:
        """The answer for one instruction of the code that checks for an export."""
        self._last = code, instruction
        return self._last in self._exporting


@final
class _Flag(int):
    """True to torch's own code in the tracer's thread; to most others 0, however they look."""

    branches: EagerBranches
    thread: int

    def __bool__(self) -> bool:
        if threading.get_ident() != self.thread:
            return False
        asker = sys._getframe(1)
        if _is_torch(asker.f_globals):
            return True
        return self.branches.answer(asker.f_code, asker.f_lasti)


def _is_torch(scope: dict[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "torch"


@contextmanager
def _seen_through(module: Any, name: str, seen: Callable[[str], Any]) -> Iterator[None]:
    """Let a function resolve a name of a module, possibly differently for each caller."""
    own = getattr(module, name)
    module.__getattr__ = seen
    delattr(module, name)
    try:
        yield
    finally:
        setattr(module, name, own)
        del module.__getattr__


_FACTORIES: Final = frozenset(
    (torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.tensor)
)
_TRUTHS: Final = frozenset(
    (
        *(torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero),
        *(torch.Tensor.equal, torch.equal),
    )
)
_NUMBERS: Final = frozenset(
    (torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.item, torch.Tensor.tolist)
)
_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
# Beginnings of names of what draws, of what leaves memory as it is, and of what reads strides.
_UNKNOWN: Final = ("rand", "bernoulli", "geometric", "multinomial", "empty", "new_empty", "resize")
_UNKNOWN_TOO: Final = ("as_strided", "set_", "__get__", "__set__")
# Functions that make and move floats and round none, for masks of zeros and -inf.
_EXACT: Final = frozenset(
    (
        *("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros"),
        *("triu", "tril", "triu_", "tril_", "masked_fill", "masked_fill_", "where", "fill_"),
        *("expand", "expand_as", "unsqueeze", "view", "reshape", "repeat", "__getitem__", "to"),
    )
)
_MOST: Final = 1 << 20  # elements: positions of long batches, but no masks of long sequences


@final
class KnownValues(TorchFunctionMode):
    """Keeps the values that are known while a tracer runs a model, and answers with them."""

    def __init__(self) -> None:
        super().__init__()
        # A value holds for as long as nothing writes into the tensor or a view of it.
        # Of each tensor its version, its value, and how that is made if not of constants alone.
        self._known: Any = WeakTensorKeyDictionary()
        self.answered = False
        self.questions: list[Question] = []

    def give(self, tensors: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]) -> None:
        """Know the numbers and flags among a tracer's arguments by those of an example."""
        for index, (row, value) in enumerate(zip(tensors, examples, strict=True)):
            if _is_knowable(row) and not value.is_meta and value.layout is torch.strided:
                with untraced():  # a copy: the trace is not to see the example itself
                    known = value.cpu().clone()
                self._known[row] = (version_of(row), known, _Argument(index))

    def answers(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's value is known; records that the caller relies on it.

        Of what depends on arguments this is said of flags: those are masks, which forward drops if
        they are all true, while other values would be looked at for warnings alone.
        """
        row = self._row(tensor)
        known = row is not None and (tensor.dtype is torch.bool or not _needs_arguments(row[2]))
        self.answered |= known
        return known

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's value, if it is known."""
        row = self._row(tensor)
        return None if row is None else row[1]

    def _row(self, tensor: torch.Tensor) -> Any:
        row = self._known.get(tensor)
        return row if row is not None and row[0] == version_of(tensor) else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DATA:
            self._known.pop(args[0], None)  # what is written there changes no version
        given = self._given(func, args, kwargs)
        leaves = () if given is None else self._leaves(args, kwargs)
        if given is not None and _asks(func, args, leaves):
            self.answered = True
            answer, recipe = _computed(func, leaves, given)
            if recipe is not None:
                self.questions.append(Question(recipe, answer))
            return answer
        result = func(*args, **kwargs)
        knowable = _is_exact if getattr(func, "__name__", "") in _EXACT else _is_knowable
        if given is not None and any(map(knowable, _rows(result))):
            with suppress(RuntimeError):  # of a copy, which may have other strides
                values, recipe = _computed(func, leaves, given)
                rows = zip(_rows(result), _rows(values), strict=True)
                for place, (row, value) in enumerate(rows):
                    if knowable(row) and _form(value) == _form(row):
                        how = None if recipe is None else _Made(recipe, place)
                        self._known[row] = (version_of(row), value, how)
        return result

    def _leaves(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """The flat arguments, with what is known of the tensors."""
        found: list[Any] = []
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                _, value, how = self._row(leaf)
                found.append(value if how is None else how)
            else:
                found.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
        return tuple(found)

    def _given(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with values for tensors, on the CPU; None if one is not known."""
        if isinstance(func, OpOverload | OpOverloadPacket):  # it may be anyone's, and do anything
            return None
        if any(isinstance(arg, torch.Tensor) and self.value(arg) is None for arg in args):
            return None  # nearly always
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known: list[Any] = []
        some = func in _FACTORIES
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                value = self.value(leaf)
                if value is None:
                    return None
                known.append(value)
                some = True
            elif isinstance(leaf, torch.device):
                known.append(torch.device("cpu"))
            elif _is_number(leaf):
                known.append(_at(leaf, hint))
            else:
                return None
        name = getattr(func, "__name__", "")
        if not some or name.startswith((*_UNKNOWN, *_UNKNOWN_TOO)):
            return None
        given, named = pytree.tree_unflatten(known, spec)
        return given, named


def _computed(
    func: Any, leaves: tuple[Any, ...], given: tuple[tuple[Any, ...], dict[str, Any]]
) -> "tuple[Any, _Recipe | None]":
    """The result of a function, and how to make it if symbolic sizes or arguments are in it."""
    with untraced():
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        result = func(*copies[0], **copies[1])
    if not any(isinstance(leaf, _Made | _Argument) or _sizes_in(leaf) for leaf in leaves):
        return result, None
    tensors = [leaf for leaf in pytree.tree_leaves(copies) if isinstance(leaf, torch.Tensor)]
    writes = any(tensor._version for tensor in tensors)
    return result, _Recipe(func, leaves, pytree.tree_structure(given), writes)


def _asks(func: Any, args: Any, leaves: Sequence[Any]) -> bool:
    """True if a function asks for values that may be told: of arguments truth values alone."""
    if func in _TRUTHS or (func is torch.Tensor.item and args[0].dtype is torch.bool):
        return True
    return func in _NUMBERS and not any(map(_needs_arguments, leaves))


def _needs_arguments(leaf: Any) -> bool:
    return isinstance(leaf, _Argument) or (isinstance(leaf, _Made) and leaf.recipe.needs_arguments)


@final
@dataclass(frozen=True)
class _Argument:
    """One of the tensors among the arguments of a call."""

    index: int


@final
@dataclass(frozen=True)
class _Recipe:
    """A function of known values, symbolic sizes and arguments.

    Attributes:
        func: The function.
        leaves: What it gets, flat.
        spec: The structure of that.
        writes: Whether it writes into what it gets.
    """

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    writes: bool

    @cached_property
    def needs_arguments(self) -> bool:
        """True if the result depends on arguments of the call, and not on their sizes alone."""
        return any(map(_needs_arguments, self.leaves))

    @cached_property
    def _places(self) -> Any:
        """The arguments, with the place of each leaf for the leaf."""
        return pytree.tree_unflatten(range(len(self.leaves)), self.spec)

    def at(self, values: "_Values") -> Any:
        """Its result where sizes and arguments have these values."""
        if id(self) not in values.made:
            leaves = list(map(values.of, self.leaves))
            if self.writes:
                leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = (_filled(part, leaves) for part in self._places)
            values.made[id(self)] = self.func(*args, **kwargs)
        return values.made[id(self)]


@final
@dataclass(frozen=True)
class _Made:
    """One of the tensors that a recipe makes."""

    recipe: _Recipe
    place: int


@final
class _Values:
    """The values of sizes and arguments in one call, and what was made of them so far."""

    def __init__(self, size: Callable[[Any], int], tensors: Sequence[torch.Tensor]) -> None:
        self._size = size
        self._tensors = tensors
        self.made: dict[int, Any] = {}

    def of(self, leaf: Any) -> Any:
        """The value of a leaf."""
        if isinstance(leaf, _Made):
            return _rows(leaf.recipe.at(self))[leaf.place]
        if isinstance(leaf, _Argument):
            return self._tensors[leaf.index].cpu()
        return _at(leaf, self._size)


@final
@dataclass(frozen=True)
class Question:
    """What forward asked about a value of symbolic sizes or arguments, and the answer."""

    recipe: _Recipe
    answer: Any

    @property
    def needs_arguments(self) -> bool:
        """True if the answer depends on the values of arguments."""
        return self.recipe.needs_arguments

    @property
    def sizes(self) -> list[torch.SymInt]:
        """The symbolic sizes that it depends on."""
        found: dict[int, torch.SymInt] = {}
        left, seen = [self.recipe], {id(self.recipe)}
        while left:
            for leaf in left.pop().leaves:
                if isinstance(leaf, _Made) and id(leaf.recipe) not in seen:
                    seen.add(id(leaf.recipe))
                    left.append(leaf.recipe)
                found |= {id(size): size for size in _sizes_in(leaf)}
        return list(found.values())


def same_answers(
    questions: Sequence[Question],
    size: Callable[[Any], int],
    tensors: Sequence[torch.Tensor] = (),
) -> bool:
    """True if every question has the same answer where sizes and arguments are these."""
    if not questions:
        return True
    values = _Values(size, tensors)
    try:
        with untraced():
            answers = [(question.recipe.at(values), question.answer) for question in questions]
    except (RuntimeError, IndexError, TypeError, ValueError):  # a slice of nothing, for one
        return False
    return all(type(now) is type(then) and now == then for now, then in answers)


def _filled(places: Any, leaves: Sequence[Any]) -> Any:
    """Nested tuples, lists and dicts with leaves for their places; pytree takes thrice the time."""
    if isinstance(places, int):
        return leaves[places]
    if isinstance(places, dict):
        return {key: _filled(part, leaves) for key, part in places.items()}
    return type(places)([_filled(part, leaves) for part in places])


def _sizes_in(leaf: Any) -> list[torch.SymInt]:
    parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return [part for part in parts if isinstance(part, torch.SymInt)]


def _at(leaf: Any, size: Callable[[Any], int]) -> Any:
    """A number, or a slice, with ints for symbolic sizes."""
    if isinstance(leaf, slice):
        return slice(*(_at(part, size) for part in (leaf.start, leaf.stop, leaf.step)))
    return size(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, slice):
        return all(part is None or is_backed(part) for part in (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, torch.SymInt):
        return is_backed(leaf)
    plain = (int, float, bool, type(None), type(...), torch.dtype, torch.layout)
    return type(leaf) in plain or isinstance(leaf, torch.memory_format)


def _rows(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _is_knowable(result: Any) -> bool:
    return _is_exact(result) and not result.is_floating_point()


def _is_exact(result: Any) -> bool:
    """True if a tensor has values that every device has, where its function does not round."""
    if not isinstance(result, torch.Tensor) or result.is_complex():
        return False
    sizes = list(result.shape)  # of what depends on values they have no hint
    return all(map(is_backed, sizes)) and math.prod(map(hint, sizes)) <= _MOST


def _form(value: Any) -> tuple[Any, ...]:
    return (tuple(map(hint, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else ()
