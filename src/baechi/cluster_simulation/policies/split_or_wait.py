"""A place for a job now, split if need be, or a better one soon."""

from typing import Final, final

from baechi.cluster_simulation.jobs import WORK, JobRun
from baechi.cluster_simulation.policy_support.policy import Offer, Policy

_LOOKS: Final = 3  # of the next ends


@final
class SplitOrWait(Policy):
    """Takes the first place, split if need be, unless waiting for the next ends is sooner.

    A job that is offered a place compares when it would end there with when it would end in the
    place that it would get once the next running jobs have ended. Both assume that nothing else
    changes, but for this: what ends is there for one job, so one that waits for it is not waited
    for by those behind.
    """

    name = "split-or-wait"

    def __init__(self) -> None:
        self._claimed: set[int] = set()

    def order(self, runs: list[JobRun], now: int) -> list[JobRun]:
        """In order of arrival; and nobody waits for an end yet."""
        del now
        self._claimed.clear()
        return runs

    def accepts(self, offer: Offer) -> bool:
        """True if waiting for one of the next ends would not end the job sooner."""
        remaining = offer.run.remaining(offer.now) * WORK
        here = offer.now - (-remaining // offer.rate)
        soonest = sorted(offer.running, key=lambda run: (run.ends_at(), run.index))
        ended: list[JobRun] = []
        for other in soonest[:_LOOKS]:
            end = other.ends_at()
            if end >= here:
                break
            if other.index in self._claimed:
                continue
            ended.append(other)
            rate = offer.rate_after(ended)
            if rate and end - (-remaining // rate) < here:
                self._claimed.update(each.index for each in ended)
                return False
        return True
