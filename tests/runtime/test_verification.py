"""`verify=True` finds what differs, names the operator, and is quiet where nothing differs."""

import copy
import threading
from collections import deque
from typing import Any

import pytest
import torch
import zoo
from placed import again_at_random, lazily, place_on
from seeds import some
from torch import nn

import baechi
from baechi.runtime.verification import Unsplit, verify


def in_a_worker() -> bool:
    return threading.current_thread().name.startswith("baechi-")


@torch.library.custom_op("baechi_verifying::drifts", mutates_args=())
def drifts(x: torch.Tensor, wrong: bool, back: bool) -> torch.Tensor:
    """Doubles; where a worker runs it, gives something else forward, or goes back wrongly."""
    del back
    return x * (2.5 if wrong and in_a_worker() else 2.0)


@torch.library.custom_op("baechi_verifying::drifts_back", mutates_args=())
def drifts_back(gradient: torch.Tensor, back: bool) -> torch.Tensor:
    return gradient * (2.5 if back and in_a_worker() else 2.0)


CALLS = [0]


@torch.library.custom_op("baechi_verifying::counts", mutates_args=())
def counts(x: torch.Tensor) -> torch.Tensor:
    """Gives something else each time."""
    CALLS[0] += 1
    return x + CALLS[0]


@drifts.register_fake
def _(x: torch.Tensor, wrong: bool, back: bool) -> torch.Tensor:
    del wrong, back
    return torch.empty_like(x)


@drifts_back.register_fake
def _(gradient: torch.Tensor, back: bool) -> torch.Tensor:
    del back
    return torch.empty_like(gradient)


@counts.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.back = inputs[2]


drifts.register_autograd(
    lambda ctx, gradient: (drifts_back(gradient, ctx.back), None, None), setup_context=_setup
)


class Drifts(nn.Module):
    """Layers with an operator between them that may go wrong."""

    def __init__(self, wrong: bool = False, back: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(6)
        self.wrong = wrong
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x)).tanh()
        x = self.dropout(self.layers[1](x)) + self.dropout(x)
        x = drifts(x, self.wrong, self.back)
        return self.layers[3](self.layers[2](x).tanh())


def verified(
    model: nn.Module, *args: Any, seed: int = 0, devices: int = 2, training: bool = True
) -> baechi.PlacedModule:
    """Placed at random and verified."""
    placed = baechi.place(
        model,
        {f"cpu:{i}": "1GiB" for i in range(devices)},
        example_args=args,
        placer=baechi.RandomPlacer(seed),
        training=training,
        costs="estimate",
        verify=True,
        progress=False,
        threads_per_device=1,
    )
    placed.unplace()
    return placed


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_first_operator_that_differs_is_named_with_the_models_own_line(dropout: float) -> None:
    model = Drifts(wrong=True, dropout=dropout)
    with pytest.raises(baechi.ExecutionError) as caught:
        verified(model, example())
    text = str(caught.value)
    assert text.startswith("the placed Drifts differs from the unsplit one, first at drifts (")
    assert "in forward: x = drifts(x, self.wrong, self.back)) on logical device" in text
    assert "max abs error" in text
    assert "max rel error 0.25" in text


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_first_gradient_that_differs_is_named(dropout: float) -> None:
    with pytest.raises(baechi.ExecutionError) as caught:
        verified(Drifts(back=True, dropout=dropout), example())
    text = str(caught.value)
    assert "first at the gradient of add (" in text
    assert "in forward: x = self.dropout(self.layers[1](x)) + self.dropout(x)" in text
    assert "max rel error 0.25" in text


def test_a_step_with_the_loss_inside_is_verified() -> None:
    """By a call with the same tapes; the model is as before, and steps go on where it is right."""
    x = example()
    wrong = lazily(Drifts(back=True), verify=True)
    with pytest.raises(baechi.ExecutionError, match=r"first at the gradient of model/add \("):
        wrong.step(x, targets=x, loss=nn.functional.mse_loss)
    right = lazily(Drifts(), verify=True)
    loss = right.step(x, targets=x, loss=nn.functional.mse_loss)
    assert torch.isfinite(loss)
    assert right.layers[0].weight.grad is not None


def test_an_argument_with_a_wrong_gradient_is_named() -> None:
    class Begins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(drifts(x, False, True)).tanh()

    with pytest.raises(baechi.ExecutionError, match=r"gradient of argument x.*max rel error 0\.25"):
        verified(Begins(), example().requires_grad_())


def test_an_inference_is_verified_and_a_sparse_gradient_compared() -> None:
    model = Drifts(wrong=True)
    with pytest.raises(baechi.ExecutionError, match="first at drifts"):
        verified(model.eval(), example(), training=False)

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6, sparse=True)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return drifts(self.table(i), False, True).tanh()

    with pytest.raises(baechi.ExecutionError, match=r"first at the gradient of table/embedding"):
        verified(Looks(), torch.tensor([1, 4, 4]))


def test_an_operator_with_state_of_its_own_is_named_as_such() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return counts(x.exp()).tanh()

    with pytest.raises(baechi.ExecutionError, match=r"differs from itself: counts \(test_ver"):
        verified(Counts(), example())


def test_a_model_whose_python_changes_from_call_to_call_is_told_apart() -> None:
    ages = deque([0])  # into which no guard looks

    class Ages(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ages[0] += 1
            return x.exp() * ages[0]

    with pytest.raises(baechi.ExecutionError, match="unsplit one as its trace does"):
        verified(Ages(), example())


def test_a_model_that_draws_is_verified_on_many_devices() -> None:
    for seed in range(2):
        model = Drifts(dropout=0.5)
        before = copy.deepcopy(model.state_dict())
        random = torch.get_rng_state()
        verified(model, example(), seed=seed, devices=3)
        assert torch.equal(torch.get_rng_state(), random)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", some(["clip", "awkward", "data_dependent"], 2, 1))
def test_nothing_is_found_where_nothing_differs(name: str) -> None:
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[name]()
    traced = baechi.trace(model, *copy.deepcopy((args, kwargs)))
    unsplit = Unsplit(model)
    placed = again_at_random(traced, seed=1, devices=3)
    try:
        verify(unsplit, placed._current, traced.module.call)
    finally:
        placed.unplace()


def test_a_wrong_parameter_on_its_device_is_found() -> None:
    """As where state is not moved with its operator: the operator that reads it is named."""
    model, x = Drifts(), example()
    traced = baechi.trace(model, (x,))
    unsplit = Unsplit(model)
    placed = place_on(traced, 2, "round-robin", threads_per_device=1)
    with torch.no_grad():
        model.layers[2].weight[0, 0] += 1
    with pytest.raises(baechi.ExecutionError, match=r"first at layers\.2/linear_2 \(.*forward"):
        verify(unsplit, placed._current, traced.module.call)
    placed.unplace()
