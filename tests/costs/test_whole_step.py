"""What the operators of a model take together, in its own step."""

import time

import pytest
import torch
from torch import nn

import baechi
from baechi.costs.profile_cache import Measured
from baechi.costs.whole_step import WholeStep, together
from baechi.records.op_costs import OpCost

SPENT_NS = 5_000_000


class Slow(nn.Module):
    """Between its operators is Python that takes long, and notes, draws and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        until = time.perf_counter_ns() + SPENT_NS
        while time.perf_counter_ns() < until:
            pass
        return nn.functional.dropout(self.norm(x)).relu()


@pytest.mark.filterwarnings("ignore:forward of Slow")
def test_python_between_operators_is_in_a_predicted_step() -> None:
    traced = baechi.trace(Slow(), (torch.randn(4, 8),))
    profile = baechi.profile(traced, threads=1, cache=False)
    cluster = baechi.Cluster.uniform(1, memory="1GiB", link=baechi.Link(0, 1))
    for training in (True, False):
        graph = traced.graph(profile, training=training)
        step = baechi.simulate(graph, cluster, baechi.solve(graph, cluster))
        assert step.makespan_ns > 0.9 * SPENT_NS


@pytest.mark.filterwarnings("ignore:forward of Slow")
def test_nothing_of_the_whole_step_stays() -> None:
    model = Slow()
    traced = baechi.trace(model, (torch.randn(4, 8),))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = [(t, t.clone()) for t in [*model.buffers(), *(p.grad for p in model.parameters())]]
    noted, state = model.calls, torch.get_rng_state()
    baechi.profile(traced, threads=1, cache=False)
    assert all(torch.equal(tensor, value) for tensor, value in kept)
    assert all(p.grad is grad for p, (grad, _) in zip(model.parameters(), kept[3:], strict=True))
    assert model.calls == noted
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_is_elsewhere_or_has_no_room_does_not_run() -> None:
    traced = baechi.trace(nn.Linear(8, 8), (torch.randn(4, 8),))
    assert WholeStep(traced, gradients=True).runs_on(torch.device("cpu"))
    assert not WholeStep(traced, gradients=True).runs_on(torch.device("cuda", 0))
    with torch.device("meta"):
        large = nn.Linear(2**20, 2**20, bias=False)
        traced = baechi.trace(large, (torch.randn(1, 2**20),))
    assert not WholeStep(traced, gradients=True).runs_on(torch.device("cpu"))
    # All that it makes is as large as the output of its first operator, a view of next to nothing.
    huge = baechi.trace(Repeated(), (torch.zeros(1),))
    assert not WholeStep(huge, gradients=False).runs_on(torch.device("cpu"))


class Repeated(nn.Module):
    """Would make 4 TiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(2**40).exp()[0]


def test_a_model_that_fails_on_its_own_leaves_costs_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = baechi.trace(nn.Linear(8, 8), (torch.randn(4, 8),))
    monkeypatch.setattr(nn.Linear, "forward", None)
    profile = baechi.profile(traced, threads=1, cache=False)
    assert all(cost.inference_ns is None for cost in profile.costs)
    assert sum(cost.forward_ns for cost in profile.costs) > 0


COSTS = (
    OpCost(300, 400, forward_launch_ns=10, backward_launch_ns=30),
    OpCost(100, 1, forward_launch_ns=40, backward_launch_ns=20),
)


def test_a_whole_is_shared_by_the_times_of_its_operators() -> None:
    first, second = together(COSTS, COSTS, Measured(800, 200), Measured(500))
    assert (first.forward_ns, second.forward_ns) == (600, 200)
    assert (first.inference_ns, second.inference_ns) == (375, 125)
    assert (first.backward_ns, second.backward_ns) == (199, 1)  # next to no time stays
    assert first.forward_launch_ns == 10
    assert together(COSTS, COSTS, Measured(0), Measured(0)) == COSTS


def test_of_a_gpu_the_whole_is_that_of_launches_where_the_host_is_slower() -> None:
    whole = Measured(0, forward_launch_ns=1000, backward_launch_ns=400)
    first, second = together(COSTS, COSTS, whole, Measured(0))
    assert (first.forward_launch_ns, second.forward_launch_ns) == (200, 800)
    # The host may have waited for the queue of a GPU that is busy for 401 ns.
    assert (first.backward_launch_ns, second.backward_launch_ns) == (30, 20)
    assert (first.forward_ns, first.backward_ns) == (300, 400)
    whole = Measured(0, forward_launch_ns=1000, backward_launch_ns=25)  # it was faster all the same
    first, second = together(COSTS, COSTS, whole, Measured(0))
    assert (first.backward_launch_ns, second.backward_launch_ns) == (15, 10)


def test_no_hook_of_a_parameter_runs() -> None:
    """Such as an optimizer in the backward, which would train while it is measured."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    seen: list[str] = []
    model[0].weight.register_hook(lambda _: seen.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    x = torch.randn(4, 8)
    module = baechi.place(model, ["cpu:0/a", "cpu:0/b"], example_args=(x,), progress=False)
    module.measure(1)
    assert not seen
    module(x).sum().backward()
    assert seen == ["gradient", "accumulated"]
