"""What a simulation of many jobs costs, policy by policy.

    python3 -m benchmarks.policies_at_scale --jobs 2000,10000,30000,100000

Every policy has the same jobs on 256 GPUs of two kinds, with the scheme and the sharing that it is
meant for. Jobs ask for 1, 2, 4 or 8 GPUs (70, 10, 10 and 10 %) for a log-normal time with a median
of 2,000 s, and arrive at random such that they ask for `--load` of all GPUs: in the mean of a day,
by half more in its middle and by half less at night, so that a queue grows and shrinks again. They
have owners, classes, speeds on the slower kind, speed-up curves, and stages, so that every policy
finds what it looks at.

Each simulation runs in a process of its own, which tells its processor time, and a digest of what
came out, by which two versions of the simulator can be compared.

With `--watts 60:240` GPUs draw as much idle, and so much more when busy, and the energy is told;
`--budget` is what `powerflow` lets all of them draw, in watts. With `--contention` jobs slow each
other down on the uplinks of nodes, and those of the five models send for 10, 20, 30, 40 and 50 % of
their steps across nodes.
"""

import argparse
import hashlib
import json
import math
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from random import Random
from statistics import fmean

from benchmarks.environment import environment
from benchmarks.random_jobs import log_normal, poisson_jobs

from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import Job, amdahl
from baechi.cluster_simulation.policies import (
    DEFAULTS,
    POLICIES,
    policy_named,
    scheme_named,
    sharing_named,
)
from baechi.cluster_simulation.results import cluster_csv, job_csv, summary
from baechi.cluster_simulation.simulator import simulate_cluster

SIZES, WEIGHTS = (1, 2, 4, 8), (0.7, 0.1, 0.1, 0.1)
MEDIAN_S, SIGMA = 2000, 1.0
MODELS = ("vgg16", "resnet50", "bert", "gpt2", "dqn")
OWNERS = 10
DAY = 86_400


def fleet_of(gpus: int, per_node: int = 8, watts: tuple[int, int] = (0, 0)) -> Fleet:
    """Nodes of eight GPUs under four switches; every second node has the slower kind."""
    fleet = Fleet.uniform(4, gpus // (4 * per_node), per_node, kind="fast", watts=watts)
    return Fleet(tuple(replace(gpu, kind="slow") if gpu.node % 2 else gpu for gpu in fleet.gpus))


def jobs_of(count: int, gpus: int, load: float, seed: int) -> list[Job]:
    """Jobs that ask for so much of what there is."""
    mean_work = (
        MEDIAN_S * math.exp(SIGMA**2 / 2) * sum(map(math.prod, zip(SIZES, WEIGHTS, strict=True)))
    )
    arrivals = poisson_jobs(
        per_tick=load * gpus / mean_work,
        durations=log_normal(MEDIAN_S, SIGMA),
        seed=seed,
        count=count,
        gpus=SIZES,
        weights=WEIGHTS,
    )
    draw = Random(f"what jobs have {seed}")
    moment = 0.0
    before = 0
    speed_of = {model: draw.randint(500, 1000) for model in MODELS}
    stages_of = {model: tuple(draw.randint(1, 100) for _ in range(3)) for model in MODELS}
    curves = {size: amdahl(size, 4 * size, 0.05) for size in SIZES}
    jobs = []
    for job in arrivals:
        model = draw.choice(MODELS)
        moment += (job.submit_time - before) / (1 - math.cos(2 * math.pi * moment / DAY) / 2)
        before = job.submit_time
        jobs.append(
            replace(
                job,
                submit_time=round(moment),
                model=model,
                owner=f"owner{draw.randrange(OWNERS)}",
                priority=draw.choice((-1, 0, 0)),
                compute=600,
                kinds=(("slow", speed_of[model]),),
                curve=curves[job.gpus],
                across=(900, 800),
                stages=stages_of[model],
                iteration=sum(stages_of[model]),
            )
        )
    return jobs


def measured(policy: str, count: int, options: argparse.Namespace) -> dict[str, object]:
    """One simulation, in this process."""
    scheme, sharing = DEFAULTS.get(policy, ("count", "exclusive"))
    idle, busy = map(int, options.watts.split(":"))
    jobs = jobs_of(count, options.gpus, options.load, options.seed)
    if options.contention:
        rate_of = {model: 900 - 100 * place for place, model in enumerate(MODELS)}
        jobs = [replace(job, across=(rate_of[job.model],) * 2) for job in jobs]
    fleet = fleet_of(options.gpus, options.gpus_per_node, (idle, busy))
    begin = time.process_time()
    result = simulate_cluster(
        jobs,
        fleet,
        policy_named(policy, budget_w=options.budget),
        scheme_named(scheme),
        sharing=sharing_named(sharing, 2),
        contention=options.contention,
    )
    seconds = time.process_time() - begin
    digest = hashlib.sha256((job_csv(result) + cluster_csv(result)).encode()).hexdigest()
    return {
        "policy": policy,
        "jobs": count,
        "seconds": seconds,
        "events": len(result.rows),
        "here": fmean(row[6] + row[7] for row in result.rows),
        "mean_jct": summary(result)["mean_jct"],
        "energy_kwh": summary(result).get("energy_kwh"),
        "digest": digest[:12],
    }


def in_a_process(arguments: list[str], limit_s: int) -> dict[str, object] | None:
    """The same in a process of its own; `None` if it takes more processor time than that."""
    command = [sys.executable, "-m", "benchmarks.policies_at_scale", "--one", *arguments]
    command.append(f"--limit={limit_s}")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return None
    done.check_returncode()
    row: dict[str, object] = json.loads(done.stdout)
    return row


def main() -> None:
    """Prints a row per policy and number of jobs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", default="2000,10000", help="numbers of jobs")
    parser.add_argument("--policies", default="all")
    parser.add_argument("--gpus", type=int, default=256)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--watts", default="0:0", help="of a GPU, idle and beyond that when busy")
    parser.add_argument("--budget", type=int, help="of powerflow, in watts")
    parser.add_argument("--contention", action="store_true", help="on the uplinks of nodes")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one simulation")
    parser.add_argument("--one", action="store_true", help="one simulation, told as JSON")
    options = parser.parse_args()
    names = POLICIES if options.policies == "all" else tuple(options.policies.split(","))
    if options.one:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit))
        print(json.dumps(measured(names[0], int(options.jobs), options)))
        return
    print(json.dumps(environment()))
    print(
        f"load {options.load}, seed {options.seed}, {options.gpus} GPUs; seconds of processor time"
    )
    print(
        f"{'policy':18}{'jobs':>9}{'s':>9}{'ms/event':>10}{'events':>10}{'jobs there':>11}"
        f"{'mean JCT':>10}  digest"
    )
    for name in names:
        for count in options.jobs.split(","):
            kept = ("gpus", "load", "seed", "gpus_per_node", "watts", "budget")
            same = [
                f"--{what.replace('_', '-')}={getattr(options, what)}"
                for what in kept
                if getattr(options, what) is not None
            ]
            same += ["--contention"] * options.contention
            row = in_a_process([f"--policies={name}", f"--jobs={count}", *same], options.limit)
            if row is None:
                print(f"{name:18}{count:>9}   more than {options.limit} s", flush=True)
                break
            each = 1000 * float(row["seconds"]) / int(row["events"])
            print(
                f"{name:18}{count:>9}{row['seconds']:>9.2f}{each:>10.3f}{row['events']:>10}"
                f"{row['here']:>11.0f}{row['mean_jct']:>10.0f}  {row['digest']}"
                + (f"{row['energy_kwh']:>8.0f} kWh" if row["energy_kwh"] is not None else ""),
                flush=True,
            )


if __name__ == "__main__":
    main()
