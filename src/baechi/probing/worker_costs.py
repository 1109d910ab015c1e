"""Workers of one process: what a step of theirs takes beside its operators.

    one device, as is    o o o o          the model's own Python: all of it is in measured costs
    workers              . o  o           a call is handed to them (.), and they take Python's lock
                         . o   o          from each other at every operator

So they are lanes of the CPU, as streams are of a GPU (docs/cost-model.md, "Workers of one
process").
"""

from dataclasses import replace
from typing import Final

from baechi.records.cluster import Cluster, lane_kind
from baechi.records.op_costs import Profile

# Until an operator has the lock again where another worker takes it, and for a call and its
# backward to get to the workers and back. Of one machine: docs/prediction.md has what it showed.
LOCK_NS: Final = 8_000
ENTRY_NS: Final = (200_000, 350_000)
_CPU: Final = "cpu"


def as_lanes(cluster: Cluster) -> Cluster:
    """The cluster where CPUs, as the workers of one process, are lanes."""
    rows = (
        replace(row, lane_of=row.lane_of or _CPU) if row.kind == _CPU else row
        for row in cluster.devices
    )
    return replace(cluster, devices=tuple(rows))


def crowded(profile: Profile, lanes: int, *, whole: bool) -> Profile:
    """The costs of operators where so many workers are busy; of a `whole` step with its entry."""
    last = max((i for i, row in enumerate(profile.costs) if row.backward_ns), default=-1)
    rows = []
    for index, row in enumerate(profile.costs):
        forward_ns = LOCK_NS * (row.forward_ns > 1) + ENTRY_NS[0] * (whole and index == 0)
        backward_ns = LOCK_NS * (row.backward_ns > 1) + ENTRY_NS[1] * (whole and index == last)
        more = replace(
            row,
            forward_ns=row.forward_ns + forward_ns,
            backward_ns=row.backward_ns + backward_ns,
            inference_ns=None if row.inference_ns is None else row.inference_ns + forward_ns,
        )
        rows.append(more)
    return replace(profile, kind=lane_kind(profile.kind, lanes), costs=tuple(rows))
