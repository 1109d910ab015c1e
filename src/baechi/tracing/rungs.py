"""The rungs of the ladder: the ways to trace a model, in the order in which they are tried.

    torch.export, non-strict     takes nearly everything; ATen operators, in-place ones kept
    the same, export branches    where the branches of an eager run cannot be traced
    module granularity           torch.fx: torch.nn modules are leaves, and so is, opaque, every
                                 submodule that cannot be traced
    torch.export, numbers        those that forward reads from integers among arguments, buffers;
                                 tried before a submodule stays whole with many of the parameters
    the same, and what they      where forward goes on to read numbers of what a mask of arguments
    choose                       chose
    torch.export, truth values   those of the example's tensors, each with a check; in the place of
                                 a part that stays whole if all say that numbers are finite
    torch.export, opaque         where fx cannot trace what is around submodules that stay whole, or
      submodules                 leaves many of the parameters in one (`whole_parts`)

Each rung traces the same flat function (`calling_convention.flat_model`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final, final

import torch
from torch import fx, nn

from baechi.errors import TraceError
from baechi.torch_support.symbolic_sizes import is_unbacked
from baechi.torch_support.tracer_internals import frugal_export, switches_kept
from baechi.tracing.alias_analysis import copy_of
from baechi.tracing.calling_convention import Call, flat_model
from baechi.tracing.effect_recorder import named_state
from baechi.tracing.export_branches import EagerBranches
from baechi.tracing.faithfulness import refuse_new_leaves, watched
from baechi.tracing.families import Place, dynamic_shapes, numbers_among
from baechi.tracing.fx_nodes import (
    op_name,
    operator_name,
    without_effectless,
    without_layouts,
    without_whole_slices,
)
from baechi.tracing.fx_tracer import symbolic_trace, types_told
from baechi.tracing.guards import Attributes, GradientMode
from baechi.tracing.model_code import symbols_kept
from baechi.tracing.model_notes import containers_kept, draws_kept, notes_kept
from baechi.tracing.observers import without_observers
from baechi.tracing.pytrees import Structure
from baechi.tracing.questions import Questions
from baechi.tracing.recurrent_layers import RECURRENT, gives_traced_dtypes
from baechi.tracing.side_effects import OutsideTensors, state_kept, unchanged
from baechi.tracing.switched_modes import without_switches
from baechi.tracing.truth_values import TruthValues
from baechi.tracing.whole_parts import PartError, WholeParts, check_sizes
from baechi.tracing.workarounds import called_with, checks_kept


@final
@dataclass(frozen=True)
class Capture:
    """The result of a rung: a flat graph, the structure around its outputs, what forward set."""

    module: fx.GraphModule
    returned: Structure
    questions: Questions = field(default_factory=Questions)
    sets: Sequence[str] = ()
    lasts: bool = True  # whether calls will repeat the truth values that they must repeat


def _non_strict(
    mode: GradientMode,
    branches: EagerBranches,
    model: nn.Module,
    call: Call,
    replayed: TruthValues | None = None,
    *,
    places: frozenset[Place] = frozenset(),
    of_part: bool = False,
    whole: WholeParts | None = None,
) -> Capture:
    outside, own = OutsideTensors(), named_state(model)
    sets: list[str] = []
    modes: list[tuple[dict[str, Any], str, str]] = []
    exchanged: list[tuple[dict[str, Any], dict[str, Any]]] = []  # submodules, with their attributes

    @contextmanager
    def around(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(state_kept(model))
            stack.enter_context(replayed or nullcontext())  # for what nobody else answers
            given = [(tensor, own[name]) for name, tensor in model.named_buffers() if name in own]
            examples = call.tensors if call.may_ask else ()
            stack.enter_context(branches.taken(tensors, examples, given))
            stack.enter_context(types_told(model))
            stack.enter_context(symbols_kept(model, of_tensors=not of_part))
            now = named_state(model).items()
            pairs = ((own[name], tensor) for name, tensor in now if name in own)
            outside.stand_ins = {id(mine): other for mine, other in pairs if mine is not other}
            if not branches.nested:
                stack.enter_context(outside)
            # By their attributes: torch.export has a proxy for each place of a shared module.
            before, parts = Attributes(model), {id(vars(m)) for m in model.modules()}
            standing_in = nullcontext() if whole is None else whole.standing_in()
            with draws_kept(model) as drew, standing_in:
                yield
            sets[:] = before.named_since() + drew
            modes[:] = before.modes_since()
            exchanged[:] = [
                (own, own.copy()) for own in map(vars, model.modules()) if id(own) not in parts
            ]

    def settle() -> None:
        """Undo that the exporter took all attributes back, also in exchanged submodules."""
        for own, attributes in exchanged:
            own.clear()
            own.update(attributes)
        for owner, name, chosen in modes:
            owner[name] = chosen

    flat, returned = flat_model(model, call, around, partial(refuse_new_leaves, call))
    with (
        ExitStack() as last,
        watched(model, mode) as functions,
        closing(outside),
        frugal_export(),
        checks_kept(),
        switches_kept(),
        containers_kept(model),
    ):
        shapes = dynamic_shapes(call, places) if places else None
        program = torch.export.export(flat, call.tensors, strict=False, dynamic_shapes=shapes)
        last.callback(settle)
        module = program.module()
        if whole is not None:
            whole.restore(module)
        functions.restore(module)
        module = without_switches(without_effectless(module), call.autocast)
        for node in module.graph.nodes if call.autocast.dtypes else ():
            if operator_name(node) in RECURRENT and not gives_traced_dtypes(node):
                raise PartError(
                    f"{node.target} gives other dtypes with {call.autocast} than its fake tensors",
                    op_name(node).rpartition("/")[0],
                )
        for number in chain.from_iterable(map(_numbers, returned[-1].constants)):
            if is_unbacked(number):
                raise TypeError("forward returns a number that depends on values of tensors")
        if whole is not None:
            check_sizes(module)
        if places:
            module = without_whole_slices(module)
        lasts = replayed is None or replayed.are_checks
        return Capture(without_layouts(module), returned[-1], branches.questions, sets, lasts)


def _numbers(constant: Any) -> Iterable[Any]:
    """The numbers that may be symbols: those of a shape, or the constant itself."""
    return constant if isinstance(constant, torch.Size) else (constant,)


def _truth_values(
    mode: GradientMode,
    branches: EagerBranches,
    model: nn.Module,
    call: Call,
    *,
    of_counters: bool = False,
    **options: Any,
) -> Capture:
    """Trace with the truth values of a real run of the example; those of counters if so wished.

    On meta, where nothing runs, with those that say that all is as it must be.
    """
    if any(tensor.is_meta for tensor in (*named_state(model).values(), *call.tensors)):
        return _non_strict(mode, branches, model, call, TruthValues(assumed=True), **options)
    copies = copies_of_state(model)
    with TruthValues(state=copies.values()) as values, notes_kept(model), without_observers(model):
        run_on_copies(model, call, copies)
        if not of_counters:
            values.refuse_counters()
    del copies  # the trace needs none
    if not values.recorded:
        raise RuntimeError("forward asks no tensor for a truth value")
    return _non_strict(mode, branches, model, call, TruthValues(values.recorded), **options)


def _parts_whole(
    mode: GradientMode, places: frozenset[Place], of_part: bool, model: nn.Module, call: Call
) -> Capture:
    """Trace with ever more submodules whole: the innermost that fails each time."""

    def run(call: Call) -> None:
        with unchanged(model), notes_kept(model), without_observers(model):
            run_on_copies(model, call)

    calls = [call, *(_at_other_sizes(call, places, by) for by in ((1, 2) if places else ()))]
    whole = WholeParts(model, *(partial(run, each) for each in calls))
    options: dict[str, Any] = {"places": places, "of_part": of_part, "whole": whole}
    while True:
        try:
            return _non_strict(mode, EagerBranches(), model, call, **options)
        except TraceError:
            raise
        except Exception as error:
            if not whole.give_way(error):
                raise


def _at_other_sizes(call: Call, places: frozenset[Place], by: int) -> Call:
    """A call with other sizes at some places, equal ones where they are, filled with what it holds.

    Each size is another number less, since models have a largest position; or more, where it is
    small. The call carries the numbers that are symbols.
    """
    first = len(call.tensors) - len(numbers_among(places))
    changed = [
        [dim for dim in range(t.dim()) if (i, dim) in places or (i >= first and dim == 0)]
        for i, t in enumerate(call.tensors)
    ]
    rows = list(zip(call.tensors, changed, strict=True))
    counts = [Counter(tensor.shape[dim] for dim in dims) for tensor, dims in rows]
    twice = {size for count in counts for size in count if count[size] > 1}  # in one tensor
    keys = {(t.shape[dim], dim if t.shape[dim] in twice else 0) for t, dims in rows for dim in dims}
    steps = {key: by * (1 + rank) for rank, key in enumerate(sorted(keys))}
    tensors = []
    for tensor, dims in rows:
        other = tensor.detach()
        for dim in dims:
            size = tensor.shape[dim]
            step = steps[size, dim if size in twice else 0]
            now = size - step if size - step > 1 else size + step
            index = torch.arange(now, device=tensor.device) % size
            other = other.index_select(dim, index)
        tensors.append(other.requires_grad_(tensor.requires_grad))
    return replace(call, tensors=tuple(tensors))


def copies_of_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters and buffers, for `run_on_copies`."""
    return {f"model.{name}": copy_of(tensor) for name, tensor in named_state(model).items()}


def run_on_copies(
    model: nn.Module, call: Call, copies: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """The tensors that forward gives of the example, run for real.

    State, arguments and random numbers stay as they are; `copies` of the state are written.
    """
    flat, _ = flat_model(model, call)
    copies = copies_of_state(model) if copies is None else copies
    inputs = tuple(map(copy_of, call.tensors))
    gpus = sorted({t.device.index for t in copies.values() if t.device.type == "cuda"})
    with torch.random.fork_rng(gpus):
        return tuple(called_with(flat, copies, inputs))


NUMBERS: Final = "numbers of the arguments"
CHOICES: Final = f"{NUMBERS} and what they choose"
TRUTHS: Final = "truth values of the example"
WHOLE: Final = "opaque submodules"
# Those that a later call of the same model begins with; each before what its name begins with.
LATE: Final = (CHOICES, NUMBERS, TRUTHS, WHOLE)


def rungs(
    mode: GradientMode, places: frozenset[Place] = frozenset(), of_part: bool = False
) -> Iterator[tuple[str, Callable[[nn.Module, Call], Capture]]]:
    """The rungs, in the order in which they are tried; with symbols for the sizes at `places`."""
    options: dict[str, Any] = {"places": places, "of_part": of_part}
    branches = EagerBranches()
    name, export = "torch.export (non-strict)", partial(_non_strict, mode, branches, **options)
    yield name, export
    while branches.give_way():
        yield f"{name}{branches}", export
    if not places:  # fx knows no symbols
        opaque = partial(symbolic_trace, mode)
        yield "module granularity, opaque leaves", lambda *given: Capture(*opaque(*given))
    for kind, branches in (
        (NUMBERS, EagerBranches(numbers=True)),
        (CHOICES, EagerBranches(numbers=True, choices=True)),
    ):
        yield f"{name}, {kind}", partial(_non_strict, mode, branches, **options)
    branches = EagerBranches()
    name, values = f"{name}, {TRUTHS}", partial(_truth_values, mode, branches, **options)
    yield name, values
    while branches.give_way():
        yield f"{name}{branches}", values
    yield f"torch.export (non-strict), {WHOLE}", partial(_parts_whole, mode, places, of_part)
    yield name, partial(values, of_counters=True)  # rather than not at all
