"""Python client of the HTTP service, with the values of `explore`, `whatif` and `Ledger`."""

import ssl
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Final, TypeVar, final

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"baechi.scheduling.Client needs {error.name}: pip install 'baechi[client]'.",
        name=error.name,
    ) from error

from baechi.errors import InputError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Claim, Wish
from baechi.scheduling.messages import (
    Failure,
    GraphAnswer,
    ReleaseRequest,
    ReserveRequest,
    ServiceError,
    SnapshotAnswer,
    SolveAnswer,
    SolveRequest,
    WhatIfRequest,
    decode,
    encode,
)
from baechi.scheduling.snapshot import Reservation
from baechi.scheduling.whatif import WhatIf
from baechi.storage.serialization import dumps

_T = TypeVar("_T")
_REASONS: Final = ("capacity", "stale", "duplicate", "unknown")


@final
class Client:
    """Connections to a service, kept open; several threads may share it.

    Args:
        url: Such as `"http://127.0.0.1:8642"`.
        token: The service's bearer token.
        timeout_s: How long to wait for an answer.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8642", *, token: str = "", timeout_s: float = 60.0
    ) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InputError(f"url is {url!r}: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) >= 2**16:
            raise InputError(f"url is {url!r}; give one such as 'http://127.0.0.1:8642'.")
        self._url = url
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # Neither a proxy nor a password of the environment: the service is an internal one.
        self._connect = partial(
            httpx.Client,
            base_url=parts,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
        self._http = self._connect()

    def upload(self, graph: OpGraph) -> str:
        """Uploads a graph; returns its digest."""
        body = dumps(graph).encode()
        return self._request("POST", "/v1/graphs", body, GraphAnswer).digest

    def solve(self, graph: OpGraph | str, wish: Wish | None = None) -> SolveAnswer:
        """A placement of the graph on the free devices, and the claims to reserve for it.

        Args:
            graph: A graph, uploaded where the service does not know it, or the digest of one.
            wish: The preferences of the scheduler.

        Raises:
            InputError: The wish is contradictory.
            ServiceError: There was no answer, or the service is overloaded.
        """
        wanted = SolveRequest(_digest(graph), wish or Wish())
        return self._request_about(graph, "/v1/solve", wanted, SolveAnswer)

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
        return self._request_about(graph, "/v1/whatif", wanted, WhatIf)

    def reserve(
        self,
        job: str,
        claims: Iterable[Claim],
        *,
        version: int | None = None,
        request_id: str | None = None,
    ) -> Reservation:
        """See `Ledger.reserve`. A request id is made where none is given, to repeat it safely.

        Raises:
            ReservationError: As `Ledger.reserve`.
            ServiceError: There was no answer; try again with the same request id.
        """
        known = uuid.uuid4().hex if request_id is None else request_id
        wanted = ReserveRequest(job, tuple(claims), version, known)
        return self._request("POST", "/v1/reserve", encode(wanted), Reservation)

    def release(self, job: str, *, request_id: str | None = None) -> Reservation:
        """See `Ledger.release`; raises as `reserve` does."""
        wanted = ReleaseRequest(job, uuid.uuid4().hex if request_id is None else request_id)
        return self._request("POST", "/v1/release", encode(wanted), Reservation)

    def snapshot(self) -> SnapshotAnswer:
        """The free devices, and the reservations of the others."""
        return self._request("GET", "/v1/snapshot", b"", SnapshotAnswer)

    def close(self) -> None:
        """Closes the connections; another request opens new ones."""
        self._http.close()
        self._http = self._connect()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request_about(self, graph: OpGraph | str, path: str, wanted: object, kind: type[_T]) -> _T:
        """The answer about a graph, which is uploaded where the service does not know it."""
        try:
            return self._request("POST", path, encode(wanted), kind)
        except ServiceError as error:
            if error.status != 404 or isinstance(graph, str):
                raise
        self.upload(graph)
        return self._request("POST", path, encode(wanted), kind)

    def _request(self, method: str, path: str, body: bytes, kind: type[_T]) -> _T:
        try:
            try:
                answer = self._http.request(method, path, content=body)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                # A connection that was kept open may have been closed: once more, on a new one.
                # Every message may be sent twice: changes have a request id.
                answer = self._http.request(method, path, content=body)
        except httpx.HTTPError as error:
            raise ServiceError(f"no answer from {self._url}: {error}.", 0) from error
        if answer.status_code == httpx.codes.OK:
            return decode(answer.content, kind)
        try:
            failure = decode(answer.content, Failure)
        except InputError:
            status = answer.status_code
            raise ServiceError(f"{self._url}{path} answers {status}.", status) from None
        if failure.error in _REASONS:
            raise ReservationError(failure.message, failure.error)
        if failure.error in ("input", "limit"):
            raise InputError(failure.message)
        raise ServiceError(failure.message, answer.status_code)


def _digest(graph: OpGraph | str) -> str:
    return graph if isinstance(graph, str) else graph.digest
