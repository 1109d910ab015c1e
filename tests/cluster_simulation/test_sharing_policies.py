"""Policies that put two and more jobs on the same GPUs: Muri, SJF-BSBF, AntMan, MuxFlow, ..."""

from itertools import combinations, permutations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi.cluster_simulation.fleet import Fleet, Slice
from baechi.cluster_simulation.jobs import WORK, Job, Part, SideBySide
from baechi.cluster_simulation.policies import (
    DEFAULTS,
    policy_named,
    scheme_named,
    sharing_named,
)
from baechi.cluster_simulation.policies.antman import Opportunistic
from baechi.cluster_simulation.policies.iadeep import interference
from baechi.cluster_simulation.policies.sjf_bsbf import benefit
from baechi.cluster_simulation.policy_support.interleaving import (
    Interleaved,
    interruption,
    iteration_together,
)
from baechi.cluster_simulation.policy_support.optimal_choices import (
    best_couples,
    best_flows,
    partners,
)
from baechi.cluster_simulation.simulator import simulate_cluster


def run(jobs, fleet, policy, **options):
    scheme, sharing = DEFAULTS[policy]
    options.setdefault("sharing", sharing_named(sharing, 2))
    if isinstance(fleet, int):
        fleet = Fleet.uniform(1, 1, fleet)
    result = simulate_cluster(jobs, fleet, policy_named(policy), scheme_named(scheme), **options)
    return {row.job.name: row for row in result.outcomes}


def test_two_jobs_a_stage_apart_take_the_longer_of_each_step():
    # Section 3: while one reads its input the other computes and sends, and the other way round.
    a, b = ((20, 10, 0), 30), ((10, 15, 5), 30)
    assert iteration_together((a, b)) == pytest.approx((max(20, 20) + max(10, 10)) * 1.33 / 1.015)
    # Both compute for long: little is gained. Reading takes two steps, of storage and of CPU.
    c, d = ((1, 28, 1), 30), ((28, 1, 1), 30)
    assert iteration_together((c, c)) == pytest.approx((28 + 28 + 1) * 1.33 / 1.015)
    assert iteration_together((d, d)) == pytest.approx(30 * 1.33 / 1.015)
    assert iteration_together((a,)) == pytest.approx(30 * 1.015)


@given(
    st.lists(st.tuples(*[st.integers(1, 100)] * 3), min_size=2, max_size=4),
)
def test_no_resource_is_used_for_longer_than_an_iteration_takes(stages):
    jobs = tuple((stage, sum(stage)) for stage in stages)
    slower = (1.33, 1.5, 1.37)[len(jobs) - 2] / 1.015
    period = iteration_together(jobs) / slower
    for resource in range(3):
        assert sum(stage[resource] for stage in stages) <= period * (1 + 2e-3) or resource == 0
    # Two are read at a time, and everybody's stages are one after another.
    assert sum(stage[0] for stage in stages) <= 2 * period * (1 + 2e-3)
    assert all(iteration_together(order) == period * slower for order in permutations(jobs))


def test_interleaved_rates_are_one_iteration_each():
    parts = [Part(stages=(20, 10, 0), iteration=30), Part(stages=(10, 15, 5), iteration=30)]
    sharing = Interleaved()
    expected = WORK * 30 * 1.015 / (30 * 1.33 / 1.015)
    for part in parts:
        assert sharing.rate(parts, part, 1000) == pytest.approx(expected, abs=1)
        assert sharing.rate([part], part, 1000) == WORK
    assert not sharing.admits(parts, Part())


@pytest.mark.parametrize("policy", ["muri-s", "muri-l"])
def test_muri_puts_together_who_use_different_resources(policy):
    """Two jobs that read and two that compute, on two GPUs: one of each on each of them."""
    reads, computes = (60, 10, 0), (2, 60, 8)
    jobs = [
        Job(f"{what}{i}", 1, 0, 1000, stages=stages, iteration=70)
        for what, stages in (("reads", reads), ("computes", computes))
        for i in range(2)
    ]
    rows = run(jobs, 2, policy)
    for gpu in range(2):
        kinds = {name[:-1] for name, row in rows.items() if row.gpus == (gpu,)}
        assert kinds == {"reads", "computes"}
    together = iteration_together(((computes, 70), (reads, 70))) / (70 * 1.015)
    assert [row.end_time for row in rows.values()] == [pytest.approx(1000 * together, abs=1)] * 4
    # With room for all, everybody is alone.
    assert {row.end_time for row in run(jobs, 4, policy).values()} == {1000}


@pytest.mark.parametrize("policy", ["muri-s", "muri-l"])
def test_who_is_left_alone_on_its_gpu_is_as_fast_as_alone(policy):
    jobs = [
        Job("reads", 1, 0, 1000, stages=(60, 10, 0), iteration=70),
        Job("computes", 1, 0, 1000, stages=(2, 60, 8), iteration=70),
        Job("short", 1, 0, 100),  # has no stages, so the other two share
    ]
    rows = run(jobs, 2, policy)
    # When it has ended one of the two moves to its GPU.
    assert rows["short"].end_time == 100
    assert rows["reads"].preempt + rows["computes"].preempt == 1
    assert all(row.end_time < 1050 for row in rows.values())


def test_a_group_that_is_slower_than_its_jobs_in_turn_is_taken_apart():
    jobs = [Job(f"job{i}", 1, 0, 1000, stages=(1, 98, 1), iteration=100) for i in range(2)]
    rows = run(jobs, 1, "muri-s")
    assert sorted(row.end_time for row in rows.values()) == [1000, 2000]


@given(
    many=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    units=st.lists(st.integers(0, 6), min_size=15, max_size=15),
)
def test_couples_by_kind_weigh_as_much_as_blossoms_matching(many, units):
    pairs = [(one, other) for other in range(len(many)) for one in range(other + 1)]
    weights = dict(zip(pairs, units, strict=False))
    flows = best_couples(weights, dict(enumerate(many)))
    kinds = [kind for kind, count in enumerate(many) for _ in range(count)]
    found = partners(kinds, flows)
    assert len({*found, *found.values()}) == 2 * len(found) == 2 * sum(flows.values())
    graph = nx.Graph()
    for one, other in combinations(range(len(kinds)), 2):
        graph.add_edge(one, other, weight=weights[kinds[one], kinds[other]])

    def weight(couples):
        return sum(graph.edges[couple]["weight"] for couple in couples)

    assert weight(found.items()) == weight(nx.max_weight_matching(graph))


def test_of_more_kinds_than_a_program_has_rows_for_the_best_are_coupled_too():
    # A ring of eleven, each with two neighbors; kind 0 is two things, which may be a couple.
    weights = {(kind, kind + 1): 2.0 for kind in range(10)} | {(0, 10): 2.0, (0, 0): 1.0}
    found = best_couples(weights, {kind: 1 + (kind == 0) for kind in range(11)})
    assert sum(weights[pair] * count for pair, count in found.items()) == 12.0
    assert found[0, 1] == found[0, 10] == 1


def test_of_things_that_are_alike_the_first_are_partners():
    kinds = ["b", "a", "a", "b", "a"]
    assert partners(kinds, {("a", "b"): 1, ("a", "a"): 1}) == {1: 0, 4: 2}


def test_muri_s_knows_durations_and_muri_l_does_not():
    jobs = [Job("long", 1, 0, 1000), Job("short", 1, 10, 20)]
    rows = run(jobs, 1, "muri-s")
    assert (rows["short"].end_time, rows["long"].preempt) == (30, 1)
    rows = run([Job("long", 1, 0, 1000), Job("new", 1, 10, 1000)], 1, "muri-s")
    assert rows["long"].end_time == 1000
    rows = run([Job("long", 1, 0, 1000), Job("new", 1, 10, 1000)], 1, "muri-l")
    assert rows["new"].start_time == 10


def test_running_jobs_lose_at_events():
    jobs = [Job("runs", 1, 0, 100, "bert"), Job("comes", 1, 50, 10, "a2c"), Job("x", 1, 60, 900)]
    rows = run(jobs, 4, "muri-s", interruption=interruption)
    # At 50 and 60 it loses 10 each, which is its restart; at 60 the other ends, and loses nothing.
    assert rows["comes"].end_time == 60
    assert rows["runs"].end_time == 120


def test_the_pair_test_is_the_sum_of_two_completion_times():
    # In sequence 10 and 30. Together at full rate: 10 and 20.
    assert benefit(20, 10, (1.0, 1.0)) == 40 - 30
    # At half of it: the first ends at 20, and the second has 10 left then.
    assert benefit(20, 10, (0.5, 0.5)) == 40 - 50
    # At 3/4 both of ten end after 13.3.
    assert benefit(10, 10, (0.75, 0.75)) == pytest.approx(30 - 2 * 40 / 3)
    # A long job does not wait for a short one, nor a short for a long one.
    assert benefit(1, 100, (0.6, 0.6)) > 0 > benefit(100, 1, (0.4, 0.6))


def test_sjf_bsbf_shares_where_it_helps_both():
    light = [Job("runs", 1, 0, 100, compute=500), Job("new", 1, 10, 50, compute=500)]
    rows = run(light, 1, "sjf-bsbf")
    assert (rows["new"].start_time, rows["new"].end_time, rows["runs"].end_time) == (10, 60, 100)
    heavy = [Job("runs", 1, 0, 100), Job("new", 1, 10, 100)]
    rows = run(heavy, 1, "sjf-bsbf")
    assert rows["new"].start_time == 100  # each at half of its rate: later than in sequence
    # The partner is the one that gains most, and there are at most two on a GPU.
    jobs = [
        Job("busy", 1, 0, 1000, compute=900),
        Job("idle", 1, 0, 1000, compute=300),
        Job("short", 1, 10, 50, compute=700),
        Job("third", 1, 11, 60, compute=100),
    ]
    rows = run(jobs, 2, "sjf-bsbf", sharing=SideBySide())
    assert (rows["short"].gpus, rows["short"].end_time) == (rows["idle"].gpus, 60)
    assert (rows["third"].gpus, rows["third"].end_time) == (rows["busy"].gpus, 71)


def test_opportunistic_jobs_have_what_is_left():
    guaranteed, other = Part(compute=700), Part(compute=600, opportunistic=True)
    sharing = Opportunistic()
    assert sharing.rate([guaranteed, other], guaranteed, 1000) == WORK
    assert sharing.rate([guaranteed, other], other, 1000) == WORK // 2
    assert sharing.rate([other], other, 1000) == WORK
    assert sharing.admits([guaranteed], other)
    assert not sharing.admits([guaranteed], guaranteed)


def test_antman_slows_down_only_those_without_a_guarantee():
    jobs = [
        Job("spare", 2, 0, 100, compute=500, priority=-1),
        Job("sure", 2, 10, 100, compute=750),
        Job("later", 2, 20, 10, compute=250, priority=-1),
    ]
    rows = run(jobs, 2, "antman")
    assert (rows["sure"].start_time, rows["sure"].end_time) == (10, 110)
    # Half of its rate from 10 on: 50 of its 90 are done at 110.
    assert rows["spare"].end_time == 110 + 40
    assert rows["spare"].preempt == 0
    assert rows["later"].start_time == 150
    # A wider job with a guarantee takes the GPUs of the last of those without.
    jobs = [
        Job("first", 1, 0, 100, priority=-1),
        Job("last", 1, 1, 100, priority=-1),
        Job("wide", 3, 10, 20),
    ]
    rows = run(jobs, 4, "antman")
    assert (rows["wide"].start_time, rows["last"].preempt, rows["first"].preempt) == (10, 1, 0)


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(0, 20), max_size=10
    ),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_no_pairs_weigh_more(weights, many, room):
    flows = best_flows(weights, dict(enumerate(many)), dict(enumerate(room)))
    for side, limit in enumerate((many, room)):
        for kind, most in enumerate(limit):
            assert sum(count for pair, count in flows.items() if pair[side] == kind) <= most

    def most(one, left, others):
        """The best for what is left of this kind of the first side, and all later kinds."""
        if one > 3:
            return 0
        best = most(one + 1, many[one + 1] if one < 3 else 0, others)
        for (a, other), weight in weights.items():
            if a == one and left and others[other]:
                fewer = [*others[:other], others[other] - 1, *others[other + 1 :]]
                best = max(best, weight + most(one, left - 1, fewer))
        return best

    assert sum(weights[pair] * count for pair, count in flows.items()) == most(0, many[0], room)


def test_muxflow_matches_where_antman_takes_the_first():
    jobs = [
        Job("idle", 1, 0, 1000, compute=200),
        Job("busy", 1, 0, 1000, compute=600),
        Job("small", 1, 10, 100, compute=300, priority=-1),
        Job("large", 1, 10, 100, compute=800, priority=-1),
    ]
    # The first takes the GPU that the other would need, and leaves it half of its rate.
    rows = run(jobs, 2, "antman")
    assert (rows["small"].end_time, rows["large"].end_time) == (110, 210)
    # Matched together both run as if alone.
    rows = run(jobs, 2, "muxflow")
    assert (rows["small"].end_time, rows["large"].end_time) == (110, 110)
    assert (rows["small"].gpus, rows["large"].gpus) == (rows["busy"].gpus, rows["idle"].gpus)
    # One after the other they are matched anew in the next interval.
    jobs[2:] = [
        Job("small", 1, 10, 2000, compute=450, priority=-1),
        Job("large", 1, 20, 2000, compute=800, priority=-1),
    ]
    rows = run(jobs, 2, "muxflow")
    # They change places at 900: the large one has lost half of 880 until then, and the small one a
    # ninth of the last hundred of the host to which it goes.
    assert rows["small"].preempt == rows["large"].preempt == 1
    assert (rows["small"].end_time, rows["large"].end_time) == (2010 + 12, 20 + 2000 + 880 // 2)


def test_an_online_job_does_not_wait_for_offline_ones():
    jobs = [Job("offline", 1, 0, 100, priority=-1), Job("online", 1, 10, 50, compute=400)]
    for policy in ("muxflow", "miger"):
        rows = run(jobs, 1, policy)
        assert (rows["online"].start_time, rows["online"].end_time) == (10, 60)
        # At once it is beside it, on the 600 thousandths that are left.
        assert (rows["offline"].pending_time, rows["offline"].end_time) == (0, 60 + 90 - 30)


def test_miger_uses_the_smallest_slice_and_what_it_leaves():
    fleet = Fleet.uniform(1, 1, 1, slices=(Slice(571), Slice(285)))
    online = Job("online", 1, 0, 100, compute=150)
    large = Job("large", 1, 0, 100, compute=571, priority=-1)
    small = Job("small", 1, 0, 100, compute=100, priority=-1)
    rows = run([online, large, small], fleet, "miger")
    # The small one is beside the online job, which keeps 0.53 of its slice busy.
    assert {name: row.gpus for name, row in rows.items()} == {
        "online": (1,),
        "large": (0,),
        "small": (1,),
    }
    assert {row.end_time for row in rows.values()} == {100}
    # Beside one that keeps 0.88 of it busy there is nobody.
    rows = run([Job("online", 1, 0, 100, compute=250), large, small], fleet, "miger")
    assert rows["online"].gpus == (1,)
    assert max(rows["large"].start_time, rows["small"].start_time) == 100
    # A wide offline job has what no online one wants.
    jobs = [Job("wide", 2, 0, 100, priority=-1), Job("online", 1, 10, 50, compute=200)]
    rows = run(jobs, fleet, "miger")
    assert (rows["online"].start_time, rows["wide"].preempt) == (10, 1)
    # Who needs more than the small slice waits for the large one, and not in the small one.
    jobs = [Job("first", 1, 0, 100, compute=400), Job("second", 1, 0, 100, compute=400)]
    rows = run(jobs, fleet, "miger")
    assert [row.gpus for row in rows.values()] == [(0,), (0,)]
    assert rows["second"].start_time == 100


def test_iadeep_counts_what_is_lost_and_not_jobs():
    assert interference((1.0, 1.0)) == 0
    assert interference((0.5, 0.5)) == 2
    jobs = [
        Job("heavy", 1, 0, 1000),
        Job("light", 1, 1, 1000, compute=200),
        Job("other", 1, 2, 1000, compute=200),
        Job("new", 1, 3, 100, compute=500),
    ]
    rows = run(jobs, 2, "iadeep", sharing=SideBySide(3))
    # Beside the heavy one both would keep two thirds; the two light ones leave all that it wants.
    assert rows["other"].gpus == rows["light"].gpus == rows["new"].gpus
    assert (rows["new"].start_time, rows["new"].end_time) == (3, 103)
    assert {row.preempt for row in rows.values()} == {0}
