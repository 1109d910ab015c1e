"""The operator: BaechiJobs from their making to their end, and Kueue's admission checks."""

import json
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from api_server import KilledError, Objects
from seeds import seeds

import baechi
from baechi import InputError, Link, Op, OpGraph, Tensor, Topology
from baechi.adapters.api_server import ApiServer
from baechi.adapters.baechi_job import SPELLINGS, UID_LABEL, key_of
from baechi.adapters.job_operator import Operator
from baechi.adapters.kueue import CONTROLLER
from baechi.adapters.scheduler_extender import CLAIMS, GRAPH
from baechi.records.cluster import Device
from baechi.scheduling import Claim, Ledger
from baechi.storage import sqlite_file
from baechi.storage.serialization import dumps

GIB = 2**30
LINK = Link(5_000, 300 * 10**9)
SITE = Topology.grid(1, 2, 2, "16GiB", node_link=LINK, switch_link=LINK)
DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"


def chain(n: int, gib: int = 10) -> OpGraph:
    ops = tuple(Op(f"layer{i}", 10**6, persistent_bytes=gib * GIB) for i in range(n))
    return OpGraph(ops, tuple(Tensor(i, (i + 1,), 2**20) for i in range(n - 1)))


SMALL, LARGE, HUGE = chain(1), chain(3), chain(9)
GRAPHS = {graph.digest: graph for graph in (SMALL, LARGE, HUGE)}


@pytest.fixture(scope="module")
def account(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("account")
    (folder / "token").write_text("secret")
    return folder


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(SITE)


@pytest.fixture
def operator(objects: Objects, ledger: Ledger, account: Path) -> Operator:
    return operator_of(objects, ledger, account)


def operator_of(objects: Objects, ledger: Ledger, account: Path, **options: Any) -> Operator:
    api = ApiServer("http://api", account, transport=httpx.MockTransport(objects))
    return Operator(api, ledger, GRAPHS.__getitem__, clock=lambda: 1_800_000_000, **options)


def job(name: str, graph: OpGraph = LARGE, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "baechi.dev/v1alpha1",
        "kind": "BaechiJob",
        "metadata": {"name": name, "namespace": "team", "generation": 1},
        "spec": {"graph": {"digest": graph.digest}, "image": "train:1", **spec},
    }


def phases(objects: Objects) -> dict[str, str]:
    return {row["metadata"]["name"]: row["status"]["phase"] for row in objects.of("baechijobs")}


def condition(objects: Objects, name: str, namespace: str = "team") -> Any:
    return objects.rows["baechijobs", namespace, name]["status"]["conditions"][0]


def node_of(pod: Any) -> str:
    """The name of the node that a pod must go to."""
    rule = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = rule["nodeSelectorTerms"]
    (field,) = term["matchFields"]
    assert (field["key"], field["operator"]) == ("metadata.name", "In")
    (name,) = field["values"]
    return name


def play(objects: Objects, phase: str, *names: str) -> None:
    """What the kubelets do: these pods, or all, are in a phase."""
    for pod in objects.of("pods"):
        if not names or pod["metadata"]["name"] in names:
            pod["status"] = {"phase": phase}


def test_a_job_has_a_pod_on_each_of_its_devices_until_it_ends(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("baechijobs", job("a", command=["python3"], env=[{"name": "RANK", "value": "x"}]))
    operator.turn()
    assert phases(objects) == {"a": "Starting"}
    (held,) = ledger.snapshot().jobs.values()
    first, *others = objects.of("pods")
    assert [row["metadata"]["name"] for row in (first, *others)] == ["a-0", "a-1", "a-2"]
    spec = first["spec"]
    assert node_of(first) == held.claims[0].device.split("/")[0]
    values = {row["name"]: row["value"] for row in spec["containers"][0]["env"]}
    assert values["RANK"] == "x"  # the user's own
    assert values["WORLD_SIZE"] == "3"
    assert values["MASTER_ADDR"] == "a-0.a.team.svc"
    assert values["BAECHI_DEVICE"] == held.claims[0].device
    assert int(values["BAECHI_MEMORY_BYTES"]) == held.claims[0].memory_bytes
    assert first["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    (service,) = objects.of("services")
    assert service["spec"]["selector"] == {UID_LABEL: "uid-1"}
    assert (spec["hostname"], spec["subdomain"]) == ("a-0", service["metadata"]["name"])
    play(objects, "Running")
    operator.turn()
    assert phases(objects) == {"a": "Running"}
    status = objects.rows["baechijobs", "team", "a"]["status"]
    assert status["placement"]["stepNs"] > 0
    assert status["observedGeneration"] == 1
    play(objects, "Succeeded")
    operator.turn()
    assert phases(objects) == {"a": "Succeeded"}
    operator.turn()
    assert not ledger.snapshot().jobs
    events = [(row["reason"], row["type"]) for row in objects.rows.values() if "reason" in row]
    assert events == [("Reserved", "Normal"), ("Running", "Normal"), ("Done", "Normal")]
    number = len(objects.asked)
    operator.turn()  # what has ended is left alone
    assert not any(row.startswith(("POST", "PATCH")) for row in objects.asked[number:])


def test_a_job_that_waits_says_for_what_and_starts_when_that_ends(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("baechijobs", job("a"))
    objects.add("baechijobs", job("b"))
    operator.turn()
    assert phases(objects) == {"a": "Starting", "b": "Waiting"}
    said = condition(objects, "b")
    assert said["reason"] == "Waits"
    assert "a place is free once baechijob/team/a/uid-1 ends" in said["message"]
    before = said["lastTransitionTime"]
    play(objects, "Succeeded")
    operator.turn()
    assert phases(objects) == {"a": "Succeeded", "b": "Waiting"}  # the end is written first
    operator.turn()
    assert phases(objects) == {"a": "Succeeded", "b": "Starting"}
    assert condition(objects, "b")["lastTransitionTime"] == before  # the clock stands still
    objects.add("baechijobs", job("huge", HUGE))
    operator.turn()
    assert condition(objects, "huge")["reason"] == "DoesNotFit"
    assert "Give" in condition(objects, "huge")["message"]
    assert list(ledger.snapshot().jobs) == [key_of(objects.rows["baechijobs", "team", "b"])]


def test_who_finds_every_device_taken_is_told_whose_end_is_enough(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    full = chain(4)
    GRAPHS[full.digest] = full
    objects.add("baechijobs", job("a", full))
    operator.turn()
    assert len(ledger.snapshot().jobs[key_of(objects.of("baechijobs")[0])].claims) == 4
    objects.add("baechijobs", job("b", SMALL))
    operator.turn()
    said = condition(objects, "b")
    assert (said["reason"], said["status"]) == ("Waits", "False")
    assert "a place is free once baechijob/team/a/uid-1 ends" in said["message"]


def test_a_pod_goes_to_the_node_of_its_mig_instance(objects: Objects, account: Path) -> None:
    gpus = tuple(Device(f"n/gpu{n}", 80 * GIB, 1.0, "A100-SXM-80GB") for n in range(2))
    site = Topology(gpus, ("n",) * 2, ("switch",) * 2, LINK, None, None)
    objects.add("baechijobs", job("a", SMALL, placement={"shareMilli": 400}))
    operator_of(objects, Ledger(site, sharing="mig"), account).turn()
    (pod,) = objects.of("pods")
    assert node_of(pod) == "n"
    assert "@" in condition(objects, "a")["message"]  # an instance, not the GPU


def test_a_pod_that_fails_ends_its_job(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("baechijobs", job("a"))
    operator.turn()
    play(objects, "Running")
    play(objects, "Failed", "a-1")
    ended = {"name": "rank", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
    objects.rows["pods", "team", "a-1"]["status"]["containerStatuses"] = [ended]
    operator.turn()
    assert phases(objects) == {"a": "Failed"}
    assert condition(objects, "a")["message"] == "pod a-1 failed: exit code 3 (Error)"
    assert ledger.snapshot().jobs  # the others run on it still
    operator.turn()
    operator.turn()
    assert [row["metadata"]["name"] for row in objects.of("pods")] == ["a-1"]
    assert not ledger.snapshot().jobs
    assert objects.of("events")[-1]["type"] == "Warning"


def test_a_job_that_is_deleted_releases(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    row = objects.add("baechijobs", job("a"))
    operator.turn()
    del objects.rows["baechijobs", "team", "a"]
    operator.turn()
    assert ledger.snapshot().jobs  # its pods run still
    for name in ("a-0", "a-1", "a-2"):
        del objects.rows["pods", "team", name]
    operator.turn()
    assert not ledger.snapshot().jobs
    objects.add("baechijobs", {**row, "metadata": {**row["metadata"], "uid": "another"}})
    operator.turn()
    assert list(ledger.snapshot().jobs) == ["baechijob/team/a/another"]
    objects.rows["baechijobs", "team", "a"]["metadata"]["deletionTimestamp"] = "now"
    operator.turn()
    operator.turn()
    assert not ledger.snapshot().jobs


def test_pods_that_outlive_their_job_keep_its_devices(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    """`kubectl delete --cascade=orphan` takes the owner's reference from them."""
    objects.add("baechijobs", job("a"))
    operator.turn()
    play(objects, "Running")
    del objects.rows["baechijobs", "team", "a"]
    for pod in objects.of("pods"):
        del pod["metadata"]["ownerReferences"]
    operator.turn()
    assert ledger.snapshot().jobs
    play(objects, "Succeeded")
    operator.turn()
    assert not ledger.snapshot().jobs


def test_while_the_api_server_does_not_know_jobs_nothing_is_released(
    objects: Objects, ledger: Ledger, account: Path
) -> None:
    """It says 404 of a custom resource while it starts."""
    objects.add("baechijobs", job("a", SMALL))
    with pytest.raises(OSError, match="quota"):
        Operator(refusing(objects, account, 403, ""), ledger, GRAPHS.__getitem__).turn()
    assert ledger.snapshot().jobs

    def starting(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("baechijobs"):
            return httpx.Response(404, text="404 page not found")
        return objects(request)

    api = ApiServer("http://api", account, transport=httpx.MockTransport(starting))
    Operator(api, ledger, GRAPHS.__getitem__).turn()
    assert ledger.snapshot().jobs


@pytest.mark.parametrize(("plural", "name"), [("pods", "a-1"), ("services", "a")])
def test_what_is_another_s_is_not_taken_for_the_job_s(
    objects: Objects, operator: Operator, plural: str, name: str
) -> None:
    objects.add(plural, {"metadata": {"name": name, "namespace": "team"}})
    objects.add("baechijobs", job("a"))
    operator.turn()
    said = condition(objects, "a")
    assert said["reason"] == "Refused"
    assert f"{name!r} already, which is not the job's" in said["message"]
    del objects.rows[plural, "team", name]
    operator.turn()
    assert condition(objects, "a")["reason"] == "Reserved"
    assert len(objects.of("pods")) == 3
    assert objects.rows["services", "team", "a"]["metadata"]["labels"][UID_LABEL]


@pytest.mark.parametrize(
    ("status", "said"),
    [  # of a kube-scheduler and a kubelet
        (
            """{"phase": "Pending", "conditions": [{"lastProbeTime": null, "status": "False",
            "message": "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity, \
1 node(s) were unschedulable.",
            "reason": "Unschedulable", "type": "PodScheduled"}]}""",
            "; pod a-0: 0/2 nodes are available: 1 node(s) didn't match Pod's node affinity, "
            "1 node(s) were unschedulable.",
        ),
        (
            """{"phase": "Pending", "conditions": [{"lastProbeTime": null, "status": "False",
            "message": "containers with unready status: [rank]", "reason": "ContainersNotReady",
            "type": "Ready"}, {"lastProbeTime": null, "status": "True", "type": "PodScheduled"}],
            "containerStatuses": [{"image": "none:1", "lastState": {}, "name": "rank",
            "state": {"waiting": {"message": "Back-off pulling image \\"none:1\\"",
            "reason": "ImagePullBackOff"}}}]}""",
            '; pod a-0: Back-off pulling image "none:1"',
        ),
    ],
    ids=["not scheduled", "no image"],
)
def test_why_a_pod_does_not_start_is_told(
    objects: Objects, operator: Operator, status: str, said: str
) -> None:
    objects.add("baechijobs", job("a", SMALL))
    operator.turn()
    objects.rows["pods", "team", "a-0"]["status"] = json.loads(status)
    operator.turn()
    assert phases(objects) == {"a": "Starting"}
    assert condition(objects, "a")["reason"] == "PodPending"
    assert condition(objects, "a")["message"].endswith(said)


def test_a_graph_may_come_late_in_a_config_map(objects: Objects, operator: Operator) -> None:
    row = job("a")
    row["spec"]["graph"] = {"configMap": {"name": "graphs"}}
    objects.add("baechijobs", row)
    operator.turn()
    assert condition(objects, "a")["reason"] == "NoGraph"
    text = dumps(LARGE)
    config = {"metadata": {"name": "graphs", "namespace": "team"}, "data": {"graph.json": text}}
    objects.add("configmaps", config)
    operator.turn()
    assert phases(objects) == {"a": "Starting"}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"placement": {"same": "rack"}}, "same is 'rack'"),
        ({"placement": {"maxDevices": -1}}, "max_devices"),
        ({"placement": {"effort": "much"}}, "effort"),
        ({"placement": [1]}, "cannot be read"),
        ({"env": [{"value": "1"}]}, "field 'name' is absent"),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_others_go_on(
    objects: Objects, operator: Operator, spec: Any, said: str
) -> None:
    objects.add("baechijobs", job("a", **spec))
    objects.add("baechijobs", job("b"))
    operator.turn()
    assert phases(objects) == {"a": "Failed", "b": "Starting"}
    assert said in condition(objects, "a")["message"]


def test_a_pod_says_its_part_as_others_spell_it(
    objects: Objects, ledger: Ledger, account: Path
) -> None:
    found = {}
    for spelling in SPELLINGS:
        objects.rows.clear()
        row = objects.add("baechijobs", job("a", SMALL, placement={"shareMilli": 250}))
        operator_of(objects, ledger, account, spelling=spelling).turn()
        (pod,) = objects.of("pods")
        (container,) = pod["spec"]["containers"]
        notes = pod["metadata"]["annotations"]
        found[spelling] = notes, container["resources"]["limits"], pod["spec"]
        ledger.release(key_of(row))
    notes, limits, _ = found["hami"]
    assert notes["nvidia.com/use-gpuuuid"] == "0"
    assert limits == {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": "10240",
        "nvidia.com/gpucores": "25",
    }
    notes, _, spec = found["kai"]
    assert (notes["gpu-memory"], spec["schedulerName"]) == ("10240", "kai-scheduler")
    assert found["device-plugin"][1] == {"nvidia.com/gpu": "1"}
    with pytest.raises(InputError, match="spelling"):
        operator_of(objects, ledger, account, spelling="mps")


@pytest.mark.parametrize("seed", seeds(30))
def test_whatever_kills_the_operator_no_device_is_held_twice_and_none_leaks(
    account: Path, seed: int
) -> None:
    """Forty kills a seed, before or after any request of any turn."""
    draw = random.Random(seed)
    objects, ledger = Objects(), Ledger(SITE)
    kills = made = 0
    while kills < 40:
        if draw.random() < 0.3:
            made += 1
            objects.add("baechijobs", job(f"j{made}", draw.choice((SMALL, LARGE))))
        for pod in objects.of("pods"):
            at = (pod.get("status") or {}).get("phase", "Pending")
            after = {"Pending": ["Running"], "Running": ["Running", "Succeeded", "Failed"]}
            pod["status"] = {"phase": draw.choice(after.get(at, [at]))}
        if draw.random() < 0.1 and objects.of("baechijobs"):
            gone = draw.choice(objects.of("baechijobs"))["metadata"]
            del objects.rows["baechijobs", "team", gone["name"]]
            for plural in ("pods", "services"):  # the garbage collector
                for row in objects.of(plural):
                    if row["metadata"]["ownerReferences"][0]["uid"] == gone["uid"]:
                        del objects.rows[plural, "team", row["metadata"]["name"]]
        objects.kill_at = (len(objects.asked) + draw.randint(1, 6), draw.random() < 0.5)
        try:
            operator_of(objects, ledger, account).turn()
        except KilledError:
            kills += 1
        held = ledger.snapshot().jobs
        taken = [claim.device for row in held.values() for claim in row.claims]
        for pod in objects.of("pods"):
            if (pod.get("status") or {}).get("phase", "Pending") in ("Pending", "Running"):
                owner = pod["metadata"]["ownerReferences"][0]
                assert f"baechijob/team/{owner['name']}/{owner['uid']}" in held
        assert len(taken) == len(set(taken))  # each claims all that is left of a device
    objects.kill_at = None
    for _ in range(3 * made + 3):  # undisturbed, all end
        operator_of(objects, ledger, account).turn()
        for pod in objects.of("pods"):
            if (pod.get("status") or {}).get("phase") != "Failed":
                pod["status"] = {"phase": "Succeeded"}
    assert set(phases(objects).values()) <= {"Succeeded", "Failed"}
    assert all(use == (0, 0, 0) for use in ledger.snapshot().uses)


def test_an_api_server_that_is_away_is_asked_again(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("baechijobs", job("a"))
    objects.away = True
    stop, said = threading.Event(), []

    def report(text: str) -> None:
        said.append(text)
        objects.away = False
        objects.add("baechijobs", job("b", SMALL))

    thread = threading.Thread(target=operator.run, args=(0.001, stop, report))
    thread.start()
    while not ledger.snapshot().jobs:
        pass
    stop.set()
    thread.join()
    assert len(said) == 1
    assert "refused" in said[0]


def refusing(objects: Objects, account: Path, status: int, path: str) -> ApiServer:
    """An API server that refuses to make objects of job `a` at such a path."""

    def answer(request: httpx.Request) -> httpx.Response:
        made = request.method == "POST" and request.url.path.endswith(path)
        if made and b'"a-' in request.content:
            return httpx.Response(status, text="exceeded quota")
        return objects(request)

    return ApiServer("http://api", account, transport=httpx.MockTransport(answer))


def test_what_is_refused_of_one_job_is_told_and_keeps_no_other_waiting(
    objects: Objects, ledger: Ledger, account: Path
) -> None:
    for name in "ab":
        objects.add("baechijobs", job(name, SMALL))
    objects.add("admissionchecks", admission())
    objects.add("workloads", workload("w"))
    strict = Operator(refusing(objects, account, 403, "/pods"), ledger, GRAPHS.__getitem__)
    strict.turn()
    strict.turn()
    assert phases(objects) == {"a": "Starting", "b": "Starting"}
    said = condition(objects, "a")
    assert (said["reason"], said["status"]) == ("Refused", "True")
    assert "exceeded quota" in said["message"]
    assert states(objects) == {"w": ("Ready", "Pending")}
    assert [row["metadata"]["name"] for row in objects.of("pods")] == ["b-0"]
    assert len([row for row in objects.of("events") if row["reason"] == "Refused"]) == 1
    objects.add("baechijobs", job("c", SMALL))
    silent = Operator(refusing(objects, account, 403, "/events"), ledger, GRAPHS.__getitem__)
    with pytest.raises(OSError, match="exceeded quota"):  # once all have had their turn
        silent.turn()
    assert condition(objects, "a")["reason"] == "Reserved"
    assert [row["metadata"]["name"] for row in objects.of("pods")] == ["a-0", "b-0", "c-0"]


@pytest.mark.parametrize("status", [400, 422])
def test_a_job_whose_objects_are_invalid_fails_and_releases(
    objects: Objects, ledger: Ledger, account: Path, status: int
) -> None:
    objects.add("baechijobs", job("a"))
    strict = Operator(refusing(objects, account, status, "/pods"), ledger, GRAPHS.__getitem__)
    strict.turn()
    assert (phases(objects), condition(objects, "a")["status"]) == ({"a": "Failed"}, "False")
    strict.turn()
    assert not ledger.snapshot().jobs


def test_a_ledger_that_another_process_holds_is_asked_again(
    objects: Objects, account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.01)
    ledger = Ledger(SITE, tmp_path / "ledger.sqlite")
    ledger.reserve("baechijob/team/gone/uid", [Claim("node0/0", "1GiB", 1)])
    stop, said = threading.Event(), []
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")

        def report(text: str) -> None:
            said.append(text)
            other.rollback()

        thread = threading.Thread(
            target=operator_of(objects, ledger, account).run, args=(0.001, stop, report)
        )
        thread.start()
        while ledger.snapshot().jobs and thread.is_alive():
            pass
        stop.set()
        thread.join()
    assert "held by another process" in said[0]
    assert not ledger.snapshot().jobs


def workload(name: str, graph: OpGraph | None = SMALL, count: int = 1, **status: str) -> Any:
    notes = {GRAPH: graph.digest} if graph is not None else {}
    template = {"metadata": {"annotations": notes}, "spec": {}}
    conditions = {"QuotaReserved": "True", **status}
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"podSets": [{"name": "main", "count": count, "template": template}]},
        "status": {
            "conditions": [{"type": key, "status": value} for key, value in conditions.items()],
            "admissionChecks": [
                {"name": "baechi", "state": "Pending", "message": ""},
                {"name": "other", "state": "Pending", "message": "theirs"},
            ],
        },
    }


def admission(name: str = "baechi", controller: str = CONTROLLER) -> Any:
    return {"metadata": {"name": name}, "spec": {"controllerName": controller}}


def states(objects: Objects) -> dict[str, tuple[str, str]]:
    return {
        row["metadata"]["name"]: tuple(check["state"] for check in row["status"]["admissionChecks"])
        for row in objects.of("workloads")
    }


def test_kueue_hears_ready_with_a_node_retry_or_rejected(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("admissionchecks", admission())
    objects.add("admissionchecks", admission("other", "somebody's"))
    for place in range(4):
        taken = "12GiB" if place else "1GiB"
        ledger.reserve(f"old{place}", [Claim(SITE.devices[place].name, taken, 1)])
    objects.add("workloads", workload("a"))
    objects.add("workloads", workload("b"))
    objects.add("workloads", workload("c", HUGE))
    objects.add("workloads", workload("d", count=2))
    objects.add("workloads", workload("e", None))
    objects.add("workloads", workload("f", QuotaReserved="False"))
    operator.turn()
    checks = {row["metadata"]["name"]: row.get("status") for row in objects.of("admissionchecks")}
    assert checks["baechi"]["conditions"][0]["type"] == "Active"
    assert checks["other"] is None
    assert states(objects) == {
        "a": ("Ready", "Pending"),
        "b": ("Retry", "Pending"),
        "c": ("Rejected", "Pending"),
        "d": ("Rejected", "Pending"),
        "e": ("Rejected", "Pending"),
        "f": ("Pending", "Pending"),
    }
    first = objects.rows["workloads", "team", "a"]["status"]["admissionChecks"][0]
    (update,) = first["podSetUpdates"]
    assert update["nodeSelector"] == {"kubernetes.io/hostname": "node0"}
    assert "node0/0" in update["annotations"][CLAIMS]
    version = ledger.snapshot().version
    operator.turn()
    assert ledger.snapshot().version == version


def test_what_a_workload_has_goes_when_it_ends_loses_its_quota_or_is_gone(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("admissionchecks", admission())
    for name in "abc":
        objects.add("workloads", workload(name))
    operator.turn()
    assert len(ledger.snapshot().jobs) == 3
    for name, kind, value in (("a", "Finished", "True"), ("b", "QuotaReserved", "False")):
        conditions = objects.rows["workloads", "team", name]["status"]["conditions"]
        conditions[:] = [{"type": kind, "status": value}]
    del objects.rows["workloads", "team", "c"]
    objects.rows.pop(("admissionchecks", "", "baechi"))  # nor does it matter that nobody asks more
    operator.turn()
    assert not ledger.snapshot().jobs


def test_what_fits_nowhere_is_rejected_while_every_device_is_taken(
    objects: Objects, ledger: Ledger, operator: Operator
) -> None:
    objects.add("admissionchecks", admission())
    for place, device in enumerate(SITE.devices):
        ledger.reserve(f"old{place}", [Claim(device.name, "16GiB")])
    for name, graph in (("a", SMALL), ("b", HUGE)):
        objects.add("workloads", workload(name, graph))
    operator.turn()
    assert states(objects) == {"a": ("Retry", "Pending"), "b": ("Rejected", "Pending")}


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_kueue_is_answered_in_the_version_that_it_has(
    objects: Objects, ledger: Ledger, account: Path, version: str
) -> None:
    objects.add("admissionchecks", admission())
    objects.add("workloads", workload("a"))

    def kueue(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if "kueue" in path and f"/{version}/" not in path:
            return httpx.Response(404, text="404 page not found")
        return objects(request)

    api = ApiServer("http://api", account, transport=httpx.MockTransport(kueue))
    Operator(api, ledger, GRAPHS.__getitem__).turn()
    assert states(objects) == {"a": ("Ready", "Pending")}
    (check,) = objects.of("admissionchecks")
    assert check["status"]["conditions"][0]["type"] == "Active"


def test_an_answer_to_an_older_version_changes_nothing(
    objects: Objects, ledger: Ledger, account: Path
) -> None:
    """Kueue has changed the workload since it was listed: the next turn answers anew."""
    objects.add("admissionchecks", admission())
    row = objects.add("workloads", workload("a"))

    def stale(request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH" and "workloads" in request.url.path:
            row["metadata"]["resourceVersion"] = "later"
        return objects(request)

    api = ApiServer("http://api", account, transport=httpx.MockTransport(stale))
    Operator(api, ledger, GRAPHS.__getitem__).turn()
    assert states(objects) == {"a": ("Pending", "Pending")}
    operator_of(objects, ledger, account).turn()
    assert states(objects) == {"a": ("Ready", "Pending")}
    assert len(ledger.snapshot().jobs) == 1


def test_the_manifests_fit_what_the_operator_does(objects: Objects, operator: Operator) -> None:
    """The example runs, its fields are the resource's, and every request is granted by the role."""
    example = yaml.safe_load((DEPLOY / "example-job.yaml").read_text())
    (resource,) = yaml.safe_load_all((DEPLOY / "baechijob.yaml").read_text())
    (version,) = resource["spec"]["versions"]
    assert example["apiVersion"] == f"{resource['spec']['group']}/{version['name']}"
    known = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert set(example["spec"]) <= set(known)
    assert set(example["spec"]["placement"]) <= set(known["placement"]["properties"])
    objects.add("baechijobs", example)
    data = {"graph.json": dumps(LARGE)}
    config = {"metadata": {"name": "gpt2-graph", "namespace": "default"}, "data": data}
    objects.add("configmaps", config)
    check, flavor, queue = yaml.safe_load_all((DEPLOY / "kueue.yaml").read_text())
    assert check["spec"]["controllerName"] == CONTROLLER
    (asked,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert asked["name"] == check["metadata"]["name"]
    (group,) = queue["spec"]["resourceGroups"]
    assert [row["name"] for row in group["flavors"]] == [flavor["metadata"]["name"]]
    objects.add("admissionchecks", check)
    objects.add("workloads", workload("a"))
    for plural, name in (("services", "gpt2"), ("pods", "gpt2-0")):  # somebody else's
        objects.add(plural, {"metadata": {"name": name, "namespace": "default"}})
        operator.turn()
        assert condition(objects, "gpt2", "default")["reason"] == "Refused"
        del objects.rows[plural, "default", name]
    operator.turn()
    assert phases(objects) == {"gpt2": "Starting"}
    play(objects, "Running")
    play(objects, "Failed", "gpt2-0")
    operator.turn()
    operator.turn()
    assert phases(objects) == {"gpt2": "Failed"}
    base = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    assert all((DEPLOY / name).is_file() for name in base["resources"])
    rows = yaml.safe_load_all((DEPLOY / "operator.yaml").read_text())
    (role,) = (row for row in rows if row["kind"] == "ClusterRole")
    granted = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    verbs = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}
    used = set()
    for line in objects.asked:
        method, _, path = line.partition(" ")
        parts = [part for part in path.split("/") if part]
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        parts = parts[2:] if parts[0] == "namespaces" else parts
        named = len(parts) > 1
        kind = parts[0] + ("/status" if parts[-1] == "status" else "")
        used.add((kind, verbs.get(method) or ("get" if named else "list")))
    assert used == granted


def test_the_command_says_what_it_needs(tmp_path, monkeypatch) -> None:
    from typer.testing import CliRunner

    from baechi.cli.commands import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "graphs").mkdir()
    baechi.dump(SITE, tmp_path / "free.json")
    words = ["operator", "free.json", "--ledger", "ledger.sqlite", "--graphs", "graphs"]
    said = CliRunner().invoke(app, [*words, "--account", "nowhere"])
    assert said.exit_code == 2
    assert "no service account's token" in said.stderr
    said = CliRunner().invoke(app, [*words, "--spelling", "mps"])
    assert "none, hami, kai, device-plugin" in said.stderr
