"""What a plan counts of the launches of CUDA graphs."""

import pytest
import torch
from torch import nn

import baechi
from baechi.probing.cluster_probe import ReplayHost
from baechi.probing.graph_launches import GRAPH_LAUNCH_NS, tape_costs, tape_links
from baechi.records.op_costs import OpCost


@pytest.mark.parametrize(
    ("names", "overhead_ns"),
    [(["cuda:0/a", "cuda:0/b"], 0), (["cuda:0", "cuda:1"], 30 + GRAPH_LAUNCH_NS)],
)
def test_lanes_of_one_gpu_hand_nothing_over_in_a_graph(names: list[str], overhead_ns: int) -> None:
    rows = [baechi.Device(name, 1, host="python") for name in names]
    cluster = baechi.Cluster.connected(rows, baechi.Link(5, 10**9, overhead_ns=30))
    places = [torch.device(name.split("/")[0]) for name in names]
    link = tape_links(cluster, places).links[0][1]
    assert link == baechi.Link(5, 10**9, overhead_ns=overhead_ns)
    if overhead_ns:
        assert tape_links(cluster, places, 7).links[0][1].overhead_ns == 37


def test_the_host_enters_a_forward_and_a_backward_once_and_ends_a_step() -> None:
    """So a step of graphs is no shorter than its calls, however short its operators are."""
    costs = tuple(OpCost(10, 20, forward_launch_ns=7, backward_launch_ns=9) for _ in range(3))
    profile = baechi.Profile("0", "", (OpCost(10, 0), *costs, OpCost(10, 0)))
    found = tape_costs(profile, ReplayHost(300, 500, 900))
    launches = [(row.forward_launch_ns, row.backward_launch_ns) for row in found.costs]
    assert launches == [(300, 0), (0, 900), (0, 0), (0, 500), (0, 0)]
    traced = baechi.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),))
    costs = tuple(OpCost(10, 20 if op.differentiable else 0) for op in traced.ops)
    profile = baechi.Profile(traced.digest, "", costs)
    device = baechi.Device("cuda:0", "1GiB", host="python", launches_ahead=True)
    cluster = baechi.Cluster((device,), ((None,),))
    host = ReplayHost(300_000, 500_000, 70_000)
    for training, host_ns in ((False, 300_000), (True, 870_000)):
        graph = traced.graph(tape_costs(profile, host), training=training)
        placement = baechi.solve(graph, cluster, placer="single")
        step_ns = baechi.simulate(graph, cluster, placement).makespan_ns
        assert host_ns < step_ns < host_ns + 1_000
