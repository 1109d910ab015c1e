"""Kueue's admission checks: whether a workload that has its quota has devices, too.

https://kueue.sigs.k8s.io/docs/concepts/admission_check. Kueue asks when it has reserved quota; the
answer is `Ready`, with the node and the claims for its pods, `Retry` while there is no room, or
`Rejected` where there is none on the empty cluster either.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from baechi.adapters.free_devices import annotation_of, nodes_of, reading, reservation_of
from baechi.adapters.scheduler_extender import CLAIMS, GRAPH, SHARE
from baechi.errors import BaechiError, InfeasibleError, InputError, ReservationError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import UNUSED, Claim, Wish
from baechi.scheduling.decision import decide
from baechi.scheduling.ledger import Ledger

CONTROLLER: Final = "baechi.dev/placement"  # spec.controllerName of the AdmissionCheck
PREFIX: Final = "workload/"


def key_of(workload: Mapping[str, Any]) -> str:
    """The name of its reservation."""
    return reservation_of(PREFIX, workload)


def review(
    workload: Mapping[str, Any],
    checks: frozenset[str],
    ledger: Ledger,
    graph_of: Callable[[str], OpGraph],
    *,
    now: str,
) -> list[dict[str, Any]] | None:
    """The workload's `status.admissionChecks` anew, or none where nothing changes.

    Reserves for a check that becomes `Ready`, and releases what a workload holds that has ended, or
    has lost its quota.

    Args:
        workload: Kueue's Workload.
        checks: The names of the AdmissionChecks of this controller.
        ledger: Of a topology, whose nodes have the names that Kubernetes gives them.
        graph_of: The graph with a digest; raises `KeyError` where it is unknown.
        now: The time, for transitions.

    Raises:
        InputError: The workload cannot be read.
    """
    key = key_of(workload)
    with reading("a Workload"):
        status = workload.get("status") or {}
        rows = [dict(row) for row in status.get("admissionChecks") or ()]
        conditions = {row["type"]: row["status"] for row in status.get("conditions") or ()}
        ours = [row for row in rows if row["name"] in checks]
    held = key in ledger.snapshot().jobs
    if conditions.get("QuotaReserved") != "True" or conditions.get("Finished") == "True":
        if held:
            ledger.release(key)
        return None
    waiting = [row for row in ours if row.get("state", "Pending") == "Pending"]
    if not waiting:
        return None
    state, message, updates = _answer(workload, key, ledger, graph_of)
    for row in waiting:
        row |= {"state": state, "message": message, "lastTransitionTime": now}
        row["podSetUpdates"] = updates
    return rows


def _answer(
    workload: Mapping[str, Any], key: str, ledger: Ledger, graph_of: Callable[[str], OpGraph]
) -> tuple[str, str, list[dict[str, Any]]]:
    """State, message and updates of the check."""
    try:
        with reading("the Workload's pod sets"):
            (pods,) = workload["spec"]["podSets"]
            notes = (pods["template"].get("metadata") or {}).get("annotations") or {}
            share_milli = int(notes[SHARE]) if SHARE in notes else None
            if int(pods.get("count", 1)) != 1:
                raise InputError(
                    f"pod set {pods['name']!r} has {pods['count']} pods, which all get one node "
                    "selector; a check places one pod. Use a BaechiJob for several."
                )
            if GRAPH not in notes:
                raise InputError(f"pod set {pods['name']!r} has no annotation {GRAPH}.")
        claims = _claims(key, ledger, graph_of, notes[GRAPH], share_milli)
    except ReservationError as error:
        return "Retry", str(error), []
    except BaechiError as error:
        return "Rejected", str(error), []
    update = {
        "name": pods["name"],
        "nodeSelector": {"kubernetes.io/hostname": nodes_of(ledger, claims)[0]},
        "annotations": {CLAIMS: annotation_of(claims)},
    }
    return "Ready", f"on {', '.join(claim.device for claim in claims)}", [update]


def _claims(
    key: str,
    ledger: Ledger,
    graph_of: Callable[[str], OpGraph],
    digest: str,
    share_milli: int | None,
) -> tuple[Claim, ...]:
    """What the workload has, or is granted now.

    Raises:
        InfeasibleError: Not even the empty cluster has room.
        ReservationError: What is left has none.
    """
    now = ledger.snapshot()
    if key in now.jobs:
        return now.jobs[key].claims
    try:
        graph = graph_of(digest)
    except KeyError:
        raise ReservationError(f"no graph has digest {digest!r} yet.", "unknown") from None
    wish = Wish(same="node", share_milli=share_milli)
    try:
        found = decide(graph, now, wish)
    except (InfeasibleError, ReservationError) as error:
        decide(graph, replace(now, uses=(UNUSED,) * len(now.uses)), wish)
        raise ReservationError(str(error)) from error
    return ledger.reserve(key, found.claims(), version=now.version).claims
