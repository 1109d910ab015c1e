"""How near computed times are to measured ones, on the CPU, one thread.

Each of six models is profiled and estimated three ways: with the table's efficiencies for a
generic core; calibrated on the *other* models' profiles; calibrated on its own, which says
what the formula can express at best. The clock is the time that the one thread itself had, which a
busy machine changes less. Told, not asserted: the errors are this machine's. The test asserts only
that all operators were estimated. Run with `-s`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from benchmarks.models import hugging_face, inception_v3, lstm_lm, resnet
from torch import nn

import baechi
from baechi.traced.traced_model import Traced

THREADS = 1
Pair = tuple[Traced, baechi.Profile]


def gpt2() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Two layers of a GPT-2, in evaluation mode, so that attention is fused."""
    ids = {"vocab_size": 5000, "bos_token_id": 1, "eos_token_id": 2}
    tokens = torch.randint(0, 5000, (2, 128))
    model = hugging_face.gpt2(n_embd=512, n_layer=2, n_head=8, **ids)
    return model.eval(), (), {"input_ids": tokens, "labels": tokens}


def llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Two layers of a Llama with fewer key heads than query heads."""
    size = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = hugging_face.llama(vocab_size=4000, **size, **heads)
    return model.eval(), (torch.randint(0, 4000, (2, 128)),), {}


def vit() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Two layers of a vision transformer."""
    model = hugging_face.vit(num_hidden_layers=2, hidden_size=384, num_attention_heads=6)
    return model.eval(), (torch.randn(2, 3, 224, 224),), {}


# The table's rows for a CPU core were rounded from the first four; the others it has not seen.
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "inception_v3": inception_v3.example,
    "resnet18": resnet.example,
    "lstm_lm": lstm_lm.example,
    "llama": llama,
    "vit": vit,
}


def total(profile: baechi.Profile) -> int:
    return sum(cost.forward_ns + cost.backward_ns for cost in profile.costs)


def error(pair: Pair, calibration: baechi.Calibration | None) -> tuple[float, float]:
    """Signed relative error of the total, and the median of the operators' that take 0.1 ms."""
    traced, measured = pair
    computed = baechi.estimate(traced, "cpu", calibration=calibration)
    assert len(computed.costs) == len(measured.costs)
    times = [
        (getattr(one, way), getattr(other, way))
        for one, other in zip(computed.costs, measured.costs, strict=True)
        for way in ("forward_ns", "backward_ns")
    ]
    errors = [abs(ns - real_ns) / real_ns for ns, real_ns in times if real_ns >= 100_000]
    return total(computed) / total(measured) - 1, statistics.median(errors)


def test_estimates_beside_measurements(benchmark: Any) -> None:
    torch.manual_seed(0)

    def measure() -> dict[str, Pair]:
        traces = {name: baechi.trace(*make()) for name, make in MODELS.items()}
        with mock.patch("time.perf_counter_ns", time.thread_time_ns):
            return {
                name: (traced, baechi.profile(traced, threads=THREADS, progress=False))
                for name, traced in traces.items()
            }

    pairs = benchmark.pedantic(measure, rounds=1)
    print(f"{'model':14}{'measured':>12}{'table':>16}{'others':>16}{'own':>16}  (sum, median op)")
    for name, pair in pairs.items():
        others = baechi.calibrate([p for other, p in pairs.items() if other != name])
        own = baechi.calibrate([pair])
        rows = [error(pair, calibration) for calibration in (None, others, own)]
        benchmark.extra_info[name] = rows
        cells = "".join(f"{f'{sum_:+.0%} {op:.0%}':>16}" for sum_, op in rows)
        print(f"{name:14}{total(pair[1]) / 1e6:>9.1f} ms{cells}")
    calibration = baechi.calibrate(pairs.values())
    print(calibration.table())
    print(f"launch {calibration.launch_ns} ns")
    for share in calibration.efficiencies:
        print(f"{share.op_class} {share.dtype}: {share.compute:.3g}, {share.memory:.3g}")
