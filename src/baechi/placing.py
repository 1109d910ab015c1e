"""`place`: tracing, profiling, solving and applying in one call, once shapes are known.

Here arguments are checked; `planning` does the steps, for one shape after another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import nn

from baechi.checkpointing import (
    Checkpoint,
    checked,
    memory_target,
    within_memory,
)
from baechi.errors import InputError
from baechi.placers.auto import check_effort
from baechi.placers.searching import placer_of
from baechi.placers.solving import OBJECTIVES
from baechi.planning.options import Options
from baechi.planning.planner import Planner
from baechi.probing.cluster_probe import ReplayHost, probe
from baechi.probing.graph_launches import replayed
from baechi.probing.worker_costs import as_lanes
from baechi.processes.agreement import compare_weights, refuse_for_ranks
from baechi.processes.world import Ranks
from baechi.records.cluster import Cluster, Constraints
from baechi.records.op_costs import Profile
from baechi.records.optimizer_state import check_optimizer
from baechi.runtime.batched_calls import BatchSpec, check_microbatches
from baechi.runtime.call_traces import CallTraces
from baechi.runtime.executors.capture_rules import CudaGraphs, check_wish
from baechi.runtime.placed_module import PlacedModule, installed, refuse_holding
from baechi.runtime.placed_state import PlacedState
from baechi.runtime.runtime_checks import refuse_meta
from baechi.runtime.torch_compile import compile_options
from baechi.runtime.weights import Weights
from baechi.torch_support.torch_devices import torch_device, with_kinds
from baechi.tracing.batch_dimension import NoLossError
from baechi.tracing.families import Dynamic, check_dynamic
from baechi.validation import check_choice, check_is, check_positive, check_threads

MAX_SHAPES: Final = 8
_PLANNED_LATER: Final = (
    "the example returns a number made of all samples, and no loss: the first step with a loss is "
    "what is planned for, placed.step(..., targets=..., loss=...)."
)


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
            names to capacities, a `Cluster`, or None for all that are visible; or `ranks()`.
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
    flags = {"training": training, "verify": verify, "progress": progress, "guard": guard}
    for what, flag in flags.items():
        check_is(flag, bool, what)
    check_optimizer(optimizer)
    _check_search(placer, effort, constraints)
    check_positive(max_shapes, "max_shapes")
    if threads_per_device is not None:
        check_threads(threads_per_device, "threads_per_device")
    checkpoint = checked(checkpoint)
    if checkpoint is not None and not training:
        raise InputError("checkpoint is for training=True: an inference keeps nothing anyway.")
    loader = _loader(model, weights, convert_weights)
    others = {"verify": verify, "compile": compile, "cuda_graphs": cuda_graphs}
    cutting = check_microbatches(model, microbatches, batch, others)
    _check_objective(objective, training=training, batches=cutting.n)
    target = memory_target(checkpoint)
    world = devices if isinstance(devices, Ranks) else None
    if world is not None:
        refuse_for_ranks(others)
        if weights is None:
            refuse_meta(model)
        compare_weights(world, model)
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
    replay = ReplayHost()
    if cuda_graphs is not False:
        cluster, replay = replayed(
            *(cluster, places),
            whole=cutting.n == 1,
            measured=not isinstance(devices, Cluster),
            training=training,
            parameters=sum(1 for _ in model.parameters()),
        )
    dynamic = check_dynamic(dynamic) and cutting.n == 1 and world is None and dynamic
    say = _say if progress and (world is None or world.rank == 0) else lambda _: None
    options = Options(
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
        replay=replay,
        checkpoint=checkpoint,
        microbatches=cutting.n,
        objective=objective,
        ranks=world,
        say=say,
    )
    if loader is not None and verify and len(set(places)) > 1:
        raise InputError(
            "verify=True compares with the model whole on one device, where weights=... never "
            "brings it. Verify a smaller model of this class, or place this one from its weights "
            "in memory."
        )
    traces = CallTraces(dynamic, say, floats=options.cuda_graphs is not True)
    planner = Planner(model=model, options=options, traces=traces, weights=loader)
    state = PlacedState(model, places, planner, max_shapes, cutting, world)
    if example_args is not None or example_kwargs is not None:
        with state.lock:
            _plan(state, () if example_args is None else example_args, example_kwargs, say)
    return installed(state)


def _plan(
    state: PlacedState,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """Plan for the example, but not for a part of a loss, as an autoencoder returns one."""
    try:
        state.plan(args, kwargs)
    except NoLossError:
        say(_PLANNED_LATER)


def _loader(model: nn.Module, weights: Any, convert_weights: Any) -> Weights | None:
    if weights is not None:
        loader = Weights(weights, check_is(convert_weights, bool, "convert_weights"))
        loader.check(model)
        return loader
    if convert_weights:
        raise InputError("convert_weights=True is for weights=..., which was not given.")
    return None


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


def _say(text: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"baechi: {text}", style="dim")
