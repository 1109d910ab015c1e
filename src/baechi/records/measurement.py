"""Measured step times and peak memory of a placed model, for comparison with the prediction."""

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
        samples_ns: The time of every counted step, in order.
        moved_bytes: Bytes sent between devices in one step.
        absent_bytes: Bytes of every device that the plan includes but the measured steps did not
        use: the state of an optimizer that was not given. Compare `peak_bytes` with the
            predicted peak less this. Empty where nothing is absent.

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
        """Bytes on `device` that the plan includes and the measured steps did not use."""
        return self.absent_bytes[device] if self.absent_bytes else 0


def error_of(predicted: int, measured: int) -> float | None:
    """Relative error of a prediction; positive if it was too high.

    `None` where it is undefined: measured is 0 and predicted is not.
    """
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured
