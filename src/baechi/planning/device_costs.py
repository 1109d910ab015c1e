"""Costs of a model's operators on every kind of device that it is placed on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from baechi.costs.estimation import estimate
from baechi.costs.profiling import profile
from baechi.planning.options import Options
from baechi.probing.worker_costs import crowded
from baechi.processes.agreement import costs_of_kinds
from baechi.records.cluster import lane_kind
from baechi.records.op_costs import Profile
from baechi.torch_support.torch_devices import device_kind
from baechi.traced.traced_model import Traced


def costs_of(options: Options, traced: Traced, batches: int) -> list[Profile]:
    """One profile, or one for each kind of device, the first device's kind first."""
    cut = batches if options.training else 1
    if isinstance(options.costs, Profile):
        return [options.costs]
    if options.costs == "estimate":
        most = _most_lanes(options, [device.kind for device in options.cluster.devices])
        kinds = [*most, *(lane_kind(kind, n) for kind, n in most.items() if n > 1)]
        return [estimate(traced, kind, microbatches=cut) for kind in kinds]
    if (ranks := options.ranks) is not None:
        wishes: Any = {"threads": options.threads or torch.get_num_threads()}
        wishes["progress"] = options.progress and ranks.rank == 0
        measured = partial(profile, traced, ranks.device, microbatches=cut, **wishes)
        return costs_of_kinds(ranks, measured)
    threads, cpus = options.threads, sum(place.type == "cpu" for place in options.places)
    if threads is None and cpus:  # an operator's threads are its device's share
        threads = max(torch.get_num_threads() // cpus, 1)
    first: dict[str, torch.device] = {}
    for place in options.places:
        first.setdefault(device_kind(place), place)
    most = _most_lanes(options, [*map(device_kind, options.places)])
    rows = [(place, 1) for place in first.values()]
    rows += [(first[kind], lanes) for kind, lanes in most.items() if lanes > 1]
    alone = partial(profile, traced, threads=threads, progress=options.progress)
    return [alone(place, lanes=lanes, microbatches=cut) for place, lanes in rows]


def with_crowded(options: Options, rows: Sequence[Profile], batches: int) -> list[Profile]:
    """The costs, with those of CPUs in this process where all are busy."""
    workers = sum(place.type == "cpu" for place in options.places)
    given = isinstance(options.costs, Profile) or options.compile is not False
    if workers < 2 or options.ranks is not None or given:
        return [*rows]
    cpus = [row for row in rows if row.kind == "cpu"]
    return [*rows, *(crowded(row, workers, whole=batches == 1) for row in cpus)]


def _most_lanes(options: Options, kinds: Sequence[str]) -> dict[str, int]:
    """The most lanes into which a GPU of each kind is cut, given every device's kind."""
    most = dict.fromkeys(kinds, 1)
    for kind, place in zip(kinds, options.places, strict=True):
        if place.type == "cuda":
            most[kind] = max(most[kind], options.places.count(place))
    return most
