"""The one clock: time and memory of a placement, by the rules of `docs/cost-model.md`.

`simulate` is a fold of `Timeline.commit` over a placement's order, so a placer and the simulator
compute the same numbers (`csrc/clock/timeline.cc`). `memory_profile` and `peak_holdings` follow the
rules for memory once more, from a schedule alone.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.microbatches import Turns, copies_of
from baechi.problem.problem_arrays import Problem, listed
from baechi.problem.segments import segments_of
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Rows, Schedule, Span, Transfer
from baechi.validation import check_count, check_is


@final
class Timeline:
    """Time and memory of one step that is being placed op by op.

    Query with `earliest_start` and `fits`, place with `commit`. All three take an uncommitted op
    whose producers are committed.

    Raises:
        InputError: An index is out of range, or an op comes out of turn.
    """

    __slots__ = ("_core", "_problem")

    def __init__(
        self, graph: OpGraph, cluster: Cluster, constraints: Constraints | None = None
    ) -> None:
        self._problem = Problem(graph, cluster, constraints)
        self._core = self._problem.timeline()

    def earliest_start(self, op: int, device: int) -> int | None:
        """The start of the op there; `None` where an input has no path."""
        self._check(op, device)
        return self._core.earliest_start(op, device)

    def fits(self, op: int, device: int) -> bool:
        """True if the device's memory would suffice at every time after committing the op there.

        Tensors with uncommitted consumers count as if they stayed, and the first op of a group
        reserves the persistent bytes of the whole group; so if every op fits when it is committed,
        the whole step fits. Groups with a single allowed device are reserved there from the
        beginning. False if the op's group is on another device, if there is no path, or if a
        constraint forbids it.
        """
        self._check(op, device)
        return self._core.fits(op, device)

    def commit(self, op: int, device: int) -> Span:
        """Places the op, whether it fits or not.

        Raises:
            InputError: Also if its group is on another device, an input has no path, or a
                constraint other than a margin is violated.
        """
        self._check(op, device)
        problem = self._problem
        if not problem.allowed[device, problem.arrays.op_group[op]]:
            raise InputError(_why_not(problem, op, device))
        name = problem.cluster.devices[device].name
        if not self._core.allows(op, device):
            raise InputError(
                f"op {self._name(op)} cannot go to {name!r}: {problem.max_devices} other devices "
                "are in use, and max_devices allows no more."
            )
        home = self._core.group_device(op)
        if home not in (-1, device):
            raise InputError(
                f"op {self._name(op)} cannot go to {name!r}: its group "
                f"{problem.graph.ops[op].group!r} is on {problem.cluster.devices[home].name!r}."
            )
        if self._core.earliest_start(op, device) is None:
            raise InputError(_no_path(problem, op, device))
        return Span(op, device, *self._core.commit(op, device))

    def schedule(self) -> Schedule:
        """The whole step.

        Raises:
            InputError: Some ops are not committed.
        """
        left = [op for op in range(self._problem.arrays.ops) if not self._core.committed(op)]
        if left:
            raise InputError(
                f"{len(left)} ops are not committed, the first is {self._name(left[0])}; "
                "commit every op before asking for the schedule."
            )
        return schedule_of(self._problem, self._core)

    def _name(self, op: int) -> str:
        return repr(self._problem.graph.ops[op].name)

    def _check(self, op: int, device: int) -> None:
        for value, size, what in (
            (op, self._problem.arrays.ops, "op"),
            (device, len(self._problem.cluster.devices), "device"),
        ):
            if not isinstance(value, int):
                check_count(value, what)
            if not 0 <= value < size:
                raise InputError(f"{what} {value} does not exist; there are {size} {what}s.")
        if self._core.committed(op):
            raise InputError(f"op {self._name(op)} is already committed.")
        tensor = self._core.waits_for(op)
        if tensor >= 0:
            producer = self._problem.graph.tensors[tensor].producer
            raise InputError(
                f"op {self._name(op)} consumes a tensor of op {self._name(producer)}, which is "
                "not committed; commit producers first."
            )


def simulate(
    graph: OpGraph, cluster: Cluster, placement: Placement, constraints: Constraints | None = None
) -> Schedule:
    """The schedule of a placement, exactly as a placer predicts it.

    Of lanes of a GPU those count that the placement uses. That of several micro-batches is of the
    ops of `copies_of`: op i of batch b is `b * len(graph.ops) + i`.
    It may exceed the memory: see `peak_bytes` and `overflows`. Complexity: linear in ops and
    tensors except for sorting events near a memory's peak; the lower bound is computed on first
    access.

    Raises:
        InputError: The placement is for another graph, names a device that does not exist, has an
            order that is not topological, separates a group, needs a path that does not exist, or
            violates a constraint, which is named. Margins are left to `overflows`.
    """
    problem = Problem(graph, cluster, constraints)
    check_is(placement, Placement, "placement")
    if placement.graph_digest != graph.digest:
        raise InputError(
            f"the placement is for graph {placement.graph_digest[:12]}..., but this is "
            f"{graph.digest[:12]}...; solve again, or load the graph that it was made for."
        )
    launched: Sequence[int] = ()
    if placement.microbatches > 1:
        rows, count = segments_of(graph, placement), placement.microbatches
        whole, copies = copies_of(graph, placement)
        launched = Turns(graph, problem, placement, rows, count).launched_peaks(placement.turns)
        problem, placement = Problem(whole, cluster, constraints), copies
    timeline = replay(problem, placement.devices, placement.order)
    return schedule_of(problem, timeline, launched)


def overflows(
    schedule: Schedule, cluster: Cluster, constraints: Constraints | None = None
) -> tuple[tuple[str, int], ...]:
    """Names and missing bytes of the devices whose memory, less its margin, is exceeded.

    Devices of a pool share their largest margin.
    """
    rows = list(zip(cluster.devices, cluster.memories, schedule.peak_bytes, strict=True))
    margins: Counter[int] = Counter()
    for device, memory, _ in rows:
        margin = 0 if constraints is None else constraints.margins.get(device.name, 0)
        margins[memory] = max(margin, margins[memory])
    missing = ((d.name, peak - max(0, d.memory_bytes - margins[m])) for d, m, peak in rows)
    return tuple((name, nbytes) for name, nbytes in missing if nbytes > 0)


def unsplit_peaks(graph: OpGraph, cluster: Cluster, device: int) -> tuple[int, ...]:
    """Upper bounds on the bytes of every device if the model itself runs on one of them.

    A local variable of its forward may hold on to any tensor until forward returns.
    """
    held = max((op.workspace_bytes for op in graph.ops), default=0)
    held += sum(op.persistent_bytes for op in graph.ops)
    held += sum(row.nbytes for row in graph.tensors if row.producer < graph.n_forward)
    return tuple(held if i == device else 0 for i in range(len(cluster.devices)))


def replay(problem: Problem, devices: Sequence[int], order: Sequence[int]) -> _core.Timeline:
    """A timeline with every op committed to its device in the given order, a permutation.

    Raises:
        InputError: As `simulate`.
    """
    where, launches = _core.indices(tuple(devices)), _core.indices(tuple(order))
    whole = len(where) == len(launches) == problem.arrays.ops
    if problem.constraints is not None or not whole:
        _check_placement(problem, where, launches)
    timeline = problem.in_use(where).timeline()
    stuck = timeline.fold(where, launches)
    if stuck >= 0:
        _check_placement(problem, where, launches)
        raise InputError(_no_path(problem, stuck, devices[stuck]))
    return timeline


def schedule_of(problem: Problem, timeline: _core.Timeline, least: Sequence[int] = ()) -> Schedule:
    """The schedule of a timeline in which every op is committed; `least` are other peaks."""
    peaks = timeline.peaks()
    peaks = list(map(max, peaks, least or peaks))
    return Schedule(
        spans=Rows(Span, timeline.span_columns()),
        transfers=Rows(Transfer, timeline.transfer_columns()),
        peak_bytes=tuple(peaks[pool] for pool in problem.device_pool),
        late_bound=partial(lower_bound_ns, problem),
    )


class Launch(NamedTuple):
    """An op that a host launches, and before it what is sent for it, in [start_ns, end_ns)."""

    host: str
    op: int
    start_ns: int
    end_ns: int


def launches(graph: OpGraph, cluster: Cluster, schedule: Schedule) -> tuple[Launch, ...]:
    """The launches of a schedule, in launch order."""
    problem = Problem(graph, cluster)
    launch_ns = cache(lambda device: problem.launch_ns(device).tolist())
    received_ns: dict[tuple[int, int], int] = {}  # by tensor and receiver
    for row in schedule.transfers:
        link, receiver = cluster.links[row.src][row.dst], cluster.devices[row.dst]
        if link is not None and receiver.host and receiver.launches_ahead:
            received_ns[row.tensor, row.dst] = link.overhead_ns
    free: Counter[str] = Counter()
    found = []
    for span in schedule.spans:
        device, takes_ns = cluster.devices[span.device], launch_ns(span.device)[span.op]
        if received_ns:
            # The first that reads it there is the one for which it was sent.
            inputs = ((tensor, span.device) for tensor in graph.op_inputs[span.op])
            takes_ns += sum(received_ns.pop(row, 0) for row in inputs)
        if takes_ns:
            start_ns = free[device.host] if device.launches_ahead else span.start_ns
            free[device.host] = start_ns + takes_ns
            found.append(Launch(device.host, span.op, start_ns, free[device.host]))
    return tuple(found)


def fits_memory(problem: Problem, timeline: _core.Timeline) -> bool:
    """True if no pool's peak exceeds its memory."""
    return all(p <= m for p, m in zip(timeline.peaks(), problem.pool_memory, strict=True))


def _check_placement(
    problem: Problem, devices: NDArray[np.int32], order: NDArray[np.int32]
) -> None:
    """Raise the error that names what is wrong with a placement, unless it is a missing path."""
    graph, cluster = problem.graph, problem.cluster
    graph.check_placement(devices.tolist(), order.tolist())
    n = len(cluster.devices)
    if len(devices) and devices.max() >= n:
        op = int(devices.argmax())
        raise InputError(
            f"op {graph.ops[op].name!r} is placed on device {devices[op]}, but the cluster has {n} "
            "devices; simulate on the cluster that it was solved for."
        )
    op_group = graph.arrays.op_group
    here = problem.allowed[devices, op_group]
    if not here.all():
        op = int(np.argmin(here))
        raise InputError(_why_not(problem, op, int(devices[op])))
    used = np.unique(devices).tolist()
    if problem.max_devices is not None and len(used) > problem.max_devices:
        raise InputError(
            f"the placement uses {len(used)} devices "
            f"({listed([cluster.devices[device].name for device in used])}), but max_devices is "
            f"{problem.max_devices}."
        )


def _why_not(problem: Problem, op: int, device: int) -> str:
    """The constraint that keeps the op from a device that it may not use."""
    graph, constraints = problem.graph, problem.constraints or Constraints()
    name, target = graph.ops[op].name, problem.cluster.devices[device].name
    if target in constraints.excluded:
        return f"op {name!r} is on {target!r}, which the constraints exclude for all."
    group = graph.ops[op].group
    members = (op,) if group is None else graph.groups[group]
    subjects = [graph.ops[member].name for member in members]
    # A group's name applies where no op has it.
    if group is not None and group not in graph.op_index:
        subjects.append(group)
    for subject in subjects:
        whose = f"op {name!r}" if subject == name else f"{subject!r}, with which {name!r} shares it"
        if target in constraints.forbidden.get(subject, ()):
            return f"op {name!r} is on {target!r}, which the constraints forbid to {whose}."
        if constraints.pins.get(subject, target) != target:
            return (
                f"op {name!r} is on {target!r}, but the constraints pin {whose} to "
                f"{constraints.pins[subject]!r}."
            )
    return f"op {name!r} is on {target!r}, which the constraints forbid to op {name!r}."


def _no_path(problem: Problem, op: int, device: int) -> str:
    graph, cluster = problem.graph, problem.cluster
    producers = {graph.tensors[t].producer for t in graph.op_inputs[op]}
    names = ", ".join(repr(graph.ops[producer].name) for producer in sorted(producers))
    return (
        f"op {graph.ops[op].name!r} cannot run on {cluster.devices[device].name!r}: there is no "
        f"link from the device of one of its producers ({names}). Add the link or place them "
        "together."
    )


Steps = tuple[tuple[int, int], ...]

PERSISTENT = "parameters and optimizer"
TENSORS = "tensors made here"
COPIES = "copies received"
WORKSPACE = "workspace"


class Holding(NamedTuple):
    """Bytes that a memory holds for one reason, in [start_ns, stop_ns)."""

    memory: int
    reason: str
    nbytes: int
    start_ns: int
    stop_ns: int


def memory_profile(
    graph: OpGraph, cluster: Cluster, schedule: Schedule, longer: Iterable[Holding] = ()
) -> tuple[Steps, ...]:
    """The memory of each device as steps `(time_ns, bytes)`, from time 0 on.

    A step holds until the next one's time; the last one is at the end of the schedule, and the
    highest is `Schedule.peak_bytes`. Devices of one pool share one memory and have equal steps.
    `longer` are additional holdings. O(n log n) time in ops, consumers and transfers.
    """
    memory_of = cluster.memories
    level: Counter[int] = Counter()
    changes: dict[int, Counter[int]] = {memory: Counter() for memory in memory_of}
    for held in chain(_holdings(graph, memory_of, schedule), longer):
        if held.reason == PERSISTENT:
            level[held.memory] += held.nbytes
        elif held.start_ns < held.stop_ns:
            changes[held.memory][held.start_ns] += held.nbytes
            changes[held.memory][held.stop_ns] -= held.nbytes
    profiles: dict[int, Steps] = {}
    for memory, row in changes.items():
        nbytes = level[memory]
        steps = {0: nbytes}
        for time_ns in sorted(row):
            nbytes += row[time_ns]
            if row[time_ns]:
                steps[time_ns] = nbytes
        steps[max([schedule.makespan_ns, *row])] = nbytes
        profiles[memory] = tuple(steps.items())
    return tuple(profiles[memory] for memory in memory_of)


def peak_holdings(
    graph: OpGraph, cluster: Cluster, schedule: Schedule
) -> tuple[tuple[int, Mapping[str, int]], ...]:
    """The first time of each device's peak, and the bytes held then by reason."""
    memory_of = cluster.memories
    profiles = memory_profile(graph, cluster, schedule)
    peak_ns = [max(steps, key=lambda step: step[1])[0] for steps in profiles]
    held_at_peak: dict[int, Counter[str]] = {memory: Counter() for memory in memory_of}
    for held in _holdings(graph, memory_of, schedule):
        at_peak = held.start_ns <= peak_ns[held.memory] < held.stop_ns
        if at_peak or held.reason == PERSISTENT:
            held_at_peak[held.memory][held.reason] += held.nbytes
    return tuple(
        (time_ns, held_at_peak[memory]) for time_ns, memory in zip(peak_ns, memory_of, strict=True)
    )


def _holdings(graph: OpGraph, memory_of: list[int], schedule: Schedule) -> Iterator[Holding]:
    graph = graph.explicit
    end_ns = schedule.makespan_ns
    span_of = {span.op: span for span in schedule.spans}
    launched: dict[int, int] = {}  # op -> memory
    for span in schedule.spans:
        op, memory = graph.ops[span.op], memory_of[span.device]
        apart = (nbytes for other, nbytes in op.beside if launched.get(other, memory) != memory)
        workspace = op.workspace_bytes - sum(apart)
        launched[span.op] = memory
        yield Holding(memory, PERSISTENT, op.persistent_bytes, 0, end_ns)
        yield Holding(memory, WORKSPACE, workspace, span.start_ns, span.end_ns)
        # Inputs that are already freed.
        yield Holding(memory, TENSORS, -op.reused_bytes, span.start_ns, span.end_ns)
    arrivals: dict[int, dict[int, int]] = defaultdict(dict)  # tensor -> memory -> start of copy
    departed: Counter[int] = Counter()  # tensor -> end of its last transfer out
    for transfer in schedule.transfers:
        memory = memory_of[transfer.dst]
        if memory_of[transfer.src] != memory:  # there are no copies inside a pool
            start_ns = arrivals[transfer.tensor].get(memory, transfer.start_ns)
            arrivals[transfer.tensor][memory] = min(start_ns, transfer.start_ns)
            departed[transfer.tensor] = max(departed[transfer.tensor], transfer.end_ns)
    for index, tensor in enumerate(graph.tensors):
        producer = span_of[tensor.producer]
        home = memory_of[producer.device]
        last_use: Counter[int] = Counter()
        readers: dict[int, set[int]] = defaultdict(set)
        for consumer in tensor.consumers:
            span = span_of[consumer]
            memory = memory_of[span.device]
            last_use[memory] = max(last_use[memory], span.end_ns)
            readers[memory].add(consumer)
        stays = tensor.kept or not tensor.consumers
        stop_ns = end_ns if stays else max(last_use[home], departed[index])
        yield Holding(home, TENSORS, tensor.nbytes, producer.start_ns, stop_ns)
        for memory, start_ns in arrivals[index].items():
            nbytes = tensor.copy_bytes(readers[memory])
            yield Holding(memory, COPIES, nbytes, start_ns, last_use[memory])


def period_ns(graph: OpGraph, cluster: Cluster, placement: Placement, schedule: Schedule) -> int:
    """The time per request of a long row of them: the largest load of a device, port or host.

    It is approached whatever the order of one, as devices that wait work on later ones.
    """
    busy: Counter[tuple[str, int | str]] = Counter()
    for span in schedule.spans:
        busy["device", span.device] += span.end_ns - span.start_ns
    for moved in schedule.transfers if cluster.ports != "none" else ():
        shared = cluster.ports == "shared"
        for end, device in (("from", moved.src), ("to", moved.dst)):
            busy["port" if shared else end, device] += moved.end_ns - moved.start_ns
    for op, device in zip(graph.ops, placement.devices, strict=True):
        busy["host", cluster.devices[device].host or device] += op.launch_ns
    return max(busy.values(), default=0)
