"""Lower bounds on the makespan of every valid schedule.

Let d(j) be the shortest time of op j on any device that could hold it. No schedule is shorter than

- a path: the largest head(j) + d(j) + tail(j), where head and tail are the longest paths of d
  before and after j (`_core.heads_and_tails`);
- a group: its ops share one device and run there one at a time, so the smallest head of its ops,
  plus the sum of their times on the group's best device, plus the smallest tail (`_group_bound`);
- the work: for any weights y(p) >= 0 with sum 1, the busiest device is busy for at least
  sum over p of y(p) load(p), and so for at least sum over groups of min over p of
  y(p) time(group, p). Two choices of y are tried: equal, and proportional to the device's speed on
  the whole graph (`_work_bound`). Where at most k devices may be used, the sum of weights is of the
  k largest.

Transfers count for nothing here: one device needs none. The optimum of m-SCT's linear program is
not a bound, since it pays for a transfer where one device would not.
Complexity: O(ops * devices + tensors).
"""

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.problem import Problem


def lower_bound_ns(problem: Problem) -> int:
    """No valid schedule of the graph on the cluster is shorter than this."""
    if not problem.graph.ops:
        return 0
    allowed = _possible(problem)
    if not allowed.any(axis=0).all():
        # No schedule is valid, so every bound holds; this one is of the graph without its memory.
        allowed = problem.allowed
    # Row per device, column per op or group.
    times = problem.durations[problem.device_class]
    op_group = np.array(problem.op_group, np.int64)
    best = np.where(allowed[:, op_group], times, np.iinfo(np.int64).max).min(axis=0)
    heads, tails = (np.array(row, np.int64) for row in _core.heads_and_tails(problem.core, best))
    path = int((heads + best + tails).max())
    group_times = np.zeros(allowed.shape, np.int64)
    for device, row in enumerate(times):
        np.add.at(group_times[device], op_group, row)
    group = _group_bound(group_times, allowed, op_group, heads, tails)
    return max(path, group, _work_bound(group_times, allowed, problem.max_devices))


def running_bytes(problem: Problem, op: int) -> int:
    """What an op that takes time needs besides persistent bytes: inputs, outputs, workspace."""
    graph = problem.graph
    tensors = graph.op_inputs[op] + graph.op_outputs[op]
    return graph.ops[op].workspace_bytes + sum(graph.tensors[t].nbytes for t in tensors)


def _possible(problem: Problem) -> NDArray[np.bool_]:
    """For every device and group, whether the group may go there and would fit there alone."""
    running = problem.graph.arrays.running_bytes()
    persistent = np.array(problem.group_persistent, np.int64)
    op_group = problem.graph.arrays.op_group
    rows = []
    for device, pool in enumerate(problem.device_pool):
        times = problem.durations[problem.device_class[device]]
        # An op of no time holds nothing while it runs: its intervals may be empty.
        most = np.zeros_like(persistent)
        np.maximum.at(most, op_group, np.where(times > 0, running, 0))
        rows.append(persistent + most <= problem.pool_memory[pool])
    return np.array(rows) & problem.allowed


def _group_bound(
    group_times: NDArray[np.int64],
    allowed: NDArray[np.bool_],
    op_group: NDArray[np.int64],
    heads: NDArray[np.int64],
    tails: NDArray[np.int64],
) -> int:
    most = np.iinfo(np.int64).max
    head = np.full(group_times.shape[1], most)
    tail = np.full(group_times.shape[1], most)
    np.minimum.at(head, op_group, heads)
    np.minimum.at(tail, op_group, tails)
    shortest = np.where(allowed, group_times, most).min(axis=0)
    return int((head + shortest + tail).max())


def _work_bound(
    group_times: NDArray[np.int64], allowed: NDArray[np.bool_], max_devices: int | None
) -> int:
    totals = [max(1, sum(row.tolist())) for row in group_times]
    # Weights of up to 2**10, where the weighted times stay below 2**62, too.
    scale = min(2**10, 2**62 // max(totals))
    by_speed = [max(1, min(totals) * scale // total) for total in totals]
    bound = 0
    most = max_devices or len(totals)
    for weights in ([1] * len(totals), by_speed):
        weighted = group_times * np.array(weights, np.int64)[:, None]
        busy = np.where(allowed, weighted, np.iinfo(np.int64).max).min(axis=0)
        bound = max(bound, -(-sum(busy.tolist()) // sum(sorted(weights)[-most:])))
    return bound
