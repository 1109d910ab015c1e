"""The solver: check, search, simulate; micro-batches and throughput; explain failures."""

import warnings
from typing import Final

from baechi.errors import InputError
from baechi.placers.auto import Auto
from baechi.placers.device_choice import device_choices
from baechi.placers.infeasibility import explain, explain_copies
from baechi.placers.placer import Placer
from baechi.placers.searching import attempt, placer_of, search, with_effort
from baechi.placers.turn_orders import Pipelines
from baechi.problem.problem_arrays import Problem
from baechi.problem.simulation import fits_memory, replay
from baechi.records.cluster import Cluster, Constraints
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement
from baechi.validation import check_choice, check_positive

OBJECTIVES: Final = ("step", "throughput")
# Runs one behind the other for which placements are tried.
_STREAMED: Final = 16


def solve(
    graph: OpGraph,
    cluster: Cluster,
    placer: str | Placer = "auto",
    *,
    effort: str | None = None,
    constraints: Constraints | None = None,
    microbatches: int | str = 1,
    objective: str = "step",
) -> Placement:
    """A valid placement of the graph on the cluster: it fits, and its order is topological.

    A pure function: equal input gives equal bytes.

    Args:
        graph: The graph.
        cluster: The devices, with their free capacity.
        placer: `"auto"`, `"m-topo"`, `"m-etf"`, `"m-sct"`, `"heft"`, `"peft"`, `"contiguous"`,
            `"metis"`, `"local-search"`, `"single"`, `"round-robin"`, `"random"`, in any case, or a
            placer.
        effort: `"fast"`, `"balanced"` or `"thorough"`; see `placers/auto.py`. `None` is the effort
            of an `Auto` value, and `"balanced"` for any other placer.
        constraints: Constraints besides memory.
        microbatches: How many times a step runs the graph, which is that of one micro-batch; the
            placement then has their turns (`placers/turn_orders.py`).
        objective: `"step"`; or `"throughput"`, of runs one behind the other: first a short period,
            the largest load of a device or port per run, then the step. Both are in `stats`.

    Raises:
        InfeasibleError: No placement was found; the text says whether that is proved, and names
            memory with which one was found.
        InputError: The placer or the effort is unknown, times or bytes add up to 2**62, the
            constraints contradict each other, or a placer that does not search violates one.

    Warns:
        UserWarning: The graph has times for kinds of device, and none for one of the cluster's.
    """
    if microbatches == "auto":
        raise InputError(
            "microbatches='auto' compares micro-batches of several sizes, and this graph is of "
            "one. Use baechi.place(model, ..., microbatches='auto'); or solve a graph of each size "
            "with its number, and compare the steps."
        )
    count = check_positive(microbatches, "microbatches")
    check_choice(objective, OBJECTIVES, "objective")
    steady = objective == "throughput"
    if steady and count > 1:
        raise InputError("objective='throughput' does not go with microbatches=, of one step.")
    placer = placer_of(placer)
    if effort is None:
        effort = placer.effort if isinstance(placer, Auto) else Auto().effort
    placer = with_effort(placer, effort)
    problem = Problem(graph, cluster, constraints)
    _warn_of_kinds(graph, cluster)
    placement = (attempt if count == 1 else search)(problem, placer, effort)
    if placement is None:
        explain(problem, placer, effort)
    if not fits_memory(problem, replay(problem, placement.devices, placement.order)):
        raise InputError(f"placer {placer.name!r} returned a placement that does not fit.")
    if count == 1 and not steady:
        return placement
    ones = [placement]
    if effort != "fast" and isinstance(placer, Auto):
        less = search(problem, with_effort(placer, "fast"), "fast")
        ones += [] if less is None else [less]
    allowed = (
        problem if problem.max_devices is None else problem.within(next(device_choices(problem)))
    )
    if steady:
        return Pipelines(graph, allowed, _STREAMED, effort).steady(ones, placer)
    found = Pipelines(graph, allowed, count, effort).best(ones, placer)
    if found is None:
        explain_copies(graph, problem, placement, count)
    return found


def _warn_of_kinds(graph: OpGraph, cluster: Cluster) -> None:
    """Say where times of one kind of device are used for another."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    unknown = [kind for kind in kinds if kind and kind not in graph.times]
    if graph.times and unknown:
        warnings.warn(
            f"the graph has times for {', '.join(graph.times)} and none for {', '.join(unknown)}: "
            "what is predicted there is of the graph's default times. Profile the model on such a "
            "device, or compute its times (`baechi estimate`, or `place` with costs='estimate').",
            stacklevel=3,
        )
