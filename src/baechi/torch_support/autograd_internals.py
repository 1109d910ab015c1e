"""Private names of torch's autograd engine.

Seen to work with torch 2.11 and 2.13; `tests/torch_support/test_internals.py` names the one that a
new version breaks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def gradients(
    outputs: Sequence[GradientEdge],
    seeds: Sequence[torch.Tensor],
    inputs: Sequence[GradientEdge | torch.Tensor],
    *,
    keep: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` without its checks, which take as long as the engine itself.

    Args:
        outputs: Where to begin.
        seeds: The gradient of each output.
        inputs: The tensors to differentiate by; None comes back for one that is not reached.
        keep: Whether to leave the graph for another backward.
    """
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        tuple(outputs),
        tuple(seeds),
        keep,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return found


def delayed_error(message: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Aliases of the tensors behind a node that keeps nothing and raises in a backward.

    torch puts this node behind a `once_differentiable` backward.
    """
    node = torch._C._functions.DelayedError(message, len(tensors) + 1)
    seed = torch.empty(0, requires_grad=True)  # one input must need a gradient for all to have one
    found: Sequence[torch.Tensor] = node(seed, *tensors)
    return found[1:]


def backward_id() -> int:
    """The number of the backward that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def is_graph_kept() -> bool:
    """True if the running backward was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place writes to the tensor's memory."""
    return tensor._version


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the number of in-place writes to the tensor's memory, for all its aliases."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def allow_writes(view: torch.Tensor) -> None:
    """Let autograd treat a view that a function made as one that the caller made.

    It refuses writes into the former, since the function's backward would go unused.
    """
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.DEFAULT)


def gradient_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """The hooks that `register_hook` gave a tensor."""
    return tensor._backward_hooks or {}


def watch_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """A dict that gets all hooks that a tensor with a graph is ever given.

    The hooks run though the tensor is dropped, and so does the dict outlive it.
    """
    hooks: OrderedDict[int, Any] = OrderedDict()
    tensor._backward_hooks = hooks
    assert tensor.grad_fn is not None  # it has a graph
    tensor.grad_fn._register_hook_dict(tensor)
    return hooks


def saved_tensor_hooks() -> Hooks | None:
    """The innermost hooks (pack, unpack) on what autograd saves; None where there are none."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def pop_saved_tensor_hooks() -> None:
    """Switch the innermost hooks on what autograd saves off."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensor_hooks(hooks: Hooks) -> None:
    """Switch hooks on what autograd saves on, as the innermost."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
