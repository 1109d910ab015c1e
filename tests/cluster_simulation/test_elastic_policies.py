"""Policies that choose how many GPUs a job has: Optimus, Pollux, Voda, Lyra and ONES."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi import InputError, Op, OpGraph
from baechi.cluster_simulation.fleet import DeviceStates, Fleet, Gpu
from baechi.cluster_simulation.jobs import WHOLE, Exclusive, Job, JobRun, amdahl
from baechi.cluster_simulation.placement_schemes import Baechi, BestFit
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.policies.elastic_srjf import ElasticSrjf
from baechi.cluster_simulation.policies.ones import Ones
from baechi.cluster_simulation.policies.optimus import Optimus
from baechi.cluster_simulation.policies.pollux import Pollux
from baechi.cluster_simulation.policy_support.allocation import ClusterView
from baechi.cluster_simulation.policy_support.optimal_choices import knapsack
from baechi.cluster_simulation.policy_support.predictions import Rates
from baechi.cluster_simulation.policy_support.server_loans import cheapest
from baechi.cluster_simulation.simulator import simulate_cluster

ELASTIC = ("optimus", "pollux", "elastic-srjf", "lyra", "heet", "powerflow")


def view_of(jobs, gpus, now=0):
    devices = DeviceStates(Fleet.uniform(1, 1, gpus), Exclusive(), BestFit().place, 0, {})
    runs = [JobRun(job, index) for index, job in enumerate(jobs)]
    return ClusterView(now, runs, devices, Rates(devices))


def sizes(policy, jobs, gpus):
    answer = policy.allocate(view_of(jobs, gpus))
    return {allocation.run.job.name: allocation.size for allocation in answer}


def test_optimus_gives_each_gpu_to_the_largest_gain():
    # Remaining times by size: a 120, 60, 40, 30; b 60, 40, 30. One each; then a gains 60, then b
    # and a 20 each (a arrived first), then b 20.
    a = Job("a", 1, 0, 120, curve=(1000, 2000, 3000, 4000))
    b = Job("b", 1, 0, 60, curve=(1000, 1500, 2000))
    assert sizes(Optimus(), [a, b], 2) == {"a": 1, "b": 1}
    assert sizes(Optimus(), [a, b], 3) == {"a": 2, "b": 1}
    assert sizes(Optimus(), [a, b], 4) == {"a": 3, "b": 1}
    assert sizes(Optimus(), [a, b], 5) == {"a": 3, "b": 2}
    assert sizes(Optimus(), [a, b], 9) == {"a": 4, "b": 3}
    # Nobody takes a GPU that gains nothing, and without a curve a job is as wide as it is.
    flat = Job("flat", 1, 0, 60, curve=(1000, 1000))
    assert sizes(Optimus(), [flat, Job("rigid", 2, 0, 10)], 4) == {"flat": 1, "rigid": 2}


def test_voda_gives_the_least_to_the_shortest_and_the_rest_in_turn():
    curve = amdahl(1, 4, 0.0)
    jobs = [Job(f"job{i}", 1, 0, 100 - 10 * i, curve=curve) for i in range(3)]
    assert sizes(ElasticSrjf(), jobs, 2) == {"job2": 1, "job1": 1}
    assert sizes(ElasticSrjf(), jobs, 5) == {"job2": 2, "job1": 2, "job0": 1}
    assert sizes(ElasticSrjf(), jobs, 20) == {"job2": 4, "job1": 4, "job0": 4}


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), min_size=3, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.integers(3, 6),
)
@settings(max_examples=40)
def test_no_sizes_have_a_larger_harmonic_mean_of_speedups(rows, gpus):
    jobs = []
    for index, (gain, steps) in enumerate(rows):
        rates = [1000]
        for step in sorted(steps, reverse=True):  # concave
            rates.append(rates[-1] + gain * step * 30 + 1)
        jobs.append(Job(f"job{index}", 1, 0, 1000, curve=tuple(rates)))
    view = view_of(jobs, gpus)
    policy = Pollux()
    found = policy.sizes(view, view.runs, {})

    def loss(given):
        return sum(
            policy._term(view, run, size) for run, size in zip(view.runs, given, strict=True)
        )

    every = product(*(range(len(job.curve) + 1) for job in jobs))
    best = min(loss(given) for given in every if sum(given) <= gpus)
    ours = [found.get(run.index, 0) for run in view.runs]
    assert sum(ours) <= gpus
    assert loss(ours) == pytest.approx(best)


def test_pollux_lets_a_running_job_be_where_a_restart_costs_more():
    # Alone a job takes all; when another comes, both get a half: that is worth a restart.
    curve = amdahl(1, 4, 0.1)
    jobs = [Job("first", 1, 0, 3600, curve=curve), Job("second", 1, 600, 60, curve=curve)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 4), policy_named("pollux"), BestFit())
    rows = {row.job.name: row for row in result.outcomes}
    assert rows["second"].start_time == 600
    assert rows["second"].end_time < 660
    assert rows["first"].preempt == 2  # to a half, and back
    # One GPU more or less of four gains less than it costs.
    few = [Job("first", 1, 0, 3600, curve=(1000, 1100, 1150, 1200)), Job("rigid", 1, 600, 60)]
    result = simulate_cluster(few, Fleet.uniform(1, 1, 5), policy_named("pollux"), BestFit())
    assert all(row.preempt == 0 for row in result.outcomes)


@pytest.mark.parametrize("policy", ELASTIC)
def test_who_is_alone_grows_and_work_adds_up(policy):
    job = Job("alone", 2, 0, 1200, curve=amdahl(2, 4, 0.0))
    result = simulate_cluster([job], Fleet.uniform(1, 1, 8), policy_named(policy), BestFit())
    assert result.outcomes[0].end_time == 600
    assert len(result.outcomes[0].gpus) == 4


@pytest.mark.parametrize("policy", ELASTIC)
def test_a_graph_has_as_many_devices_as_speed_it_up(policy):
    """Two branches: twice as fast on two devices, and never faster on more."""
    ops = tuple(Op(f"branch{i}", 1_000_000, persistent_bytes=10) for i in range(2))
    job = Job("graph", 1, 0, 1000, graph=OpGraph(ops, ()), most_gpus=4)
    fleet = Fleet.uniform(1, 1, 4, memory_bytes=100)
    result = simulate_cluster([job], fleet, policy_named(policy), Baechi())
    assert (len(result.outcomes[0].gpus), result.outcomes[0].end_time) == (2, 500)
    # A policy that does not choose sizes has it on as few as it fits on.
    result = simulate_cluster([job], fleet, policy_named("allox"), Baechi())
    assert (len(result.outcomes[0].gpus), result.outcomes[0].end_time) == (1, 1000)
    # Three such jobs on four devices of less memory: each has two as its least, so one waits.
    fleet = Fleet.uniform(1, 1, 4, memory_bytes=15)
    jobs = [replace(job, name=f"graph{i}") for i in range(3)]
    result = simulate_cluster(jobs, fleet, policy_named(policy), Baechi())
    assert sorted(row.end_time for row in result.outcomes) == [500, 500, 1000]


def test_ones_doubles_a_limit_in_every_round_that_a_job_runs():
    # 300 ticks each on one, two and four GPUs do 2,100 of the work; eight do the rest in 300.
    curve = tuple(range(1000, 9000, 1000))
    rows = simulate([Job("alone", 1, 0, 4500, curve=curve)], Fleet.uniform(1, 1, 8), "ones")
    assert (rows["alone"].end_time, len(rows["alone"].gpus)) == (1200, 8)
    # Two jobs share what there is as long as both are here.
    jobs = [Job("one", 1, 0, 900, curve=curve), Job("two", 1, 0, 900, curve=curve)]
    rows = simulate(jobs, Fleet.uniform(1, 1, 2), "ones")
    assert {row.end_time for row in rows.values()} == {900}
    # So is a graph split further: 300 on one device, and what is left on two, twice as fast.
    ops = tuple(Op(f"branch{i}", 1_000_000, persistent_bytes=10) for i in range(2))
    job = Job("graph", 1, 0, 1000, graph=OpGraph(ops, ()), most_gpus=4)
    fleet = Fleet.uniform(1, 1, 4, memory_bytes=100)
    row = simulate_cluster([job], fleet, policy_named("ones"), Baechi()).outcomes[0]
    assert (len(row.gpus), row.end_time) == (2, 300 + 700 // 2)
    # Who is preempted begins anew with what its user asks for.
    policy = Ones()
    view = view_of([Job("alone", 1, 0, 4500, curve=curve)], 8)
    run = view.runs[0]
    for running, limit in ((False, 1), (True, 2), (True, 4), (False, 1), (True, 2)):
        run.running = running
        assert [row.size for row in policy.decide(view)] == [limit]


def test_a_generation_of_ones_has_no_larger_utilization_than_the_one_before():
    # Three GPUs, and jobs of one: the three with the least to do are 10 + 20 + 30.
    times = (70, 20, 50, 10, 60, 30, 40, 80)
    view = view_of([Job(f"job{time}", 1, 0, time) for time in times], 3)
    policy, left = Ones(), []
    for _ in range(30):
        answer = policy.decide(view)
        left.append(sum(row.size * row.run.job.duration for row in answer))
    assert left == sorted(left, reverse=True)
    assert (len(answer), left[-1]) == (3, 60)
    # Two GPUs for one job do 1.5 times as much: 2 * 100 / 1.5 is more than 100 and 20 alone.
    policy, view = Ones(), view_of([Job("a", 1, 0, 100, curve=(1000, 1500)), Job("b", 1, 0, 20)], 2)
    policy.decide(view)
    a, b = (run.index for run in view.runs)
    view.runs[0].running = True
    policy.decide(view)
    assert policy.utilization({a: 2}) == pytest.approx(200 / 1.5, rel=1e-3)
    assert policy.utilization({a: 1, b: 1}) == 120
    assert policy.filled(view, {a: 2}) == {a: 2}
    assert policy.filled(view, {a: 1}) == {a: 1, b: 1}
    assert policy.filled(view, {}) == {a: 1, b: 1}  # waiting jobs come before more for others


def simulate(jobs, fleet, policy):
    result = simulate_cluster(jobs, fleet, policy_named(policy), BestFit())
    return {row.job.name: row for row in result.outcomes}


def test_a_server_costs_the_parts_of_jobs_that_it_has():
    # Job 0 is on a server of its own, and job 1 on two: each is half of it.
    servers = {0: {0: False}, 1: {1: False}, 2: {1: False}}
    assert cheapest(servers, servers) == 1
    # Job 2 makes it dearer, unless it can give up its workers there.
    servers[1][2] = False
    assert cheapest(servers, servers) == 2
    assert cheapest({**servers, 1: {1: False, 2: True}}, servers) == 1
    assert cheapest(servers, [0, 1]) == 0


def test_lyra_reclaims_servers_with_the_fewest_preemptions():
    jobs = [
        Job("narrow", 2, 0, 100),
        Job("wide", 4, 0, 100),
        Job("inference", 4, 10, 50, priority=1),
    ]
    rows = simulate(jobs, Fleet.uniform(1, 3, 2), "lyra")
    # Two of three servers are wanted: those of one job.
    assert {name: row.preempt for name, row in rows.items()} == {
        "narrow": 0,
        "wide": 1,
        "inference": 0,
    }
    assert rows["inference"].start_time == 10
    assert (rows["narrow"].end_time, rows["wide"].end_time) == (100, 60 + 90)


def test_who_is_elastic_gives_up_workers_and_goes_on():
    elastic = Job("elastic", 1, 0, 400, curve=(1000, 2000, 3000, 4000))
    load = Job("load", 2, 10, 1000, priority=1)
    rows = simulate([elastic, load], Fleet.uniform(1, 2, 2), "lyra")
    # 40 of its work are done on four GPUs, and then 2 per tick.
    assert (rows["elastic"].pending_time, rows["elastic"].end_time) == (0, 10 + 360 // 2)
    assert rows["load"].start_time == 10


def test_inference_stays_in_its_cluster_and_lends_it():
    fleet = Fleet(tuple(Gpu(i // 2, 0, kind="inference" if i < 2 else "") for i in range(4)))
    train = [Job("one", 2, 0, 100), Job("two", 2, 0, 100)]
    load = [Job("load", 2, 10, 50, priority=1), Job("more", 2, 20, 50, priority=1)]
    rows = simulate([*train, *load], fleet, "lyra")
    # The job on loan waits; the other is left alone although more is wanted.
    assert (rows["load"].gpus, rows["more"].gpus) == ((0, 1), (0, 1))
    assert (rows["load"].start_time, rows["more"].start_time) == (10, 60)
    assert sorted(row.preempt for name, row in rows.items() if name in {"one", "two"}) == [0, 1]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4),
    st.integers(0, 6),
)
def test_no_other_workers_are_worth_more(values, room):
    found = knapsack(values, room)
    assert sum(found) <= room

    def worth(given):
        return sum(row[more - 1] for row, more in zip(values, given, strict=True) if more)

    every = product(*(range(len(row) + 1) for row in values))
    assert worth(found) == max(worth(given) for given in every if sum(given) <= room)


def test_amdahl():
    assert amdahl(1, 4, 0.0) == (1000, 2000, 3000, 4000)
    assert amdahl(2, 4, 1.0) == (1000, 1000, 1000, 1000)
    assert amdahl(1, 2, 0.5) == (1000, round(WHOLE / 0.75))
    with pytest.raises(InputError, match="serial part"):
        amdahl(1, 2, 1.5)
    with pytest.raises(InputError, match="must be 1000 for 2 GPUs"):
        Job("a", 2, 0, 1, curve=(1000, 1500))
