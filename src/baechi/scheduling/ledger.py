"""Ledger of a cluster: reservations that never exceed what there is.

Every change is one SQLite transaction (`store.py`): a process that dies, at whatever moment, leaves
a reservation whole or not at all, and one that was answered is there when the file is opened again.
Threads and processes may share a file; changes come one after the other, so that concurrent ones
have the effect of some serial order.

Amounts are integers (bytes, thousandths of compute, memory slices), so that a release restores
exactly what was there. A change costs O(claims), and O(devices + jobs) where another process has
changed the file meanwhile.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from baechi.errors import FormatError, InputError, ReservationError
from baechi.records.cluster import Cluster, Topology
from baechi.scheduling.claims import UNUSED, Claim, Use
from baechi.scheduling.snapshot import Reservation, Site, Snapshot
from baechi.storage.codec import codec
from baechi.storage.serialization import dumps, loads
from baechi.storage.sqlite_file import SqliteFile, SqliteFileError
from baechi.validation import FrozenDict, check_count, check_name, check_path, check_row

_CLAIMS: Final = codec(tuple[Claim, ...])
# Characters of a job's name or a request id.
_LABEL: Final = 512
_Change = tuple[Reservation, dict[int, Use]]


@final
class Ledger:
    """The free resources of a cluster, and the reservations of the others.

    Safe to use from several threads; several processes may open one file.

    Args:
        cluster: The devices as if nothing ran there: a `Cluster`, or a `Topology` where nodes and
            switches matter. `None` is that of the file.
        path: Where it is kept; in memory if absent.
        sharing: How devices are shared: `"fractional"`, `"whole"` or `"mig"`, for all or by name
            (`claims.py`); fractional if absent. Of a file that exists, the file's if absent.

    Raises:
        InputError: The file is of another cluster, or cannot be opened; it is as it was.
        FormatError: The file is no ledger, is damaged, or has another version; it is as it was.
    """

    def __init__(
        self,
        cluster: Cluster | Topology | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        sharing: str | Mapping[str, str] | None = None,
    ) -> None:
        wanted = None if cluster is None else Site.of(cluster, sharing or "fractional")
        self._lock = threading.Lock()
        self._store = Store(path, wanted, shared=sharing is not None)
        self._site = self._store.site
        self._version = -1
        self._uses: list[Use] = []
        self._jobs: dict[str, Reservation] = {}
        try:
            if sharing is not None and Site.of(self._site.base, sharing) != self._site:
                raise InputError(
                    f"the devices of ledger {self._store.name} are shared in another way than "
                    f"{sharing!r}; leave sharing out to take them as they are."
                )
            self.snapshot()
        except BaseException:
            self._store.close()
            raise

    @property
    def site(self) -> Site:
        """The devices, and how they are shared."""
        return self._site

    def snapshot(self) -> Snapshot:
        """The free resources now, with the version to reserve against."""
        with self._lock:
            if self._store.version() != self._version:
                with self._store.transaction(write=False):
                    self._catch_up()
            return Snapshot(self._site, self._version, tuple(self._uses), FrozenDict(self._jobs))

    def residual(self, share_milli: int | None = None) -> Cluster:
        """The free resources now, as a cluster to solve on; see `Snapshot.residual`."""
        return self.snapshot().residual(share_milli)

    def reserve(
        self,
        job: str,
        claims: Iterable[Claim],
        *,
        version: int | None = None,
        request_id: str = "",
    ) -> Reservation:
        """Grants the job all its claims, or none.

        Args:
            job: Its name; a job has one reservation.
            claims: What it takes; see `claims_of`.
            version: That of the snapshot that the claims were decided on: refused where a claimed
                device has changed since. `None` only requires that there is room.
            request_id: A request that was granted is not granted twice: repeated, it has the
                same answer, also after a crash, and after the job's release. One that was refused
                is not remembered.

        Raises:
            ReservationError: Too little is free, the snapshot is stale, the job has a reservation,
                the request id was another request's, or the file cannot be used now (see
                `reason`). Nothing is reserved.
            InputError: A claim names no device of the cluster.
        """
        _check_label(job, "job")
        rows = check_row(claims, "claims", Claim)
        if version is not None:
            version = check_count(version, "version of a snapshot")

        def decide() -> _Change:
            if job in self._jobs:
                raise ReservationError(
                    f"job {job!r} has a reservation already, made by version "
                    f"{self._jobs[job].version}; release it first.",
                    "duplicate",
                )
            granted, after = self._site.take(self._uses, rows)
            if version is not None:
                self._check_fresh(after, version)
            reservation = Reservation(job, granted, self._version + 1)
            self._store.add(reservation)
            return reservation, after

        question = text(["reserve", job, version, _CLAIMS.write(rows)])
        return self._change(request_id, question, decide)

    def release(self, job: str, *, request_id: str = "") -> Reservation:
        """Ends the reservation of a job, and returns it.

        Raises:
            ReservationError: It has no reservation, or the request id was another request's.
        """
        _check_label(job, "job")

        def decide() -> _Change:
            reservation = self._jobs.get(job)
            if reservation is None:
                raise ReservationError(
                    f"job {job!r} has no reservation: it never had one, or was released.", "unknown"
                )
            self._store.remove(job)
            return reservation, self._site.give_back(self._uses, reservation.claims)

        return self._change(request_id, text(["release", job]), decide)

    def close(self) -> None:
        """Closes the file; every change that was answered is in it."""
        with self._lock:
            self._store.close()

    def _change(self, request_id: str, question: str, decide: Callable[[], _Change]) -> Reservation:
        """One change; `decide` raises before it writes, or not at all."""
        if request_id != "":
            _check_label(request_id, "request_id")
        with self._lock:
            with self._store.transaction(write=True):
                self._catch_up()
                known = self._store.answer(request_id) if request_id else None
                if known is not None and known[0] != question:
                    raise ReservationError(
                        f"request id {request_id!r} was that of another request; give every "
                        "request its own.",
                        "duplicate",
                    )
                if known is not None:
                    return known[1]
                reservation, after = decide()
                self._store.advance(self._version + 1, after)
                if request_id:
                    self._store.keep_answer(request_id, question, reservation)
            # The change is on the disk: only now it counts here. The version comes last: after an
            # interrupt before it, the file is read again.
            for place, use in after.items():
                self._uses[place] = use
            released = self._jobs.pop(reservation.job, None) is not None
            if not released:
                self._jobs[reservation.job] = reservation
            self._version += 1
            return reservation

    def _check_fresh(self, places: Iterable[int], version: int) -> None:
        if version > self._version:
            raise ReservationError(
                f"the snapshot has version {version}, but this ledger has had only "
                f"{self._version} changes; is it another ledger's?",
                "stale",
            )
        for place in places:
            changed = max(map(self._store.changed, self._site.pools[place]))
            if changed > version:
                raise ReservationError(
                    f"device {self._site.base.devices[place].name!r} has changed in version "
                    f"{changed}, after the snapshot's {version}. Take a new snapshot and solve "
                    "again.",
                    "stale",
                )

    def _catch_up(self) -> None:
        """Reads the changes of other processes, inside a transaction."""
        version = self._store.version()
        if version == self._version:
            return
        uses = [UNUSED] * len(self._site.base.devices)
        jobs = {}
        for row in self._store.jobs():
            try:
                granted, after = self._site.take(uses, row.claims)
            except (InputError, ReservationError) as error:
                raise self._store.damaged(error) from error
            if granted != row.claims or row.version > version:
                raise self._store.damaged(f"job {row.job!r} has what was never granted")
            for place, use in after.items():
                uses[place] = use
            jobs[row.job] = row
        self._uses, self._jobs, self._version = uses, jobs, version


def _check_label(value: object, what: str) -> None:
    """Checks that the file can hold a name."""
    text = check_name(value, what)
    if len(text) > _LABEL:
        raise InputError(f"{what} has {len(text)} characters; at most {_LABEL} are kept.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} {text!r} is no valid Unicode text.") from error


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
