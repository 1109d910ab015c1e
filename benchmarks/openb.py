"""FGD's table of allocations: how much of all GPUs is given out when pods of parts of GPUs arrive.

    python3 -m benchmarks.openb --traces ../shared/traces

Its cluster (Weng et al., "Beware of Fragmentation", ATC'23; Alibaba's openb trace) has 6,212 GPUs
of 1,213 nodes. Pods come in random order, then more of them, drawn at random, until they ask for
130 % of all GPUs; none ends, and who finds no room is left out. A pod asks for a part of a GPU, or
for whole GPUs of one node, and for CPU and memory of the node.

Here a GPU's memory is its thousand parts, and the schemes are ours. They do not know of hosts: they
are offered the nodes that have enough CPU and memory left. Under `random` the node is drawn first,
under `best-fit` it is the one with the least left, of CPU and of GPUs in equal parts, both as
there; `best-fit of GPUs alone` lets our scheme choose the node, too. Its trace of pods with wishes
for kinds of GPU and its other variants are not in the folder, and of its own rules (FGD, dot
product, clustering, packing) we have none.
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final, final

import numpy as np

from baechi.cluster_simulation.fleet import DeviceStates, Fleet, Gpu
from baechi.cluster_simulation.jobs import Job, JobRun, TimeSliced
from baechi.cluster_simulation.placement_schemes import BestFit
from baechi.cluster_simulation.placement_schemes import Random as AtRandom

PUBLISHED: Final = {"random": 87.47, "best-fit": 93.08, "best-fit of GPUs alone": 93.08}
MOST: Final = (128_000, 8_000)  # CPU and GPU of the largest node, in thousandths
MILLI: Final = 1000
ASKED: Final = 1.3


@final
@dataclass(frozen=True)
class Pod:
    """What a pod asks for: GPUs, thousandths of each, and of its host."""

    gpus: int
    milli: int
    cpu: int
    memory: int


def read(folder: Path) -> tuple[list[tuple[int, int, int]], list[Pod]]:
    """The GPUs, CPU and memory of every node, and the pods."""
    with (folder / "openb-gpu-nodes.csv").open() as file:
        nodes = [
            (int(row["gpu"]), int(row["cpu_milli"]), int(row["memory_mib"]))
            for row in csv.DictReader(file)
        ]
    with (folder / "openb-pods-default.csv").open() as file:
        pods = [
            Pod(
                int(row["num_gpu"]),
                int(row["gpu_milli"] or 0),
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
            )
            for row in csv.DictReader(file)
        ]
    return nodes, pods


def allocated(nodes: list[tuple[int, int, int]], pods: list[Pod], scheme: str, seed: int) -> float:
    """The part of all GPUs that is given out at the end, in %."""
    draw = Random(seed)
    gpus = tuple(Gpu(node, 0, MILLI) for node, row in enumerate(nodes) for _ in range(row[0]))
    fleet = Fleet(gpus)
    chooser = AtRandom() if scheme == "random" else BestFit()
    devices = DeviceStates(fleet, TimeSliced(MILLI), chooser.place, seed, {})
    cpu, memory = (np.array([row[place] for row in nodes]) for place in (1, 2))
    node_of = np.array([gpu.node for gpu in gpus])
    left = np.full(len(gpus), MILLI)
    queue = draw.sample(pods, len(pods))
    asked, target = sum(pod.gpus * pod.milli for pod in pods), ASKED * MILLI * len(gpus)
    while asked < target:
        queue.append(draw.choice(pods))
        asked += queue[-1].gpus * queue[-1].milli
    for index, pod in enumerate(queue):
        hosts = (cpu >= pod.cpu) & (memory >= pod.memory)
        room = (left >= pod.milli) & hosts[node_of]
        enough = hosts & (np.bincount(node_of[room], minlength=len(nodes)) >= pod.gpus)
        if not enough.any():
            continue
        numbers = np.flatnonzero(enough)
        here = cpu / MOST[0] + np.bincount(node_of, left) / MOST[1]
        node = int(numbers[np.argmin(here[numbers])])
        if scheme == "random":
            node = int(draw.choice(numbers.tolist()))
        if pod.gpus:
            offered = room & enough[node_of]
            if scheme != "best-fit of GPUs alone":
                offered &= node_of == node
            run = JobRun(Job(f"pod{index}", pod.gpus, 0, 1, memory_bytes=pod.milli), index)
            grant = devices.place(run.job, among=np.flatnonzero(offered).tolist())
            assert grant is not None, "there is room"
            devices.take(run, grant)
            node = int(node_of[grant.gpus[0]])
            assert all(node_of[gpu] == node for gpu in grant.gpus), "a pod is on one node"
            left[list(grant.gpus)] -= pod.milli
        cpu[node] -= pod.cpu
        memory[node] -= pod.memory
    return 100 * devices.held_bytes / (MILLI * len(gpus))


def main() -> None:
    """Prints a row per scheme."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder with the trace")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schemes", default=",".join(PUBLISHED))
    options = parser.parse_args()
    nodes, pods = read(options.traces)
    print("| scheme | published, % | here, % | seeds |")
    print("|---|---|---|---|")
    for scheme in options.schemes.split(","):
        found = [allocated(nodes, pods, scheme, seed) for seed in range(options.seeds)]
        each = ", ".join(f"{value:.2f}" for value in found)
        print(f"| `{scheme}` | {PUBLISHED[scheme]} | {fmean(found):.2f} | {each} |", flush=True)


if __name__ == "__main__":
    main()
