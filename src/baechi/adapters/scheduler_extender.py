"""A scheduler extender: kube-scheduler and Volcano ask which node a pod may go to, over a ledger.

https://github.com/kubernetes/design-proposals-archive/blob/main/scheduling/scheduler_extender.md,
https://github.com/volcano-sh/volcano/blob/master/docs/design/extender.md. A pod names its graph in
an annotation. Of the nodes that are asked about, one is answered: that of the decision for what is
left there, or the one where the pod already has a reservation. Asking has no effect; `bind` alone
reserves. So after a kill at any moment the same questions lead to one reservation. The answers of
one version of the ledger are kept, since a scheduler asks about a pod several times.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

from baechi.adapters.api_server import ApiError
from baechi.adapters.free_devices import (
    annotation_of,
    items_of,
    nodes_of,
    reading,
    reservation_of,
    runs,
)
from baechi.errors import BaechiError, InfeasibleError, InputError, ReservationError
from baechi.records.cluster import Constraints, Topology
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Claim, Wish
from baechi.scheduling.decision import Decision, decide
from baechi.scheduling.device_sets import Demand
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.snapshot import Snapshot
from baechi.units import format_bytes

GRAPH: Final = "baechi.dev/graph"
CLAIMS: Final = "baechi.dev/claims"
SHARE: Final = "baechi.dev/share-milli"
_PREFIX: Final = "pod/"
_HIGHEST: Final = 10  # of the scores that kube-scheduler takes
_KEPT: Final = 4096  # pods, and decisions, that are remembered
# Writes the annotations and makes the binding: namespace, name, UID, node, annotations.
Bind: TypeAlias = Callable[[str, str, str, str, Mapping[str, str]], None]


@final
class Extender:
    """Answers an extender's questions; all bodies are as Go writes and reads them.

    Args:
        ledger: Of a topology, whose nodes have the names that Kubernetes gives them.
        graph_of: The graph with a digest; raises `KeyError` where it is unknown.
        bind: Binds a pod at the API server, after its annotations; raises `ApiError` if it cannot.
        effort: As `Wish` takes it.

    Raises:
        InputError: The ledger's devices have no nodes.
    """

    def __init__(
        self,
        ledger: Ledger,
        graph_of: Callable[[str], OpGraph],
        bind: Bind,
        *,
        effort: str = "fast",
    ) -> None:
        base = ledger.site.base
        if not isinstance(base, Topology):
            raise InputError("the ledger is of a cluster without nodes; give it a Topology.")
        self._ledger, self._graph_of, self._bind, self._effort = ledger, graph_of, bind, effort
        self._devices_of: dict[str, list[int]] = {}
        for place, node in enumerate(base.nodes):
            self._devices_of.setdefault(node, []).append(place)
        self._pods: OrderedDict[str, tuple[str, int | None]] = OrderedDict()
        self._decided: OrderedDict[Any, Decision | str] = OrderedDict()

    def filter(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The node that the pod may go to, and why not to the others."""
        listed: list[Any] | None = None
        try:
            listed, names = _nodes(asked)
            chosen, reasons = self._answer(_pod(asked), names)
        except BaechiError as error:
            return _filtered([], listed, {}, {}, str(error))
        unknown = {name: why for name, why in reasons.items() if name not in self._devices_of}
        failed = {name: why for name, why in reasons.items() if name in self._devices_of}
        return _filtered([chosen] if chosen else [], listed, failed, unknown)

    def prioritize(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The score of every node: the highest for the one of the decision, else 0.

        Raises:
            InputError: The arguments cannot be read, or the pod's graph is unknown.
        """
        _, names = _nodes(asked)
        chosen, _ = self._answer(_pod(asked), names)
        return [{"Host": name, "Score": _HIGHEST * (name == chosen)} for name in names]

    def bind(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Reserves on the node, and binds the pod there; what it reserved goes if that is refused.

        Without an answer the pod may be bound: then it goes with the pod, or to another node.
        """
        try:
            with reading("the binding"):
                fields = ("podNamespace", "podName", "podUID", "node")
                namespace, name, uid, node = (str(_field(asked, field)) for field in fields)
            metadata = {"namespace": namespace, "name": name, "uid": uid}
            job = reservation_of(_PREFIX, {"metadata": metadata})
            if uid not in self._pods:
                raise InputError(f"pod {name!r} was not filtered here since the start; try again.")
            digest, _ = self._pods[uid]
            before = self._ledger.snapshot().jobs.get(job)
            claims = self._reserved(job, uid, node)
            try:
                self._bind(
                    namespace, name, uid, node, {GRAPH: digest, CLAIMS: annotation_of(claims)}
                )
            except ApiError as error:
                if error.refused and (before is None or before.claims != claims):
                    self._ledger.release(job)
                    if before is not None:  # where it may be bound
                        self._ledger.reserve(job, before.claims)
                return {"Error": f"{node}: the pod was not bound: {error}"}
        except BaechiError as error:
            return {"Error": str(error)}
        return {"Error": ""}

    def predicate(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Volcano's question about one node and one task.

        Raises:
            InputError: The arguments cannot be read, or the task's graph is unknown.
        """
        with reading("Volcano's task and node"):
            node = str(_field(_field(asked, "node"), "name"))
            pod = _field(_field(asked, "task"), "pod")
        _, reasons = self._answer(pod, [node])
        return {"errorMessage": reasons.get(node, "")}

    def score(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Volcano's question about several nodes and one task.

        Raises:
            InputError: The arguments cannot be read, or the task's graph is unknown.
        """
        with reading("Volcano's task and nodes"):
            names = [str(_field(node, "name")) for node in _field(asked, "nodes")]
            pod = _field(_field(asked, "task"), "pod")
        rows = self.prioritize({"pod": pod, "nodeNames": names})
        return {"nodeScore": {row["Host"]: row["Score"] for row in rows}, "errorMessage": ""}

    def version(self) -> int:
        """The version of the ledger."""
        return self._ledger.snapshot().version

    def reconcile(self, pods: Any, version: int) -> None:
        """Makes the ledger as the pods are: what ended releases, what is bound reserves.

        A pod without a reservation was bound by somebody else, such as Volcano. Where there is no
        room for it, nothing is reserved, and neither where its claims are held for it already, as
        for the workload of Kueue's check.

        Args:
            pods: All pods, as the API server lists them.
            version: Of the ledger before they were listed: what was reserved since is for pods that
                may not be in the list.

        Raises:
            InputError: The list cannot be read.
        """
        alive: dict[str, tuple[dict[str, Any], str]] = {}
        with reading("the list of pods"):
            for row in items_of(pods, "Pod"):
                if runs(row):
                    node = (row.get("spec") or {}).get("nodeName") or ""
                    alive[reservation_of(_PREFIX, row)] = row, node
        held = self._ledger.snapshot().jobs
        for job in sorted(held):
            if job.startswith(_PREFIX) and job not in alive and held[job].version <= version:
                self._ledger.release(job)
        claimed = {annotation_of(row.claims) for row in held.values()}
        for job, (row, node) in sorted(alive.items()):
            notes = row["metadata"].get("annotations") or {}
            there = (
                self._node_of(held[job].claims) == node
                if job in held
                else notes.get(CLAIMS) in claimed
            )
            if GRAPH in notes and node in self._devices_of and not there:
                with suppress(BaechiError):
                    self._answer(row, [node])  # which remembers what it wants
                    self._reserved(job, row["metadata"]["uid"], node)

    def _answer(self, pod: Mapping[str, Any], names: Sequence[str]) -> tuple[str, dict[str, str]]:
        """The node for a pod, if there is one, and why the others are not."""
        with reading("the pod"):
            metadata = _field(pod, "metadata")
            annotations = metadata.get("annotations") or {}
            share_milli = int(annotations[SHARE]) if SHARE in annotations else None
            name, uid, job = (
                str(metadata["name"]),
                str(metadata["uid"]),
                reservation_of(_PREFIX, pod),
            )
            if GRAPH not in annotations:
                raise InputError(f"pod {name!r} has no annotation {GRAPH}.")
            digest = str(annotations[GRAPH])
        _remember(self._pods, uid, (digest, share_milli))
        now = self._ledger.snapshot()
        held = now.jobs.get(job)
        if held is not None and (chosen := self._node_of(held.claims)) in names:
            return chosen, {
                name: f"the pod is reserved on {chosen}" for name in names if name != chosen
            }
        found = self._decision(now, digest, share_milli, names)
        chosen = "" if isinstance(found, str) else self._node_of(found.claims())
        why = found if isinstance(found, str) else f"a step is shorter on {chosen}"
        needed = Demand.of(self._graph(digest)).total_bytes
        return chosen, {
            name: self._reason(now, name, needed) or why for name in names if name != chosen
        }

    def _reason(self, now: Snapshot, node: str, needed: int) -> str:
        """Why a node can have no pod of so many bytes, if it cannot."""
        places = self._devices_of.get(node, ())
        left = sum(now.site.free_bytes(now.uses, place) for place in places)
        if not places:
            return "none of its devices is in Baechi's ledger"
        return f"residual memory {format_bytes(left)} < {format_bytes(needed)}" * (left < needed)

    def _reserved(self, job: str, uid: str, node: str) -> tuple[Claim, ...]:
        """The claims that the job has on the node, reserved now unless it had them before."""
        digest, share_milli = self._pods[uid]
        for last in (False, True):
            now = self._ledger.snapshot()
            held = now.jobs.get(job)
            if held is not None and self._node_of(held.claims) == node:
                return held.claims
            if held is not None:
                self._ledger.release(job)
                now = self._ledger.snapshot()
            found = self._decision(now, digest, share_milli, [node])
            if isinstance(found, str):
                raise ReservationError(f"{node}: {found}")
            try:
                return self._ledger.reserve(job, found.claims(), version=found.version).claims
            except ReservationError as error:
                if last or error.reason != "stale":  # others were faster
                    raise
        raise AssertionError("unreachable")

    def _decision(
        self, now: Snapshot, digest: str, share_milli: int | None, names: Sequence[str]
    ) -> Decision | str:
        """The decision on these nodes, or the reason why there is none."""
        places = {place for name in names for place in self._devices_of.get(name, ())}
        key = (now.version, digest, share_milli, frozenset(places))
        if key not in self._decided:
            devices = now.site.base.devices
            others = tuple(row.name for place, row in enumerate(devices) if place not in places)
            limits = Constraints(excluded=others)
            wish = Wish("node", 0, share_milli, self._effort, limits)
            try:
                found: Decision | str = decide(self._graph(digest), now, wish)
            except (InfeasibleError, ReservationError) as error:
                found = str(error)
            _remember(self._decided, key, found)
        return self._decided[key]

    def _graph(self, digest: str) -> OpGraph:
        try:
            return self._graph_of(digest)
        except KeyError:
            raise InputError(f"no graph has digest {digest!r}; upload it first.") from None

    def _node_of(self, claims: Sequence[Claim]) -> str:
        return nodes_of(self._ledger, claims)[0]


def _field(row: Mapping[str, Any], name: str) -> Any:
    """A field by its name, whatever its case: Go reads them so, and writers differ."""
    for key, value in row.items():
        if key.lower() == name.lower():
            return value
    raise KeyError(name)


def _pod(asked: Mapping[str, Any]) -> Any:
    with reading("the extender's arguments"):
        return _field(asked, "pod")


def _nodes(asked: Mapping[str, Any]) -> tuple[list[Any] | None, list[str]]:
    """The nodes that are asked about: whole if the extender may not cache them, and their names."""
    with reading("the extender's arguments"):
        fields = {key.lower(): value for key, value in asked.items()}
        if fields.get("nodenames") is not None:
            return None, [str(name) for name in fields["nodenames"]]
        nodes = list(_field(fields["nodes"], "items"))
        return nodes, [str(node["metadata"]["name"]) for node in nodes]


def _filtered(
    chosen: list[str],
    listed: list[Any] | None,
    failed: dict[str, str],
    never: dict[str, str],
    error: str = "",
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "FailedNodes": failed,
        "FailedAndUnresolvableNodes": never,
        "Error": error,
    }
    if listed is None:
        return {"NodeNames": chosen, **answer}
    items = [node for node in listed if node["metadata"]["name"] in chosen]
    return {"Nodes": {"items": items}, **answer}


def _remember(rows: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    rows[key] = value
    rows.move_to_end(key)
    while len(rows) > _KEPT:
        rows.popitem(last=False)
