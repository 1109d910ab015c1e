"""The SQLite file of a ledger: its tables, and its errors as those of the ledger.

A change is one transaction, synced to the disk before it is answered (`storage/sqlite_file.py`).
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from baechi.errors import FormatError, InputError, ReservationError
from baechi.scheduling.claims import Claim
from baechi.scheduling.snapshot import Reservation, Site
from baechi.storage.codec import codec
from baechi.storage.serialization import dumps, loads
from baechi.storage.sqlite_file import SqliteFile, SqliteFileError
from baechi.validation import check_path

# Request ids that are remembered; the oldest go first.
_REQUESTS: Final = 100_000
_APPLICATION: Final = 0x42414543  # "BAEC" in ASCII
_VERSION: Final = 1
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
        if path is not None:
            check_path(path)
        self.name = "in memory" if path is None else os.fspath(path)
        self._ready = False
        if wanted is None and (path is None or not Path(path).exists()):
            raise InputError(
                f"there is no ledger {self.name}; give the cluster that a new one is about."
            )

        def make(file: SqliteFile) -> None:
            if wanted is None:
                raise InputError(f"{self.name} is empty; give the cluster that it is about.")
            for statement in _SCHEMA.split(";"):
                file.execute(statement)
            row = (dumps(wanted.base), text(list(wanted.sharing)))
            file.execute("INSERT INTO site VALUES (?, ?)", row)
            file.execute("INSERT INTO state VALUES (0)")

        with self._guarded():
            self._file = SqliteFile(path, _APPLICATION, _VERSION, make, durable=True)
            try:
                self.site = self._site(wanted, shared)
            except BaseException:
                self._file.close()
                raise
        self._ready = True

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All changes inside take effect, or none; one that writes keeps other writers out."""
        with self._guarded(), self._file.transaction(write=write):
            yield

    def version(self) -> int:
        """How many changes there have been."""
        with self._guarded():
            rows = self._file.execute("SELECT version FROM state")
        if not rows or type(rows[0][0]) is not int:
            raise self.damaged("it has no version")
        return int(rows[0][0])

    def jobs(self) -> list[Reservation]:
        """All reservations, in the order in which they were made."""
        rows = self._file.execute("SELECT job, version, claims FROM jobs ORDER BY version, job")
        try:
            return [
                Reservation(job, _CLAIMS.read(json.loads(claims)), version)
                for job, version, claims in rows
            ]
        except (ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def changed(self, place: int) -> int:
        """The last version that changed a device."""
        rows = self._file.execute("SELECT version FROM devices WHERE place = ?", (place,))
        return int(rows[0][0]) if rows else 0

    def answer(self, request_id: str) -> tuple[str, Reservation] | None:
        """The question and the answer of a request that was granted; `None` of any other."""
        rows = self._file.execute(
            "SELECT question, answer FROM requests WHERE id = ?", (request_id,)
        )
        if not rows:
            return None
        ((question, answer),) = rows
        try:
            return question, _RESERVATION.read(json.loads(answer))
        except (ValueError, TypeError) as error:
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
        """Records that this version has changed these devices."""
        self._file.execute("UPDATE state SET version = ?", (version,))
        for place in places:
            self._file.execute("INSERT OR REPLACE INTO devices VALUES (?, ?)", (place, version))

    def damaged(self, why: object) -> FormatError:
        """The error of a file that is no ledger any more."""
        return FormatError(
            f"{self.name} is no ledger, or is damaged ({why}); nothing was changed. Restore it "
            "from a copy, or give another path."
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raises the ledger's errors for those of its file."""
        try:
            yield
        except SqliteFileError as error:
            if error.reason == "closed":
                raise InputError(f"ledger {self.name} is closed; open it again.") from error
            if error.reason == "version":
                raise FormatError(f"ledger {self.name} cannot be read: {error}.") from error
            if error.reason != "unavailable":
                raise self.damaged(error) from error
            text = (
                f"ledger {self.name} cannot be used: {error}. Is it on a disk that is full or "
                "read-only, or held by another process?"
            )
            if self._ready:
                raise ReservationError(text, "unavailable") from error
            raise InputError(text) from error

    def _site(self, wanted: Site | None, shared: bool) -> Site:
        """The file's site.

        Raises:
            InputError: Another one is wanted.
        """
        rows = self._file.execute("SELECT cluster, sharing FROM site")
        try:
            ((cluster, sharing),) = rows
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


def text(raw: Any) -> str:
    """JSON without blanks, keys sorted."""
    return json.dumps(raw, separators=(",", ":"), sort_keys=True)
