"""The scheduler extender over HTTP, its graphs in a folder, and the API server that it binds at."""

import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, final

import anyio
import httpx
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from baechi.adapters.scheduler_extender import Extender
from baechi.errors import BaechiError, FormatError, InputError
from baechi.records.graph import OpGraph
from baechi.storage.serialization import load

# https://kubernetes.io/docs/tasks/run-application/access-api-from-pod
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER: Final = "https://kubernetes.default.svc"
_JSON: Final = "application/json"
_BODY_BYTES: Final = 64 * 2**20  # kube-scheduler sends whole nodes, if it may not send names


def create_extender_app(
    extender: Extender, pods: Callable[[], Any] | None = None, *, every_s: float = 10
) -> FastAPI:
    """The extender's endpoints: `/filter`, `/prioritize`, `/bind`, and Volcano's under `/volcano`.

    Questions are answered one after the other. With `pods`, which lists all pods, what ended ones
    hold is released every so many seconds.
    """
    turn = threading.Lock()

    def in_turn(answer: Callable[[Any], Any], asked: Any) -> Any:
        with turn:
            return answer(asked)

    async def watch(list_pods: Callable[[], Any]) -> None:
        while True:
            with suppress(OSError, BaechiError):  # the API server is away: the next time, then
                await run_in_threadpool(
                    in_turn, extender.reconcile, await run_in_threadpool(list_pods)
                )
            await anyio.sleep(every_s)

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
                said = await run_in_threadpool(in_turn, answer, asked)
            except (BaechiError, ValueError) as error:
                return Response(json.dumps({"Error": str(error)}), 422, media_type=_JSON)
            return Response(json.dumps(said), media_type=_JSON)

        app.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False)

    async def healthy(_: Request) -> Response:
        return Response('{"status":"ok"}', media_type=_JSON)

    route("/filter", extender.filter)
    route("/prioritize", extender.prioritize)
    route("/bind", extender.bind)
    route("/volcano/predicate", extender.predicate)
    route("/volcano/prioritize", extender.score)
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


@final
class GraphFolder:
    """The graphs in a folder's `.json` files, by digest; a file that comes later is found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"there is no folder {str(folder)!r} with graphs.")
        self._folder = folder
        self._read: set[tuple[str, int]] = set()
        self._graphs: dict[str, OpGraph] = {}

    def __call__(self, digest: str) -> OpGraph:
        """The graph, or a `KeyError`. Files that hold no graph are passed over."""
        if digest not in self._graphs:
            for file in sorted(self._folder.glob("*.json")):
                stamp = (file.name, file.stat().st_mtime_ns)
                if stamp not in self._read:
                    self._read.add(stamp)
                    with suppress(FormatError, InputError, OSError):
                        graph = load(file, OpGraph)
                        self._graphs[graph.digest] = graph
        return self._graphs[digest]


@final
class ApiServer:
    """As much of Kubernetes' API as the extender needs, with a service account's token.

    Raises:
        InputError: There is no token, outside of a cluster.
    """

    def __init__(
        self,
        url: str = IN_CLUSTER,
        account: Path = ACCOUNT,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        token = account / "token"
        if not token.is_file():
            raise InputError(
                f"there is no service account's token at {token}; run in a pod, or name the folder "
                "with token and ca.crt."
            )
        self._token = token  # read again for each request: the kubelet renews it
        authority = account / "ca.crt"
        self._client = httpx.Client(
            base_url=url,
            verify=str(authority) if authority.is_file() and transport is None else True,
            transport=transport,
            timeout=10,
        )

    def bind(
        self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]
    ) -> None:
        """Writes a pod's annotations, and binds it to a node.

        A pod that is bound to that node already is left as it is: the answer to an earlier request
        was lost.

        Raises:
            OSError: The API server refuses, or cannot be reached.
        """
        pod = f"/api/v1/namespaces/{namespace}/pods/{name}"
        found = self._asked("GET", pod)
        if found["metadata"]["uid"] != uid:
            raise OSError(f"pod {namespace}/{name} is another one now.")
        metadata = {"uid": uid, "annotations": dict(annotations)}
        patch = {"metadata": metadata}
        self._asked("PATCH", pod, patch, "application/merge-patch+json")
        if (found.get("spec") or {}).get("nodeName") == node:
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self._asked("POST", f"{pod}/binding", binding)

    def pods(self) -> Any:
        """All pods.

        Raises:
            OSError: As `bind`.
        """
        return self._asked("GET", "/api/v1/pods")

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _asked(self, method: str, path: str, body: Any = None, kind: str = _JSON) -> Any:
        headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        content = None
        if body is not None:
            headers["Content-Type"] = kind
            content = json.dumps(body)
        try:
            answer = self._client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise OSError(f"{method} {path}: {error}") from error
        if answer.status_code >= 300:
            text = answer.text[:300]
            raise OSError(f"{method} {path}: {answer.status_code} {text}")
        return answer.json()
