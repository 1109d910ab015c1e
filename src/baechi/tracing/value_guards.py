"""Truth values of tensors on which a model branches: those of the example call, each checked later.

    if torch.isnan(x).any(): ...        labels.max() >= vocab_size        assert mask.all()

A tracer's tensors have no values. So the model runs once on real ones, and its truth values are
replayed in the trace, each with an operator that checks it: a later call with another truth value
fails with an error. Numbers are not replayed: they are seldom the same twice.
"""

import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

CHECK: Final = "aten._assert_async."  # prefix of the operators that check
# What such an operator takes on a GPU (aten/src/ATen/native/cuda/TensorCompare.cu).
_MOST_BYTES: Final = 254
_QUESTIONS: Final = (torch.Tensor.__bool__, torch.Tensor.item, torch.is_nonzero)


@final
class AskedValues(TorchFunctionMode):
    """Records the truth values of a real run, or replays them in a trace.

    Args:
        heard: (shape, truth value) of a real run, in order; None in that run itself.
    """

    def __init__(self, heard: list[tuple[torch.Size, bool]] | None = None) -> None:
        super().__init__()
        self._telling = heard is not None
        self.heard: list[tuple[torch.Size, bool]] = [] if heard is None else heard
        self._next = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _QUESTIONS and (func is not torch.Tensor.item or args[0].dtype == torch.bool):
            return self._told(args[0]) if self._telling else self._noted(func, args[0])
        return func(*args, **(kwargs or {}))

    def _noted(self, func: Callable[..., Any], tensor: torch.Tensor) -> bool:
        answer = bool(func(tensor))
        self.heard.append((tensor.shape, answer))
        return answer

    def _told(self, tensor: torch.Tensor) -> bool:
        """The next truth value, with its check in the trace.

        Raises:
            RuntimeError: The trace reads another truth value than the real run.
        """
        shape, answer = self.heard[self._next] if self._next < len(self.heard) else (None, False)
        if shape != tensor.shape:
            raise RuntimeError("forward asks for other values when it is traced than when it runs")
        self._next += 1
        truth = tensor.detach().reshape(()) != 0
        torch._assert_async(truth if answer else ~truth, _words(answer))
        return answer


def check(truth: torch.Tensor, words: str = "an assertion of the model failed") -> None:
    """The check on a GPU: the host reads the value, as the model's code does.

    There a check that fails would end all that the process does with CUDA, and already made-up
    inputs may fail it.

    Raises:
        RuntimeError: It is not true.
    """
    if not truth:
        raise RuntimeError(words)


def told(graph: fx.Graph) -> tuple[str, ...]:
    """The answers that every call of a traced graph must repeat, a sentence each."""
    words = [str(node.args[1]) for node in graph.nodes if str(node.target).startswith(CHECK)]
    heard = (word.partition(" when ")[0] for word in words if word.startswith("forward heard"))
    return tuple(f"{row} in the trace; a call that hears otherwise is refused." for row in heard)


def _words(answer: bool) -> str:
    before = f"forward heard {answer} at "
    after = (
        f" when the model was traced, and would now hear {not answer}. Put code that looks at "
        "values in a submodule, which stays whole; or place the model anew with such an example."
    )
    return before + _cut(asker(), _MOST_BYTES - len((before + after).encode())) + after


def _cut(text: str, most_bytes: int) -> str:
    """The text, or its beginning and dots."""
    whole = text.encode()
    if len(whole) <= most_bytes:
        return text
    return whole[: most_bytes - 3].decode(errors="ignore") + "..."


def asker() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(None):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("torch", "baechi"):
            file = frame.f_code.co_filename
            return f"{Path(file).name}:{line} ({linecache.getline(file, line).strip()})"
    return "a line of its own"
