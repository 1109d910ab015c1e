"""Contention: models of several jobs on one GPU, by exclusion, in turns, or side by side.

A rate is work done per tick. `WORK` units are one tick of a whole GPU of speed 1: a number that all
small counts divide, so that turns among them are exact integers. docs/cluster.md has the rates.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

from baechi.validation import check_positive

WHOLE: Final = 1000  # a GPU's compute, in the thousandths that shares are counted in
WORK: Final = 720_720  # the least common multiple of 1 to 16


@final
@dataclass(frozen=True, slots=True)
class Part:
    """The share of one job in one GPU.

    Attributes:
        memory_bytes: What it holds there.
        compute: The share of the GPU that it keeps busy when alone, in thousandths.
        limit: The share that it may use at most, in thousandths.
    """

    memory_bytes: int = 0
    compute: int = WHOLE
    limit: int = WHOLE


class Sharing(ABC):
    """A model of a GPU that several jobs are on.

    Attributes:
        most: At most so many jobs on one GPU.
        wants_whole: Whether a GPU that others hold memory of is left out.
    """

    most: int
    wants_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self.most, "the most jobs on a GPU")

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """True if a job may join those that are there, memory apart."""
        del part
        return len(parts) < self.most

    @abstractmethod
    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """Work per tick of the job with that part, which is among all parts there.

        The device has this share of a GPU, in thousandths.
        """


def _alone(part: Part, share: int) -> int:
    """The rate of a job that has a device for itself: what it keeps busy, or all that is there."""
    return min(WORK, WORK * share // part.compute)


@final
@dataclass(frozen=True, slots=True)
class Exclusive(Sharing):
    """One job per GPU or slice."""

    most: int = 1
    wants_whole: ClassVar[bool] = True

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """All of it."""
        del parts
        return _alone(part, share)


@final
@dataclass(frozen=True, slots=True)
class TimeSliced(Sharing):
    """Up to `most` jobs take turns: the driver's, or those of books of fractions."""

    most: int = 2

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """The nth part of its rate alone."""
        return _alone(part, share) // len(parts)


@final
@dataclass(frozen=True, slots=True)
class SideBySide(Sharing):
    """Up to `most` jobs at once, as under MPS: slowed down only by what they want beyond the whole.

    Attributes:
        packs: Whether jobs are admitted only while their compute fits the GPU (Gandiva's packing).
    """

    most: int = 2
    packs: bool = False

    def admits(self, parts: Sequence[Part], part: Part) -> bool:
        """As all, and within the GPU's compute where `packs`."""
        wanted = sum(other.compute for other in parts) + part.compute
        return len(parts) < self.most and (not self.packs or not parts or wanted <= WHOLE)

    def rate(self, parts: Sequence[Part], part: Part, share: int) -> int:
        """`min(limit, share / sum of compute)`."""
        wanted = sum(other.compute for other in parts)
        return min(WORK, WORK * min(part.limit, share) // part.compute, WORK * share // wanted)
