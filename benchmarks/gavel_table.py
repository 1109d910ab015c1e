"""Gavel's table of mean completion times, on jobs drawn as its generator draws them.

    python3 -m benchmarks.gavel_table --traces ../shared/traces

Its notebook (OSDI'20) has jobs of one GPU on 36 V100, 36 P100 and 36 K80: a model at random, and a
duration on a V100 of 10^1.5 to 10^3 minutes, for a fifth of the jobs of 10^3 to 10^4. Its random
numbers are not ours, so means differ by the jobs that are drawn. It measures the jobs 4,000 to
4,999 of a trace; here it is the second half of `--jobs`.
"""

import argparse
import ast
import json
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from baechi.cluster_simulation.fleet import Fleet, Gpu
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.placement_schemes import BestFit
from baechi.cluster_simulation.placement_schemes import Random as AtRandom
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.simulator import simulate_cluster

KINDS = ("v100", "p100", "k80")
EACH = 36
# Policy, and its published hours at 4.0 and 4.8 jobs per hour: FIFO, LAS, AlloX, and LAS of Gavel.
PUBLISHED = {
    "fifo": {4.0: 25.38, 4.8: 99.19},
    "gandiva": {4.0: 23.49, 4.8: 35.79},
    "allox": {4.0: 17.13, 4.8: 20.92},
    "gavel-max-min": {4.0: 16.82, 4.8: 18.97},
}


def jobs_of(table: dict, load: float, count: int, seed: int) -> list[Job]:
    """Jobs at so many per hour."""
    models = [model for model in sorted(table["v100"]) if ast.literal_eval(model)[1] == 1]
    draw, now, jobs = Random(seed), 0.0, []
    for index in range(count):
        model = draw.choice(models)
        exponent = draw.uniform(1.5, 3) if draw.random() < 0.8 else draw.uniform(3, 4)
        rates = [table[kind][model]["null"] / table["v100"][model]["null"] for kind in KINDS]
        speeds = tuple(
            (kind, max(1, round(1000 * rate))) for kind, rate in zip(KINDS, rates, strict=True)
        )
        duration = round(60 * 10**exponent)
        jobs.append(Job(f"job{index}", 1, round(now), duration, model, kinds=speeds))
        now += draw.expovariate(load / 3600)
    return jobs


def mean_hours(table: dict, policy: str, load: float, count: int, seed: int) -> float:
    """The mean completion time of the second half of the jobs."""
    kinds = [kind for kind in KINDS for _ in range(EACH)]
    fleet = Fleet(tuple(Gpu(index // 4, 0, kind=kind) for index, kind in enumerate(kinds)))
    # Who does not know the kinds takes any GPU.
    scheme = AtRandom() if policy in {"fifo", "gandiva"} else BestFit()
    jobs = jobs_of(table, load, count, seed)
    result = simulate_cluster(jobs, fleet, policy_named(policy), scheme, seed=seed)
    late = {job.name for job in jobs[count // 2 :]}
    return fmean(r.completion_time for r in result.outcomes if r.job.name in late) / 3600


def main() -> None:
    """Prints a row per load and policy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder with the throughputs")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    table = json.loads((options.traces / "gavel-throughputs.json").read_text())
    print("| jobs per hour | policy | published, h | here, h | standard deviation |")
    print("|---|---|---|---|---|")
    for load in (4.0, 4.8):
        for policy, hours in PUBLISHED.items():
            found = [
                mean_hours(table, policy, load, options.jobs, seed) for seed in range(options.seeds)
            ]
            row = (load, policy, hours[load], f"{fmean(found):.2f}", f"{stdev(found):.2f}")
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
