"""Values that are known while a tracer runs a model, and the answers to what forward asks of them.

They are computed on the CPU: they are the same on every device. What forward asks about those that
follow from sizes or arguments is kept (`Questions`): the trace holds where the answers are the
same. docs/runtime.md, "Which branches a trace takes", has which values are known.
"""

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from baechi.torch_support.symbolic_sizes import SYMBOLIC, hint, is_backed
from baechi.torch_support.torch_internals import version_of
from baechi.torch_support.tracer_internals import (
    FunctionMode,
    OpOverload,
    OpOverloadPacket,
    untraced,
)
from baechi.tracing.drawn_fractions import DrawnFractions
from baechi.tracing.model_code import whole_number
from baechi.tracing.questions import Questions

_FACTORIES: Final = frozenset(
    (torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.tensor, torch.as_tensor)
)
_TRUTHS: Final = frozenset(
    (
        *(torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero),
        *(torch.Tensor.equal, torch.equal),
    )
)
_NUMBERS: Final = frozenset(
    (
        *(torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.item, torch.Tensor.tolist),
        whole_number,
    )
)
_SIZED: Final = frozenset(
    ("view", "reshape", "expand", "split", "narrow", "zeros", "ones", "full", "pad")
)
_SIZED_AS: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.expand_as: torch.Tensor.expand,
    torch.Tensor.view_as: torch.Tensor.view,
    torch.Tensor.reshape_as: torch.Tensor.reshape,
}
_INDEXED: Final = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_DATA: Final[Any] = vars(torch._C.TensorBase)["data"].__get__
# Beginnings of names of what draws, of what leaves memory as it is, and of what reads strides.
_UNKNOWN: Final = ("rand", "bernoulli", "geometric", "multinomial", "empty", "new_empty", "resize")
_UNKNOWN_TOO: Final = ("as_strided", "set_", "__get__", "__set__")
# Functions that make, move and cast floats alike on every device: masks of ones, zeros and -inf.
_EXACT: Final = frozenset(
    (
        *("full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros"),
        *("triu", "tril", "triu_", "tril_", "masked_fill", "masked_fill_", "where", "fill_"),
        *("expand", "expand_as", "unsqueeze", "view", "reshape", "flatten", "repeat"),
        *("float", "double", "half", "bfloat16", "_with_item", "cat", "stack", "clone"),
        *("__getitem__", "to"),
    )
)
# Functions that round as IEEE 754 says, hence alike on every device.
_ROUNDED: Final = frozenset(
    (
        *("add", "sub", "__rsub__", "mul", "neg", "ceil", "floor", "trunc", "round", "float"),
        "_quotient",
    )
)
_SINGLE: Final = (torch.float32, torch.float64)
_WORDS: Final = ("constant", "ij", "floor", "trunc")  # of `pad`, `meshgrid` and `div`
_MOST: Final = 1 << 20  # elements: positions of long batches, but no masks of long sequences
_MOST_CHOSEN: Final = 1 << 26  # of what arguments choose by: images, and masks of their pixels
# Functions by which forward sees which floats of its arguments are some number, as padding is 0.
_EQUAL: Final = frozenset(("eq", "ne", "__eq__", "__ne__"))
_COMPARED: Final = _EQUAL | {"view", "reshape", "flatten", "unsqueeze", "to"}


@final
class KnownValues(FunctionMode):
    """Keeps the values that are known while a tracer runs a model, and answers with them."""

    def __init__(self, numbers: bool, choices: bool) -> None:
        super().__init__()
        self._numbers = numbers  # of arguments, too
        self._choices = choices  # and what they choose
        self._most = _MOST_CHOSEN if choices else _MOST  # elements of a value
        # A value holds for as long as nothing writes into the tensor or a view of it.
        # Of each tensor its version, its value, and the node that makes it if it is no constant.
        self._known: Any = WeakTensorKeyDictionary()
        self._compared: Any = WeakTensorKeyDictionary()  # floats that are known to compare alone
        self._fractions = DrawnFractions()
        self._buffers: list[tuple[torch.Tensor, int, fx.Node]] = []
        self.answered = False
        self.questions = Questions()

    def give(self, tensors: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]) -> None:
        """Know the numbers, flags and masks among a tracer's arguments by those of an example."""
        for index, (row, value) in enumerate(zip(tensors, examples, strict=bool(examples))):
            told = self._is_exact(row) and not value.is_meta and value.layout is torch.strided
            compared = told and not self._is_knowable(row) and not _is_mask(value)
            if told and (self._choices or not compared):
                with untraced():  # a copy: the trace is not to see the example itself
                    known = value.cpu().clone()
                self._known[row] = (version_of(row), known, self.questions.argument(index))
                if compared:
                    self._compared[row] = True

    def give_buffers(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Know the single integers among a model's buffers, such as strides and kernel sizes."""
        for row, own in buffers:
            if own.dtype is torch.int64 and not own.dim() and not own.is_meta:
                with untraced():
                    known = own.detach().cpu().clone()
                self._known[row] = (version_of(row), known, self.questions.buffer(own, known))
                self._buffers.append((row, *self._known[row][::2]))

    def refuse_counters(self) -> None:
        """Refuse that forward reads the number of a buffer that it changes for the next call."""
        asked = self.questions.forget_unasked()
        for row, version, node in self._buffers:
            if version_of(row) != version and asked.is_argument(node):
                raise TypeError("forward reads the number in a buffer that it writes")

    def answers(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's value is known; records that the caller relies on it.

        Not of integers among the arguments: these would be looked at for warnings alone, while
        forward drops masks of flags, and of what it computes, that mask nothing.
        """
        row = self._row(tensor)
        known = row is not None and (
            tensor.dtype is torch.bool or row[2] is None or not self.questions.is_argument(row[2])
        )
        self.answered |= known
        return known

    def _row(self, tensor: torch.Tensor) -> Any:
        row = self._known.get(tensor)
        return row if row is not None and row[0] == version_of(tensor) else None

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, from known values where that may be."""
        made = func in (torch.tensor, torch.as_tensor)
        if made and _are_scalars(*args) and kwargs.keys() <= {"dtype", "device"}:
            stacked = self.run(torch.stack, args, {})  # it would read the data of fake tensors
            return self.run(torch.Tensor.to, (stacked,), kwargs) if kwargs else stacked
        if func is torch.as_tensor and len(args) == 1 and _lists_symbols(args[0]):
            func = torch.tensor  # in an export it takes symbols, where the other fixes them
        if func == _DATA:
            self._known.pop(args[0], None)  # what is written there changes no version
        if func in _SIZED_AS and len(args) == 2 and self._row(args[0]) is not None:
            func, args = _SIZED_AS[func], (args[0], args[1].shape)  # of the other its sizes alone
        if self._numbers:
            args = self._with_numbers(func, args)
        known = self._known_arguments(func, args, kwargs)
        make = (self._counted(func, args, kwargs) if self._choices else None) or func
        if known is None:
            return self._drawn(func, args, kwargs, make(*args, **kwargs))
        if self._may_tell(func, args):
            self.answered = True
            answer, node = self._computed(func, *known)
            if node is not None:
                self.questions.ask(node, answer)
            return answer
        base = self._base(args)
        result = make(*args, **kwargs)
        if func is torch.Tensor.__setitem__:
            result, func = args[0], _with_item
        if self._numbers and not kwargs and getattr(func, "__name__", "") in ("div", "true_divide"):
            func = _quotient
        if isinstance(result, torch.Tensor) and not _is_sized(result):
            return self._told(result, *self._computed(func, *known))
        self._keep(func, args, kwargs, known, result)
        if base is not None and version_of(args[0]) != base[0]:
            self._write(args[0], *base)
        return result

    def _keep(
        self, func: Callable[..., Any], args: Any, kwargs: Any, known: tuple[Any, Any], result: Any
    ) -> None:
        """Keep the value of a result that is known, too."""
        name = getattr(func, "__name__", "")
        knowable = self._is_exact if name in _EXACT else self._is_knowable
        compared = name in _COMPARED and args[0] in self._compared
        if compared and name not in _EQUAL:
            knowable = self._is_float
        if self._numbers and name in _ROUNDED and not kwargs:
            knowable = self._is_single
        if not any(map(knowable, _rows(result))):
            return
        with suppress(RuntimeError, ValueError):  # of a copy, which may have other strides
            values, node = self._computed(func, *known)
            several = isinstance(values, tuple | list)
            for place, (row, value) in enumerate(zip(_rows(result), _rows(values), strict=True)):
                if knowable(row) and _form(value) == _form(row):
                    part = node
                    if node is not None and several:
                        part = self.questions.made(operator.getitem, ((node, place), {}))
                    self._known[row] = (version_of(row), value, part)
                    if compared and row.is_floating_point():
                        self._compared[row] = True

    def _drawn(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """A result of what is not known; with its value, if all numbers that may be drawn agree."""
        answers = self._fractions.answers(func, args, kwargs, result)
        if len(answers) == 1 and self._is_knowable(result):
            with untraced():
                value = torch.full(tuple(map(hint, result.shape)), *answers)
            self._known[result] = (version_of(result), value, None)
        return result

    def _base(self, args: tuple[Any, ...]) -> Any:
        """What is known of the tensor of which a known first argument is a view."""
        base = args[0]._base if args and isinstance(args[0], torch.Tensor) else None
        return None if base is None else self._row(base)

    def _write(self, view: torch.Tensor, _: int, value: torch.Tensor, node: Any) -> None:
        """Know a tensor after a known value was written into a view of it, as by `mask[0] |= x`."""
        base, row = view._base, self._row(view)
        if row is None or base is None or value.stride() != base.stride():
            return
        form = (view.shape, view.stride(), view.storage_offset() - base.storage_offset())
        _, part, how = row
        old, new = (value if node is None else node, part if how is None else how)
        found = self._computed(_with_view, ((value, part, *form), {}), ((old, new, *form), {}))
        self._known[base] = (version_of(base), *found)

    def _with_numbers(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with numbers for tensors that are sizes or bounds, which C++ would read."""

        def number(leaf: Any) -> Any:
            scalar = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.int64 and not leaf.dim()
            known = scalar and self._row(leaf) is not None
            return self.run(torch.Tensor.__index__, (leaf,), {}) if known else leaf

        if func in _INDEXED:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(row, slice) for row in index):
                rows = (fx.node.map_aggregate(r, number) if type(r) is slice else r for r in index)
                return (args[0], tuple(rows), *args[2:])
        if getattr(func, "__name__", "") not in _SIZED:
            return args
        own = bool(args) and isinstance(args[0], torch.Tensor)
        return (*args[:own], *(fx.node.map_aggregate(arg, number) for arg in args[own:]))

    def _counted(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """A function that takes what a known mask chooses, of which the number alone is a question.

        None in the place of any other function.
        """
        if func in _INDEXED:
            tensor, mask, *_ = args
            is_mask = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.dim()
            sized = func is torch.Tensor.__getitem__ or (is_mask and mask.dim() < tensor.dim())
            n = self._count(mask) if is_mask and sized else None
            return None if n is None else partial(_chosen, func, n)
        name, single = getattr(func, "__name__", ""), len(args) == 1
        if single and (name == "nonzero" or (name == "where" and not kwargs)):
            options = {"as_tuple": name == "where", **kwargs}
            n = self._count(args[0]) if options.keys() == {"as_tuple"} else None
            return None if n is None else lambda mask, **_: _places(n, mask, **options)
        return None

    def _count(self, mask: torch.Tensor) -> int | None:
        """How many elements of a known mask are true; None if it is not known."""
        row = self._row(mask)
        if row is None:
            return None
        times: Any = 1
        while mask.dim() and row[1].stride(-1) == 0:  # all of a last dimension are alike
            times, mask = times * mask.shape[-1], self.run(torch.Tensor.select, (mask, -1, 0), {})
            row = self._row(mask)
        number = self.run(torch.count_nonzero, (mask,), {})
        return times * self.run(torch.Tensor.item, (number,), {})  # type: ignore[no-any-return]

    def _told(self, made: torch.Tensor, value: torch.Tensor, node: fx.Node | None) -> torch.Tensor:
        """What was made of known values that decide its sizes: their result, if it may be told."""
        told = self._choices or node is None or not self.questions.needs_arguments(node)
        if not told or not self._is_knowable(value):
            return made
        rows = value.tolist()
        if node is not None:
            self.questions.ask(self.questions.made(torch.Tensor.tolist, ((node,), {})), rows)
        made = torch.tensor(rows, dtype=value.dtype, device=made.device).reshape(value.shape)
        self._known[made] = (version_of(made), value, node)
        self.answered = True
        return made

    def _may_tell(self, func: Any, args: Any) -> bool:
        """True if a function asks for values that may be told; of arguments often no numbers."""
        if func in _TRUTHS or (func is torch.Tensor.item and args[0].dtype is torch.bool):
            return True
        node = self._row(args[0])[2] if func in _NUMBERS else None
        told = self._numbers or node is None or not self.questions.needs_arguments(node)
        return func in _NUMBERS and told

    def _known_arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """The arguments as values, on the CPU; and with nodes for the values that may change.

        None if one is not known.
        """
        if isinstance(func, OpOverload | OpOverloadPacket):  # it may be anyone's, and do anything
            return None
        if any(isinstance(arg, torch.Tensor) and self._row(arg) is None for arg in args):
            return None  # nearly always
        if getattr(func, "__name__", "").startswith((*_UNKNOWN, *_UNKNOWN_TOO)):
            return None
        rows: dict[int, Any] = {}
        some = func in _FACTORIES
        compares = getattr(func, "__name__", "") in _COMPARED

        def value(leaf: Any) -> Any:
            nonlocal some
            if isinstance(leaf, torch.Tensor):
                row = rows[id(leaf)] = self._row(leaf)
                if row is None or (leaf in self._compared and not compares):
                    raise LookupError
                some = True
                return row[1]
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not _is_number(leaf):
                raise LookupError
            return hint(leaf)

        def node(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                _, known, how = rows[id(leaf)]
                return known if how is None else how
            if isinstance(leaf, torch.SymInt):
                return self.questions.size(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        try:
            values = fx.node.map_aggregate((args, kwargs), value)
        except LookupError:
            return None
        return (values, fx.node.map_aggregate((args, kwargs), node)) if some else None

    def _is_exact(self, result: Any) -> bool:
        """True if a tensor has values that every device has, where its function does not round."""
        if not isinstance(result, torch.Tensor) or result.is_complex():
            return False
        if not _is_sized(result) or result.layout is not torch.strided:
            return False
        rows = zip(result.shape, result.stride(), strict=True)
        return bool(math.prod(hint(size) for size, stride in rows if stride != 0) <= self._most)

    def _is_knowable(self, result: Any) -> bool:
        return self._is_exact(result) and not result.is_floating_point()

    def _is_float(self, result: Any) -> bool:
        return self._is_exact(result) and result.is_floating_point()

    def _is_single(self, result: Any) -> bool:
        """True if its numbers are integers, or floats that are not rounded twice."""
        return self._is_knowable(result) or (self._is_exact(result) and result.dtype in _SINGLE)

    def _computed(self, func: Any, values: Any, nodes: Any) -> tuple[Any, fx.Node | None]:
        """The result of a function; and its node if symbolic sizes or arguments are in it."""
        copies: list[torch.Tensor] = []

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.clone()
                copies.append(leaf)
            return leaf

        with untraced():
            args, kwargs = fx.node.map_aggregate(values, copied)
            result = func(*args, **kwargs)
        found: list[fx.Node] = []
        fx.node.map_arg(nodes, found.append)
        writes = any(map(version_of, copies))
        return result, self.questions.made(func, nodes, writes) if found else None


def _lists_symbols(rows: Any) -> bool:
    """True if it is a list, maybe of lists, with a symbol for a number."""
    if isinstance(rows, list | tuple):
        return any(map(_lists_symbols, rows))
    return isinstance(rows, SYMBOLIC)


def _are_scalars(rows: Any = None) -> bool:
    """True if it is a list of tensors with one integer each, as Python's numbers are."""
    scalars = isinstance(rows, list) and all(isinstance(row, torch.Tensor) for row in rows)
    return scalars and {(row.dtype, row.dim()) for row in rows} == {(torch.int64, 0)}


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, torch.SymInt):
        return is_backed(leaf)
    plain = (int, float, bool, type(None), type(...), torch.dtype, torch.layout)
    if isinstance(leaf, str):
        return leaf in _WORDS
    return type(leaf) in plain or isinstance(leaf, torch.memory_format)


def _places(n: int, mask: torch.Tensor, as_tuple: bool = True) -> Any:
    """The places of the n elements of a mask that are true."""
    places = torch.nonzero_static(mask, size=n)
    return places.unbind(1) if as_tuple else places


def _chosen(func: Callable[..., Any], n: int, tensor: torch.Tensor, mask: Any, *values: Any) -> Any:
    """What a function does at the places of the n elements of a mask that are true."""
    return func(tensor, _places(n, mask), *values)


def _rows(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _with_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """The tensor after `tensor[index] = value`."""
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def _with_view(tensor: torch.Tensor, view: torch.Tensor, *form: Any) -> torch.Tensor:
    """The tensor after a view of it, of this size, stride and offset, got new values."""
    tensor = tensor.clone()
    tensor.as_strided(*form).copy_(view)
    return tensor


def _quotient(a: Any, b: Any) -> Any:
    """The quotient, if it is the same where a GPU multiplies by 1 / b, for b is a number."""
    found = a / b
    if not isinstance(b, torch.Tensor):
        inverse = torch.ones((), dtype=found.dtype) / b
        if not torch.equal(found, a * inverse):
            raise ValueError("a quotient is not the same on every device")
    return found


def _is_sized(result: torch.Tensor) -> bool:
    """True if its sizes do not depend on values, of which they have no hint."""
    return all(map(is_backed, list(result.shape)))


def _is_mask(value: torch.Tensor) -> bool:
    """True if floats are those of masks that are added: zeros, and -inf or the least number."""
    with untraced():
        numbers = value.double()  # all types have a cast, and some of 8 bits no comparison
        return bool(((numbers == 0) | (numbers <= torch.finfo(value.dtype).min)).all())


def _form(value: Any) -> tuple[Any, ...]:
    return (tuple(map(hint, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else ()
