"""Micro-batches of a call, and steps of them with the loss inside.

    torch.cat([model(c) for c in chunks])                      a call; one loss for all
    for c in chunks: (w_c * loss(model(c), t_c)).backward()    `train`: forward and backward of all
                                                               in one phase

Both bit for bit, with several devices at work at once.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn

from baechi.errors import ExecutionError, InputError, TraceError
from baechi.runtime.autograd.step import Totals
from baechi.runtime.executable import Executable
from baechi.runtime.loss_key import read_by
from baechi.runtime.step_function import sum_up
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.storages import key_of
from baechi.torch_support.torch_internals import accumulation_hooks, gradient_hooks
from baechi.tracing.batch_dimension import NoLossError
from baechi.tracing.calling_convention import Call, canonical_call
from baechi.tracing.observers import observing
from baechi.validation import check_is, check_positive

TARGETS: Final = "targets"
_MOST_CHOSEN: Final = 32  # micro-batches, where their number is to be chosen
# "mean", "sum", or a number for each micro-batch.
BatchWeights: TypeAlias = str | Sequence[float] | torch.Tensor
BatchSpec: TypeAlias = Mapping[str, int | None]


@final
@dataclass(frozen=True)
class Microbatches:
    """How a call is cut into micro-batches.

    Attributes:
        n: Their number; 0 until it is chosen.
        batch: The batch dimension of the arguments that have one, by name; None for the rule that
            all tensors have it first whose first size is that of the first tensor.
    """

    n: int
    batch: BatchSpec | None = None

    def split(self, call: Call) -> list[Call]:
        """The calls of the micro-batches, of views of the tensors; what has no batch is in each.

        Raises:
            InputError: The number does not divide the batch, or a name or dimension is wrong.
        """
        if self.n == 1:
            return [call]
        dims = self._dims(call)
        size = self._size(call, dims)
        if size % self.n or not size:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            less = size - size % self.n
            sizes = f"{less} or {less + self.n}" if less else self.n
            other = f", or microbatches= one of {divisors}" if size else ""
            raise InputError(
                f"a batch of {size} cannot be cut into {self.n} equal micro-batches. Give a batch "
                f"of {sizes} (a DataLoader's last one goes with drop_last=True){other}."
            )
        parts = [
            (tensor,) * self.n if dim is None else torch.split(tensor, size // self.n, dim)
            for tensor, dim in zip(call.tensors, dims, strict=True)
        ]
        return [replace(call, tensors=row, dims=dims) for row in zip(*parts, strict=True)]

    def choices(self, call: Call) -> list[int]:
        """Numbers to choose from: divisors of the batch, each at least twice the one before.

        Raises:
            InputError: The arguments have no one number of samples.
        """
        size, found = self._size(call, self._dims(call)), [1]
        for n in range(2, min(size, _MOST_CHOSEN) + 1):
            if size % n == 0 and n >= 2 * found[-1]:
                found.append(n)
        return found

    def _size(self, call: Call, dims: Sequence[int | None]) -> int:
        """The number of samples."""
        sizes = {
            name: tensor.shape[dim]
            for name, tensor, dim in zip(call.names, call.tensors, dims, strict=True)
            if dim is not None
        }
        if len(set(sizes.values())) != 1:
            found = (
                ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "none has any"
            )
            raise InputError(
                f"the arguments have different numbers of samples: {found}. Name the batch "
                f"dimension of those that have one, of {', '.join(call.names)}: "
                'batch={"x": 0}.'
            )
        return next(iter(sizes.values()))

    def _dims(self, call: Call) -> tuple[int | None, ...]:
        if self.batch is None:
            size = next((tensor.shape[0] for tensor in call.tensors if tensor.dim()), 0)
            return tuple(0 if t.dim() and t.shape[0] == size else None for t in call.tensors)
        found = [self.batch.get(name) for name in call.names]
        for name, dim, tensor in zip(call.names, found, call.tensors, strict=True):
            if dim is not None and not -tensor.dim() <= dim < tensor.dim():
                raise InputError(
                    f"batch has {name!r}: {dim}, but the tensors of this call are {call.shapes}."
                )
        rows = zip(found, call.tensors, strict=True)
        return tuple(None if dim is None else dim % tensor.dim() for dim, tensor in rows)

    def weights(self, weights: BatchWeights) -> list[float]:
        """The weight of each micro-batch.

        Raises:
            InputError: They are neither "mean", "sum" nor so many numbers.
        """
        if isinstance(weights, str) and weights in ("mean", "sum"):
            return [1.0 if weights == "sum" else 1 / self.n] * self.n
        with suppress(TypeError, ValueError):
            rows = [float(weight) for weight in weights]
            if len(rows) == self.n:
                return rows
        raise InputError(
            f'weights is {weights!r}; give "mean", "sum", or a number for each of the {self.n} '
            "micro-batches, such as its share of all tokens."
        )


def check_microbatches(
    model: nn.Module,
    microbatches: int | str | None,
    batch: BatchSpec | None,
    others: Mapping[str, Any],
) -> Microbatches:
    """The micro-batches that `place` was asked for, with options that may not go with them.

    Raises:
        InputError: One of these is wrong, or does not.
    """
    if microbatches is None:
        if batch is not None:
            raise InputError("batch= names dimensions for microbatches=..., which was not given.")
        return Microbatches(1)
    n = 0 if microbatches == "auto" else check_positive(microbatches, "microbatches")
    if n == 0 and others["cuda_graphs"]:
        raise InputError(
            "cuda_graphs= does not go with microbatches='auto', which compares what eager steps "
            "take and hold. Give a number of micro-batches."
        )
    if n != 1 and others["verify"]:
        raise InputError(
            "verify= does not go with microbatches=: verify works on calls of one batch. Give one "
            "of the two."
        )
    if batch is not None:
        check_is(batch, Mapping, "batch")  # type: ignore[type-abstract]
        forward = inspect.signature(model.forward).parameters
        any_name = any(row.kind is inspect.Parameter.VAR_KEYWORD for row in forward.values())
        for name, dim in batch.items():
            if not any_name and str(name).split(".")[0] not in (*forward, "args", TARGETS):
                raise InputError(
                    f"batch has {name!r}: {dim}, but forward of this {type(model).__name__} takes "
                    f"{', '.join(forward)}."
                )
            if dim is not None:
                check_is(dim, int, "a dimension in batch")
    return Microbatches(n, batch)


@final
class ModelWithLoss(nn.Module):
    """A model and its loss, as one module: what a step runs.

    Args:
        model: The model.
        loss: Of its result and the targets; None for a model that returns a loss.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        if not (loss is None or callable(loss)) or isinstance(loss, torch.jit.ScriptModule):
            raise InputError(
                f"loss is a {type(loss).__name__}; give a function in Python, or such a module, of "
                "the model's result and the targets."
            )
        super().__init__()
        # Messages and reports name a module by its class.
        self.__class__ = type(f"{type(model).__name__} with its loss", (type(self),), {})
        self.model = model
        self.loss = loss
        self.values_of_loss = read_by(loss)[1]  # which a trace leaves as they were

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss."""
        if self.loss is not None:
            targets = kwargs.pop(TARGETS)
            loss = self.loss(self.model(*args, **kwargs), targets)
            if not hasattr(loss, "backward"):
                kind = type(loss).__name__.removeprefix("Sym").lower()  # of what is traced
                raise TraceError(f"loss= returns a {kind}, and not a scalar tensor.")
            return loss
        result = self.model(*args, **kwargs)
        first = result[0] if isinstance(result, tuple | list) and result else result
        found = result.get("loss") if isinstance(result, Mapping) else first
        found = getattr(result, "loss", found)
        if not hasattr(found, "backward"):  # which fx can tell of what it traces, too
            raise NoLossError(
                f"{type(self.model).__name__} returns a {type(result).__name__} without a loss; "
                "give it labels, or step(..., targets=..., loss=...)."
            )
        return found


def step_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any
) -> Call:
    """The call of a `ModelWithLoss`, with the model's arguments by their names where they have any.

    Raises:
        InputError: There is a loss and there are no targets, or these and nothing that takes them.
    """
    assert isinstance(module, ModelWithLoss)
    compares = module.loss is not None
    if compares and targets is None:
        raise InputError(
            "loss= compares the model's result with targets=..., which is missing. Where the model "
            "returns its own loss, leave loss= out."
        )
    also = {} if targets is None else {TARGETS: targets}  # without a loss the model's own
    try:
        given = canonical_call(module.model, args, kwargs if compares else {**kwargs, **also})
    except InputError as error:
        hint = (
            " Where the model returns no loss, give loss= beside targets=."
            if not (compares or targets is None)
            else ""
        )
        raise InputError(f"{error}{hint}") from None
    positional, named = given.structure.fill(given.tensors)
    return canonical_call(module, positional, {**named, **also} if compares else named)


def train(
    executable: Executable, calls: Sequence[Call], weights: Sequence[float], meter: Meter | None
) -> torch.Tensor:
    """The weighted sum of the losses of all micro-batches; their gradients are in `.grad`.

    Raises:
        ExecutionError: An argument needs a gradient, a parameter has a hook on its gradient, or no
            parameter would get one.
    """
    if str(calls[0].autocast):
        raise ExecutionError(
            "step() was called under autocast, which would change its backward, too. Let the "
            "model's own forward use autocast, or call the placed model, and backward() outside."
        )
    for name, tensor in zip(calls[0].names, calls[0].tensors, strict=True):
        if tensor.requires_grad:
            raise ExecutionError(
                f"argument {name!r} of a step needs a gradient, and a step gives gradients to "
                "parameters alone. Detach it; or call the placed model and go backward from a "
                "loss of your own."
            )
    with executable.begun(calls, meter) as (executor, steps):
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
        reasons = {
            "the model was placed with training=False": not executable.training,
            "the loss is detached from all parameters": not loss.requires_grad,
            "no parameter needs one": not (trained or executable.ranks),
        }
        if any(reasons.values()):
            why = next(why for why, holds in reasons.items() if holds)
            raise ExecutionError(f"a step would leave no gradient, since {why}.")
        begun = [parameter.grad for parameter in bound.parameters]
        totals = Totals(begun, copies=executable.graphs is not None and meter is None)
        place = executable.places[row.device]
        for step, weight in zip(steps, weights, strict=True):
            step.totals = totals
            seed = torch.full(loss.shape, weight, dtype=loss.dtype, device=place)
            step.seed(row.grads[0], row.device, seed)
            del seed
        with torch.enable_grad(), observing() if executable.observed else nullcontext():
            executor.run(steps, 0)
    found = sum_up(steps, executor, totals)
    executor.meet(steps[0])
    total = torch.zeros((), dtype=loss.dtype, device=steps[0].results[0].device)
    for number, (step, weight) in enumerate(zip(steps, weights, strict=True)):
        part = weight * step.results[0].detach()
        total = total + part if number else part
    taken: set[int] = set()  # storages: two parameters that are added have one gradient
    for parameter in trained:
        gradient = found[parameter]
        if gradient is None:
            continue
        if parameter.grad is not gradient:
            parameter.grad = _own(gradient, parameter, taken)
        for hook in accumulation_hooks(parameter):
            hook(parameter)
    return total


def _own(gradient: torch.Tensor, parameter: torch.nn.Parameter, taken: set[int]) -> torch.Tensor:
    """A gradient in memory of its own, laid out as its parameter, as autograd would leave it."""
    if gradient.layout is not torch.strided:
        return gradient.detach()
    storage = gradient.untyped_storage()
    whole = storage.nbytes() == gradient.nbytes and key_of(storage) not in taken
    if whole and gradient.stride() == parameter.stride():
        taken.add(key_of(storage))
        return gradient.detach()
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
