"""Errors; every text names the problem with its values, the likely cause, and the remedy."""

import sysconfig
import traceback
from pathlib import Path
from typing import final


class BaechiError(Exception):
    """Base of every error that Baechi raises on purpose."""

    def __str__(self) -> str:
        """The message alone; further arguments are attributes, which survive pickling too."""
        return str(self.args[0]) if self.args else ""


class InputError(BaechiError, ValueError):
    """A value at the border is wrong: a size, a name, a rate, a shape."""


@final
class FormatError(InputError):
    """A file is no Baechi file, is damaged, or was written by another version."""


@final
class TraceError(BaechiError):
    """No rung of the ladder could trace the model; the text has the reason of each rung."""


class ExecutionError(BaechiError, RuntimeError):
    """A placed model could not run; a RuntimeError, as those of torch for which loops look."""


@final
class NotSpecializedError(ExecutionError, AttributeError):
    """An attribute of a placed model that its first call decides; `hasattr` is False before."""


@final
class InfeasibleError(BaechiError):
    """No placement was found; the message says whether it is proved that there is none.

    Attributes:
        subject: Name of the op or group that found no room.
        needed_bytes: What it needs on one device.
        left_bytes: Device name and free bytes, per device, at that moment.
        extra_bytes: The smallest extra memory, on `extra_device`, with which a placement was found.
        extra_device: Name of the device that should get it.
    """

    def __init__(
        self,
        message: str,
        subject: str,
        needed_bytes: int,
        left_bytes: tuple[tuple[str, int], ...],
        extra_bytes: int,
        extra_device: str,
    ) -> None:
        super().__init__(message, subject, needed_bytes, left_bytes, extra_bytes, extra_device)
        self.subject = subject
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes
        self.extra_bytes = extra_bytes
        self.extra_device = extra_device


@final
class ReservationError(BaechiError):
    """A ledger refuses to reserve or to release, and is unchanged.

    Attributes:
        reason: `"capacity"`, not so much is left; `"stale"`, a device is no longer as the snapshot
            showed it; `"duplicate"`, the job has a reservation, or the request id was another
            request's; `"unknown"`, there is no such job; `"unavailable"`, its file cannot be used
            now.
    """

    def __init__(self, message: str, reason: str = "capacity") -> None:
        super().__init__(message, reason)
        self.reason = reason


def reason_of(error: Exception) -> str:
    """The reason of a file error, without the error's number and the file's name."""
    return str(getattr(error, "strerror", None) or error)


def with_text(failure: InfeasibleError | InputError, text: str) -> InfeasibleError | InputError:
    """The same failure with another text."""
    return type(failure)(text, *failure.args[1:])


def described(error: BaseException) -> str:
    """An error's type and text, and the last line of the user's own code on its way."""
    # That is neither Baechi's, nor a library's, nor Python's own.
    others = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    libraries, where = {"site-packages", "dist-packages"}, ""
    for row in traceback.extract_tb(error.__traceback__):
        if not row.filename.startswith(others) and not libraries & {*Path(row.filename).parts}:
            where = f" at {row.filename}:{row.lineno}"
    return f"{type(error).__name__}: {error}{where}"
