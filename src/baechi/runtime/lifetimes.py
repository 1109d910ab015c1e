"""What streams hold longer than the clock says, and the peaks that this makes.

    clock       [made ──── last reader]
    streams     [made ──── last reader ── end of the phase]          what crosses lanes of a GPU,
                                                                     or arrives from another
    segments    [made ──── sent ── end of what runs meanwhile]       what a lane sends
    and again   [made ──── last reader ────── end of the step]       where autograd saved it
    graphs      [──────────────── the whole step ─────────────]      what CUDA graphs left in place

The executor for CUDA lets go of nothing that crosses streams before all streams have met, because
the allocator would give it away under a reader (`docs/runtime.md`, Lifetimes). CPUs hold nothing.

Streams of one GPU read one storage, while the clock has a copy for each device. So where only the
maker's autograd saved it, the maker is charged to the end of the step as well: over all devices of
a GPU that is never less than what is there.

Complexity: O(n log n) in ops, consumers and transfers.
"""

from collections.abc import Iterator, Sequence

from baechi.devices import Cluster
from baechi.graph import OpGraph
from baechi.placement import Placement, Schedule
from baechi.reporting.occupancy import Holding, memories, memory_profile
from baechi.runtime.program import Free, Place, Program, Run, Wait
from baechi.training import mirrored

HELD = "held by streams"

# The GPU of every logical device; None for a device that is none.
Gpus = Sequence[str | None]


def with_held(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    gpus: Gpus,
    program: Program,
    *,
    replayed: bool,
) -> Schedule:
    """The schedule of a placement with the peaks that it has on streams.

    Args:
        graph: What was placed.
        cluster: Where.
        placement: How.
        schedule: What `simulate` says of it.
        gpus: Which of the devices are streams, and of which GPU.
        program: What runs it.
        replayed: Whether as CUDA graphs.
    """
    longer = [*_results(graph, cluster, placement, schedule, gpus, replayed)]
    if replayed:
        longer += _static(graph, cluster, placement, schedule, gpus, program)
    else:
        longer += _crossing(graph, cluster, placement, schedule, gpus)
        longer += _sending(graph, cluster, placement, schedule, gpus, program)
    profiles = memory_profile(graph, cluster, schedule, longer)
    peaks = tuple(max(nbytes for _, nbytes in steps) for steps in profiles)
    return Schedule.with_late_bound(
        schedule.spans, schedule.transfers, peaks, lambda: schedule.lower_bound_ns
    )


def _crossing(
    graph: OpGraph, cluster: Cluster, placement: Placement, schedule: Schedule, gpus: Gpus
) -> Iterator[Holding]:
    """What crosses streams, after the clock has let go of it."""
    loss, _ = mirrored(graph)
    devices, memory_of = placement.devices, memories(cluster)
    ends = {span.op: span.end_ns for span in schedule.spans}
    sent = _sent(schedule)
    step_ns = schedule.makespan_ns
    forward_ns, shared = _forward_ns(schedule, loss), _shared(placement, gpus)
    for index, tensor in enumerate(graph.tensors):
        home = devices[tensor.producer]
        readers: dict[int, list[int]] = {}
        for op in tensor.consumers:
            readers.setdefault(memory_of[devices[op]], []).append(op)
        last = {memory: max(ends[op] for op in ops) for memory, ops in readers.items()}
        there = {devices[op] for op in tensor.consumers if gpus[devices[op]] is not None}
        if tensor.producer == loss:  # the caller's gradient
            there = {device for device in there if gpus[device] in shared}
        else:
            there.discard(home)
        for memory in {memory_of[device] for device in there}:
            saved = any(op > loss for op in readers[memory])
            until = step_ns if saved or tensor.producer >= loss else forward_ns
            yield Holding(memory, HELD, tensor.nbytes, last[memory], until)
        mine = memory_of[home]
        own = max([last.get(mine, 0), *sent.get((index, home), [])])
        beside = any(gpus[device] == gpus[home] for device in there)
        if beside and tensor.producer < loss and any(op > loss for op in readers.get(mine, ())):
            yield Holding(mine, HELD, tensor.nbytes, own, step_ns)


def _sending(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    gpus: Gpus,
    program: Program,
) -> Iterator[Holding]:
    """What a lane lets go of after a wait: the segment that runs before the wait has it until then.

    What is let go of right after a segment, without a wait between, the segment lets go of itself.
    """
    memory_of, sent = memories(cluster), _sent(schedule)
    ends = {span.op: span.end_ns for span in schedule.spans}
    phase = program.phases[0]
    for rows in phase.lanes:
        end = 0
        waited = False
        for row in rows:
            if isinstance(row, Run):
                tapes = (program.tapes[tape] for tape in phase.segments[row.segment].tapes)
                end = max((ends[op] for tape in tapes for op in tape.ops), default=end)
                waited = False
            elif isinstance(row, Wait):
                waited = True
            elif isinstance(row, Free) and waited and gpus[row.device] is not None:
                tensor = graph.tensors[row.tensor]
                if placement.devices[tensor.producer] != row.device:
                    continue  # what arrived is held to the end of the phase
                memory = memory_of[row.device]
                uses = (tensor.producer, *tensor.consumers)
                own = [ends[op] for op in uses if memory_of[placement.devices[op]] == memory]
                known = max([*own, *sent.get((row.tensor, row.device), [])])
                if known < end:
                    yield Holding(memory, HELD, tensor.nbytes, known, end)


def _results(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    gpus: Gpus,
    replayed: bool,
) -> Iterator[Holding]:
    """What the caller gets, which is copied to memory of his own before anything is let go of."""
    loss, _ = mirrored(graph)
    memory_of, shared = memories(cluster), _shared(placement, gpus)
    forward_ns = _forward_ns(schedule, loss)
    for tensor in graph.tensors:
        home = placement.devices[tensor.producer]
        if tensor.kept and tensor.producer < loss and (replayed or gpus[home] in shared):
            saved = any(op > loss for op in tensor.consumers) and not replayed
            until = schedule.makespan_ns if saved else forward_ns
            start = max(forward_ns - 1, 0)
            if gpus[home] is not None:
                yield Holding(memory_of[home], HELD, tensor.nbytes, start, until)


def _forward_ns(schedule: Schedule, loss: int) -> int:
    """When the forward ends, and all streams meet."""
    return max((span.end_ns for span in schedule.spans if span.op <= loss), default=0)


def _sent(schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """When transfers end, by tensor and source."""
    sent: dict[tuple[int, int], list[int]] = {}
    for row in schedule.transfers:
        sent.setdefault((row.tensor, row.src), []).append(row.end_ns)
    return sent


def _shared(placement: Placement, gpus: Gpus) -> frozenset[str | None]:
    """The GPUs on which several lanes compute."""
    used = [gpu for device, gpu in enumerate(gpus) if device in set(placement.devices)]
    return frozenset(gpu for gpu in used if gpu is not None and used.count(gpu) > 1)


def _static(
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    schedule: Schedule,
    gpus: Gpus,
    program: Program,
) -> Iterator[Holding]:
    """What CUDA graphs leave where it is: outside of the times at which the clock has it anyway."""
    loss, _ = mirrored(graph)
    memory_of, step_ns = memories(cluster), schedule.makespan_ns
    spans = {span.op: span for span in schedule.spans}
    sent = _sent(schedule)
    arrived = {(row.tensor, row.dst): row.start_ns for row in schedule.transfers}
    places = {
        Place(tensor, segment.device)
        for phase in program.phases
        for segment in phase.segments
        for tensor in (*segment.reads, *segment.writes)
    }
    for index, tensor in enumerate(graph.tensors):
        if tensor.producer < loss:
            places |= {Place(index, placement.devices[op]) for op in tensor.consumers if op > loss}
    for place in sorted(places, key=lambda place: (place.tensor, place.device)):
        tensor = graph.tensors[place.tensor]
        if gpus[place.device] is None:
            continue
        uses = [spans[op] for op in (tensor.producer, *tensor.consumers)]
        mine = [span for span in uses if span.device == place.device]
        begin = arrived.get((place.tensor, place.device), min(span.start_ns for span in mine))
        end = max([span.end_ns for span in mine] + sent.get((place.tensor, place.device), []))
        if tensor.kept and tensor.producer == mine[0].op:
            end = step_ns
        memory = memory_of[place.device]
        yield Holding(memory, HELD, tensor.nbytes, 0, begin)
        yield Holding(memory, HELD, tensor.nbytes, end, step_ns)
    for op, row in enumerate(graph.ops):
        device = placement.devices[op]
        if gpus[device] is not None and row.late_bytes:  # the caller gets a copy of each gradient
            yield Holding(memory_of[device], HELD, row.late_bytes, 0, step_ns)
