"""rho: how dear communication is beside computation, as in the assumption of the SCT bounds.

Source: Baechi (arXiv 2301.08695), section "m-SCT", after Hanen and Munier (1995): communication is
small where the largest transfer takes no longer than the smallest op, rho <= 1.
"""

import numpy as np

from baechi.problem.problem_arrays import Problem


def rho(problem: Problem) -> float:
    """The longest transfer of a tensor, overhead included, over the shortest op of any time.

    Over all links between two memories, and all devices. 0.0 where nothing is ever sent; infinity
    where something is, but no op takes time. Tensors that no other group consumes are not sent.
    O(tensors + links + ops).
    """
    groups, pools = problem.op_group, problem.device_pool
    nbytes = np.array(
        [
            tensor.nbytes
            for tensor in problem.graph.tensors
            if any(groups[consumer] != groups[tensor.producer] for consumer in tensor.consumers)
        ],
        np.float64,
    )
    links = {
        link
        for src, row in enumerate(problem.cluster.links)
        for dst, link in enumerate(row)
        if link is not None and pools[src] != pools[dst]
    }
    if not nbytes.size or not links:
        return 0.0
    largest = float(nbytes.max())
    longest_ns = max(
        link.latency_ns + link.overhead_ns + largest * 1e9 / link.bytes_per_s for link in links
    )
    times = problem.durations
    shortest_ns = float(times.min(where=times > 0, initial=np.iinfo(np.int64).max))
    if not (times > 0).any():
        return float("inf") if longest_ns else 0.0
    return longest_ns / shortest_ns
