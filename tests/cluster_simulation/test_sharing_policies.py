"""Policies that put two and more jobs on the same GPUs: Muri, SJF-BSBF, AntMan."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import WORK, Job, Part, SideBySide
from baechi.cluster_simulation.policies import (
    DEFAULTS,
    policy_named,
    scheme_named,
    sharing_named,
)
from baechi.cluster_simulation.policies.antman import Opportunistic
from baechi.cluster_simulation.policies.muri import (
    Interleaved,
    interruption,
    iteration_together,
)
from baechi.cluster_simulation.policies.sjf_bsbf import benefit
from baechi.cluster_simulation.simulator import simulate_cluster


def run(jobs, gpus, policy, **options):
    scheme, sharing = DEFAULTS[policy]
    options.setdefault("sharing", sharing_named(sharing, 2))
    result = simulate_cluster(
        jobs, Fleet.uniform(1, 1, gpus), policy_named(policy), scheme_named(scheme), **options
    )
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
