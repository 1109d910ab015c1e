"""The search for a placement whose busiest device or port has least to do."""

import itertools
import random
from dataclasses import replace

import pytest
from seeds import seeds
from strategies import dense

from baechi import (
    Cluster,
    Constraints,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
    solve,
)
from baechi.placers.max_load import balanced
from baechi.placers.searching import find
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows, period_ns

LINK = Link(10, 10**9)


def drawn(seed, most=7, nbytes=300):
    draw = random.Random(seed)
    n = draw.randint(4, most)
    ops = tuple(
        Op(f"o{i}", draw.randint(1, 50) * 10, draw.randint(0, 40), draw.randint(0, 5))
        for i in range(n)
    )
    readers = [draw.sample(range(i + 1, n), min(n - 1 - i, draw.randint(1, 3))) for i in range(n)]
    rows = enumerate(readers[:-1])
    return OpGraph(ops, tuple(Tensor(i, tuple(row), draw.randint(0, nbytes)) for i, row in rows))


def load(graph, devices):
    """The largest load of a device or port, of `n` equal devices, by the words alone."""
    loads = {}

    def add(key, ns):
        loads[key] = loads.get(key, 0) + ns

    for op, device in zip(graph.ops, devices, strict=True):
        add(("works", device), op.time_ns)
    for tensor in graph.tensors:
        home = devices[tensor.producer]
        for device in {devices[op] for op in tensor.consumers} - {home}:
            add(("sends", home), LINK.transfer_ns(tensor.nbytes))
            add(("receives", device), LINK.transfer_ns(tensor.nbytes))
    return max(loads.values())


@pytest.mark.parametrize("seed", seeds(60))
def test_no_chain_of_downsets_has_less_load_than_what_is_found(seed):
    """A split is contiguous where no tensor goes back, so that its parts are between downsets."""
    graph = drawn(seed)
    edges = [(row.producer, op) for row in graph.tensors for op in row.consumers]
    splits = itertools.product(range(3), repeat=len(graph.ops))
    contiguous = [row for row in splits if all(row[a] <= row[b] for a, b in edges)]
    cluster = Cluster.uniform(3, 10**6, LINK)
    found = solve(graph, cluster, effort="fast", objective="throughput")
    assert found.stats["period_ns"] == load(graph, found.devices)
    assert found.stats["period_ns"] <= min(load(graph, row) for row in contiguous)


def test_parts_that_are_in_no_row_are_found():
    """A chain of 30, 60 and 30 on two devices: its ends are as long as its middle, no row is."""
    ops = tuple(Op(f"o{i}", time) for i, time in enumerate((30, 60, 30)))
    graph = OpGraph(ops, (Tensor(0, (1,), 0), Tensor(1, (2,), 0)))
    cluster = Cluster.uniform(2, 10**6, Link(0, 10**9))
    assert balanced(Problem(graph, cluster), (0, 0, 1), 1_000) in ((0, 1, 0), (1, 0, 1))


@pytest.mark.parametrize("ports", ["duplex", "shared", "none"])
@pytest.mark.parametrize("seed", sorted({*seeds(40), 13, 30}))  # a pool, and overheads
def test_the_load_never_grows_whatever_the_links_and_ports(seed, ports):
    graph, cluster = dense(seed)
    cluster = replace(cluster, ports=ports)
    problem, order = Problem(graph, cluster), tuple(range(len(graph.ops)))

    def period(devices):
        placement = Placement(graph.digest, tuple(devices), order)
        schedule = simulate(graph, cluster, placement)
        return period_ns(graph, cluster, placement, schedule)

    first = solve(graph, cluster, effort="fast").devices
    found = balanced(problem, first, 2_000)
    assert period(found) <= period(first)
    assert found == balanced(problem, first, 2_000)


def test_pins_and_room_for_weights_are_kept():
    ops = tuple(Op(f"o{i}", 100, 10) for i in range(6))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1,), 1) for i in range(5)))
    cluster = Cluster.uniform(2, 45, Link(0, 10**9))
    limits = Constraints(pins={"o0": "device1", "o5": "device1"})
    found = balanced(Problem(graph, cluster, limits), (1, 0, 0, 0, 0, 1), 2_000)
    assert (found[0], found[5]) == (1, 1)
    assert sorted(found.count(device) for device in range(2)) == [3, 3]
    small = replace(cluster.devices[1], memory_bytes=25)
    tight = replace(cluster, devices=(replace(cluster.devices[0], memory_bytes=60), small))
    assert balanced(Problem(graph, tight), (0, 0, 0, 0, 1, 1), 2_000).count(1) == 2


@pytest.mark.unsanitized
@pytest.mark.parametrize("seed", seeds(40))
def test_what_is_found_for_throughput_fits(seed):
    graph = drawn(seed, most=14, nbytes=60)
    state = sum(op.persistent_bytes for op in graph.ops) + 100
    for share in (0.5, 0.7, 0.9):
        cluster = Cluster.uniform(3, int(state * share), LINK)
        if find(Problem(graph, cluster)) is None:  # what is missing would take longer to find
            continue
        placement = solve(graph, cluster, effort="fast", objective="throughput")
        assert not overflows(simulate(graph, cluster, placement), cluster)
