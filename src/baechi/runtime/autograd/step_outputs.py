"""What a step gives its caller: each output behind a token, with a place for its gradient."""

from typing import Any, final

import torch

from baechi.torch_support.memory_meter import Meter


@final
class Seeds:
    """The caller's gradients of a step's outputs, until its backward takes them.

    Args:
        n: How many slots of gradients a step has.
        meter: Counts memory, if asked to.
    """

    def __init__(self, n: int, meter: Meter | None) -> None:
        self._meter = meter
        self._pass = -1  # which of autograd's passes the gradients that wait here are of
        self._rows: list[torch.Tensor | None] = [None] * n

    def put(self, slot: int, device: int, gradient: torch.Tensor) -> None:
        """Take the caller's gradient of an output."""
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # one that failed may have left gradients
            self._pass = current
            self._rows = [None] * len(self._rows)
        if self._meter is not None:
            self._meter.hold(device, gradient)
        self._rows[slot] = gradient

    def taken(self) -> list[torch.Tensor | None]:
        """By slot those that have come, and nothing of them stays here."""
        rows, self._rows = self._rows, [None] * len(self._rows)
        return rows


class Result(torch.autograd.Function):
    """One output of a step.

    Autograd holds what a node's backward is given until it ends. So the step's node is given
    tokens, and the gradients are put where it takes them as it needs them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        seeds: Seeds,
        slot: tuple[int, int],
        token: torch.Tensor,  # noqa: ARG004 (the way to the step's node)
        value: torch.Tensor,
        bases: list[torch.Tensor | None],  # in a list, so that no gradient flows to it
    ) -> torch.Tensor:
        """The value itself; as a view of its base, if it has one."""
        ctx.seeds, ctx.slot = seeds, slot
        ctx.set_materialize_grads(False)
        (base,) = bases
        if base is None:
            return value.detach()
        if base is value:
            return value.view_as(value)  # a view of what no one has: autograd refuses writes
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        """Put the gradient where the step takes it."""
        if gradient is None:
            return (None, None, None, None, None)
        if gradient.requires_grad:  # a second derivative, which the step refuses by this token
            ctx.seeds.put(*ctx.slot, gradient.detach())
            return (None, None, gradient.reshape(-1)[:0], None, None)
        # The very tensor: who holds it too must not find it in a parameter's `.grad`, and an alias
        # of it would look like nobody else's.
        ctx.seeds.put(*ctx.slot, gradient)
        return (None, None, gradient.new_empty(0), None, None)


def may_be_written(view: torch.Tensor) -> None:
    """Let autograd take a view that a function has made for one that the caller has made.

    It refuses to write into the former, as the function's backward would go unused. Here it is
    that of the view's values alone: of what is written, it is the base's that counts.
    """
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.DEFAULT)
