"""State carried from call to call in attributes of a model, which a split model does not carry."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from baechi.errors import TraceError
from baechi.torch_support.tracer_internals import quiet
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call
from baechi.tracing.effect_recorder import named_state
from baechi.tracing.model_notes import draws_kept, notes_kept
from baechi.tracing.observers import without_observers
from baechi.tracing.rungs import copies_of_state, run_on_copies
from baechi.tracing.side_effects import unchanged


def refuse_carried(model: nn.Module, traced: Traced, earlier: Sequence[Traced]) -> None:
    """Refuse what goes on from call to call in an attribute, where that decides a result.

    The example runs anew after a call that sets what this forward reads: itself, or another.
    Where forward notes what nobody reads, or what would be the same, the results are equal. A
    model on meta, or on several devices, does not run.

    Args:
        model: The model, whose Python a split one does not run.
        traced: A call of it.
        earlier: Other calls of it.

    Raises:
        TraceError: The model would give other results from the second call on.
    """
    names, call = {name for _, name in traced.module.reads}, traced.module.call
    for other in (traced, *earlier):
        carried = [name for name in other.module.sets if name.rpartition(".")[2] in names]
        if not carried:
            continue
        before = other.module.call
        tensors = (*named_state(model).values(), *call.tensors, *before.tensors)
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1 or torch.device("meta") in devices:
            continue
        try:
            wanted = _second(model, before, call, carried=False)
            differs = not _are_equal(wanted, _second(model, before, call, carried=True))
            differs = differs and _are_equal(wanted, _second(model, before, call, carried=False))
        except Exception:  # whatever the model's code raises after a call that may never come
            continue
        if differs:
            raise TraceError(
                f"forward of this {type(model).__name__} reads {', '.join(carried[:4])}, which an "
                "earlier call sets: it would give other results in a second call, and a split "
                "model would not. Let what goes on from call to call be an argument, or a buffer "
                "that forward writes into (`self.state.copy_(new)`)."
            )


def _second(
    model: nn.Module, first: Call, second: Call, *, carried: bool
) -> tuple[torch.Tensor, ...]:
    """What forward gives of the second of two calls, of which nothing stays.

    Buffers are as the first one leaves them; and attributes, if these are carried, too.
    """
    copies = copies_of_state(model)
    with quiet(), unchanged(model), notes_kept(model), without_observers(model), torch.no_grad():
        # What Python draws is the same in each.
        with nullcontext() if carried else notes_kept(model), draws_kept(model):
            run_on_copies(model, first, copies)
        return run_on_copies(model, second, copies)


def _are_equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if tensors are equal in every bit."""
    return len(ones) == len(others) and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and torch.equal(_bytes(one), _bytes(other))
        for one, other in zip(ones, others, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.detach().reshape(-1).contiguous().view(torch.uint8)
