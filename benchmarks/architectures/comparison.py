"""What a model's steps leave, and how two differ: bit by bit."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from baechi.tracing.pytrees import Parts, tensors_in


def step(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 3
) -> dict[str, Any]:
    """What a forward and a backward leave: outputs, gradients, buffers."""
    args, kwargs = copy.deepcopy((tuple(args), dict(kwargs)))
    model.zero_grad()
    torch.manual_seed(seed)
    found = Parts(look_into=True)  # a cache of keys and values is an object
    found.structure(model(*args, **kwargs))
    outputs = found.tensors
    with torch.autocast("cpu", enabled=False):  # torch's advice: what follows forward is outside
        roots = [scalar(t) for t in outputs if t.requires_grad]
        if roots:
            torch.stack(roots).sum().backward()
    left: dict[str, Any] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    left |= {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for index, tensor in enumerate(tensors_in((args, kwargs))):
        left[f"argument {index}"] = tensor.detach()
        left[f"gradient of argument {index}"] = tensor.grad
    return left


def scalar(tensor: torch.Tensor) -> torch.Tensor:
    """A number that every element of a tensor has a part in."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.float().square().mean()


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """What is not equal in every bit."""
    if one.keys() != two.keys():
        return [f"other names: {sorted(one.keys() ^ two.keys())[:4]}"]
    return [
        _difference(name, one[name], two[name]) for name in one if not _same(one[name], two[name])
    ]


def in_words(wrong: Sequence[str], wanted: Mapping[str, Any]) -> str:
    """Some of the differences from what was wanted, with their number."""
    return f"{len(wrong)} of {len(wanted)} differ: {'; '.join(wrong[:3])}"


def _same(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(_numbers(one), _numbers(two))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.nan_to_num(real) if real.is_floating_point() else real


def _difference(name: str, one: Any, two: Any) -> str:
    if one is None or two is None:
        return f"{name}: {'none' if one is None else 'some'}, placed the other way"
    if one.dtype != two.dtype or one.shape != two.shape:
        return f"{name}: {one.dtype}{list(one.shape)}, placed {two.dtype}{list(two.shape)}"
    a, b = _numbers(one).double(), _numbers(two).double()
    worst = float((a - b).abs().max())
    return f"{name}: {worst:.1e} of {float(a.abs().max()):.1e}"
