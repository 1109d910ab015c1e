"""The placement service over HTTP: placements without side effects, and a ledger.

The messages are those of `messages.py`. Solves run in processes of their own (`worker_pool.py`);
changes of the ledger are made one after the other in this one.
"""

import hmac
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final, TypeAlias, TypeVar, final

import anyio
from fastapi import FastAPI, Request, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from baechi import __version__
from baechi.errors import BaechiError, FormatError, ReservationError
from baechi.scheduling import messages
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.messages import (
    Failure,
    GraphAnswer,
    Limits,
    ReleaseRequest,
    ReserveRequest,
    ServiceError,
    SnapshotAnswer,
    SolveAnswer,
    SolveRequest,
    WhatIfRequest,
    decode,
    encode,
    snapshot_answer,
)
from baechi.scheduling.snapshot import Reservation
from baechi.scheduling.whatif import WhatIf
from baechi.scheduling.worker_pool import Question, Workers
from baechi.validation import check_count

_T = TypeVar("_T")
_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
_JSON: Final = "application/json"
# Meanings of statuses, for the OpenAPI document.
_FAILURES: Final = {
    401: "No bearer token, or another one.",
    404: "The graph was not uploaded, or dropped; or the job has no reservation.",
    408: "The body did not arrive in time.",
    409: "Too little is left, the snapshot is stale, or the job or the request id is taken.",
    413: "The body is too large.",
    422: "The request cannot be read, is nested too deeply, or asks for too much.",
    503: "The service is overloaded, or the answer takes too long. Try again, or ask for less.",
}
_NAMES: Final = {401: "unauthorized", 404: "unknown-graph", 503: "busy"}
_HEADERS: Final = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
# Paths that need no token.
_OPEN: Final = ("/healthz", "/openapi.json", "/docs")


def create_app(
    ledger: Ledger, *, token: str = "", workers: int = 2, limits: Limits | None = None
) -> FastAPI:
    """The service over a ledger, which stays the caller's to close.

    Requests must carry the bearer token, unless that is empty.
    """
    return _Service(ledger, token, workers, limits or Limits()).app


@final
class _Service:
    def __init__(self, ledger: Ledger, token: str, workers: int, limits: Limits) -> None:
        self._ledger, self._token, self._limits = ledger, token, limits
        self._count = workers
        self._workers: Workers | None = None
        self._graphs = _Graphs(limits.graph_bytes)
        self._metrics = _Metrics(ledger)
        self.app = FastAPI(
            title="Baechi",
            version=__version__,
            summary="Placements of operator graphs on the free part of a cluster.",
            lifespan=self._lifespan,
            redoc_url=None,
        )
        self.app.middleware("http")(self._guarded)
        self.app.add_exception_handler(HTTPException, _no_route)
        # Path, what answers, the message that is asked, and the one that is answered.
        self._routes: tuple[tuple[str, _Endpoint, Any, Any], ...] = (
            ("/v1/graphs", self._upload, {"type": "object"}, GraphAnswer),
            ("/v1/solve", self._solve, SolveRequest, SolveAnswer),
            ("/v1/whatif", self._whatif, WhatIfRequest, WhatIf),
            ("/v1/reserve", self._reserve, ReserveRequest, Reservation),
            ("/v1/release", self._release, ReleaseRequest, Reservation),
            ("/v1/snapshot", self._snapshot, None, SnapshotAnswer),
            ("/healthz", self._healthz, None, None),
            ("/metrics", self._scrape, None, None),
        )
        for path, endpoint, asked, _ in self._routes:
            method = "GET" if asked is None else "POST"
            self.app.add_api_route(path, endpoint, methods=[method], include_in_schema=False)
        self.app.openapi = cache(self._openapi)  # type: ignore[method-assign]

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        limits = self._limits
        self._workers = await run_in_threadpool(Workers, self._count, self._ledger.site, limits)
        # A thread for every question that may wait, and some for the ledger.
        anyio.to_thread.current_default_thread_limiter().total_tokens = (
            self._count + limits.waiting + 16
        )
        try:
            yield
        finally:
            await run_in_threadpool(self._workers.close)

    async def _guarded(self, request: Request, answer: _Endpoint) -> Response:
        """Checks the token of a request, measures its time, and turns errors into responses."""
        start = time.perf_counter()
        path = request.url.path
        try:
            if path not in _OPEN:
                self._check_token(request)
            response = await answer(request)
        except (BaechiError, TimeoutError) as error:
            response = _error_response(error)
        # Paths that do not exist are one, so that nobody can fill the memory with them.
        label = path if any(path == known for known, *_ in self._routes) else "other"
        self._metrics.count(label, response.status_code, time.perf_counter() - start)
        return response

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            text = "give the header 'Authorization: Bearer TOKEN' with the service's token."
            raise ServiceError(text, 401)

    async def _body(self, request: Request, most: int) -> bytes:
        """The body; raises an error if it is too large or too slow."""
        chunks, size = [], 0
        with anyio.fail_after(self._limits.seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most:
                    raise ServiceError(f"the body has more than {most} bytes, the limit.", 413)
                chunks.append(chunk)
        return b"".join(chunks)

    async def _message(self, request: Request, kind: type[_T]) -> _T:
        return decode(await self._body(request, self._limits.message_bytes), kind)

    async def _upload(self, request: Request) -> Response:
        body = await self._body(request, self._limits.body_bytes)
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"byte {error.start} is not UTF-8, so this is no graph.") from error
        answer = await self._answer(Question(text))
        self._graphs.add(decode(answer, GraphAnswer).digest, text)
        return Response(answer, media_type=_JSON)

    async def _solve(self, request: Request) -> Response:
        return await self._solved(await self._message(request, SolveRequest))

    async def _whatif(self, request: Request) -> Response:
        wanted, limits = await self._message(request, WhatIfRequest), self._limits
        if check_count(wanted.up_to, "up_to") > limits.up_to:
            raise ServiceError(f"up_to is {wanted.up_to}; the limit is {limits.up_to}.", 422)
        if len(wanted.after) > limits.after:
            text = f"after names {len(wanted.after)} jobs; at most {limits.after}."
            raise ServiceError(text, 422)
        return await self._solved(wanted)

    async def _solved(self, request: SolveRequest | WhatIfRequest) -> Response:
        text = self._graphs.get(request.graph)
        now = await _of_ledger(self._ledger.snapshot)
        jobs = now.jobs if isinstance(request, WhatIfRequest) and request.after else {}
        question = Question(text, request, (now.version, now.uses, dict(jobs)))
        return Response(await self._answer(question), media_type=_JSON)

    async def _answer(self, question: Question) -> bytes:
        assert self._workers is not None  # the lifespan has started them
        return await run_in_threadpool(self._workers.answer, question)

    async def _reserve(self, request: Request) -> Response:
        wanted = await self._message(request, ReserveRequest)
        options = {"version": wanted.version, "request_id": wanted.request_id}
        made = await _of_ledger(self._ledger.reserve, wanted.job, wanted.claims, **options)
        return Response(encode(made), media_type=_JSON)

    async def _release(self, request: Request) -> Response:
        wanted = await self._message(request, ReleaseRequest)
        ended = await _of_ledger(self._ledger.release, wanted.job, request_id=wanted.request_id)
        return Response(encode(ended), media_type=_JSON)

    async def _snapshot(self, _: Request) -> Response:
        now = await _of_ledger(self._ledger.snapshot)
        return Response(encode(snapshot_answer(now)), media_type=_JSON)

    async def _healthz(self, _: Request) -> Response:
        now = await _of_ledger(self._ledger.snapshot)
        return Response(f'{{"status":"ok","version":{now.version}}}', media_type=_JSON)

    async def _scrape(self, _: Request) -> Response:
        page = await _of_ledger(self._metrics.page)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _openapi(self) -> dict[str, Any]:
        """The OpenAPI document: the routes, and the schemas of their messages."""
        paths: dict[str, Any] = {}
        for path, endpoint, asked, answered in self._routes:
            responses = {"200": {"description": "The answer.", **_content(answered)}}
            for status, text in _FAILURES.items():
                if asked is not None or status in (401, 503):
                    responses[str(status)] = {"description": text, **_content(Failure)}
            operation: dict[str, Any] = {
                "summary": endpoint.__name__.replace("_", " ").title(),
                "operationId": path.strip("/").replace("/", "_"),
            }
            if asked is not None:
                operation["requestBody"] = {**_content(asked), "required": True}
            operation["responses"] = responses
            if self._token and path not in _OPEN:
                operation["security"] = [{"token": []}]
            paths[path] = {"get" if asked is None else "post": operation}
        schemas: dict[str, Any] = {}
        requests = (SolveRequest, WhatIfRequest, ReserveRequest, ReleaseRequest)
        for kind in (*requests, *messages.ANSWERS):
            schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            version = {"const": messages.SCHEMA, "type": "integer", "title": "Schema"}
            schema["properties"] = {"schema": version, **schema.get("properties", {})}
            schema["required"] = ["schema", *schema.get("required", [])]
            schemas[f"{kind.__name__}Message"] = schema
        parts = {"schemas": schemas}
        if self._token:
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        about = {"title": self.app.title, "summary": self.app.summary, "version": self.app.version}
        return {"openapi": "3.1.0", "info": about, "paths": paths, "components": parts}


@final
class _Graphs:
    """Uploaded graphs by digest, for one event loop; the least recently used are dropped first."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._texts: OrderedDict[str, str] = OrderedDict()

    def add(self, digest: str, text: str) -> None:
        self._size += len(text) - len(self._texts.pop(digest, ""))
        self._texts[digest] = text
        while self._size > self._most and len(self._texts) > 1:
            _, old = self._texts.popitem(last=False)
            self._size -= len(old)

    def get(self, digest: str) -> str:
        if digest not in self._texts:
            raise ServiceError(
                f"no graph has digest {digest[:80]!r}: it was never uploaded, or the service was "
                "restarted or dropped it. Send it to /v1/graphs first.",
                404,
            )
        self._texts.move_to_end(digest)
        return self._texts[digest]


@final
class _Metrics:
    """Metrics for Prometheus."""

    def __init__(self, ledger: Ledger) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "baechi_requests", "Requests.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "baechi_request_seconds",
            "Time to answer.",
            ("path",),
            buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self._registry,
        )
        self._ledger = ledger
        self._gauges = [
            Gauge(f"baechi_{name}", text, registry=self._registry)
            for name, text in (
                ("ledger_version", "Changes of the ledger."),
                ("jobs", "Jobs with a reservation."),
                ("claimed_bytes", "Memory that is claimed."),
                ("claimed_devices", "Devices or instances that are claimed, by their shares."),
            )
        ]

    def count(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def page(self) -> bytes:
        now = self._ledger.snapshot()
        claims = [claim for row in now.jobs.values() for claim in row.claims]
        nbytes = sum(claim.memory_bytes for claim in claims)
        shares = sum(claim.share_milli for claim in claims) / 1000
        values = (now.version, len(now.jobs), nbytes, shares)
        for gauge, value in zip(self._gauges, values, strict=True):
            gauge.set(value)
        return generate_latest(self._registry)


async def _of_ledger(ask: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """A result of the ledger; a damaged file is an error of the service, not of the request."""
    try:
        return await run_in_threadpool(ask, *args, **options)
    except FormatError as error:
        raise ServiceError(str(error), 503) from error


def _content(kind: Any) -> dict[str, Any]:
    if kind is None:
        return {}
    named = not isinstance(kind, dict)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}Message"} if named else kind
    return {"content": {_JSON: {"schema": schema}}}


async def _no_route(request: Request, error: Any) -> Response:
    """The response for a path that does not exist, or does not take the method."""
    text = f"there is no {request.method} {request.url.path}; /openapi.json has what there is."
    return Response(encode(Failure("no-route", text)), error.status_code, error.headers, _JSON)


def _error_response(error: BaechiError | TimeoutError) -> Response:
    text = str(error)
    match error:
        case TimeoutError():
            status, name, text = 408, "limit", "the body did not arrive in time."
        case ServiceError():
            status, name = error.status, _NAMES.get(error.status, "limit")
        case ReservationError(reason="unavailable"):
            status, name = 503, "busy"
        case ReservationError():
            status, name = 404 if error.reason == "unknown" else 409, error.reason
        case _:
            status, name = 422, "input"
    return Response(encode(Failure(name, text)), status, _HEADERS.get(status), _JSON)
