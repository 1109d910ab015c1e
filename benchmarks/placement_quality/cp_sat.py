"""The CP-SAT models behind `exact`, and the process that solves them.

The model is a relaxation of the clock (`baechi.problem.simulation`): every valid schedule is a
solution of it, so what CP-SAT proves about it holds for all placements. It has

- one device per group, one op at a time per device (`_ops`);
- one transfer per tensor and receiving pool, from its producer's device, over one send and one
  receive port, or the shared one, that it occupies for its time (`_transfers`);
- the hand-over inside a pool, for the link's latency and without a copy (`_arrivals`);
- memory as the clock counts it: persistent bytes, outputs from their producer's start to their last
  use or the last transfer's end, copies from their transfer's start to their last use, workspaces,
  and what is kept to the end (`_memory`).

It is larger than the clock in one point: ops and transfers may wait and ports may serve in any
order, where the clock starts everything at once in launch order; and it leaves out what a transfer
keeps its receiver busy. So an answer is only called proven
where `baechi.simulate` reaches the bound with the placement that was read off the solution.
"""

import heapq
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any, Final

from benchmarks.placement_quality.exact import Exact, Fit
from ortools.sat.python import cp_model

import baechi
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay

# Orders that are tried for the devices of a solution.
_ORDERS: Final = 1000


def solve(
    graph: baechi.OpGraph,
    cluster: baechi.Cluster,
    seconds: float,
    workers: int,
    hint: baechi.Placement | None,
) -> Exact:
    """As `exact.solve_exactly`, in this process."""
    found: dict[int, baechi.Placement] = {}
    problem = Problem(graph, cluster)
    if hint is not None:
        _add(found, problem, hint)
    model = _Model(problem, min(found, default=None))
    model.model.minimize(model.makespan)
    solver, status = _solved(model, seconds, workers)
    if status == cp_model.INFEASIBLE:
        return Exact(None, 0, None, None, proven=True)
    bound_ns = max(0, round(solver.best_objective_bound))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        for placement in model.placements(solver):
            _add(found, problem, placement)
    if not found:
        return Exact(None, bound_ns, None, None, proven=False)
    best = min(found)
    proven = best == bound_ns
    return Exact(best if proven else None, bound_ns, found[best], best, proven)


def fit(graph: baechi.OpGraph, cluster: baechi.Cluster, seconds: float, workers: int) -> Fit:
    """As `exact.fits_exactly`, in this process."""
    problem = Problem(graph, cluster)
    _, status = _solved(_Packing(problem), seconds, workers)
    if status == cp_model.INFEASIBLE:
        return Fit(persistent=False, full=False)
    persistent = True if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    model = _Model(problem, None)
    solver, status = _solved(model, seconds, workers)
    if status == cp_model.INFEASIBLE:
        return Fit(persistent, full=False)
    found: dict[int, baechi.Placement] = {}
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        for placement in model.placements(solver):
            _add(found, problem, placement)
    if found:
        return Fit(persistent=True, full=True, placement=found[min(found)])
    return Fit(persistent, full=None)


def _add(found: dict[int, baechi.Placement], problem: Problem, placement: baechi.Placement) -> None:
    """Notes a placement under its makespan, if it is valid."""
    try:
        timeline = replay(problem, placement.devices, placement.order)
    except baechi.InputError:
        return
    if fits_memory(problem, timeline):
        found.setdefault(timeline.makespan(), placement)


def _solved(model: "_Model | _Packing", seconds: float, workers: int) -> tuple[Any, Any]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(model.model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT refuses the model: {model.model.validate()}")
    return solver, status


class _Packing:
    """A device for every group, such that what is certainly needed at once fits."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = cp_model.CpModel()
        devices = range(len(problem.cluster.devices))
        # on[group][device]
        self.on = [[self.model.new_bool_var("") for _ in devices] for _ in problem.group_ops]
        for row in self.on:
            self.model.add_exactly_one(row)
        self._bytes()
        self._equal_devices()

    def persistent(self, pool: int) -> Any:
        """The persistent bytes in a pool."""
        return sum(
            nbytes * self.on[group][device]
            for group, nbytes in enumerate(self.problem.arrays.group_persistent)
            for device in self.problem.pool_devices[pool]
        )

    def _bytes(self) -> None:
        problem, graph = self.problem, self.problem.graph
        for pool, memory in enumerate(problem.pool_memory):
            held = self.persistent(pool)
            self.model.add(held <= memory)
            for op, group in enumerate(problem.op_group):
                tensors = graph.op_inputs[op] + graph.op_outputs[op]
                running = sum(graph.tensors[t].nbytes for t in tensors)
                running += graph.ops[op].net_workspace_bytes
                for device in problem.pool_devices[pool]:
                    # An op of no time holds nothing while it runs.
                    if running and problem.durations[problem.device_class[device]][op]:
                        here = self.on[group][device]
                        self.model.add(held + running <= memory).only_enforce_if(here)

    def _equal_devices(self) -> None:
        """Of equal devices the earlier ones are used first, in the order of the groups."""
        for a, b in _twins(self.problem):
            for group, row in enumerate(self.on):
                before = [self.on[g][a] for g in range(group)]
                self.model.add_bool_or([row[b].negated(), *before])


class _Model(_Packing):
    """All of a schedule that takes at most `horizon`, or what it takes one after the other."""

    def __init__(self, problem: Problem, horizon: int | None) -> None:
        super().__init__(problem)
        self.horizon = _serial_ns(problem) if horizon is None else horizon
        self.makespan = self._time("makespan")
        devices = range(len(problem.cluster.devices))
        # Per device what occupies it and its ports; per pool what its memory holds.
        self.running: list[list[Any]] = [[] for _ in devices]
        self.sending: list[list[Any]] = [[] for _ in devices]
        self.receiving: list[list[Any]] = [[] for _ in devices]
        self.held: list[list[tuple[Any, int]]] = [[] for _ in problem.pool_memory]
        self._ops()
        self._transfers()
        self._arrivals()
        self._memory()
        for device in devices:
            self.model.add_no_overlap(self.running[device])
            if problem.cluster.ports == "shared":
                self.model.add_no_overlap(self.sending[device] + self.receiving[device])
            elif problem.cluster.ports == "duplex":
                self.model.add_no_overlap(self.sending[device])
                self.model.add_no_overlap(self.receiving[device])

    def placements(self, solver: Any) -> Iterable[baechi.Placement]:
        """Those that a solution may stand for.

        Ops are launched as they start, or as their transfers do, or in an order near one of these:
        the clock waits for nothing, and so may reach with another order what the solution has.
        """
        problem, graph = self.problem, self.problem.graph
        devices = tuple(
            next(d for d, here in enumerate(self.on[group]) if solver.boolean_value(here))
            for group in problem.op_group
        )
        starts = [solver.value(start) for start in self.start]
        ends = [solver.value(end) for end in self.end]
        first = list(starts)
        for (tensor, device), present in self.sent.items():
            if solver.boolean_value(present):
                for op in graph.tensors[tensor].consumers:
                    if devices[op] == device:
                        first[op] = min(first[op], solver.value(self.sent_at[tensor, device]))
        draw = random.Random(0)
        step = solver.value(self.makespan)
        for attempt in range(_ORDERS):
            near = step * (attempt // 2) / (4 * _ORDERS)
            keys = first if attempt % 2 else starts
            rows = [
                (key + draw.uniform(-near, near), end) for key, end in zip(keys, ends, strict=True)
            ]
            yield baechi.Placement(graph.digest, devices, _order(graph, rows), "exact")

    def _time(self, name: str = "") -> Any:
        return self.model.new_int_var(0, self.horizon, name)

    def _here(self, op: int, device: int) -> Any:
        return self.on[self.problem.op_group[op]][device]

    def _inside(self, op: int, pool: int) -> Any:
        """1 where the op is in the pool, else 0."""
        return sum(self._here(op, device) for device in self.problem.pool_devices[pool])

    def _ops(self) -> None:
        problem = self.problem
        self.start = [self._time() for _ in problem.graph.ops]
        self.end = []
        for op, start in enumerate(self.start):
            time = 0
            for device, kind in enumerate(problem.device_class):
                duration, here = int(problem.durations[kind][op]), self._here(op, device)
                time += duration * here
                interval = self.model.new_optional_fixed_size_interval_var(
                    start, duration, here, ""
                )
                self.running[device].append(interval)
                workspace = problem.graph.ops[op].net_workspace_bytes
                self.held[problem.device_pool[device]].append((interval, workspace))
            self.end.append(self._time())
            self.model.add(self.end[op] == start + time)
            self.model.add(self.makespan >= self.end[op])
        for tensor in problem.graph.tensors:
            for consumer in tensor.consumers:
                self.model.add(self.start[consumer] >= self.end[tensor.producer])

    def _transfers(self) -> None:
        """`sent[tensor, device]` is whether the device receives it, from `sent_at` to `arrived`."""
        self.sent: dict[tuple[int, int], Any] = {}
        self.sent_at: dict[tuple[int, int], Any] = {}
        self.arrived: dict[tuple[int, int], Any] = {}
        cluster, model = self.problem.cluster, self.model
        for index, tensor in enumerate(self.problem.graph.tensors):
            for pool, members in enumerate(self.problem.pool_devices):
                home = self._inside(tensor.producer, pool)
                received = []
                for device in members if tensor.consumers else ():
                    key = index, device
                    sent, start, end = model.new_bool_var(""), self._time(), self._time()
                    self.sent[key], self.sent_at[key], self.arrived[key] = sent, start, end
                    received.append(sent)
                    model.add(sum(self._here(op, device) for op in tensor.consumers) >= sent)
                    model.add(start >= self.end[tensor.producer])
                    arcs = []
                    for src, links in enumerate(cluster.links):
                        link = links[device]
                        if link is None or src in members:
                            continue
                        arc, time = model.new_bool_var(""), link.transfer_ns(tensor.nbytes)
                        arcs.append(arc)
                        model.add_implication(arc, self._here(tensor.producer, src))
                        model.add(end == start + time).only_enforce_if(arc)
                        interval = model.new_optional_fixed_size_interval_var(start, time, arc, "")
                        self.sending[src].append(interval)
                        self.receiving[device].append(interval)
                    model.add(sum(arcs) == sent)
                if received:
                    model.add(sum(received) <= 1 - home)
                for op in tensor.consumers:
                    model.add(sum(received) >= self._inside(op, pool) - home)

    def _arrivals(self) -> None:
        for index, tensor in enumerate(self.problem.graph.tensors):
            for members in self.problem.pool_devices:
                for holder in members:
                    made = self._here(tensor.producer, holder)
                    for op in tensor.consumers:
                        got = self.sent[index, holder]
                        for device in members:
                            here = self._here(op, device)
                            self._hand_over(op, holder, device, self.end[tensor.producer],
                                            [made, here])  # fmt: skip
                            self._hand_over(op, holder, device, self.arrived[index, holder],
                                            [got, here])  # fmt: skip

    def _hand_over(self, op: int, holder: int, device: int, since: Any, when: list[Any]) -> None:
        if holder == device:
            self.model.add(self.start[op] >= since).only_enforce_if(when)
            return
        link = self.problem.cluster.links[holder][device]
        if link is None:
            self.model.add_bool_or([one.negated() for one in when])
        else:
            self.model.add(self.start[op] >= since + link.latency_ns).only_enforce_if(when)

    def _memory(self) -> None:
        problem, model = self.problem, self.model
        for index, tensor in enumerate(problem.graph.tensors):
            if tensor.nbytes == 0:
                continue
            for pool, members in enumerate(problem.pool_devices):
                until, present = self._time(), model.new_bool_var("")
                model.add(self._inside(tensor.producer, pool) == present)
                model.add(until >= self.end[tensor.producer])
                if tensor.kept or not tensor.consumers:
                    model.add(until == self.makespan)
                self._used_until(tensor, members, until, present)
                for (t, device), sent in self.sent.items():
                    if t == index and device not in members:
                        model.add(until >= self.arrived[t, device]).only_enforce_if(present, sent)
                self._hold(pool, self.start[tensor.producer], until, present, tensor.nbytes)
                for device in members if tensor.consumers else ():
                    until, sent = self._time(), self.sent[index, device]
                    model.add(until >= self.arrived[index, device])
                    self._used_until(tensor, members, until, sent)
                    self._hold(pool, self.sent_at[index, device], until, sent, tensor.nbytes)
        for pool, memory in enumerate(problem.pool_memory):
            left = model.new_int_var(0, memory, "")
            model.add(left == memory - self.persistent(pool))
            intervals = [interval for interval, nbytes in self.held[pool] if nbytes]
            sizes = [nbytes for _, nbytes in self.held[pool] if nbytes]
            model.add_cumulative(intervals, sizes, left)

    def _used_until(
        self, tensor: baechi.Tensor, members: tuple[int, ...], until: Any, present: Any
    ) -> None:
        for op in tensor.consumers:
            for device in members:
                here = self._here(op, device)
                self.model.add(until >= self.end[op]).only_enforce_if(here, present)

    def _hold(self, pool: int, start: Any, until: Any, present: Any, nbytes: int) -> None:
        size = self._time()
        interval = self.model.new_optional_interval_var(start, size, until, present, "")
        self.held[pool].append((interval, nbytes))


def _serial_ns(problem: Problem) -> int:
    """At least what any order takes in which nothing waits without need."""
    links = [link for row in problem.cluster.links for link in row if link is not None]
    total = sum(problem.durations.max(axis=0).tolist())
    latency_ns = max((link.latency_ns for link in links), default=0)
    total += latency_ns * len(problem.graph.ops)
    for tensor in problem.graph.tensors:
        slowest = max((link.transfer_ns(tensor.nbytes) for link in links), default=0)
        total += slowest * len(problem.cluster.devices)
    return total


def _twins(problem: Problem) -> list[tuple[int, int]]:
    """Neighbors in each class of devices that can be exchanged without a difference."""
    cluster, n = problem.cluster, len(problem.cluster.devices)

    def exchangeable(a: int, b: int) -> bool:
        look = [(problem.device_class[d], cluster.devices[d].memory_bytes) for d in (a, b)]
        if look[0] != look[1] or any(cluster.devices[d].pool for d in (a, b)):
            return False
        swap = {a: b, b: a}
        return all(
            cluster.links[i][j] == cluster.links[swap.get(i, i)][swap.get(j, j)]
            for i in range(n)
            for j in range(n)
            if i != j
        )

    rows = []
    for b in range(n):
        # Exchangeable is transitive, so the nearest one before links the whole class in a row.
        twin = next((a for a in reversed(range(b)) if exchangeable(a, b)), None)
        if twin is not None:
            rows.append((twin, b))
    return rows


def _order(graph: baechi.OpGraph, keys: list[Any]) -> tuple[int, ...]:
    """The topological order that always takes the ready op with the smallest key."""
    waiting = [len({graph.tensors[t].producer for t in row}) for row in graph.op_inputs]
    ready = [(keys[op], op) for op, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for child in sorted({c for t in graph.op_outputs[op] for c in graph.tensors[t].consumers}):
            waiting[child] -= 1
            if waiting[child] == 0:
                heapq.heappush(ready, (keys[child], child))
    return tuple(order)


def main() -> None:
    """Reads pickled (function, arguments) pairs and writes their pickled results."""
    cases = pickle.load(sys.stdin.buffer)
    functions = {"solve": solve, "fit": fit}
    pickle.dump([functions[name](*args) for name, args in cases], sys.stdout.buffer)


if __name__ == "__main__":
    main()
