"""rho: the longest transfer over the shortest op."""

import math

import pytest

from baechi import Cluster, Device, Link, Op, OpGraph, Tensor
from baechi.placers.sct import rho
from baechi.problem.problem_arrays import Problem


def rho_of(times, tensors, cluster, groups=None):
    groups = groups or [None] * len(times)
    ops = tuple(Op(f"o{i}", t, group=groups[i]) for i, t in enumerate(times))
    return rho(Problem(OpGraph(ops, tuple(Tensor(*t) for t in tensors)), cluster))


PAIR = Cluster.uniform(2, 99, Link(10, 10**9))


@pytest.mark.parametrize(
    ("times", "tensors", "groups", "expected"),
    [
        # 10 ns of latency and 30 bytes at 1 byte per ns, over 8 ns; zero-time ops do not count.
        ([8, 0, 20], [(0, (1,), 30), (1, (2,), 5)], None, 5.0),
        # What nobody consumes, and what stays in its group, is not sent.
        ([8, 10], [(0, (), 99), (0, (1,), 30)], ["g", "g"], 0.0),
        ([8, 10, 10], [(0, (1,), 70), (0, (2,), 6)], ["g", "g", None], 2.0),
        ([0, 0], [(0, (1,), 1)], None, math.inf),
        ([], [], None, 0.0),
    ],
)
def test_rho_is_the_longest_transfer_over_the_shortest_op(times, tensors, groups, expected):
    assert rho_of(times, tensors, PAIR, groups) == expected


def test_rho_takes_the_slowest_link_between_memories_and_the_fastest_device():
    devices = (Device("a", 99), Device("b", 99, 2.0), Device("c", 99, pool="p"))
    devices += (Device("d", 99, pool="p"),)
    fast, slow = Link(0, 10**9), Link(0, 10**8)
    links = tuple(
        tuple(None if i == j else slow if {i, j} in ({0, 1}, {2, 3}) else fast for j in range(4))
        for i in range(4)
    )
    # 20 bytes take 200 ns between a and b; c and d share a memory. The shortest op is 5 ns on b.
    assert rho_of([10, 10], [(0, (1,), 20)], Cluster(devices, links)) == 40.0


def test_what_the_receiver_is_busy_with_counts():
    # 10 ns of latency, 6 of overhead and 30 bytes at 1 byte per ns.
    cluster = Cluster.uniform(2, 99, Link(10, 10**9, overhead_ns=6))
    assert rho_of([8, 10], [(0, (1,), 30)], cluster) == 46 / 8


def test_without_links_nothing_is_sent():
    alone = Cluster((Device("a", 99),), ((None,),))
    assert rho_of([1, 1], [(0, (1,), 5)], alone) == 0.0
