"""Lower bounds on the makespan of every valid schedule; with proofs in `docs/bounds.md`.

Devices that the bounds need not distinguish form a *site* (`_Sites`). The bounds are the longest
path; the work, in all and between two times (Fernandez and Bussell, IEEE TC 1973); a guess that
both refute (destructive improvement: Klein and Scholl, EJOR 1999): `csrc/bounds/bounds.cc`; the
launches of hosts; and what is pinned.

Complexity: O((ops + tensors) * (sites^2 + window log window + thresholds * sites)) for each guess;
`_effort` keeps it near-linear.
"""

from itertools import permutations, product
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from baechi import _core
from baechi.problem.problem_arrays import LIMIT, Problem
from baechi.records.graph_arrays import exact_sum

_FOREVER: Final = np.iinfo(np.int64).max
# Time grows with the square of the sites.
_MOST_SITES: Final = 8
_NAMES: Final = ("path", "work", "guess")
# Below it doubles hold every sum of whole ns.
_EXACT: Final = 2**53


def lower_bound_ns(problem: Problem) -> int:
    """A lower bound on the makespan of every valid schedule of the graph on the cluster."""
    return max(parts(problem).values())


def parts(problem: Problem) -> dict[str, int]:
    """Each bound by its name, in ns; the largest is `lower_bound_ns`.

    Where no schedule is valid, every number is a bound; these are then computed without memory
    limits and with free links between all devices.
    """
    problem = problem.at_full_speed  # a placement may leave lanes idle
    if not problem.arrays.ops:
        return dict.fromkeys(_NAMES, 0)
    sites = _Sites(problem, limited=True)
    if sites.allowed.any(axis=0).all():
        found = _parts(problem, sites)
        if max(found.values()) < _FOREVER:
            return found | _host(problem) | _pinned(problem)
    return _parts(problem, _Sites(problem, limited=False)) | _host(problem)


def _pinned(problem: Problem) -> dict[str, int]:
    """The work that only one device may do, with the shortest paths to and from it."""
    alone = problem.allowed.sum(axis=0) == 1
    if problem.constraints is None or not alone.any():
        return {}
    arrays, pools = problem.arrays, problem.device_pool
    group = arrays.op_group
    home = np.where(alone, problem.allowed.argmax(axis=0), -1)[group]
    rows = problem.durations[problem.device_class[home], np.arange(arrays.ops)]
    times = np.where(home >= 0, rows, problem.durations.min(axis=0))
    makers, readers = arrays.edges()
    sizes, length = arrays.per_consumer(arrays.nbytes), np.zeros(len(makers))
    parted = (home[makers] != home[readers]) & (home[makers] >= 0) & (home[readers] >= 0)
    for edge in np.flatnonzero(parted).tolist():
        src, dst = int(home[makers[edge]]), int(home[readers[edge]])
        link = problem.cluster.links[src][dst]
        # Another device of the reader's pool may have received it.
        if link is not None and len(problem.pool_devices[pools[dst]]) == 1:
            length[edge] = link.transfer_ns(int(sizes[edge]))
    if sum(times.tolist()) + sum(length.tolist()) >= _EXACT:
        return {}
    order = np.argsort(makers, kind="stable")
    ends = (makers[order], readers[order], length[order])
    heads, tails = (np.array(row) for row in _core.longest_paths(times.astype(np.float64), *ends))
    loads = [
        int(heads[own].min() + times[own].sum() + tails[own].min())
        for own in (home == device for device in range(len(pools)))
        if own.any()
    ]
    return {"pinned": max(loads)}


def _host(problem: Problem) -> dict[str, int]:
    """The shortest launches of all ops, shared equally by as many hosts as may be used."""
    hosts = problem.device_host
    if not hosts:
        return {}
    rows = zip(hosts, problem.device_class.tolist(), problem.cluster.devices, strict=True)
    looks = [(host < 0, row.launches_ahead, at) for host, at, row in rows]
    least = np.full(problem.arrays.ops, LIMIT, np.int64)
    for look in set(looks):
        devices = [device for device, other in enumerate(looks) if other == look]
        allowed = np.asarray(problem.allowed[devices].any(axis=0))[problem.arrays.op_group]
        least = np.minimum(least, np.where(allowed, problem.launch_ns(devices[0]), LIMIT))
    shared = min(len(set(hosts) - {-1}), problem.max_devices or len(hosts))
    return {"host": -(-exact_sum(least[least < LIMIT]) // shared)}


def _parts(problem: Problem, sites: "_Sites") -> dict[str, int]:
    weights = [np.ones(len(sites.members), np.int64)]
    if len(sites.members) > 1:
        weights.append(_by_speed(sites.durations))
    sums = [sites.weight_sum(row) for row in weights]
    window, thresholds, guesses = _effort(problem.arrays.ops * len(sites.members))
    found = _core.lower_bounds(
        problem.core,
        durations=sites.durations.reshape(-1),
        allowed=sites.allowed.astype(np.uint8).reshape(-1),
        memory=sites.memory,
        latency=sites.latency.reshape(-1),
        rate=sites.rate.reshape(-1),
        weights=np.concatenate(weights),
        weight_sums=np.array(sums, np.int64),
        window=window,
        thresholds=thresholds,
        guesses=guesses,
    )
    return dict(zip(_NAMES, found, strict=True))


def _effort(size: int) -> tuple[int, int, int]:
    """Limits on ancestors, times and guesses for a given number of ops times sites."""
    window = min(128, max(4, 2**18 // size)) if size <= 2**21 else 0
    thresholds = min(48, max(2, 2**19 // size))
    return window, thresholds, 6 if size <= 2**9 else 3 if size <= 2**12 else 0


# The properties of a device that matter, links aside: class, memory and allowed groups.
_Look = tuple[int, int, bytes]


def _look(problem: Problem, device: int) -> _Look:
    allowed = b"" if problem.constraints is None else problem.allowed[device].tobytes()
    return int(problem.device_class[device]), problem.device_memory[device], allowed


@final
class _Sites:
    """The sites of a problem: per site its devices, shortest times, groups and largest memory.

    Per pair of sites, the latency (`_FOREVER` where there is no path) and the rate (0 where bytes
    cost nothing) to another device.
    """

    def __init__(self, problem: Problem, *, limited: bool) -> None:
        self.problem = problem
        looks = [_look(problem, device) for device in range(len(problem.cluster.devices))]
        free = np.zeros((len(looks), len(looks)), np.int64)
        latency, rate = _links(problem) if limited else (free, free)
        self.members = _members(problem, looks, latency, rate)
        classes = [np.unique(problem.device_class[row]) for row in self.members]
        self.durations = np.array([problem.durations[row].min(axis=0) for row in classes])
        shape = (len(self.members), problem.arrays.groups)
        self.allowed = np.ones(shape, np.bool_)
        self.memory = np.full(len(self.members), LIMIT, np.int64)
        if limited:
            # Of those that look the same the last device, which the dictionary keeps.
            devices = {look: device for device, look in enumerate(looks)}
            rows = {look: self._possible(device) for look, device in devices.items()}
            for site, row in enumerate(self.members):
                kinds = {looks[device] for device in row}
                self.allowed[site] = np.any([rows[look] for look in kinds], axis=0)
                self.memory[site] = max(memory for _, memory, *_ in kinds)
        self.latency, self.rate = _between(self.members, latency, rate)

    def _possible(self, device: int) -> NDArray[np.bool_]:
        """True for the groups that could be on the device if they were alone."""
        problem = self.problem
        takes_time = problem.durations[problem.device_class[device]] > 0
        fits = problem.arrays.least_bytes(takes_time) <= problem.device_memory[device]
        return np.asarray(fits & problem.allowed[device])

    def weight_sum(self, weights: NDArray[np.int64]) -> int:
        """The largest sum of weights over as many devices as a schedule may use."""
        each = np.repeat(weights, [len(row) for row in self.members])
        return int(np.sort(each)[::-1][: self.problem.max_devices].sum())


def _links(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Latency and rate of the cheapest path between any two devices.

    A tensor comes from its producer's device, or from another device of the reader's pool.
    """
    n = len(problem.cluster.devices)
    latency, rate = (np.broadcast_to(row, n * n).reshape(n, n) for row in problem.links)
    latency = np.where(rate > 0, latency, _FOREVER)
    best_latency, best_rate = latency.copy(), rate.copy()
    for pool in problem.pool_devices:
        for over, to in permutations(pool, 2):
            # Inside a pool only the latency counts.
            best_rate[over, to] = 0
            if latency[over, to] == _FOREVER:
                continue
            outside = np.setdiff1d(np.arange(n), pool)
            first = latency[outside, over]
            there = first < _FOREVER
            detour = np.where(there, np.where(there, first, 0) + latency[over, to], _FOREVER)
            best_latency[outside, to] = np.minimum(best_latency[outside, to], detour)
            best_rate[outside, to] = np.maximum(best_rate[outside, to], rate[outside, over])
    return best_latency, best_rate


def _members(
    problem: Problem, looks: list[_Look], latency: NDArray[np.int64], rate: NDArray[np.int64]
) -> list[list[int]]:
    """The devices of every site: the fewest sites that are exact, or fewer if too many."""
    others = ~np.eye(len(looks), dtype=bool)
    equal = all(len(row) == 0 or (row == row[0]).all() for row in (latency[others], rate[others]))
    few = len(looks) * problem.arrays.ops <= 2**16
    keys: tuple[list[object], ...] = (
        [look if equal else (look, device) for device, look in enumerate(looks)] if few else [],
        list(looks),
        [look[0] for look in looks],
    )
    for row in keys:
        distinct = dict.fromkeys(row)
        if row and len(distinct) <= _MOST_SITES:
            return [[d for d, key in enumerate(row) if key == one] for one in distinct]
    return [list(range(len(looks)))]


def _between(
    members: list[list[int]], latency: NDArray[np.int64], rate: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The smallest latency and the highest rate between devices of any two sites."""
    n = len(members)
    latencies, rates = np.full((n, n), _FOREVER), np.zeros((n, n), np.int64)
    paths = (latency < _FOREVER) & ~np.eye(len(latency), dtype=bool)
    for a, b in product(range(n), repeat=2):
        pairs = np.ix_(members[a], members[b])
        present = paths[pairs]
        if present.any():
            latencies[a, b] = latency[pairs][present].min()
            rows = rate[pairs][present]
            rates[a, b] = rows.max() if rows.min() > 0 else 0
    return latencies, rates


def _by_speed(durations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Weights proportional to the share of the graph's work that a site's devices do per time."""
    totals = [max(1, exact_sum(row)) for row in durations]
    return np.array([max(1, min(totals) * 2**10 // total) for total in totals], np.int64)
