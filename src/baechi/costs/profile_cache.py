"""Cache of measured costs: an SQLite file that a second run of the same model reads.

A row is one operator under `Conditions`, committed as soon as it is measured. Several processes may
use one file. A problem with the file never costs a measurement.
"""

import hashlib
import json
import os
import sys
import warnings
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, final

from baechi.errors import FormatError
from baechi.storage.sqlite_file import SqliteFile, SqliteFileError
from baechi.validation import check_path


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """The measured costs of one operator.

    Attributes:
        passes: Number of passes that were measured. All else is as in `OpCost`.
    """

    forward_ns: int
    backward_ns: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    inference_workspace_bytes: int = 0
    forward_spread_ns: int = 0
    backward_spread_ns: int = 0
    remark: str = ""
    backward_reused_bytes: int = 0
    passes: int = 1
    forward_launch_ns: int = 0
    backward_launch_ns: int = 0


@final
@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a measured time depends on besides the operator.

    Attributes:
        kind: Device kind, as in `Device.kind`; `hardware` is the exact processor.
        settings: Settings of torch and of the step that matter, as text.
        method: Version of the measuring procedure.
    """

    kind: str
    hardware: str
    threads: int
    torch: str
    settings: str
    method: int

    def key(self, op_key: str) -> str:
        """The sha256, in hexadecimal, of the operator under these conditions."""
        text = json.dumps([op_key, asdict(self)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class Holding(NamedTuple):
    """Number of operators in a store for one set of conditions, and the time of the last."""

    kind: str
    hardware: str
    threads: int
    torch: str
    operators: int
    last: str


def default_path() -> Path:
    """The file in the user's cache directory, by the convention of the system."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "baechi" / "profiles.sqlite"


_FIELDS: Final = tuple(field.name for field in fields(Measured))
_APPLICATION: Final = 0x42616563  # "Baec" in ASCII
_VERSION: Final = 4
_COLUMNS: Final = ", ".join(
    f"{field.name} {'INTEGER' if field.type is int else 'TEXT'} NOT NULL"
    for field in (*fields(Conditions), *fields(Measured))
)
_CREATE: Final = (
    "CREATE TABLE costs (key TEXT PRIMARY KEY, op TEXT NOT NULL, measured TEXT NOT NULL DEFAULT "
    f"CURRENT_TIMESTAMP, {_COLUMNS}) WITHOUT ROWID"
)


@final
class ProfileStore:
    """The measured costs in one file.

    Args:
        path: The file; `None` is the one in the user's cache directory.

    Raises:
        FormatError: A path was given and the file there is no profile store.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = default_path() if path is None else Path(check_path(path))
        self._writable = True
        self._file: SqliteFile | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connect()
        except (OSError, SqliteFileError) as error:
            reason = getattr(error, "reason", "unavailable")
            if reason == "foreign" and path is not None:
                raise FormatError(
                    f"{str(self.path)!r} is no store of profiles and is left as it is. "
                    "Name another file; a new one is made where there is none."
                ) from error
            self._recover(error, reason)

    def find(self, op_key: str, conditions: Conditions) -> Measured | None:
        """The measured costs of the operator under these conditions, if there are any."""
        query = f"SELECT {', '.join(_FIELDS)} FROM costs WHERE key = ?"
        rows = self._execute(query, (conditions.key(op_key),))
        return Measured(*rows[0]) if rows else None

    def keep(self, op_key: str, conditions: Conditions, measured: Measured) -> None:
        """Writes a row, for good when this returns; warns where it cannot be written."""
        if not self._writable:
            return
        names = ("key", "op", *(f.name for f in fields(Conditions)), *_FIELDS)
        marks = ", ".join("?" * len(names))
        query = f"INSERT OR REPLACE INTO costs ({', '.join(names)}) VALUES ({marks})"
        row = (conditions.key(op_key), op_key, *astuple(conditions), *astuple(measured))
        self._execute(query, row)

    def holdings(self) -> tuple[Holding, ...]:
        """The contents of the store, by conditions."""
        rows = self._execute(
            "SELECT kind, hardware, threads, torch, COUNT(*), MAX(measured) FROM costs "
            "GROUP BY kind, hardware, threads, torch ORDER BY kind, hardware, threads, torch"
        )
        return tuple(Holding(*row) for row in rows)

    def clear(self) -> int:
        """Forgets everything; returns how many operators there were."""
        counted = self._execute("SELECT COUNT(*) FROM costs")
        self._execute("DELETE FROM costs")
        self._execute("VACUUM")
        return int(counted[0][0]) if counted else 0

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        # A killed process loses nothing without durability. A loss of power may damage the file,
        # which is then set aside and measured anew; waiting for the disk at every row costs more.
        self._file = SqliteFile(
            self.path, _APPLICATION, _VERSION, lambda new: new.execute(_CREATE), durable=False
        )

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows that a statement gives; a warning and none where the file cannot be used."""
        try:
            return self._file.execute(statement, values) if self._file is not None else []
        except SqliteFileError as error:
            self._recover(error, error.reason)
            return []

    def _recover(self, error: Exception, reason: str) -> None:
        """Goes on without a file that cannot be used now; else renames it and begins a new one."""
        text = ""
        if reason != "unavailable":
            self.close()
            count = 1
            while (aside := self.path.with_name(f"{self.path.name}.damaged-{count}")).exists():
                count += 1
            try:
                self.path.rename(aside)
                self._connect()
                text = (
                    f"{self.path} cannot be used ({error}); it is now {aside}, and a new one begun"
                )
            except (OSError, SqliteFileError) as second:
                error = second
        if not text:
            self._writable = False
            text = f"cannot use {self.path} ({error}); measured costs are not kept"
        warnings.warn(f"profile store: {text}.", RuntimeWarning, stacklevel=4)
