"""The search for a placement of one call's graph, and of what runs forward again in it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from baechi.checkpointing import checkpointed_by_the_model, choose_checkpoint, memory_target
from baechi.errors import InfeasibleError, InputError, with_text
from baechi.planning.device_costs import costs_of, with_crowded
from baechi.planning.lane_times import settled
from baechi.planning.options import Options
from baechi.probing.graph_launches import tape_costs
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import overflows
from baechi.processes.agreement import placement_for_all
from baechi.program.stream_memory import scheduled, solve_with_held
from baechi.records.cluster import Constraints
from baechi.records.graph import OpGraph
from baechi.records.op_costs import Profile
from baechi.records.placement import Placement
from baechi.runtime.batched_calls import ModelWithLoss
from baechi.runtime.step_measurement import Comparison
from baechi.runtime.weights import ParameterDevices, pinned
from baechi.traced.traced_model import Traced


def search(
    options: Options,
    traced: Traced,
    homes: ParameterDevices,
    batches: int,
    compared: Callable[[OpGraph], Comparison | None],
) -> tuple[OpGraph, Placement, Any]:
    """The graph with costs of each kind of device, its placement, and what is recomputed in it.

    Parameters and buffers are where earlier calls put them. If that does not fit, those without
    optimizer state may move.

    A split that an earlier run found slower than one device, and would again, is not searched for.
    """
    profiles = with_crowded(options, costs_of(options, traced, batches), batches)
    if options.cuda_graphs:
        profiles = [tape_costs(row, options.replay) for row in profiles]
    here = partial(_search_here, options, traced, profiles, homes, batches, compared)
    return placement_for_all(options.ranks, here)


def on_one_device(
    options: Options, traced: Traced, graph: OpGraph, homes: ParameterDevices
) -> Placement | None:
    """All on the best device; None if that does not fit."""
    try:
        constraints = pinned(traced, options.cluster, homes, options.constraints)
        return solve_with_held(
            graph, options.cluster, "single", options.gpus, constraints=constraints
        )
    except (InfeasibleError, InputError):
        return None


def _search_here(
    options: Options,
    traced: Traced,
    profiles: Sequence[Profile],
    homes: ParameterDevices,
    batches: int,
    compared: Callable[[OpGraph], Comparison | None],
) -> tuple[OpGraph, Placement, Any]:
    training, cluster = options.training, options.cluster
    limited = memory_target(options.checkpoint) is not None

    def graph_of(checkpoint: Any) -> OpGraph:
        return traced.graph(
            profiles,
            training=training,
            optimizer=options.optimizer,
            checkpoint=checkpoint,
            draws_in_order=not any(options.gpus),
        )

    again = None if limited else _recomputed(options, traced)
    graph = graph_of(again)
    Problem(graph, cluster, options.constraints)  # reports errors of these alone
    known = compared(graph)
    lost = known is not None and not known.prefers_split
    trained = {t: home for t, home in homes.items() if training and t.requires_grad}
    stays = len(trained) == len(homes) or options.ranks is not None  # nothing moves between ranks
    tiers = [homes] if stays else [homes, trained]
    for stay in tiers:
        try:
            constraints = pinned(traced, cluster, stay, options.constraints)
            if limited:
                names = choose_checkpoint(
                    *(traced, profiles, cluster),
                    optimizer=options.optimizer,
                    placer=options.placer,
                    constraints=constraints,
                )
                again = names or None
                graph = graph_of(again)
                if names:
                    options.say(f"recomputing {', '.join(names)}")
            options.say(f"placing {len(graph.ops)} operators on {len(cluster.devices)} devices")
            solved = partial(
                solve_with_held,
                cluster=cluster,
                placer=options.placer,
                gpus=options.gpus,
                effort=options.effort,
                constraints=constraints,
                replayed=options.replayed,
                microbatches=batches,
                objective=options.objective,
            )
            placement = on_one_device(options, traced, graph, stay) if lost else None
            other = solved if placement is None and options.placer == "auto" else None
            placement = placement or solved(graph)
            if all(options.gpus) and batches == 1:
                fits = partial(_fits, options, constraints)
                graph, placement = settled(graph, cluster, placement, other, fits)
            return graph, placement, again
        except (InfeasibleError, InputError) as error:
            if isinstance(error, InfeasibleError) and training and not options.checkpoint:
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


def _fits(
    options: Options, constraints: Constraints | None, graph: OpGraph, placement: Placement
) -> bool:
    schedule = scheduled(graph, options.cluster, placement, options.gpus, replayed=options.replayed)
    return not overflows(schedule, options.cluster, constraints)


def _recomputed(options: Options, traced: Traced) -> Any:
    """Submodules that run forward again because the user, or the model itself, says so."""
    again: Any = options.checkpoint
    if isinstance(traced.module.model, ModelWithLoss) and not isinstance(again, bool | None):
        again = [f"model.{path}" for path in ([again] if isinstance(again, str) else again)]
    if again is None and options.training:
        again = checkpointed_by_the_model(traced) or None
        if again:
            options.say(f"recomputing {', '.join(again)}, whose gradient checkpointing is on")
    return again
