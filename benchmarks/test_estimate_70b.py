"""A 70B Llama is traced, estimated and solved for 8 devices, with no weight allocated.

Claim: within 60 s and 4 GiB of peak memory on two cores: 80 layers, hidden 8192, 8 key heads of 64,
a vocabulary of 128,256, bf16, one sequence of 2,048 tokens, inference on 8 devices of 80 GiB.

A fresh process per size, because the peak of one's memory is what the others' left. Times are told,
not asserted: they are this machine's. The peak of memory is asserted. Run with `-s`, and with
`-m "slow or not slow"` for all 80 layers.
"""

from typing import Any

import pytest
from benchmarks.children import figures_of

GIB = 2**30
SLOW = pytest.mark.slow

# Linux keeps the peak of `getrusage` across exec, so that a child starts with its parent's; /proc
# tells its own.
_CHILD = """
import json, sys, time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import baechi
from baechi.records import device_kinds
from benchmarks.children import peak_bytes

layers = int(sys.argv[1])
seconds, start = {}, time.perf_counter()

def lap(name):
    global start
    seconds[name] = time.perf_counter() - start
    start = time.perf_counter()

config = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
    num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tokens = torch.zeros(1, 2048, dtype=torch.long)
lap("build")
traced = baechi.trace(model, (tokens,))
lap("trace")
profile = baechi.estimate(traced, "H100-SXM-80GB")
lap("estimate")
graph = traced.graph(profile, training=False)
link = baechi.Link(latency_ns=5_000, bytes_per_s=200 * 10**9)
cluster = device_kinds.cluster("8xH100-SXM-80GB", link)
lap("graph")
placement = baechi.solve(graph, cluster)
lap("solve")
schedule = baechi.simulate(graph, cluster, placement)
lap("simulate")
print(json.dumps({
    "seconds": seconds,
    "cpu_s": time.process_time(),
    "peak_bytes": peak_bytes(),
    "n_ops": len(traced.ops),
    "n_distinct": len({op.key for op in traced.ops}),
    "weights_bytes": sum(cost.parameter_bytes for cost in profile.costs),
    "step_ns": schedule.makespan_ns,
    "fullest_bytes": max(schedule.peak_bytes),
    "limit_bytes": cluster.devices[0].memory_bytes,
}))
"""


@pytest.mark.parametrize("layers", [8, pytest.param(80, marks=SLOW)])
def test_llama(benchmark: Any, layers: int) -> None:
    benchmark.group = "Llama on the meta device, traced, estimated and solved"
    figures = benchmark.pedantic(figures_of, (_CHILD, layers), rounds=1)
    benchmark.extra_info.update(layers=layers, **figures)
    parts = ", ".join(f"{name} {s:.2f} s" for name, s in figures["seconds"].items())
    print(
        f"{layers} layers, {figures['weights_bytes'] / GIB:.0f} GiB of weights, "
        f"{figures['n_ops']:,} ops of {figures['n_distinct']} kinds: "
        f"{sum(figures['seconds'].values()):.1f} s ({parts}), CPU {figures['cpu_s']:.1f} s, peak "
        f"{figures['peak_bytes'] / 2**20:,.0f} MiB; a step takes "
        f"{figures['step_ns'] / 1e6:.1f} ms, the fullest device holds "
        f"{figures['fullest_bytes'] / GIB:.1f} GiB"
    )
    assert figures["peak_bytes"] < 4 * GIB
    assert figures["fullest_bytes"] <= figures["limit_bytes"]
    assert figures["weights_bytes"] > layers * 1.7e9
