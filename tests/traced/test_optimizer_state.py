"""Optimizer state, computed from shapes, against what torch's optimizers really keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import baechi
from baechi.records.optimizer_state import OPTIMIZERS, TrainedParameter, optimizer_state_bytes

optim = torch.optim
REAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "none": optim.SGD,
    "sgd": optim.SGD,
    "momentum": lambda p: optim.SGD(p, momentum=0.9),
    "adam": optim.Adam,
    "adam+amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "adamw": optim.AdamW,
    "adamw+amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "adafactor": optim.Adafactor,
}
SHAPES = [(), (5,), (3, 4), (2, 3, 4), (2, 3, 1, 7)]


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (v for state in optimizer.state.values() for v in state.values())
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def one_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_every_optimizer_is_compared() -> None:
    assert {name.split("+")[0] for name in REAL} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", REAL)
def test_state_is_what_the_optimizer_holds_after_a_step(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = REAL[name]([parameter])
        one_step(optimizer, [parameter])
        computed = optimizer_state_bytes(name, TrainedParameter(shape, dtype.itemsize))
        assert computed == held_bytes(optimizer), shape


@pytest.mark.parametrize(
    ("model_name", "name"),
    [
        *(("gpt2", "adafactor"), ("recurrent", "adamw"), ("resnet_train", "momentum")),
        *(
            pytest.param(model, name, marks=pytest.mark.slow)
            for model in ("gpt2", "t5", "clip", "resnet_train", "recurrent")
            for name in ("momentum", "adamw", "adafactor")
        ),
    ],
)
def test_state_of_a_whole_model(model_name: str, name: str) -> None:
    model, args, kwargs = {**zoo.MODELS, **zoo.AWKWARD}[model_name]()
    traced = baechi.trace(model, args, kwargs)
    named = dict(model.named_parameters())
    used = {n for op in traced.ops for n in op.parameters if n in named}
    parameters = [named[n] for n in sorted(used)]
    optimizer = REAL[name](parameters)
    one_step(optimizer, parameters)
    rows = [parameter for op in traced.ops for parameter in op.trained]
    assert sum(optimizer_state_bytes(name, row) for row in rows) == held_bytes(optimizer)


def test_master_weights_are_copies_of_what_is_smaller_with_state_of_their_own_type() -> None:
    half, single = TrainedParameter((3, 4), 2), TrainedParameter((3, 4), 4)
    master = nn.Parameter(torch.ones(3, 4))  # what a mixed-precision wrapper makes
    optimizer = torch.optim.AdamW([master])
    one_step(optimizer, [master])
    expected = held_bytes(optimizer) + master.numel() * master.element_size()
    assert optimizer_state_bytes("adamw+master", half) == expected
    assert optimizer_state_bytes("adamw+master", single) == optimizer_state_bytes("adamw", single)
    assert optimizer_state_bytes("sgd+master", half) == 48


@pytest.mark.parametrize("name", ["lion", "sgd+amsgrad", "adamw+fast", "+master"])
def test_what_is_unknown_is_refused(name: str) -> None:
    with pytest.raises(baechi.InputError, match=r"unknown"):
        optimizer_state_bytes(name, TrainedParameter((1,), 4))
