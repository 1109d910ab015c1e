"""Private names of `torch.compile`, imported when something is compiled.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_internals.py` names the one that a
new version breaks.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch


def backend_named(name: Any) -> Any:
    """The compiler behind a backend's name; of a function that function."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def refusals() -> tuple[type[Exception], ...]:
    """The errors by which `torch.compile` says that it cannot compile a function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def inductor_options(mode: str) -> dict[str, Any]:
    """Inductor's options in one of its modes."""
    return dict(torch._inductor.list_mode_options(mode))


def records_cuda_graphs() -> bool:
    """True if inductor records CUDA graphs by its configuration."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def keeping_graphs(**settings: bool) -> AbstractContextManager[Any]:
    """The context to compile a function, or run its backward, whose graph may be used twice.

    Buffers that a backward writes over would rule a second one (`retain_graph=True`) out.

    Args:
        settings: More settings of AOTAutograd.
    """
    from torch._functorch import config

    patch: AbstractContextManager[Any] = config.patch({"donated_buffer": False, **settings})
    return patch
