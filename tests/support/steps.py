"""Models of the zoo traced once, and one step of each: unsplit, and placed."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import zoo
from placed import assert_same_values, cpus, leaves_of, made_up_profile
from torch import nn

import baechi

ALL = {**zoo.MODELS, **zoo.AWKWARD}


@dataclass
class Step:
    """What one training step leaves behind."""

    outputs: Any
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    arguments: Any


@dataclass
class Case:
    """A model of the zoo, traced once, with what it does unsplit."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traced: baechi.Traced
    state: dict[str, torch.Tensor]
    training: baechi.OpGraph
    inference: baechi.OpGraph
    trained: Step
    inferred: Step

    def reset(self) -> None:
        """Undo what a step did to the model."""
        with torch.no_grad():
            for name, tensor in tensors_of(self.model).items():
                tensor.copy_(self.state[name])
        self.model.zero_grad(set_to_none=True)

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return copy.deepcopy((self.args, self.kwargs))


@cache
def case(name: str) -> Case:
    model, args, kwargs = ALL[name]()
    example = (args, kwargs)
    traced = baechi.trace(model, *copy.deepcopy(example))
    state = {key: tensor.detach().clone() for key, tensor in tensors_of(model).items()}
    profile = made_up_profile(traced)
    return Case(
        model,
        args,
        kwargs,
        traced,
        state,
        traced.graph(profile, training=True),
        traced.graph(profile, training=False),
        train(copy.deepcopy(model), example),
        infer(copy.deepcopy(model), example),
    )


def apply(
    traced: baechi.Traced, graph: baechi.OpGraph, n_devices: int, placer: Any
) -> baechi.PlacedModule:
    cluster = cpus(n_devices)
    placement = baechi.solve(graph, cluster, placer=placer)
    names = [device.name for device in cluster.devices]
    return baechi.apply(traced, placement, devices=names, graph=graph, cluster=cluster)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss if it has one, else the mean squares of all outputs with gradients."""
    own = getattr(outputs, "loss", None)
    if own is not None:
        return own
    leaves = [leaf for leaf in leaves_of(outputs) if isinstance(leaf, torch.Tensor)]
    squares = [leaf.square().mean() for leaf in leaves if leaf.requires_grad]
    return torch.stack(squares).sum()


def train(model: nn.Module, example: Any) -> Step:
    """One step of gradient descent."""
    args, kwargs = copy.deepcopy(example)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outputs = model(*args, **kwargs)
    loss_of(outputs).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimizer.step()
    return Step(outputs, gradients, tensors_of(model), (args, kwargs))


def infer(model: nn.Module, example: Any) -> Step:
    args, kwargs = copy.deepcopy(example)
    with torch.no_grad():
        outputs = model(*args, **kwargs)
    return Step(outputs, {}, tensors_of(model), (args, kwargs))


def assert_same_step(actual: Step, expected: Step, **tolerances: float) -> None:
    assert_same_values(actual.outputs, expected.outputs, **tolerances)
    assert_same_values(actual.arguments, expected.arguments, **tolerances)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert actual.gradients[name] is None, name
        else:
            mine = actual.gradients[name]
            torch.testing.assert_close(mine, gradient, msg=named(name), **tolerances)
    assert actual.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(actual.state[name], tensor, msg=named(name), **tolerances)


def named(name: str) -> Any:
    return lambda message: f"{name}: {message}"
