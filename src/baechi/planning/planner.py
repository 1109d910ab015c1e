"""The steps from a call to what runs it: trace, costs, placement, executable, comparison."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast, final

import torch
from torch import nn

from baechi.errors import BaechiError, InfeasibleError, InputError, with_text
from baechi.placers.turn_orders import ordered_turns
from baechi.planning.device_costs import costs_of, with_crowded
from baechi.planning.options import Options
from baechi.planning.placement_search import search
from baechi.planning.split_guard import executable_of, guarded, known_comparison
from baechi.problem.segments import segments_of
from baechi.problem.simulation import overflows, simulate
from baechi.processes.agreement import trace_of_all
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Schedule
from baechi.reporting.facts import outlook
from baechi.runtime.admission import Admission
from baechi.runtime.batched_calls import Microbatches, ModelWithLoss
from baechi.runtime.call_traces import CallTraces, largest_that_fits
from baechi.runtime.executable import Executable
from baechi.runtime.runtime_checks import refuse_meta
from baechi.runtime.verification import Unsplit, verify
from baechi.runtime.weights import Weights, devices_of_state, places_of
from baechi.torch_support.graph_capture import no_collections
from baechi.torch_support.torch_internals import unhooked, without_kept_weights
from baechi.torch_support.tracer_internals import shown_on_cpu
from baechi.traced.traced_model import Traced
from baechi.tracing.batch_dimension import NoLossError, OwnLossError, batch_dimensions
from baechi.tracing.calling_convention import Call, beside, own_objects
from baechi.tracing.carried_state import refuse_carried
from baechi.tracing.family_traces import sized
from baechi.tracing.subgraph import unsplit_part
from baechi.units import format_ns

# What a turn of a micro-batch takes besides its operators and what arrives (docs/pipelining.md).
_TURN_NS: Final = 20_000


@final
@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes what runs a call, for one shape after another."""

    model: nn.Module
    options: Options
    traces: CallTraces
    weights: Weights | None
    choice: str = ""  # why there are so many micro-batches, if that was chosen

    @property
    def needs_runtime(self) -> bool:
        """True if an option asks for what only the runtime does."""
        return self.options.needs_runtime

    def joined(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> Executable | None:
        """An earlier plan whose family takes this call, too, and that fits at its shape."""
        for special in kin:
            values = special.calls.joined(call) if special.holds() else None
            if values is None or special.admission is None or special.admission.missing(values):
                continue
            _keep_graphs(special, values)
            if self.options.verify:
                unsplit = Unsplit(model)
                special.settle()
                self._verify(unsplit, special, own_objects(model, call))
            return special
        return None

    def __call__(
        self,
        model: nn.Module,
        call: Call,
        kin: Sequence[Executable],
        homes: Mapping[torch.Tensor, int],
    ) -> Executable:
        """What runs a call: that of an earlier plan whose family takes it, too, or a new one.

        Args:
            model: The unsplit model.
            call: Its arguments.
            kin: What runs earlier calls that differ in sizes alone.
            homes: The device of every parameter and buffer that an earlier call has placed.

        Raises:
            TraceError: The model cannot be traced.
            InfeasibleError: It does not fit; the text names the missing memory.
            ExecutionError: Verification found a difference from the unsplit model.
        """
        options, gradients = self.options, torch.is_grad_enabled()
        with self._planning():
            call, traced = self._traced(model, call, kin, gradients=gradients)
            with torch.set_grad_enabled(gradients):
                taken = self.joined(model, call, [each for each in kin if each.traced is traced])
                if taken is not None:
                    return taken
                loss = isinstance(model, ModelWithLoss)
                batches = options.microbatches if loss or model is self.model else 1
                cut = batches > 1
                dims = batch_dimensions(traced, call, loss=loss, say=options.say) if cut else None
            whole = unsplit_part(traced) if len(options.cluster.devices) > 1 else ""
            if whole:
                warnings.warn(whole, stacklevel=2)
            shapes = self.traces.references(traced, call, kin)
            try:
                graph, placement, checkpoint = search(
                    options,
                    traced if shapes is None else sized(traced, shapes[0]),
                    *(homes, batches),
                    known_comparison(options, traced, cut=cut or loss),
                )
            except InfeasibleError as error:
                raise with_text(error, f"{error}{largest_that_fits(call, kin)}") from None
            self._load(traced, graph, placement)
            unsplit = Unsplit(model) if options.verify else None
            special = executable_of(
                *(options, traced, graph, placement),
                batches=batches,
                own_loss=loss,
                dimensions=dims,
            )
            special = guarded(options, special, homes)
            placement = special.placement
            if special.unsplit_on is None:
                refuse_carried(model, traced, [each.traced for each in kin])
            if special.stale:
                warnings.warn(special.stale, stacklevel=2)
            special.note = self.choice or self.traces.note(model, call, kin)
            if shapes is not None:
                special.admission = Admission(
                    *(traced, graph, placement, options.cluster, options.constraints),
                    *(options.gpus, checkpoint, *shapes),
                    partial(costs_of, options, batches=batches),
                    besides=partial(with_crowded, options, batches=batches),
                    replayed=options.replayed,
                )
                _keep_graphs(special, shapes[0])
            if options.progress:
                schedule = cast(Schedule, special.schedule)
                options.say(outlook(schedule, options.cluster, placement.devices))
            if unsplit is not None:
                self._verify(unsplit, special, call)
            return special

    def _load(self, traced: Traced, graph: OpGraph, placement: Placement) -> None:
        """Read weights to their devices; what the call does not use, where most memory is left."""
        if self.weights is None or not self.weights.pending:
            return
        cluster, places = self.options.cluster, self.options.places
        self.options.say("reading weights")
        peaks = simulate(graph, cluster, placement).peak_bytes
        rows = zip(cluster.devices, peaks, places, strict=True)
        room = [(device.memory_bytes - peak, place) for device, peak, place in rows]
        state = devices_of_state(traced.module, placement.devices)
        self.weights.load(self.model, places_of(state, room))  # also for a part, or with a loss

    def _verify(self, unsplit: Unsplit, special: Executable, call: Call) -> None:
        if not special.own_loss:
            return verify(unsplit, special, call)
        # A step goes backward by itself, so what is compared is a call with the same tapes.
        called = executable_of(
            self.options, special.traced, cast(OpGraph, special.graph), special.placement
        )
        try:
            return verify(unsplit, called, call)
        finally:
            called.close()

    @contextmanager
    def _planning(self) -> Iterator[None]:
        # Collections are a tenth of the time; but what is measured is to leave no memory behind.
        alone = nullcontext() if self.options.costs == "measure" else no_collections()
        # A first call without gradients must not make a plan that has none.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            unhooked(),
            without_kept_weights(),
            alone,
        ):
            yield

    def _traced(
        self, model: nn.Module, call: Call, kin: Sequence[Executable], *, gradients: bool
    ) -> tuple[Call, Traced]:
        """A call with objects of its own, and its trace."""

        def trace() -> tuple[Call, Traced]:
            if self.weights is None and self.options.ranks is None:
                refuse_meta(model)
            own = own_objects(model, beside(model, call))
            devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
            # Weights that were read to several devices may fit on no single one.
            apart = shown_on_cpu() if len(devices) > 1 else nullcontext()
            with torch.set_grad_enabled(gradients), apart:  # a model may read the caller's mode
                return own, self.traces.trace(model, own, kin)

        return trace_of_all(self.options.ranks, trace)

    def choose(
        self, model: nn.Module, call: Call, cutting: Microbatches
    ) -> tuple["Planner", Microbatches]:
        """What plans for the number of micro-batches with the shortest predicted step.

        The smaller of two that are alike. If there is a plan for none, the whole batch's error.

        Raises:
            OwnLossError: The call returns its own loss.
            NoLossError: It is a step without a loss.
        """
        steps: dict[int, int] = {}
        failures: dict[int, BaechiError] = {}
        for n in reversed(cutting.choices(call)):
            try:
                steps[n] = self._of(n)._step_ns(model, replace(cutting, n=n).split(call)[0])
            except (OwnLossError, NoLossError):
                raise
            except BaechiError as error:
                failures[n] = error
        if not steps:
            raise failures[1]
        n = min(sorted(steps), key=steps.__getitem__)
        rows = ", ".join(f"{m}: {format_ns(steps[m])}" for m in sorted(steps))
        choice = f"microbatches='auto' chose {n}, by predicted steps ({rows})."
        choice += "".join(f" Not {m}: {error}" for m, error in list(failures.items())[-1:])
        self.options.say(choice)
        return replace(self._of(n), choice=choice), replace(cutting, n=n)

    def _of(self, microbatches: int) -> "Planner":
        return replace(self, options=replace(self.options, microbatches=microbatches))

    def _step_ns(self, model: nn.Module, call: Call) -> int:
        """The predicted step of micro-batches like this call, with what their turns take."""
        options, loss = self.options, isinstance(model, ModelWithLoss)
        n, gradients = options.microbatches, torch.is_grad_enabled()
        with self._planning():
            call, traced = self._traced(model, call, (), gradients=gradients)
            if n > 1:
                with torch.set_grad_enabled(gradients):
                    batch_dimensions(traced, call, loss=loss, say=options.say)
            graph, placement, _ = search(options, traced, {}, n, lambda _: None)
        if n == 1 or loss or not options.training:
            turns = len(placement.turns or segments_of(graph, placement))
            return simulate(graph, options.cluster, placement).makespan_ns + turns * _TURN_NS
        rhythm = ordered_turns(graph, options.cluster, placement, n, joined=True)
        schedule = Schedule((), (), rhythm.peak_bytes)
        if overflows(schedule, options.cluster, options.constraints):
            raise InputError(f"what {n} micro-batches keep does not fit; step() keeps less.")
        return rhythm.step_ns + len(rhythm.turns) * _TURN_NS


def _keep_graphs(special: Executable, values: Sequence[int]) -> None:
    """Let a plan keep CUDA graphs of as many shapes as fit at once."""
    if special.graphs is not None and special.admission is not None:
        special.graphs.most_shapes = special.admission.most_replayed(values)
