"""A stand-in for Kubernetes' API server: objects in memory, as far as the adapters ask it."""

import json
import re
from typing import Any

import httpx

_PATH = re.compile(
    r"(?:/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+))?(?:/(\w+))?"
)


class KilledError(Exception):
    """The process that asked is no more."""


class Objects:
    """Objects by kind, namespace and name; a kubelet that a test plays by itself.

    Attributes:
        rows: The objects by plural, namespace and name.
        asked: The method and path of each request.
        kill_at: The request after or before which the asking process dies; and which of them.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.asked: list[str] = []
        self.kill_at: tuple[int, bool] | None = None
        self.away = False
        self._number = 0

    def add(self, plural: str, item: dict[str, Any]) -> dict[str, Any]:
        """An object as somebody has made it, with what the server adds."""
        metadata = item["metadata"]
        self._number += 1
        name = metadata.setdefault("name", f"{metadata.get('generateName')}{self._number}")
        metadata.setdefault("uid", f"uid-{self._number}")
        metadata.setdefault("creationTimestamp", f"2026-01-01T00:00:{self._number % 60:02}Z")
        metadata["resourceVersion"] = str(self._number)
        self.rows[plural, metadata.get("namespace", ""), name] = item
        return item

    def of(self, plural: str) -> list[dict[str, Any]]:
        """All objects of a kind, by name."""
        return [row for key, row in sorted(self.rows.items()) if key[0] == plural]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """The answer to a request."""
        if self.away:
            raise httpx.ConnectError("refused")
        self.asked.append(f"{request.method} {request.url.path}")
        if self.kill_at == (len(self.asked), False):
            raise KilledError
        answer = self._answer(request)
        if self.kill_at == (len(self.asked), True):
            raise KilledError
        return answer

    def _answer(self, request: httpx.Request) -> httpx.Response:
        match = _PATH.fullmatch(request.url.path)
        assert match is not None, request.url.path
        namespace, plural, name, part = match.groups()
        body = json.loads(request.content) if request.content else {}
        key = (plural, namespace or "", name or body.get("metadata", {}).get("name", ""))
        if request.method == "GET" and name is None:
            label = request.url.params.get("labelSelector")
            items = [
                row
                for row in self.of(plural)
                if label is None or label in (row["metadata"].get("labels") or {})
            ]
            return httpx.Response(200, json={"items": json.loads(json.dumps(items))})
        if request.method == "POST":
            if key in self.rows:
                return httpx.Response(409, text="AlreadyExists")
            return httpx.Response(201, json=self.add(plural, body))
        if key not in self.rows:
            return httpx.Response(404, text="NotFound")
        row = self.rows[key]
        if request.method == "DELETE":
            del self.rows[key]
        elif request.method == "PATCH":
            version = body.get("metadata", {}).get("resourceVersion")
            if version not in (None, row["metadata"]["resourceVersion"]):
                return httpx.Response(409, text="Conflict")
            assert part == "status"
            row["status"] = _merged(row.get("status") or {}, body["status"])
            self._number += 1
            row["metadata"]["resourceVersion"] = str(self._number)
        return httpx.Response(200, json=row)


def _merged(old: Any, new: Any) -> Any:
    """https://www.rfc-editor.org/rfc/rfc7386."""
    if not isinstance(new, dict):
        return new
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
