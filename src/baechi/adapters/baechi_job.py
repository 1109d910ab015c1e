"""The custom resource `BaechiJob`: from what it asks and what there is to what has to be done.

A job reserves devices for its graph, has one pod on each, and releases them when it ends, as Big
Brain's BBJob. `reconcile` looks at everything anew each time. What a job needs is reserved before
it has pods, and released when its end is in its status and no pod of it runs any more: so whatever
was done or left undone before a kill, the next look does the rest.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from baechi.adapters.free_devices import (
    CLAIMS,
    MIB,
    OVER,
    nodes_of,
    reading,
    reservation_of,
    runs,
)
from baechi.errors import BaechiError, InfeasibleError, ReservationError
from baechi.records.cluster import Constraints
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import WHOLE_MILLI, Claim, Wish
from baechi.scheduling.decision import decide
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import Snapshot
from baechi.scheduling.whatif import whatif
from baechi.units import format_ns

GROUP: Final = "baechi.dev"
VERSION: Final = "v1alpha1"
PREFIX: Final = "baechijob/"
JOB_LABEL: Final = "baechi.dev/job"
# Its UID: an owner reference goes when a job is deleted without its pods.
UID_LABEL: Final = "baechi.dev/job-uid"
RANK_LABEL: Final = "baechi.dev/rank"
# How a container says which part of a GPU it takes.
SPELLINGS: Final = ("none", "hami", "kai", "device-plugin")
_PORT: Final = 29500
_ASKED: Final = 8  # jobs whose end is tried where nothing fits
_WAITS: Final = "waits"


@final
@dataclass(frozen=True)
class Plan:
    """What makes the cluster as a job asks.

    Attributes:
        status: The job's status.
        create: Objects to create; one that exists is as it must be.
        delete: Names of pods to delete.
    """

    status: dict[str, Any]
    create: tuple[dict[str, Any], ...] = ()
    delete: tuple[str, ...] = ()


def key_of(job: Mapping[str, Any]) -> str:
    """The name of its reservation."""
    return reservation_of(PREFIX, job)


def reconcile(
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    ledger: Ledger,
    graph_of: Callable[[Mapping[str, Any]], OpGraph],
    *,
    now: str,
    spelling: str = "none",
) -> Plan:
    """What a job needs next; reserves or releases its devices.

    Args:
        job: The custom resource.
        pods: Its pods.
        ledger: Of a topology, whose nodes have the names that Kubernetes gives them.
        graph_of: The graph of `spec.graph`; raises `BaechiError` where there is none.
        now: The time, for conditions.
        spelling: One of `SPELLINGS`.

    Raises:
        InputError: The resource cannot be read.
    """
    key, before = key_of(job), dict(job.get("status") or {})
    held = ledger.snapshot().jobs.get(key)
    if before.get("phase") in OVER or job["metadata"].get("deletionTimestamp"):
        running = tuple(pod["metadata"]["name"] for pod in pods if runs(pod))
        if held is not None and not running:
            ledger.release(key)
        return Plan(before, delete=running)
    state = _State(job, before, now)
    claims, step_ns = () if held is None else held.claims, None
    try:
        with reading(f"the spec of BaechiJob {job['metadata']['name']!r}"):
            wish, wanted = _wish(job["spec"].get("placement") or {}), job["spec"]["graph"]
            str(job["spec"]["image"])
            [str(row["name"]) for row in job["spec"].get("env") or ()]
        if held is None:
            try:
                graph = graph_of(wanted)
            except BaechiError as error:
                return Plan(state.at("Waiting", "NoGraph", str(error)))
            claims, step_ns = _reserved(graph, wish, key, ledger)
    except ReservationError as error:
        reason = "Waits" if error.reason == _WAITS else "NoDevice"
        return Plan(state.at("Waiting", reason, str(error)))
    except InfeasibleError as error:
        return Plan(state.at("Waiting", "DoesNotFit", str(error)))
    except BaechiError as error:
        return Plan(state.at("Failed", "Refused", str(error)))
    state.place(claims, step_ns, ledger)
    return _of_pods(job, pods, claims, state, spelling)


def _of_pods(
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    state: "_State",
    spelling: str,
) -> Plan:
    """A job that has devices: by how far its pods are."""
    statuses = {pod["metadata"]["name"]: pod.get("status") or {} for pod in pods}
    names = [f"{job['metadata']['name']}-{rank}" for rank in range(len(claims))]
    seen = [statuses.get(name, {}).get("phase", "") for name in names]
    if "Failed" in seen:
        name = names[seen.index("Failed")]
        return Plan(state.at("Failed", "PodFailed", f"pod {name} failed{_why(statuses[name])}"))
    if all(phase == "Succeeded" for phase in seen):
        return Plan(state.at("Succeeded", "Done", f"all {len(claims)} pods succeeded"))
    create = [_service(job)] if "" in seen else []
    for rank, name in enumerate(names):
        if name not in statuses:
            create.append(_pod(job, rank, claims, state.nodes, spelling))
    said = f"on {', '.join(claim.device for claim in claims)}"
    if all(phase in ("Running", "Succeeded") for phase in seen):
        return Plan(state.at("Running", "Running", said))
    for name, phase in zip(names, seen, strict=True):
        if phase == "Pending" and (why := _why(statuses[name])):
            said, reason = f"{said}; pod {name}{why}", "PodPending"
            break
    else:
        reason = "Reserved"
    return Plan(state.at("Starting", reason, said), tuple(create))


def _why(status: Mapping[str, Any]) -> str:
    """What the scheduler or the kubelet says of a pod that does not run, after a colon."""
    rows = [row for row in status.get("conditions") or () if row.get("type") == "PodScheduled"]
    said = [status, *(row for row in rows if row.get("status") == "False")]
    for container in status.get("containerStatuses") or ():
        said += (container.get("state") or {}).values()
    for row in said:
        if text := row.get("message"):
            return f": {text}"
        if code := row.get("exitCode"):
            return f": exit code {code} ({row.get('reason')})"
    return ""


def refused(plan: Plan, why: str, *, ever: bool, now: str) -> dict[str, Any]:
    """The status of a job of which the API server refuses an object: now, or for ever."""
    (row,) = plan.status["conditions"]
    row = {**row, "reason": "Refused", "message": why}
    if ever:
        row |= {"status": "False", "lastTransitionTime": now}
    return {**plan.status, **({"phase": "Failed"} if ever else {}), "conditions": [row]}


def _wish(asked: Mapping[str, Any]) -> Wish:
    return Wish(
        asked.get("same", ""),
        asked.get("slackMilli", 0),
        asked.get("shareMilli"),
        asked.get("effort", "fast"),
        Constraints(max_devices=asked.get("maxDevices")),
    )


def _reserved(
    graph: OpGraph, wish: Wish, key: str, ledger: Ledger
) -> tuple[tuple[Claim, ...], int]:
    """The claims that the ledger grants, and the predicted step."""
    now = ledger.snapshot()
    try:
        found = decide(graph, now, wish)
    except (InfeasibleError, ReservationError) as error:
        enough = _enough(graph, now, wish)
        if not enough:
            raise
        text = f"nothing that is left fits; a place is free once {' or '.join(enough)} ends."
        raise ReservationError(text, _WAITS) from error
    return ledger.reserve(key, found.claims(), version=now.version).claims, found.step_ns


def _enough(graph: OpGraph, now: Snapshot, wish: Wish) -> list[str]:
    """Jobs with the fewest devices of which each, if it ended, would leave enough."""
    jobs = sorted(now.jobs, key=lambda job: (len(now.jobs[job].claims), job))[:_ASKED]
    answer = whatif(graph, now, wish, after=jobs)
    return [row.job for row in answer.waiting if row.decision is not None]


@final
class _State:
    """The status of a job, and its conditions."""

    def __init__(self, job: Mapping[str, Any], before: dict[str, Any], now: str) -> None:
        self._before, self._now = before, now
        self._generation = job["metadata"].get("generation", 0)
        self._status = {key: before[key] for key in ("placement",) if key in before}
        self.nodes: list[str] = []

    def place(self, claims: Sequence[Claim], step_ns: int | None, ledger: Ledger) -> None:
        """Notes where the job is, and the step if it is known."""
        self.nodes = nodes_of(ledger, claims)
        placement = dict(self._status.get("placement") or {})
        placement["claims"] = CLAIMS.write(tuple(claims))
        if step_ns is not None:
            placement |= {"stepNs": step_ns, "step": format_ns(step_ns)}
        self._status["placement"] = placement

    def at(self, phase: str, reason: str, message: str) -> dict[str, Any]:
        """The status in a phase; its condition has the time since which it is true or false."""
        placed = "True" if phase in ("Starting", "Running", "Succeeded") else "False"
        condition = {"type": "Placed", "status": placed, "reason": reason, "message": message}
        rows = self._before.get("conditions") or []
        last: Mapping[str, Any] = next((row for row in rows if row.get("type") == "Placed"), {})
        same = last.get("status") == placed
        condition["lastTransitionTime"] = (
            last["lastTransitionTime"] if same and "lastTransitionTime" in last else self._now
        )
        generation = {"observedGeneration": self._generation}
        return {**self._status, **generation, "phase": phase, "conditions": [condition]}


def _owned(job: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The metadata of an object that goes when the job goes."""
    metadata = job["metadata"]
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "BaechiJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }
    return {
        "name": name,
        "namespace": metadata["namespace"],
        "labels": {JOB_LABEL: metadata["name"], UID_LABEL: metadata["uid"]},
        "ownerReferences": [owner],
    }


def _service(job: Mapping[str, Any]) -> dict[str, Any]:
    """The names under which the pods find each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, job["metadata"]["name"]),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {UID_LABEL: job["metadata"]["uid"]},
        },
    }


def _pod(
    job: Mapping[str, Any],
    rank: int,
    claims: Sequence[Claim],
    nodes: Sequence[str],
    spelling: str,
) -> dict[str, Any]:
    """The pod of a rank, with its share of its device as environment, annotations and limits."""
    spec, name, claim = job["spec"], job["metadata"]["name"], claims[rank]
    namespace = job["metadata"]["namespace"]
    uid = claim.device.partition("/")[2] or claim.device
    metadata = _owned(job, f"{name}-{rank}")
    metadata["labels"] = {**metadata["labels"], RANK_LABEL: str(rank)}
    percent = -(-claim.share_milli * 100 // WHOLE_MILLI)
    mib = str(-(-claim.memory_bytes // MIB))
    notes = {"baechi.dev/claim": json.dumps(CLAIMS.write((claim,))[0], separators=(",", ":"))}
    limits: dict[str, str] = {}
    scheduler = {}
    # By the node's name: the label kubernetes.io/hostname may be another.
    field = {"key": "metadata.name", "operator": "In", "values": [nodes[rank]]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    if spelling == "hami":
        notes["nvidia.com/use-gpuuuid"] = uid
        limits = {
            "nvidia.com/gpu": "1",
            "nvidia.com/gpumem": mib,
            "nvidia.com/gpucores": str(percent),
        }
    elif spelling == "kai":
        notes["gpu-memory"] = mib
        scheduler = {"schedulerName": "kai-scheduler"}
    elif spelling == "device-plugin":
        limits = {"nvidia.com/gpu": "1"}
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(claims),
        "LOCAL_RANK": 0,
        "MASTER_ADDR": f"{name}-0.{name}.{namespace}.svc",
        "MASTER_PORT": _PORT,
        "BAECHI_DEVICE": claim.device,
        "BAECHI_MEMORY_BYTES": claim.memory_bytes,
        "BAECHI_SHARE_MILLI": claim.share_milli,
    }
    if spelling == "none":
        values["NVIDIA_VISIBLE_DEVICES"] = uid.removeprefix("cuda:")
    given = {row["name"] for row in spec.get("env") or ()}
    container: dict[str, Any] = {
        "name": "rank",
        "image": spec["image"],
        "env": [
            *(spec.get("env") or ()),
            *({"name": key, "value": str(v)} for key, v in values.items() if key not in given),
        ],
        "resources": {"limits": limits},
    }
    container |= {key: list(spec[key]) for key in ("command", "args") if spec.get(key)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "annotations": notes},
        "spec": {
            **scheduler,
            "restartPolicy": "Never",
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
            "hostname": f"{name}-{rank}",
            "subdomain": name,
            "containers": [container],
        },
    }
