"""Executables of placements, and the measured comparison of a split with one device."""

from collections.abc import Callable
from typing import Any, cast

from baechi.errors import ExecutionError, InfeasibleError
from baechi.planning.options import Options
from baechi.planning.placement_search import on_one_device
from baechi.problem.simulation import overflows, unsplit_peaks
from baechi.processes.agreement import compare_programs, without_parameters
from baechi.processes.world import Ranks
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Schedule
from baechi.runtime.admission import check_batches
from baechi.runtime.executable import Executable
from baechi.runtime.placed_module import executable
from baechi.runtime.step_measurement import Comparison, compare, remembered
from baechi.runtime.torch_compile import compile_options
from baechi.runtime.weights import ParameterDevices
from baechi.traced.traced_model import Traced


def executable_of(
    options: Options, traced: Traced, graph: OpGraph, placement: Placement, **microbatches: Any
) -> Executable:
    """What runs a placement; on one device the user's own model, where no option needs more.

    Raises:
        InfeasibleError: What calls of micro-batches keep does not fit.
    """
    if options.ranks is not None:
        return _executable_of_a_rank(
            options.ranks, options, traced, graph, placement, **microbatches
        )
    special = executable(
        *(traced, placement),
        graph=graph,
        cluster=options.cluster,
        threads_per_device=options.threads,
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
        **microbatches,
    )
    if special.rhythm is not None:
        peaks = special.rhythm.peak_bytes
        if special.graphs is not None:
            peaks = cast(Schedule, special.schedule).peak_bytes
        try:
            check_batches(special.batches, peaks, options.cluster, options.constraints)
        except InfeasibleError:
            special.close()
            raise
    plain = special.batches == 1 and not special.own_loss and not options.needs_runtime
    if plain and len(set(placement.devices)) == 1:
        peaks = unsplit_peaks(graph, options.cluster, placement.devices[0])
        if not overflows(Schedule((), (), peaks), options.cluster, options.constraints):
            special.unsplit_on = options.places[placement.devices[0]]
    special.wants_gradients = options.training
    return special


def _executable_of_a_rank(
    ranks: Ranks,
    options: Options,
    traced: Traced,
    graph: OpGraph,
    placement: Placement,
    **microbatches: Any,
) -> Executable:
    special = Executable(
        *(traced, graph, placement, options.places),
        threads=options.threads,
        options=compile_options(options.compile, options.places),
        graph=graph,
        cluster=options.cluster,
        ranks=ranks,
        **microbatches,
    )
    special.wants_gradients = options.training
    rhythm, schedule = special.rhythm, cast(Schedule, special.schedule)
    step_ns = schedule.makespan_ns if rhythm is None else rhythm.step_ns
    compare_programs(ranks, special.program, step_ns)
    if options.training and (idle := without_parameters(ranks, special.state_devices)):
        options.say(idle)
    return special


def guarded(options: Options, split: Executable, homes: ParameterDevices) -> Executable:
    """What is faster by measurement: a split, or all on the best device, where that fits."""
    traced, graph = split.traced, cast(OpGraph, split.graph)
    if not _is_compared(options, cut=split.batches > 1 or split.own_loss):
        return split
    if len(set(split.placement.devices)) == 1:
        found = known_comparison(options, traced)(graph)
        if found is not None and not found.prefers_split:
            options.say(str(found))
            split.comparison = str(found)
        return split
    placement = on_one_device(options, traced, graph, homes)
    if placement is None:
        return split
    single = executable_of(options, traced, graph, placement)
    try:
        found = compare(split, single)
    except ExecutionError as error:  # such as a backward that asserts the mode of training
        single.close()
        split.comparison = f"not compared with one device, since a step fails: {error}"
        return split
    options.say(str(found))
    kept, dropped = (split, single) if found.prefers_split else (single, split)
    dropped.close()
    kept.settle()
    kept.comparison = str(found)
    return kept


def known_comparison(
    options: Options, traced: Traced, *, cut: bool = False
) -> Callable[[OpGraph], Comparison | None]:
    """What was found faster in an earlier run, where `guarded` would measure it."""

    def known(graph: OpGraph) -> Comparison | None:
        if not _is_compared(options, cut=cut) or len(options.cluster.devices) == 1:
            return None
        return remembered(traced, len(graph.ops), options.places, graphs=options.replayed)

    return known


def _is_compared(options: Options, *, cut: bool) -> bool:
    return options.guard and not options.checkpoint and not cut
