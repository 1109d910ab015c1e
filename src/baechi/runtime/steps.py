"""One step of a placed model: values between segments, forward and backward.

    forward of a segment      enter -> generated code -> publish
    backward of a segment     gradients of what it published -> autograd.grad -> gradients of
                              what entered, and of its parameters

Each segment is an autograd graph of its own. What enters it is cut off from the producer's graph
by `_Enter`, and only gradient edges are remembered, so no activation lives longer than autograd
itself needs it. A step belongs to one call; nothing in it is shared between calls.
"""

import linecache
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, final

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from baechi.errors import ExecutionError
from baechi.extraction import Extract
from baechi.metering import Meter
from baechi.naming import op_name, source_line
from baechi.runtime.segments import Segment

CALLER: Final = -1  # where the caller's own values are


class Carrier(Protocol):
    """Brings values from the device that made them to the device that reads them."""

    def bring(self, tensor: torch.Tensor, src: int, dst: int) -> torch.Tensor:
        """The tensor on device `dst`; ready before what runs there next."""


@final
@dataclass(frozen=True)
class Code:
    """A segment that can run.

    Attributes:
        segment: What it is.
        extract: Its generated function.
        state: The parameters, buffers and submodules among the function's inputs.
        parameters: Those that may have gradients.
        positions: For every input of the function where in the program its reader is.
    """

    segment: Segment
    extract: Extract
    state: Mapping[fx.Node, Any]
    parameters: tuple[torch.nn.Parameter, ...]
    positions: tuple[int, ...]


@final
@dataclass
class _Tape:
    """What a segment's backward needs.

    Attributes:
        entered: (node, leaf, position, edge) of every value that entered with a gradient; where
            its reader is in the program, or -1 for all readers together.
        published: (node, leaf, position) of every value that left with one; the gradient of the
            reader at that position goes to it, or, at -1, all that have no other.
        end: Where backward begins: it takes the gradients of what was published from `seeds`.
        seeds: One per published value, when backward begins.
        nothing: The gradient of `end`.
    """

    entered: list[tuple[fx.Node, int, int, GradientEdge]] = field(default_factory=list)
    published: list[tuple[fx.Node, int, int]] = field(default_factory=list)
    end: GradientEdge | None = None
    seeds: list[torch.Tensor | None] = field(default_factory=list)
    nothing: torch.Tensor | None = None


@final
@dataclass(frozen=True)
class Published:
    """A value between segments: cut off from its graph, with the leaves that need gradients."""

    value: Any
    device: int
    differentiable: tuple[bool, ...]


class _Enter(torch.autograd.Function):
    """The identity, as the beginning of a segment's graph.

    A leaf would do, but a leaf stays alive as long as its graph, and cannot be written in place.
    Backward stops at its edges and never runs it.
    """

    @staticmethod
    def forward(  # the seed is there to require a gradient
        ctx: Any,  # noqa: ARG004
        seed: torch.Tensor,  # noqa: ARG004
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)


class _Leave(torch.autograd.Function):
    """The end of a segment's graph: what leaves it, and where its backward begins.

    What `torch.autograd.grad` is given stays alive as long as it runs. So it is given nothing, and
    this takes the gradients out of a list: then each lives until it is used.
    """

    @staticmethod
    def forward(ctx: Any, seeds: list[torch.Tensor | None], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.seeds = seeds
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        seeds = tuple(ctx.seeds)
        ctx.seeds.clear()
        return (None, *seeds)


@final
class Step:
    """One call of a placed model.

    Args:
        codes: Every segment, in launch order.
        values: The caller's inputs and the travelling state, by node.
        readers: For every node how many segments of each device read it; a device lets go of what
            it got when its last reader has begun.
        resident: Nodes whose values live on a device before the step, with that device.
        written: Nodes whose values some operator writes in place.
        kept: Nodes that the caller gets.
        differentiate: Whether to record what backward needs.
        carrier: Moves tensors between devices.
        meter: Counts memory, if asked to.
    """

    def __init__(
        self,
        codes: Sequence[Code],
        values: Mapping[fx.Node, Published],
        readers: Mapping[fx.Node, Mapping[int, int]],
        resident: Mapping[fx.Node, int],
        written: frozenset[fx.Node],
        kept: frozenset[fx.Node],
        differentiate: bool,
        carrier: Carrier,
        meter: Meter | None,
    ) -> None:
        self.codes = codes
        self.values = dict(values)
        self.differentiate = differentiate
        self._left = {node: dict(row) for node, row in readers.items()}
        self._resident = resident
        self._written = written
        self._kept = kept
        self._carrier = carrier
        self._meter = meter
        self._lock = threading.Lock()
        self._tapes: dict[int, _Tape] = {}
        self._makers = {n: c.segment.device for c in codes for n in c.segment.outputs}
        self._here: dict[int, dict[fx.Node, Any]] = {}  # device -> what it got of others
        # (node, leaf) -> (reader's position, reading segment, gradient, where it is), one entry
        # per reader. Autograd adds gradients up from the last reader to the first; so do we, bit
        # for bit.
        self._gradients: dict[tuple[fx.Node, int], list[tuple[int, int, torch.Tensor, int]]] = {}
        self.parameter_gradients: dict[torch.nn.Parameter, list[tuple[int, torch.Tensor]]] = {}

    def forward(self, index: int) -> None:
        """Run a segment; its sources have run."""
        code = self.codes[index]
        segment = code.segment
        tape = _Tape()
        arguments = self._enter(code, tape)
        self._let_go(code)
        try:
            results = code.extract.function(arguments)
        except Exception as error:
            raise _located(error, segment) from error
        ways_out = results[len(code.extract.outputs) :]
        leaving: list[torch.Tensor] = []
        for (node, position), way in zip(code.extract.exits, ways_out, strict=True):
            if self.differentiate and way.requires_grad:
                tape.published.append((node, 0, position))
                leaving.append(way)
        for node, value in zip(code.extract.outputs, results, strict=False):
            self.values[node] = self._publish(node, value, segment.device, tape, leaving)
        if leaving:
            end = _Leave.apply(tape.seeds, *leaving)  # type: ignore[no-untyped-call]
            tape.end, tape.nothing = get_gradient_edge(end), end.detach()
        del results, ways_out, leaving
        if self._meter is not None:
            for node in code.extract.outputs:
                self._send(node, self.values[node])
        if tape.published:
            self._tapes[index] = tape

    def _enter(self, code: Code, tape: _Tape) -> list[Any]:
        """The arguments of a segment's function, on its device and with graphs of their own."""
        arguments: list[Any] = []
        differentiable: list[tuple[int, int, fx.Node]] = []  # argument, leaf, node
        for node in code.extract.inputs:
            if node in code.state:
                arguments.append(code.state[node])
                continue
            published = self.values[node]
            value = self._bring(node, published, code.segment.device)
            if self.differentiate and any(published.differentiable):
                for leaf, needed in enumerate(published.differentiable):
                    if needed:
                        differentiable.append((len(arguments), leaf, node))
            arguments.append(value)
        if differentiable:
            self._start_graph(arguments, differentiable, tape, code)
        return arguments

    def _start_graph(
        self,
        arguments: list[Any],
        places: list[tuple[int, int, fx.Node]],
        tape: _Tape,
        code: Code,
    ) -> None:
        """Replace the arguments that need gradients by the outputs of one `_Enter`."""
        flat = {argument: pytree.tree_flatten(arguments[argument]) for argument, _, _ in places}
        tensors = [
            [x for x in flat[argument][0] if isinstance(x, torch.Tensor)][leaf]
            for argument, leaf, _ in places
        ]
        seed = torch.empty(0, requires_grad=True)
        entered = _Enter.apply(seed, *tensors)  # type: ignore[no-untyped-call]
        for (argument, leaf, node), tensor in zip(places, entered, strict=True):
            leaves = flat[argument][0]
            slots = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            leaves[slots[leaf]] = tensor
            position = code.positions[argument]
            tape.entered.append((node, leaf, position, get_gradient_edge(tensor)))
        for argument, (leaves, spec) in flat.items():
            arguments[argument] = pytree.tree_unflatten(leaves, spec)

    def _bring(self, node: fx.Node, published: Published, device: int) -> Any:
        """The value on `device`, sent at most once."""
        if device in (published.device, self._resident.get(node)):
            return published.value
        if self._meter is not None and published.device == CALLER and node in self._written:
            self._meter.hold(device, published.value)  # the caller must see what is written
            return published.value
        here = self._here.setdefault(device, {})
        if node not in here:
            here[node] = pytree.tree_map_only(
                torch.Tensor,
                lambda tensor: self._carry(tensor, published.device, device),
                published.value,
            )
        return here[node]

    def _carry(self, tensor: torch.Tensor, src: int, device: int) -> torch.Tensor:
        moved = self._carrier.bring(tensor, src, device)
        return moved if self._meter is None else self._meter.copy(device, moved, src != CALLER)

    def _send(self, node: fx.Node, published: Published) -> None:
        """Copy a new value at once to every device that reads it: in a metered step.

        So it is in the memory of both while it travels, and of the reader alone from then on, as
        between devices whose copies run beside their operators.
        """
        for device in tuple(self._left.get(node, {})):
            self._bring(node, published, device)
        with self._lock:
            self._free(node)

    def _publish(
        self, node: fx.Node, value: Any, device: int, tape: _Tape, leaving: list[torch.Tensor]
    ) -> Published:
        if not self.differentiate:
            return Published(value, device, ())
        flags: list[bool] = []
        leaves, spec = pytree.tree_flatten(value)
        for i, tensor in enumerate(leaves):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.requires_grad:
                tape.published.append((node, len(flags), -1))
                leaving.append(tensor)
            flags.append(tensor.requires_grad)
            leaves[i] = tensor.detach()
        return Published(pytree.tree_unflatten(leaves, spec), device, tuple(flags))

    def _let_go(self, code: Code) -> None:
        """Forget values that no later segment on this device reads; its code has them now."""
        device = code.segment.device
        with self._lock:
            for node in dict.fromkeys(code.extract.inputs):
                if node in code.state:
                    continue
                left = self._left[node]
                left[device] -= 1
                if left[device] == 0:
                    del left[device]
                    self._here.get(device, {}).pop(node, None)
                    self._free(node)

    def _free(self, node: fx.Node) -> None:
        """Forget the producer's own value where all that may still read it have a copy."""
        published = self.values[node]
        waiting = [d for d in self._left.get(node, {}) if node not in self._here.get(d, {})]
        if not waiting and node not in self._kept:
            self.values[node] = Published(None, published.device, published.differentiable)

    def seed_gradient(self, node: fx.Node, leaf: int, gradient: torch.Tensor) -> None:
        """Give the gradient that the caller has for a value."""
        row = (sys.maxsize, len(self.codes), gradient, CALLER)
        self._gradients.setdefault((node, leaf), []).append(row)

    def backward(self, index: int, keep: bool) -> None:
        """Run a segment's backward; the backwards of all its readers have run.

        Args:
            index: The segment.
            keep: Keep the graph, for another backward.
        """
        tape = self._tapes.get(index)
        if tape is None or tape.end is None:
            return
        code = self.codes[index]
        device = code.segment.device
        # Those at a position first: what is left goes the common way.
        for node, leaf, position in tape.published:
            tape.seeds.append(self._collect(node, leaf, position, device))
        if not keep:
            del self._tapes[index]
        parameters = [p for p in code.parameters if p.requires_grad]
        # torch takes tensors and edges side by side, though its annotation does not say so.
        inputs: list[Any] = [*(edge for _, _, _, edge in tape.entered), *parameters]
        if not inputs or all(seed is None for seed in tape.seeds):
            tape.seeds.clear()
            return
        try:
            gradients = torch.autograd.grad(
                [tape.end], inputs, [tape.nothing], retain_graph=keep, allow_unused=True
            )
        except Exception as error:
            raise _located(error, code.segment) from error
        n = len(tape.entered)
        for (node, leaf, position, _), gradient in zip(tape.entered, gradients[:n], strict=True):
            if gradient is not None:
                row = (position, index, gradient, device)
                target = self._made_on(node)
                if self._meter is not None and target not in (device, CALLER):
                    row = (position, index, self._carry(gradient, device, target), target)
                with self._lock:
                    self._gradients.setdefault((node, leaf), []).append(row)
        for parameter, gradient in zip(parameters, gradients[n:], strict=True):
            if gradient is not None:
                with self._lock:
                    shares = self.parameter_gradients.setdefault(parameter, [])
                    shares.append((index, gradient))

    def _collect(self, node: fx.Node, leaf: int, position: int, device: int) -> torch.Tensor | None:
        """The sum of a value's gradients of one position, brought to the device that made it."""
        with self._lock:
            rows = self._gradients.pop((node, leaf), [])
            if position != -1:
                others = [row for row in rows if row[0] != position]
                rows = [row for row in rows if row[0] == position]
                if others:
                    self._gradients[node, leaf] = others
        brought = []
        for _, _, gradient, src in sorted(rows, key=lambda row: row[:2], reverse=True):
            brought.append(
                gradient if src in (device, CALLER) else self._carry(gradient, src, device)
            )
        return add_up(brought)

    def _made_on(self, node: fx.Node) -> int:
        """The device that made a value; `CALLER` for what the caller gave."""
        return self._makers.get(node, CALLER)

    def input_gradient(self, node: fx.Node) -> torch.Tensor | None:
        """The gradient of a value that the caller gave, after all backwards."""
        rows = self._gradients.pop((node, 0), [])
        rows = sorted(rows, key=lambda row: row[:2], reverse=True)
        return add_up([gradient for _, _, gradient, _ in rows])


def add_up(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Their sum, in the given order, on the first one's device; None if there are none."""
    if not gradients:
        return None
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient.to(total.device)
    return total


def _located(error: Exception, segment: Segment) -> ExecutionError:
    """The error with the operator that was running and the model's own line."""
    node = _running(error, segment)
    if node is None:
        where = f"one of {len(segment.nodes)} operators from {segment.nodes[0].name} on"
    else:
        source = source_line(node)
        where = f"{op_name(node)} ({source})" if source else op_name(node)
    return ExecutionError(
        f"{where} failed on logical device {segment.device}: {type(error).__name__}: {error}"
    )


def _running(error: Exception, segment: Segment) -> fx.Node | None:
    """The node whose generated line the error passed through; fx gives each a line of its own."""
    by_name = {node.name: node for node in segment.nodes}
    for frame, number in traceback.walk_tb(error.__traceback__):
        if "eval_with_key" in frame.f_code.co_filename:
            line = linecache.getline(frame.f_code.co_filename, number)
            return by_name.get(line.split("=")[0].split(":")[0].strip())
    return None
