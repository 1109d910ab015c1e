"""SQLite files of Baechi: ownership, table versions, damage, and concurrent processes.

A file's header names its program and the version of its tables. Both, and all pages, are checked
before the first write, so that no other program's file changes. Threads and processes may share it.
"""

import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

PATIENCE: Final = 30.0  # for how many seconds one statement waits for other processes
_PAUSE: Final = 0.01  # between two attempts to open a file, in seconds
# Errors of an undamaged file: locked by another process, full, read-only, deleted.
_PASSING: Final = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
}


class SqliteFileError(Exception):
    """A file that cannot be used; callers add the meaning and the remedy.

    Attributes:
        reason: `"foreign"`, made by another program; `"version"`, by another Baechi; `"damaged"`;
            `"unavailable"`, locked by another process, full, read-only or deleted; or `"closed"`.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@final
class SqliteFile:
    """An open SQLite file.

    Args:
        path: The file; created if absent. `None` is a database in memory.
        application: The program that owns the file.
        version: Version of its tables.
        make: Called in a transaction to make the tables of an empty file.
        durable: Whether a committed change survives a loss of power. Otherwise a loss of power may
            damage the file; a killed process never does.

    Raises:
        SqliteFileError: The file cannot be used, and is unchanged.
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
            # Autocommit: a statement outside of a transaction is its own transaction.
            self._database = sqlite3.connect(
                name, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
        self._close = weakref.finalize(self, self._database.close)  # one that nobody closed, too
        deadline = time.monotonic() + PATIENCE
        try:
            while not self._opened(make, durable, deadline):
                time.sleep(_PAUSE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._close()

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows that a statement returns."""
        with _translated():
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """Apply all statements inside, or none; a writing transaction excludes other writers."""
        self.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        with _translated(), self._database:  # it commits, or rolls back
            yield

    def _opened(
        self, make: "Callable[[SqliteFile], object]", durable: bool, deadline: float
    ) -> bool:
        """True if the file is checked and has its tables; false while others create or close it.

        SQLite waits for a lock, except where two connections would wait for each other, as when a
        file that several have open gets its write-ahead log.
        """
        try:
            with self.transaction(write=False):  # another process may be creating it
                empty = self._is_empty()
            if durable:
                self.execute("PRAGMA journal_mode = WAL")  # has no effect in memory
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
        """True if the file has no tables yet; read-only, and refuses foreign or damaged files."""
        ((application,),) = self.execute("PRAGMA application_id")
        ((version,),) = self.execute("PRAGMA user_version")
        ((tables,),) = self.execute("SELECT count(*) FROM sqlite_master")
        owner, known = self._header
        if application != owner and (tables or application or version):
            raise SqliteFileError("it is another program's SQLite file", "foreign")
        if tables and version != known:
            text = f"its tables are of version {version}, and this Baechi reads version {known}"
            raise SqliteFileError(text, "version")
        ((verdict,),) = self.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise SqliteFileError(verdict, "damaged")
        return not tables


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of SQLite into `SqliteFileError`."""
    try:
        yield
    except sqlite3.Error as error:
        # Errors of Python itself have no code: the file was closed, or a text is not Unicode.
        code = getattr(error, "sqlite_errorcode", None)
        if code is None and isinstance(error, sqlite3.ProgrammingError):
            reason = "closed"
        elif code is not None and code & 0xFF in _PASSING:
            reason = "unavailable"
        else:
            reason = "foreign" if code == sqlite3.SQLITE_NOTADB else "damaged"
        raise SqliteFileError(str(error), reason) from error
