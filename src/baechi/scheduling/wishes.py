"""What a scheduler wants of a decision besides that the graph fits."""

from dataclasses import dataclass, field
from typing import final

from baechi.constraints import Constraints
from baechi.errors import InputError
from baechi.placers.auto import check_effort
from baechi.scheduling.claims import check_share
from baechi.topology import LEVELS
from baechi.values import check_count


@final
@dataclass(frozen=True, slots=True)
class Wish:
    """What a scheduler wants.

    Attributes:
        same: `"node"` or `"switch"`: all devices must be of one; `""` is anywhere.
        slack_milli: A step so many thousandths longer than the shortest that was found is accepted
            for fewer devices. 0 is the shortest step; `None` the fewest devices, whatever it takes.
        share_milli: The compute that the job takes of every device, in thousandths; `None` is all
            that is left of each.
        effort: `"fast"` list-schedules and packs on a few choices of devices; `"balanced"` tries
            more of them, solves where nothing fits, and solves with effort fast on those that it
            returns; `"thorough"` does the same with effort balanced.
        constraints: As `baechi.solve` takes them, a limit on the number of devices among them.

    Raises:
        InputError: A level or an effort is unknown, or a number out of range.
    """

    same: str = ""
    slack_milli: int | None = 0
    share_milli: int | None = None
    effort: str = "fast"
    constraints: Constraints = field(default_factory=Constraints)

    def __post_init__(self) -> None:
        if self.same not in ("", *LEVELS):
            raise InputError(f"same is {self.same!r}; it must be one of {', '.join(LEVELS)} or ''.")
        if self.slack_milli is not None:
            check_count(self.slack_milli, "slack_milli")
        if self.share_milli is not None:
            check_share(self.share_milli, "a wish")
        check_effort(self.effort)
        if not isinstance(self.constraints, Constraints):
            raise InputError(f"constraints is {self.constraints!r}; give a baechi.Constraints.")
