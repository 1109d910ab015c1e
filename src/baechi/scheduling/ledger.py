"""Ledger of a cluster: reservations that never exceed what there is.

Every change is one SQLite transaction, synced to the disk before it is answered; concurrent ones
have the effect of some serial order. A change costs O(claims), and O(devices + jobs) where another
process has changed the file meanwhile.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from baechi.errors import FormatError, InputError, ReservationError
from baechi.records.cluster import Cluster, Topology
from baechi.scheduling.claims import UNUSED, Claim, Use
from baechi.scheduling.snapshot import Reservation, Site, Snapshot
from baechi.storage.codec import codec
from baechi.storage.serialization import dumps, loads
from baechi.storage.sqlite_file import SqliteFile, SqliteFileError
from baechi.validation import FrozenDict, check_count, check_name, check_path, check_row

_LABEL: Final = 512  # characters of a job's name or a request id
_REQUESTS: Final = 100_000  # request ids that are remembered; the oldest go first
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
_Change: TypeAlias = tuple[Reservation, dict[int, Use]]


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
        self._name = "in memory" if path is None else os.fspath(check_path(path))
        if wanted is None and (path is None or not Path(path).exists()):
            raise InputError(
                f"there is no ledger {self._name}; give the cluster that a new one is about."
            )
        self._lock = threading.Lock()
        self._ready = False
        self._version = -1
        self._uses: list[Use] = []
        self._jobs: dict[str, Reservation] = {}

        def make(file: SqliteFile) -> None:
            if wanted is None:
                raise InputError(f"{self._name} is empty; give the cluster that it is about.")
            for statement in _SCHEMA.split(";"):
                file.execute(statement)
            row = (dumps(wanted.base), _json(list(wanted.sharing)))
            file.execute("INSERT INTO site VALUES (?, ?)", row)
            file.execute("INSERT INTO state VALUES (0)")

        with self._guarded():
            self._file = SqliteFile(path, _APPLICATION, _VERSION, make, durable=True)
        try:
            self._site = self._read_site(wanted)
            if sharing is not None and Site.of(self._site.base, sharing) != self._site:
                raise InputError(
                    f"the devices of ledger {self._name} are shared in another way than "
                    f"{sharing!r}; leave sharing out to take them as they are."
                )
            self._ready = True
            self.snapshot()
        except BaseException:
            self._file.close()
            raise

    @property
    def site(self) -> Site:
        """The devices, and how they are shared."""
        return self._site

    def snapshot(self) -> Snapshot:
        """The free resources now, with the version to reserve against."""
        with self._lock:
            if self._read_version() != self._version:
                with self._guarded(), self._file.transaction(write=False):
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
            row = (job, reservation.version, _json(_CLAIMS.write(granted)))
            self._execute("INSERT INTO jobs VALUES (?, ?, ?)", row)
            return reservation, after

        question = _json(["reserve", job, version, _CLAIMS.write(rows)])
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
            self._execute("DELETE FROM jobs WHERE job = ?", (job,))
            return reservation, self._site.give_back(self._uses, reservation.claims)

        return self._change(request_id, _json(["release", job]), decide)

    def close(self) -> None:
        """Closes the file; every change that was answered is in it."""
        with self._lock:
            self._file.close()

    def _change(self, request_id: str, question: str, decide: Callable[[], _Change]) -> Reservation:
        """One change; `decide` raises before it writes, or not at all."""
        if request_id != "":
            _check_label(request_id, "request_id")
        with self._lock:
            with self._guarded(), self._file.transaction(write=True):
                self._catch_up()
                known = self._known_answer(request_id, question) if request_id else None
                if known is not None:
                    return known
                reservation, after = decide()
                version = self._version + 1
                self._execute("UPDATE state SET version = ?", (version,))
                for place in after:
                    self._execute("INSERT OR REPLACE INTO devices VALUES (?, ?)", (place, version))
                if request_id:
                    self._keep_answer(request_id, question, reservation)
            # The change is on the disk: only now it counts here. The version comes last: after an
            # interrupt before it, the file is read again.
            for place, use in after.items():
                self._uses[place] = use
            released = self._jobs.pop(reservation.job, None) is not None
            if not released:
                self._jobs[reservation.job] = reservation
            self._version += 1
            return reservation

    def _known_answer(self, request_id: str, question: str) -> Reservation | None:
        """The answer to a request that was granted before."""
        rows = self._execute("SELECT question, answer FROM requests WHERE id = ?", (request_id,))
        if not rows:
            return None
        ((asked, answer),) = rows
        if asked != question:
            raise ReservationError(
                f"request id {request_id!r} was that of another request; give every request its "
                "own.",
                "duplicate",
            )
        with self._reading():
            reservation: Reservation = _RESERVATION.read(json.loads(answer))
        return reservation

    def _keep_answer(self, request_id: str, question: str, answer: Reservation) -> None:
        self._execute(
            "INSERT INTO requests (id, question, answer) VALUES (?, ?, ?)",
            (request_id, question, _json(_RESERVATION.write(answer))),
        )
        self._execute(
            "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?",
            (_REQUESTS,),
        )

    def _check_fresh(self, places: Iterable[int], version: int) -> None:
        if version > self._version:
            raise ReservationError(
                f"the snapshot has version {version}, but this ledger has had only "
                f"{self._version} changes; is it another ledger's?",
                "stale",
            )
        for place in places:
            pool = self._site.pools[place]
            marks = ", ".join("?" * len(pool))
            query = f"SELECT max(version) FROM devices WHERE place IN ({marks})"
            changed = self._execute(query, pool)[0][0] or 0
            if changed > version:
                raise ReservationError(
                    f"device {self._site.base.devices[place].name!r} has changed in version "
                    f"{changed}, after the snapshot's {version}. Take a new snapshot and solve "
                    "again.",
                    "stale",
                )

    def _catch_up(self) -> None:
        """Reads the changes of other processes, inside a transaction."""
        version = self._read_version()
        if version == self._version:
            return
        uses = [UNUSED] * len(self._site.base.devices)
        jobs = {}
        rows = self._execute("SELECT job, version, claims FROM jobs ORDER BY version, job")
        for job, made, claimed in rows:
            with self._reading():
                row = Reservation(job, _CLAIMS.read(json.loads(claimed)), made)
                granted, after = self._site.take(uses, row.claims)
                if granted != row.claims or row.version > version:
                    raise ValueError(f"job {job!r} has what was never granted")
            for place, use in after.items():
                uses[place] = use
            jobs[row.job] = row
        self._uses, self._jobs, self._version = uses, jobs, version

    def _read_version(self) -> int:
        """The number of changes of the file."""
        rows = self._execute("SELECT version FROM state")
        if not rows or type(rows[0][0]) is not int:
            raise self._damaged("it has no version")
        return int(rows[0][0])

    def _read_site(self, wanted: Site | None) -> Site:
        """The file's site; raises `InputError` where another cluster is wanted."""
        rows = self._execute("SELECT cluster, sharing FROM site")
        with self._reading():
            ((cluster, sharing),) = rows
            kept = Site(loads(cluster, source=self._name), tuple(json.loads(sharing)))
        # As they are written: tables of links may differ on the diagonal, which nobody reads.
        if wanted is not None and dumps(wanted.base) != cluster:
            raise InputError(
                f"ledger {self._name} is about another cluster. Open it without a cluster to get "
                "its own, or give another path."
            )
        return kept

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._guarded():
            return self._file.execute(statement, values)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raises the ledger's errors for those of its file."""
        try:
            yield
        except SqliteFileError as error:
            if error.reason == "closed":
                raise InputError(f"ledger {self._name} is closed; open it again.") from error
            if error.reason == "version":
                raise FormatError(f"ledger {self._name} cannot be read: {error}.") from error
            if error.reason != "unavailable":
                raise self._damaged(error) from error
            text = (
                f"ledger {self._name} cannot be used: {error}. Is it on a disk that is full or "
                "read-only, or held by another process?"
            )
            if self._ready:
                raise ReservationError(text, "unavailable") from error
            raise InputError(text) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises the error of a damaged file for contents that no ledger has written."""
        try:
            yield
        except (ValueError, TypeError, ReservationError) as error:
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> FormatError:
        return FormatError(
            f"{self._name} is no ledger, or is damaged ({why}); nothing was changed. Restore it "
            "from a copy, or give another path."
        )


def _check_label(value: object, what: str) -> None:
    """Checks that the file can hold a name."""
    text = check_name(value, what)
    if len(text) > _LABEL:
        raise InputError(f"{what} has {len(text)} characters; at most {_LABEL} are kept.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} {text!r} is no valid Unicode text.") from error


def _json(raw: Any) -> str:
    """JSON without blanks, keys sorted."""
    return json.dumps(raw, separators=(",", ":"), sort_keys=True)
