"""The ladder from a model to a `Traced`: tracers in order (`rungs`), until one succeeds.

The rung taken, and why those above failed, with the model's own line, are kept in
`Traced.attempts`.
"""

import linecache
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from baechi.errors import InputError, TraceError
from baechi.torch_support.graph_capture import no_collections
from baechi.torch_support.storages import extent
from baechi.torch_support.symbolic_sizes import short_terms
from baechi.torch_support.tracer_internals import quiet, shown_on_cpu
from baechi.traced.operators import Attempt, TracedOp, TracedTensor
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import copy_of, propagate, propagate_symbolic
from baechi.tracing.calling_convention import Call, canonical_call, inside
from baechi.tracing.effect_recorder import named_state
from baechi.tracing.faithfulness import reads_noted, refuse_unfaithful
from baechi.tracing.families import Family, Place, kinds_carried, numbers_among
from baechi.tracing.fx_nodes import op_and_line, read_once
from baechi.tracing.guards import Attributes, GradientMode
from baechi.tracing.lowering import TracedModule, lower
from baechi.tracing.model_code import own_modules
from baechi.tracing.model_notes import notes_kept
from baechi.tracing.node_facts import Facts
from baechi.tracing.observers import RETURN_IT, has_observers, in_turn
from baechi.tracing.recurrent_layers import recurrent_in_one
from baechi.tracing.rungs import LATE, TRUTHS, WHOLE, Capture, run_on_copies, rungs
from baechi.tracing.shared_casts import casts_shared
from baechi.tracing.side_effects import unchanged
from baechi.tracing.subgraph import opaque_leaves, unsplit_part
from baechi.tracing.workarounds import (
    caches_told,
    ctc_losses_known,
    errors_followed,
)


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    places: frozenset[Place] = frozenset(),
    may_ask: bool = True,
    of_part: bool = False,
    like: Traced | None = None,
) -> Traced:
    """The operators of `model` on example arguments, in its current mode (train or eval).

    A model on the `meta` device traces too, without its weights, to the very trace that it has on
    a CPU with them; its buffers may have values or none. The model is not changed. What is
    traced holds for the autocast that is on here, or for none; and for every mode of gradients.

    Args:
        model: Any module.
        args: Positional example arguments of one call.
        kwargs: Keyword example arguments.
        places: Sizes above 1, and ints, that are symbols in the trace (`families`); it is then of
            all calls that differ in these and fit its guards.
        may_ask: Whether forward may ask for values of the arguments, as in `Call`.
        of_part: Whether the example is a micro-batch: numbers in tensors, which others may answer
            otherwise, are then no symbols.
        like: The trace of another call, whose rung is tried first if it asked for values.

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
    call = replace(call, may_ask=may_ask)
    mode = GradientMode(torch.is_grad_enabled())
    with torch.inference_mode(False), torch.enable_grad(), inside(), ExitStack() as stack:
        call = replace(call, tensors=_apart(model, _beside_weights(model, call)))
        if places:
            call = call.with_numbers(numbers_among(places))
        aliases = {id(t): _alias(t) for t in call.tensors if places or t._is_view()}
        call = replace(call, tensors=tuple(aliases.get(id(t), t) for t in call.tensors))
        if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
            stack.enter_context(shown_on_cpu())  # the trace is that of the model with weights
        if places:
            stack.enter_context(short_terms())
            return _climb(model, call, mode, places, like, of_part)
        # What shares memory and is only read is as good as apart, and then it is placed apart.
        apart = replace(call, tensors=_copied(call.tensors))
        traced = _climb(model, apart, mode, places, like, of_part)
        facts, pairs = traced.module.facts, zip(apart.tensors, call.tensors, strict=True)
        nodes = traced.module.graph_module.graph.find_nodes(op="placeholder")
        copied = [n for n, (t, own) in zip(nodes, pairs, strict=True) if t is not own]
        written = {v.storage for node in copied for v in facts.nodes[node].values} & facts.written
        return _climb(model, call, mode, places, like, of_part) if written else traced


@no_collections()
def _climb(
    model: nn.Module,
    call: Call,
    mode: GradientMode,
    places: frozenset[Place],
    like: Traced | None,
    of_part: bool,
) -> Traced:
    """The capture of the first rung that succeeds, or of the next one, if that parts it better."""
    late = next((kind for kind in LATE if like and kind in like.rung), "")
    attempts = [row for row in (like.attempts if like and late else ()) if late not in row.rung]
    whole: Traced | None = None
    before = Attributes(model)
    for rung, capture in rungs(mode, places, of_part):
        if late not in rung:
            continue  # it failed for another call
        asked = any(attempt.reason.startswith(_VALUE_READ) for attempt in attempts)
        if _takes_no_more(rung, places, whole, asked):
            continue
        try:
            with (
                quiet(),
                unchanged(model) as notes,
                ctc_losses_known(),
                recurrent_in_one(),
                caches_told(),
            ):
                with errors_followed(), reads_noted(model) as reads:
                    captured = capture(model, call)
                if (whole is not None or (late and not places)) and not captured.lasts:
                    continue
                ops, tensors, module = _lowered(model, call, captured, places, before, reads)
                module = replace(module, gradients=mode.observed, reads=reads)
                # A part that stays whole notes it in placed calls.
                leaves = opaque_leaves(captured.module, captured.module.graph.nodes).values()
                notes.put_back(part for leaf in leaves for part in leaf.modules())
            name, taken = type(model).__name__, (*attempts, Attempt(rung))
            traced = Traced(name, ops, tensors, taken, model.training, module)
            # Of any part, where truth values may be what is in the way.
            stays = unsplit_part(traced, 0.0 if asked and WHOLE not in rung else _LARGE)
            parts_more = whole is not None and len(traced.ops) > len(whole.ops)
            if not stays or parts_more or (whole is not None and WHOLE not in rung):
                return traced
            whole = whole or traced
            attempts.append(Attempt(rung, stays))
        except (InputError, TraceError, torch.OutOfMemoryError):
            if whole is None:
                raise
        except Exception as error:  # whatever a tracer raises is a reason to try the next
            attempts.append(Attempt(rung, _reason(error, model)))
    if whole is not None:
        return whole
    if late and not places:  # with symbols no more is possible than without
        return _climb(model, call, mode, places, None, of_part)
    meta = any(tensor.is_meta for tensor in (*named_state(model).values(), *call.tensors))
    if not (places or meta):
        _refuse_failing(model, call)
    runs = ", and on meta nothing shows whether it runs" if meta else ", though it runs"
    failure = TraceError(
        f"{type(model).__name__} cannot be traced{runs}:\n{_distinct(attempts)}\n"
        f"{'' if call.may_ask else _MAY_NOT_ASK}{_READS_NOTES if has_observers(model) else ''}"
        "Control flow that looks at numbers in tensors must be inside a submodule, which then "
        "stays whole; the outermost forward may read numbers of integers among its arguments, and "
        "of other tensors truth values alone. A loss that reads more is computed outside: trace "
        "without labels."
    )
    for attempt in attempts:
        failure.add_note(f"{attempt.rung}: {attempt.reason}")
    raise failure


def _takes_no_more(rung: str, places: frozenset[Place], whole: Traced | None, asked: bool) -> bool:
    """True if a rung would part nothing more: a run on real tensors says nothing new to it."""
    return TRUTHS in rung and bool(places or whole) and not asked


def _refuse_failing(model: nn.Module, call: Call) -> None:
    """Raise what is wrong with the example or the model's own code, if it does not run at all.

    It runs as the user would run it, with its hooks, on whose notes forward may rely.
    """
    try:
        with quiet(), unchanged(model), notes_kept(model):
            run_on_copies(model, call)
    except (TraceError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the model's code raises
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("baechi."):
            return  # it is ours, about what forward returns
        raise TraceError(
            f"{type(model).__name__} does not run on {call.shapes or 'no tensors'}: "
            f"{_reason(error, model)}"
        ) from error


# Of a model's parameters: a part with more does not stay whole if a later rung can part it.
_LARGE: Final = 0.25
_READS_NOTES: Final = (
    "A forward hook that returns nothing does not run while the model is traced, so forward finds "
    f"nothing that it keeps. {RETURN_IT}\n"
)
# How torch says that forward reads a tensor which the tracer did not see made.
_FAKE_CONSTANT: Final = "We found a fake tensor in the exported program constant's list"
_UNSEEN: Final = (
    "forward reads a tensor that the trace did not see made, as torch.autograd.grad through "
    "parameters gives it: use torch.func.grad, or put it in a submodule, which then stays whole"
)
_MAY_NOT_ASK: Final = (
    "Micro-batches differ in what forward asks of their arguments, so for all of them it may not "
    "ask. Give calls whose micro-batches are alike there, or microbatches=None.\n"
)

# Errors of torch's tracers for a Python value that depends on a tensor's values, by their classes.
_VALUE_READ: Final = ("GuardOnDataDependentSymNode", "DataDependentOutputException")


def _distinct(attempts: Sequence[Attempt]) -> str:
    """The reasons, equal ones once, with the model's line if it is known."""
    reasons: dict[str, str] = {}
    for attempt in attempts:
        error, _, line = attempt.reason.partition(" (at ")
        if error.startswith(_VALUE_READ):
            error = "a number is read from a tensor"
        text = f"{error} (at {line}" if line else error
        reasons[error] = max(reasons.get(error, ""), text, key=len)
    return "\n".join(f"  {text}" for text in reasons.values())


_WEIGHTLESS: Final = ("cpu", "meta")  # where arguments of a model on meta may be


def _beside_weights(model: nn.Module, call: Call) -> tuple[torch.Tensor, ...]:
    """The arguments: of a model with weights they have values; else they are not on a GPU."""
    state = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in state):
        return tuple(
            t if t.device.type in _WEIGHTLESS else t.detach().cpu().requires_grad_(t.requires_grad)
            for t in call.tensors
        )
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta and state:
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


def _copied(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The arguments, with copies of tensors that share memory with others; of one tensor one."""
    found = {id(t): t for t in tensors}
    given = [t for t in found.values() if t.layout is torch.strided and t.numel() and not t.is_meta]
    memory = Counter(t.untyped_storage().data_ptr() for t in given)
    for tensor in given:
        if memory[tensor.untyped_storage().data_ptr()] > 1:
            flat = tensor.detach().as_strided((extent(tensor),), (1,)).clone()
            copy = flat.as_strided(tensor.shape, tensor.stride(), 0)
            copy.requires_grad_(tensor.requires_grad)
            found[id(tensor)] = copy
    return tuple(found[id(tensor)] for tensor in tensors)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of its own.

    Of a view a tracer has symbols for the base. And an export that fails leaves its marks of what
    is symbolic on the tensors, by which a later one of these would have symbols, too.
    """
    if tensor.layout is not torch.strided:
        return tensor
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    memory = tensor.untyped_storage()
    found.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found.requires_grad_(tensor.requires_grad)


def _lowered(
    model: nn.Module,
    call: Call,
    captured: Capture,
    places: frozenset[Place],
    before: Attributes,
    reads: Set[tuple[int, str]],
) -> tuple[tuple[TracedOp, ...], tuple[TracedTensor, ...], TracedModule]:
    module, family, returned = captured.module, None, captured.returned
    if call.autocast.cached:
        casts_shared(module, call.autocast.dtypes)
    module = in_turn(read_once(module))
    given = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    sizes = (size for value in given for size in value.shape) if places else ()
    symbols = any(isinstance(size, torch.SymInt) for size in sizes)
    if symbols or float in kinds_carried(call, places):
        symbolic = propagate_symbolic(module, call.tensors)
        family = Family(call, places, given, symbolic, returned, captured.questions)
        facts, returned = family.facts(family.traced_at), family.returned(family.traced_at)
    else:  # all of them had to be as they are
        facts = propagate(module, call.tensors)
    kept = _kept(call, facts)
    whole = opaque_leaves(captured.module, captured.module.graph.nodes)
    # Forward sets some attributes itself, whose values do not count.
    attributes = before.settled(whole.values(), reads)
    ops, tensors, lowered = lower(model, captured.module, facts, kept, returned, attributes)
    # What a submodule sets that stays whole, it sets in placed calls, too.
    inside = tuple(f"{path.removeprefix('model.')}." for path in whole)
    names = captured.sets or before.named_since()
    sets = tuple(name for name in names if not name.startswith(inside))
    notes = (name for name in sets if _is_read(model, name, reads))
    if (note := next(notes, None)) is not None:
        _refuse_settling(captured.module, facts, note)
    return ops, tensors, replace(lowered, family=family, questions=captured.questions, sets=sets)


def _is_read(model: nn.Module, name: str, reads: Set[tuple[int, str]]) -> bool:
    """True if forward read what it sets; of what is no module's attribute that is not known."""
    path, _, attribute = name.rpartition(".")
    owner = dict(model.named_modules()).get(path)
    read = {(id(owner), attribute), (id(owner), "__dict__")}
    return owner is None or not reads.isdisjoint(read)


def _refuse_settling(module: fx.GraphModule, facts: Facts, name: str) -> None:
    """Refuse a write to a parameter that forward might do once, as RWKV scales its weights."""
    parameters = {path for path, _ in module.named_parameters(remove_duplicate=False)}
    for node, fact in facts.nodes.items():
        written = {str(facts.storages[storage].attribute) for storage in fact.writes}
        if node.op != "call_module" and written & parameters:
            raise TraceError(
                f"{op_and_line(node)} writes into a parameter, and forward sets {name}, perhaps so "
                "as not to write again; the placed model would in each call. Run the unsplit model "
                "once in this mode (eval or train), then place it."
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
    first = _UNSEEN if first.startswith(_FAKE_CONSTANT) else first
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
