"""Devices that missing links rule out: never one that is needed, and no dead end on a tree."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, constraints_for, graphs

from baechi import (
    METF,
    Cluster,
    Constraints,
    Device,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    Tensor,
    simulate,
    solve,
)
from baechi.placers.device_choice import linked
from baechi.problem.problem_arrays import Problem

LINK = Link(10, 10**9)


@given(graphs(max_ops=4, min_ops=1), clusters(max_devices=3), st.data())
def test_no_device_of_a_placement_is_ruled_out(graph, cluster, data):
    problem = Problem(graph, cluster, data.draw(constraints_for(graph, cluster)))
    narrowed = linked(problem)
    groups = range(len(problem.group_ops))
    for of_group in itertools.product(range(len(cluster.devices)), repeat=len(groups)):
        if not all(problem.allowed[of_group[group], group] for group in groups):
            continue
        devices = tuple(of_group[group] for group in problem.op_group)
        try:
            simulate(graph, cluster, Placement(graph.digest, devices, range(len(devices))))
        except InputError:
            continue
        assert narrowed is not None
        assert all(narrowed.allowed[of_group[group], group] for group in groups)


def line(n):
    """Devices of which each is linked to the next alone, and to none before."""
    devices = tuple(Device(f"d{i}", 1000) for i in range(n))
    return Cluster(
        devices, tuple(tuple(LINK if j == i + 1 else None for j in range(n)) for i in range(n))
    )


@pytest.mark.parametrize("placer", ["m-etf", "m-sct", "auto"])
def test_a_chain_is_led_along_a_line_of_devices(placer):
    n = 12
    ops = tuple(Op(f"o{i}", 10) for i in range(n))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1,), 10) for i in range(n - 1)))
    rules = Constraints({"o0": "d0", f"o{n - 1}": "d4"})
    placement = solve(graph, line(5), placer, constraints=rules)
    assert list(placement.devices) == sorted(placement.devices)
    assert set(placement.devices) == set(range(5))
    back = Constraints({"o0": "d4", f"o{n - 1}": "d0"})
    assert linked(Problem(graph, line(5), back)) is None


@pytest.mark.parametrize("seed", range(20))
def test_trees_meet_no_dead_end(seed):
    draw = random.Random(seed)
    n, devices = 40, 6
    parents = [draw.randrange(max(0, i - 4), i) for i in range(1, n)]
    graph = OpGraph(
        tuple(Op(f"o{i}", 10) for i in range(n)),
        tuple(Tensor(parent, (i,), 10) for i, parent in enumerate(parents, start=1)),
    )
    links = tuple(
        tuple(LINK if i != j and draw.random() < 0.4 else None for j in range(devices))
        for i in range(devices)
    )
    cluster = Cluster(tuple(Device(f"d{i}", 10**6) for i in range(devices)), links)
    pins = {f"o{op}": f"d{draw.randrange(devices)}" for op in draw.sample(range(n), 4)}
    problem = Problem(graph, cluster, Constraints(pins))
    narrowed = linked(problem)
    assert (narrowed is not None) == (METF().place(narrowed or problem) is not None)


def test_without_constraints_or_missing_links_nothing_changes():
    graph = OpGraph((Op("a", 1), Op("b", 1)), (Tensor(0, (1,), 1),))
    for problem in (
        Problem(graph, line(3)),
        Problem(graph, Cluster.uniform(3, 9, LINK), Constraints({"a": "device1"})),
    ):
        assert linked(problem) is problem
