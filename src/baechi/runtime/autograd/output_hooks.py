"""Hooks on outputs that the model reads, too, and gradients that such outputs retain.

    hidden, logits = placed(x)        logits come from hidden
    hidden.retain_grad()
    logits.sum().backward()           hidden.grad is what comes back from logits

What the caller's own graph brings to such an output is a part of its gradient; the sum is in the
tape that made it. So the output and the tape's tensor have one dict of hooks, which runs there.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch

Hooks = OrderedDict[Any, Callable[[torch.Tensor], Any]]


def share_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Let a tape's tensor run these on its gradient, once that is whole."""
    tensor._backward_hooks = hooks
    assert tensor.grad_fn is not None  # of an operator, or of where the tape begins
    tensor.grad_fn._register_hook_dict(tensor)


@final
class Watched:
    """An output whose gradient is whole in a tape alone.

    Args:
        output: As the caller has it; its hooks become the tape's.
        hooks: Of the tape's tensor.
    """

    def __init__(self, output: torch.Tensor, hooks: Hooks) -> None:
        self._output = weakref.ref(output)
        assert output.grad_fn is not None  # the node of the output
        self._node = weakref.ref(output.grad_fn)  # which holds the plan, and so this
        self._hooks = hooks
        self._before: list[torch.Tensor | None] = []
        self._found: list[torch.Tensor] = []
        output.register_hook(self._note)  # type: ignore[no-untyped-call]
        output._backward_hooks = hooks

    def _note(self, _: torch.Tensor) -> None:
        """Note what was retained before autograd adds the caller's part to it."""
        output = self._output()
        if output is not None and output.retains_grad:
            self._before = [output.grad]

    def begin(self) -> bool:
        """Take note of the gradient in the coming backward; whether anybody asks for it."""
        output = self._output()
        retained = output is not None and output.retains_grad and output.grad_fn is self._node()
        if retained:
            self._hooks[self] = self._take
        return retained or bool(self._hooks)

    def _take(self, gradient: torch.Tensor) -> None:
        self._found.append(gradient)

    def end(self) -> None:
        """Let the output retain the whole gradient."""
        self._hooks.pop(self, None)
        output, found, before = self._output(), self._found, self._before
        self._found, self._before = [], []
        if output is None or not found:
            return
        retained = before[0] if before else output.grad
        output.grad = found[0].clone() if retained is None else retained + found[0]
