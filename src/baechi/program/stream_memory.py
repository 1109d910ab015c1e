"""Peak memory of a step on CUDA streams, and placements that fit with what streams hold.

The allocator of a GPU acts in the order of the host's calls, and one thread launches everything. So
here an instruction takes one tick, in the program's launch order, whenever it runs:

    in one segment   [made ──── last reader]
    what crosses     [made ──── last reader ── end of the phase]       lanes of a GPU, or arrives
    what is sent     [made ──── sent ── end of what runs meanwhile]
    what was saved   [made ──── last reader ────── end of the step]    if it crossed
    CUDA graphs      [──────────────── the whole step ─────────────]   what they left in place

Of micro-batches in flight at once, each has CUDA graphs of its own: what one takes counts so often.

`docs/runtime.md` (Lifetimes) says why. Streams of one GPU read one storage, while the clock has a
copy for each device. So if only the producer's autograd saved it, the producer is charged until the
end of the step as well: over all devices of a GPU that is never less than the memory in use.

Complexity: O(n log n) in ops, consumers and instructions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

from baechi.errors import InfeasibleError
from baechi.placers.placer import Placer
from baechi.placers.solving import solve
from baechi.placers.turn_orders import ordered_turns
from baechi.problem.segments import in_run_order, instant_ops
from baechi.problem.simulation import Holding, memory_profile, overflows, simulate
from baechi.program.compilation import compile_program
from baechi.program.flights import flights
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.instructions import Copy, Place, Program, Run, Segment, Wait
from baechi.records.placement import Placement, Schedule, Span, Transfer
from baechi.units import format_bytes

HELD: Final = "held by streams"
_ROUNDS: Final = 4

# The GPU of every logical device; None for other devices.
Gpus = Sequence[str | None]


def scheduled(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    gpus: Gpus,
    *,
    replayed: bool = False,
    program: Program | None = None,
) -> Schedule:
    """The schedule of a placement, with peaks as the program has them.

    They include the bytes held by streams; those of a step on CPUs are the larger of the clock's
    and of the same in the order in which it runs (`in_run_order`).

    Args:
        graph: The placed graph.
        cluster: Its devices.
        placement: The placement.
        gpus: The GPU of every logical device; None for a CPU.
        replayed: Whether it runs as CUDA graphs, which free nothing between steps.
        program: The program of the streams, if known.
    """
    schedule = simulate(graph, cluster, placement)
    if any(gpu is not None for gpu in gpus):
        peaks = _launched_peaks(graph, cluster, placement, gpus, replayed, program)
    elif (graph.is_training or graph.standing) and placement.microbatches == 1:
        run = simulate(graph, cluster, in_run_order(graph, placement))
        peaks = list(map(max, schedule.peak_bytes, run.peak_bytes))
    else:
        return schedule
    return Schedule(
        *(schedule.spans, schedule.transfers, tuple(peaks)),
        late_bound=lambda: schedule.lower_bound_ns,
    )


def _launched_peaks(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    gpus: Gpus,
    replayed: bool,
    program: Program | None,
) -> Sequence[int]:
    """The peaks of a step on streams; arguments as of `scheduled`."""
    peaks: Sequence[int] = [0] * len(cluster.devices)
    options: dict[str, Any] = {}
    n = placement.microbatches
    if n > 1:
        order = partial(ordered_turns, graph, cluster, placement, n, gpus=tuple(gpus))
        peaks = order().peak_bytes  # the first steps run eagerly, and others too unless replayed
        options = {"batches": n, "joined": not graph.is_training}
        options["order"] = lambda segments: order(segments=segments).turns
    if n == 1 or replayed:
        options |= {"instant": instant_ops(graph), "copy_lanes": True}
        program = program or compile_program(graph, placement, **options)
        launches = _Launches(graph, cluster, placement.devices, gpus, program, replayed)
        peaks = list(map(max, peaks, launches.peaks()))
    return peaks


def solve_with_held(
    graph: OpGraph,
    cluster: Cluster,
    placer: str | Placer,
    gpus: Gpus,
    *,
    effort: str | None = None,
    constraints: Constraints | None = None,
    replayed: bool = False,
    microbatches: int = 1,
    objective: str = "step",
) -> Placement:
    """A placement that fits including the bytes held by streams.

    One that does not fit is solved again with as many bytes left free as were held: these change
    with the placement, so this is repeated a few times. On a single device, the last resort,
    nothing is held. Arguments are those of `solve` and of `scheduled`; margins of the constraints
    stay free in addition. Of micro-batches all that crosses counts to the end of the step.

    Raises:
        InfeasibleError: No placement was found.
        InputError: As `solve`.
    """
    options: dict[str, Any] = {"effort": effort, "objective": objective}
    options["microbatches"] = microbatches
    placement = solve(graph, cluster, placer, constraints=constraints, **options)
    if all(gpu is None for gpu in gpus):
        return placement
    asked = constraints or Constraints()
    held: dict[str, int] = {}
    for number in range(_ROUNDS):
        schedule = scheduled(graph, cluster, placement, gpus, replayed=replayed)
        missing = dict(overflows(schedule, cluster, asked))
        if not missing:
            return placement
        if number == _ROUNDS - 1:
            break
        planned = simulate(graph, cluster, placement).peak_bytes
        for device, peak, known in zip(cluster.devices, schedule.peak_bytes, planned, strict=True):
            if device.name in missing:
                held[device.name] = max(peak - known, 2 * held.get(device.name, 0))
        margins = {d: asked.margins.get(d, 0) + held.get(d, 0) for d in {**asked.margins, **held}}
        try:
            less = replace(asked, margins=margins)
            placement = solve(graph, cluster, placer, constraints=less, **options)
        except InfeasibleError:
            break
    with suppress(InfeasibleError):
        placement = solve(
            graph, cluster, "single", constraints=constraints, microbatches=microbatches
        )
    schedule = scheduled(graph, cluster, placement, gpus, replayed=replayed)
    missing = dict(overflows(schedule, cluster, asked))
    if missing:
        raise _too_large(missing, cluster, schedule, held)
    return placement


def _too_large(
    missing: dict[str, int], cluster: Cluster, schedule: Schedule, held: dict[str, int]
) -> InfeasibleError:
    name, extra = max(missing.items(), key=lambda row: row[1])
    rows = zip(cluster.devices, schedule.peak_bytes, strict=True)
    needed = next(peak for device, peak in rows if device.name == name)
    left = tuple((device.name, device.memory_bytes) for device in cluster.devices)
    return InfeasibleError(
        f"no placement was found that fits with what streams hold: {name!r} needs "
        f"{format_bytes(needed)}, of which up to {format_bytes(held.get(name, 0))} cross to or "
        "from other streams and stay to the end of a phase, or are left in place by CUDA graphs. "
        f"Give it {format_bytes(extra)} more, or use fewer logical devices on each GPU, a smaller "
        "batch, checkpoint=True, or no CUDA graphs.",
        name,
        needed,
        left,
        extra,
        name,
    )


@final
@dataclass
class _Launches:
    """A step in ticks: the holdings of its launches."""

    graph: OpGraph
    cluster: Cluster
    devices: Sequence[int]
    gpus: Gpus
    program: Program
    replayed: bool

    def __post_init__(self) -> None:
        self._memory_of = self.cluster.memories
        self._loss = self.graph.n_forward
        used = [gpu for device, gpu in enumerate(self.gpus) if device in set(self.devices)]
        # GPUs on which several lanes compute.
        self._shared = {gpu for gpu in used if gpu is not None and used.count(gpu) > 1}
        self._spans: dict[int, Span] = {}
        self._transfers: list[Transfer] = []
        self._freed: dict[Place, int] = {}  # places freed after a wait, with their ticks
        self._forward_end = 0  # all streams synchronize, and the results are returned
        self._launch()

    def _launch(self) -> None:
        tick = 0
        for number, phase in enumerate(self.program.phases):
            if number:
                tick = self._go(self._loss, tick)
                for place in phase.given:  # the caller's gradients
                    self._send(place.tensor, self.devices[self._loss], place.device, tick)
                tick += 1
            position = [0] * len(phase.lanes)
            waited = [False] * len(phase.lanes)
            for lane in phase.launch:
                row = phase.lanes[lane][position[lane]]
                position[lane] += 1
                if isinstance(row, Wait):
                    waited[lane] = True
                elif row.batch:
                    continue  # as the first
                elif isinstance(row, Run):
                    tick = self._turn(phase.segments[row.segment], tick)
                    waited[lane] = False
                elif isinstance(row, Copy):
                    self._send(row.tensor, row.src, row.dst, tick)
                    tick += 1
                elif waited[lane]:  # else the previous segment frees it
                    self._freed[Place(row.tensor, row.device)] = tick
            if number == 0:
                self._forward_end = tick + 1
                tick += 1
        for op in range(len(self.graph.ops)):
            if op not in self._spans:
                tick = self._go(op, tick)
        self._end = tick
        # The end of the last copy of each tensor from its producer.
        self._sent = {Place(row.tensor, row.src): row.end_ns for row in self._transfers}

    def _turn(self, segment: Segment, tick: int) -> int:
        if segment.backward and self._loss not in self._spans:  # each micro-batch has its own
            tick = self._go(self._loss, tick)
        for op in self.program.ops_of(segment):
            tick = self._go(op, tick)
        return tick

    def _go(self, op: int, tick: int) -> int:
        self._spans[op] = Span(op, self.devices[op], tick, tick + 1)
        return tick + 1

    def _send(self, tensor: int, src: int, dst: int, tick: int) -> None:
        if src != dst:
            self._transfers.append(Transfer(tensor, src, dst, tick, tick + 1))

    def peaks(self) -> tuple[int, ...]:
        """The peak of every device."""
        spans = tuple(sorted(self._spans.values(), key=lambda span: span.start_ns))
        schedule = Schedule(spans, tuple(self._transfers), (0,) * len(self.cluster.devices))
        longer = [*self._results()]
        if self.replayed:
            longer += self._static()
        else:
            longer += [*self._crossing(), *self._sending()]
        joint = len(self.program.phases) == 1 and self.program.is_training
        n = flights(self.program).n if joint and self.replayed else 1
        state = [0] * len(self._memory_of)  # and gradients, which are there once
        for op, row in enumerate(self.graph.ops if n > 1 else ()):
            memory, span = self._memory_of[self.devices[op]], self._spans[op]
            longer += [
                Holding(memory, HELD, -row.late_bytes, span.start_ns, self._end),
                Holding(memory, HELD, row.late_bytes - row.persistent_bytes, 0, self._end),
            ]
            state[memory] += row.persistent_bytes
        profiles = memory_profile(self.graph, self.cluster, schedule, longer)
        one = (max(nbytes for _, nbytes in steps) for steps in profiles)
        rows = zip(one, self._memory_of, strict=True)
        return tuple(n * nbytes + state[memory] for nbytes, memory in rows)

    def _crossing(self) -> Iterator[Holding]:
        """Tensors that cross streams, after their last reader."""
        memory_of, gpus, sent = self._memory_of, self.gpus, self._sent
        for index, tensor in enumerate(self.graph.tensors):
            home = self.devices[tensor.producer]
            readers: dict[int, list[int]] = {}
            for op in tensor.consumers:
                readers.setdefault(memory_of[self.devices[op]], []).append(op)
            last = {m: max(self._spans[op].end_ns for op in ops) for m, ops in readers.items()}
            there = {d for op in tensor.consumers if gpus[d := self.devices[op]] is not None}
            if tensor.producer == self._loss:  # the caller's gradient
                there = {device for device in there if gpus[device] in self._shared}
            else:
                there.discard(home)
            for memory in {memory_of[device] for device in there}:
                saved = any(op > self._loss for op in readers[memory])
                late = saved or tensor.producer >= self._loss
                until = self._end if late else self._forward_end
                yield Holding(memory, HELD, tensor.nbytes, last[memory], until)
            mine = memory_of[home]
            own = max(last.get(mine, 0), sent.get(Place(index, home), 0))
            beside = any(gpus[device] == gpus[home] for device in there)
            saved = any(op > self._loss for op in readers.get(mine, ()))
            if beside and tensor.producer < self._loss and saved:
                yield Holding(mine, HELD, tensor.nbytes, own, self._end)

    def _sending(self) -> Iterator[Holding]:
        """Tensors freed after a wait, from their last use to that wait."""
        for place, tick in self._freed.items():
            tensor = self.graph.tensors[place.tensor]
            if self.devices[tensor.producer] != place.device:
                continue  # received copies are held to the end of the phase
            memory = self._memory_of[place.device]
            uses = (tensor.producer, *tensor.consumers)
            own = [op for op in uses if self._memory_of[self.devices[op]] == memory]
            known = max(*(self._spans[op].end_ns for op in own), self._sent.get(place, 0))
            yield Holding(memory, HELD, tensor.nbytes, known, tick)

    def _results(self) -> Iterator[Holding]:
        """Results, copied to memory of the caller before anything is freed."""
        last = max((span.end_ns for span in self._spans.values()), default=0)
        for tensor in self.graph.tensors:
            home = self.devices[tensor.producer]
            memory, gpu = self._memory_of[home], self.gpus[home]
            if tensor.kept or not tensor.consumers:  # the clock has it to the end of the last op
                yield Holding(memory, HELD, tensor.nbytes, last, self._end)
            copied = gpu is not None and (self.replayed or gpu in self._shared)
            if copied and tensor.kept and tensor.producer < self._loss:
                # The original also stays if CUDA graphs or autograd keep it.
                both = self.replayed or any(op > self._loss for op in tensor.consumers)
                until = self._end if both else self._forward_end
                yield Holding(memory, HELD, tensor.nbytes, self._forward_end - 1, until)

    def _static(self) -> Iterator[Holding]:
        """Memory that CUDA graphs keep allocated beyond its normal lifetime."""
        arrived = {Place(row.tensor, row.dst): row.start_ns for row in self._transfers}
        places = {
            Place(tensor, segment.device)
            for phase in self.program.phases
            for segment in phase.segments
            for tensor in (*segment.reads, *segment.writes)
        }
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.producer < self._loss:
                late = (op for op in tensor.consumers if op > self._loss)
                places |= {Place(index, self.devices[op]) for op in late}
        for place in sorted(places, key=lambda place: (place.tensor, place.device)):
            tensor = self.graph.tensors[place.tensor]
            if self.gpus[place.device] is None:
                continue
            uses = [self._spans[op] for op in (tensor.producer, *tensor.consumers)]
            mine = [span for span in uses if span.device == place.device]
            begin = arrived.get(place, min(span.start_ns for span in mine))
            end = max([span.end_ns for span in mine] + [self._sent.get(place, 0)])
            if tensor.kept and tensor.producer == mine[0].op:
                end = self._end
            memory = self._memory_of[place.device]
            yield Holding(memory, HELD, tensor.nbytes, 0, begin)
            yield Holding(memory, HELD, tensor.nbytes, end, self._end)
        for op, row in enumerate(self.graph.ops):
            device = self.devices[op]
            gradients = row.phase == "backward" and row.late_bytes
            if self.gpus[device] is not None and gradients:  # the caller gets a copy of each
                yield Holding(self._memory_of[device], HELD, row.late_bytes, 0, self._end)
