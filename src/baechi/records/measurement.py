"""What a placed model really did, to stand beside what was predicted."""

from dataclasses import dataclass
from typing import final

from baechi.errors import InputError
from baechi.validation import check_count, check_counts


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step.

    Attributes:
        step_ns: The median of `samples_ns`.
        peak_bytes: Peak memory of every logical device, in the order of the cluster.
        samples_ns: The time of every step that was counted, in the order in which they ran.
        moved_bytes: Bytes that were sent between devices in one step.
        absent_bytes: For every device what the plan keeps there and these steps did not have: the
            state of an optimizer that was not given. Compare `peak_bytes` with the predicted
            peak less this. Empty where nothing is absent.

    Raises:
        InputError: A number is negative or not whole, or `absent_bytes` is of other devices.
    """

    step_ns: int
    peak_bytes: tuple[int, ...]
    samples_ns: tuple[int, ...]
    moved_bytes: int = 0
    absent_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("step_ns", "moved_bytes"):
            object.__setattr__(self, name, check_count(getattr(self, name), f"{name} measured"))
        for name in ("peak_bytes", "samples_ns", "absent_bytes"):
            values = check_counts(getattr(self, name), f"one of the {name} measured")
            object.__setattr__(self, name, values)
        if self.absent_bytes and len(self.absent_bytes) != len(self.peak_bytes):
            raise InputError(
                f"absent_bytes is of {len(self.absent_bytes)} devices and peak_bytes of "
                f"{len(self.peak_bytes)}; give one number for each device, or none at all."
            )

    def absent(self, device: int) -> int:
        """What the plan keeps on `device` and the measured steps did not have."""
        return self.absent_bytes[device] if self.absent_bytes else 0


def error_of(predicted: int, measured: int) -> float | None:
    """How far a prediction is off, as a share of what was measured; above 0 it was too high.

    `None` where nothing was measured to take a share of: measured is 0 and predicted is not.
    """
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured
