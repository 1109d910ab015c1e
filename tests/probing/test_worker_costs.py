"""Workers of one process take Python's lock from each other: short operators stay together."""

import pytest
import torch
from torch import nn

import baechi
from baechi.probing.worker_costs import ENTRY_NS, LOCK_NS, crowded
from baechi.records.op_costs import OpCost, Profile


class Branches(nn.Module):
    """Two chains of products, and their sum."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.chains = nn.ModuleList(
            nn.Sequential(*(nn.Linear(width, width) for _ in range(length))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.chains
        return left(x) + right(x)


@pytest.mark.parametrize(("width", "rows", "used"), [(32, 64, 1), (1024, 256, 2)])
def test_short_operators_stay_on_one_cpu(width: int, rows: int, used: int) -> None:
    placed = baechi.place(
        Branches(width, 40),
        {"cpu:0": "1GiB", "cpu:1": "1GiB"},
        example_args=(torch.randn(rows, width),),
        costs="estimate",
        guard=False,
        progress=False,
    )
    assert len(set(placed.placement.devices)) == used
    placed.unplace()


def test_on_one_device_operators_take_their_own_time() -> None:
    x = torch.randn(4, 32)
    steps = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        placed = baechi.place(
            Branches(32, 4),
            dict.fromkeys(devices, "1GiB"),
            placer="single",
            example_args=(x,),
            costs="estimate",
            progress=False,
        )
        steps.append(placed.schedule.makespan_ns)
        placed.unplace()
    assert steps[0] == steps[1]


def test_of_several_workers_each_operator_waits_for_the_lock() -> None:
    costs = (OpCost(0), OpCost(100, 50, inference_ns=90), OpCost(200, 70), OpCost(1, 1))
    found = crowded(Profile("traced", "cpu", costs), 3, whole=True)
    assert found.kind == "cpu, 3 lanes"
    assert [row.forward_ns for row in found.costs] == [
        *(ENTRY_NS[0], 100 + LOCK_NS),
        *(200 + LOCK_NS, 1),
    ]
    assert [row.inference_ns for row in found.costs] == [None, 90 + LOCK_NS, None, None]
    assert [row.backward_ns for row in found.costs] == [
        *(0, 50 + LOCK_NS),
        *(70 + LOCK_NS, 1 + ENTRY_NS[1]),
    ]
    part = crowded(Profile("traced", "cpu", costs), 3, whole=False)
    assert part.costs[0].forward_ns == 0
