"""Launches of a step that is CUDA graphs: what a plan counts of them, measured where it can be.

An operator in a graph takes no launch of its own. What is left is the launch of each graph, the
time for which a whole forward or backward waits for the host, and what that does with the gradients
while the backward runs (docs/cost-model.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from baechi.probing.cluster_probe import ReplayHost, replay_host
from baechi.probing.link_probe import graph_launch_ns
from baechi.records.cluster import Cluster, Device, Link
from baechi.records.op_costs import Profile
from baechi.torch_support.torch_devices import is_allocator_native

# What the graph of a tape takes of the launching thread, forward or backward, where it is not
# measured: as much as two operators. A guess; beside an H200 it took 3.4 us.
GRAPH_LAUNCH_NS: Final = 10_000


def replayed(
    cluster: Cluster,
    places: Sequence[torch.device],
    *,
    whole: bool,
    measured: bool,
    training: bool,
    parameters: int,
) -> tuple[Cluster, ReplayHost]:
    """The cluster of a step that is CUDA graphs, and the host's part in that.

    Args:
        cluster: The devices, as they launch operators.
        places: The torch device of each.
        whole: Whether all of a phase may be one graph.
        measured: Whether to measure on the GPU; else nothing waits.
        training: Whether there is a backward.
        parameters: Number of the model's parameters.
    """
    gpus = [place for place in places if place.type == "cuda"][: int(measured)]
    found = tape_links(cluster, places, *map(graph_launch_ns, gpus), whole=whole)
    one = whole and set(places) == set(gpus) and is_allocator_native()
    host = partial(replay_host, parameters=parameters, training=training)
    return found, host(*gpus) if one else ReplayHost()


def tape_links(
    cluster: Cluster,
    places: Sequence[torch.device],
    launch_ns: int = GRAPH_LAUNCH_NS,
    *,
    whole: bool = True,
) -> Cluster:
    """The cluster where what a host hands over begins a tape, which is launched with it.

    Lanes of one GPU are one graph, in which nothing is handed over, where a phase is a whole.
    """
    together = whole and len(set(places)) == 1 and places[0].type == "cuda"

    def launched(link: Link | None, device: Device) -> Link | None:
        if link is None or not (device.host and device.launches_ahead):
            return link
        return replace(link, overhead_ns=0 if together else link.overhead_ns + launch_ns)

    rows = (tuple(map(launched, row, cluster.devices)) for row in cluster.links)
    return replace(cluster, links=tuple(rows))


def tape_costs(profile: Profile, host: ReplayHost) -> Profile:
    """The costs of operators in CUDA graphs, which take no launch of their own.

    The first of a forward, and of its backward, waits for the host. The last of the backward does,
    too, until all gradients are with their parameters: so a step ends no earlier than the host.
    """
    costs = [replace(row, forward_launch_ns=0, backward_launch_ns=0) for row in profile.costs]
    if costs:
        costs[0] = replace(costs[0], forward_launch_ns=host.forward_ns)
    differentiated = [op for op, row in enumerate(costs) if row.backward_ns]
    ends = ((differentiated[:1], host.gradients_ns), (differentiated[-1:], host.backward_ns))
    for ops, launch_ns in ends:
        for op in ops:
            costs[op] = replace(costs[op], backward_launch_ns=launch_ns)
    return replace(profile, costs=tuple(costs))
