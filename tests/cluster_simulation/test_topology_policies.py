"""Policies that look at where GPUs are: HiveD's cells, Tiresias' skew, Dally's timers."""

from collections import deque

import pytest

from baechi import Op, OpGraph
from baechi.cluster_simulation.fleet import Fleet, Gpu
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.placement_schemes import BestFit, Consolidated
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.policies.dally import Dally
from baechi.cluster_simulation.policies.pal import least_slowed
from baechi.cluster_simulation.policies.tiresias_skew import is_skewed
from baechi.cluster_simulation.policy_support.cells import buddy, cell_of
from baechi.cluster_simulation.simulator import simulate_cluster


def run(jobs, fleet, policy):
    policy = policy_named(policy) if isinstance(policy, str) else policy
    result = simulate_cluster(jobs, fleet, policy, BestFit())
    return {row.job.name: row for row in result.outcomes}


def test_cells_are_split_into_buddies():
    assert [cell_of(gpus) for gpus in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    nodes = [range(8), range(8, 16)]
    # Aligned, in the cell whose buddy is taken: the other node stays whole.
    assert buddy(nodes, {0}, (), 1) == (1,)
    assert buddy(nodes, {0, 1}, (), 2) == (2, 3)
    assert buddy(nodes, {0, 2}, (), 2) == (4, 5)
    assert buddy(nodes, {0}, (), 3) == (4, 5, 6)
    assert buddy(nodes, {0}, (), 8) == tuple(range(8, 16))
    assert buddy(nodes, {0, 8}, (), 8) is None
    # Those that others would lose come last.
    assert buddy(nodes, {0}, {1, 2, 3, 4, 5, 6, 7}, 1) == (8,)


def test_an_owner_has_what_a_private_cluster_would_give_it():
    """The sharing anomaly (section 2): with quotas of 8 GPUs each, B's small jobs are on both
    nodes, and A waits for a node although it uses nothing of its quota. With cells it does not."""
    fleet = Fleet.uniform(1, 2, 8)
    small = [Job(f"b{i}", 2, 0, 1000 if i in (0, 4) else 10, owner="b") for i in range(8)]
    wide = Job("a", 8, 20, 10, owner="a", priority=1)
    rows = run([*small, wide], fleet, "delay-relaxation")
    assert rows["a"].start_time > 20
    rows = run([*small, wide], fleet, "hived")
    assert rows["a"].start_time == 20
    # B's long job on A's node was opportunistic: it goes on where B's own node has room.
    assert [name for name, row in rows.items() if row.preempt] == ["b4"]
    assert (rows["b4"].end_time, rows["b4"].gpus) == (1000, (2, 3))


def test_opportunistic_jobs_use_what_is_idle_and_give_it_back():
    fleet = Fleet.uniform(1, 2, 4)
    jobs = [
        Job("spare", 4, 0, 100, owner="a", priority=-1),
        Job("first", 4, 0, 100, owner="a"),
        Job("second", 4, 10, 50, owner="b"),
    ]
    rows = run(jobs, fleet, "hived")
    assert (rows["first"].start_time, rows["first"].end_time) == (0, 100)
    assert (rows["second"].start_time, rows["second"].end_time) == (10, 60)
    assert (rows["spare"].preempt, rows["spare"].end_time) == (1, 150)


def test_only_skewed_models_are_skewed():
    assert is_skewed(Job("a", 1, 0, 1, "vgg16"))
    assert is_skewed(Job("a", 1, 0, 1, "alexnet"))
    assert not is_skewed(Job("a", 1, 0, 1, "resnet50"))
    # VGG-16 by its graph: one layer of 103 of 138 million parameters.
    graph = OpGraph((Op("fc6", 1, persistent_bytes=103), Op("rest", 1, persistent_bytes=35)), ())
    assert is_skewed(Job("a", 1, 0, 1, "resnet50", graph=graph))
    flat = OpGraph(tuple(Op(f"op{i}", 1, persistent_bytes=10) for i in range(4)), ())
    assert not is_skewed(Job("a", 1, 0, 1, "vgg16", graph=flat))


def test_skewed_jobs_wait_for_a_node_and_others_do_not():
    fleet = Fleet.uniform(1, 2, 2)
    held = [Job("x", 1, 0, 30), Job("y", 1, 0, 3000), Job("u", 1, 0, 3000), Job("v", 1, 0, 60)]
    rows = run([*held, Job("resnet", 2, 1, 10, "resnet50")], fleet, "tiresias-skew")
    assert rows["resnet"].start_time == 60  # two GPUs, one on each node
    rows = run([*held, Job("vgg", 2, 1, 10, "vgg16")], fleet, "tiresias-skew")
    assert rows["vgg"].start_time == 3000
    assert len({fleet.gpus[gpu].node for gpu in rows["vgg"].gpus}) == 1


def test_the_queues_are_those_of_dlas_gpu():
    jobs = [Job(f"job{i}", 1 + i % 2, 100 * i, 4000 + 500 * i) for i in range(8)]
    theirs = run(jobs, Fleet.uniform(1, 1, 4), "dlas-gpu")
    ours = run(jobs, Fleet.uniform(1, 1, 4), "tiresias-skew")
    assert {name: row.end_time for name, row in ours.items()} == {
        name: row.end_time for name, row in theirs.items()
    }


def test_dallys_timers_are_what_others_have_waited():
    fleet = Fleet.uniform(2, 2, 2)
    assert [Dally().timer(2, level) for level in range(2)] == [300, 300]
    # One GPU of each node is held for long, another until 100. In a long round, in which nobody
    # loses GPUs, a pair waits for a node until 400, and takes two nodes of a switch.
    short = [Job(f"job{i}", 1, 0, 9000 if i % 2 == 0 else 100) for i in range(8)]
    pairs = [Job(f"pair{i}", 2, 100 + 900 * i, 500, across=(500, 250)) for i in range(2)]
    rows = run([*short, *pairs], fleet, Dally(10_000))
    assert (rows["pair0"].start_time, rows["pair0"].gpus) == (400, (1, 3))
    assert rows["pair0"].end_time == 400 + 1000
    assert rows["pair1"].start_time == 1300
    policy = Dally()
    policy._waits[2, 0] = deque([50, 150])
    assert [policy.timer(2, level) for level in range(2)] == [200, 300]
    # At the beginning of a round it would have taken a node from jobs of more progress.
    rows = run([*short, *pairs], fleet, "dally")
    assert (rows["pair0"].start_time, rows["pair0"].gpus) == (300, (0, 1))


def test_who_makes_the_least_progress_goes_first():
    jobs = [Job("ran", 1, 0, 10_000), Job("waits", 1, 300, 10_000)]
    rows = run(jobs, Fleet.uniform(1, 1, 1), "dally")
    # At 600 the second has had nothing, and takes its turn; then they alternate.
    assert rows["waits"].start_time == 600
    assert abs(rows["ran"].end_time - rows["waits"].end_time) <= 1200


@pytest.mark.parametrize("policy", ["hived", "tiresias-skew", "dally", "delay-relaxation"])
def test_jobs_wider_than_a_node_and_than_a_switch_run(policy):
    fleet = Fleet.uniform(2, 2, 2)
    jobs = [Job("node", 3, 0, 10, "vgg16"), Job("all", 8, 0, 10), Job("one", 1, 0, 10)]
    assert len(run(jobs, fleet, policy)) == 3


def varied(*nodes):
    """Nodes of GPUs of these speeds."""
    return Fleet(
        tuple(Gpu(node, 0, None, speed) for node, row in enumerate(nodes) for speed in row)
    )


@pytest.mark.parametrize("policy", ["tiresias-skew", "dally", "delay-relaxation"])
def test_who_is_left_alone_starts_where_the_scheme_takes_it(policy):
    """Whole nodes and a rest: not the first four GPUs, which the policy takes after a wait."""
    fleet = Fleet(tuple(Gpu(node, 0) for node in (0, 0, 1, 1, 1)))
    jobs = [Job("first", 5, 0, 700), Job("a", 4, 0, 10)]
    result = simulate_cluster(jobs, fleet, policy_named(policy), Consolidated())
    assert {row.job.name: row.gpus for row in result.outcomes}["a"] == (0, 2, 3, 4)


def test_pal_walks_from_the_least_product_of_distance_and_slowness():
    """Across nodes a job keeps two thirds of its rate: L is 1.5."""
    wide = Job("wide", 4, 0, 100, across=(667, 667))
    every = range(8)

    def first(fleet, job):
        return next(least_slowed(fleet, job, every, job.gpus))

    # (1, V = 1 / 0.9) is less than (1.5, V = 1), so it stays on the node with slower GPUs.
    fleet = varied((1000, 1000, 500, 500), (1000, 1000, 900, 900))
    assert first(fleet, wide) == (4, 5, 6, 7)
    # (1, V = 1 / 0.6) is more: the four fast ones, on both nodes.
    fleet = varied((1000, 1000, 500, 500), (1000, 1000, 600, 600))
    assert first(fleet, wide) == (0, 1, 4, 5)
    # Then the node of (1, 1 / 0.6), then any of (1.5, 1 / 0.6), then (1, 1 / 0.5), and any.
    assert list(least_slowed(fleet, wide, every, 4))[1:4] == [
        (4, 5, 6, 7),
        (0, 1, 2, 3),
        (0, 1, 4, 5),
    ]
    # One GPU, and more than a node: the fastest; of equal ones where there are about as many.
    fleet = varied((1000, 1000, 1000, 500), (500, 1000, 600, 600))
    assert first(fleet, Job("one", 1, 0, 100)) == (5,)
    assert first(fleet, Job("six", 6, 0, 100)) == (0, 1, 2, 5, 6, 7)


def test_the_most_sensitive_job_chooses_first_under_pal():
    fleet = Fleet((Gpu(0, 0, kind="fast"), Gpu(0, 0, kind="slow")))
    hardly = Job("hardly", 1, 0, 900, kinds=(("fast", 1000), ("slow", 900)))
    much = Job("much", 1, 0, 900, kinds=(("fast", 1000), ("slow", 500)))
    rows = run([hardly, much], fleet, "pal")
    assert rows["much"].end_time == 900
    # It arrived first and is on the slow GPU until the other has ended.
    assert (rows["hardly"].end_time, rows["hardly"].preempt) == (900 + 90, 1)
    # Beyond the cut nobody is placed, however sensitive, until a GPU is free.
    rows = run([hardly, Job("also", 1, 0, 900), much], fleet, "pal")
    assert rows["much"].start_time == 900
