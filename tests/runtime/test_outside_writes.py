"""What callers do beside a step: their graphs around it, and writes between its two halves."""

import copy
from collections.abc import Callable

import placed
import pytest
import torch
from seeds import covering
from torch import nn

import baechi

pytestmark = pytest.mark.usefixtures("one_thread")


class Branches(nn.Module):
    """Reads its input twice, and one weight three times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x) * self.two(x).tanh()
        return self.last(self.last(self.last(y) + x)).sigmoid()


def both(seed: int) -> tuple[list[nn.Module], torch.Tensor]:
    """The same model unsplit and placed at random, and an input that needs a gradient."""
    torch.manual_seed(seed)
    models = [Branches(), Branches()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    module = placed.at_random(models[1], (x,), seed=seed, devices=1 + seed % 3)
    return [models[0], module], x


def fed_with_itself(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(model(x)).sum()


def fed_with_a_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x[:, :1] + model.get_parameter("one.weight")[:3]) * model(x)).sum()


def fed_with_an_embedding(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    two = model.get_submodule("two")
    return model(nn.functional.linear(x, two.weight, two.bias)).square().sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", [fed_with_itself, fed_with_a_weight, fed_with_an_embedding])
def test_an_input_may_come_from_the_models_own_parameters(
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], seed: int
) -> None:
    models, x = both(seed)
    found = []
    for model in models:
        x.grad = None
        loss(model, x).backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)  # a weight's gradients are added up call by call


def input_written(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    out = model(y)
    with torch.no_grad():
        y.mul_(2)
    return out


def input_added_to(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    out = model(y)
    y += out
    return y


def weights_updated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    with torch.no_grad():
        model.get_parameter("last.weight").mul_(2)
    return out


def output_written(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    with torch.no_grad():
        out.zero_()
    return out


WRITES = [input_written, input_added_to, weights_updated, output_written]


@pytest.mark.parametrize(("write", "seed", "hooked"), covering(WRITES, range(3), [False, True]))
def test_what_is_written_between_forward_and_backward_is_an_error_as_on_the_unsplit_model(
    write: Callable[[nn.Module, torch.Tensor], torch.Tensor], seed: int, hooked: bool
) -> None:
    """With a hook on its gradient a parameter is cut off from the caller's graph, as on GPUs."""
    models, x = both(seed)
    for model, error in zip(models, (RuntimeError, baechi.ExecutionError), strict=True):
        if hooked:
            model.get_parameter("last.weight").register_hook(lambda gradient: gradient)
        out = write(model, x)
        with pytest.raises(error, match="modified by an inplace operation"):
            out.sum().backward()
        placed.step(model, (x,), {})


@pytest.mark.parametrize("seed", range(3))
def test_what_autograd_did_not_save_may_be_written(seed: int) -> None:
    models, x = both(seed)
    found = []
    for model in models:
        model.get_parameter("last.bias").register_hook(lambda gradient: gradient * 1)
        loss = model(x).sum()
        with torch.no_grad():
            model.get_parameter("last.bias").add_(1)
            model.get_parameter("one.bias").add_(1)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(placed.same, *found))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit.script
def test_forward_mode_derivatives_are_refused_where_they_would_be_lost() -> None:
    models, x = both(1)
    tangents = []
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(baechi.ExecutionError, match="has a tangent"):
            models[1](dual)
        for model in models:
            with torch.no_grad():
                out = model(dual)
            tangents.append(torch.autograd.forward_ad.unpack_dual(out).tangent)
    assert placed.same(*tangents)


def test_what_holds_a_placed_module_is_refused() -> None:
    (_, module), _ = both(1)
    holder = nn.Sequential(nn.Linear(4, 4), module)
    with pytest.raises(baechi.InputError, match="holds a placed module, '1'"):
        baechi.place(holder, {"cpu:0": "1GiB"})


class Scales(nn.Module):
    """Writes into its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.full((4,), 3.0)), nn.Linear(4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image.mul_(self.scale)
        return self.last(image.relu_())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("graded", [False, True])
def test_a_write_into_an_argument_is_refused_where_it_has_a_gradient(
    devices: int, graded: bool
) -> None:
    torch.manual_seed(0)
    model = Scales()
    x = torch.randn(3, 4, requires_grad=graded)
    traced = baechi.trace(copy.deepcopy(model), (x * 1,))
    module = placed.place_on(traced, devices, "round-robin")
    with pytest.raises(baechi.ExecutionError, match="writes into its argument 'image' in place"):
        module(x * 1)
    found = []
    with torch.no_grad():
        for one in (model, module):
            y = x * 1
            found.append([one(y), y])
    assert all(map(placed.same, *found))
