"""Measured costs on disk: an SQLite file that a second run of the same model reads.

A row is one operator under `Conditions`: everything besides the operator that its time depends on.
Every row is committed as soon as it is measured, so neither Ctrl-C nor a kill loses it. Several
processes may use one file: each statement is its own transaction, and waits for the others'.

What goes wrong with the file never costs a measurement: a damaged file is set aside under another
name and a new one begun; where nothing can be written (a full disk, a read-only folder) the store
says so once and goes on without. A file that somebody named and that is not ours is refused.
"""

import hashlib
import json
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, final

from baechi.errors import FormatError
from baechi.validation import check_path

# "Baec" in ASCII: where SQLite keeps whose file it is.
_APPLICATION_ID: Final = 0x42616563
_SCHEMA_VERSION: Final = 3
_MAGIC: Final = b"SQLite format 3\0"
# Another process writes one row at a time, in milliseconds; longer than this something is stuck.
_BUSY_S: Final = 30.0

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What one operator was measured to cost.

    Attributes:
        passes: How many passes this is from. All else is as in `OpCost`.
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


@final
@dataclass(frozen=True, slots=True)
class Conditions:
    """What a measured time depends on besides the operator.

    Attributes:
        kind: Device kind, as in `Device.kind`.
        hardware: The exact processor.
        threads: CPU threads per operator.
        torch: torch's version.
        settings: What else of torch and of the step matters, as text.
        method: Version of the way of measuring.
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


@final
@dataclass(frozen=True, slots=True)
class Holding:
    """How many operators a store has for one set of conditions, and when the last was measured."""

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
_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS costs (key TEXT PRIMARY KEY, op TEXT NOT NULL, kind TEXT NOT NULL, "
    "hardware TEXT NOT NULL, threads INTEGER NOT NULL, torch TEXT NOT NULL, "
    "settings TEXT NOT NULL, method INTEGER NOT NULL, measured TEXT NOT NULL DEFAULT "
    "CURRENT_TIMESTAMP, forward_ns INTEGER NOT NULL, backward_ns INTEGER NOT NULL, "
    "saved_bytes INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL, "
    "backward_workspace_bytes INTEGER NOT NULL, inference_workspace_bytes INTEGER NOT NULL, "
    "forward_spread_ns INTEGER NOT NULL, backward_spread_ns INTEGER NOT NULL, "
    "remark TEXT NOT NULL, "
    "backward_reused_bytes INTEGER NOT NULL, passes INTEGER NOT NULL) WITHOUT ROWID"
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
        self._is_own = path is None
        self._writable = True
        self._database: sqlite3.Connection | None = None
        self._open()

    def find(self, op_key: str, conditions: Conditions) -> Measured | None:
        """What the operator was measured to cost under these conditions, if it was."""
        names = ", ".join(_FIELDS)
        query = f"SELECT {names} FROM costs WHERE key = ?"
        row = self._try(lambda db: db.execute(query, (conditions.key(op_key),)).fetchone(), None)
        return None if row is None else Measured(*row)

    def keep(self, op_key: str, conditions: Conditions, measured: Measured) -> None:
        """Write a row, for good when this returns; with a warning where it cannot be written."""
        if not self._writable:
            return
        names = ("key", "op", *(f.name for f in fields(Conditions)), *_FIELDS)
        marks = ", ".join("?" * len(names))
        query = f"INSERT OR REPLACE INTO costs ({', '.join(names)}) VALUES ({marks})"
        row = (conditions.key(op_key), op_key, *astuple(conditions), *astuple(measured))
        self._try(lambda db: db.execute(query, row), None)

    def holdings(self) -> tuple[Holding, ...]:
        """What is in the store, by conditions."""
        query = (
            "SELECT kind, hardware, threads, torch, COUNT(*), MAX(measured) FROM costs "
            "GROUP BY kind, hardware, threads, torch ORDER BY kind, hardware, threads, torch"
        )
        rows: list[Any] = self._try(lambda db: db.execute(query).fetchall(), [])
        return tuple(Holding(*row) for row in rows)

    def clear(self) -> int:
        """Forget everything; how many operators there were."""

        def delete(database: sqlite3.Connection) -> int:
            count = database.execute("DELETE FROM costs").rowcount
            database.execute("VACUUM")
            return count

        return self._try(delete, 0)

    def close(self) -> None:
        """Let go of the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        """Connect; set a damaged file aside; go without where nothing can be opened."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_foreign():
                self._connect()
                return
        except sqlite3.OperationalError as error:
            self._give_up(error)
            return
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            return
        except OSError as error:
            self._give_up(error)
            return
        if not self._is_own:
            raise FormatError(
                f"{str(self.path)!r} is no store of profiles and is left as it is. "
                "Name another file; a new one is made where there is none."
            )
        self._set_aside("it is no store of profiles")

    def _is_foreign(self) -> bool:
        """Whether there is a file that Baechi did not make."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return False
        with self.path.open("rb") as file:
            return file.read(len(_MAGIC)) != _MAGIC or self._other_application()

    def _other_application(self) -> bool:
        database = sqlite3.connect(self.path, timeout=_BUSY_S)
        try:
            ((application,),) = database.execute("PRAGMA application_id").fetchall()
            return bool(application != _APPLICATION_ID)
        finally:
            database.close()

    def _connect(self) -> None:
        # Autocommit: each statement is a transaction, written when it returns.
        database = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        try:
            # A killed process loses nothing so. A power failure may damage the file, which is then
            # found, set aside and measured anew; waiting for the disk at every row is not worth it.
            database.execute("PRAGMA synchronous = OFF")
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version == 0:
                database.execute("BEGIN IMMEDIATE")
                database.execute(_CREATE)
                database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                database.execute("COMMIT")
            elif version != _SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"its layout is of version {version}")
            ((state,),) = database.execute("PRAGMA quick_check(1)").fetchall()
            if state != "ok":
                raise sqlite3.DatabaseError(state)
            database.execute(f"SELECT {', '.join(_FIELDS)} FROM costs LIMIT 1")
        except BaseException:
            database.close()
            raise
        self._database = database

    def _try(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What `work` returns; with a word and `otherwise` where the file does not let it."""
        if self._database is None:
            return otherwise
        try:
            return work(self._database)
        except sqlite3.OperationalError as error:
            self._writable = False
            self._say(f"cannot use {self.path} ({error}); measured costs are not kept")
        except sqlite3.DatabaseError as error:
            self.close()
            self._set_aside(error)
        return otherwise

    def _set_aside(self, reason: object) -> None:
        """Rename the file, losing nothing, and begin a new one."""
        count = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{count}")).exists():
            count += 1
        try:
            self.path.rename(aside)
            self._connect()
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)
            return
        self._say(f"{self.path} is of no use ({reason}); it is now {aside}, and a new one is begun")

    def _give_up(self, error: Exception) -> None:
        self._database = None
        self._writable = False
        self._say(f"cannot open {self.path} ({error}); measured costs are not kept")

    def _say(self, text: str) -> None:
        warnings.warn(f"profile store: {text}.", RuntimeWarning, stacklevel=4)
