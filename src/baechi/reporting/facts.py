"""The figures of a plan that all reports share."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import final

from baechi.errors import InputError
from baechi.placers.solving import PLACERS
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.placement import Measurement, Placement, Schedule, Span, Transfer, error_of
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes, format_ns


@final
@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Figures of one device in one step.

    Attributes:
        name: Its name in the cluster.
        ops: Number of ops there.
        busy_ns: Time in which it computes.
        busy_share: That time as a share of the step.
        persistent_bytes: Held for the whole step.
        peak_bytes: Its peak; its pool's, where it is in one.
        memory_bytes: Its limit.
        received_bytes: Bytes that arrive.
        sent_bytes: Bytes that leave.
    """

    name: str
    ops: int
    busy_ns: int
    busy_share: float
    persistent_bytes: int
    peak_bytes: int
    memory_bytes: int
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

    def __post_init__(self) -> None:
        ops, devices = len(self.graph.ops), len(self.cluster.devices)
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
    def span_of(self) -> tuple[Span, ...]:
        """The span of every op."""
        return tuple(sorted(self.schedule.spans, key=lambda span: span.op))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The source line of every op, if known from a trace; else `""`."""
        known = {} if self.traced is None else {op.name: op.source for op in self.traced.ops}
        ops = self.graph.ops
        named = (ops[op.forward[0]] if op.phase == "backward" else op for op in ops)
        return tuple(known.get(op.name, "") for op in named)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all transfers send."""
        return sum(self.graph.tensors[t.tensor].nbytes for t in self.schedule.transfers)

    @cached_property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The facts of every device, in the order of the cluster."""
        return device_facts(self.graph, self.cluster, self.schedule)


def device_facts(graph: OpGraph, cluster: Cluster, schedule: Schedule) -> tuple[DeviceFacts, ...]:
    """Figures of every device in one step, in the order of the cluster."""
    ops: Counter[int] = Counter()
    busy: Counter[int] = Counter()
    persistent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for span in schedule.spans:
        ops[span.device] += 1
        busy[span.device] += span.end_ns - span.start_ns
        persistent[span.device] += graph.ops[span.op].persistent_bytes
    for transfer in schedule.transfers:
        nbytes = graph.tensors[transfer.tensor].nbytes
        received[transfer.dst] += nbytes
        sent[transfer.src] += nbytes
    makespan_ns = schedule.makespan_ns
    return tuple(
        DeviceFacts(
            name=device.name,
            ops=ops[index],
            busy_ns=busy[index],
            busy_share=busy[index] / makespan_ns if makespan_ns else 0.0,
            persistent_bytes=persistent[index],
            peak_bytes=schedule.peak_bytes[index],
            memory_bytes=device.memory_bytes,
            received_bytes=received[index],
            sent_bytes=sent[index],
        )
        for index, device in enumerate(cluster.devices)
    )


def percent(share: float) -> str:
    """A share as text, in percent."""
    return "over" if share == float("inf") else f"{share:.0%}"


def summary(plan: Plan) -> tuple[str, ...]:
    """The plan in a few sentences: its time, its fullest device, its transfers."""
    schedule = plan.schedule
    used = len(set(plan.placement.devices))
    of = f"{used} of {len(plan.devices)} devices" if len(plan.devices) > 1 else "one device"
    time = f"One step takes {format_ns(schedule.makespan_ns)} on {of}"
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
    transfers = len(schedule.transfers)
    moves = f"{format_bytes(plan.moved_bytes)} move between devices in {transfers} transfer"
    moves += "s" if transfers != 1 else ""
    return (f"{time}.", f"{memory}.", f"{moves}.")


def candidates(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """The placer's candidates, as name, step and remark.

    A placer that chose among several lists them in its stats: `"m-etf/coarse": makespan_ns`.
    """
    known = {name: text for name, text in plan.placement.stats.items() if _is_candidate(name)}
    chosen = plan.placement.stats.get("chosen")
    return tuple(
        (name, format_ns(value) if isinstance(value, int) else str(value),
         "chosen" if name == chosen else "")
        for name, value in known.items()
    )  # fmt: skip


def _is_candidate(name: str) -> bool:
    """True if an entry of `stats` is the step of a candidate: `m-etf/fine`, or a placer."""
    return "/" in name or name in PLACERS


def stats(plan: Plan) -> tuple[tuple[str, str], ...]:
    """The placer's other stats, as name and text, including the chosen candidate."""
    told = {"chosen", "makespan_ns"} if candidates(plan) else set()
    items = plan.placement.stats.items()
    return tuple(
        (name, _stat(name, value))
        for name, value in items
        if not _is_candidate(name) and name not in told
    )


def comparison(plan: Plan) -> tuple[tuple[str, str, str, str], ...]:
    """Rows of quantity, prediction, measurement and error; empty if nothing was measured.

    State of an optimizer that the plan includes but the measured steps lack is subtracted from the
    predicted peak, and the row says so.
    """
    measured = plan.measured
    if measured is None:
        return ()
    predicted = plan.schedule.makespan_ns
    texts = (format_ns(predicted), format_ns(measured.step_ns))
    rows = [("step", *texts, error_text(predicted, measured.step_ns))]
    pairs = []
    for device, (facts, peak) in enumerate(zip(plan.devices, measured.peak_bytes, strict=True)):
        absent = measured.absent(device)
        without = f" without {format_bytes(absent)} of optimizer state" if absent else ""
        title = f"peak memory of {facts.name}{without}"
        pairs.append((title, max(facts.peak_bytes - absent, 0), peak))
    pairs.append(("bytes moved", plan.moved_bytes, measured.moved_bytes))
    for what, predicted, real in pairs:
        sizes = (format_bytes(predicted), format_bytes(real))
        rows.append((what, *sizes, error_text(predicted, real)))
    return tuple(rows)


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
