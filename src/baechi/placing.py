"""`place`: tracing, profiling, solving and applying in one call, once shapes are known."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast, final

import torch
from torch import nn

from baechi.checkpointing import (
    Checkpoint,
    checked,
    checkpointed_by_the_model,
    choose_checkpoint,
    memory_target,
    within_memory,
)
from baechi.costs.estimation import estimate
from baechi.costs.profiling import profile
from baechi.errors import BaechiError, InfeasibleError, InputError, with_text
from baechi.placers.auto import check_effort
from baechi.placers.searching import placer_of
from baechi.placers.solving import OBJECTIVES
from baechi.placers.turn_orders import ordered_turns
from baechi.probing.cluster_probe import probe
from baechi.probing.graph_launches import replayed, tape_costs
from baechi.probing.worker_costs import as_lanes, crowded
from baechi.problem.microbatches import segments_of
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows, simulate, unsplit_peaks
from baechi.processes.agreement import (
    compare_programs,
    costs_of_kinds,
    placement_for_all,
    refuse_for_ranks,
    trace_of_all,
    without_parameters,
)
from baechi.processes.world import Ranks
from baechi.program.stream_memory import solve_with_held
from baechi.records.cluster import Cluster, Constraints, lane_kind
from baechi.records.graph import OpGraph
from baechi.records.op_costs import Profile
from baechi.records.optimizer_state import check_optimizer
from baechi.records.placement import Placement, Schedule
from baechi.reporting.facts import outlook
from baechi.runtime.admission import Admission, check_batches
from baechi.runtime.batched_calls import (
    BatchSpec,
    Microbatches,
    ModelWithLoss,
    check_microbatches,
)
from baechi.runtime.call_traces import CallTraces, largest_that_fits
from baechi.runtime.executable import Executable
from baechi.runtime.executors.capture_rules import CudaGraphs, check_wish
from baechi.runtime.placed_module import PlacedModule, executable, installed, refuse_holding
from baechi.runtime.placed_state import PlacedState
from baechi.runtime.runtime_checks import refuse_meta
from baechi.runtime.step_measurement import Comparison, compare, remembered
from baechi.runtime.torch_compile import compile_options
from baechi.runtime.verification import Unsplit, verify
from baechi.runtime.weights import ParameterDevices, Weights, devices_of_state, pinned, places_of
from baechi.torch_support.graph_capture import no_collections
from baechi.torch_support.torch_devices import (
    device_kind,
    gpus_of,
    torch_device,
    with_kinds,
)
from baechi.torch_support.torch_internals import shown_on_cpu, unhooked
from baechi.traced.traced_model import Traced
from baechi.tracing.batch_dimension import OwnLossError, batch_dimensions
from baechi.tracing.calling_convention import Call, beside, own_objects
from baechi.tracing.families import Dynamic, check_dynamic
from baechi.tracing.family_traces import sized
from baechi.tracing.subgraph import unsplit_part
from baechi.units import format_ns
from baechi.validation import check_choice, check_is, check_positive, check_threads

MAX_SHAPES: Final = 8
# What a turn of a micro-batch takes besides its operators and what arrives (docs/pipelining.md).
_TURN_NS: Final = 20_000


def place(
    model: nn.Module,
    devices: Any = None,
    *,
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    placer: Any = "auto",
    training: bool = True,
    optimizer: str | None = None,
    costs: str | Profile = "measure",
    verify: bool = False,
    progress: bool = True,
    threads_per_device: int | None = None,
    max_shapes: int = MAX_SHAPES,
    constraints: Constraints | None = None,
    effort: str | None = None,
    guard: bool = True,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002 (torch's own word)
    cuda_graphs: CudaGraphs = False,
    checkpoint: Checkpoint = None,
    dynamic: Dynamic = True,
    weights: Any = None,
    convert_weights: bool = False,
    microbatches: int | str | None = None,
    batch: BatchSpec | None = None,
    objective: str = "step",
) -> PlacedModule:
    """The model, split over devices; call it and train it as before.

    Without example arguments it specializes on the first call, and again on each call of another
    dtype, constant or mode, printing one line for each; and on the second call that differs in
    sizes, for all further sizes. The first call decides where parameters and buffers live, so call
    with the largest shape first.

    Args:
        model: Any module. It is what comes back, of a class derived from its own; `unplace()`
            undoes that.
        devices: As for `probe`: names, torch devices, `baechi.Device` values, a mapping from
            names to capacities, a `Cluster`, or None for all that are visible.
        example_args: Positional arguments of one call, to specialize now.
        example_kwargs: Keyword arguments of that call.
        placer: A name (`"auto"`, `"m-topo"`, `"m-etf"`, `"m-sct"`, ...) or a placer value.
        training: Plan for forward and backward; else for inference, and run without gradients.
        optimizer: The optimizer whose state must fit too: a name of
            `optimizer_state.OPTIMIZERS`, with options.
        costs: `"measure"`; `"estimate"`, computed for every kind of device in the cluster; or a
            `Profile` of this model at this shape.
        verify: Compare the first call of each shape with the unsplit model's: outputs, gradients
            and buffers. If they differ, the first operator that does is named. Needs memory for a
            copy of the model on its present device.
        progress: Print progress.
        threads_per_device: torch threads of every logical CPU device; by default an equal share.
        max_shapes: Maximum number of plans. A plan is for a family of calls, or for one shape; the
            least recently used is dropped for one more, with a warning the first time.
        constraints: Constraints besides memory, as in `solve`.
        effort: `"fast"`, `"balanced"` (the default) or `"thorough"`, as in `solve`.
        guard: Where `auto` splits a model that fits one device, measure a few steps of both and
            keep the faster. A second run remembers the outcome.
        compile: Hand every segment to `torch.compile`, as in `apply`.
        cuda_graphs: Whether to capture work on CUDA devices as CUDA graphs, as in `apply`.
        checkpoint: Submodules that keep only their inputs for the backward and run forward again
        there: paths, or patterns such as `"h.*"`; or a memory limit for each device, in bytes
            or as `"4GiB"`; or `True` for all of its memory. For a limit, submodules are chosen,
            none if the step fits without (`choose_checkpoint`).
        dynamic: Whether one plan may take calls of many sizes: a call that differs from an earlier
            one in sizes (or ints) is traced with symbols for these, and its plan takes every
            further one. False is a plan per shape. A mapping declares sizes at once, and the
            largest to place for: `{"input_ids": {0: "batch", 1: ("length", 2, 4096)}}`.
        weights: For a model on meta (`skeleton`): a safetensors file, its index, a folder with one
            of these, or a mapping from the names of `state_dict` to rows of `stored_weights`,
            tensors, or functions that make them. They are read when the first call is placed, each
            to its device; what that call does not use goes where most memory is left.
        convert_weights: Whether weights are converted to the dtypes that the model has.
        microbatches: Number of micro-batches into which every call is cut, so that devices work on
            several at once (docs/pipelining.md). `"auto"`: that with the shortest predicted step,
            of divisors of the first call's batch; each is traced and costed. Where the example
            returns its own loss, `step` is planned for it. `verify`, `guard` and `dynamic` do
            nothing then, or are refused; `cuda_graphs` are for `step` alone.
        batch: Their dimension in the arguments that have one, by name, such as `{"x": 1}`; by
            default the first one of all tensors that are as long as the first.
        objective: `"throughput"` places an inference for `stream`, as in `solve`, without `guard`.

    Raises:
        InputError: A device, capacity, placer, effort, optimizer, option or argument is wrong.
        TraceError: The model cannot be traced.
        InfeasibleError: It does not fit; the text names the missing memory.
        ExecutionError: Verification found a difference from the unsplit model.
    """
    _check_model(model)
    if costs not in ("measure", "estimate") and not isinstance(costs, Profile):
        raise InputError(
            f'costs is {costs!r}; it must be "measure", "estimate" or a baechi.Profile.'
        )
    options = {"training": training, "verify": verify, "progress": progress, "guard": guard}
    for what, option in options.items():
        check_is(option, bool, what)
    check_optimizer(optimizer)
    _check_search(placer, effort, constraints)
    check_positive(max_shapes, "max_shapes")
    if threads_per_device is not None:
        check_threads(threads_per_device, "threads_per_device")
    checkpoint = checked(checkpoint)
    if checkpoint is not None and not training:
        raise InputError("checkpoint is for training=True: an inference keeps nothing anyway.")
    loader = None
    if weights is not None:
        loader = Weights(weights, check_is(convert_weights, bool, "convert_weights"))
        loader.check(model)
    elif convert_weights:
        raise InputError("convert_weights=True is for weights=..., which was not given.")
    others = {"verify": verify, "compile": compile, "cuda_graphs": cuda_graphs}
    cutting = check_microbatches(microbatches, batch, others)
    _check_objective(objective, training=training, batches=cutting.n)
    target = memory_target(checkpoint)
    world = devices if isinstance(devices, Ranks) else None
    if world is not None:
        refuse_for_ranks(others)
        if weights is None:
            refuse_meta(model)
    cluster = world.cluster if world is not None else as_lanes(with_kinds(probe(devices)))
    cluster = cluster if target is None else within_memory(cluster, target)
    places = list(
        world.places if world is not None else (torch_device(row.name) for row in cluster.devices)
    )
    compile_options(compile, ())  # report wrong options before tracing
    gpus = [place for place in places if place.type == "cuda"]
    unmeasured = checkpoint is not None or cutting.n > 1
    if placer == "auto" and guard and unmeasured and gpus and len(set(places)) == 1:
        placer = "single"  # what lanes of a GPU gain is left to measurement, which is not made then
    check_wish(cuda_graphs, places)
    entry_ns = (0, 0)
    if cuda_graphs is not False:
        cluster, entry_ns = replayed(
            *(cluster, places),
            whole=cutting.n == 1,
            measured=not isinstance(devices, Cluster),
            training=training,
        )
    dynamic = check_dynamic(dynamic) and cutting.n == 1 and world is None and dynamic
    say = _say if progress and (world is None or world.rank == 0) else lambda _: None
    planner = _Planner(
        cluster=cluster,
        places=places,
        placer=placer,
        training=training,
        optimizer=optimizer,
        costs=costs,
        verify=verify,
        progress=progress,
        threads=threads_per_device,
        constraints=constraints,
        effort=effort,
        guard=guard and placer == "auto" and objective == "step" and world is None,
        compile=compile,
        cuda_graphs=cuda_graphs,
        entry_ns=entry_ns,
        checkpoint=checkpoint,
        traces=CallTraces(dynamic, say),
        say=say,
        weights=loader,
        microbatches=cutting.n,
        objective=objective,
        model=model,
        ranks=world,
    )
    if loader is not None and verify and len(set(places)) > 1:
        raise InputError(
            "verify=True compares with the model whole on one device, where weights=... never "
            "brings it. Verify a smaller model of this class, or place this one from its weights "
            "in memory."
        )
    state = PlacedState(model, places, planner, max_shapes, cutting, world)
    if example_args is not None or example_kwargs is not None:
        with state.lock:
            state.plan(() if example_args is None else example_args, example_kwargs)
    return installed(state)


def _check_search(placer: Any, effort: Any, constraints: Any) -> None:
    placer_of(placer)
    if effort is not None:
        check_effort(effort)
    if constraints is not None and not isinstance(constraints, Constraints):
        raise InputError(f"constraints is {constraints!r}; give a baechi.Constraints or None.")


def _check_objective(objective: str, *, training: bool, batches: int) -> None:
    check_choice(objective, OBJECTIVES, "objective")
    if objective != "step" and (training or batches != 1):
        raise InputError(
            f"objective={objective!r} is for requests: give training=False, and no microbatches=."
        )


def _check_model(model: nn.Module) -> None:
    """Check that a module neither is placed nor contains a placed one."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is of type {type(model).__name__}; give a torch.nn.Module.")
    if isinstance(model, PlacedModule):
        raise InputError("the model is placed already; call model.unplace() first.")
    refuse_holding(model)


@final
@dataclass(frozen=True, kw_only=True)
class _Planner:
    """The steps of `place` in order, for one shape of call."""

    cluster: Cluster
    places: Sequence[torch.device]
    placer: Any
    training: bool
    optimizer: str | None
    costs: str | Profile
    verify: bool
    progress: bool
    threads: int | None
    constraints: Constraints | None
    effort: str | None
    guard: bool
    compile: bool | Mapping[str, Any]
    cuda_graphs: CudaGraphs
    entry_ns: tuple[int, int]  # for how long a forward and a backward that are graphs wait
    checkpoint: Checkpoint
    weights: Weights | None
    microbatches: int
    objective: str
    model: nn.Module
    ranks: Ranks | None
    traces: CallTraces
    say: Callable[[str], None]
    choice: str = ""  # why there are so many micro-batches, if that was chosen

    def joined(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> Executable | None:
        """An earlier plan whose family takes this call, too, and that fits at its shape."""
        for special in kin:
            values = special.joined(call) if special.holds() else None
            if values is None or special.admission is None or special.admission.missing(values):
                continue
            _keep_graphs(special, values)
            if self.verify:
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
        gradients = torch.is_grad_enabled()
        with self._planning():
            call, traced = self._traced(model, call, kin, gradients=gradients)
            with torch.set_grad_enabled(gradients):
                taken = self.joined(model, call, [each for each in kin if each.traced is traced])
                if taken is not None:
                    return taken
                loss = isinstance(model, ModelWithLoss)
                batches = self.microbatches if loss or model is self.model else 1
                cut = batches > 1
                dims = batch_dimensions(traced, call, loss=loss, say=self.say) if cut else None
            whole = unsplit_part(traced) if len(self.cluster.devices) > 1 else ""
            if whole:
                warnings.warn(whole, stacklevel=2)
            shapes = self.traces.references(traced, call, kin)
            try:
                graph, placement, checkpoint = self._solved(
                    traced if shapes is None else sized(traced, shapes[0]),
                    *(homes, batches),
                    partial(self._remembered, traced, cut=cut or loss),
                )
            except InfeasibleError as error:
                raise with_text(error, f"{error}{largest_that_fits(call, kin)}") from None
            if self.weights is not None and self.weights.pending:
                self.say("reading weights")
                peaks = simulate(graph, self.cluster, placement).peak_bytes
                rows = zip(self.cluster.devices, peaks, self.places, strict=True)
                room = [(device.memory_bytes - peak, place) for device, peak, place in rows]
                state = devices_of_state(traced.module, placement.devices)
                self.weights.load(model, places_of(state, room))
            unsplit = Unsplit(model) if self.verify else None
            special = self._executable(
                *(traced, graph, placement), batches=batches, own_loss=loss, dimensions=dims
            )
            special = self._guarded(special, homes)
            placement = special.placement
            if special.stale:
                warnings.warn(special.stale, stacklevel=2)
            special.note = self.choice or self.traces.note(model, call, kin)
            if shapes is not None:
                special.admission = Admission(
                    *(traced, graph, placement, self.cluster, self.constraints, self._gpus),
                    *(checkpoint, *shapes, partial(self._profiles, batches=batches)),
                    besides=partial(self._crowded, batches=batches),
                    replayed=self.cuda_graphs is not False,
                )
                _keep_graphs(special, shapes[0])
            if self.progress:
                schedule = cast(Schedule, special.schedule)
                self.say(outlook(schedule, self.cluster, placement.devices))
            if unsplit is not None:
                self._verify(unsplit, special, call)
            return special

    def _verify(self, unsplit: Unsplit, special: Executable, call: Call) -> None:
        if not special.own_loss:
            return verify(unsplit, special, call)
        # A step goes backward by itself, so what is compared is a call with the same tapes.
        called = self._executable(special.traced, cast(OpGraph, special.graph), special.placement)
        try:
            return verify(unsplit, called, call)
        finally:
            called.close()

    @contextmanager
    def _planning(self) -> Iterator[None]:
        # Collections are a tenth of the time; but what is measured is to leave no memory behind.
        alone = nullcontext() if self.costs == "measure" else no_collections()
        # A first call without gradients must not make a plan that has none.
        with torch.inference_mode(False), torch.enable_grad(), unhooked(), alone:
            yield

    def _traced(
        self, model: nn.Module, call: Call, kin: Sequence[Executable], *, gradients: bool
    ) -> tuple[Call, Traced]:
        """A call with objects of its own, and its trace."""

        def trace() -> tuple[Call, Traced]:
            if self.weights is None and self.ranks is None:
                refuse_meta(model)
            own = own_objects(model, beside(model, call))
            devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
            # Weights that were read to several devices may fit on no single one.
            apart = shown_on_cpu() if len(devices) > 1 else nullcontext()
            with torch.set_grad_enabled(gradients), apart:  # a model may read the caller's mode
                return own, self.traces.trace(model, own, kin)

        return trace_of_all(self.ranks, trace)

    def choose(
        self, model: nn.Module, call: Call, cutting: Microbatches
    ) -> tuple["_Planner", Microbatches]:
        """What plans for the number of micro-batches with the shortest predicted step.

        The smaller of two that are alike. If there is a plan for none, the whole batch's error.

        Raises:
            OwnLossError: The call returns its own loss.
        """
        steps: dict[int, int] = {}
        failures: dict[int, BaechiError] = {}
        for n in reversed(cutting.choices(call)):
            some, planner = replace(cutting, n=n), replace(self, microbatches=n)
            try:
                steps[n] = planner._step_ns(model, some.split(call)[0])
            except OwnLossError:
                raise
            except BaechiError as error:
                failures[n] = error
        if not steps:
            raise failures[1]
        n = min(sorted(steps), key=steps.__getitem__)
        rows = ", ".join(f"{m}: {format_ns(steps[m])}" for m in sorted(steps))
        choice = f"microbatches='auto' chose {n}, by predicted steps ({rows})."
        choice += "".join(f" Not {m}: {error}" for m, error in list(failures.items())[-1:])
        self.say(choice)
        return replace(self, microbatches=n, choice=choice), replace(cutting, n=n)

    def _step_ns(self, model: nn.Module, call: Call) -> int:
        """The predicted step of micro-batches like this call, with what their turns take."""
        n, loss = self.microbatches, isinstance(model, ModelWithLoss)
        gradients = torch.is_grad_enabled()
        with self._planning():
            call, traced = self._traced(model, call, (), gradients=gradients)
            if n > 1:
                with torch.set_grad_enabled(gradients):
                    batch_dimensions(traced, call, loss=loss, say=self.say)
            graph, placement, _ = self._solved(traced, {}, n, lambda _: None)
        if n == 1 or loss or not self.training:
            turns = len(placement.turns or segments_of(graph, placement))
            return simulate(graph, self.cluster, placement).makespan_ns + turns * _TURN_NS
        rhythm = ordered_turns(graph, self.cluster, placement, n, joined=True)
        if overflows(Schedule((), (), rhythm.peak_bytes), self.cluster, self.constraints):
            raise InputError(f"what {n} micro-batches keep does not fit; step() keeps less.")
        return rhythm.step_ns + len(rhythm.turns) * _TURN_NS

    def _executable(
        self, traced: Traced, graph: OpGraph, placement: Placement, **microbatches: Any
    ) -> Executable:
        if self.ranks is not None:
            special = Executable(
                *(traced, graph, placement, self.places, self.threads),
                *(None, False, graph, self.cluster),
                ranks=self.ranks,
                **microbatches,
            )
            special.wants_gradients = self.training
            rhythm, schedule = special.rhythm, cast(Schedule, special.schedule)
            step_ns = schedule.makespan_ns if rhythm is None else rhythm.step_ns
            compare_programs(self.ranks, special.program, step_ns)
            if self.training and (idle := without_parameters(self.ranks, special.state_devices)):
                self.say(idle)
            return special
        special = executable(
            *(traced, placement, None, graph, self.cluster),
            *(self.threads, self.compile, self.cuda_graphs),
            **microbatches,
        )
        if special.rhythm is not None:
            peaks = special.rhythm.peak_bytes
            if special.graphs is not None:
                peaks = cast(Schedule, special.schedule).peak_bytes
            try:
                check_batches(special.batches, peaks, self.cluster, self.constraints)
            except InfeasibleError:
                special.close()
                raise
        plain = special.batches == 1 and not special.own_loss and not self.needs_runtime
        if plain and len(set(placement.devices)) == 1:
            peaks = unsplit_peaks(graph, self.cluster, placement.devices[0])
            if not overflows(Schedule((), (), peaks), self.cluster, self.constraints):
                special.unsplit_on = self.places[placement.devices[0]]
        special.wants_gradients = self.training
        return special

    def _guarded(self, split: Executable, homes: ParameterDevices) -> Executable:
        """What is faster by measurement: a split, or all on the best device, where that fits."""
        traced, graph = split.traced, cast(OpGraph, split.graph)
        cut = split.batches > 1 or split.own_loss
        if not self.guard or self.checkpoint or cut:
            return split
        if len(set(split.placement.devices)) == 1:
            found = self._remembered(traced, graph, cut=cut)
            if found is not None and not found.prefers_split:
                self.say(str(found))
                split.comparison = str(found)
            return split
        placement = self._single(traced, graph, homes)
        if placement is None:
            return split
        single = self._executable(traced, graph, placement)
        found = compare(split, single)
        self.say(str(found))
        kept, dropped = (split, single) if found.prefers_split else (single, split)
        dropped.close()
        kept.settle()
        kept.comparison = str(found)
        return kept

    def _remembered(self, traced: Traced, graph: OpGraph, *, cut: bool) -> Comparison | None:
        """What was found faster in an earlier run, where `_guarded` would measure it."""
        if not self.guard or self.checkpoint or cut or len(self.cluster.devices) == 1:
            return None
        graphs = self.cuda_graphs is not False
        return remembered(traced, len(graph.ops), self.places, graphs=graphs)

    def _single(self, traced: Traced, graph: OpGraph, homes: ParameterDevices) -> Placement | None:
        """All on the best device; None if that does not fit."""
        try:
            constraints = pinned(traced, self.cluster, homes, self.constraints)
            return solve_with_held(
                graph, self.cluster, "single", self._gpus, constraints=constraints
            )
        except (InfeasibleError, InputError):
            return None

    @property
    def needs_runtime(self) -> bool:
        """True if an option asks for what only the runtime does."""
        cut = self.microbatches != 1 or self.ranks is not None
        wishes = (self.compile, self.cuda_graphs, self.checkpoint, self.threads, cut)
        return any(wish not in (False, None) for wish in wishes)

    @property
    def _gpus(self) -> list[str | None]:
        return list(gpus_of(self.places))

    def _solved(
        self,
        traced: Traced,
        homes: ParameterDevices,
        batches: int,
        compared: Callable[[OpGraph], Comparison | None],
    ) -> tuple[OpGraph, Placement, Any]:
        """As `_searched`, with costs of each kind of device."""
        profiles = self._crowded(self._profiles(traced, batches), batches)
        search = partial(self._searched, traced, profiles, homes, batches, compared)
        return placement_for_all(self.ranks, search)

    def _searched(
        self,
        traced: Traced,
        profiles: Sequence[Profile],
        homes: ParameterDevices,
        batches: int,
        compared: Callable[[OpGraph], Comparison | None],
    ) -> tuple[OpGraph, Placement, Any]:
        """The graph, its placement, and what runs forward again in it.

        Parameters and buffers are where earlier calls put them. A split that an earlier run found
        slower than one device, and would again, is not searched for.

        If that does not fit, those without optimizer state may move.
        """
        if self.cuda_graphs:
            profiles = [tape_costs(row, self.entry_ns) for row in profiles]
        limited = memory_target(self.checkpoint) is not None

        def graph_of(checkpoint: Any) -> OpGraph:
            return traced.graph(
                profiles, training=self.training, optimizer=self.optimizer, checkpoint=checkpoint
            )

        again: Any = None if limited else self.checkpoint
        if isinstance(traced.module.model, ModelWithLoss) and not isinstance(again, bool | None):
            again = [f"model.{path}" for path in ([again] if isinstance(again, str) else again)]
        if self.checkpoint is None and self.training:
            again = checkpointed_by_the_model(traced) or None
            if again:
                self.say(f"recomputing {', '.join(again)}, whose gradient checkpointing is on")
        graph = graph_of(again)
        Problem(graph, self.cluster, self.constraints)  # reports errors of these alone
        known = compared(graph)
        lost = known is not None and not known.prefers_split
        trained = {t: home for t, home in homes.items() if self.training and t.requires_grad}
        stays = len(trained) == len(homes) or self.ranks is not None  # nothing moves between ranks
        tiers = [homes] if stays else [homes, trained]
        for stay in tiers:
            try:
                constraints = pinned(traced, self.cluster, stay, self.constraints)
                if limited:
                    names = choose_checkpoint(
                        *(traced, profiles, self.cluster),
                        optimizer=self.optimizer,
                        placer=self.placer,
                        constraints=constraints,
                    )
                    again = names or None
                    graph = graph_of(again)
                    if names:
                        self.say(f"recomputing {', '.join(names)}")
                n = len(self.cluster.devices)
                self.say(f"placing {len(graph.ops)} operators on {n} devices")
                placement = self._single(traced, graph, stay) if lost else None
                placement = placement or solve_with_held(
                    *(graph, self.cluster, self.placer, self._gpus),
                    effort=self.effort,
                    constraints=constraints,
                    replayed=self.cuda_graphs is not False,
                    microbatches=batches,
                    objective=self.objective,
                )
                return graph, placement, again
            except (InfeasibleError, InputError) as error:
                if isinstance(error, InfeasibleError) and self.training and not self.checkpoint:
                    error = with_text(
                        error,
                        f"{error} Or give checkpoint=True: parts run forward again instead of "
                        "being kept.",
                    )
                if not stay:
                    raise error from None
                failure = error
        raise with_text(
            failure,
            f"{failure} In this call the parameters of the placed {traced.name} have to stay where "
            "its first call put them, since the optimizer's state is there. Let the largest call "
            "be the first, or give it as example_args; or call unplace(), and place the model "
            "anew.",
        )

    def _crowded(self, rows: Sequence[Profile], batches: int) -> list[Profile]:
        """The costs, with those of CPUs in this process where all are busy."""
        workers = sum(place.type == "cpu" for place in self.places)
        given = isinstance(self.costs, Profile) or self.compile is not False
        if workers < 2 or self.ranks is not None or given:
            return [*rows]
        cpus = [row for row in rows if row.kind == "cpu"]
        return [*rows, *(crowded(row, workers, whole=batches == 1) for row in cpus)]

    def _profiles(self, traced: Traced, batches: int) -> list[Profile]:
        """The costs: one profile, or one per kind of device, the first device's kind first."""
        cut = batches if self.training else 1
        if isinstance(self.costs, Profile):
            return [self.costs]
        if self.costs == "estimate":
            most = self._most_lanes([device.kind for device in self.cluster.devices])
            kinds = [*most, *(lane_kind(kind, n) for kind, n in most.items() if n > 1)]
            return [estimate(traced, kind, microbatches=cut) for kind in kinds]
        if (ranks := self.ranks) is not None:
            options: Any = {"threads": self.threads or torch.get_num_threads()}
            options["progress"] = self.progress and ranks.rank == 0
            measured = partial(profile, traced, ranks.device, microbatches=cut, **options)
            return costs_of_kinds(ranks, measured)
        threads, cpus = self.threads, sum(place.type == "cpu" for place in self.places)
        if threads is None and cpus:  # an operator's threads are its device's share
            threads = max(torch.get_num_threads() // cpus, 1)
        first: dict[str, torch.device] = {}
        for place in self.places:
            first.setdefault(device_kind(place), place)
        most = self._most_lanes([*map(device_kind, self.places)])
        rows = [(place, 1) for place in first.values()]
        rows += [(first[kind], lanes) for kind, lanes in most.items() if lanes > 1]
        alone = partial(profile, traced, threads=threads, progress=self.progress)
        return [alone(place, lanes=lanes, microbatches=cut) for place, lanes in rows]

    def _most_lanes(self, kinds: Sequence[str]) -> dict[str, int]:
        """The most lanes into which a GPU of each kind is cut, given every device's kind."""
        most = dict.fromkeys(kinds, 1)
        for kind, place in zip(kinds, self.places, strict=True):
            if place.type == "cuda":
                most[kind] = max(most[kind], self.places.count(place))
        return most


def _keep_graphs(special: Executable, values: Sequence[int]) -> None:
    """Let a plan keep CUDA graphs of as many shapes as fit at once."""
    if special.graphs is not None and special.admission is not None:
        special.graphs.most_shapes = special.admission.most_replayed(values)


def _say(text: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"baechi: {text}", style="dim")
