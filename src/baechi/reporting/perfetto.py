"""The schedule as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

A process per device, with a thread each for computing, sending and receiving (more where transfers
overlap, because slices of one thread must nest), and a memory counter; a process per host with its
launches. Where there are several micro-batches, a thread has their turns. Where devices are ranks,
one has what each did in its latest step, from the first that began it.
A flow arrow goes from the producer over both ends of the transfer to the first consumer
there.
Times are in microseconds, as in the format.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from baechi.problem.segments import segments_of
from baechi.problem.simulation import memory_profile
from baechi.records.placement import Transfer
from baechi.reporting.facts import Plan
from baechi.storage.serialization import write_whole

Event = dict[str, Any]
_COMPUTE = 1
_TURN = 50
_RAN = 60
_SEND = 100
_RECEIVE = 200


def write_trace(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the schedule as a Chrome trace, atomically.

    Raises:
        InputError: The path cannot be written.
    """
    rows = ",\n".join(json.dumps(event) for event in trace_events(plan))
    write_whole(path, f'{{"displayTimeUnit": "ns", "traceEvents": [\n{rows}\n]}}\n')


def trace_events(plan: Plan) -> list[Event]:
    """The events of the trace, in file order."""
    transfers = plan.schedule.transfers
    sends = _lanes(transfers, [transfer.src for transfer in transfers])
    receives = _lanes(transfers, [transfer.dst for transfer in transfers])
    moves = _transfers(plan, sends, receives)
    parts = (
        *(_names(plan, sends, receives), _turns(plan), _ops(plan), moves),
        *(_launches(plan), _counters(plan), _ran(plan)),
    )
    return [event for part in parts for event in part]


def _names(plan: Plan, sends: list[int], receives: list[int]) -> Iterator[Event]:
    lanes: list[dict[int, str]] = [{_COMPUTE: "compute"} for _ in plan.cluster.devices]
    for lane in lanes if plan.turns else ():
        lane[_TURN] = "turns"
    for lane in lanes if any(plan.ran) else ():
        lane[_RAN] = "measured"
    for transfer, send, receive in zip(plan.schedule.transfers, sends, receives, strict=True):
        lanes[transfer.src][_SEND + send] = f"send {send + 1}" if send else "send"
        lanes[transfer.dst][_RECEIVE + receive] = f"receive {receive + 1}" if receive else "receive"
    for device, threads in enumerate(lanes):
        name = plan.cluster.devices[device].name
        yield _metadata("process_name", device, 0, name=name)
        yield _metadata("process_sort_index", device, 0, sort_index=device)
        for thread in sorted(threads):
            yield _metadata("thread_name", device, thread, name=threads[thread])
            yield _metadata("thread_sort_index", device, thread, sort_index=thread)
    for process, host in enumerate(plan.launches, len(lanes)):
        yield _metadata("process_name", process, 0, name=f"host {host}")
        yield _metadata("process_sort_index", process, 0, sort_index=process)
        yield _metadata("thread_name", process, _COMPUTE, name="launch")


def _turns(plan: Plan) -> Iterator[Event]:
    """A slice from the first op of every turn to its last."""
    if not plan.turns:
        return
    one = plan.one
    segments, n = segments_of(one.graph, one.placement), len(one.graph.ops)
    for segment, batch in plan.turns:
        ops = segments[segment]
        first, last = plan.span_of[batch * n + ops[0]], plan.span_of[batch * n + ops[-1]]
        ends, back = (first.start_ns, last.end_ns), one.graph.ops[ops[0]].in_backward
        name = f"{'backward' if back else 'forward'} of batch {batch}"
        details = {"segment": segment, "batch": batch, "ops": len(ops)}
        yield {**_slice(name, "turn", first.device, _TURN, ends), "args": details}


def _ops(plan: Plan) -> Iterator[Event]:
    for span in plan.schedule.spans:
        op = plan.graph.ops[span.op]
        details: Event = {"op": span.op, "persistent_bytes": op.persistent_bytes}
        details["workspace_bytes"] = op.workspace_bytes
        if plan.turns:
            details["batch"] = span.op // len(plan.one.graph.ops)
        if plan.sources[span.op]:
            details["source"] = plan.sources[span.op]
        ends = (span.start_ns, span.end_ns)
        yield {**_slice(op.name, "compute", span.device, _COMPUTE, ends), "args": details}


def _transfers(plan: Plan, sends: list[int], receives: list[int]) -> Iterator[Event]:
    for index, transfer in enumerate(plan.schedule.transfers):
        tensor = plan.graph.tensors[transfer.tensor]
        name = plan.graph.ops[tensor.producer].name
        src, dst = (plan.cluster.devices[d].name for d in (transfer.src, transfer.dst))
        details = {"tensor": transfer.tensor, "nbytes": tensor.nbytes, "src": src, "dst": dst}
        ends = (transfer.start_ns, transfer.end_ns)
        send, receive = _SEND + sends[index], _RECEIVE + receives[index]
        yield {**_slice(name, "send", transfer.src, send, ends), "args": details}
        yield {**_slice(name, "receive", transfer.dst, receive, ends), "args": details}

        producer = plan.span_of[tensor.producer]
        stops = [(producer.start_ns, producer.device, _COMPUTE)]
        stops += [(ends[0], transfer.src, send), (ends[0], transfer.dst, receive)]
        there = [
            plan.span_of[c] for c in tensor.consumers if plan.span_of[c].device == transfer.dst
        ]
        if there:
            first = min(there, key=lambda span: (span.start_ns, span.op))
            stops.append((first.start_ns, first.device, _COMPUTE))
        for stop, (time_ns, device, thread) in enumerate(stops):
            phase = "s" if stop == 0 else "f" if stop == len(stops) - 1 else "t"
            yield {
                **_at(phase, name, device, thread, time_ns),
                "cat": "transfer",
                "id": index + 1,
                **({} if phase == "s" else {"bp": "e"}),
            }


def _launches(plan: Plan) -> Iterator[Event]:
    for process, rows in enumerate(plan.launches.values(), len(plan.cluster.devices)):
        for launch in rows:
            name, ends = plan.graph.ops[launch.op].name, (launch.start_ns, launch.end_ns)
            yield {**_slice(name, "launch", process, _COMPUTE, ends), "args": {"op": launch.op}}


def _counters(plan: Plan) -> Iterator[Event]:
    profiles = memory_profile(plan.graph, plan.cluster, plan.schedule)
    for device, steps in enumerate(profiles):
        for time_ns, nbytes in steps:
            yield {**_at("C", "memory", device, 0, time_ns), "args": {"bytes": nbytes}}


def _ran(plan: Plan) -> Iterator[Event]:
    began = min((row[0][1] for row in plan.ran if row), default=0)
    for device, rows in enumerate(plan.ran):
        for name, start, end in rows:
            yield _slice(name, "measured", device, _RAN, (start - began, end - began))


def _slice(name: str, kind: str, device: int, thread: int, ends: tuple[int, int]) -> Event:
    event = _at("X", name, device, thread, ends[0])
    return {**event, "cat": kind, "dur": (ends[1] - ends[0]) / 1000}


def _at(phase: str, name: str, device: int, thread: int, time_ns: int) -> Event:
    return {"ph": phase, "name": name, "pid": device + 1, "tid": thread, "ts": time_ns / 1000}


def _metadata(what: str, device: int, thread: int, **details: Any) -> Event:
    return {"ph": "M", "name": what, "pid": device + 1, "tid": thread, "args": details}


def _lanes(transfers: Sequence[Transfer], homes: Sequence[int]) -> list[int]:
    """The lowest lane of each transfer's device in which no other transfer is running."""
    lanes = [0] * len(transfers)
    ends: dict[int, list[int]] = defaultdict(list)  # device -> end of the last in each lane
    for index in sorted(range(len(transfers)), key=lambda i: (transfers[i].start_ns, i)):
        transfer, busy = transfers[index], ends[homes[index]]
        free = (lane for lane, end_ns in enumerate(busy) if end_ns <= transfer.start_ns)
        lane = lanes[index] = next(free, len(busy))
        busy[lane : lane + 1] = [transfer.end_ns]
    return lanes
