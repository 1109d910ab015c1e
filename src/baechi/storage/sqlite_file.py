"""SQLite files of Baechi's own: owner, version of the tables, damage, and other processes.

The header of a file says which program made it and which version its tables have. Both are checked,
and all pages are, before the first write, so that no other program's file is ever changed. An empty
file gets its tables in one transaction. Several threads and processes may use one file.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

# How long one statement waits for other processes, in seconds.
PATIENCE: Final = 30.0
_PAUSE: Final = 0.01  # between two attempts to open a file, in seconds
# Errors of a file that is whole: held by another process, full, read-only, gone.
_PASSING: Final = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
}


class SqliteFileError(Exception):
    """What is wrong with a file; its user says what that means, and what to do.

    Attributes:
        reason: `"foreign"`, made by another program; `"version"`, by another Baechi; `"damaged"`;
            `"unavailable"`, held by another process, full, read-only or gone; or `"closed"`.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@final
class SqliteFile:
    """An open file.

    Args:
        path: The file; made if it is not there. `None` is a database in memory.
        application: Whose file it is.
        version: Version of its tables.
        make: Called in a transaction to make the tables of an empty file.
        durable: Whether a change is on the disk when its transaction returns, even after a loss of
            power. Otherwise a loss of power may damage the file; a killed process never does.

    Raises:
        SqliteFileError: The file cannot be used, and is as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        application: int,
        version: int,
        make: "Callable[[SqliteFile], object]",
        *,
        durable: bool,
    ) -> None:
        self._header = application, version
        name = ":memory:" if path is None else path
        with _translated():
            # Autocommit: a statement outside of a transaction is one by itself.
            self._database = sqlite3.connect(
                name, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
        deadline = time.monotonic() + PATIENCE
        try:
            while not self._opened(make, durable, deadline):
                time.sleep(_PAUSE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._database.close()

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows that a statement gives."""
        with _translated():
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All statements inside take effect, or none; one that writes keeps other writers out."""
        self.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        with _translated(), self._database:  # it commits, or rolls back
            yield

    def _opened(
        self, make: "Callable[[SqliteFile], object]", durable: bool, deadline: float
    ) -> bool:
        """Whether the file is checked and has its tables; not while others make or close it.

        SQLite waits for a lock, but not where two connections would wait for each other: that is so
        where a file that several have open gets its write-ahead log.
        """
        try:
            with self.transaction(write=False):  # another process may be making it
                empty = self._is_empty()
            if durable:
                self.execute("PRAGMA journal_mode = WAL")  # of no effect in memory
            self.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            if empty:
                with self.transaction(write=True):
                    if self._is_empty():
                        make(self)
                        self.execute(f"PRAGMA application_id = {self._header[0]}")
                        self.execute(f"PRAGMA user_version = {self._header[1]}")
        except SqliteFileError as error:
            code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
            if code != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            return False
        return True

    def _is_empty(self) -> bool:
        """Whether the file has no tables yet; only reads, and refuses what is not ours or whole."""
        ((application,),) = self.execute("PRAGMA application_id")
        ((version,),) = self.execute("PRAGMA user_version")
        ((tables,),) = self.execute("SELECT count(*) FROM sqlite_master")
        if application != self._header[0] and (tables or application or version):
            raise SqliteFileError("it is another program's SQLite file", "foreign")
        if tables and version != self._header[1]:
            here = self._header[1]
            text = f"its tables are of version {version}, and this Baechi reads version {here}"
            raise SqliteFileError(text, "version")
        ((verdict,),) = self.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise SqliteFileError(verdict, "damaged")
        return not tables


@contextmanager
def _translated() -> Iterator[None]:
    """Raises a `SqliteFileError` for what SQLite raises."""
    try:
        yield
    except sqlite3.Error as error:
        # What Python itself raises has no code: the file was closed, or a text is no Unicode.
        code = getattr(error, "sqlite_errorcode", None)
        if code is None and isinstance(error, sqlite3.ProgrammingError):
            reason = "closed"
        elif code is not None and code & 0xFF in _PASSING:
            reason = "unavailable"
        else:
            reason = "foreign" if code == sqlite3.SQLITE_NOTADB else "damaged"
        raise SqliteFileError(str(error), reason) from error
