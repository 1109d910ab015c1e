"""What platforms do by default, as worked examples: priorities, shares, gaps, places, times."""

import pytest

from baechi.cluster_simulation.fleet import Fleet, Gpu
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.policies import DEFAULTS, policy_named, scheme_named
from baechi.cluster_simulation.policies.clockwork import Clockwork
from baechi.cluster_simulation.policy_support.locality import closest
from baechi.cluster_simulation.simulator import simulate_cluster


def run(jobs, fleet, policy, scheme=None):
    policy = policy_named(policy) if isinstance(policy, str) else policy
    result = simulate_cluster(jobs, fleet, policy, scheme_named(scheme or "count"))
    return {row.job.name: row for row in result.outcomes}


def starts(rows):
    return {name: row.start_time for name, row in rows.items()}


def test_priority_takes_gpus_from_the_least_urgent():
    jobs = [
        Job("low", 2, 0, 100),
        Job("middle", 2, 0, 100, priority=1),
        Job("high", 2, 10, 20, priority=2),
        Job("lowest", 2, 10, 20, priority=-1),
    ]
    rows = run(jobs, Fleet.uniform(1, 1, 4), "priority", "first-fit")
    assert starts(rows) == {"low": 0, "middle": 0, "high": 10, "lowest": 100}
    assert (rows["low"].preempt, rows["low"].end_time) == (1, 120)
    assert rows["middle"].preempt == 0


def test_fair_share_fills_progressively():
    # Ann has the cluster; Bob wants less than a third of it and gets that; Carl and Ann share the
    # rest equally, but that jobs are whole. This is max-min fairness, job by job.
    jobs = [
        *(Job(f"ann{i}", 2, 0, 100, owner="ann") for i in range(4)),
        Job("bob", 1, 10, 30, owner="bob"),
        *(Job(f"carl{i}", 2, 10, 30, owner="carl") for i in range(4)),
    ]
    rows = run(jobs, Fleet.uniform(1, 1, 9), "fair-share")
    begun = starts(rows)
    assert [begun[f"ann{i}"] for i in range(4)] == [0, 0, 0, 0]
    assert begun["bob"] == 10
    assert [begun[f"carl{i}"] for i in range(4)] == [10, 10, 40, 40]
    assert [rows[f"ann{i}"].preempt for i in range(4)] == [0, 0, 1, 1]


def test_backfill_starts_who_delays_nobody():
    jobs = [
        Job("runs", 3, 0, 10),
        Job("first", 4, 1, 5),  # will find 5 GPUs at 10, and leave one
        Job("beside", 1, 2, 20),
        Job("too-long", 1, 3, 20),
        Job("in-time", 1, 4, 6),
    ]
    rows = run(jobs, Fleet.uniform(1, 1, 5), "backfill")
    assert starts(rows) == {"runs": 0, "first": 10, "beside": 2, "too-long": 15, "in-time": 4}
    # Without the reservation the long jobs of one GPU would hold up the first.
    assert run(jobs, Fleet.uniform(1, 1, 5), "fjf")["first"].start_time == 22


@pytest.mark.parametrize(("policy", "nodes"), [("pack", 1), ("spread", 2)])
def test_packing_leaves_whole_nodes_and_spreading_none(policy, nodes):
    fleet = Fleet.uniform(1, 2, 2)
    jobs = [Job("a", 1, 0, 100), Job("b", 1, 5, 100)]
    rows = run(jobs, fleet, policy, DEFAULTS[policy][0])
    assert len({fleet.gpus[row.gpus[0]].node for row in rows.values()}) == nodes


def test_spread_takes_the_emptiest_node_for_each_gpu():
    rows = run([Job("a", 1, 0, 50), Job("b", 3, 0, 50)], Fleet.uniform(1, 3, 2), "spread", "spread")
    assert rows["a"].gpus == (0,)
    assert rows["b"].gpus == (1, 2, 4)


def test_locality_is_given_up_step_by_step():
    # Two nodes of two GPUs under each of two switches; one GPU of each node is busy.
    fleet = Fleet.uniform(2, 2, 2)
    free = [1, 3, 5, 7]
    assert closest(fleet, free, 2, 0) is None
    assert closest(fleet, free, 2, 1) == (1, 3)
    assert closest(fleet, free, 3, 1) is None
    assert closest(fleet, free, 3, 2) == (1, 3, 5)
    assert closest(fleet, [0, 1, 2, 5, 6, 7], 3, 0) == (0, 1, 2)
    # The tightest hole that is enough.
    assert closest(fleet, [0, 2, 3], 1, 0) == (0,)


def test_a_gang_waits_for_a_node_then_for_a_switch_then_for_nothing():
    # After 100 one GPU of each of four nodes is free, two of each switch.
    fleet = Fleet.uniform(2, 2, 2)
    short = [Job(f"job{i}", 1, 0, 100 if i % 2 else 5000) for i in range(8)]
    wide = [Job("two", 2, 100, 10, across=(500, 250)), Job("three", 3, 100, 10, across=(500, 250))]
    rows = run([*short, *wide], fleet, "delay-relaxation", "best-fit")
    assert [rows[f"job{i}"].gpus for i in range(8)] == [(i,) for i in range(8)]
    # At 400 one switch is enough, at 700 none is needed; then each job runs slower.
    assert (rows["two"].start_time, rows["two"].end_time) == (400, 420)
    assert rows["two"].gpus == (1, 3)
    assert (rows["three"].start_time, rows["three"].end_time) == (700, 740)
    # With room on a node nobody waits.
    rows = run(wide[:1], fleet, "delay-relaxation", "best-fit")
    assert (rows["two"].start_time, rows["two"].end_time) == (100, 110)


def test_clockwork_takes_who_must_start_first():
    # It must have started by its deadline less its time: 10 * 100 - 100, and 40 + 10 * 10 - 10.
    jobs = [Job("runs", 1, 0, 50), Job("long", 1, 0, 100), Job("short", 1, 40, 10)]
    rows = run(jobs, Fleet.uniform(1, 1, 1), "clockwork")
    assert starts(rows) == {"runs": 0, "short": 50, "long": 60}


def test_who_is_too_late_makes_nobody_else_late():
    # At 50 the first is too late, by 2 * 10 from 0 on, and the second is not, by 30 + 2 * 30.
    jobs = [Job("runs", 1, 0, 50), Job("late", 1, 1, 20), Job("hopeful", 1, 30, 30)]
    rows = run(jobs, Fleet.uniform(1, 1, 1), Clockwork(slo=2))
    assert starts(rows) == {"runs": 0, "hopeful": 50, "late": 80}
    assert starts(run(jobs, Fleet.uniform(1, 1, 1), "fjf"))["late"] == 50
    # So is who has no deadline.
    jobs[1] = Job("none", 1, 1, 1, priority=-1)
    assert starts(run(jobs, Fleet.uniform(1, 1, 1), Clockwork(slo=2)))["none"] == 80


@pytest.mark.parametrize(("until", "start", "kind"), [(8, 8, "fast"), (50, 12, "slow")])
def test_nothing_is_sent_to_where_it_would_be_late(until, start, kind):
    """The slow GPU takes 100 where 20 are left: only once the fast one is too late as well."""
    fleet = Fleet((Gpu(0, 0, kind="fast"), Gpu(0, 0, kind="slow")))
    kinds = (("fast", 1000), ("slow", 100))
    jobs = [Job("runs", 1, 0, until, kinds=kinds), Job("next", 1, 1, 10, kinds=kinds)]
    row = run(jobs, fleet, Clockwork(slo=2))["next"]
    assert (row.start_time, fleet.gpus[row.gpus[0]].kind) == (start, kind)
