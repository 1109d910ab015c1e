"""Branches on values in a model's own forward: as the example takes them, or an error."""

import pytest
import torch
from placed import at_random, one_thread, step
from torch import Tensor, nn

import baechi
from baechi.tracing.guards import CHECK
from baechi.tracing.subgraph import extract

RUNG = "torch.export (non-strict), truth values of the example"


class Careful(nn.Module):
    """Checks its input and an activation, and clamps what has grown out of bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert not torch.isnan(x).any()
        hidden = self.first(x)
        if torch.isinf(hidden).any():
            hidden = hidden.clamp(-1e4, 1e4)
        if not mask.all().item():
            hidden = hidden * mask
        return self.last(hidden)


class Sampler(nn.Module):
    """A distribution, whose parameters torch validates; by default not after a `torch.compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x).exp()
        normal = torch.distributions.Normal(self.body(x), scale, validate_args=True)
        return normal.rsample() + normal.entropy()


class Writing(Careful):
    """Counts its calls, and asks about a weight that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.moved = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        self.moved.mul_(0.5)
        if self.calls > 0 and self.moved.sum() > 0:
            x = x * self.moved
        return super().forward(x, mask)


class Signs(nn.Module):
    """Compares a number from a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0.5 else -x


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", [Careful, Writing])
def test_a_step_is_the_unsplit_models(kind: type[nn.Module]) -> None:
    args = (torch.randn(3, 4), torch.tensor([True, False, True, True]))
    with one_thread():
        placed = at_random(seeded(kind), args)
        assert placed.traced.rung == RUNG
        for _ in range(2):
            unsplit = seeded(kind)
            assert not step(unsplit, args, {}).differs_from(step(placed, args, {}))
            placed.load_state_dict(seeded(kind).state_dict())


def test_validated_distributions_draw_as_the_unsplit_model() -> None:
    model, x = seeded(Sampler), torch.randn(3, 4)
    placed = at_random(model, (x,), devices=1)
    assert placed.traced.rung == RUNG
    torch.manual_seed(5)
    wanted = model(x)
    torch.manual_seed(5)
    assert torch.equal(placed(x), wanted)


def test_who_takes_another_branch_is_told_which() -> None:
    x, mask = torch.randn(3, 4), torch.ones(4, dtype=torch.bool)
    placed = at_random(seeded(Careful), (x, mask))
    wanted = placed(x, mask)
    assert [row.split()[2] for row in placed.remarks] == ["False", "False", "True"]
    corner = torch.zeros(3, 4)
    corner[0, 0] = float("inf")  # and so is a row of activations
    for other in ((x * float("nan"), mask), (x + corner, mask), (x, ~mask)):
        with pytest.raises(baechi.ExecutionError, match=r"would now read .*submodule") as caught:
            placed(*other)
        assert "test_value_guards.py" in str(caught.value)
    assert torch.equal(placed(x, mask), wanted)


class Wordy(nn.Module):
    """Asks in a line that is too long to be quoted."""

    def forward(self, x: Tensor) -> Tensor:
        unfit = torch.isnan(x).any() or torch.isinf(x).any() or x.min() < -1
        return x if unfit else x.relu()


def test_on_a_gpu_the_host_checks() -> None:
    """A check that fails on a GPU would end all of the process's CUDA."""
    module = baechi.trace(Wordy(), (torch.ones(3),)).module
    rows = [node for nodes in module.nodes for node in nodes]
    checks = [node for node in rows if str(node.target).startswith(CHECK)]
    assert len(checks) == 3
    for node in checks:
        assert 240 < len(node.args[1].encode()) < 255  # torch takes no longer message there
        assert "test_value_guards.py" in node.args[1]
    part = extract(module.graph_module, rows, [], device=torch.device("cuda"))
    assert "torch.ops.aten._assert_async" not in part.function.__self__.code
    assert part.function(torch.zeros(3)) == ()
    with pytest.raises(RuntimeError, match=r"read False .* would now read True.*submodule"):
        part.function(torch.tensor([float("nan"), 0.0, 0.0]))


def test_numbers_are_not_told() -> None:
    with pytest.raises(baechi.TraceError, match="forward asks no tensor for a truth value"):
        baechi.trace(Signs(), (torch.randn(3, 4),))


def test_the_real_run_leaves_nothing_behind() -> None:
    model = seeded(Writing)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args = (torch.randn(3, 4), torch.ones(4, dtype=torch.bool))
    state = torch.get_rng_state()
    baechi.trace(model, args)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
