"""The service from Python: the same values in and out as `explore`, `whatif` and `Ledger`."""

import http.client
import threading
import uuid
from collections.abc import Iterable
from typing import Final, TypeVar, final
from urllib.parse import urlsplit

from baechi.errors import InputError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Claim
from baechi.scheduling.messages import (
    Failure,
    GraphAnswer,
    ReleaseRequest,
    ReserveRequest,
    SnapshotAnswer,
    SolveAnswer,
    SolveRequest,
    StatusError,
    WhatIfRequest,
    decode,
    encode,
)
from baechi.scheduling.request import Wish
from baechi.scheduling.snapshot import Reservation
from baechi.scheduling.whatif import WhatIf
from baechi.storage.serialization import dumps

_T = TypeVar("_T")
_REASONS: Final = ("capacity", "stale", "duplicate", "unknown")


@final
class ServiceError(StatusError):
    """The service could not be asked, or has too much to do: status 0 where there was no answer."""


@final
class Client:
    """A connection to a service; for one thread at a time, others wait.

    Args:
        url: Such as `"http://127.0.0.1:8642"`.
        token: The service's bearer token.
        timeout_s: How long to wait for an answer.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8642", *, token: str = "", timeout_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"url is {url!r}; give one such as 'http://127.0.0.1:8642'.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else (
            http.client.HTTPConnection
        )  # fmt: skip
        self._url = url
        try:
            port = parts.port
        except ValueError as error:
            raise InputError(f"url is {url!r}: {error}.") from error
        # Given a port, it does not look for one in an IPv6 address.
        self._connection = kind(parts.hostname, port or kind.default_port, timeout=timeout_s)
        self._base = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._lock = threading.Lock()

    def upload(self, graph: OpGraph) -> str:
        """Sends a graph; its digest."""
        body = dumps(graph).encode()
        return self._ask("POST", "/v1/graphs", body, GraphAnswer).digest

    def solve(self, graph: OpGraph | str, wish: Wish | None = None) -> SolveAnswer:
        """Where the graph goes of what is left, and what to reserve for it.

        Args:
            graph: A graph, sent where the service does not know it, or the digest of one.
            wish: What the scheduler wants.

        Raises:
            InputError: The wish makes no sense.
            ServiceError: There was no answer, or the service has too much to do.
        """
        wanted = SolveRequest(_digest(graph), wish or Wish())
        return self._about(graph, "/v1/solve", wanted, SolveAnswer)

    def whatif(
        self,
        graph: OpGraph | str,
        wish: Wish | None = None,
        *,
        after: Iterable[str] = (),
        up_to: int = 0,
    ) -> WhatIf:
        """See `whatif.whatif`; raises as `solve` does."""
        wanted = WhatIfRequest(_digest(graph), wish or Wish(), tuple(after), up_to)
        return self._about(graph, "/v1/whatif", wanted, WhatIf)

    def reserve(
        self,
        job: str,
        claims: Iterable[Claim],
        *,
        version: int | None = None,
        request_id: str | None = None,
    ) -> Reservation:
        """See `Ledger.reserve`. Without a request id it makes one, and can so ask again by itself.

        Raises:
            ReservationError: As `Ledger.reserve`.
            ServiceError: There was no answer; ask again with the same request id.
        """
        known = _new_id() if request_id is None else request_id
        wanted = ReserveRequest(job, tuple(claims), version, known)
        return self._ask("POST", "/v1/reserve", encode(wanted), Reservation)

    def release(self, job: str, *, request_id: str | None = None) -> Reservation:
        """See `Ledger.release`; raises as `reserve` does."""
        wanted = ReleaseRequest(job, _new_id() if request_id is None else request_id)
        return self._ask("POST", "/v1/release", encode(wanted), Reservation)

    def snapshot(self) -> SnapshotAnswer:
        """What is left, and who has the rest."""
        return self._ask("GET", "/v1/snapshot", b"", SnapshotAnswer)

    def close(self) -> None:
        """Closes the connection; another question opens it again."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _about(self, graph: OpGraph | str, path: str, wanted: object, kind: type[_T]) -> _T:
        try:
            return self._ask("POST", path, encode(wanted), kind)
        except ServiceError as error:
            if error.status != 404 or isinstance(graph, str):
                raise
        self.upload(graph)
        return self._ask("POST", path, encode(wanted), kind)

    def _ask(self, method: str, path: str, body: bytes, kind: type[_T]) -> _T:
        headers = {**self._headers, "Content-Type": "application/json"}
        with self._lock:
            try:
                status, answer = self._sent(method, path, body, headers)
            except (ConnectionError, http.client.RemoteDisconnected):
                # A connection that was kept open may have been closed: once more, on a new one.
                # Every message may be sent twice: changes have a request id.
                self._connection.close()
                try:
                    status, answer = self._sent(method, path, body, headers)
                except (OSError, http.client.HTTPException) as error:
                    self._connection.close()
                    raise ServiceError(f"no answer from {self._url}: {error}.", 0) from error
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                raise ServiceError(f"no answer from {self._url}: {error}.", 0) from error
        if status == http.client.OK:
            return decode(answer, kind)
        try:
            failure = decode(answer, Failure)
        except InputError:
            raise ServiceError(f"{self._url}{path} answers {status}.", status) from None
        if failure.error in _REASONS:
            raise ReservationError(failure.message, failure.error)
        if failure.error in ("input", "limit"):
            raise InputError(failure.message)
        raise ServiceError(failure.message, status)

    def _sent(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        self._connection.request(method, self._base + path, body or None, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def _digest(graph: OpGraph | str) -> str:
    return graph if isinstance(graph, str) else graph.digest


def _new_id() -> str:
    return uuid.uuid4().hex
