"""An operator by itself finds memory as a whole step leaves it."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import baechi
from baechi.costs import op_benchmark
from baechi.costs.example_inputs import ExampleInputs
from baechi.costs.op_benchmark import Bench
from baechi.costs.operator_alone import Alone, Evict, evictor

CPU = torch.device("cpu")


def linear(width: int, evict: Evict | None, fresh: float) -> tuple[Alone, torch.Tensor]:
    x = torch.randn(2, width, requires_grad=True)
    traced = baechi.trace(nn.Linear(width, width, bias=False), (x,))
    module = traced.module
    (nodes,) = [n for op, n in zip(traced.ops, module.nodes, strict=True) if "linear" in op.key]
    return Alone(module, nodes, ExampleInputs(module, CPU).make, CPU, evict, fresh), x


@pytest.mark.parametrize(("width", "cold"), [(512, True), (16, False)])
def test_caches_are_emptied_but_for_activations_where_parameters_are_large(width, cold):
    calls: list[list[tuple[int, ...]]] = []

    def evict(but: Sequence[torch.Tensor]) -> None:
        calls.append([tuple(tensor.shape) for tensor in but])

    alone, x = linear(width, evict, 0.0)
    alone.forward_runs(1)
    alone.backward_runs(1)
    assert alone.single == cold
    assert calls == ([[tuple(x.shape)]] * 2 if cold else [])


class _Turned(nn.Module):
    """Two products of the same shapes: with a view of a parameter, and with an activation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x, y):
        return x @ self.weight.t(), x @ y.t()


def test_a_view_of_a_parameter_is_as_cold_and_as_lasting_as_the_parameter():
    x, y = (torch.randn(512, 512, requires_grad=True) for _ in range(2))
    traced = baechi.trace(_Turned(), (x, y))
    rows = zip(traced.ops, traced.module.nodes, strict=True)
    products = [(op, nodes) for op, nodes in rows if "matmul" in op.key or "mm." in op.key]
    assert len({op.key for op, _ in products}) == 2
    make = ExampleInputs(traced.module, CPU).make
    evict = evictor(CPU, 1 << 10)
    found = [Alone(traced.module, nodes, make, CPU, evict, 0.5) for _, nodes in products]
    assert [(alone.single, alone.fresh) for alone in found] == [(True, 0.5), (False, 0.0)]


def test_gradients_of_parameters_are_in_new_memory_where_asked():
    alone, x = linear(64, None, 0.5)
    held = [run() for _ in range(8) for run in alone.backward_runs(1, fresh=True)]
    assert [[tuple(g.shape) for g in gradients] for gradients in held] == [[(64, 64)]] * 8
    addresses = [gradients[0].data_ptr() for gradients in held]
    del held
    assert len(set(addresses)) == 8  # none was freed: those of the activations are
    assert x.grad is None


def test_without_parameters_nothing_is_fresh():
    x = torch.randn(4, requires_grad=True)
    traced = baechi.trace(nn.ReLU(), (x,))
    nodes = traced.module.nodes[1]
    inputs = ExampleInputs(traced.module, CPU)
    alone = Alone(traced.module, nodes, inputs.make, CPU, None, 0.5)
    assert alone.fresh == 0.0
    assert len(alone.backward_runs(3)) == 3


def test_tensors_that_are_read_again_stay_as_they_are():
    tensors = [torch.ones(3), torch.ones(3).requires_grad_()]
    evictor(CPU, 1 << 20)(tensors)
    assert all(bool(tensor.eq(1).all()) for tensor in tensors)


def test_conditions_tell_the_memory_of_unlike_steps_apart(monkeypatch):
    traced = baechi.trace(nn.Linear(8, 8), (torch.randn(2, 8),))
    found = set()
    for cache_bytes in (0, 1 << 40):
        monkeypatch.setattr(op_benchmark, "cache_bytes", lambda _, n=cache_bytes: n)
        for kept_bytes in (0, 144, 10**9):  # of 288 bytes of gradients
            monkeypatch.setattr(op_benchmark, "_ALLOCATOR_KEEPS_BYTES", kept_bytes)
            found.add(Bench(traced, CPU, 1).conditions.settings.partition(", caches ")[2])
    shares = ("10/10", "5/10", "0/10")
    assert found == {f"{c}, gradients {s} fresh" for c in ("warm", "cold") for s in shares}
