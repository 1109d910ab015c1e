"""The outputs of a step: each behind a token, with a slot for its gradient."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_internals import backward_id
from baechi.tracing.lowering import TracedModule


@final
class Seeds:
    """The caller's gradients of a step's outputs, until its backward takes them.

    Args:
        n: The number of slots of gradients of a step.
        meter: Counts memory, where there is one.
    """

    def __init__(self, n: int, meter: Meter | None) -> None:
        self._meter = meter
        self._pass = -1  # which of autograd's passes the gradients that wait here are of
        self._rows: list[torch.Tensor | None] = [None] * n

    def put(self, slot: int, device: int, gradient: torch.Tensor) -> None:
        """Take the caller's gradient of an output."""
        current = backward_id()
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


@final
@dataclass(frozen=True)
class Sharing:
    """The memory that an output shares, as its trace has it.

    Autograd sees no relation between the outputs of a step. So it refuses a write into one that
    shares memory, and advises to clone it; an output that is a view of an argument, which has a
    history outside of the step, may be written.

    Attributes:
        argument: The caller's tensor that it is a view of, by index; -1 for none.
        others: Whether it shares memory with another output, or with a parameter or buffer.
    """

    argument: int
    others: bool

    def base(self, value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The base of the output's view: an argument, itself if writes are refused, or None.

        Args:
            value: The output.
            tensors: The caller's.
        """
        if self.argument >= 0 and _is_view(value, tensors[self.argument]):
            return tensors[self.argument]
        return value if self.others else None


def _is_view(value: torch.Tensor, base: torch.Tensor) -> bool:
    """True if autograd can take a value for a view of a base that has a gradient."""
    if not (base.requires_grad and value.layout is base.layout is torch.strided and value.numel()):
        return False
    same = value.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    return same and _reading(value) == _reading(base)


def _reading(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def sharing_of(
    module: TracedModule, results: Sequence[fx.Node]
) -> dict[fx.Node, tuple[Sharing, ...]]:
    """The memory that each tensor of each result of a traced model shares."""
    facts, graph = module.facts.nodes, module.graph_module.graph
    count = Counter(value.storage for node in results for value in facts[node].values)
    # What forward writes has another history since: a result is no view of what it was.
    written = {storage for fact in facts.values() for storage in fact.writes}
    arguments = {
        value.storage: index
        for index, node in enumerate(graph.find_nodes(op="placeholder"))
        for value in facts[node].values
        if value.storage not in written
    }
    state = {v.storage for n in graph.find_nodes(op="get_attr") for v in facts[n].values} - written
    return {
        node: tuple(
            Sharing(
                arguments.get(value.storage, -1),
                count[value.storage] > 1
                or (value.storage in state and value.storage not in written),
            )
            for value in facts[node].values
        )
        for node in results
    }


class OutputFunction(torch.autograd.Function):
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
        """The value itself; as a view of its base, if it has one (`Sharing.base`)."""
        ctx.seeds, ctx.slot = seeds, slot
        ctx.set_materialize_grads(False)
        (base,) = bases
        if base is None:
            return value.detach()
        if base is value:
            return value.view_as(value)  # a view made in a function: autograd refuses writes
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        """Put the gradient where the step takes it."""
        if gradient is None:
            return (None, None, None, None, None)
        # The tensor itself: if others hold it, it must not become a parameter's `.grad`, and an
        # alias of it would look unshared.
        ctx.seeds.put(*ctx.slot, gradient.detach() if gradient.requires_grad else gradient)
        return (None, None, gradient.new_empty(0), None, None)
