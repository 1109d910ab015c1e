"""The batch dimension by two traces, and operators that mix samples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import baechi
from baechi.errors import InputError
from baechi.runtime.batched_calls import ModelWithLoss
from baechi.tracing.batch_dimension import BatchDimensions, batch_dimensions
from baechi.tracing.calling_convention import canonical_call


class Model(nn.Module):
    """A layer, and what a test does with its result."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.time, self.own = nn.LSTM(4, 4), forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, self.layer(x))


def dimensions(
    forward: Callable[..., Any], shape: tuple[int, ...] = (3, 4), dim: int = 0, loss: Any = None
) -> BatchDimensions:
    model = Model(forward)
    module, kwargs = (model, {}) if loss is None else (ModelWithLoss(model, loss), {})
    kwargs = {} if loss is None else {"targets": torch.randn(shape)}
    call = canonical_call(module, (torch.randn(shape),), kwargs)
    call = replace(call, dims=(dim,) * len(call.tensors))
    args, kwargs = call.structure.fill(call.tensors)
    traced = baechi.trace(module, args, kwargs)
    return batch_dimensions(traced, call, loss=loss is not None, say=lambda _: None)


def test_dimensions_of_outputs_follow_the_samples() -> None:
    found = dimensions(lambda _, h: {"a": h.t(), "b": (h[:, None] * torch.ones(2, 4), 7)})
    assert found.outputs[:2] == (1, 0)
    assert found.remarks == ()
    assert dimensions(lambda _, h: h.unfold(-1, 2, 1)).outputs == (0,)


def test_one_sample_is_told_apart_from_any_number() -> None:
    assert dimensions(lambda _, h: h.view(h.shape[0], 2, 2), (1, 4)).outputs == (0,)


def test_samples_in_rounds_are_told_apart_and_put_back() -> None:
    def experts(_: Model, h: Tensor) -> Tensor:
        """As those of Llama 4, of which each reads all tokens."""
        read = h.repeat(4, 1) * h.t().reshape(-1, 1)
        return h + torch.bmm(read.view(4, -1, 4), torch.ones(4, 4, 4)).sum(0)

    assert dimensions(experts).outputs == (0,)
    time_first = dimensions(lambda _, h: h.reshape(-1, 4).view(2, -1, 4) * 2, (2, 3, 4), 1)
    assert time_first.outputs == (1,)


def test_a_tensor_may_give_its_type_to_one_without_samples() -> None:
    table = torch.ones(4, dtype=torch.float64)
    assert dimensions(lambda _, h: h + table.type_as(h)).outputs == (0,)


def test_the_last_token_of_every_sample_is_its_own() -> None:
    def last(_: Model, h: Tensor) -> Tensor:
        return h[torch.arange(h.shape[0], device=h.device), (h > 0).sum(1).clamp(max=3)]

    assert dimensions(last).outputs == (0,)


def test_batch_norm_is_remarked_and_evaluation_is_not() -> None:
    assert "once for each" in dimensions(lambda m, h: m.norm(h)).remarks[0]
    assert dimensions(lambda m, h: m.norm.eval()(h)).remarks == ()


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda _, h: h @ h.t(), "matmul.*more than one dimension"),
        (lambda _, h: h.softmax(0), "softmax.*along the dimension of the batch"),
        (lambda _, h: h.cumsum(0), "cumsum.*along the dimension of the batch"),
        (lambda _, h: h.sort(dim=0).values, "sort.*along the dimension"),
        (lambda _, h: h.unfold(0, 2, 1), "unfold.*mixes the samples"),
        (lambda _, h: h.flip(0), "flip.*along the dimension"),
        (lambda _, h: torch.cat([h, h]), "cat.*along the dimension"),
        (lambda _, h: h - h.mean(0), "mean.*mixes the samples.*sub.*for every sample"),
        (lambda _, h: functional.normalize(h, dim=0), "norm.*mixes the samples"),
        (lambda _, h: h[torch.randperm(h.shape[0])], "index.*picks samples"),
        (lambda _, h: h.repeat(2, 1), "repeat .*returns the samples in rounds"),
        (lambda _, h: h.repeat(2, 1) + h.repeat_interleave(2, 0), "add .*in different orders"),
        (lambda _, h: h.expand(2, *h.shape).reshape(-1, 4), "reshape .*in rounds"),
        (lambda _, h: h.t().reshape(-1) + h.reshape(-1), "add .*in different orders"),
        (lambda _, h: h.reshape(2, -1), "reshape .*mixes the samples.*takes samples apart"),
        (lambda _, h: h.mean(0), "mean.*the model returns what is made of that"),
        (lambda _, h: (h, h.sum()), "sum.*placed.step"),
        (lambda _, h: (h, torch.arange(3)), "output 1 .* has no batch dimension"),
        (lambda _, h: h if h.shape[0] == 3 else h + 1, "runs other operators for twice"),
    ],
)
def test_a_mixer_is_refused_by_its_name_and_line(forward: Callable[..., Any], why: str) -> None:
    with pytest.raises(InputError, match=why) as found:
        dimensions(forward)
    assert "output 1" in why or "test_batch_dimension.py" in str(found.value)


def test_a_model_whose_first_call_chooses_a_mode_is_compared_in_that_mode() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.layer = "sparse", nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.kind == "sparse":
                self.kind, x = "full", x + torch.zeros(4)
            return self.layer(x)

    model, x = Choosing(), torch.rand(3, 4)
    call = replace(canonical_call(model, (x,), {}), dims=(0,))
    traced = baechi.trace(model, (x,))
    assert model.kind == "full"
    assert batch_dimensions(traced, call, loss=False, say=lambda _: None).outputs == (0,)


def test_experts_that_sort_all_tokens_are_refused_with_what_to_call() -> None:
    class Experts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(dim=0).values

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def set_experts_implementation(self, _: str) -> None:
            """As models of transformers have it."""

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x)

    call = replace(canonical_call(Mixture(), (torch.ones(4, 2),), {}), dims=(0,))
    traced = baechi.trace(Mixture(), (torch.ones(4, 2),))
    with pytest.raises(InputError, match=r"sort.*set_experts_implementation\(.batched_mm.\)"):
        batch_dimensions(traced, call, loss=False, say=lambda _: None)


def test_time_is_not_taken_for_the_batch() -> None:
    with pytest.raises(InputError, match=r"time is along .* batch=\{"):
        dimensions(lambda m, h: m.time(h)[0], (3, 2, 4))
    assert dimensions(lambda m, h: m.time(h)[0], (2, 3, 4), 1).outputs == (1,)


def test_an_argument_that_forward_writes_is_refused() -> None:
    class Writer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1) * 2

    call = replace(canonical_call(Writer(), (torch.ones(3),), {}), dims=(0,))
    traced = baechi.trace(Writer(), (torch.ones(3),))
    with pytest.raises(InputError, match="writes into its argument 'x'"):
        batch_dimensions(traced, call, loss=False, say=lambda _: None)


def test_a_write_to_what_the_backward_reads_is_refused() -> None:
    def clip(model: Model, h: Tensor) -> Tensor:
        model.layer.weight.data.clamp_(-1, 1)
        return model.layer(h)

    with pytest.raises(InputError, match=r"clamp_ .*writes into 'layer.weight' in every micro"):
        dimensions(clip)


@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        lambda y, t: ((y - t) ** 2).sum() / (t > 0).sum(),
        lambda y, t: functional.cross_entropy(y, t.softmax(1)),
    ],
)
def test_a_loss_may_add_up_samples(loss: Any) -> None:
    assert dimensions(lambda _, h: h, loss=loss).outputs == (None,)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda y, t: functional.cross_entropy(y @ t.t(), torch.arange(len(y))), "more than one"),
        (lambda y, _: functional.cross_entropy(y, torch.arange(3)), "2 times .* does not run"),
        (lambda y, t: (y.softmax(0) * t).mean(), "softmax.*along the dimension"),
        (lambda y, t: (y - t).square().mean(1), r"shape \[3\]; it must be a scalar"),
    ],
)
def test_a_loss_that_compares_samples_is_refused(loss: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        dimensions(lambda _, h: h, loss=loss)
