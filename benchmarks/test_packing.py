"""Claim: turns on a GPU explain Big Brain's packing table within 10 %.

Big Brain's report (CS523) ran jobs that arrive at random on three RTX 2080 for 100 s, with at most
1, 2 or 3 jobs on a GPU, and found

    packing factor            1       2       3
    process time, s           4.58    8.97    13.82     from start to end
    waiting time, s          12.44   13.27    11.58
    jobs completed           59      61       59

Ours: jobs of 4.58 s, Poisson arrivals, first in first out on the GPU with the fewest jobs, rate 1/n
(`TimeSliced`); a figure is the mean over 300 seeds of a run's mean. The report does not tell the
rate of arrivals, nor whose waiting it counts. So the rate is fitted, to the smallest largest
deviation among 0.860, 0.865, ... 0.910 jobs per second: 0.885 per second, 9.4 %. Waiting is that of
all who arrived, until they start or the 100 s are over; counting only those who started fits the
report a little worse, at best within 10.4 % (at 0.895). The report's figures are of one run; the
mean waiting time of one run of ours has a standard deviation of 34 to 43 %.

What it says about sharing: turns move waiting into processing, and complete no more jobs.
"""

from statistics import fmean
from typing import Any

from benchmarks.random_jobs import poisson_jobs

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import TimeSliced
from baechi.cluster_simulation.placement_schemes import LeastLoaded
from baechi.cluster_simulation.policies.fifo import Fifo
from baechi.cluster_simulation.simulator import simulate_cluster

MEASURED = {1: (4.58, 12.44, 59), 2: (8.97, 13.27, 61), 3: (13.82, 11.58, 59)}
END_MS = 100_000
PROCESS_MS = 4_580
RATES = [rate / 1000 for rate in range(860, 911, 5)]
SEEDS = 300


def row(packing: int, per_s: float) -> tuple[float, float, float]:
    """Process and waiting time in seconds, and jobs completed, on average."""
    process, waiting, completed = [], [], []
    for seed in range(SEEDS):
        jobs = poisson_jobs(per_tick=per_s / 1000, durations=PROCESS_MS, seed=seed, until=END_MS)
        result = simulate_cluster(
            *(jobs, Fleet.uniform(1, 3, 1), Fifo("big-brain"), LeastLoaded()),
            sharing=TimeSliced(packing),
        )
        done = [each for each in result.outcomes if each.end_time <= END_MS]
        completed.append(len(done))
        process.append(fmean(each.end_time - each.start_time for each in done))
        waiting.append(
            fmean(min(each.start_time, END_MS) - each.job.submit_time for each in result.outcomes)
        )
    return fmean(process) / 1000, fmean(waiting) / 1000, fmean(completed)


def deviations(table: dict[int, tuple[float, float, float]]) -> list[float]:
    """Of every figure from the report's, as a part of it."""
    return [
        abs(ours / theirs - 1)
        for packing, theirs_row in MEASURED.items()
        for ours, theirs in zip(table[packing], theirs_row, strict=True)
    ]


def table_at(per_s: float) -> dict[int, tuple[float, float, float]]:
    return {packing: row(packing, per_s) for packing in MEASURED}


def test_packing_table(benchmark: Any) -> None:
    fitted = min(RATES, key=lambda per_s: max(deviations(table_at(per_s))))
    table = benchmark.pedantic(table_at, (fitted,), rounds=1)
    print(f"\nfitted: {fitted} jobs per second")
    for packing, ours in table.items():
        theirs = ", ".join(f"{figure:g}" for figure in MEASURED[packing])
        print(f"packing {packing}: " + ", ".join(f"{x:.2f}" for x in ours) + f" (report: {theirs})")
    worst = max(deviations(table))
    print(f"largest deviation {worst:.1%}")
    benchmark.extra_info.update(rate_per_s=fitted, largest_deviation=worst)
    assert worst < 0.1
