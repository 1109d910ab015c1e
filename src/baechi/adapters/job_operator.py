"""The operator: BaechiJobs and Kueue's admission checks, looked at again and again.

A turn lists everything, compares it with the ledger, and does what is missing. It keeps nothing
between turns, so there is nothing to lose: no watch, no queue, no state in annotations.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, final

from baechi.adapters import baechi_job, kueue
from baechi.adapters.api_server import MERGE, ApiError, ApiServer
from baechi.adapters.baechi_job import GROUP, UID_LABEL, VERSION
from baechi.adapters.free_devices import runs
from baechi.errors import InputError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.ledger import Ledger
from baechi.storage.serialization import loads
from baechi.validation import check_choice

_JOBS: Final = f"/apis/{GROUP}/{VERSION}"
# The newest first: v1beta2 came with Kueue 0.15, and v1beta1 was to go with 0.17.
_KUEUE: Final = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")
_ABSENT: Final = 404
_CONFLICT: Final = 409
_INVALID: Final = (400, 422)
_PLURALS: Final = {"Pod": "pods", "Service": "services"}


@final
class Operator:
    """Makes the cluster as BaechiJobs and Workloads ask.

    Args:
        api: The API server.
        ledger: Of a topology, whose nodes have the names that Kubernetes gives them.
        graph_of: The graph with a digest; raises `KeyError` where it is unknown.
        spelling: How pods say which part of a GPU they take, one of `baechi_job.SPELLINGS`.
        clock: The seconds since 1970.
    """

    def __init__(
        self,
        api: ApiServer,
        ledger: Ledger,
        graph_of: Callable[[str], OpGraph],
        *,
        spelling: str = "none",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._ledger, self._graph_of = api, ledger, graph_of
        check_choice(spelling, baechi_job.SPELLINGS, "spelling")
        self._spelling, self._clock = spelling, clock
        self._refusals: list[ApiError] = []  # of this turn

    def run(self, every_s: float, stop: threading.Event, report: Callable[[str], object]) -> None:
        """Turns until it is stopped; an API server or a ledger that is away is asked again."""
        while not stop.is_set():
            try:
                self.turn()
            except (OSError, ReservationError) as error:
                report(str(error))
            stop.wait(every_s)

    def turn(self) -> None:
        """Looks at everything once, and does what is missing.

        Raises:
            ApiError: The API server cannot be reached, or refuses something; what it refuses of one
                object keeps no other waiting.
            ReservationError: The ledger's file cannot be used.
        """
        self._refusals = []
        self._of_jobs()
        self._of_workloads()
        if self._refusals:
            raise self._refusals[0]

    def _of_jobs(self) -> None:
        jobs = self._listed(f"{_JOBS}/baechijobs")
        listed = self._listed(f"/api/v1/pods?labelSelector={UID_LABEL}")
        if jobs is None or listed is None:  # so it is while the API server starts, too
            return
        pods: dict[str, list[Any]] = {}
        for pod in listed:
            pods.setdefault(pod["metadata"]["labels"][UID_LABEL], []).append(pod)
        running = {uid for uid, rows in pods.items() if any(map(runs, rows))}
        self._forget(baechi_job.PREFIX, {baechi_job.key_of(job) for job in jobs}, running)
        for job in sorted(jobs, key=_age):
            with self._apart():
                self._of_job(job, pods.get(job["metadata"]["uid"], []))

    def _of_job(self, job: Mapping[str, Any], pods: list[Any]) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]

        def graph(wanted: Mapping[str, Any]) -> OpGraph:
            return self._graph(namespace, wanted)

        plan = baechi_job.reconcile(
            job, pods, self._ledger, graph, now=self._now(), spelling=self._spelling
        )
        status = plan.status
        for item in plan.create:
            try:
                self._create(f"/api/v1/namespaces/{namespace}/{_PLURALS[item['kind']]}", item)
            except ApiError as error:
                if not error.refused:
                    raise
                ever = error.status in _INVALID
                status = baechi_job.refused(plan, str(error), ever=ever, now=self._now())
                break
        for pod in plan.delete:
            with _allowing(_ABSENT):
                self._api.ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        before = job.get("status") or {}
        if status != before:
            path = f"{_JOBS}/namespaces/{namespace}/baechijobs/{name}/status"
            with _allowing(_ABSENT):
                self._api.ask("PATCH", path, {"status": status}, MERGE)
        self._tell(job, status, before)

    def _create(self, path: str, item: Mapping[str, Any]) -> None:
        """Makes an object of a job, unless it is there."""
        try:
            self._api.ask("POST", path, item)
        except ApiError as error:
            if error.status != _CONFLICT:
                raise
            metadata = item["metadata"]
            there = self._api.ask("GET", f"{path}/{metadata['name']}")
            labels = there["metadata"].get("labels") or {}
            if labels.get(UID_LABEL) != metadata["labels"][UID_LABEL]:
                raise ApiError(
                    f"there is a {item['kind']} {metadata['name']!r} already, which is not the "
                    "job's; delete it, or name the job otherwise.",
                    _CONFLICT,
                ) from error

    def _tell(
        self, job: Mapping[str, Any], status: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        """An event, where the reason or the message of the condition is another."""
        (row, *_), last = status.get("conditions") or [{}], before.get("conditions") or [{}]
        if not row or (row["reason"], row["message"]) == (
            last[0].get("reason"),
            last[0].get("message"),
        ):
            return
        metadata = job["metadata"]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "generateName": f"{metadata['name']}-",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "BaechiJob",
                **{key: metadata[key] for key in ("namespace", "name", "uid")},
            },
            "type": "Warning" if status["phase"] == "Failed" else "Normal",
            "reason": row["reason"],
            "message": row["message"][:1024],
            "source": {"component": "baechi"},
            "firstTimestamp": self._now(),
            "lastTimestamp": self._now(),
            "count": 1,
        }
        self._api.ask("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", event)

    def _of_workloads(self) -> None:
        for kueue_api in _KUEUE:
            listed = self._listed(f"{kueue_api}/admissionchecks")
            if listed is not None:
                break
        workloads = None if listed is None else self._listed(f"{kueue_api}/workloads")
        if listed is None or workloads is None:
            return
        checks = set()
        for check in listed:
            if (check.get("spec") or {}).get("controllerName") == kueue.CONTROLLER:
                checks.add(check["metadata"]["name"])
                self._activate(kueue_api, check)
        self._forget(kueue.PREFIX, {kueue.key_of(row) for row in workloads})
        for row in sorted(workloads, key=_age):
            with self._apart():
                rows = kueue.review(
                    row, frozenset(checks), self._ledger, self._graph_of, now=self._now()
                )
                if rows is not None:
                    self._patch(kueue_api, row, "workloads", {"admissionChecks": rows})

    def _activate(self, api: str, check: Mapping[str, Any]) -> None:
        """Tells Kueue that somebody answers a check."""
        rows = (check.get("status") or {}).get("conditions") or ()
        if any(row.get("type") == "Active" and row.get("status") == "True" for row in rows):
            return
        active = {
            "type": "Active",
            "status": "True",
            "reason": "Ready",
            "message": "Baechi's operator answers",
            "lastTransitionTime": self._now(),
        }
        self._patch(api, check, "admissionchecks", {"conditions": [active]})

    def _patch(
        self, api: str, item: Mapping[str, Any], plural: str, status: Mapping[str, Any]
    ) -> None:
        """A new status, unless somebody else was faster: then the next turn looks again."""
        metadata = item["metadata"]
        where = f"namespaces/{metadata['namespace']}/" if "namespace" in metadata else ""
        path = f"{api}/{where}{plural}/{metadata['name']}/status"
        version = {"resourceVersion": metadata.get("resourceVersion", "")}
        with _allowing(_CONFLICT), _allowing(_ABSENT):
            self._api.ask("PATCH", path, {"metadata": version, "status": dict(status)}, MERGE)

    def _forget(self, prefix: str, there: set[str], running: Collection[str] = frozenset()) -> None:
        """Releases what is held for objects that are no more, and of which no pod runs any more."""
        for key in sorted(self._ledger.snapshot().jobs):
            uid = key.rpartition("/")[2]
            if key.startswith(prefix) and key not in there and uid not in running:
                self._ledger.release(key)

    def _graph(self, namespace: str, wanted: Mapping[str, Any]) -> OpGraph:
        """The graph of a digest, or in a ConfigMap."""
        try:
            if "digest" in wanted:
                return self._graph_of(wanted["digest"])
            name, key = wanted["configMap"]["name"], wanted["configMap"].get("key", "graph.json")
            path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
            text = self._api.ask("GET", path)["data"][key]
        except (KeyError, TypeError, ApiError) as error:
            raise InputError(f"there is no graph {dict(wanted)}: {error}") from error
        return loads(text, OpGraph, source=f"ConfigMap {name!r}")

    def _listed(self, path: str) -> list[Any] | None:
        """The objects there; `None` where the cluster does not know their kind."""
        with _allowing(_ABSENT):
            return list(self._api.ask("GET", path).get("items") or ())
        return None

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is wrong with one object, or refused of it, is no reason to leave the others."""
        try:
            yield
        except InputError:
            pass
        except ApiError as error:
            if not error.refused:
                raise
            self._refusals.append(error)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def _allowing(status: int) -> Iterator[None]:
    """Passes over one kind of refusal."""
    try:
        yield
    except ApiError as error:
        if error.status != status:
            raise


def _age(item: Mapping[str, Any]) -> tuple[str, str, str]:
    """Who came first is looked at first; at one time by name."""
    metadata = item["metadata"]
    stamp = metadata.get("creationTimestamp") or ""
    return stamp, metadata.get("namespace", ""), metadata["name"]
