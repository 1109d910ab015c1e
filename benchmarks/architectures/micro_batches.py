"""A step of one architecture in two micro-batches, beside the loop over them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.architectures.comparison import differences, in_words, scalar
from benchmarks.architectures.forms import resized
from benchmarks.architectures.placing import at_random, errors_noted
from torch import nn
from torch.utils._pytree import tree_map_only

from baechi.tracing.pytrees import Parts, tensors_in

COUNT, BATCH = 2, 4


def check_step(row: dict[str, Any], name: str, model: nn.Module, call: tuple[Any, Any]) -> None:
    """Note in the row what happened."""
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, resized(name, call, BATCH))
    parts = [_part((args, kwargs), number) for number in range(COUNT)]
    own = _own_loss(copy.deepcopy(model)(*parts[0][0], **parts[0][1])) is not None
    wanted, again = (_loop(copy.deepcopy(model), parts, own) for _ in range(2))
    if unstable := differences(wanted, again):
        row["problems"].append(f"the unsplit model differs from itself: {unstable[0]}")
        return
    with errors_noted(row["problems"]):
        placed = at_random(model, 1, microbatches=COUNT)
        torch.manual_seed(3)
        loss = {} if own else {"loss": _criterion, "targets": torch.zeros(BATCH)}
        value = placed.step(*copy.deepcopy(args), **copy.deepcopy(kwargs), **loss)
        row["ops"], row["rungs"] = len(placed.traced.ops), [placed.traced.rung]
        wrong = differences(wanted, {"loss": value, **_left(placed)})
        row["problems"] += [in_words(wrong, wanted)] if wrong else []
        pairs = zip(placed.schedule.peak_bytes, placed.measure(steps=1).peak_bytes, strict=True)
        row["peaks"] = [list(pair) for pair in pairs]
        placed.unplace()


def _loop(model: nn.Module, parts: Sequence[Any], own: bool) -> dict[str, Any]:
    """What the loop over the micro-batches leaves that `placed.step` stands for."""
    torch.manual_seed(3)
    total = torch.zeros(())
    for args, kwargs in copy.deepcopy(list(parts)):
        found = model(*args, **kwargs)
        loss = _own_loss(found) if own else _criterion(found, None)
        (1 / COUNT * loss).backward()  # type: ignore[operator]
        total = total + 1 / COUNT * loss.detach()  # type: ignore[union-attr]
    return {"loss": total, **_left(model)}


def _left(model: nn.Module) -> dict[str, Any]:
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return gradients | {f"buffer {name}": value.clone() for name, value in model.named_buffers()}


def _criterion(found: Any, _: Any) -> torch.Tensor:
    """A loss that every output which has a gradient has a part in."""
    outputs = Parts(look_into=True)
    outputs.structure(found)
    return torch.stack([scalar(t) for t in outputs.tensors if t.requires_grad]).sum()


def _own_loss(found: Any) -> torch.Tensor | None:
    """The loss that a model returns itself."""
    if isinstance(found, torch.Tensor):
        return None if found.dim() else found
    return getattr(found, "loss", None)


def _part(call: Any, number: int) -> Any:
    """A micro-batch, as `place` cuts it: along the first size that is the first tensor's."""
    size = next(tensor.shape[0] for tensor in tensors_in(call) if tensor.dim())
    length = size // COUNT

    def part(tensor: torch.Tensor) -> torch.Tensor:
        dim = next((dim for dim, own in enumerate(tensor.shape) if own == size), None)
        return tensor if dim is None else tensor.narrow(dim, number * length, length)

    return tree_map_only(torch.Tensor, part, call)
