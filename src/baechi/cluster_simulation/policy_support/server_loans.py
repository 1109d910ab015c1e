"""Servers on loan, and what it costs to have them back: Lyra's (EuroSys'23) preemption cost."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from baechi.cluster_simulation.jobs import JobRun
from baechi.cluster_simulation.policy_support.allocation import ClusterView


def cheapest(servers: Mapping[int, Mapping[int, bool]], among: Iterable[int]) -> int:
    """The server that costs least to reclaim.

    Args:
        servers: The jobs on each, and whether they can give up just their workers there.
        among: The servers to choose from.
    """
    spread = Counter(job for jobs in servers.values() for job in jobs)

    def cost(server: int) -> float:
        return sum(0.0 if gives else 1 / spread[job] for job, gives in servers[server].items())

    return min(among, key=lambda server: (cost(server), server))


def reclaimed(
    view: ClusterView,
    run: JobRun,
    pool: Sequence[int],
    held: set[int],
    on: dict[int, JobRun],
    back: set[int],
) -> tuple[int, ...]:
    """GPUs for a job of inference; none if others of its kind hold too many.

    Args:
        view: The cluster.
        run: The job.
        pool: The GPUs of inference.
        held: Those of them that jobs of inference have.
        on: The training jobs that run; those that lose their GPUs are taken out.
        back: The servers that are reclaimed; more are added.
    """
    gpus = view.devices.fleet.gpus
    if not view.fits(run, tuple(pool)):
        pool = range(view.total)
    unheld = tuple(gpu for gpu in pool if gpu not in held)
    if not view.fits(run, unheld):
        return ()
    while True:
        servers: dict[int, dict[int, bool]] = {}
        for index, other in on.items():
            stays = Counter(
                gpus[gpu].node for gpu in other.grant.gpus if gpus[gpu].node not in back
            )
            for node, count in stays.items():
                gives = sum(stays.values()) - count >= view.least(other)
                servers.setdefault(node, {})[index] = gives
        busy = {gpu for other in on.values() for gpu in other.grant.gpus}
        idle = (gpu for gpu in unheld if gpu not in busy or gpus[gpu].node in back)
        if taken := view.taken(run, tuple(idle)):
            return taken
        lent = {gpus[gpu].node for gpu in unheld}
        server = cheapest(servers, lent.intersection(servers))
        back.add(server)
        for index, gives in servers[server].items():
            if not gives:
                del on[index]
