"""Blocks of forward without gradients or under autocast are split, and compute what they did."""

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import placed
import pytest
import torch
from seeds import covering
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.tracing.lowering import TracedModule
from baechi.tracing.modes import Under


def bf16(cached: bool | None = None) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)


Block = Callable[[], AbstractContextManager[Any]]
_BLOCKS: Final[Mapping[str, Block]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "bf16": bf16,
    "bf16, no cache": lambda: bf16(False),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


def module_of(traced: baechi.Traced) -> TracedModule:
    module: TracedModule = traced.module
    return module


class Backbone(nn.Module):
    """Most of its layers are in a block of forward."""

    def __init__(self, *blocks: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(_BLOCKS[block]())
            x = self.layers(x)
        return self.last(x.float())


@pytest.mark.parametrize(
    "blocks",
    [
        *(("no_grad",), ("bf16",), ("fp16",), ("bf16", "off"), ("no_grad", "enable_grad")),
        *(("no_grad", "bf16"), ("bf16", "no_grad"), ("bf16", "no_grad", "off")),
    ],
    ids=" ".join,
)
def test_a_backbone_in_a_block_is_split(blocks: tuple[str, ...]) -> None:
    traced = placed.assert_as_unsplit(Backbone(*blocks), (torch.randn(3, 8),))
    assert max(len(op.parameters) for op in traced.ops) <= 2
    if "enable_grad" not in blocks and "no_grad" in blocks:
        trained = {name for op in traced.ops if op.differentiable for name in op.parameters}
        assert trained == {"last.weight", "last.bias"}


def test_a_backbone_under_inference_mode_is_split() -> None:
    model = Backbone("inference")
    traced = baechi.trace(model, (torch.randn(3, 8),))
    assert max(len(op.parameters) for op in traced.ops) <= 2


# What a program of a forward may do, of values that it made before.
_STEPS: Final[Mapping[str, Callable[["Program", Tensor, Tensor], Tensor]]] = {
    "linear": lambda m, a, _: m.linear(a if torch.is_autocast_enabled("cpu") else a.float()),
    "add": lambda m, a, b: m.other(a.float()) + b,
    "product": lambda _, a, b: a.to(b.dtype) @ b.T @ b / 40,
    "weight": lambda m, a, _: a * m.weight,
    "float": lambda _, a, __: a.float(),
    "contiguous": lambda _, a, __: a.contiguous(),
    "norm": lambda m, a, _: m.norm(a.float()),
    "softmax": lambda _, a, __: a.softmax(-1),
    "inside": lambda _, a, b: torch.einsum("ij,kj->ik", a.to(b.dtype), b) @ b / 40,
    "written": lambda _, a, b: a.clone().mul_(0.5).add_(b),
    "view": lambda _, a, __: a.view(4, 2, 16).transpose(0, 1).reshape(8, 16),
    "broadcast": lambda _, a, b: a + functional.mse_loss(a.float(), b.float()),
    "detached": lambda _, a, b: a.detach() * b,
    "stack": lambda _, a, b: torch.stack([a[:, :8], b[:, 8:].to(a.dtype)], 0).view(8, 16),
}


class Program(nn.Module):
    """A random program: steps, and blocks of steps in one of some modes."""

    def __init__(self, seed: int, blocks: list[str]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.weight = nn.LayerNorm(16), nn.Parameter(torch.ones(16))
        self.rows = self._rows(random.Random(seed), blocks, 0)

    def _rows(self, rng: random.Random, blocks: list[str], depth: int) -> list[Any]:
        return [
            (rng.choice(blocks), self._rows(rng, blocks, depth + 1))
            if depth < 3 and rng.random() < 0.35
            else (rng.choice([*_STEPS]), rng.random(), rng.random())
            for _ in range(rng.randint(1, 4))
        ]

    def _run(self, rows: list[Any], made: list[Tensor]) -> None:
        for name, first, *second in rows:
            if second:
                one = made[int(first * len(made))]
                other = made[-1 if second[0] < 0.5 else int(second[0] * len(made))]
                made.append(_STEPS[name](self, one, other))
            else:
                with _BLOCKS[name]():
                    self._run(first, made)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = [x, self.linear(x)]
        self._run(self.rows, made)
        loss = sum(((i + 1) * one.float()).sin().mean() for i, one in enumerate(made))
        assert isinstance(loss, Tensor)
        return loss, made[-1]


_KINDS: Final = {
    "both": ["no_grad", "no_grad", "bf16"],
    "all": ["no_grad", "bf16", "bf16, no cache", "off", "enable_grad"],
}


@pytest.mark.parametrize(("kind", "around"), covering([*_KINDS], [False, True]))
def test_random_programs_are_as_unsplit(kind: str, around: bool) -> None:
    """Of 100 like these torch.export's own blocks gave 19 other gradients, and three no trace."""
    split = 0
    for seed in range(8):
        model, x = Program(seed, _KINDS[kind]), torch.randn(8, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            split += len(placed.assert_as_unsplit(model, (x,), seeds=1).ops)
    assert split > 8 * 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_many_random_programs_are_as_unsplit(kind: str) -> None:
    for seed in range(100, 250):
        placed.assert_as_unsplit(Program(seed, _KINDS[kind]), (torch.randn(8, 16),))


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), bf16():
            x = x * 2
            with torch.enable_grad():
                x = self.linear(x)
            x = x.float() * 3
        return self.linear(x)


def test_torch_still_loses_blocks_inside_of_blocks() -> None:
    """Else `tracer_internals.switches_kept` is there for splits alone."""
    model, x = Lost(), torch.randn(3, 8)
    placed.assert_as_unsplit(model, (x,))

    def gradient(module: nn.Module) -> Tensor:
        model.zero_grad()
        module(x).sum().backward()
        assert model.linear.weight.grad is not None
        return model.linear.weight.grad.clone()

    exported = torch.export.export(model, (x,), strict=False).module()
    assert not torch.equal(gradient(model), gradient(exported))


def test_casts_are_nodes_and_what_casts_inside_runs_under_autocast() -> None:
    model, x = Program(0, ["bf16"]), torch.randn(8, 16)
    model.rows = [("bf16", [("inside", 0.9, 0.9), ("linear", 0.9, 0.9), ("linear", 0.9, 0.9)])]
    graph = module_of(placed.assert_as_unsplit(model, (x,))).graph_module.graph
    targets = [node.target for node in graph.nodes]
    assert [str(one) for one in targets if isinstance(one, Under)] == [
        "aten.einsum.default under {'cpu': torch.bfloat16}"
    ]
    # Two readers share the casts of a weight and a bias; the product after `einsum` casts both.
    casts = [node for node in graph.nodes if node.target is torch.ops.aten.to.dtype]
    weights = [node for node in casts if node.all_input_nodes[0].op == "get_attr"]
    assert len(weights) == 2
    assert all(len(node.users) == 2 for node in weights)


class Handed(nn.Module):
    """What a block hands out, in an eager run, is the very tensor that it gets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        with torch.no_grad():
            if self.kind == "broadcast":
                z, _ = torch.broadcast_tensors(y, x)
            elif self.kind == "written":
                z = y.mul_(2)
            else:
                z = y.float() if self.kind == "float" else y.contiguous()
        return (z * x).sin(), y.cos()


@pytest.mark.parametrize("kind", ["broadcast", "written", "float", "contiguous"])
def test_what_a_block_hands_out_as_it_is_has_its_gradient(kind: str) -> None:
    placed.assert_as_unsplit(Handed(kind), (torch.randn(3, 8),))


class Hooked(Backbone):
    """A hook sees what is in the block."""

    def __init__(self, *blocks: str) -> None:
        super().__init__(*blocks)
        self.seen: list[tuple[bool, bool]] = []
        self.layers[1].register_forward_hook(self._see)

    def _see(self, _: nn.Module, __: Any, ___: Any) -> None:
        self.seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))


@pytest.mark.parametrize("blocks", [("no_grad",), ("bf16",), ("bf16", "no_grad"), ()])
def test_a_hook_runs_in_the_modes_of_its_block(blocks: tuple[str, ...]) -> None:
    model, x = Hooked(*blocks), torch.randn(3, 8)
    module = placed.at_random(model, (x,))
    model.seen.clear()
    module(x)
    assert model.seen == [("no_grad" not in blocks, "bf16" in blocks)]
    module.unplace()


class Twice(torch.autograd.Function):
    """A function of its own, that tells whether its argument needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (3 if ctx.needs_input_grad[0] else 2)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Own(nn.Module):
    def __init__(self, *blocks: str) -> None:
        super().__init__()
        self.linear, self.blocks = nn.Linear(8, 8), blocks

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(_BLOCKS[block]())
            z = Twice.apply(self.linear(y))
        return self.linear(z.float()) + y


@pytest.mark.parametrize("blocks", [("bf16",), ("bf16", "no_grad"), ("no_grad", "bf16")])
def test_a_function_of_ones_own_runs_in_its_block(blocks: tuple[str, ...]) -> None:
    x = torch.randn(3, 8)
    keys = [op.key for op in placed.assert_as_unsplit(Own(*blocks), (x,)).ops]
    assert keys == [op.key for op in baechi.trace(Own(*blocks), (x,)).ops]  # without addresses


class Averaged(nn.Module):
    """As in BYOL: a teacher is the mean of students, which forward itself moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.mul_(0.5).add_(now, alpha=0.5)
            wanted = self.teacher(x)
        return functional.mse_loss(self.student(x), wanted)


def test_parameters_may_be_moved_in_a_block_without_gradients() -> None:
    x = torch.randn(3, 8)
    with placed.one_thread():
        expected = placed.step(Averaged(), (x,), {})
        module = placed.at_random(Averaged(), (x,))
        assert not expected.differs_from(placed.step(module, (x,), {}))
    module.unplace()


def test_a_family_has_blocks_too() -> None:
    model = Backbone("no_grad", "bf16")
    module = placed.lazily(model, placer=baechi.RandomPlacer(0))
    with placed.one_thread():
        for batch in (2, 5, 3):
            x = torch.randn(batch, 8)
            expected, actual = (
                placed.step(each, (x,), {}) for each in (copy.deepcopy(model), module)
            )
            assert not expected.differs_from(actual)
    assert repr(module).endswith("1 specialization)")
    module.unplace()


@pytest.mark.slow
def test_what_casts_inside_is_compiled() -> None:
    model, x = Program(0, ["bf16"]), torch.randn(8, 16)
    model.rows = [("bf16", [("inside", 0.9, 0.9), ("linear", 0.9, 0.9)])]
    module = placed.lazily(model, placer=baechi.RandomPlacer(0), compile=True)
    loss, _ = module(x)
    loss.backward()
    assert module.remarks == ()
    torch.testing.assert_close(loss, copy.deepcopy(model)(x)[0], rtol=1e-2, atol=1e-2)
    module.unplace()
