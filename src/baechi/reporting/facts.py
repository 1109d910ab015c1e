"""The figures of a plan that all reports share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, final

from baechi.errors import InputError
from baechi.placers.searching import PLACERS
from baechi.problem.microbatches import copies_of
from baechi.problem.simulation import Launch, launches, simulate
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.placement import Measurement, Placement, Schedule, Span, Transfer, error_of
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes, format_ns

# A step that launches make this much longer is said to be bound by them.
_NOTED: Final = 0.1

Row = list[str]
# Title, header, rows; a column whose title begins with > is flush right.
Table = tuple[str, list[str], list[Row]]


@final
@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Figures of one device in one step."""

    name: str
    ops: int  # their number
    busy_share: float  # of the step
    peak_bytes: int  # its pool's, where it is in one
    memory_bytes: int  # its limit
    received_bytes: int
    sent_bytes: int

    @property
    def peak_share(self) -> float:
        """The peak as a share of the limit; infinite where there is a peak and no memory."""
        if self.memory_bytes:
            return self.peak_bytes / self.memory_bytes
        return float("inf") if self.peak_bytes else 0.0


@final
@dataclass(frozen=True)
class Plan:
    """The values of one report, checked to belong together.

    The schedule is `simulate(graph, cluster, placement)`; its peaks may be higher. Where that has
    several micro-batches, the graph and the placement become those of all of them, and `one` is the
    plan of one alone.
    With the trace a report has the lines of the model's code, and how it was traced; with a
    measurement, that beside the prediction. `ran` has what each device, if it is a rank's, did in
    its latest step: name, start and end.

    Raises:
        InputError: The placement is of another graph or names an unknown device,
            the schedule is of another placement, or the measurement of another cluster.
    """

    graph: OpGraph
    cluster: Cluster
    placement: Placement
    schedule: Schedule
    traced: Traced | None = None
    measured: Measurement | None = None
    ran: Sequence[Sequence[tuple[str, int, int]]] = ()

    def __post_init__(self) -> None:
        devices = len(self.cluster.devices)
        if self.placement.graph_digest != self.graph.digest:
            raise InputError(
                f"the placement is of graph {self.placement.graph_digest[:12]}..., but this graph "
                f"is {self.graph.digest[:12]}...; solve this graph, or give the placement's own."
            )
        if max(self.placement.devices, default=0) >= devices:
            raise InputError(
                f"the placement uses device {max(self.placement.devices)}, but the cluster has "
                f"{devices} devices, counted from 0; give the cluster that it was solved for."
            )
        if self.placement.microbatches > 1:
            alone = replace(self.placement, microbatches=1, turns=())
            schedule = simulate(self.graph, self.cluster, alone)
            self.__dict__["one"] = Plan(self.graph, self.cluster, alone, schedule, self.traced)
            self.__dict__["turns"] = self.placement.turns
            whole, placement = copies_of(self.graph, self.placement)
            object.__setattr__(self, "graph", whole)
            object.__setattr__(self, "placement", placement)
        ops = len(self.graph.ops)
        placed = sorted((span.op, span.device) for span in self.schedule.spans)
        if (
            placed != list(enumerate(self.placement.devices))
            or len(self.schedule.peak_bytes) != devices
            or any(not self._is_real(transfer) for transfer in self.schedule.transfers)
        ):
            raise InputError(
                f"the schedule is not of this placement of {ops} ops on {devices} devices; "
                "simulate the placement again."
            )
        measured = devices if self.measured is None else len(self.measured.peak_bytes)
        if measured != devices:
            raise InputError(f"peaks of {measured} devices were measured; there are {devices}.")

    def _is_real(self, transfer: Transfer) -> bool:
        devices = range(len(self.cluster.devices))
        known = 0 <= transfer.tensor < len(self.graph.tensors)
        return known and transfer.src in devices and transfer.dst in devices

    @cached_property
    def one(self) -> "Plan":
        """The plan of one micro-batch; itself where there are no more."""
        return self

    @cached_property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """(segment, micro-batch) in launch order; none where there is one micro-batch."""
        return ()

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return len(self.graph.ops) // len(self.one.graph.ops) if self.turns else 1

    @cached_property
    def span_of(self) -> tuple[Span, ...]:
        """The span of every op."""
        return tuple(sorted(self.schedule.spans, key=lambda span: span.op))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The source line of every op, if known from a trace; else `""`."""
        if self.one is not self:
            return self.one.sources * self.microbatches
        known = {} if self.traced is None else {op.name: op.source for op in self.traced.ops}
        ops = self.graph.ops
        named = (ops[op.forward[0]] if op.phase == "backward" else op for op in ops)
        return tuple(known.get(op.name, "") for op in named)

    @cached_property
    def launches(self) -> Mapping[str, tuple[Launch, ...]]:
        """What every host of the cluster launches, in launch order."""
        hosts = dict.fromkeys(device.host for device in self.cluster.devices if device.host)
        found = launches(self.graph, self.cluster, self.schedule) if hosts else ()
        return {host: tuple(row for row in found if row.host == host) for host in hosts}

    @cached_property
    def unlaunched_ns(self) -> int:
        """The step if nothing took a host's time."""
        if not any(self.launches.values()):
            return self.schedule.makespan_ns
        ahead = [bool(row.host) and row.launches_ahead for row in self.cluster.devices]
        devices = tuple(replace(device, host="") for device in self.cluster.devices)
        links = tuple(
            tuple(
                replace(link, overhead_ns=0) if link and free else link
                for link, free in zip(row, ahead, strict=True)
            )
            for row in self.cluster.links
        )
        cluster = replace(self.cluster, devices=devices, links=links)
        return simulate(self.graph, cluster, self.placement).makespan_ns

    @property
    def moved_bytes(self) -> int:
        """Bytes that all transfers send."""
        return sum(self.graph.tensors[t.tensor].nbytes for t in self.schedule.transfers)

    @cached_property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The facts of every device, in the order of the cluster."""
        ops: Counter[int] = Counter()
        busy: Counter[int] = Counter()
        received: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for span in self.schedule.spans:
            ops[span.device] += 1
            busy[span.device] += span.end_ns - span.start_ns
        for transfer in self.schedule.transfers:
            nbytes = self.graph.tensors[transfer.tensor].nbytes
            received[transfer.dst] += nbytes
            sent[transfer.src] += nbytes
        step_ns = self.schedule.makespan_ns or 1
        return tuple(
            DeviceFacts(
                *(device.name, ops[i], busy[i] / step_ns, self.schedule.peak_bytes[i]),
                *(device.memory_bytes, received[i], sent[i]),
            )
            for i, device in enumerate(self.cluster.devices)
        )


def percent(share: float) -> str:
    """A share as text, in percent."""
    return "over" if share == float("inf") else f"{share:.0%}"


def outlook(schedule: Schedule, cluster: Cluster, placed_on: Sequence[int]) -> str:
    """Predicted time and memory of a step, in one line; `placed_on` has the device of every op."""
    used, n = len(set(placed_on)), len(cluster.devices)
    where = f"{used} of {n} devices" if n > 1 else cluster.devices[0].name
    rows = list(zip(schedule.peak_bytes, cluster.devices, strict=True))
    peak, device = max(rows, key=lambda row: row[0] / (row[1].memory_bytes or 1))
    room = f"{format_bytes(peak)} of {format_bytes(device.memory_bytes)}"
    step = format_ns(schedule.makespan_ns)
    return f"predicted: {step} a step, on {where}; the fullest, {device.name}, holds {room}"


def summary(plan: Plan) -> tuple[str, ...]:
    """The plan in a few sentences: its time, its fullest device, its transfers."""
    schedule = plan.schedule
    used = len(set(plan.placement.devices))
    of = f"{used} of {len(plan.devices)} devices" if len(plan.devices) > 1 else "one device"
    many = f" of {plan.microbatches} micro-batches" if plan.turns else ""
    time = f"One step{many} takes {format_ns(schedule.makespan_ns)} on {of}"
    if schedule.lower_bound_ns:
        bound = format_ns(schedule.lower_bound_ns)
        time += f"; no placement can take less than {bound}, so the gap is {schedule.gap:.1%}"
    fullest = max(plan.devices, key=lambda device: (device.peak_share, device.peak_bytes))
    memory = (
        f"The fullest device is {fullest.name}: {format_bytes(fullest.peak_bytes)} of "
        f"{format_bytes(fullest.memory_bytes)} ({percent(fullest.peak_share)})"
    )
    if fullest.peak_bytes > fullest.memory_bytes:
        missing = format_bytes(fullest.peak_bytes - fullest.memory_bytes)
        memory += f", which is {missing} too much: this placement does not fit"
    orders = sum(plan.graph.tensors[transfer.tensor].order for transfer in schedule.transfers)
    transfers = len(schedule.transfers) - orders
    moves = f"{format_bytes(plan.moved_bytes)} move between devices in {transfers} transfer"
    moves += "s" if transfers != 1 else ""
    if orders:
        moves += f"; {orders} without bytes keep random numbers in the model's order"
    rows = (*_taking_turns(plan), *_streaming(plan), *_launching(plan))
    return (f"{time}.", f"{memory}.", f"{moves}.", *rows)


def _streaming(plan: Plan) -> list[str]:
    """A sentence on runs one behind the other, if it was placed for them."""
    stats = plan.placement.stats
    period, latency = stats.get("period_ns"), stats.get("latency_ns")
    if not isinstance(period, int) or not isinstance(latency, int):
        return []
    return [
        f"Of runs one behind the other, one can end every {format_ns(period)} (the period, "
        f"{1e9 / max(period, 1):.4g} a second); each takes {format_ns(latency)} (the latency)."
    ]


def _taking_turns(plan: Plan) -> list[str]:
    """A sentence on the turns of micro-batches, if there are several."""
    if not plan.turns:
        return []
    segments = len(plan.turns) // plan.microbatches
    idle = 1 - sum(facts.busy_share for facts in plan.devices) / len(plan.devices)
    alone_ns = plan.microbatches * plan.one.schedule.makespan_ns
    return [
        f"{segments} segments take turns with the micro-batches, and the devices are idle for "
        f"{idle:.1%} of the step; one micro-batch after the other would take {format_ns(alone_ns)}."
    ]


def _launching(plan: Plan) -> list[str]:
    """A sentence where launches make the step longer by a tenth or more."""
    step_ns = plan.schedule.makespan_ns
    if step_ns - plan.unlaunched_ns <= _NOTED * step_ns:
        return []
    busy_ns = {h: sum(r.end_ns - r.start_ns for r in rows) for h, rows in plan.launches.items()}
    host = max(busy_ns, key=lambda name: busy_ns[name])
    fewer = ", or fewer devices" if len(set(plan.placement.devices)) > 1 else ""
    ways = (
        "Fewer or longer operators end that: "
        f'place(..., cuda_graphs="auto") or compile=True, a larger batch{fewer}.'
    )
    if 2 * sum(op.launch_ns for op in plan.graph.ops) < sum(busy_ns.values()):
        ways = "Most of it hands tensors over: a larger batch or fewer devices end that."
    return [
        f"The step is bound by launches: host {host} is busy with them for "
        f"{format_ns(busy_ns[host])}, and if they took no time a step would take "
        f"{format_ns(plan.unlaunched_ns)}. {ways}"
    ]


def host_rows(plan: Plan) -> list[tuple[str, int, float]]:
    """Per host its name, its launches, and the share of the step for which it is busy."""
    step_ns = plan.schedule.makespan_ns or 1
    return [
        (f"host {host}", len(rows), sum(row.end_ns - row.start_ns for row in rows) / step_ns)
        for host, rows in plan.launches.items()
    ]


def comparison(plan: Plan) -> list[Table]:
    """The prediction beside the measurement, if there is one.

    State of an optimizer that the plan includes but the measured steps lack is subtracted from the
    predicted peak, and the row says so. Of ranks there is the time of each in the latest step.
    """
    measured = plan.measured
    if measured is None:
        return [_rank_table(plan)] if any(plan.ran) else []
    pairs: list[tuple[str, Callable[[int], str], int, int]] = [
        ("step", format_ns, plan.schedule.makespan_ns, measured.step_ns)
    ]
    for device, (facts, peak) in enumerate(zip(plan.devices, measured.peak_bytes, strict=True)):
        absent = measured.absent(device)
        without = f" without {format_bytes(absent)} of optimizer state" if absent else ""
        title = f"peak memory of {facts.name}{without}"
        pairs.append((title, format_bytes, max(facts.peak_bytes - absent, 0), peak))
    pairs.append(("bytes moved", format_bytes, plan.moved_bytes, measured.moved_bytes))
    rows = [
        [what, text(predicted), text(real), error_text(predicted, real)]
        for what, text, predicted, real in pairs
    ]
    return [("Predicted beside measured", ["", ">predicted", ">measured", ">error"], rows)]


def _rank_table(plan: Plan) -> Table:
    rows, step_ns = [], plan.schedule.makespan_ns
    for facts, ran in zip(plan.devices, plan.ran, strict=True):
        spent = Counter[str]()
        for name, start, end in ran:
            spent[name if name in ("receive", "send") else ""] += end - start
        whole = ran[-1][2] - ran[0][1] if ran else 0
        times = whole, spent[""], round(facts.busy_share * step_ns), spent["receive"], spent["send"]
        rows.append([facts.name, *map(format_ns, times)])
    header = ["rank", ">step", ">computes", ">predicted", ">waits and receives", ">sends"]
    return "The latest step of each rank, as measured", header, rows


def placer_tables(plan: Plan) -> list[Table]:
    """The candidates of a placer that chose among several, and its other stats.

    The steps of candidates are in its stats: `"m-etf/coarse": makespan_ns`.
    """
    placer, chosen = plan.placement.placer, plan.placement.stats.get("chosen")
    steps: list[Row] = []
    rest: list[Row] = []
    for name, value in plan.placement.stats.items():
        if "/" in name or name in PLACERS:
            text = format_ns(value) if isinstance(value, int) else str(value)
            steps.append([name, text, "chosen" if name == chosen else ""])
        else:
            rest.append([name, _stat(name, value)])
    if steps:
        rest = [row for row in rest if row[0] not in ("chosen", "makespan_ns")]
    what = "period" if "period_ns" in plan.placement.stats else "step"
    tables: list[Table] = [
        (f"What {placer} chose from", ["candidate", f">{what}", ""], steps),
        (f"What placer {placer} says", ["", ">"], rest),
    ]
    return [table for table in tables if table[2]]


def tracing_table(traced: Traced) -> Table:
    """The attempts to trace the model."""
    rows = [[attempt.rung, attempt.reason or "taken"] for attempt in traced.attempts]
    return (f"How {traced.name} was traced", ["rung", "what happened"], rows)


def error_text(predicted: int, measured: int) -> str:
    """The prediction's error in percent of the measured value; `+10.0 %` is too high."""
    error = error_of(predicted, measured)
    return "-" if error is None else f"{error * 100:+.1f} %"


def _stat(name: str, value: float | str) -> str:
    if isinstance(value, int) and name.endswith("_ns"):
        return format_ns(value)
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
