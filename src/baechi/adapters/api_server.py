"""Kubernetes' API server, as far as the adapters ask it."""

import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import httpx

from baechi.errors import InputError

# https://kubernetes.io/docs/tasks/run-application/access-api-from-pod
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER: Final = "https://kubernetes.default.svc"
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"


@final
class ApiError(OSError):
    """The API server refuses a request, or cannot be reached.

    Attributes:
        status: The HTTP status; 0 where there was no answer.
        refused: Whether it has surely not done what it was asked.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.refused = 400 <= status < 500


@final
class ApiServer:
    """Kubernetes' API, with a service account's token.

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
        known = ssl.create_default_context(cafile=authority) if authority.is_file() else True
        self._client = httpx.Client(base_url=url, verify=known, transport=transport, timeout=10)

    def bind(
        self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]
    ) -> None:
        """Writes a pod's annotations, and binds it to a node.

        A pod that is bound to that node already is left as it is: the answer to an earlier request
        was lost.

        Raises:
            ApiError: The API server refuses, or cannot be reached.
        """
        pod = f"/api/v1/namespaces/{namespace}/pods/{name}"
        found = self.ask("GET", pod)
        if found["metadata"]["uid"] != uid:
            raise ApiError(f"pod {namespace}/{name} is another one now.", 409)
        metadata = {"uid": uid, "annotations": dict(annotations)}
        patch = {"metadata": metadata}
        self.ask("PATCH", pod, patch, MERGE)
        if (found.get("spec") or {}).get("nodeName") == node:
            return
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self.ask("POST", f"{pod}/binding", binding)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def ask(self, method: str, path: str, body: Any = None, kind: str = JSON) -> Any:
        """The answer to one request.

        Raises:
            ApiError: The server refuses, or cannot be reached.
        """
        headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        content = None
        if body is not None:
            headers["Content-Type"] = kind
            content = json.dumps(body)
        try:
            answer = self._client.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise ApiError(f"{method} {path}: {error}") from error
        if answer.status_code >= 300:
            raise ApiError(f"{method} {path}: {_said(answer)}", answer.status_code)
        try:
            return answer.json()
        except ValueError as error:  # of something else that listens there
            raise ApiError(f"{method} {path}: no JSON but {answer.text[:300]!r}") from error


def _said(answer: httpx.Response) -> str:
    """Why a request was refused: the message of the server's `Status`, or the body's beginning."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.json()['message']}"
    return f"{answer.status_code} {answer.text[:300]}"
