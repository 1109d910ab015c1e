"""METIS's cuts: small examples, what is repaired, and what is said where there is no METIS."""

import ctypes
import importlib.util
import random

import numpy as np
import pytest
from strategies import tight

from baechi import Cluster, Device, InputError, Link, Metis, Op, OpGraph, Tensor, simulate, solve
from baechi.placers import metis as mincut
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows

LINK = Link(10, 10**9)


def knots(n=12, heavy=100, light=1):
    """Two knots of ops, whose indices alternate, tied together by one small tensor."""
    ops = tuple(Op(f"o{i}", 10, 10) for i in range(2 * n))
    tensors = [Tensor(i, (i + 2,), heavy) for i in range(2 * n - 2)]
    tensors += [Tensor(i, (i + 4,), heavy) for i in range(2 * n - 4)]
    return OpGraph(ops, (*tensors, Tensor(0, (2 * n - 1,), light)))


def test_two_knots_are_cut_apart():
    graph = knots()
    placement = Metis().place(Problem(graph, Cluster.uniform(2, 10_000, LINK)))
    first, second = placement.devices[::2], placement.devices[1::2]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert placement.stats["makespan_ns"] == 12 * 10


def test_the_net_weighs_a_tensor_once_however_many_read_it():
    ops = tuple(Op(f"o{i}", 10 + i, group="g" if i in {1, 3} else None) for i in range(4))
    tensors = (Tensor(0, (1, 2, 3), 30), Tensor(0, (2,), 10), Tensor(1, (3,), 99))
    problem = Problem(OpGraph(ops, tensors), Cluster.uniform(2, 10**4, LINK))
    net = mincut._Net(problem)
    # Groups are 0, {1, 3} and 2. 40 ns are shared by two readers, and 20 ns are for one alone.
    edges = zip(net.src.tolist(), net.dst.tolist(), net.weight.tolist(), strict=True)
    assert list(edges) == [(0, 1, 20), (0, 2, 40), (1, 0, 20), (2, 0, 40)]
    assert net.times.tolist() == [10, 24, 12]


def test_weights_are_in_proportion_and_none_is_more_than_a_part():
    scaled = mincut._scaled([np.array([0, 1, 3, 4]), np.array([0, 0, 0, 9])], 0.5)
    eighth = mincut._TOTAL // 8
    # Where one vertex has everything, vertices count alike.
    assert scaled.reshape(4, 2).tolist() == [
        [1, 1],
        [1 + eighth, 1],
        [1 + 3 * eighth, 1],
        [1 + 4 * eighth, 1],
    ]
    heavy = mincut._scaled([np.array([1, 1, 1, 1, 10, 1000])], 0.25)
    assert max(heavy) <= 0.251 * sum(heavy)


def repair(problem, assignment):
    devices = tuple(range(len(problem.cluster.devices)))
    net = mincut._Net(problem)
    return mincut._Repair(problem, net, np.array(assignment, np.int64), devices).repaired()


def test_a_part_that_does_not_fit_gives_away_what_is_tied_to_it_least():
    ops = tuple(Op(f"o{i}", 10, 10) for i in range(4))
    graph = OpGraph(ops, (Tensor(0, (1,), 5), Tensor(1, (2,), 1), Tensor(2, (3,), 2)))
    problem = Problem(graph, Cluster.uniform(2, 32, LINK))
    # Ops 0, 1 and 2 fit, but not with 6 bytes of tensors; op 2 is tied to op 3 anyway.
    assert repair(problem, [0, 0, 0, 1]) == (0, 0, 1, 1)
    assert repair(problem, [0, 0, 1, 1]) == (0, 0, 1, 1)


def test_a_repair_looks_at_the_pool_and_gives_up_where_nothing_fits():
    ops = tuple(Op(f"o{i}", 10, 10) for i in range(4))
    devices = [Device("a", 20, pool="p"), Device("b", 20, pool="p"), Device("c", 20)]
    problem = Problem(OpGraph(ops), Cluster.connected(devices, LINK))
    # Three groups are in the pool of `a` and `b`; which of them goes is a tie, so the first.
    assert repair(problem, [0, 0, 1, 2]) == (2, 0, 1, 2)
    five = OpGraph((*ops, Op("o4", 10, 10)))
    assert repair(Problem(five, problem.cluster), [0, 0, 1, 2, 2]) is None


def test_shares_follow_memory_and_speed():
    devices = [Device("small", 100), Device("large", 300, 3.0)]
    problem = Problem(knots(4, heavy=10), Cluster.connected(devices, LINK))
    tasks = list(mincut._tasks(problem, mincut._Net(problem)))
    assert tasks[0][0] == (1,)
    shares = [shares for used, shares, _ in tasks if used == (1, 0)]
    # Times are rounded up to whole ns: 4 and 10.
    assert shares == [pytest.approx([10 / 14, 4 / 14]), pytest.approx([0.75, 0.25])]
    equal = Problem(knots(4, heavy=10), Cluster.uniform(2, 150, LINK))
    tasks = list(mincut._tasks(equal, mincut._Net(equal)))
    assert all(shares is None for _, shares, _ in tasks)
    assert max(len(weights) for _, _, weights in tasks) == 2


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_it_fits_and_metis_says_nothing_where_memory_is_tight(first, capfd):
    for seed in range(first, first + 100):
        graph, cluster = tight(seed)
        placement = Metis().place(Problem(graph, cluster))
        if placement is not None:
            assert not overflows(simulate(graph, cluster, placement), cluster)
    # METIS writes to the standard output where it meets a part that it left empty.
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("memory", [(5, 1, 1), (8, 4, 2, 1), (1,) * 8])
def test_metis_says_nothing_where_few_ops_have_almost_all(memory, capfd):
    unit = 10**12
    devices = [Device(f"d{i}", share * unit) for i, share in enumerate(memory)]
    cluster = Cluster.connected(devices, LINK)
    for seed in range(40):
        draw = random.Random(seed)
        n = 32 + seed % 20
        ops = [
            Op(f"o{i}", *(min(int(draw.paretovariate(0.35)), unit // 100) for _ in "tm"))
            for i in range(n)
        ]
        tensors = [Tensor(i, (draw.randrange(i + 1, n),), 10) for i in range(n - 1)]
        Metis().place(Problem(OpGraph(tuple(ops), tuple(tensors)), cluster))
    assert capfd.readouterr() == ("", "")


def test_equal_seeds_give_equal_placements():
    problem = Problem(knots(30), Cluster.uniform(4, 700, LINK))
    assert Metis(seed=3).place(problem) == Metis(seed=3).place(problem)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_graph_without_ops_and_one_with_a_single_op(n, devices):
    graph = OpGraph(tuple(Op(f"o{i}", 5) for i in range(n)))
    placement = solve(graph, Cluster.uniform(devices, 10, LINK), "metis")
    assert placement.stats["makespan_ns"] == 5 * n


def test_without_pymetis_it_says_what_to_install(monkeypatch):
    assert Metis.available()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pymetis" else find(name)
    )
    assert not Metis.available()
    with pytest.raises(InputError, match=r"pip install 'baechi\[metis\]'"):
        solve(knots(), Cluster.uniform(2, 10_000, LINK), "metis")


def test_a_device_too_slow_for_one_group_gets_no_part(capfd):
    # METIS would print on the stdout of the process that its graph has no vertices.
    ops = tuple(Op(f"o{i}", 1000) for i in range(20))
    graph = OpGraph(ops, tuple(Tensor(i, (i + 1,), 10) for i in range(19)))
    rows = [Device(f"d{i}", 1000, 1.0 if i == 2 else 0.01) for i in range(4)]
    placement = solve(graph, Cluster.connected(rows, LINK), "metis")
    assert set(placement.devices) == {2}
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
