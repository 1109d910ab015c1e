"""The step `several`: what needs two GPUs. Links, hand-overs, contexts, and tests."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from benchmarks.gpu_check import host, tests
from benchmarks.gpu_check.check import Check, Skipped

import baechi

_GPUS = ("cuda:0", "cuda:1")
# A model on the second GPU alone, and then the bytes of this process on the first.
_APART = """
import torch
import baechi
model, x = torch.nn.Linear(8, 8).to("cuda:1"), torch.ones(2, 8, device="cuda:1")
traced = baechi.trace(model, (x,))
costs = tuple(baechi.OpCost(1, 1) for _ in traced.ops)
graph = traced.graph(baechi.Profile(traced.digest, "", costs), training=True)
cluster = baechi.Cluster.connected([baechi.Device("cuda:1", "1GiB")], baechi.Link(0, 1))
placed = baechi.apply(traced, baechi.solve(graph, cluster), graph=graph, cluster=cluster)
for _ in range(2):
    placed(x).sum().backward()
torch.cuda.synchronize("cuda:1")
print("ready", flush=True)
input()
"""


def run(check: Check) -> None:
    """Rows of links and of the host, and a row per test; one row where there is one GPU."""
    if torch.cuda.device_count() < len(_GPUS):
        check.case("GPUs", _one_alone)
        return
    check.case("links", _links)
    layers, steps = (8, 6) if check.quick else (32, 20)
    check.case("hand-over to another GPU", partial(_crossing, layers, steps))
    check.case("no context on a GPU that is not used", _contexts)
    tests.run(check)


def _one_alone() -> None:
    raise Skipped("there is one GPU here")


def _links() -> Mapping[str, Any]:
    cluster = baechi.probe(list(_GPUS))
    pairs = {"0 to 1": cluster.links[0][1], "1 to 0": cluster.links[1][0]}
    found = {name: link for name, link in pairs.items() if link is not None}
    return {
        **{f"latency_us {name}": link.latency_ns / 1e3 for name, link in found.items()},
        **{f"gb_per_s {name}": link.bytes_per_s / 1e9 for name, link in found.items()},
        "peers": torch.cuda.can_device_access_peer(0, 1),
    }


def _crossing(layers: int, steps: int) -> Mapping[str, Any]:
    figures = host.segments(layers, steps, _GPUS)
    return {"crossing_us": figures.pop("handover_us"), **figures}


def _contexts() -> Mapping[str, Any]:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise Skipped("nvidia-smi is not there")
    query = [command, "-i", "0", "--query-compute-apps=pid", "--format=csv,noheader"]
    before = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    child = subprocess.Popen(
        [sys.executable, "-c", _APART], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready", "a model on cuda:1 alone does not run"
        # Their numbers may be those of another namespace, so they are counted.
        after = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    finally:
        child.kill()
        child.wait()
    assert len(after) <= len(before), f"{len(after) - len(before)} more processes use cuda:0"
    return {}
