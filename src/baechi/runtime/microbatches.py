"""Steps of micro-batches with the loss inside: forward and backward of all in one phase.

    for c in chunks: (w_c * loss(model(c), t_c)).backward()

is what `train` does, bit for bit, with several devices at work at once.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from baechi.errors import ExecutionError
from baechi.runtime.autograd.step import Totals
from baechi.runtime.executable import Executable
from baechi.runtime.step_function import sum_up
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.storages import key_of
from baechi.torch_support.torch_internals import accumulation_hooks, gradient_hooks
from baechi.tracing.calling_convention import Call
from baechi.tracing.observers import observing


def train(
    executable: Executable, calls: Sequence[Call], weights: Sequence[float], meter: Meter | None
) -> torch.Tensor:
    """The weighted sum of the losses of all micro-batches; their gradients are in `.grad`.

    Raises:
        ExecutionError: An argument needs a gradient, or a parameter has a hook on its gradient.
    """
    for name, tensor in zip(calls[0].names, calls[0].tensors, strict=True):
        if tensor.requires_grad:
            raise ExecutionError(
                f"argument {name!r} of a step needs a gradient, and a step gives gradients to "
                "parameters alone. Detach it; or call the placed model and go backward from a "
                "loss of your own."
            )
    executor, steps = executable.begun(calls, meter)
    bound = executor.bound
    trained = [parameter for parameter in bound.parameters if parameter.requires_grad]
    if any(gradient_hooks(parameter) for parameter in trained):
        raise ExecutionError(
            "a parameter has a hook on its gradient (register_hook), which a loop over "
            "micro-batches would run for each of them, and a step has their sum alone. Use "
            "register_post_accumulate_grad_hook, which runs once a step."
        )
    (node, row), *_ = bound.results.items()
    (loss,) = executable.module.facts.nodes[node].values
    begun = [parameter.grad for parameter in bound.parameters]
    totals, place = Totals(begun), executable.places[row.device]
    for step, weight in zip(steps, weights, strict=True):
        step.totals = totals
        seed = torch.full(loss.shape, weight, dtype=loss.dtype, device=place)
        step.seed(row.grads[0], row.device, seed)
        del seed
    with torch.enable_grad(), observing() if executable.observed else nullcontext():
        executor.run(steps, 0)
    found = sum_up(steps, bound, totals)
    executor.meet(steps[0])
    total = torch.zeros((), dtype=loss.dtype, device=place)
    for number, (step, weight) in enumerate(zip(steps, weights, strict=True)):
        part = weight * step.results[0].detach()
        total = total + part if number else part
    taken: set[int] = set()  # storages: two parameters that are added have one gradient
    for parameter in trained:
        gradient = found[parameter]
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = _own(gradient, parameter, taken)
        for hook in accumulation_hooks(parameter):
            hook(parameter)
    return total


def _own(
    gradient: torch.Tensor, parameter: torch.nn.Parameter, taken: set[int]
) -> torch.Tensor:
    """A gradient in memory of its own, laid out as its parameter, as autograd would leave it."""
    if gradient.layout is not torch.strided:
        return gradient.detach()
    storage = gradient.untyped_storage()
    whole = storage.nbytes() == gradient.nbytes and key_of(storage) not in taken
    if whole and gradient.stride() == parameter.stride():
        taken.add(key_of(storage))
        return gradient.detach()
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
