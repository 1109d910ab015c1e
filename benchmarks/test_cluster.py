"""Claim: 100,000 jobs on 1,000 GPUs take under 60 s under fifo and shortest, in linear memory.

Poisson arrivals at a load below and above what the cluster can do, and all jobs at once; durations
log-normal with a median of 2,000 s, 70 % of the jobs with one GPU, 10 % each with 2, 4 and 8. Each
case runs in a process of its own, which tells the time that it had itself (a busy machine changes
it less) and its peak memory; the last column is the peak beyond that of an idle process, per job.
Times are told, not asserted: they are this machine's. Run with `-s` for the table.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, math, resource, sys, time
from dataclasses import replace
from baechi.cluster_simulation.policies import policy_named
from baechi.cluster_simulation.fleet import Fleet
from benchmarks.random_jobs import log_normal, poisson_jobs
from baechi.cluster_simulation.simulator import simulate_cluster

count, policy, load = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
fleet = Fleet.uniform(5, 25, 8)
policy = policy_named(policy)
simulate_cluster([], fleet, policy)
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gpus, weights = (1, 2, 4, 8), (0.7, 0.1, 0.1, 0.1)
work = 2000 * math.exp(1 / 2) * sum(map(math.prod, zip(gpus, weights)))
jobs = poisson_jobs(
    per_tick=(load or 1) * len(fleet.gpus) / work,
    durations=log_normal(2000, 1), seed=1, count=count, gpus=gpus, weights=weights,
)
if not load:
    jobs = tuple(replace(job, submit_time=0) for job in jobs)
start = time.process_time()
result = simulate_cluster(jobs, fleet, policy)
seconds = time.process_time() - start
assert len(result.outcomes) == count
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
waiting = max(row[6] for row in result.rows)
print(json.dumps([seconds, peak - idle, waiting, sum(row.preempt for row in result.outcomes)]))
"""
CASES = [
    *((100_000, policy, load) for policy in ("fifo", "shortest") for load in (0.8, 1.2, 0)),
    *((count, "fifo", 0.8) for count in (200_000, 400_000)),
]


def measured(count: int, policy: str, load: float) -> list[Any]:
    arguments = [sys.executable, "-c", CODE, str(count), policy, str(load)]
    row: list[Any] = json.loads(subprocess.run(arguments, capture_output=True, check=True).stdout)
    return row


@pytest.mark.parametrize(("count", "policy", "load"), CASES)
def test_many_jobs(benchmark: Any, count: int, policy: str, load: float) -> None:
    rows: list[list[Any]] = []
    benchmark.pedantic(lambda: rows.append(measured(count, policy, load)), rounds=1)
    seconds, kib, waiting, preempted = rows[0]
    benchmark.extra_info.update(cpu_s=seconds, peak_kib=kib)
    name = f"load {load}" if load else "all at once"
    print(
        f"\n{count} jobs, {policy}, {name}: {seconds:.1f} s of CPU, at most {waiting} waiting, "
        f"{preempted} preemptions, {kib * 1024 / count:.0f} bytes per job"
    )
