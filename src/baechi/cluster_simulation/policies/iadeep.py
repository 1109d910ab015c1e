"""A new job where it and those who are there slow each other down least: IADeep.

The rule (Chen et al., "Interference-aware Multiplexing for Deep Learning in GPU Clusters: A
Middleware Approach", SC'23, and its published code): a job starts at once on the GPU on which the
interference would be the least: the sum, over all jobs there with it, of how much longer a step
takes than alone, relative to that. Nobody is moved or stopped.

Where we leave it: it learns the interference of sets of models as it runs them (a random forest);
here it is that of the simulation's sharing. It then tunes the batch sizes of the jobs on that GPU,
which jobs here do not have, and so does not choose when there is more to gain by waiting. Jobs that
share have equally many GPUs, and are at most as many as the sharing admits.
"""

from collections.abc import Sequence
from typing import final

from baechi.cluster_simulation.policy_support.allocation import (
    AllocatingPolicy,
    Allocation,
    ClusterView,
)


def interference(kept: Sequence[float]) -> float:
    """What jobs lose together, by the part of its rate that each keeps."""
    return sum(1 / part - 1 if part else float("inf") for part in kept)


@final
class IADeep(AllocatingPolicy):
    """The first to arrive, where it interferes least."""

    name = "iadeep"

    def allocate(self, view: ClusterView) -> Sequence[Allocation]:
        """The running jobs, and who finds room alone or beside some of them."""
        answer = view.kept()
        free = len(view.idle)
        groups = [(len(group[0].grant.gpus), group) for group in view.groups()]
        for run in view.waiting:
            needs = view.needs(run)
            if needs <= free:
                free -= needs
                answer.append(Allocation(run))
                groups.append((needs, [run]))
                continue
            choices = [
                (interference(view.slowed_together((*group, run))), place)
                for place, (size, group) in enumerate(groups)
                if size == needs and view.may_share((*group, run))
            ]
            least, place = min(choices, default=(float("inf"), 0))
            if least < float("inf"):
                group = groups[place][1]
                answer.append(Allocation(run, beside=group[0]))
                group.append(run)
        return answer
