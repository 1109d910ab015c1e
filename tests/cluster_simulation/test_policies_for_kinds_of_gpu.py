"""Kinds of GPU: Gavel's programs, the matchings of AlloX and Heet, and Gandiva_fair's tickets.

The golden values are the optima of the original programs (`golden/gavel-policies.json` beside the
traces, see `test_golden_results.py`); without that folder those tests are skipped.
"""

import ast
import json
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import FOLDER, published

from baechi.cluster_simulation.fleet import Fleet, Gpu
from baechi.cluster_simulation.jobs import WHOLE, Job, SideBySide, amdahl
from baechi.cluster_simulation.placement_schemes import BestFit
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.policies.allox import matched
from baechi.cluster_simulation.policy_support import priced_matching, throughput_programs
from baechi.cluster_simulation.policy_support.throughput_programs import (
    Column,
    ThroughputProgram,
    equal_parts,
)
from baechi.cluster_simulation.results import summary
from baechi.cluster_simulation.simulator import simulate_cluster
from baechi.placers import linear_programs


def fleet(**kinds):
    """One node of GPUs for each kind."""
    names = [kind for kind, count in kinds.items() for _ in range(count)]
    nodes = list(kinds)
    return Fleet(tuple(Gpu(nodes.index(kind), 0, kind=kind) for kind in names))


def run(jobs, cluster, policy, sharing=None):
    result = simulate_cluster(jobs, cluster, policy_named(policy), BestFit(), sharing=sharing)
    return {row.job.name: row for row in result.outcomes}


def golden():
    path = FOLDER / "golden" / "gavel-policies.json"
    return json.loads(path.read_text()) if path.is_file() else []


def of_case(case):
    gpus = list(case["cluster"].values())
    rates = [[job["throughput"][kind] for kind in case["cluster"]] for job in case["jobs"]]
    columns = [
        Column((job,), kind, (rate,), case["jobs"][job]["gpus"])
        for job, row in enumerate(rates)
        for kind, rate in enumerate(row)
    ]
    value = {key.partition(":")[0]: number for key, number in case["golden"].items()}
    return case["jobs"], rates, columns, gpus, value


@published
@pytest.mark.parametrize("case", golden(), ids=lambda case: f"seed-{case['seed']}")
def test_gavels_optima_are_as_published(case):
    jobs, rates, columns, gpus, value = of_case(case)
    equal = equal_parts(rates, gpus)
    needs = equal * [job["weight"] / job["gpus"] for job in jobs]
    program = ThroughputProgram(columns, len(jobs), gpus)
    got = program.throughputs(program.max_min(needs))
    least = min(g / n for g, n in zip(got, needs, strict=True))
    assert least == pytest.approx(value["max_min_fairness_perf"], rel=1e-5)

    steps = np.array([job["steps"] for job in jobs])
    got = program.throughputs(program.max_min(steps))
    longest = max(s / g for s, g in zip(steps, got, strict=True))
    assert longest == pytest.approx(value["min_total_duration exact"], rel=1e-5)

    since = np.array([job["since"] for job in jobs])
    share = [min(1, sum(gpus) / (len(jobs) * job["gpus"])) for job in jobs]
    alone = steps / (equal * share)
    got = program.throughputs(program.finish_time_fair(since, steps, alone))
    worst = max((since + steps / got) / alone)
    assert worst == pytest.approx(value["finish_time_fairness_perf"], rel=1e-5)


@published
def test_allox_matches_as_published():
    case = golden()[0]
    jobs, rates, _, gpus, value = of_case(case)
    times = [[job["steps"] / rate for rate in row] for job, row in zip(jobs, rates, strict=True)]
    kinds = list(case["cluster"])
    found = matched(times, [[1] * len(kinds) for _ in jobs], gpus)
    # With more GPUs than jobs every place is the last of its queue, and all start.
    assert [kinds[kind] for kind, _ in found] == value["allox_perf"]
    assert {place for _, place in found} == {1}


@published
def test_the_golden_throughputs_are_those_of_the_table():
    table = json.loads((FOLDER / "gavel-throughputs.json").read_text())
    for case in golden():
        for job in case["jobs"]:
            for kind, rate in job["throughput"].items():
                row = table[kind][str((job["model"], job["gpus"]))]
                assert rate == pytest.approx(row["null"], rel=1e-5)


@published
def test_heterogeneity_shortens_what_gavel_says_it_does():
    """Jobs of its table on its kinds: fewer hours in all than in order of arrival."""
    table = json.loads((FOLDER / "gavel-throughputs.json").read_text())
    models = [name for name in sorted(table["v100"]) if ast.literal_eval(name)[1] == 1]
    draw, now, jobs = Random(1), 0.0, []
    for index in range(120):
        model = draw.choice(models)
        exponent = draw.uniform(1.5, 3) if draw.random() < 0.8 else draw.uniform(3, 4)
        fastest = table["v100"][model]["null"]
        kinds = tuple(
            (kind, max(1, round(1000 * table[kind][model]["null"] / fastest)))
            for kind in ("v100", "p100", "k80")
        )
        job = Job(f"job{index}", 1, round(now), round(60 * 10**exponent), model, kinds=kinds)
        jobs.append(job)
        now += draw.expovariate(4.8 * 9 / 108 / 3600)  # its 4.8 jobs an hour for 108 GPUs
    cluster = fleet(v100=3, p100=3, k80=3)
    hours = {}
    for policy in ("fifo", "gandiva", "gavel-max-min", "allox"):
        result = simulate_cluster(jobs, cluster, policy_named(policy), BestFit())
        hours[policy] = summary(result)["mean_jct"] / 3600
    # Its table at 4.8: FIFO 99, LAS 36, AlloX 21, Gavel 19 hours; here 22, 19, 19 and 13.
    assert hours["gavel-max-min"] < 0.8 * min(hours["fifo"], hours["gandiva"])
    assert hours["allox"] < 0.9 * hours["fifo"]


def test_gavels_worked_example():
    """Section 3.1: three jobs, a V100 and a K80; max-min fairness by effective throughput."""
    rates = [[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]]
    columns = [Column((j,), k, (rates[j][k],), 1) for j in range(3) for k in range(2)]
    needs = equal_parts(rates, [1, 1])
    program = ThroughputProgram(columns, 3, [1, 1])
    parts = program.max_min(needs)
    normal = list(program.throughputs(parts) / needs)
    # The paper's allocation, and the tenth that each job gains on a third of each kind.
    expected = [0.45, 0.0, 0.45, 0.09, 0.09, 0.91]
    assert parts == pytest.approx(expected, abs=0.006)
    assert normal == pytest.approx([1.09 * 2 / 3] * 3, rel=1e-2)


def test_packing_adds_columns():
    # Two jobs on one GPU: alone each has half the time, together both keep 0.9 of their rate.
    alone = [Column((0,), 0, (1.0,), 1), Column((1,), 0, (1.0,), 1)]
    both = Column((0, 1), 0, (0.9, 0.9), 1)
    program = ThroughputProgram(alone, 2, [1])
    parts = program.max_min(np.ones(2))
    assert list(program.throughputs(parts)) == pytest.approx([0.5, 0.5], rel=1e-4)
    program = ThroughputProgram([*alone, both], 2, [1])
    parts = program.max_min(np.ones(2))
    assert list(program.throughputs(parts)) == pytest.approx([0.9, 0.9], rel=1e-4)
    assert parts[2] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("policy", ["gavel-max-min", "gavel-makespan", "gavel-ftf"])
def test_rounds_give_each_job_the_time_that_the_program_says(policy):
    # Two equal jobs, a fast and a slow GPU: each has both half of the time, and all end together.
    kinds = (("fast", 2000), ("slow", 1000))
    jobs = [Job(name, 1, 0, 30 * 360, kinds=kinds) for name in "ab"]
    rows = run(jobs, fleet(fast=1, slow=1), policy)
    assert {row.end_time for row in rows.values()} == {20 * 360}
    # In order of arrival one would be on the fast GPU all the time.
    assert run(jobs, fleet(fast=1, slow=1), "fifo")["a"].end_time == 15 * 360


def test_packed_pairs_share_what_is_wanted_by_nobody_else():
    jobs = [Job(name, 1, 0, 3600, compute=500) for name in "abcd"]
    rows = run(jobs, fleet(gpu=2), "gavel-packed", SideBySide())
    assert {row.end_time for row in rows.values()} == {3600}
    rows = run(jobs, fleet(gpu=2), "gavel-max-min")
    assert max(row.end_time for row in rows.values()) == 7200


def test_alloxs_worked_example():
    # The first job takes 4 on a CPU and 1 on a GPU, the second 3 and 2; with one of each the mean
    # is least for the first on the GPU and the second on the CPU (1 + 3), not in queue (1 + 3).
    found = matched([[4, 1], [3, 2]], [[1, 1], [1, 1]], [1, 1])
    cost = sum(place * [[4, 1], [3, 2]][job][kind] for job, (kind, place) in enumerate(found))
    assert cost == 4


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@settings(max_examples=25)
def test_no_queues_have_a_smaller_sum_of_completion_times(times, free):
    found = matched(times, [[1, 1] for _ in times], free)
    machines = [kind for kind, count in enumerate(free) for _ in range(count)]

    def cost(where):
        """Each machine in order of time: the longest of n waits for nobody but n - 1."""
        queues = [
            sorted((times[job][kind] for job, at in enumerate(where) if at == m), reverse=True)
            for m, kind in enumerate(machines)
        ]
        return sum(place * time for queue in queues for place, time in enumerate(queue, start=1))

    best = min(map(cost, product(range(len(machines)), repeat=len(times))))
    assert sum(place * times[job][kind] for job, (kind, place) in enumerate(found)) == best


def test_allox_starts_the_first_of_each_queue():
    kinds = (("fast", 4000), ("slow", 1000))
    jobs = [Job(f"job{i}", 1, 0, 400 + i, kinds=kinds) for i in range(6)]
    rows = run(jobs, fleet(fast=1, slow=1), "allox")
    # The slow GPU takes the time of four on the fast one: two queues, of five jobs and of one.
    assert sum(row.gpus == (1,) for row in rows.values()) <= 2
    assert rows["job0"].start_time == 0
    mean = sum(row.end_time for row in rows.values()) / 6
    fifo = run(jobs, fleet(fast=1, slow=1), "fifo")
    assert mean < sum(row.end_time for row in fifo.values()) / 6


def test_tickets_are_per_user_and_not_per_job():
    # Ann has three jobs and Bob one; a GPU. Bob gets half of it.
    jobs = [Job(f"ann{i}", 1, 0, 6000, owner="ann") for i in range(3)]
    jobs.append(Job("bob", 1, 0, 6000, owner="bob"))
    rows = run(jobs, fleet(gpu=1), "gandiva-fair")
    assert rows["bob"].end_time == pytest.approx(12_000, abs=120)
    assert max(row.end_time for row in rows.values()) == 24_000


def test_a_wide_gang_is_not_starved_by_narrow_ones():
    jobs = [Job("wide", 4, 0, 600, owner="w")]
    jobs += [Job(f"narrow{i}", 1, 0, 6000, owner=f"n{i}") for i in range(4)]
    rows = run(jobs, fleet(gpu=4), "gandiva-fair")
    # Its stride is four times as long: every fifth of 46 quanta.
    assert rows["wide"].end_time == 46 * 60


def test_who_gains_most_from_a_fast_gpu_gets_it_for_more_time_on_slow_ones():
    gains = Job("gains", 1, 0, 60_000, owner="g", kinds=(("fast", 5000), ("slow", 1000)))
    hardly = Job("hardly", 1, 0, 60_000, owner="h", kinds=(("fast", 1200), ("slow", 1000)))
    rows = run([gains, hardly], fleet(fast=1, slow=1), "gandiva-fair")
    assert rows["gains"].gpus == (0,)
    assert rows["gains"].end_time == 12_000
    assert rows["gains"].preempt == 0
    assert rows["hardly"].end_time > 12_000 + WHOLE


def test_heets_matching_by_hand():
    # A fast and a slow GPU: a takes 100 on the fast and 300 on the slow, b 90 and 100. In order of
    # their own speed b would have the fast one: 90 + 300 is more than 100 + 100.
    weight = np.array([[[100.0], [300.0]], [[90.0], [100.0]]])
    assert priced_matching.matched(weight, [1, 1]) == [(0, 1), (1, 1)]
    jobs = [Job("a", 1, 0, 100, kinds=(("slow", 334),)), Job("b", 1, 0, 90, kinds=(("slow", 900),))]
    rows = run(jobs, fleet(fast=1, slow=1), "heet")
    assert {name: (row.gpus, row.end_time) for name, row in rows.items()} == {
        "a": ((0,), 100),
        "b": ((1,), 100),
    }


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@settings(max_examples=25)
def test_no_matching_fills_as_many_gpus_and_weighs_less(rows, gpus):
    weight = np.array(rows, dtype=float)[:, :, None]
    found = priced_matching.matched(weight, gpus)
    placed = [(job, place[0]) for job, place in enumerate(found) if place is not None]
    assert len(placed) == min(len(rows), sum(gpus))

    def is_matching(where):
        return all(where.count(kind) <= many for kind, many in enumerate(gpus))

    best = min(
        sum(row[kind] for row, kind in zip(rows, where, strict=True) if kind < 2)
        for where in product(range(3), repeat=len(rows))
        if is_matching(where) and len(rows) - where.count(2) == len(placed)
    )
    assert sum(rows[job][kind] for job, kind in placed) == best


def test_prices_rise_where_more_is_wanted_and_sizes_fall_with_them():
    def of(jobs, curve, gpus):
        times = np.array([[[100_000 / rate for rate in curve]] * len(gpus)] * jobs)
        price = priced_matching.prices(times, gpus)
        places = priced_matching.matched(priced_matching.weights(times, price), gpus)
        return list(price), [place and place[1] for place in places]

    # A tenth is serial: from one GPU to four a job is 3.08 times as fast, for 1.3 as much GPU-time.
    curve = amdahl(1, 4, 0.1)
    alone, many = of(1, curve, [4]), of(4, curve, [4])
    assert alone[0] < many[0]
    assert (alone[1], many[1]) == ([4], [1, 1, 1, 1])
    assert of(2, curve, [4])[1] == [2, 2]
    # Five jobs have no room: one waits, whatever the price.
    assert sorted(of(5, curve, [4])[1], key=str) == [1, 1, 1, 1, None]
    # All are twice as fast on the first kind, so that is dearer.
    times = np.array([[[50.0, 50.0], [100.0, 100.0]]] * 4)
    fast, slow = priced_matching.prices(times, [2, 2])
    assert fast > slow


def test_a_trade_is_of_two_jobs_of_one_size_and_helps_both():
    places = [(0, 1), (1, 1), (1, 2)]
    weight = np.full((3, 2, 2), 5.0)
    weight[0, 1, 0] = 3.0  # the first would rather be on the second kind
    assert priced_matching.traded(weight, places) == places
    weight[2, 0, 1] = 1.0  # so does the third on the first, with two GPUs
    assert priced_matching.traded(weight, places) == places
    weight[1, 0, 0] = 4.0
    assert priced_matching.traded(weight, places) == [(1, 1), (0, 1), (1, 2)]


def test_heets_sizes_follow_how_well_jobs_scale():
    def ends(durations, serial, gpus):
        curve = amdahl(1, 4, serial)
        jobs = [Job(f"job{i}", 1, 0, time, curve=curve) for i, time in enumerate(durations)]
        return [row.end_time for _, row in sorted(run(jobs, fleet(gpu=gpus), "heet").items())]

    # GPU-time is the same on any number of GPUs: one after another on all, the shortest first.
    assert ends([60, 80, 100], 0.0, 4) == [15, 35, 60]
    # With a tenth serial both would have three of five GPUs: 2.5 times as fast as one, and where
    # they weigh least. The shorter gets them, the other the two that are left: 1.82 times as fast.
    assert ends([100, 120], 0.1, 5) == [40, 67]


@pytest.mark.parametrize(
    "policy", ["gavel-max-min", "gavel-makespan", "gavel-ftf", "gavel-packed", "allox", "heet"]
)
def test_a_job_wider_than_every_kind_runs_all_the_same(policy):
    jobs = [Job("narrow", 1, 0, 100), Job("wide", 3, 0, 100), Job("late", 1, 5, 100)]
    rows = run(jobs, fleet(a=2, b=2), policy)
    assert len(rows) == 3


def test_heet_moves_nobody_while_a_job_is_on_several_kinds():
    jobs = [Job("wide", 3, 0, 900), Job("late", 1, 5, 700)]
    rows = run(jobs, fleet(a=2, b=2), "heet")
    assert {name: (row.end_time, row.preempt) for name, row in rows.items()} == {
        "wide": (900, 0),
        "late": (705, 0),
    }


def test_finish_time_fairness_is_the_least_in_few_programs(monkeypatch):
    calls = []

    def counted(program):
        calls.append(program)
        return linear_programs.solved(program)

    monkeypatch.setattr(throughput_programs, "solved", counted)
    for seed in range(5):
        draw = Random(seed)
        jobs = range(12)
        columns = [Column((j,), k, (draw.uniform(0.5, 2),), 1) for j in jobs for k in (0, 1)]
        since, alone = (np.array([draw.uniform(low, 9) for _ in jobs]) for low in (0, 3))
        steps = np.array([draw.uniform(1, 9) for _ in jobs])
        calls.clear()
        program = ThroughputProgram(columns, len(jobs), [3, 2])
        parts = program.finish_time_fair(since, steps, alone)
        assert len(calls) <= 18  # halving takes 20 and more
        rho = max((since + steps / program.throughputs(parts)) / alone)
        # Within a little less not all can finish.
        needs = steps / (rho * 0.9999 * alone - since)
        assert min(program.throughputs(program.max_min(needs)) / needs) < 1
