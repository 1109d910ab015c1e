"""Gradients are added up as in the unsplit model, and keep their strides where kernels ask."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from placed import again_at_random, one_thread, place_on, same, step
from seeds import some
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.runtime.autograd.gradient_plan import keeps_strides


class Sinks(nn.Module):
    """A number for each head is repeated, and joined as the last column of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4))
        self.scores, self.values = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], -1)
        joined = torch.cat([self.scores(x), sinks], dim=-1)
        return self.values(joined.softmax(-1)[..., :-1])


class Marked(nn.Module):
    """What is joined had a number added to all of it, and then something else."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.randn(1))
        self.first, self.join = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.join(torch.cat([(first + self.mark) + x, first.tanh()], dim=2)).tanh()


class Normed(nn.Module):
    """What is joined has its channels last: dense, it would be for another kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 1), nn.Linear(8, 8)
        self.norm, self.mark = nn.BatchNorm2d(8), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.first(x)).flatten(2).transpose(1, 2)
        return self.last(torch.cat([self.mark.expand(x.shape[0], -1, -1), rows], dim=1)).tanh()


class Pooled(nn.Module):
    """A sum with one reader whose gradient has channels last, and before it one without.

    Which of the two is first says how the gradient of `scale` is summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 16, 1), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.first(x)
        rows = self.last(maps.permute(0, 2, 3, 1)) * self.scale
        maps = maps + rows.permute(0, 3, 1, 2)
        pooled = nn.functional.adaptive_avg_pool2d(maps, 1).flatten(1)
        return torch.cat([pooled[:, None], maps.flatten(2).transpose(1, 2)], dim=1).tanh()


def assert_equal_at_random(model: nn.Module, args: tuple[Tensor, ...]) -> None:
    """A step of four random placements leaves the unsplit model's bits."""
    traced, state = baechi.trace(model, args), copy.deepcopy(model.state_dict())
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(4):
            placed = again_at_random(traced, seed=seed, devices=3)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace().load_state_dict(state)


@pytest.mark.parametrize("kind", [Sinks, Marked, Normed, Pooled])
def test_a_part_of_a_gradient_gives_the_unsplit_model_s_bits(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_equal_at_random(kind(), (torch.randn(2, 4, 16, 16),))


class Looking(nn.Module):
    """Sends two gradients to what it reads, and looks at values: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) * self.two(x)
        return y if y.sum().item() < 1e9 else y * 2


class Results(NamedTuple):
    """One tensor under two names."""

    first: Tensor
    last: Tensor


class Twice(nn.Module):
    """Gives one tensor twice, and looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Results:
        y = self.linear(x)
        y = y if y.sum().item() < 1e9 else y * 2
        return Results(y, y)


# What gives back the tensor that it is given.
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "function": lambda x: functional.dropout(x, 0.0),
    "layer": nn.Dropout(0.0),
}


class Named(nn.Module):
    """A tensor has two names, and one of its readers sends it several gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.twice = nn.Linear(16, 16), Twice()
        self.looking, self.last = Looking(), nn.Linear(16, 16)
        self.same = SAME[kind] if kind in SAME else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.first(x).tanh()
        if self.kind == "results":
            value, other = self.twice(value)
        else:
            other = self.same(value)
        read = self.looking(other)
        return read + self.last(value), other


@pytest.mark.parametrize("kind", some(["results", *SAME], 3))
def test_a_tensor_of_two_names_has_one_gradient(kind: str) -> None:
    torch.manual_seed(0)
    assert_equal_at_random(Named(kind), (torch.randn(64, 16),))


class ForNothing(nn.Module):
    """The last that would send several gradients to a tensor gives what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.looking = nn.Linear(16, 16), Looking()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = self.first(x).tanh()
        normed = functional.rms_norm(value, (16,)) * value
        self.looking(value)
        return normed, value


def test_what_is_for_nothing_hands_no_gradient_on() -> None:
    torch.manual_seed(0)
    assert_equal_at_random(ForNothing(), (torch.randn(64, 16),))


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "elu": functional.elu,
    "selu": functional.selu,
    "celu": functional.celu,
}


class Joined(nn.Module):
    """An activation whose gradient is a part of the gradient of a concatenation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(16, 7), nn.Linear(14, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.cat([ROUNDED[self.kind](self.first(x)), x[:, :7]], dim=1))
        return found


@pytest.mark.parametrize("kind", ROUNDED)
def test_an_activation_s_backward_gets_the_strides_of_the_unsplit_model(kind: str) -> None:
    torch.manual_seed(0)
    assert_equal_at_random(Joined(kind), (torch.randn(64, 16),))


class Kinds(nn.Module):
    """One operator of each kind, which one other reads."""

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        shifted = x + row
        normed = nn.functional.layer_norm(x, [4])
        return (
            row.expand(3, 4),
            shifted.view(2, 6),
            nn.functional.layer_norm(x, [4]),
            torch.cat([nn.functional.layer_norm(x, [4]).relu(), normed]),
            nn.functional.layer_norm(x, [4])[:1],
            x.exp() + x.sin(),
            x.exp().relu_(),
            x.sin() * row,
            x.exp(),
        )


def test_views_sums_and_joins_hand_a_gradient_on_and_others_make_a_new_one() -> None:
    x, row = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    module = baechi.trace(Kinds(), (x, row)).module
    (output,) = module.graph_module.graph.find_nodes(op="output")
    found = [keeps_strides(node, module.facts.nodes) for node in output.all_input_nodes]
    assert found == [True] * 7 + [False] * 2


class Learned(nn.Module):
    """Rows of a parameter, another view of each, a copy in more places, and a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.table = (nn.Parameter(torch.randn(2, 1, 4)) for _ in range(2))

    def forward(self) -> tuple[Tensor, ...]:
        first, second = self.rows
        return first, second.view(4).unsqueeze(0), self.table.expand(2, 3, 4), self.table[:1]


def test_no_view_of_all_of_a_parameter_hands_on_a_gradient_with_its_strides() -> None:
    module = baechi.trace(Learned(), ()).module
    (output,) = module.graph_module.graph.find_nodes(op="output")
    found = [keeps_strides(node, module.facts.nodes) for node in output.all_input_nodes]
    assert found == [False, False, True, True]


class Block(nn.Module):
    """It adds to a value what an operator makes of it that reads it several times."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.inner = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mixed = self.inner(MIXED[self.kind](x)).tanh() * 2
        return torch.where(x > -1, x + mixed, mixed)  # reads it without a gradient, too


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: functional.rms_norm(x, (16,)),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "cdist": lambda x: torch.cdist(x, x) @ x,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x).softmax(-1) @ x,
}


@pytest.mark.parametrize("checkpoint", [None, "1"], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", MIXED)
def test_later_gradients_come_to_an_operator_that_reads_a_value_several_times(
    kind: str, checkpoint: str | None
) -> None:
    torch.manual_seed(0)
    model, args = nn.Sequential(*(Block(kind) for _ in range(3))), (torch.randn(4, 8, 16),)
    traced = baechi.trace(model, args)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for placer in (baechi.RandomPlacer(0), baechi.RandomPlacer(1), "contiguous"):
            placed = place_on(traced, 3, placer, checkpoint=checkpoint, threads_per_device=1)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Apart(nn.Module):
    """The operator's result leads to one output, what adds to it to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        normed = functional.rms_norm(x, (16,))
        return self.last(normed), x * normed.detach() + normed[:1].detach()


@pytest.mark.parametrize("used", [[0], [1], [0, 1]])
def test_a_gradient_that_an_operator_with_none_of_its_own_gathers_goes_on(used: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Apart(), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    placed = place_on(baechi.trace(model, (x,)), 3, baechi.RandomPlacer(2), threads_per_device=1)
    with one_thread():
        for net in (plain, placed):
            outputs = net(x)
            torch.stack([outputs[i].square().sum() for i in used]).sum().backward()
    found = dict(placed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert same(parameter.grad, found[name].grad), name


class Beside(nn.Module):
    """A value read by two branches and by the caller, several times by one of the branches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        if self.kind == "written in place":
            x = x.mul(2.0).tanh_()
        if self.kind == "one node":
            normed = x.masked_scatter(x > 0, x)
        else:
            normed = functional.rms_norm(x, (16,))
        later = self.two(x), self.three(torch.broadcast_tensors(x, self.three.bias)[0])
        return (self.one(normed), *later, *((x,) if self.kind == "returned" else ()))


@pytest.mark.parametrize("kind", ["", "written in place", "one node", "returned"])
def test_later_gradients_that_do_not_depend_on_an_operator_come_to_it_too(kind: str) -> None:
    torch.manual_seed(0)
    model, args = Beside(kind), (torch.randn(5, 16),)
    traced = baechi.trace(model, args)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(3):
            placed = place_on(traced, 3, baechi.RandomPlacer(seed), threads_per_device=1)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Viewed(nn.Module):
    """A value that an operator reads several times, and then another through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, one, two, three = self.layers
        x = first(x)
        return one(functional.rms_norm(x, (16,))) * two(x.flatten(0, 1)).view(x.shape) * three(x)


class Filled(nn.Module):
    """Zeros that need a gradient because of what is written into them, read several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first, one, two, three = self.layers
        filled = torch.zeros_like(x)
        filled[:, 1:] = first(x)[:, :-1]
        other = torch.addcmul(two(x).minimum(filled), three(x), filled)
        return one(filled) + other


@pytest.mark.parametrize("kind", [Viewed, Filled])
def test_gradients_come_in_order_through_views_and_of_what_was_written(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(4, 8, 16),)
    traced = baechi.trace(model, args)
    with one_thread():
        expected = step(copy.deepcopy(model), args, {})
        for seed in range(6):
            placed = place_on(traced, 2, baechi.RandomPlacer(seed), threads_per_device=1)
            assert step(placed, args, {}).differs_from(expected) == []
            placed.unplace()


class Later(nn.Module):
    """An operator that reads a value several times, whose result is written by another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        normed = functional.rms_norm(x, (16,))
        return normed.add_(self.one(x)) + x


def test_what_an_operator_depends_on_does_not_wait_for_it() -> None:
    module = baechi.trace(Later(), (torch.randn(4, 16),)).module
    ((value, rows),) = module.routes.items()
    assert value.name == "linear"
    assert {reader.name: via.name for reader, via in rows.items()} == {"add": "rms_norm"}
