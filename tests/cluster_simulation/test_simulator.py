"""The simulated cluster: what must hold for any trace, under every policy, scheme and sharing."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from benchmarks.random_jobs import log_normal, poisson_jobs
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from seeds import covering

from baechi import Cluster, InputError, Link, Op, OpGraph, Tensor, simulate, solve
from baechi.cluster_simulation.fleet import DeviceCounter, DeviceStates, Fleet, Gpu, Slice
from baechi.cluster_simulation.jobs import (
    WHOLE,
    WORK,
    Exclusive,
    Job,
    JobRun,
    Part,
    SideBySide,
    TimeSliced,
)
from baechi.cluster_simulation.placement_schemes import (
    LISTED,
    AsPlaced,
    Baechi,
    BestFit,
    Consolidated,
    FirstFit,
    LeastLoaded,
)
from baechi.cluster_simulation.policies import (
    POLICIES,
    SCHEMES,
    SHARINGS,
    policy_named,
    scheme_named,
    sharing_named,
)
from baechi.cluster_simulation.policies.fifo import Fifo, FitJobFirst
from baechi.cluster_simulation.policies.finish_time_fairness import FinishTimeFairness
from baechi.cluster_simulation.policies.shortest_time import ShortestTime
from baechi.cluster_simulation.policies.split_or_wait import SplitOrWait
from baechi.cluster_simulation.policies.time_slicing import TimeSlicing
from baechi.cluster_simulation.policy_support.interleaving import Interleaved
from baechi.cluster_simulation.policy_support.policy import Policy
from baechi.cluster_simulation.results import ROW, cluster_csv, job_csv, summary
from baechi.cluster_simulation.simulator import simulate_cluster

CHAIN = OpGraph(
    tuple(Op(f"op{i}", 1_000_000, persistent_bytes=10) for i in range(4)),
    tuple(Tensor(i, (i + 1,), 1) for i in range(3)),
)


@st.composite
def traces(draw):
    """Jobs with zero lengths, bursts, gangs wider than the cluster, memory, shares and graphs."""
    return [
        Job(
            f"job{index}",
            draw(st.integers(1, 7)),
            draw(st.sampled_from([0, 0, 3, 10, 50, 500])),
            draw(st.one_of(st.just(0), st.integers(1, 400))),
            memory_bytes=draw(st.sampled_from([0, 10, 40, 200])),
            compute=draw(st.sampled_from([1, 300, 700, WHOLE])),
            limit=draw(st.sampled_from([250, WHOLE])),
            graph=draw(st.sampled_from([None, None, CHAIN])),
            owner=draw(st.sampled_from(["", "ann", "bob"])),
            priority=draw(st.integers(-1, 1)),
        )
        for index in range(draw(st.integers(0, 14)))
    ]


FLEETS = (
    Fleet.uniform(1, 1, 4),
    Fleet.uniform(2, 2, 2, memory_bytes=100, speed=1500),
    Fleet.uniform(1, 2, 1, memory_bytes=100, slices=(Slice(571, 50), Slice(285, 30))),
    Fleet((Gpu(0, 0, 100, 500), Gpu(0, 0, 50, 2000), Gpu(1, 1, 200))),
    Fleet((Gpu(0, 0, 100, share=600, held_bytes=70), Gpu(0, 0, 100), Gpu(1, 0, 100, held_bytes=5))),
)


@pytest.fixture
def watched(monkeypatch):
    """Checks the devices after every change: no GPU, memory or count above what there is."""
    seen = Counter()
    for devices in (DeviceStates, DeviceCounter):
        for change in ("take", "give"):
            monkeypatch.setattr(devices, change, checked(devices, change, seen))
    emptied = DeviceStates.emptied

    def marked(self):
        trial = emptied(self)
        trial.is_trial = True
        return trial

    monkeypatch.setattr(DeviceStates, "emptied", marked)
    return seen


def kept_busy(devices, part):
    """The share of a GPU that a job alone keeps busy; of one that is interleaved, its GPU stage."""
    if isinstance(devices.sharing, Interleaved) and part.stages:
        return WHOLE * part.stages[1] // max(part.iteration, part.stages[1])
    return part.compute


def checked(devices, change, seen):
    original = getattr(devices, change)

    def call(self, *arguments):
        original(self, *arguments)
        seen[change] += not getattr(self, "is_trial", False)  # what a policy tries out
        if isinstance(self, DeviceCounter):
            assert 0 <= self.free <= self.total
            return
        for gpu, parts in enumerate(self.parts):
            device = self.fleet.gpus[gpu]
            assert len(parts) == len(self.owners[gpu]) <= self.sharing.most
            assert len(set(self.owners[gpu])) == len(self.owners[gpu])
            used = sum(
                self.sharing.rate(parts, p, device.share) * kept_busy(self, p) for p in parts
            )
            assert used // WHOLE <= WORK * device.share // WHOLE
            if device.memory_bytes is not None:
                held = sum(part.memory_bytes for part in parts)
                assert held + self.memory_left[gpu] == device.free_bytes
                assert self.memory_left[gpu] >= 0
        idle, partly, full, free, busy = self.row()
        assert busy == sum(map(bool, self.owners))
        assert free + busy == len(self.owners)
        assert idle + partly + full == self.fleet.nodes

    return call


@pytest.mark.parametrize(
    ("policy", "scheme"), covering(list(POLICIES), sorted(set(SCHEMES) - {"yarn"}))
)
def test_what_must_hold_holds(policy, scheme, watched):
    counts = scheme == "count"
    fleets = (FLEETS[0], Fleet.uniform(2, 2, 2)) if counts else FLEETS

    @given(
        traces(),
        st.sampled_from(fleets),
        st.sampled_from([0, 0, 7]),
        st.just("exclusive") if counts else st.sampled_from(SHARINGS),
    )
    @settings(max_examples=5, deadline=None)
    def check(jobs, fleet, restart_cost, sharing):
        arguments = (jobs, fleet, policy_named(policy), scheme_named(scheme))
        options = {
            "sharing": sharing_named(sharing, 3),
            "restart_cost": restart_cost,
            "preempt_cost": restart_cost,
        }
        watched.clear()
        result = simulate_cluster(*arguments, **options)
        assert watched["take"] == watched["give"]
        check_result(result, jobs, fleet, policy_named(policy), restart_cost)
        assert simulate_cluster(*arguments, **options) == result

    check()


@st.composite
def elastic_traces(draw):
    """Jobs with sizes to choose from, speeds on kinds of GPU, stages, and a price of distance."""
    jobs = []
    for index in range(draw(st.integers(0, 10))):
        gpus = draw(st.integers(1, 4))
        rates = draw(st.lists(st.integers(100, 4000), min_size=4, max_size=6))
        iteration = draw(st.integers(1, 100))
        jobs.append(
            Job(
                f"job{index}",
                gpus,
                draw(st.sampled_from([0, 0, 3, 10, 50, 500])),
                draw(st.one_of(st.just(0), st.integers(1, 2000))),
                compute=draw(st.sampled_from([300, 700, WHOLE])),
                owner=draw(st.sampled_from(["", "ann", "bob"])),
                priority=draw(st.integers(-1, 1)),
                kinds=draw(st.sampled_from([(), (("old", 400),), (("old", 1500), ("new", 2500))])),
                curve=draw(
                    st.sampled_from([(), (*rates[: gpus - 1], WHOLE, *rates[gpus:])]),
                ),
                across=draw(st.sampled_from([(WHOLE, WHOLE), (900, 500)])),
                stages=draw(st.sampled_from([(), (60, 30, 10), (1, 90, 5), (20, 20, 50)])),
                iteration=iteration,
            )
        )
    return jobs


def test_work_in_is_work_out(watched, monkeypatch):
    """For sizes that change, kinds of GPU and jobs that share: each tick's work adds up."""
    done: Counter[str] = Counter()
    settle = JobRun.settle

    def counted(run, now):
        if run.running:
            done[run.job.name] += run.rate * (now - run._since)
        settle(run, now)

    monkeypatch.setattr(JobRun, "settle", counted)
    mixed = Fleet(
        tuple(
            Gpu(i // 2, i // 4, kind="new" if i < 4 else "old", memory_bytes=100) for i in range(8)
        )
    )

    def settled(policy, jobs, fleet, cost, sharing, scheme, contention):
        arguments = (jobs, fleet, policy_named(policy), scheme_named(scheme))
        options = {
            "sharing": sharing_named(sharing, 3),
            "restart_cost": cost,
            "contention": contention,
        }
        watched.clear()
        done.clear()
        result = simulate_cluster(*arguments, **options)
        assert watched["take"] == watched["give"]
        names = [row.job.name for row in (*result.outcomes, *result.refused)]
        assert sorted(names) == sorted(job.name for job in jobs)
        for row in result.outcomes:
            asked = (row.job.duration + row.overhead) * WORK
            # A tick that the last work does not fill counts whole; no rate is above this.
            assert asked <= done[row.job.name] < asked + 20 * WORK or asked == 0
            assert row.overhead == cost * row.preempt
        assert job_csv(simulate_cluster(*arguments, **options)) == job_csv(result)

    @given(
        elastic_traces(),
        st.sampled_from([mixed, Fleet.uniform(2, 1, 3), Fleet.uniform(1, 2, 4, speed=2000)]),
        st.sampled_from([0, 5]),
        st.sampled_from(SHARINGS),
        st.sampled_from(["best-fit", "consolidated", "baechi"]),
        st.booleans(),
    )
    @settings(max_examples=10, deadline=None)
    def check(jobs, fleet, cost, sharing, scheme, contention):
        for policy in POLICIES:
            note(policy)
            settled(policy, jobs, fleet, cost, sharing, scheme, contention)

    check()


def check_result(result, jobs, fleet, policy, restart_cost):
    names = [row.job.name for row in (*result.outcomes, *result.refused)]
    assert sorted(names) == sorted(job.name for job in jobs)  # none lost, none run twice
    for row in result.outcomes:
        job = row.job
        ran = row.end_time - job.submit_time - row.pending_time  # ticks on GPUs
        assert job.submit_time <= row.start_time <= row.end_time
        assert row.pending_time >= row.start_time - job.submit_time
        assert row.overhead == 2 * restart_cost * row.preempt
        if all(gpu.speed == gpu.share == WHOLE for gpu in fleet.gpus) and job.graph is None:
            assert ran >= job.duration + row.overhead  # as little as one whole GPU needs
        if not policy.preemptive:
            assert row.preempt == row.resume == 0
            assert row.pending_time == row.start_time - job.submit_time
        else:
            assert row.resume == row.preempt + 1
    times = [row[0] for row in result.rows]
    assert times == sorted(times)
    for row in result.rows:
        assert row[ROW.index("idle_gpu")] + row[ROW.index("busy_gpu")] == len(fleet.gpus)
    if result.rows:
        assert result.rows[-1][5:] == (0, 0, 0, len(result.outcomes))
    for before, after in pairwise(result.rows):
        assert after[8] >= before[8]


@given(jobs=traces(), scheme=st.sampled_from(["count", "consolidated", "random"]))
def test_gpu_seconds_in_are_gpu_seconds_out(jobs, scheme):
    """Of every policy; a trace takes longer to draw than a policy to run it."""
    plain = [replace(job, memory_bytes=0, compute=WHOLE, limit=WHOLE, graph=None) for job in jobs]
    fleet = Fleet.uniform(1, 2, 4)
    for policy in POLICIES:
        note(policy)
        result = simulate_cluster(plain, fleet, policy_named(policy), scheme_named(scheme))
        assert not result.refused or scheme == "consolidated"
        needed = sum(row.job.gpus * row.job.duration for row in result.outcomes)
        figures = summary(result)
        held = needed / (figures["makespan"] * result.gpus) if figures["makespan"] else None
        assert figures["utilization"] == held
        for row in result.outcomes:
            assert row.completion_time == row.pending_time + row.job.duration


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 8)), max_size=25),
)
@example([(2, 5, 6), (1, 1, 6), (4, 0, 2), (2, 0, 5), (5, 2, 6), (2, 1, 3)])
def test_shortest_by_heaps_is_shortest_by_sorting(rows):
    """With as many ties as can be; the example is one that once broke one wrongly."""

    class Sorting(Policy):
        name = "shortest"
        preemptive = True

        def order(self, runs, now):
            return sorted(runs, key=lambda run: run.remaining(now))

    times = list(accumulate(gap for _, gap, _ in rows))
    jobs = [
        Job(f"job{i}", gpus, time, duration)
        for i, ((gpus, _, duration), time) in enumerate(zip(rows, times, strict=True))
    ]
    fleet = Fleet.uniform(1, 1, 5)
    assert simulate_cluster(jobs, fleet, ShortestTime()) == simulate_cluster(jobs, fleet, Sorting())


@given(traces())
def test_counting_is_placing_where_any_gpu_will_do(jobs):
    plain = [replace(job, memory_bytes=0, compute=WHOLE, limit=WHOLE, graph=None) for job in jobs]
    for policy in POLICIES:
        counted = simulate_cluster(plain, Fleet.uniform(1, 1, 7), policy_named(policy))
        placed = simulate_cluster(
            plain, Fleet.uniform(1, 1, 7), policy_named(policy), scheme_named("random"), seed=3
        )
        if not policy_named(policy).preemptive:
            assert job_csv(counted) == job_csv(placed)
        assert len(counted.outcomes) == len(placed.outcomes)


# Worked examples.


def times(result):
    return {row.job.name: (row.start_time, row.end_time) for row in result.outcomes}


def test_an_empty_trace_is_no_result():
    result = simulate_cluster([], Fleet.uniform(1, 1, 1), Fifo())
    assert result.outcomes == result.refused == result.rows == ()
    figures = summary(result)
    assert figures["jobs"] == figures["preemptions"] == figures["makespan"] == 0
    assert figures["mean_jct"] is figures["p99_jct"] is figures["utilization"] is None
    assert job_csv(result).count("\n") == cluster_csv(result).count("\n") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_zero_length_jobs_end_when_they_start(policy):
    jobs = [Job("a", 2, 5, 0), Job("b", 2, 5, 10), Job("c", 1, 5, 0)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 2), policy_named(policy))
    assert {row.job.name for row in result.outcomes} == {"a", "b", "c"}
    for row in result.outcomes:
        assert row.end_time - row.start_time == row.job.duration


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_larger_than_the_cluster_is_refused_by_name(policy):
    jobs = [Job("wide", 3, 0, 10), Job("fits", 2, 1, 10)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 2), policy_named(policy))
    assert [(row.job.name, row.reason) for row in result.refused] == [
        ("wide", "asks for 3 GPUs of 2")
    ]
    assert times(result) == {"fits": (1, 11)}
    assert summary(result)["refused"] == [{"job_id": "wide", "reason": "asks for 3 GPUs of 2"}]


def test_a_job_that_no_switch_holds_is_refused_where_jobs_are_consolidated():
    fleet = Fleet.uniform(2, 1, 2)
    jobs = [Job("across", 4, 0, 10), Job("within", 2, 0, 10)]
    result = simulate_cluster(jobs, fleet, Fifo(), Consolidated())
    assert [row.job.name for row in result.refused] == ["across"]
    assert not simulate_cluster(jobs, fleet, Fifo(), BestFit()).refused


def test_order_in_the_trace_does_not_matter_but_at_one_time():
    jobs = [Job("late", 1, 9, 5), Job("early", 1, 0, 20), Job("second", 1, 9, 5)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 1), Fifo())
    assert times(result) == {"early": (0, 20), "late": (20, 25), "second": (25, 30)}
    again = simulate_cluster([jobs[1], jobs[0], jobs[2]], Fleet.uniform(1, 1, 1), Fifo())
    assert again == result


def test_two_jobs_of_one_name_are_an_error():
    with pytest.raises(InputError, match="two jobs are named 'a'"):
        simulate_cluster([Job("a", 1, 0, 1)] * 2, Fleet.uniform(1, 1, 1), Fifo())


def test_time_slices_halve_the_rate():
    jobs = [Job("a", 1, 0, 100), Job("b", 1, 40, 30), Job("c", 1, 41, 1)]
    result = simulate_cluster(
        jobs, Fleet.uniform(1, 1, 1), Fifo(), LeastLoaded(), sharing=TimeSliced(2)
    )
    # a has done 40 when b comes; b takes 60, then 30 of a are left, which c's one shares.
    assert times(result) == {"a": (0, 131), "b": (40, 100), "c": (100, 102)}


def test_turns_among_up_to_sixteen_jobs_are_exact():
    for count in range(1, 17):
        jobs = [Job(f"job{i}", 1, 0, 7) for i in range(count)]
        result = simulate_cluster(
            jobs, Fleet.uniform(1, 1, 1), Fifo(), LeastLoaded(), sharing=TimeSliced(16)
        )
        assert {row.end_time for row in result.outcomes} == {7 * count}


def test_side_by_side_costs_only_what_is_wanted_beyond_the_whole():
    sharing = SideBySide(4)
    half, whole = Part(compute=500), Part()
    assert sharing.rate([half, half], half, WHOLE) == WORK
    assert sharing.rate([whole, whole], whole, WHOLE) == WORK // 2
    assert sharing.rate([whole, half], half, WHOLE) == WORK * 2 // 3
    capped = Part(limit=250)
    assert sharing.rate([capped], capped, WHOLE) == WORK // 4
    packed = SideBySide(4, packs=True)
    assert packed.admits([half], half)
    assert not packed.admits([half], whole)
    assert packed.admits([], whole)


def test_a_slice_is_a_small_gpu():
    fleet = Fleet.uniform(1, 1, 1, memory_bytes=80, slices=(Slice(500, 40), Slice(250, 20)))
    jobs = [
        Job("small", 1, 0, 100, memory_bytes=10, compute=200),
        Job("large", 1, 0, 100, memory_bytes=30),
        Job("huge", 1, 0, 100, memory_bytes=50),
    ]
    result = simulate_cluster(jobs, fleet, FitJobFirst(), BestFit())
    assert times(result) == {"small": (0, 100), "large": (0, 200)}
    assert [row.job.name for row in result.refused] == ["huge"]
    with pytest.raises(InputError, match="more than a GPU"):
        Fleet.uniform(1, 1, 1, slices=(Slice(600), Slice(600)))


def test_a_gang_is_as_fast_as_its_slowest_gpu():
    fleet = Fleet((Gpu(0, 0, speed=2000), Gpu(0, 0, speed=500)))
    result = simulate_cluster(
        [Job("both", 2, 0, 100), Job("one", 1, 0, 100)], fleet, Fifo(), BestFit()
    )
    assert times(result) == {"both": (0, 200), "one": (200, 250)}


def test_preemption_and_restart_cost_work():
    jobs = [Job("long", 1, 0, 100), Job("short", 1, 10, 5)]
    result = simulate_cluster(
        jobs, Fleet.uniform(1, 1, 1), ShortestTime(), preempt_cost=3, restart_cost=4
    )
    assert times(result) == {"long": (0, 112), "short": (10, 15)}
    long = result.outcomes[-1]
    assert (long.preempt, long.resume, long.pending_time, long.overhead) == (1, 2, 5, 7)


def test_memory_is_told_as_it_is_held():
    jobs = [Job("a", 2, 0, 10, memory_bytes=50), Job("b", 1, 10, 20, memory_bytes=100)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 2, memory_bytes=100), Fifo(), BestFit())
    figures = summary(result)
    assert figures["memory_utilization"] == (2 * 50 * 10 + 100 * 20) / (30 * 200)
    assert figures["utilization"] == (2 * 10 + 20) / (30 * 2)
    assert (
        summary(simulate_cluster(jobs, Fleet.uniform(1, 1, 2), Fifo()))["memory_utilization"]
        is None
    )


def test_best_fit_leaves_the_large_holes():
    fleet = Fleet.uniform(1, 2, 2, memory_bytes=100)
    jobs = [Job("a", 1, 0, 10), Job("b", 1, 1, 10), Job("c", 2, 2, 10)]
    result = simulate_cluster(jobs, fleet, Fifo(), BestFit())
    assert times(result)["c"] == (2, 12)
    assert {row.job.name: row.gpus for row in result.outcomes}["c"] == (2, 3)


def test_whole_gpus_are_those_that_nobody_else_holds_a_part_of():
    fleet = Fleet((Gpu(0, 0, 100, held_bytes=30), Gpu(0, 0, 100), Gpu(1, 0, 100)))
    jobs = [Job("a", 1, 0, 10, memory_bytes=70), Job("b", 1, 0, 10), Job("c", 1, 0, 10)]
    alone = simulate_cluster(jobs, fleet, FitJobFirst(), FirstFit())
    assert {row.job.name: row.gpus for row in alone.outcomes} == {"a": (1,), "b": (2,), "c": (1,)}
    assert times(alone)["c"] == (10, 20)
    beside = simulate_cluster(jobs, fleet, FitJobFirst(), FirstFit(), sharing=TimeSliced(1))
    assert {row.job.name: row.gpus for row in beside.outcomes} == {"a": (0,), "b": (1,), "c": (2,)}
    assert [row.held_bytes for row in beside.outcomes] == [(70,), (0,), (0,)]
    full = [replace(jobs[0], memory_bytes=71)]
    assert simulate_cluster(full, fleet, Fifo(), FirstFit(), sharing=TimeSliced(1)).outcomes[
        0
    ].gpus == (1,)
    assert summary(beside)["memory_utilization"] == 70 * 10 / (10 * 270)


def test_consolidated_takes_whole_nodes_and_a_rest():
    fleet = Fleet.uniform(2, 2, 2)
    jobs = [Job("a", 1, 0, 100), Job("b", 3, 1, 100), Job("c", 2, 2, 100)]
    result = simulate_cluster(jobs, fleet, Fifo(), Consolidated())
    held = {row.job.name: row.gpus for row in result.outcomes}
    assert held == {"a": (0,), "b": (1, 2, 3), "c": (4, 5)}


def test_a_preempted_job_keeps_its_place_where_nobody_needs_it():
    fleet = Fleet.uniform(1, 1, 3)
    jobs = [Job("x", 1, 0, 100), Job("y", 1, 0, 90), Job("z", 1, 0, 80), Job("new", 2, 10, 10)]
    result = simulate_cluster(jobs, fleet, policy_named("shortest"), BestFit())
    assert {row.job.name: row.preempt for row in result.outcomes} == {
        **{"x": 1, "y": 1, "z": 0, "new": 0}
    }


def test_everybody_gets_turns():
    jobs = [Job("a", 1, 0, 100), Job("b", 1, 0, 100)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 1), TimeSlicing(10))
    ends = [row.end_time for row in result.outcomes]
    assert ends == [190, 200]
    assert sum(row.preempt for row in result.outcomes) == 18


def test_the_worst_treated_gets_the_lease():
    policy = FinishTimeFairness(10)
    policy.gpus = 4
    waited, wide = JobRun(Job("waited", 1, 0, 100), 0), JobRun(Job("wide", 4, 80, 100), 1)
    assert policy.rho(waited, 2, 100) == 2
    # A job of four GPUs would run on a share of two of four for twice as long.
    assert policy.rho(wide, 2, 100) == Fraction(120, 200)
    assert policy.order([wide, waited], 100) == [waited, wide]


def test_a_policy_of_your_own_takes_few_lines():
    class MostGpusFirst(Policy):
        name = "most-gpus"

        def order(self, runs, now):
            del now
            return sorted(runs, key=lambda run: -run.job.gpus)

    jobs = [Job("a", 2, 0, 10), Job("b", 1, 1, 10), Job("c", 2, 2, 10)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 2), MostGpusFirst())
    assert times(result) == {"a": (0, 10), "c": (10, 20), "b": (20, 30)}


def test_a_policy_that_starts_nothing_is_told_so():
    class Never(Policy):
        name = "never"

        def accepts(self, offer):
            del offer
            return False

    with pytest.raises(InputError, match="'never' leaves 1 jobs waiting on an idle cluster"):
        simulate_cluster([Job("a", 1, 0, 1)], Fleet.uniform(1, 1, 1), Never())


def test_counting_cannot_share():
    with pytest.raises(InputError, match="jobs cannot share one"):
        simulate_cluster([], Fleet.uniform(1, 1, 1), Fifo(), sharing=TimeSliced(2))
    for fleet in (
        Fleet.uniform(1, 1, 1, slices=(Slice(500), Slice(500))),
        Fleet.uniform(1, 1, 2, speed=2000),
    ):
        with pytest.raises(InputError, match="counting tells no GPU from another"):
            simulate_cluster([Job("a", 1, 0, 100)], fleet, Fifo())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Job("", 1, 0, 1), "name"),
        (lambda: Job("a", 0, 0, 1), "gpus of job 'a' is 0"),
        (lambda: Job("a", 1, -1, 1), "submit_time of job 'a' is -1"),
        (lambda: Job("a", 1, 0, 1.5), "duration of job 'a'"),
        (lambda: Job("a", 1, 0, 1, compute=0), "thousandths"),
        (lambda: Fleet(()), "no GPUs"),
        (lambda: Fleet((Gpu(0, 0, 10, held_bytes=11),)), "others hold 11 bytes of GPU 0"),
        (lambda: Fleet((Gpu(0, 0, held_bytes=1),)), "give its memory"),
        (lambda: Fleet((Gpu(1, 0), Gpu(0, 0))), "list GPUs by switch and node"),
        (lambda: Fleet((Gpu(0, 0), Gpu(1, 0), Gpu(0, 1))), "GPU 2 is on node 0 of switch 1, after"),
        (lambda: Fleet.uniform(1, 0, 1), "nodes per switch is 0"),
        (lambda: Fleet.uniform(1, 1, 1, memory_bytes=9, slices=(Slice(500),)), "a slice has none"),
        (lambda: TimeSliced(0), "jobs on a GPU is 0"),
        (lambda: TimeSlicing(0), "quantum in ticks is 0"),
        (lambda: policy_named("best"), "policy is 'best'; it must be one of fifo"),
        (lambda: policy_named("fifo-4"), "policy is 'fifo-4'"),
        (lambda: policy_named("fifo", compat="gavel"), "compatibility is 'gavel'"),
        (lambda: scheme_named("worst"), "scheme is 'worst'"),
        (lambda: sharing_named("green", 2), "sharing is 'green'"),
        (lambda: policy_named("dlas-gpu-gittins", samples=[]), "needs samples"),
    ],
)
def test_what_is_wrong_is_said(make, text):
    with pytest.raises(InputError, match=text):
        make()


def test_generated_jobs_depend_on_the_seed_alone():
    def jobs(seed):
        return poisson_jobs(
            per_tick=0.1, durations=log_normal(50, 1.5), seed=seed, count=2000, gpus=(1, 2, 8)
        )

    assert jobs(1) == jobs(1)
    assert jobs(1) != jobs(2)
    assert jobs(1)[-1].submit_time == pytest.approx(20_000, rel=0.1)
    assert {job.gpus for job in jobs(1)} == {1, 2, 8}
    timed = poisson_jobs(per_tick=0.1, durations=50, seed=1, until=1000)
    assert timed[-1].submit_time < 1000
    assert {job.duration for job in timed} == {50}


# Splitting: a job carries its graph.


def held(name, nbytes, start, duration):
    return Job(name, 1, start, duration, memory_bytes=nbytes)


def split(policy, jobs, sharing=None):
    fleet = Fleet.uniform(1, 1, 2, memory_bytes=100)
    return simulate_cluster(jobs, fleet, policy, Baechi(), sharing=sharing or SideBySide(4))


def test_a_job_that_fits_no_residual_device_is_split():
    # 40 bytes and what flows: 25 are left on each GPU.
    jobs = [held("a", 75, 0, 1000), held("b", 75, 0, 1000), Job("c", 2, 1, 10, graph=CHAIN)]
    result = split(SplitOrWait(), jobs)
    rows = {row.job.name: row for row in result.outcomes}
    assert rows["c"].gpus == (0, 1)
    assert rows["c"].start_time == 1
    # On one device it must wait for room.
    narrow = split(SplitOrWait(), [*jobs[:2], replace(jobs[2], gpus=1)])
    assert times(narrow)["c"][0] == 1000


def test_a_split_job_waits_where_waiting_ends_sooner():
    # Where the job's compute is shared, it is slowed down; the neighbor ends in a moment.
    ends_soon = [held("a", 50, 0, 10), held("b", 75, 0, 10_000), Job("c", 1, 1, 100, graph=CHAIN)]
    waits = split(SplitOrWait(), ends_soon, TimeSliced(4))
    eager = split(FitJobFirst(), ends_soon, TimeSliced(4))
    assert times(eager)["c"][0] == 1
    assert times(waits)["c"][0] > 1
    assert times(waits)["c"][1] <= times(eager)["c"][1]


def test_a_job_waits_for_as_many_ends_as_it_needs():
    # Whole gangs end sooner than anything else: b's GPU is of no use without a's.
    gang = [Op(f"op{i}", 1_000_000, persistent_bytes=60) for i in range(2)]
    wide = OpGraph(tuple(gang), ())
    fleet = Fleet(tuple(Gpu(0, 0, 100, speed) for speed in (1000, 1000, 10, 10)))
    jobs = [held("a", 100, 0, 10), held("b", 100, 0, 12), Job("c", 2, 1, 100, graph=wide)]
    result = simulate_cluster(jobs, fleet, SplitOrWait(), Baechi(), sharing=SideBySide(4))
    rows = {row.job.name: row for row in result.outcomes}
    assert rows["c"].gpus == (0, 1)
    assert rows["c"].start_time == 12


def test_no_two_jobs_wait_for_one_end():
    fleet = Fleet((Gpu(0, 0, 100), Gpu(0, 0, 100, 500)))
    jobs = [held("a", 100, 0, 10), *(Job(f"c{i}", 1, i, 100, graph=CHAIN) for i in (1, 2))]
    result = simulate_cluster(jobs, fleet, SplitOrWait(), Baechi(), sharing=Exclusive())
    # The first waits for the fast GPU; for the second that is taken, so it takes the slow one.
    assert times(result)["c1"] == (10, 110)
    assert times(result)["c2"] == (2, 202)


def test_a_graph_stays_split_as_its_user_has_split_it():
    whole = Fleet.uniform(1, 2, 2, memory_bytes=100)
    cluster = Cluster.uniform(2, 30, Link(10_000, 50 * 10**9))
    placement = solve(CHAIN, cluster)
    step_ns = simulate(CHAIN, cluster, placement).makespan_ns
    job = Job("a", 2, 0, 1000, "", 30, graph=CHAIN, placement=placement, step_ns=step_ns)
    near = simulate_cluster([job], whole, Fifo(), AsPlaced(FirstFit()))
    assert times(near)["a"] == (0, 1000)
    assert len(near.outcomes[0].gpus) == 2
    # On two nodes, and where others take half of the compute, it takes longer.
    apart = Fleet((Gpu(0, 0, 100), Gpu(1, 0, 100)))
    assert times(simulate_cluster([job], apart, Fifo(), AsPlaced(FirstFit())))["a"][1] > 1000
    taken = Fleet((Gpu(0, 0, 100, share=500), Gpu(0, 0, 100, share=500)))
    assert (
        1990 <= times(simulate_cluster([job], taken, Fifo(), AsPlaced(FirstFit())))["a"][1] <= 2000
    )
    # A job that keeps half a GPU busy loses nothing there.
    light = replace(job, compute=500)
    assert times(simulate_cluster([light], taken, Fifo(), AsPlaced(FirstFit())))["a"] == (0, 1000)


def test_what_was_found_out_changes_nothing_when_it_is_given_again():
    jobs = [Job(f"job{i}", 1, i, 50 + i, graph=CHAIN, most_gpus=2) for i in range(12)]
    fleet = Fleet(tuple(Gpu(i // 2, 0, 44, held_bytes=7 * i) for i in range(6)))
    memo = {}
    for policy in (FitJobFirst(), SplitOrWait()):
        for most in (1, 2, 3):
            first, again = (
                simulate_cluster(
                    *(jobs, fleet, policy, Baechi(effort=LISTED)),
                    sharing=SideBySide(most),
                    memo=known,
                )
                for known in (None, memo)
            )
            assert first == again
            assert any(len(row.gpus) == 2 for row in first.outcomes)
    assert memo


def test_a_graph_that_fits_nowhere_is_refused():
    heavy = OpGraph((Op("op", 1, persistent_bytes=101),), ())
    wide = OpGraph(tuple(Op(f"op{i}", 1, persistent_bytes=90) for i in range(3)), ())
    result = split(
        SplitOrWait(), [Job("heavy", 2, 0, 5, graph=heavy), Job("wide", 2, 0, 5, graph=wide)]
    )
    assert [row.job.name for row in result.refused] == ["heavy", "wide"]


def test_a_job_is_split_no_further_than_it_must_be():
    # Four ops beside each other would be fastest on four GPUs; whole, or in two, is what fits.
    wide = OpGraph(tuple(Op(f"op{i}", 1_000_000, persistent_bytes=10) for i in range(4)), ())
    for memory, gpus, end in ((100, 1, 100), (20, 2, 50), (10, 4, 25)):
        fleet = Fleet.uniform(1, 2, 4, memory_bytes=memory)
        result = simulate_cluster([Job("a", 4, 0, 100, graph=wide)], fleet, Fifo(), Baechi())
        assert len(result.outcomes[0].gpus) == gpus
        assert result.outcomes[0].end_time == end


def test_a_whole_job_goes_where_it_is_fastest_and_then_tightest():
    fleet = Fleet((Gpu(0, 0, 100), Gpu(0, 0, 50), Gpu(0, 0, 60, speed=2000)))
    jobs = [Job(f"job{i}", 1, 0, 100, graph=CHAIN) for i in range(3)]
    result = simulate_cluster(jobs, fleet, Fifo(), Baechi())
    assert [row.gpus for row in sorted(result.outcomes, key=lambda row: row.job.name)] == [
        *((2,), (1,), (0,))
    ]


def test_a_graph_on_a_free_gpu_takes_its_duration():
    for fleet in (Fleet.uniform(1, 1, 2), Fleet.uniform(1, 1, 2, speed=2000)):
        result = simulate_cluster(
            [Job("c", 2, 0, 1000, graph=CHAIN)], fleet, Fifo(), Baechi(), sharing=Exclusive()
        )
        assert times(result)["c"] == (0, 1000 * WHOLE // fleet.gpus[0].speed)
        assert len(result.outcomes[0].gpus) == 1


def test_a_graph_as_its_user_has_split_it_needs_room_for_its_peaks():
    cluster = Cluster.uniform(2, 30, Link(10_000, 50 * 10**9))
    job = Job("a", 2, 0, 1000, "", 1, graph=CHAIN, placement=solve(CHAIN, cluster))
    fleet = Fleet.uniform(1, 1, 2, memory_bytes=19)
    result = simulate_cluster([job], fleet, Fifo(), AsPlaced(FirstFit()))
    assert [row.job.name for row in result.refused] == ["a"]


def test_jobs_that_lose_all_that_they_get_done_are_told(monkeypatch):
    monkeypatch.setattr("baechi.cluster_simulation.simulator._STALL_EVENTS", 50)
    jobs = [Job(f"job{i}", 1, 0, 5000) for i in range(3)]
    fleet = Fleet.uniform(1, 1, 2)
    for cost in (120, 700):
        with pytest.raises(InputError, match="would never end"):
            simulate_cluster(jobs, fleet, TimeSlicing(), restart_cost=cost)
    slow = simulate_cluster(jobs, fleet, TimeSlicing(), restart_cost=59)
    assert len(slow.outcomes) == 3
