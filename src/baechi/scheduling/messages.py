"""Messages of the HTTP service, and limits on requests.

A message is one JSON object with `"schema": 1` and the fields of the dataclass below, by the same
codec as Baechi's files: a field that equals its default may be absent, an unknown one is refused,
and equal values give equal bytes. A graph is uploaded as the file that `baechi.dump` writes.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

from baechi.errors import BaechiError, FormatError, InputError
from baechi.records.cluster import Device, Topology
from baechi.scheduling.claims import Claim, Wish
from baechi.scheduling.decision import Decision
from baechi.scheduling.snapshot import Reservation, Snapshot
from baechi.scheduling.whatif import WhatIf
from baechi.storage.codec import Refusal, codec
from baechi.storage.serialization import parse_json

SCHEMA: Final = 1
_T = TypeVar("_T")


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on what a service accepts.

    Attributes:
        body_bytes: Size of a graph's file.
        message_bytes: Size of any other request.
        seconds: Time for one answer.
        waiting: Requests that may wait for a worker.
        graph_bytes: Memory for uploaded graphs; the least recently used are dropped first.
        up_to: Most devices of a curve.
        after: Most jobs in `after` of one request.
    """

    body_bytes: int = 64 * 2**20
    message_bytes: int = 4 * 2**20
    ops: int = 100_000
    seconds: int = 30
    waiting: int = 24
    graph_bytes: int = 2**30
    up_to: int = 1024
    after: int = 64


@final
class ServiceError(BaechiError):
    """A service refuses a request, or did not answer.

    Attributes:
        status: The HTTP status (docs/embedding.md, "Over HTTP"); 0 where there was no answer.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status


@final
@dataclass(frozen=True, slots=True)
class SolveRequest:
    """A request for a placement; `graph` is the digest of an uploaded graph."""

    graph: str
    wish: Wish = field(default_factory=Wish)


@final
@dataclass(frozen=True, slots=True)
class WhatIfRequest:
    """See `whatif.whatif`; `graph` is the digest of an uploaded graph."""

    graph: str
    wish: Wish = field(default_factory=Wish)
    after: tuple[str, ...] = ()
    up_to: int = 0


@final
@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """See `Ledger.reserve`."""

    job: str
    claims: tuple[Claim, ...]
    version: int | None = None
    request_id: str = ""


@final
@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """See `Ledger.release`."""

    job: str
    request_id: str = ""


@final
@dataclass(frozen=True, slots=True)
class GraphAnswer:
    """The digest that names an uploaded graph in requests."""

    digest: str
    ops: int


@final
@dataclass(frozen=True, slots=True)
class SolveAnswer:
    """`status` is `"placed"`, with what to reserve for it, or `"infeasible"`, with a message."""

    status: str
    version: int
    decision: Decision | None = None
    claims: tuple[Claim, ...] = ()
    message: str = ""


@final
@dataclass(frozen=True, slots=True)
class Free:
    """The free part of a device, its location, and the compute that a claim of it takes."""

    device: Device
    share_milli: int
    node: str = ""
    switch: str = ""


@final
@dataclass(frozen=True, slots=True)
class SnapshotAnswer:
    """The free devices, and the reservations of the others."""

    version: int
    free: tuple[Free, ...]
    jobs: tuple[Reservation, ...]


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered.

    Attributes:
        error: `"input"`, `"limit"`, `"unknown-graph"`, `"unauthorized"`, `"busy"`, or the
            `reason` of a `ReservationError`.
    """

    error: str
    message: str


ANSWERS: Final = (GraphAnswer, SolveAnswer, WhatIf, Reservation, SnapshotAnswer, Failure)


def encode(value: object) -> bytes:
    """A message; equal values give equal bytes.

    Raises:
        InputError: A value in it is of another type than its field.
    """
    kind: Any = type(value)
    try:
        raw = codec(kind).write(value)
    except Refusal as refusal:
        raise InputError(f"cannot send this {kind.__name__}: {refusal}") from refusal
    text = json.dumps({"schema": SCHEMA, **raw}, separators=(",", ":"), sort_keys=True)
    return text.encode()


def decode(body: bytes, kind: type[_T]) -> _T:
    """The value of a message.

    Raises:
        FormatError: It is no such message, or of another schema.
        InputError: A value in it is wrong.
    """
    try:
        raw = parse_json(body.decode())
    except UnicodeDecodeError as error:
        raise FormatError(f"byte {error.start} is not UTF-8, so this is no JSON.") from error
    if not isinstance(raw, dict):
        raise FormatError("a message is one JSON object.")
    schema = raw.pop("schema", None)
    if schema != SCHEMA or isinstance(schema, bool):
        raise FormatError(f"schema is {schema!r}; this service speaks {SCHEMA}.")
    hint: Any = kind
    value: _T = codec(hint).read(raw)
    return value


def snapshot_answer(snapshot: Snapshot) -> SnapshotAnswer:
    """A snapshot as a message."""
    base = snapshot.site.base
    free = tuple(
        Free(
            room.device,
            room.share_milli,
            base.nodes[room.place] if isinstance(base, Topology) else "",
            base.switches[room.place] if isinstance(base, Topology) else "",
        )
        for room in snapshot.rooms()
    )
    jobs = sorted(snapshot.jobs.values(), key=lambda row: (row.version, row.job))
    return SnapshotAnswer(snapshot.version, free, tuple(jobs))
