"""The forms in which users run an architecture, beside that of the catalog."""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from benchmarks.architectures.catalog import example
from benchmarks.architectures.plain import PLAIN
from benchmarks.architectures.small import Example
from torch.utils._pytree import tree_map

from baechi.tracing.pytrees import tensors_in

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MICRO_BATCHES = "microbatches"
FORMS = {
    "dropout": "as the configuration has it, at four seeds",
    "cache": "use_cache as the configuration has it",
    "checkpointing": "gradient_checkpointing_enable()",
    "autocast": "forward casts to bfloat16",
    "bfloat16": "weights and arguments",
    "float16": "weights and arguments",
    MICRO_BATCHES: "a step of two, beside the loop over them",
}


def formed(name: str, forms: Collection[str]) -> Example:
    """The catalog's model and arguments of this name in these forms; see `autocast`, too."""
    model, args, kwargs = example(name, dropout="dropout" in forms, cache="cache" in forms)
    if "checkpointing" in forms:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    for dtype in (_DTYPES[form] for form in forms if form in _DTYPES):
        model = model.to(dtype)
        args, kwargs = tree_map(lambda value, to=dtype: _cast(value, to), (args, kwargs))
    return model, args, kwargs


def described(forms: Collection[str]) -> str:
    """The forms with what they mean."""
    return ", ".join(f"{form} ({FORMS[form]})" for form in forms)


def autocast(forms: Collection[str]) -> torch.autocast:
    """What forward runs in."""
    return torch.autocast("cpu", torch.bfloat16, enabled="autocast" in forms)


def seeds(forms: Collection[str]) -> tuple[int, ...]:
    """The seeds of the steps that are compared."""
    return (3, 0, 1, 2) if "dropout" in forms else (3,)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


# Their arguments' first sizes differ: several texts or patches for an image. A call of more of
# them is the same call several times.
_REPEATED = {"OwlViTForObjectDetection", "Qwen2VLForConditionalGeneration"}


def resized(name: str, call: Any, batch: int) -> Any:
    """The arguments with another batch, of tensors whose first size is the first one's."""
    if name in PLAIN and inspect.signature(PLAIN[name]).parameters:
        return PLAIN[name](batch)[1:]
    own = next((tensor.shape[0] for tensor in tensors_in(call) if tensor.dim()), None)

    def change(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if name in _REPEATED:
            rows = torch.arange(batch * len(value)) % len(value)
        elif len(value) == own:
            rows = torch.arange(batch) % own
        else:
            return value
        return value.detach()[rows].requires_grad_(value.requires_grad)

    return tree_map(change, call)
