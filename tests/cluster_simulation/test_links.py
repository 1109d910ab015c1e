"""Jobs that share links, and Crux, which says whose flows go first."""

from collections import defaultdict
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi import InputError, Op, OpGraph, Tensor
from baechi.cluster_simulation.fleet import DeviceStates, Fleet
from baechi.cluster_simulation.jobs import WHOLE, Exclusive, Job
from baechi.cluster_simulation.links import stretches
from baechi.cluster_simulation.placement_schemes import Baechi, Spread
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.policies.fifo import Fifo
from baechi.cluster_simulation.results import job_csv
from baechi.cluster_simulation.simulator import simulate_cluster

LINK = [0]


def ends(jobs, policy, *, contention=True):
    """On two nodes of two GPUs, where a job of two has one on each."""
    fleet = Fleet.uniform(1, 2, 2)
    result = simulate_cluster(jobs, fleet, policy_named(policy), Spread(), contention=contention)
    return {row.job.name: row.end_time for row in result.outcomes}


def test_stretches_by_hand():
    assert stretches([0.5], [LINK], [0]) == [1]
    assert stretches([0.5, 0.5], [LINK, [1]], [0, 0]) == [1, 1]
    # Who sends always has half of the link.
    assert stretches([1.0, 1.0], [LINK] * 2, [0, 0]) == [2, 2]
    # s = 1 + s / (1 + s) for two that send half of the time: the golden section.
    golden = (1 + sqrt(5)) / 2
    assert stretches([0.5, 0.5], [LINK] * 2, [0, 0]) == pytest.approx([golden] * 2, rel=1e-4)
    # The first does not notice the second, which has the half of the link that is left.
    assert stretches([0.5, 0.5], [LINK] * 2, [0, 1]) == [2, 1]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 999),
            st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
            st.integers(0, 2),
        ),
        max_size=9,
    )
)
def test_no_link_carries_more_than_it_can(rows):
    sending = [part / WHOLE for part, _, _ in rows]
    links = [places for _, places, _ in rows]
    urgency = [first for _, _, first in rows]
    found = stretches(sending, links, urgency)
    carried = defaultdict(float)
    for part, on, many in zip(sending, links, found, strict=True):
        assert many >= 1
        for link in on:
            carried[link] += part / (1 - part + part * many)
    assert all(load <= 1 + 1e-6 for load in carried.values())
    for first, many in zip(urgency, found, strict=True):
        assert urgency.count(max(urgency)) > 1 or first < max(urgency) or many == 1


def test_flows_share_a_link_alike_or_the_most_intense_goes_first():
    # Both are alone on two GPUs: 100 of work at 0.8 and 0.5 of the rate.
    compute = Job("compute", 2, 0, 100, across=(800, 800))
    send = Job("send", 2, 0, 100, across=(500, 500))
    assert ends([compute, send], "fjf", contention=False) == {"compute": 125, "send": 200}
    # 2 * 0.8 / 0.2 is more than 2 * 0.5 / 0.5: the first as if alone, the second 1.25 times as long
    # on the link, at 0.889 of its rate, until the first has ended.
    assert ends([compute, send], "crux") == {"compute": 125, "send": 214}
    fair = ends([compute, send], "fjf")
    assert fair["compute"] > 125
    assert sum(fair.values()) > 125 + 214
    # Of equal intensity they share alike.
    twins = [Job(name, 2, 0, 100, across=(500, 500)) for name in "ab"]
    slowed = 0.5 + 0.5 * (1 + sqrt(5)) / 2
    assert ends(twins, "crux") == {name: pytest.approx(200 * slowed, rel=2e-3) for name in "ab"}
    assert ends(twins, "crux") == ends(twins, "fjf")
    # Nobody sends within a node.
    near = [Job(name, 2, 0, 100) for name in "ab"]
    assert ends(near, "crux") == {"a": 100, "b": 100}


def test_a_split_graph_sends_what_passes_between_nodes():
    # Two ops of 1 ms, and 2 MB between them: 0.23 of 2.23 ms on a link of 10 GB/s and 30 us.
    ops = tuple(Op(f"op{i}", 1_000_000, persistent_bytes=1_000_000) for i in range(2))
    graph = OpGraph(ops, (Tensor(0, (1,), 2_000_000),))
    memory = 3_500_000
    job = Job("graph", 1, 0, 100, graph=graph, most_gpus=2)
    far = DeviceStates(
        Fleet.uniform(1, 2, 1, memory_bytes=memory), Exclusive(), Baechi().place, 0, {}
    )
    assert far.place(job).sending == 230 * WHOLE // 2230
    near = DeviceStates(
        Fleet.uniform(1, 1, 2, memory_bytes=memory), Exclusive(), Baechi().place, 0, {}
    )
    assert near.place(job).sending == 0


def test_links_are_as_before_for_who_has_them_alone():
    jobs = [Job(f"job{i}", 4, 10 * i, 100, across=(700, 500)) for i in range(3)]
    fleet = Fleet.uniform(2, 1, 2)
    alone = simulate_cluster(jobs, fleet, policy_named("fjf"), Spread())
    assert job_csv(
        simulate_cluster(jobs, fleet, policy_named("fjf"), Spread(), contention=True)
    ) == (job_csv(alone))
    with pytest.raises(InputError, match="have links"):
        simulate_cluster(jobs, fleet, Fifo(), contention=True)
