"""A traced graph where kernels lay out their results otherwise than when it was traced."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import again_at_random, assert_same_values, at_random, step
from steps import case
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import baechi
from baechi.tracing.fx_nodes import SAME_LAYOUT, operator_name

_ATEN = torch.ops.aten


class Attention(nn.Module):
    """As in nanoGPT: `contiguous` does nothing after the CPU's fused attention, before a `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, 4, 4).transpose(1, 2) for z in self.project(x).split(c, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class ChannelsLast(nn.Module):
    """As a detector's head: `contiguous` does nothing after a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x.to(memory_format=torch.channels_last)).relu_()
        return y.permute(0, 2, 3, 1).contiguous().view(x.shape[0], -1, 3).sigmoid()


class Written(nn.Module):
    """The view of a kernel's result is written to, and the result is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = functional.softmax(x, -1)
        y.view(-1).mul_(2)
        return y + functional.softmax(x, 0).view(x.shape)


class OtherLayouts(fx.Interpreter):
    """Gives each new result of an operator in other strides, where kernels are free to do so."""

    def __init__(self, module: fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self._random = random.Random(seed)
        self.changed = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        returns = n.target._schema.returns if isinstance(n.target, torch._ops.OpOverload) else ()
        fresh = bool(returns) and all(row.alias_info is None for row in returns)
        if not fresh or operator_name(n) in SAME_LAYOUT:
            return result
        return pytree.tree_map_only(Tensor, self._laid_out, result)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        order = self._random.sample(range(tensor.dim()), tensor.dim())
        back = [order.index(i) for i in range(tensor.dim())]
        other = tensor.permute(order).contiguous().permute(back)
        self.changed += other.stride() != tensor.stride()
        return other


def targets(traced: baechi.Traced) -> list[Any]:
    return [node.target for node in traced.module.graph_module.graph.nodes]


@pytest.mark.parametrize("kind", [Attention, ChannelsLast])
def test_contiguous_that_did_nothing_in_the_trace_does_what_it_must_elsewhere(kind: type) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn((2, 5, 16) if kind is Attention else (2, 4, 5, 5))
    traced = baechi.trace(model, (x,))
    assert _ATEN.contiguous.default not in targets(traced)
    expected = model(x)
    module = traced.module.graph_module
    assert torch.equal(module(x)[0], expected)  # where it was traced, nothing changes
    for seed in range(4):
        other = OtherLayouts(module, seed)
        assert_same_values(other.run(x)[0], expected, rtol=1e-5, atol=1e-6)
        assert other.changed
    with sdpa_kernel(SDPBackend.MATH):
        assert_same_values(module(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_placed_attention_trains_with_a_kernel_of_another_layout() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = step(copy.deepcopy(model), (x,), {})
    placed = at_random(model, (x,), seed=1)
    assert len(set(placed.placement.devices)) > 1
    with sdpa_kernel(SDPBackend.MATH):
        assert not step(placed, (x,), {}).differs_from(expected)


def test_a_view_that_is_written_to_stays_one() -> None:
    model, x = Written(), torch.randn(3, 4)
    traced = baechi.trace(model, (x,))
    assert targets(traced).count(_ATEN.view.default) == 1
    assert targets(traced).count(_ATEN.reshape.default) == 1
    assert torch.equal(traced.module.graph_module(x)[0], model(x))


def _strided(t: Tensor) -> Tensor:
    return t.contiguous().as_strided((3, 40), (40, 1)) * torch.linspace(0, 1, 40)


def _complex(t: Tensor) -> Tensor:
    pairs = t.contiguous().view(*t.shape[:-1], 4, 2)
    return torch.view_as_real(torch.view_as_complex(pairs) * 2)


def _without_gradients(t: Tensor) -> Tensor:
    with torch.no_grad():
        flat = t.contiguous()
    return flat.as_strided((3, 40), (40, 1)) + t.reshape(3, 40).cos()


def _asked(t: Tensor) -> Tensor:
    if not t.is_contiguous():
        t = t.contiguous()
    return t.as_strided((3, 40), (40, 1)) * 2


def _changed_copy(t: Tensor) -> Tensor:
    copy = t.contiguous()
    copy.mul_(2)
    return t.sin() + copy.cos()


def _changed_source(t: Tensor) -> Tensor:
    copy = t.contiguous()
    t.mul_(2)
    return t.sin() + copy.cos()


def _changed_view(t: Tensor) -> Tensor:
    view = t.mT.reshape(3, 40)  # by its fake tensor a copy
    view.mul_(2)
    return t.sin().sum(-1).sum(-1) + view.cos().sum(-1)


def _counted(t: Tensor) -> Tensor:
    row, column, step = t.stride()
    return t.as_strided((3, 8, 5), (row, step, column)) * torch.linspace(0, 1, 5)


class Turned(nn.Module):
    """The fake kernel of the norm gives strides of its argument, and the real one its own."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.read = nn.Linear(8, 8), nn.BatchNorm1d(8), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.norm(self.linear(x).mT).mT)


_READS = [_strided, _complex, _without_gradients, _asked]
_READS += [_changed_copy, _changed_source, _changed_view, _counted]


@pytest.mark.parametrize("read", _READS)
def test_what_depends_on_a_layout_is_as_unsplit_where_the_fake_layout_is_wrong(
    read: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, x = Turned(read), torch.randn(3, 5, 8)
    expected = step(copy.deepcopy(model), (x,), {})
    traced = baechi.trace(copy.deepcopy(model), (x,))
    for seed in range(2):
        placed = again_at_random(traced, seed=seed, devices=3)
        assert len(set(placed.placement.devices)) > 1
        assert not step(placed, (x,), {}).differs_from(expected)
        placed.unplace().load_state_dict(model.state_dict())
    whole = [row for row in traced.attempts if "strides that the kernel of" in row.reason]
    assert bool(whole) == (read is _counted)


def test_a_result_that_forward_makes_contiguous_is() -> None:
    model, x = Turned(lambda t: t.contiguous()), torch.randn(3, 5, 8)
    placed = at_random(model, (x,))
    assert placed(x).stride() == (40, 8, 1)


def test_torch_still_loses_contiguous() -> None:
    """If this fails, torch is mended: `workarounds.contiguous` may go."""
    program = torch.export.export(Turned(_strided), (torch.randn(3, 5, 8),))
    assert "contiguous" not in str(program.graph)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # of a deep copy
@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "bert", "t5", "llama", "vit", "clip", "nn_transformer"),
        *("lstm_lm", "resnet_eval", "resnet_train", "attention"),
    ],
)
def test_the_models_run_whatever_the_layouts(name: str) -> None:
    it = case(name)
    it.reset()
    # Batch norms of few images make much of how a sum is rounded; an LSTM's state is in fp32.
    dtype, off = (torch.float32, 1e-5) if name == "lstm_lm" else (torch.float64, 1e-9)
    module = copy.deepcopy(it.traced.module.graph_module).to(dtype)
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in it.traced.module.call.tensors]
    with torch.no_grad():
        expected = module(*tensors)
        for seed in range(2):
            other = OtherLayouts(module, seed)
            assert_same_values(other.run(*tensors), expected, rtol=off, atol=off)
            assert other.changed
        with sdpa_kernel(SDPBackend.MATH):
            assert_same_values(module(*tensors), expected, rtol=off, atol=off)
