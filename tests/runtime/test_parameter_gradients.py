"""Gradients of parameters, which steps give to one node that outlives them."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import placed
import pytest
import torch
from torch import nn

import baechi
from baechi.runtime.derived_class import placed_state

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layers(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


def node_of(output: torch.Tensor) -> Any:
    """The node of all parameters."""
    assert output.grad_fn is not None
    step = next(node for node, _ in output.grad_fn.next_functions if node is not None)
    (leaves,) = [node for node, _ in step.next_functions if node is not None]
    return leaves


def three_calls(model: nn.Module) -> None:
    """Three steps in one graph, and a parameter that is used beside them."""
    loss = sum(model(X * scale).square().sum() for scale in (0.1, 1, 7))
    (loss + model.get_parameter("a.weight").square().sum() / 3).backward()


def kept(model: nn.Module) -> None:
    """Two graphs at a time, of which one is used twice."""
    one, two = model(X).square().sum(), model(X / 3).square().sum()
    two.backward(retain_graph=True)
    one.backward()
    two.backward()


def asked(model: nn.Module) -> None:
    """One graph, asked for some gradients, and then for all."""
    loss = model(X).square().sum()
    (found,) = torch.autograd.grad(loss, model.get_parameter("b.bias"), retain_graph=True)
    model.get_parameter("a.bias").grad = found * 3
    loss.backward()


def only(model: nn.Module) -> None:
    """The gradients of some parameters."""
    model(X).square().sum().backward(inputs=[model.get_parameter("b.bias")])


def frozen(model: nn.Module) -> None:
    """A parameter that is frozen for two steps."""
    for on in (False, False, True):
        model.get_parameter("b.weight").requires_grad_(on)
        model(X).square().sum().backward()


def frozen_with_a_hook(model: nn.Module) -> None:
    """The same with a hook, which runs in no step that has no gradient for it."""
    parameter = model.get_parameter("b.weight")
    handle = parameter.register_hook(lambda gradient: gradient * 3)
    frozen(model)
    handle.remove()
    model(X).square().sum().backward()


def frozen_meanwhile(model: nn.Module) -> None:
    """Parameters that are frozen for a step, and for all of them, beside a graph from before."""
    first = model(X)
    for rows in ([model.get_parameter("b.weight")], [*model.parameters()]):
        for parameter in rows:
            parameter.requires_grad_(False)
        output = model(X * 3)
        if output.requires_grad:
            output.square().sum().backward()
        del output
        for parameter in rows:
            parameter.requires_grad_(True)
        model(X / 3).square().sum().backward()
    first.square().sum().backward()


def emptied(model: nn.Module) -> None:
    """Gradients that are used and dropped as soon as they are there."""

    def use(parameter: torch.Tensor) -> None:
        parameter.data -= parameter.grad * 0.1
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(use) for p in model.parameters()]
    for _ in range(2):
        model(X).square().sum().backward()
    for handle in handles:
        handle.remove()


WAYS = (three_calls, kept, asked, only, frozen, frozen_with_a_hook, frozen_meanwhile, emptied)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_they_are_those_of_the_unsplit_model(way: Callable[[nn.Module], None]) -> None:
    unsplit = Layers()
    module = placed.at_random(copy.deepcopy(unsplit), (X,), seed=1, devices=2)
    for model in (unsplit, module):
        for _ in range(2):  # the second adds to the first
            way(model)
    own = dict(unsplit.named_parameters())
    for name, parameter in module.named_parameters():
        assert placed.same(parameter.grad, own[name].grad), name
        assert torch.equal(parameter, own[name]), name
    module.unplace()


class Tied(nn.Module):
    """A weight of three readers, with layers between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.embedding.weight
        h = self.a(self.embedding(tokens)).tanh()
        h = h + self.b(h @ (weight.t() @ weight)).tanh()
        return h @ weight.t()


@pytest.mark.parametrize("hook", [False, True])
def test_readers_of_one_weight_are_added_up_over_calls_as_autograd_does(hook: bool) -> None:
    """One by one, from the last call's last reader to the first call's first."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (3, 6, 5))
    unsplit = Tied()
    module = placed.at_random(copy.deepcopy(unsplit), (tokens[0],), seed=1, devices=2)
    for model in (unsplit, module):
        if hook:
            model.get_parameter("embedding.weight").register_hook(lambda gradient: gradient * 3)
        for _ in range(2):
            sum(model(row).square().mean() for row in tokens).backward()
    for name, parameter in unsplit.named_parameters():
        assert torch.equal(module.get_parameter(name).grad, parameter.grad), name
    module.unplace()


class Reading(nn.Module):
    """It stays whole, since it reads a number."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.linear = embedding, nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor | float) -> torch.Tensor:
        x = self.linear(self.embedding(tokens) + before)
        return x.tanh() if x.norm().item() > 0 else x


class EncoderDecoder(nn.Module):
    """Two stacks that stay whole and a head, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(20, 8)
        self.encoder, self.decoder = Reading(self.shared), Reading(self.shared)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(two, self.encoder(one, 0.5)) * 0.3)


def test_submodules_that_stay_whole_tell_the_gradients_of_a_shared_weight_apart() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (2, 4, 12))
    unsplit = EncoderDecoder()
    traced = baechi.trace(copy.deepcopy(unsplit), (*tokens,))
    unsplit(*tokens).square().mean().backward()
    for seed in range(4):  # the scaling is on another device than all else with three of them
        module = placed.again_at_random(traced, seed=seed, devices=2)
        module.zero_grad()
        module(*tokens).square().mean().backward()
        for name, parameter in unsplit.named_parameters():
            assert torch.equal(module.get_parameter(name).grad, parameter.grad), name
        module.unplace()


def test_steps_take_turns_with_one_node() -> None:
    module = placed.at_random(Layers(), (X,))
    first, second = module(X), module(X)
    one, other = node_of(first), node_of(second)
    assert one is not other  # both are in use
    assert [len(node.next_functions) for node in (one, other)] == [6, 6]
    del first
    assert node_of(module(X)) is one
    module.b.weight.register_hook(lambda gradient: gradient)
    assert node_of(module(X)) not in (one, other)
    module.unplace()


def test_weights_that_were_elsewhere_have_another_node() -> None:
    """Since torch gives a parameter that comes from another device another one."""
    module = placed.at_random(Layers(), (X,))
    one = node_of(module(X))
    placed_state(module).unsettle()
    assert node_of(module(X)) is not one
    module.unplace()


def test_a_dropped_plan_is_let_go_of() -> None:
    module = placed.lazily(nn.Linear(4, 4), max_shapes=1, dynamic=False)
    module(X)
    module.measure(2)
    dropped = weakref.ref(module._current)
    with pytest.warns(UserWarning, match="least recently used"):
        module(X[:2])
    gc.collect()
    assert dropped() is None
    module.unplace()


class Switched(nn.Module):
    """A flag that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x)) if self.twice else self.inner(x)


def test_a_schedule_of_before_a_change_says_so() -> None:
    module: Any = baechi.place(Switched(), {"cpu:0": "1GiB"}, progress=False, costs="estimate")
    module(X)
    assert not module.remarks
    module.twice = True
    assert torch.equal(module(X), module.inner(module.inner(X)))
    assert any("before a change" in row and "twice was False" in row for row in module.remarks)
