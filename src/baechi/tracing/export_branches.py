"""Eager branches of a model while `torch.export` runs it: see `docs/runtime.md`, "Which branches".

`torch.compiler.is_exporting()` and `is_compiling()` return a flag (2.11 to 2.13), which
`torch.export` sets. Here it is a number whose truth value depends on the calling code: replacing
the functions would miss code that imported them by name, and `torch._dynamo.is_compiling` and the
like, which return the flag. Where the eager branch cannot be traced, the last caller before the
error gets True (`give_way`).

Reading a fake tensor's value is an error, except where it is known (`KnownValues`): made of shapes
and constants alone it is the same in every call of these shapes. Known values are computed on the
CPU: they are the same on every device.

Where sizes are symbols, values are those of the example's sizes, and each question that depends on
a symbol is kept with its answer (`Question`): the trace holds where the answer is the same.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
        """What the last trace asked that depends on symbolic sizes."""
        return tuple(self._known.questions)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run the model's Python inside a tracer."""
        self._last = None
        if self._all:
            yield
            return
        known = self._known = KnownValues()
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
_QUESTIONS: Final = frozenset(
    (
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__),
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.equal, torch.equal),
    )
)
_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
# Beginnings of names of what draws, of what leaves memory as it is, and of what reads strides.
_UNKNOWN: Final = ("rand", "bernoulli", "geometric", "multinomial", "empty", "new_empty", "resize")
_UNKNOWN_TOO: Final = ("as_strided", "set_", "__get__", "__set__")
_MOST: Final = 1 << 20  # elements: positions of long batches, but no masks of long sequences


@final
class KnownValues(TorchFunctionMode):
    """Keeps the values that are known while a tracer runs a model, and answers with them."""

    def __init__(self) -> None:
        super().__init__()
        # A value holds for as long as nothing writes into the tensor or a view of it.
        self._known: Any = WeakTensorKeyDictionary()  # tensor -> (version, value, recipe)
        self.answered = False
        self.questions: list[Question] = []

    def answers(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's value is known; records that the caller relies on it."""
        known = self.value(tensor) is not None
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
        recipe = None if given is None else self._recipe(func, args, kwargs)
        if given is not None and func in _QUESTIONS:
            self.answered = True
            answer = _computed(func, *given)
            if recipe is not None:
                self.questions.append(Question(recipe, answer))
            return answer
        result = func(*args, **kwargs)
        if given is not None and any(map(_is_knowable, _rows(result))):
            with suppress(RuntimeError):  # of a copy, which may have other strides
                values = _rows(_computed(func, *given))
                rows = zip(_rows(result), values, strict=True)
                for place, (row, value) in enumerate(rows):
                    if _is_knowable(row) and _form(value) == _form(row):
                        how = None if recipe is None else (recipe, place)
                        self._known[row] = (version_of(row), value, how)
        return result

    def _recipe(self, func: Any, args: Any, kwargs: Any) -> "_Recipe | None":
        """How to compute a result that depends on symbolic sizes; None for others."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        found = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                _, value, how = self._row(leaf)
                found.append(_Made(*how) if how is not None else value)
            else:
                found.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
        if any(isinstance(leaf, _Made) or _sizes_in(leaf) for leaf in found):
            return _Recipe(func, tuple(found), spec)
        return None

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


@final
@dataclass(frozen=True)
class _Recipe:
    """A function of known values and symbolic sizes; `leaves` are its flat arguments."""

    func: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def at(self, size: Callable[[Any], int], made: "dict[int, Any]") -> Any:
        """Its result where the sizes are these; `made` has the results so far."""
        if id(self) not in made:
            leaves = [
                _rows(leaf.recipe.at(size, made))[leaf.place]
                if isinstance(leaf, _Made)
                else _at(leaf, size)
                for leaf in self.leaves
            ]
            made[id(self)] = _computed(self.func, *pytree.tree_unflatten(leaves, self.spec))
        return made[id(self)]


@final
@dataclass(frozen=True)
class _Made:
    """One of the tensors that a recipe makes."""

    recipe: _Recipe
    place: int


@final
@dataclass(frozen=True)
class Question:
    """What forward asked about a value that depends on symbolic sizes, and the answer."""

    recipe: _Recipe
    answer: Any

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


def same_answers(questions: Iterable[Question], size: Callable[[Any], int]) -> bool:
    """True if every question has the same answer where the sizes are these."""
    made: dict[int, Any] = {}
    try:
        answers = [(question.recipe.at(size, made), question.answer) for question in questions]
    except (RuntimeError, IndexError, TypeError, ValueError):  # a slice of nothing, for one
        return False
    return all(type(now) is type(then) and now == then for now, then in answers)


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
    if not isinstance(result, torch.Tensor) or result.is_floating_point() or result.is_complex():
        return False
    sizes = list(result.shape)  # of what depends on values they have no hint
    return all(map(is_backed, sizes)) and math.prod(map(hint, sizes)) <= _MOST


def _form(value: Any) -> tuple[Any, ...]:
    return (tuple(map(hint, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else ()


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the function outside the tracer, on copies, since it may write into them."""
    with untraced():
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return func(*args, **kwargs)
