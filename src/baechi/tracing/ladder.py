"""The ladder from a model to a `Traced`: tracers (`tracers`) in order, until one succeeds.

The rung taken, and why those above failed, with the model's own line, are kept in
`Traced.attempts`.
"""

import linecache
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baechi.errors import InputError, TraceError
from baechi.traced.operators import Attempt, TracedOp, TracedTensor
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import Facts, copy_of, propagate, quiet
from baechi.tracing.calling_convention import Call, canonical_call
from baechi.tracing.faithfulness import refuse_unfaithful
from baechi.tracing.graph_rewrites import read_once
from baechi.tracing.guards import Attributes, GradientMode
from baechi.tracing.lowering import TracedModule, lower
from baechi.tracing.side_effects import unchanged
from baechi.tracing.tracers import Capture, ladder, own_modules
from baechi.tracing.workarounds import ctc_losses_known


def trace(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Traced:
    """The operators of `model` on example arguments, in its current mode (train or eval).

    A model on the `meta` device traces too, without its weights. The model is not changed. What is
    traced holds for the autocast that is on here, or for none; and for every mode of gradients.

    Args:
        model: Any module.
        args: Positional example arguments of one call.
        kwargs: Keyword example arguments.

    Raises:
        InputError: The arguments do not fit the model's signature.
        TraceError: No rung could trace it; with the reason and the model's line for each.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is of type {type(model).__name__}; give a torch.nn.Module.")
    refuse_unfaithful(model)
    call = canonical_call(model, args, kwargs)
    if call.objects:  # the caller's own shall not change whenever the example runs
        args, kwargs = call.structure.fill(call.tensors)
        call = canonical_call(model, args, kwargs)
    mode = GradientMode(torch.is_grad_enabled())
    with torch.inference_mode(False), torch.enable_grad():
        call = replace(call, tensors=_apart(model, _where_weights_are(model, call)))
        return _climb(model, call, mode)


def _climb(model: nn.Module, call: Call, mode: GradientMode) -> Traced:
    """The capture of the first rung that succeeds."""
    attempts: list[Attempt] = []
    before = Attributes(model)
    for rung, capture in ladder(mode):
        try:
            with quiet(), unchanged(model), ctc_losses_known():
                captured = capture(model, call)
                ops, tensors, module = _lowered(model, call, captured)
                # Forward sets some attributes itself, whose values do not count.
                module = replace(module, attributes=before.settled(), gradients=mode.observed)
            name, taken = type(model).__name__, (*attempts, Attempt(rung))
            return Traced(name, ops, tensors, taken, model.training, module)
        except (InputError, TraceError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a tracer raises is a reason to try the next
            attempts.append(Attempt(rung, _reason(error, model)))
    raise TraceError(
        f"{type(model).__name__} cannot be traced:\n{_distinct(attempts)}\n"
        "Check that the example arguments run through the model. Control flow that looks at "
        "numbers in tensors must be inside a submodule, which then stays whole; the outermost "
        "forward may ask for truth values alone."
    )


def _distinct(attempts: Sequence[Attempt]) -> str:
    """The reason of every rung, equal ones once, with the model's line if it is known."""
    rungs: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        rungs.setdefault(attempt.reason.partition(" (at ")[0], []).append(attempt)
    return "\n".join(
        f"  {'; '.join(a.rung for a in row)}: {max((a.reason for a in row), key=len)}"
        for row in rungs.values()
    )


def _where_weights_are(model: nn.Module, call: Call) -> tuple[torch.Tensor, ...]:
    """The arguments: of a model without weights, without values; those of others have some."""
    state = [*model.parameters(), *model.buffers()]
    if state and all(tensor.is_meta for tensor in state):
        rows = (t.detach().to("meta").requires_grad_(t.requires_grad) for t in call.tensors)
        return tuple(
            given if given.is_meta else row for given, row in zip(call.tensors, rows, strict=True)
        )
    real = bool(state) and not any(tensor.is_meta for tensor in state)
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta and real:
            raise InputError(
                f"argument {name} is on the meta device and has no values, but this "
                f"{type(model).__name__} has its weights; give a real tensor, or move the model "
                "there, too (`model.to('meta')`), to plan without weights."
            )
    return call.tensors


def _apart(model: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Arguments that are distinct from the model's own tensors, even where these are passed."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own |= {id(value) for module in model.modules() for value in vars(module).values()}
    # Autograd cannot follow one that was made in inference mode.
    given = {id(t): t.clone() if t.is_inference() else t for t in tensors}
    for key in own & given.keys():
        given[key] = given[key].detach().requires_grad_(given[key].requires_grad)
    return tuple(given[id(tensor)] for tensor in tensors)


def _lowered(
    model: nn.Module, call: Call, captured: Capture
) -> tuple[tuple[TracedOp, ...], tuple[TracedTensor, ...], TracedModule]:
    facts = propagate(read_once(captured.module), call.tensors)
    _refuse_old_buffers(captured, facts)
    return lower(model, captured.module, facts, _kept(call, facts), captured.returned)


def _refuse_old_buffers(captured: Capture, facts: Facts) -> None:
    """Refuse a result that is a replaced buffer, or a view of one: it would have the new value."""
    names = {f"model.{name}": name for name in captured.replaced}
    graph = captured.module.graph
    olds = {
        value.storage: names[str(node.target)]
        for node in graph.find_nodes(op="get_attr")
        if str(node.target) in names
        for value in facts.nodes[node].values
    }
    for result in graph.output_node().all_input_nodes:
        for value in facts.nodes[result].values:
            if value.storage in olds:
                raise RuntimeError(
                    f"forward returns what buffer {olds[value.storage]!r} was before it replaces "
                    "it; let it return a clone"
                )


def _kept(call: Call, facts: Facts) -> Call:
    """The example as it is before it runs: with copies of what forward writes into."""
    placeholders = [node for node in facts.nodes if node.op == "placeholder"]
    copies: dict[int, torch.Tensor] = {}  # of one tensor one
    rows = []
    for node, tensor in zip(placeholders, call.tensors, strict=True):
        if any(value.storage in facts.written for value in facts.nodes[node].values):
            rows.append(copies.setdefault(id(tensor), copy_of(tensor)))
        else:
            rows.append(tensor)
    return replace(call, tensors=tuple(rows))


def _reason(error: Exception, model: nn.Module) -> str:
    """The error in a line or two, with the innermost line that is the model's own."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    reason = f"{type(error).__name__}: {first.strip()[:300]}"
    own = _own_frame(error, model)
    return f"{reason} (at {own})" if own else reason


def _own_frame(error: Exception, model: nn.Module) -> str:
    """The innermost frame of the error that is in a file of one of the model's classes."""
    modules = own_modules(model)
    own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "") in modules:
            file = frame.f_code.co_filename
            text = linecache.getline(file, line).strip()
            own = f"{Path(file).name}:{line} in {frame.f_code.co_name}: {text}"
    return own
