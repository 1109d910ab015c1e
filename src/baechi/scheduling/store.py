"""A ledger's SQLite file: what is in it, and how it is opened without harm to any other file.

A change is one transaction, synced to the disk before it is answered (write-ahead log, `synchronous
= FULL`). Before the first write the file is known to be a ledger or empty: its head says whose it
is, and its pages are checked.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from baechi.errors import BaechiError, FormatError, InputError, ReservationError
from baechi.scheduling.claims import Claim
from baechi.scheduling.snapshot import Reservation, Site
from baechi.storage.codec import Refusal, codec
from baechi.storage.serialization import dumps, loads
from baechi.validation import check_path

# "BAEC" in ASCII: SQLite keeps it in the file's head, so that another program's file is known.
_APPLICATION: Final = 0x42414543
_VERSION: Final = 1
# How long a change waits for those of other processes, in seconds.
_PATIENCE: Final = 30.0
_PAUSE: Final = 0.01  # between two tries to open it, in seconds
# What does not say that the file is damaged: held by another, full, read-only, gone.
_PASSING: Final = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)
# Request ids that are remembered; the oldest go first.
_REQUESTS: Final = 100_000
_SCHEMA: Final = """
CREATE TABLE site (cluster TEXT NOT NULL, sharing TEXT NOT NULL);
CREATE TABLE state (version INTEGER NOT NULL);
CREATE TABLE jobs (job TEXT PRIMARY KEY, version INTEGER NOT NULL, claims TEXT NOT NULL);
CREATE TABLE devices (place INTEGER PRIMARY KEY, version INTEGER NOT NULL);
CREATE TABLE requests (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, question TEXT NOT NULL,
    answer TEXT NOT NULL
)
"""
_CLAIMS: Final = codec(tuple[Claim, ...])
_RESERVATION: Final = codec(Reservation)


@final
class Store:
    """An open ledger file, or one in memory.

    Args:
        path: The file; made if it is not there and `wanted` is given.
        wanted: The site to write into a new file, and that an old one must have; any if absent.
        shared: Whether an old file's devices must be shared as in `wanted`, too.

    Raises:
        InputError: The file cannot be opened, or is of another site.
        FormatError: It is no ledger, is damaged, or has another version. It is as it was.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, wanted: Site | None, *, shared: bool
    ) -> None:
        self._ready = False
        if path is not None:
            check_path(path)
        self.name = "in memory" if path is None else os.fspath(path)
        if wanted is None and (path is None or not Path(path).exists()):
            raise InputError(
                f"there is no ledger {self.name}; give the cluster that a new one is about."
            )
        try:
            self._file = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=_PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise InputError(f"cannot open ledger {self.name}: {error}.") from error
        try:
            self.site = self._opened(wanted, shared)
            self._ready = True
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All that is done inside happens, or nothing; one that writes keeps other writers out."""
        with self._guarded():
            self._file.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise

    def version(self) -> int:
        """How many changes there have been."""
        with self._guarded():
            row = self._file.execute("SELECT version FROM state").fetchone()
        if row is None or type(row[0]) is not int:
            raise self.damaged("it has no version")
        return int(row[0])

    def jobs(self) -> list[Reservation]:
        """All reservations, in the order in which they were made."""
        rows = self._file.execute("SELECT job, version, claims FROM jobs ORDER BY version, job")
        try:
            return [
                Reservation(job, _CLAIMS.read(json.loads(claims)), version)
                for job, version, claims in rows
            ]
        except (Refusal, ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def changed(self, place: int) -> int:
        """The last version that changed a device."""
        row = self._file.execute("SELECT version FROM devices WHERE place = ?", (place,)).fetchone()
        return 0 if row is None else int(row[0])

    def answer(self, request_id: str) -> tuple[str, Reservation] | None:
        """The question and the answer of a request that was granted; `None` of any other."""
        row = self._file.execute(
            "SELECT question, answer FROM requests WHERE id = ?", (request_id,)
        ).fetchone()
        if row is None:
            return None
        try:
            return row[0], _RESERVATION.read(json.loads(row[1]))
        except (Refusal, ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def keep_answer(self, request_id: str, question: str, answer: Reservation) -> None:
        """Remembers what a request was granted."""
        self._file.execute(
            "INSERT INTO requests (id, question, answer) VALUES (?, ?, ?)",
            (request_id, question, text(_RESERVATION.write(answer))),
        )
        self._file.execute(
            "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?",
            (_REQUESTS,),
        )

    def add(self, job: Reservation) -> None:
        """Adds a reservation."""
        claims = text(_CLAIMS.write(job.claims))
        self._file.execute("INSERT INTO jobs VALUES (?, ?, ?)", (job.job, job.version, claims))

    def remove(self, job: str) -> None:
        """Removes a reservation."""
        self._file.execute("DELETE FROM jobs WHERE job = ?", (job,))

    def advance(self, version: int, places: Iterable[int]) -> None:
        """Says that this version has changed these devices."""
        self._file.execute("UPDATE state SET version = ?", (version,))
        self._file.executemany(
            "INSERT OR REPLACE INTO devices VALUES (?, ?)", [(place, version) for place in places]
        )

    def damaged(self, why: object) -> FormatError:
        """The error of a file that is no ledger any more."""
        return FormatError(
            f"{self.name} is no ledger, or is damaged ({why}); nothing was changed. Restore it "
            "from a copy, or give another path."
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Tells what SQLite says in Baechi's words."""
        try:
            yield
        except BaechiError:
            raise
        except sqlite3.DatabaseError as error:
            # What Python itself says has no code: the file was closed, or holds no text.
            code = getattr(error, "sqlite_errorcode", None)
            if code is None and isinstance(error, sqlite3.ProgrammingError):
                raise InputError(f"ledger {self.name} is closed; open it again.") from error
            if code is None or code & 0xFF not in _PASSING:
                raise self.damaged(error) from error
            # The file is whole, and what failed did not happen.
            text = (
                f"ledger {self.name} cannot be used: {error}. Is it on a disk that is full or "
                "read-only, or held by another process?"
            )
            if self._ready:
                raise ReservationError(text, "unavailable") from error
            raise InputError(text) from error

    def _opened(self, wanted: Site | None, shared: bool) -> Site:
        """The file's site. While others make or close the file, it tries again.

        SQLite waits for a lock, but not for one that two connections would wait for in each other's
        way: that is so where a file that several have open gets its write-ahead log.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                with self._guarded():
                    with self.transaction(write=False):  # somebody may be making it
                        self._check_ours()
                    self._file.execute("PRAGMA journal_mode = WAL")  # of no effect in memory
                    self._file.execute("PRAGMA synchronous = FULL")
                    return self._site(wanted, shared)
            except InputError as error:
                code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
                if code != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)

    def _check_ours(self) -> None:
        """Passes a ledger and an empty file; only reads, so that any other stays as it is."""
        (application,) = self._file.execute("PRAGMA application_id").fetchone()
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION and (tables or application or version):
            raise FormatError(
                f"{self.name} is another program's SQLite file, and no ledger; give another path."
            )
        if tables and version != _VERSION:
            raise FormatError(
                f"{self.name} was written by version {version} of the ledger, this Baechi reads "
                f"{_VERSION}; use the Baechi that wrote it."
            )
        (verdict,) = self._file.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self.damaged(verdict)

    def _site(self, wanted: Site | None, shared: bool) -> Site:
        """The file's site, after writing the wanted one into an empty file."""
        with self.transaction(write=True):
            (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if not tables:
                if wanted is None:
                    raise InputError(f"{self.name} is empty; give the cluster that it is about.")
                self._create(wanted)
                return wanted
            row = self._file.execute("SELECT cluster, sharing FROM site").fetchone()
            try:
                cluster, sharing = row
                kept = Site(loads(cluster, source=self.name), tuple(json.loads(sharing)))
            except (ValueError, TypeError) as error:
                raise self.damaged(error) from error
        # As they are written: tables of links may differ on the diagonal, which nobody reads.
        if wanted is not None and (
            dumps(wanted.base) != cluster or (shared and wanted.sharing != kept.sharing)
        ):
            raise InputError(
                f"ledger {self.name} is about another cluster, or its devices are shared in "
                "another way. Open it without a cluster to get its own, or give another path."
            )
        return kept

    def _create(self, site: Site) -> None:
        for statement in _SCHEMA.split(";"):
            self._file.execute(statement)
        self._file.execute(f"PRAGMA application_id = {_APPLICATION}")
        self._file.execute(f"PRAGMA user_version = {_VERSION}")
        row = (dumps(site.base), text(list(site.sharing)))
        self._file.execute("INSERT INTO site VALUES (?, ?)", row)
        self._file.execute("INSERT INTO state VALUES (0)")


def text(raw: Any) -> str:
    """JSON without blanks, keys sorted."""
    return json.dumps(raw, separators=(",", ":"), sort_keys=True)
