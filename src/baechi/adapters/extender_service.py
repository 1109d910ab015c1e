"""The scheduler extender over HTTP."""

import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from baechi.adapters.scheduler_extender import Extender
from baechi.errors import BaechiError, InputError

# Those that have not ended.
PODS: Final = "/api/v1/pods?fieldSelector=status.phase!=Succeeded,status.phase!=Failed"
_JSON: Final = "application/json"
_BODY_BYTES: Final = 64 * 2**20  # kube-scheduler sends whole nodes, if it may not send names


def create_extender_app(
    extender: Extender,
    pods: Callable[[], Any] | None = None,
    *,
    every_s: float = 10,
    report: Callable[[str], object] = print,
) -> FastAPI:
    """The extender's endpoints: `/filter`, `/prioritize`, `/bind`, and Volcano's under `/volcano`.

    Questions are answered one after the other. With `pods`, which lists all pods, what ended ones
    hold is released every so many seconds, and before a pod is told that no node has room:
    kube-scheduler asks when a pod ends, and then not for minutes. `report` is told where that
    fails.
    """
    turn = threading.Lock()

    def in_turn(answer: Callable[[Any], Any], asked: Any) -> Any:
        with turn:
            return answer(asked)

    def look(list_pods: Callable[[], Any]) -> None:
        version, listed = extender.version(), list_pods()
        with turn:
            extender.reconcile(listed, version)

    def look_if_it_answers(list_pods: Callable[[], Any]) -> None:
        try:
            look(list_pods)
        except (OSError, BaechiError) as error:  # the API server is away: the next time, then
            report(f"pods that have ended are not seen: {error}")

    async def watch(list_pods: Callable[[], Any]) -> None:
        while True:
            await run_in_threadpool(look_if_it_answers, list_pods)
            await anyio.sleep(every_s)

    def filtered(asked: Any) -> Any:
        said = in_turn(extender.filter, asked)
        nodes = said["NodeNames"] if "NodeNames" in said else said["Nodes"]["items"]
        if nodes or said["Error"] or pods is None:
            return said
        look_if_it_answers(pods)
        return in_turn(extender.filter, asked)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            if pods is not None:
                tasks.start_soon(watch, pods)
            yield
            tasks.cancel_scope.cancel()

    app = FastAPI(title="Baechi's scheduler extender", lifespan=lifespan, redoc_url=None)

    def route(path: str, answer: Callable[[Any], Any]) -> None:
        async def endpoint(request: Request) -> Response:
            try:
                asked = json.loads(await _body(request))
                said = await run_in_threadpool(answer, asked)
            except (BaechiError, ValueError) as error:
                return Response(json.dumps({"Error": str(error)}), 422, media_type=_JSON)
            return Response(json.dumps(said), media_type=_JSON)

        app.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False)

    async def healthy(_: Request) -> Response:
        return Response('{"status":"ok"}', media_type=_JSON)

    route("/filter", filtered)
    route("/prioritize", partial(in_turn, extender.prioritize))
    route("/bind", partial(in_turn, extender.bind))
    route("/volcano/predicate", partial(in_turn, extender.predicate))
    route("/volcano/prioritize", partial(in_turn, extender.score))
    app.add_api_route("/healthz", healthy, methods=["GET"], include_in_schema=False)
    return app


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _BODY_BYTES:
            raise InputError(f"the body has more than {_BODY_BYTES} bytes, the limit.")
        chunks.append(chunk)
    return b"".join(chunks)
