"""The one clock: time and memory of a placement.

`Timeline` keeps the account, and `simulate` is a fold of its `commit` over a placement's order, so
a placer and the simulator compute the same numbers. The rules:

- A device runs one op at a time, in commit order. An op starts when its device is free, its
  producers have ended and its inputs have arrived.
- An input that is not in the device's memory is sent from its producer's device once the producer
  has ended and the send port there and the receive port here are free, and holds both until it
  arrives. An op's missing inputs are sent in the order (producer's end, tensor index), when the op
  is committed. Each of these transfers keeps the receiving device busy for the link's overhead, so
  the op takes that much longer. Between devices of one pool a tensor costs only the link's latency,
  without a transfer and its overhead.
- Memory of a pool at a time: the persistent bytes of all groups placed there, tensors produced
  there (from their producer's start to the end of their last consumer there and of their last
  transfer out), copies received (from their transfer's start to the end of their last consumer
  there), and the workspace of running ops. Tensors that are kept, or that have no consumer, stay
  until the end of the step. Intervals are half-open, [start, end).
- Constraints limit the devices of each group, the number of devices in use, and the usable memory.

The implementation is `csrc/clock/timeline.cc`; an independent, slow one is
`tests/support/oracle.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NoReturn, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.errors import InputError
from baechi.problem.allowed_devices import check_devices, why_not
from baechi.problem.bounds import lower_bound_ns
from baechi.problem.problem_arrays import Problem
from baechi.records.cluster import Cluster
from baechi.records.constraints import Constraints
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
        constraints = self._problem.constraints
        if constraints is not None and not self._core.allows(op, device):
            self._forbid(constraints, op, device)
        group_device = self._core.group_device(op)
        if group_device not in (-1, device):
            names = [self._problem.cluster.devices[d].name for d in (device, group_device)]
            raise InputError(
                f"op {self._name(op)} cannot go to {names[0]!r}: its group "
                f"{self._problem.graph.ops[op].group!r} is on {names[1]!r}."
            )
        if self._core.earliest_start(op, device) is None:
            raise InputError(_no_path(self._problem, op, device))
        return Span(op, device, *self._core.commit(op, device))

    def schedule(self) -> Schedule:
        """The whole step.

        Raises:
            InputError: Some ops are not committed.
        """
        left = [op for op in range(len(self._problem.graph.ops)) if not self._core.committed(op)]
        if left:
            raise InputError(
                f"{len(left)} ops are not committed, the first is {self._name(left[0])}; "
                "commit every op before asking for the schedule."
            )
        return schedule_of(self._problem, self._core)

    def _forbid(self, constraints: Constraints, op: int, device: int) -> NoReturn:
        problem = self._problem
        if not problem.allowed[device, problem.graph.arrays.op_group[op]]:
            raise InputError(why_not(problem.graph, problem.cluster, constraints, op, device))
        raise InputError(
            f"op {self._name(op)} cannot go to {problem.cluster.devices[device].name!r}: "
            f"{constraints.max_devices} other devices are in use, and max_devices allows no more."
        )

    def _name(self, op: int) -> str:
        return repr(self._problem.graph.ops[op].name)

    def _check(self, op: int, device: int) -> None:
        for value, size, what in (
            (op, len(self._problem.graph.ops), "op"),
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
    graph: OpGraph,
    cluster: Cluster,
    placement: Placement,
    constraints: Constraints | None = None,
) -> Schedule:
    """The schedule of a placement, exactly as a placer predicts it.

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
    return schedule_of(problem, replay(problem, placement.devices, placement.order))


def overflows(
    schedule: Schedule, cluster: Cluster, constraints: Constraints | None = None
) -> tuple[tuple[str, int], ...]:
    """Names and missing bytes of the devices whose memory, less its margin, is exceeded.

    Devices of a pool share their largest margin.
    """
    margins: dict[str, int] = {}
    for device in cluster.devices:
        margin = 0 if constraints is None else constraints.margins.get(device.name, 0)
        pool = device.pool or f"alone:{device.name}"
        margins[pool] = max(margin, margins.get(pool, 0))
    rows = (
        (row.name, peak - max(0, row.memory_bytes - margins[row.pool or f"alone:{row.name}"]))
        for row, peak in zip(cluster.devices, schedule.peak_bytes, strict=True)
    )
    return tuple((name, missing) for name, missing in rows if missing > 0)


def replay(problem: Problem, devices: Sequence[int], order: Sequence[int]) -> _core.Timeline:
    """A timeline with every op committed to its device in the given order, a permutation.

    Raises:
        InputError: As `simulate`.
    """
    where, launches = _core.indices(tuple(devices)), _core.indices(tuple(order))
    whole = len(where) == len(launches) == len(problem.graph.ops)
    if problem.constraints is not None or not whole:
        _check_placement(problem, where, launches)
    timeline = problem.timeline()
    stuck = timeline.fold(where, launches)
    if stuck >= 0:
        _check_placement(problem, where, launches)
        raise InputError(_no_path(problem, stuck, devices[stuck]))
    return timeline


def schedule_of(problem: Problem, timeline: _core.Timeline) -> Schedule:
    """The schedule of a timeline in which every op is committed."""
    peaks = timeline.peaks()
    return Schedule.with_late_bound(
        spans=Rows(Span, timeline.span_columns()),
        transfers=Rows(Transfer, timeline.transfer_columns()),
        peak_bytes=tuple(peaks[pool] for pool in problem.device_pool),
        bound=partial(lower_bound_ns, problem),
    )


def fits_memory(problem: Problem, timeline: _core.Timeline) -> bool:
    """True if no pool's peak exceeds its memory."""
    return all(p <= m for p, m in zip(timeline.peaks(), problem.pool_memory, strict=True))


def _check_placement(
    problem: Problem, devices: NDArray[np.int32], order: NDArray[np.int32]
) -> None:
    """Raise the error that names what is wrong with a placement, unless it is a missing path."""
    graph, cluster = problem.graph, problem.cluster
    if len(devices) != len(graph.ops):
        raise InputError(f"the placement has {len(devices)} ops, the graph {len(graph.ops)}.")
    n = len(cluster.devices)
    if len(devices) and devices.max() >= n:
        op = int(devices.argmax())
        raise InputError(
            f"op {graph.ops[op].name!r} is placed on device {devices[op]}, but the cluster has {n} "
            "devices; simulate on the cluster that it was solved for."
        )
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    producers, consumers = graph.arrays.edges()
    early = rank[consumers] < rank[producers]
    if early.any():
        edge = int(early.argmax())
        names = graph.ops[consumers[edge]].name, graph.ops[producers[edge]].name
        raise InputError(
            f"the order launches op {names[0]!r} before op {names[1]!r}, whose tensor it "
            "consumes; an order must be topological."
        )
    op_group = graph.arrays.op_group
    home = np.empty(graph.arrays.groups, np.int64)
    home[op_group] = devices
    parted = home[op_group] != devices
    if parted.any():
        op = int(parted.argmax())
        members = graph.groups[graph.ops[op].group or ""]
        other = next(member for member in members if devices[member] != devices[op])
        first, second = (cluster.devices[devices[o]].name for o in (op, other))
        raise InputError(
            f"group {graph.ops[op].group!r} is parted: op {graph.ops[op].name!r} is on "
            f"{first!r} and op {graph.ops[other].name!r} on {second!r}."
        )
    if problem.constraints is not None:
        check_devices(
            graph, cluster, problem.constraints, problem.allowed, devices.astype(np.int64)
        )


def _no_path(problem: Problem, op: int, device: int) -> str:
    graph, cluster = problem.graph, problem.cluster
    producers = {graph.tensors[t].producer for t in graph.op_inputs[op]}
    names = ", ".join(repr(graph.ops[producer].name) for producer in sorted(producers))
    return (
        f"op {graph.ops[op].name!r} cannot run on {cluster.devices[device].name!r}: there is no "
        f"link from the device of one of its producers ({names}). Add the link or place them "
        "together."
    )
