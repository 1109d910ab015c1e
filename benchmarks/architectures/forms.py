"""The forms in which users run an architecture, beside that of the catalog."""

from collections.abc import Collection
from typing import Any

import torch
from benchmarks.architectures.catalog import example
from benchmarks.architectures.small import Example
from torch.utils._pytree import tree_map

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS = {
    "dropout": "as the configuration has it, at four seeds",
    "cache": "use_cache as the configuration has it",
    "checkpointing": "gradient_checkpointing_enable()",
    "autocast": "forward casts to bfloat16",
    "bfloat16": "weights and arguments",
    "float16": "weights and arguments",
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
