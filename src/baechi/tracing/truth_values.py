"""Truth values that forward asks a tensor for: those of a real run, checked in every call.

Where forward branches on truth values, as in `if torch.isnan(x).any(): ...`, the model runs once on
real tensors, and its truth values are replayed in the trace, each with an operator that checks it.
Without weights it cannot run; then numbers are taken to be finite, and forward's own checks to
pass. No other value is known.
"""

import linecache
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from baechi.torch_support.tracer_internals import FunctionMode
from baechi.tracing.drawn_fractions import DrawnFractions
from baechi.tracing.model_code import OURS, package_of
from baechi.tracing.raising_branches import answer_that_goes_on

CHECK: Final = "aten._assert_async."  # prefix of the operators that check
# What such an operator takes on a GPU (aten/src/ATen/native/cuda/TensorCompare.cu).
_MOST_BYTES: Final = 254
_READS: Final = (torch.Tensor.__bool__, torch.Tensor.item, torch.is_nonzero)
_REDUCED: Final = (torch.all, torch.any, torch.Tensor.all, torch.Tensor.any)
# What they are of finite numbers.
_OF_FINITE: Final = {
    **dict.fromkeys((torch.isfinite, torch.Tensor.isfinite), True),
    **dict.fromkeys((torch.isinf, torch.Tensor.isinf, torch.isnan, torch.Tensor.isnan), False),
}
# What gives elements of a tensor, as a loop over it does.
_ELEMENTS: Final = (torch.unbind, torch.Tensor.unbind, torch.Tensor.__getitem__)


def _equal(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one == other).all() if one.shape == other.shape else torch.tensor(False)


def _close(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(*args, **kwargs).all()


# Their result is a bool of Python; these leave it in a tensor.
_COMPARED: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys((torch.equal, torch.Tensor.equal), _equal),
    **dict.fromkeys((torch.allclose, torch.Tensor.allclose), _close),
}
# The id of a module's attributes, which torch.export's proxies of a shared module are of, too, and
# the line of Python that it runs.
Asker = tuple[int, str, int]


@final
class TruthValue(NamedTuple):
    """What the truth value is of a tensor of this shape; and whether calls will repeat it.

    Those do that say that numbers are finite, and those with which forward raises no error.
    """

    shape: torch.Size
    answer: bool
    is_check: bool


@final
class TruthValues(FunctionMode):
    """Records the truth values of a real run, or replays them in a trace.

    Args:
        recorded: Of a real run, by who asks, in order; None in that run itself.
        state: The parameters and buffers of a real run.
        assumed: Whether it is of a trace without such a run, where all numbers are finite, and
            forward raises no error.

    Attributes:
        are_checks: Whether calls will repeat all that were replayed.

    A branch that is taken at random, as with LayerDrop (arXiv 1909.11556), is refused: the next
    call may take another.
    """

    def __init__(
        self,
        recorded: Mapping[Asker, Sequence[TruthValue]] | None = None,
        state: Iterable[torch.Tensor] = (),
        *,
        assumed: bool = False,
    ) -> None:
        super().__init__()
        self._assumed = assumed
        self.recorded: dict[Asker, list[TruthValue]] = defaultdict(list)
        self._rest: Mapping[Asker, Iterator[TruthValue]] | None = (
            None if recorded is None else {asker: iter(row) for asker, row in recorded.items()}
        )
        self._checks: Any = WeakTensorKeyDictionary()  # what is asked of them if all is finite
        self._fractions = DrawnFractions()
        self._at_random = WeakTensorKeyDictionary()  # comparisons of what is drawn
        # Single numbers in buffers, what is computed of these alone, and those that were asked.
        self._follows: Any = WeakTensorKeyDictionary()
        self._asked: dict[int, tuple[torch.Tensor, float]] = {}
        for tensor in state:
            if tensor.numel() == 1 and not tensor.is_complex():
                self._follows[tensor] = ((tensor, tensor.item()),)
        self.are_checks = True

    def refuse_counters(self) -> None:
        """Refuse truth values of a counter or a flag that forward has changed for the next call."""
        if any(tensor.item() != then for tensor, then in self._asked.values()):
            raise RuntimeError(
                "forward branches on a buffer that it changes, such as a counter or a flag of the "
                "first call, and a split model would always take the same branch"
            )

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, or the truth value that it asks for."""
        if func in _COMPARED:
            args, kwargs = (_COMPARED[func](*args, **kwargs),), {}
            func = torch.Tensor.__bool__
        if func not in _READS or (func is torch.Tensor.item and args[0].dtype != torch.bool):
            result = func(*args, **kwargs)
            if func in _OF_FINITE:
                self._checks[result] = _OF_FINITE[func]
            elif func in _REDUCED and args and args[0] in self._checks:
                self._checks[result] = self._checks[args[0]]
            if self._rest is None and not self._assumed:
                self._follow(func, args, kwargs, result)
            return result
        passing = answer_that_goes_on()
        if args[0] in self._at_random and passing is None:
            raise RuntimeError(
                "forward takes a branch at random, as LayerDrop does, and a split model would "
                "always take the same; set that probability to 0 (such as layerdrop=0)"
            )
        if self._rest is not None:
            return self._replay(args[0], self._rest, passing)
        if self._assumed:
            answer = self._checks.get(args[0], passing)
            return func(*args, **kwargs) if answer is None else _checked(args[0], answer, passing)
        answer = bool(func(args[0]))
        is_check = args[0] in self._checks or answer is passing
        if not is_check:
            self._asked |= {id(row[0]): row for row in self._follows.get(args[0], ())}
        found = TruthValue(args[0].shape, answer, is_check)
        self.recorded[_asker()].append(found)
        return answer

    def _follow(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note what is drawn at random, and what follows from counters and flags alone."""
        rows = [row for row in tree_leaves(result) if isinstance(row, torch.Tensor)]
        element = func in _ELEMENTS and any(arg in self._at_random for arg in args[:1])
        if element or len(self._fractions.answers(func, args, kwargs, result)) > 1:
            self._at_random.update((row, True) for row in rows)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        alone = bool(given) and all(tensor in self._follows for tensor in given)
        found = {id(row[0]): row for tensor in given if alone for row in self._follows[tensor]}
        for row in rows:
            if alone:
                self._follows[row] = tuple(found.values())
            elif row in self._follows:  # something else is written there
                del self._follows[row]

    def _replay(
        self, tensor: torch.Tensor, rest: Mapping[Asker, Iterator[TruthValue]], passing: bool | None
    ) -> bool:
        """The asker's next truth value, with its check in the trace."""
        row = next(rest.get(_asker(), iter(())), None)
        if row is None or row.shape != tensor.shape:
            raise RuntimeError("forward asks for other values when it is traced than when it runs")
        self.are_checks &= row.is_check
        return _checked(tensor, row.answer, passing)


def _checked(tensor: torch.Tensor, answer: bool, passing: bool | None) -> bool:
    """The truth value of a tensor in a trace, with its check there."""
    truth = tensor.detach().reshape(()) != 0
    words = _words(answer, raises=answer is passing)
    torch._assert_async(truth if answer else ~truth, words)
    return answer


def _asker() -> Asker:
    """Who asks for a truth value: the innermost of the model's own functions, and its module."""
    frames = [row for row in traceback.walk_stack(None) if package_of(row[0]) not in OURS]
    firsts = (frame.f_locals.get((*frame.f_code.co_varnames, "")[0]) for frame, _ in frames)
    module = next((first for first in firsts if isinstance(first, nn.Module)), None)
    file, line = (frames[0][0].f_code.co_filename, frames[0][1]) if frames else ("", 0)
    return id(getattr(module, "__dict__", None)), file, line


def check(truth: torch.Tensor, words: str = "an assertion of the model failed") -> None:
    """The check on a GPU: the host reads the value, as the model's code does.

    There a check that fails would end all that the process does with CUDA, and already made-up
    inputs may fail it.
    """
    if not truth:
        raise RuntimeError(words)


def truth_values_of(graph: fx.Graph) -> tuple[str, ...]:
    """The truth values that every call of a traced graph must repeat, a sentence each."""
    words = [str(node.args[1]) for node in graph.nodes if str(node.target).startswith(CHECK)]
    read = (word.partition(" when ")[0] for word in words if word.startswith("forward read"))
    return tuple(f"{row} in the trace; a call that reads another value is refused." for row in read)


def _words(answer: bool, *, raises: bool) -> str:
    before = f"forward read {answer} at "
    after = f" when the model was traced, and would now read {not answer}" + (
        ", of which it makes an error."
        if raises
        else ". Put code that looks at values in a submodule, which stays whole; or place the "
        "model anew with such an example."
    )
    room = _MOST_BYTES - len((before + after).encode())
    line = model_line().encode()
    if len(line) > room:
        line = line[: room - 3] + b"..."
    return before + line.decode(errors="ignore") + after


def model_line() -> str:
    """The innermost line that runs now and is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(None):
        if package_of(frame) not in OURS:
            file = frame.f_code.co_filename
            return f"{Path(file).name}:{line} ({linecache.getline(file, line).strip()})"
    return "a line of its own"
