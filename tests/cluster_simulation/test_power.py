"""What GPUs draw, clocks, and PowerFlow, which chooses them within a budget."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi import InputError
from baechi.cluster_simulation.fleet import DeviceStates, Fleet, Gpu
from baechi.cluster_simulation.jobs import (
    WHOLE,
    Exclusive,
    Job,
    JobRun,
    SideBySide,
    amdahl,
    clocked,
    draw,
)
from baechi.cluster_simulation.placement_schemes import BestFit, FirstFit, LeastLoaded
from baechi.cluster_simulation.policies import POLICIES, policy_named
from baechi.cluster_simulation.policies.fifo import Fifo
from baechi.cluster_simulation.policies.powerflow import PowerFlow
from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)
from baechi.cluster_simulation.policy_support.predictions import Rates
from baechi.cluster_simulation.results import job_csv, summary
from baechi.cluster_simulation.simulator import simulate_cluster

IDLE, BUSY = 60, 240


def powered(switches, nodes, gpus, watts=(IDLE, BUSY)):
    return Fleet.uniform(switches, nodes, gpus, watts=watts)


def joules(result):
    return summary(result)["energy_kwh"] * 3.6e6


def test_a_job_slows_down_by_its_compute_and_draws_by_the_cube_of_the_clock():
    assert (clocked(WHOLE, WHOLE, 500), draw(WHOLE, 500)) == (500, 125)
    # It is busy for 0.6 of its time, which takes 1.2 at half the clock: 0.625 as fast in all, and
    # busy for 0.75 of that, at an eighth of the power.
    assert (clocked(WHOLE, 600, 500), draw(600, 500)) == (625, 93)
    assert (clocked(WHOLE, 600, WHOLE), draw(600, WHOLE)) == (WHOLE, 600)


@pytest.mark.parametrize("scheme", [None, FirstFit()])
def test_gpus_draw_idle_and_busy(scheme):
    jobs = [Job("a", 1, 0, 100), Job("b", 1, 200, 100, compute=500)]
    result = simulate_cluster(jobs, powered(1, 1, 2), Fifo(), scheme)
    assert joules(result) == pytest.approx(2 * IDLE * 300 + BUSY * 100 + BUSY * 50)


def test_a_shared_gpu_draws_no_more_than_a_busy_one():
    jobs = [Job(name, 1, 0, 100, compute=600) for name in "ab"]
    result = simulate_cluster(jobs, powered(1, 1, 1), Fifo(), LeastLoaded(), sharing=SideBySide())
    assert result.outcomes[0].end_time == 120
    assert joules(result) == pytest.approx(120 * (IDLE + BUSY))


@pytest.mark.parametrize("policy", POLICIES)
@given(rows=st.lists(st.tuples(*[st.integers(0, 50)] * 3), max_size=8))
@settings(max_examples=5)
def test_the_energy_of_jobs_is_that_of_their_work_under_every_policy(policy, rows):
    jobs = [
        Job(f"job{i}", 1 + gpus % 4, 7 * start, 10 * time, owner="ab"[i % 2])
        for i, (gpus, start, time) in enumerate(rows)
    ]
    plain = simulate_cluster(jobs, Fleet.uniform(1, 2, 2), policy_named(policy), BestFit())
    result = simulate_cluster(jobs, powered(1, 2, 2), policy_named(policy), BestFit())
    assert job_csv(result) == job_csv(plain)  # power changes nothing but what is known of it
    assert "energy_kwh" not in summary(plain)
    busy = sum(row.job.gpus * row.job.duration for row in result.outcomes)
    span = result.rows[-1][0] - result.rows[0][0] if rows else 0
    assert joules(result) == pytest.approx(4 * IDLE * span + BUSY * busy)


def test_another_clock_preempts_nobody():
    class HalfFrom50(AllocatingPolicy):
        name = "half-from-50"
        preemptive = True

        def allocate(self, view):
            clock = 500 if view.now >= 50 else WHOLE
            return [Allocation(run, clock=clock) for run in view.runs]

        def wake(self, runs, now):
            return 50 if runs and now < 50 else None

    result = simulate_cluster([Job("a", 2, 0, 100)], powered(1, 1, 2), HalfFrom50())
    row = result.outcomes[0]
    assert (row.end_time, row.preempt, row.pending_time) == (150, 0, 0)
    assert joules(result) == pytest.approx(2 * (IDLE * 150 + BUSY * 50 + BUSY / 8 * 100))


def settings_of(jobs, fleet, budget_w):
    devices = DeviceStates(fleet, Exclusive(), BestFit().place, 0, {})
    view = ClusterView(0, [JobRun(job, i) for i, job in enumerate(jobs)], devices, Rates(devices))
    answer = PowerFlow(budget_w).allocate(view)
    return {row.run.job.name: (row.size, row.clock) for row in answer}


def test_powerflow_takes_what_costs_least_energy_first():
    # By hand, beside 40 W of four idle GPUs. A GPU draws 12.5 W at half the clock, then 21.6, 34.3.
    fleet = powered(1, 1, 4, (10, 100))
    scales = Job("scales", 1, 0, 1000, curve=amdahl(1, 4, 0.0))
    hardly = Job("hardly", 1, 0, 1000, curve=amdahl(1, 4, 0.5))
    assert settings_of([scales, hardly], fleet, 40 + 20) == {"scales": (1, 500)}
    assert settings_of([scales, hardly], fleet, 40 + 26) == {
        "scales": (1, 500),
        "hardly": (1, 500),
    }
    # More GPUs cost `scales` no energy, and `hardly` half as much again for a quarter of its time:
    # less for it than a tenth of the clock, 0.44 for a sixth.
    assert settings_of([scales, hardly], fleet, 40 + 38) == {
        "scales": (2, 500),
        "hardly": (1, 500),
    }
    assert settings_of([hardly], fleet, 40 + 26) == {"hardly": (2, 500)}
    # The clocks come last, and end at the full one.
    assert settings_of([scales], fleet, 40 + 4 * 22) == {"scales": (4, 600)}
    assert settings_of([scales], fleet, 40 + 4 * 100) == {"scales": (4, WHOLE)}
    assert settings_of([scales], fleet, None) == {"scales": (4, WHOLE)}


def test_powerflow_draws_later_what_it_did_not_draw():
    # 50 W beside the idle GPU's 10: a clock of 0.7 (34.3 W), as 0.8 draws 51.2. What that leaves is
    # enough for 0.8 from the second round on: 210 + 3 * 240 of the work, and 70 in 88 ticks.
    jobs, fleet = [Job("a", 1, 0, 1000)], powered(1, 1, 1, (10, 100))
    result = simulate_cluster(jobs, fleet, PowerFlow(60))
    assert result.outcomes[0].end_time == 1288
    assert joules(result) == pytest.approx(10 * 1288 + 34.3 * 300 + 51.2 * 988)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 9), st.integers(0, 3000)),
        min_size=1,
        max_size=9,
    ),
    budget_w=st.sampled_from([260, 300, 500, 900]),
)
@settings(max_examples=25)
def test_powerflow_keeps_its_budget_and_ends_all_jobs(rows, budget_w):
    jobs = [
        Job(f"job{i}", 1, 100 * start, time, compute=700, curve=amdahl(1, most, 0.1))
        for i, (most, start, time) in enumerate(rows)
    ]
    result = simulate_cluster(jobs, powered(1, 2, 2), PowerFlow(budget_w), BestFit())
    assert len(result.outcomes) == len(jobs)
    assert joules(result) <= budget_w * (result.rows[-1][0] - result.rows[0][0]) + 1e-6
    assert result == simulate_cluster(jobs, powered(1, 2, 2), PowerFlow(budget_w), BestFit())


def test_a_budget_that_cannot_be_kept_is_refused():
    jobs = [Job("a", 1, 0, 10)]
    for fleet in (powered(1, 1, 4), Fleet.uniform(1, 1, 4), powered(1, 1, 4, (60, 0))):
        with pytest.raises(InputError, match=r"the budget is 240 W; idle GPUs draw \d+ W"):
            simulate_cluster(jobs, fleet, PowerFlow(240))
    with pytest.raises(InputError, match="budget in watts"):
        PowerFlow(0)
    with pytest.raises(InputError, match="the watts of GPU 0"):
        Fleet((Gpu(0, 0, watts=(-1, 0)),))
    unlike = Fleet((Gpu(0, 0, watts=(10, 20)), Gpu(0, 0, watts=(20, 20))))
    with pytest.raises(InputError, match="draw other power"):
        simulate_cluster(jobs, unlike, Fifo())
    half = replace(jobs[0], compute=500)
    result = simulate_cluster([half], unlike, Fifo(), FirstFit())
    assert joules(result) == pytest.approx(10 * (10 + 20 + 10))
