"""One call of a placed model: its values, gradients and graphs, and the caller's outputs.

A step belongs to one call; nothing in it is shared between calls. Lanes write into different places
of its lists, in the order that the program gives them. Each output is behind a token, with a slot
for its gradient. A checkpointed tape runs again, bit for bit, from the inputs that it keeps:

    forward     arguments ──► generated code, whose graph ends with it ──► slots
                    └── kept, with the state of the world then ──┐
    again       the same arguments, in the same world ──► generated code ──► the tape's graph

The world is what the code reads besides its arguments: the generator, autocast, buffers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge

from baechi.errors import ExecutionError
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_internals import backward_id, buffers_of, set_version, version_of
from baechi.tracing.guards import Autocast
from baechi.tracing.lowering import TracedModule

Edges = list[GradientEdge | None]


@final
class Totals:
    """Gradients of parameters, by number, added up over the micro-batches of a step.

    Args:
        begun: What is there before, such as the parameter's `.grad`, which is added to in place.
        copies: Whether others write where the gradients are, as CUDA graphs do.
    """

    def __init__(self, begun: Sequence[torch.Tensor | None], *, copies: bool = False) -> None:
        self.rows = list(begun)
        self._copies = copies
        self._owned = [total is not None for total in begun]  # else others may hold it

    def add(self, number: int, gradient: torch.Tensor | None) -> None:
        """Add one more; as autograd adds to `.grad`."""
        if gradient is None:
            return
        total = self.rows[number]
        with torch.no_grad():
            if total is None:
                self.rows[number] = gradient.clone() if self._copies else gradient
                self._owned[number] = self._copies
                return
            gradient = gradient.to(total.device)
            if total.layout is not torch.strided:
                self.rows[number] = gradient + total
            elif self._owned[number]:
                total.add_(gradient)
            else:
                self.rows[number] = total + gradient
        self._owned[number] = True


@final
@dataclass(frozen=True)
class Sizes:
    """The lengths of a step's lists."""

    slots: int
    values: int
    results: int
    grads: int
    tapes: int


@final
class CutTensor:
    """A cut-off tensor and its source: memory that the caller may write before the backward.

    A cut-off tensor counts writes for itself, so autograd would not see that what it has saved was
    written since, and gradients would be silently wrong.

    Args:
        source: The caller's tensor or a parameter, or an alias of it.
        cut: The cut-off one.
    """

    def __init__(self, source: torch.Tensor, cut: torch.Tensor) -> None:
        self.source = source
        self.cut = cut.detach()
        self.version = version_of(source)  # up to which writes are counted, or are our own

    def sync_version(self) -> None:
        """Count writes to the source for the cut-off tensor, too, where autograd looks."""
        written = version_of(self.source) - self.version
        if written:
            set_version(self.cut, version_of(self.cut) + written)


@final
@dataclass(slots=True)
class Record:
    """The state that a tape's backward needs."""

    entered: Edges = field(default_factory=list)  # of every entry that has a gradient, or None
    published: Edges = field(default_factory=list)  # of all that left with a gradient, or None
    # The cut-off parameters that are read by others, too, each by the slot of its gradient.
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    # Of parameters, where they are cut off.
    parameters: dict[torch.nn.Parameter, GradientEdge] = field(default_factory=dict)
    # The sources of what entered that the caller may write into.
    cuts: list[CutTensor] = field(default_factory=list)
    # Where a `TapeEnd` is behind what left: an empty tensor to begin with, and the gradient for it.
    ends: dict[int, tuple[torch.Tensor, list[torch.Tensor | None]]] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Recomputation:
    """The recomputation of a tape."""

    copied: tuple[int, ...]  # arguments that are buffers which the model writes
    leaves: tuple[nn.Module, ...]  # opaque submodules with buffers that they may write
    # Of what another tape of the unit makes again: (argument, slot, whether it is the slot's last
    # reader); and the slots of what it makes for those.
    crossing: tuple[tuple[int, int, bool], ...]
    leaving: frozenset[int]

    def keep(
        self, arguments: Sequence[Any], place: torch.device, *, draws: bool
    ) -> "RecomputeInputs":
        """The inputs that the tape keeps to run again, before it runs, and draws if it does."""
        rows = list(arguments)
        for argument in self.copied:
            rows[argument] = rows[argument].detach().clone()
        for argument, *_ in self.crossing:
            rows[argument] = None
        versions = [_version(value) for value in rows]
        buffers = [
            (owner, name, buffer.detach().clone())
            for leaf in self.leaves
            for owner in leaf.modules()
            for name, buffer in buffers_of(owner).items()
            if buffer is not None
        ]
        random = random_state(place) if draws else None
        return RecomputeInputs(rows, versions, tuple(buffers), random, Autocast.current())


def _version(value: Any) -> int:
    """The count of writes to a tensor; -1 where it is not counted."""
    known = isinstance(value, torch.Tensor) and not value.is_inference()
    return version_of(value) if known else -1


@final
@dataclass
class RecomputeInputs:
    """The inputs with which a tape runs again."""

    arguments: list[Any]  # of its function
    versions: list[int]  # the version counter of each; -1 where there is none
    buffers: tuple[tuple[nn.Module, str, torch.Tensor], ...]  # of opaque submodules, by name
    random: torch.Tensor | None  # the generator's state before it ran, if it draws from it
    autocast: Autocast

    def taken(self, again: Recomputation, crossing: dict[int, Any]) -> list[Any]:
        """The arguments, for the function to empty; what it may write is copied once more.

        Raises:
            ExecutionError: One was written since.
        """
        for value, version in zip(self.arguments, self.versions, strict=True):
            if _version(value) != version:
                raise ExecutionError(
                    f"a tensor of shape {list(value.shape)} that a checkpointed submodule read was "
                    "written in place between forward and backward, so its forward cannot run "
                    "again with it. Write into a copy, or leave the submodule out of checkpoint."
                )
        rows = list(self.arguments)
        for argument in again.copied:
            rows[argument] = rows[argument].clone()
        for argument, slot, last in again.crossing:
            rows[argument] = crossing.pop(slot) if last else crossing[slot]
        return rows

    @contextmanager
    def world(self, place: torch.device) -> Iterator[None]:
        """The block runs as the forward did, with a graph; afterwards all is as before."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.autocast.applied())
            if self.random is not None:
                stack.callback(set_random_state, place, random_state(place))
                set_random_state(place, self.random)
            for owner, name, value in self.buffers:
                buffers = buffers_of(owner)
                stack.callback(buffers.__setitem__, name, buffers[name])
                buffers[name] = value.clone()
            yield


def random_state(place: torch.device) -> torch.Tensor:
    """The state of a device's random generator."""
    return torch.cuda.get_rng_state(place) if place.type == "cuda" else torch.get_rng_state()


def set_random_state(place: torch.device, state: torch.Tensor) -> None:
    """Let a device's random generator go on from a state."""
    if place.type == "cuda":
        torch.cuda.set_rng_state(state, place)
    else:
        torch.set_rng_state(state)


@final
class Step:
    """One call of a placed model, or one micro-batch of it.

    Args:
        differentiate: Whether to record what backward needs.
        meter: Counts memory, where there is one.
        inputs: The caller's tensors.
        sizes: Of the lists below.
    """

    def __init__(
        self,
        differentiate: bool,
        meter: Meter | None,
        inputs: Sequence[torch.Tensor],
        sizes: Sizes,
    ) -> None:
        self.differentiate = differentiate
        self.meter = meter
        self.inputs = inputs
        # Values between tapes; whether each value, or its tensors, need a gradient; the caller's.
        self.slots: list[Any] = [None] * sizes.slots
        self.flags: list[bool | tuple[bool, ...]] = [False] * sizes.values
        self.results: list[Any] = [None] * sizes.results
        self.grads: list[torch.Tensor | None] = [None] * sizes.grads  # the caller's, between tapes
        self._pass = -1  # which of autograd's passes the caller's are of
        # For every tape what its backward needs, and the inputs to run again, if it must.
        self.records: list[Record | None] = [None] * sizes.tapes
        self.kept: list[RecomputeInputs | None] = [None] * sizes.tapes
        self.crossing: dict[int, Any] = {}  # values between tapes that run again, by slot
        self.keep = False  # whether the running backward leaves the graph for another
        # Whether tapes cut parameters off as they do what enters, so that no gradient waits for the
        # stream on which a parameter was first used, and no tape runs its hooks.
        self.apart = False
        self.graphed: set[int] = set()  # tapes whose forward was a replay; their backward must be
        self.slot = 0  # which of the recordings it is replayed with
        self.warms = -2  # in which of autograd's passes kernels run that a tape records later
        self.fetched: dict[int, torch.Tensor] = {}  # inputs that are brought ahead of their readers
        self.moved: dict[int, torch.Tensor] = {}  # written inputs that are on another device
        self.own: Any = None  # the executor's state between the phases
        self.totals: Totals | None = None  # of all micro-batches, where tapes add to them
        self.separate = False  # whether each gradient of a parameter is given to autograd by itself

    def counting(self, device: int) -> AbstractContextManager[None]:
        """Count what is made inside; autograd takes the mode along to the thread of a GPU."""
        return nullcontext() if self.meter is None else self.meter.counting(device)

    def seed(self, slot: int, device: int, gradient: torch.Tensor) -> None:
        """Take the caller's gradient of an output."""
        current = backward_id()
        if current != self._pass:  # one that failed may have left gradients
            self._pass = current
            self.grads = [None] * len(self.grads)
        if self.meter is not None:
            self.meter.hold(device, gradient)
        self.grads[slot] = gradient

    def taken(self, slots: Iterable[int]) -> torch.Tensor | None:
        """The sum of some gradients, which the step forgets: nothing else holds it then."""
        total: torch.Tensor | None = None
        for slot in slots:
            gradient, self.grads[slot] = self.grads[slot], None
            if gradient is not None:
                total = gradient if total is None else total + gradient.to(total.device)
        return total

    def write_back(self) -> None:
        """Write into the caller's tensors what was written elsewhere, at the forward's end."""
        if not self.moved:
            return
        with torch.no_grad():
            for index, tensor in self.moved.items():
                self.inputs[index].copy_(tensor)
        self.moved.clear()


def sharing_of(module: TracedModule, results: Sequence[fx.Node]) -> dict[fx.Node, tuple[bool, ...]]:
    """Whether each tensor of a result shares memory with another result, a parameter or a buffer.

    Autograd sees no relation between the outputs of a step. So it refuses a write into one that
    shares memory, and advises to clone it.
    """
    facts, graph = module.facts.nodes, module.graph_module.graph
    count = Counter(value.storage for node in results for value in facts[node].values)
    state = {v.storage for n in graph.find_nodes(op="get_attr") for v in facts[n].values}
    state -= module.facts.written
    return {
        node: tuple(count[v.storage] > 1 or v.storage in state for v in facts[node].values)
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
        step: Step,
        slot: tuple[int, int],
        token: torch.Tensor,  # noqa: ARG004 (the way to the step's node)
        value: torch.Tensor,
        shared: bool,
    ) -> torch.Tensor:
        """The value itself; a view, into which autograd refuses writes, if its memory is shared."""
        ctx.step, ctx.slot = step, slot
        ctx.set_materialize_grads(False)
        return value.view_as(value) if shared else value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        """Put the gradient where the step takes it."""
        if gradient is None:
            return (None, None, None, None, None)
        # The tensor itself: if others hold it, it must not become a parameter's `.grad`, and an
        # alias of it would look unshared.
        ctx.step.seed(*ctx.slot, gradient.detach() if gradient.requires_grad else gradient)
        return (None, None, gradient.new_empty(0), None, None)
