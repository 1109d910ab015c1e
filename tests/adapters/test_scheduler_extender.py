"""The scheduler extender: what it answers kube-scheduler and Volcano, and what it reserves."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
import yaml
from fastapi.testclient import TestClient

import baechi
from baechi import Cluster, InputError, Link, Op, OpGraph, Tensor, Topology
from baechi.adapters.api_server import ApiError, ApiServer
from baechi.adapters.extender_service import create_extender_app
from baechi.adapters.free_devices import annotation_of
from baechi.adapters.graph_folder import GraphFolder
from baechi.adapters.scheduler_extender import CLAIMS, GRAPH, Extender
from baechi.scheduling import Claim, Ledger

GIB = 2**30
LINK = Link(5_000, 300 * 10**9)
GRAPH_OF_JOB = OpGraph(
    tuple(Op(f"layer{i}", 10**6, persistent_bytes=6 * GIB) for i in range(3)),
    tuple(Tensor(i, (i + 1,), 2**20) for i in range(2)),
)
SITE = Topology.grid(1, 3, 2, "16GiB", node_link=LINK, switch_link=LINK)
NODES = ["node0", "node1", "node2"]
GRAPHS = {GRAPH_OF_JOB.digest: GRAPH_OF_JOB}


class Kubernetes:
    """Pods and bindings, as the API server has them."""

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self.annotations: dict[str, dict[str, str]] = {}
        self.fails = False
        self.loses_answers = False

    def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Any) -> None:
        if self.fails:
            raise ApiError("away", 409)
        assert uid == f"uid-{name}"
        assert namespace == "team"
        self.bound[uid] = node
        self.annotations[uid] = dict(annotations)
        if self.loses_answers:
            raise ApiError("timed out")


def pod(name: str, *, digest: str = GRAPH_OF_JOB.digest, node: str = "", **status: str) -> Any:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "annotations": {GRAPH: digest},
        },
        "spec": {"nodeName": node} if node else {},
        "status": status,
    }


def binding(name: str, node: str) -> dict[str, str]:
    return {"PodName": name, "PodNamespace": "team", "PodUID": f"uid-{name}", "Node": node}


@pytest.fixture
def server() -> Kubernetes:
    return Kubernetes()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(SITE)


@pytest.fixture
def extender(ledger: Ledger, server: Kubernetes) -> Extender:
    return Extender(ledger, GRAPHS.__getitem__, server.bind)


def test_a_pod_goes_where_its_graph_fits(ledger: Ledger, extender: Extender) -> None:
    ledger.reserve("other", [Claim("node0/0", "10GiB", 1), Claim("node0/1", "8GiB", 1)])
    answer = extender.filter({"Pod": pod("a"), "Nodes": None, "NodeNames": ["node0", "node2"]})
    assert answer == {
        "NodeNames": ["node2"],
        "FailedNodes": {"node0": "residual memory 14.0 GiB < 18.0 GiB"},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    scores = extender.prioritize({"pod": pod("a"), "nodenames": ["node0", "node2"]})
    assert scores == [{"Host": "node0", "Score": 0}, {"Host": "node2", "Score": 10}]
    assert ledger.snapshot().version == 1  # asking reserves nothing


def test_whole_nodes_are_answered_by_whole_nodes(extender: Extender) -> None:
    items = [{"metadata": {"name": name}} for name in ("node1", "elsewhere")]
    answer = extender.filter({"Pod": pod("a"), "Nodes": {"items": items}})
    assert answer["Nodes"] == {"items": [items[0]]}
    assert answer["FailedAndUnresolvableNodes"] == {
        "elsewhere": "none of its devices is in Baechi's ledger"
    }


def test_binding_reserves_annotates_and_binds_once(
    ledger: Ledger, server: Kubernetes, extender: Extender
) -> None:
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    for _ in range(2):  # the answer to the first was lost
        assert extender.bind(binding("a", "node1")) == {"Error": ""}
        assert server.bound == {"uid-a": "node1"}
    (row,) = ledger.snapshot().jobs.values()
    written = json.loads(server.annotations["uid-a"][CLAIMS])
    assert [claim["device"] for claim in written] == [claim.device for claim in row.claims]
    assert all(claim.device.startswith("node1/") for claim in row.claims)
    # What is reserved is not offered to others, and the pod itself stays where it is.
    assert extender.filter({"Pod": pod("a"), "NodeNames": NODES})["NodeNames"] == ["node1"]
    other = extender.filter({"Pod": pod("b"), "NodeNames": ["node1"]})
    assert other["NodeNames"] == []
    assert "residual memory" in other["FailedNodes"]["node1"]


def test_a_binding_that_is_refused_leaves_nothing_reserved(
    ledger: Ledger, server: Kubernetes, extender: Extender
) -> None:
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    server.fails = 409
    assert "was not bound: away" in extender.bind(binding("a", "node1"))["Error"]
    assert not ledger.snapshot().jobs
    server.fails = None
    assert extender.bind(binding("a", "node0")) == {"Error": ""}


def test_a_binding_without_an_answer_keeps_what_it_reserved(
    ledger: Ledger, server: Kubernetes, extender: Extender
) -> None:
    """The pod is bound and runs there: nobody else may have its devices meanwhile."""
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    server.loses_answers = True
    assert "timed out" in extender.bind(binding("a", "node1"))["Error"]
    assert server.bound == {"uid-a": "node1"}
    assert list(ledger.snapshot().jobs) == ["pod/team/a/uid-a"]
    server.loses_answers, server.fails = False, True  # it is bound already, which nobody knew
    extender.filter({"Pod": pod("a"), "NodeNames": ["node0"]})
    assert "was not bound" in extender.bind(binding("a", "node0"))["Error"]
    (row,) = ledger.snapshot().jobs.values()
    assert {claim.device.partition("/")[0] for claim in row.claims} == {"node1"}
    # If it was not bound after all, and the node has been cordoned, it may go elsewhere.
    assert extender.filter({"Pod": pod("a"), "NodeNames": ["node2"]})["NodeNames"] == ["node2"]
    extender.reconcile([pod("a", node="node2")], extender.version())
    (row,) = ledger.snapshot().jobs.values()
    assert {claim.device.partition("/")[0] for claim in row.claims} == {"node2"}


def test_what_is_reserved_while_pods_are_listed_stays(ledger: Ledger, extender: Extender) -> None:
    version = extender.version()
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    extender.bind(binding("a", "node1"))
    extender.reconcile([], version)  # listed before it was made
    assert list(ledger.snapshot().jobs) == ["pod/team/a/uid-a"]
    extender.reconcile([], extender.version())
    assert not ledger.snapshot().jobs


def test_a_pod_that_is_bound_elsewhere_after_a_kill_has_one_reservation(
    ledger: Ledger, server: Kubernetes, extender: Extender
) -> None:
    """Killed after it had reserved: the scheduler filters again, and may choose another node."""
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    extender.bind(binding("a", "node1"))
    again = Extender(ledger, GRAPHS.__getitem__, server.bind)
    assert "was not filtered here" in again.bind(binding("a", "node2"))["Error"]
    again.filter({"Pod": pod("a"), "NodeNames": NODES})
    assert again.bind(binding("a", "node2")) == {"Error": ""}
    (row,) = ledger.snapshot().jobs.values()
    assert {claim.device.partition("/")[0] for claim in row.claims} == {"node2"}


def test_no_device_is_held_twice_nor_leaked_whatever_happens_in_between() -> None:
    """Killed before or after each step of three pods' lives, in every combination."""
    for kills in itertools.product(range(4), repeat=3):
        ledger, server = Ledger(SITE), Kubernetes()
        pods = {}
        for number, kill in enumerate(kills):
            name = f"p{number}"
            for attempt in (kill, 0):
                extender = Extender(ledger, GRAPHS.__getitem__, server.bind)
                if attempt == 1:
                    continue
                (node,) = extender.filter({"Pod": pod(name), "NodeNames": NODES})["NodeNames"]
                if attempt == 2:
                    continue
                server.fails = 409 if attempt == 3 else None
                said = extender.bind(binding(name, node))
                server.fails = None
                assert (said["Error"] == "") == (attempt != 3)
            pods[name] = pod(name, node=node)
        assert sorted(server.bound.values()) == NODES
        assert len(ledger.snapshot().jobs) == 3
        listed = [pods["p0"], pod("p1", node="node1", phase="Succeeded")]
        extender.reconcile({"items": listed}, extender.version())
        assert list(ledger.snapshot().jobs) == ["pod/team/p0/uid-p0"]
        extender.reconcile([], extender.version())
        assert all(use == (0, 0, 0) for use in ledger.snapshot().uses)


def test_a_pod_that_somebody_else_has_bound_is_reserved(ledger: Ledger, extender: Extender) -> None:
    rows = [pod("a", node="node2"), pod("b"), pod("c", digest="unknown", node="node1")]
    extender.reconcile({"items": rows}, extender.version())
    assert list(ledger.snapshot().jobs) == ["pod/team/a/uid-a"]


def test_what_a_workload_of_kueue_holds_is_not_reserved_for_its_pod_again(
    ledger: Ledger, extender: Extender
) -> None:
    claims = ledger.reserve("workload/team/w/uid", [Claim("node0/0", "4GiB", 250)]).claims
    placed, other = pod("a", node="node0"), pod("b", node="node1")
    placed["metadata"]["annotations"][CLAIMS] = annotation_of(claims)
    other["metadata"]["annotations"][CLAIMS] = "[]"  # of a binding that was refused
    extender.reconcile([placed, other], extender.version())
    assert sorted(ledger.snapshot().jobs) == ["pod/team/b/uid-b", "workload/team/w/uid"]


def test_volcano_is_answered_in_its_own_words(extender: Extender) -> None:
    task = {"Name": "a", "Namespace": "team", "Pod": pod("a")}
    assert extender.predicate({"task": task, "node": {"Name": "node1"}}) == {"errorMessage": ""}
    elsewhere = extender.predicate({"task": task, "node": {"Name": "elsewhere"}})
    assert "is in Baechi's ledger" in elsewhere["errorMessage"]
    said = extender.score({"task": task, "nodes": [{"Name": "node1"}, {"Name": "elsewhere"}]})
    assert said == {"nodeScore": {"node1": 10, "elsewhere": 0}, "errorMessage": ""}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"Pod": {"metadata": {"name": "a", "uid": "u"}}, "NodeNames": []}, "no annotation"),
        ({"Pod": pod("a", digest="none"), "NodeNames": NODES}, "no graph has digest 'none'"),
        ({"Pod": pod("a")}, "a field 'nodes' is absent"),
        ({"NodeNames": NODES}, "a field 'pod' is absent"),
        ({"Pod": {"metadata": {}}, "NodeNames": NODES}, "the pod cannot be read"),
    ],
)
def test_what_is_wrong_with_a_question_is_answered(
    extender: Extender, asked: Any, said: str
) -> None:
    assert said in extender.filter(asked)["Error"]


def test_nodes_are_needed() -> None:
    with pytest.raises(InputError, match="give it a Topology"):
        Extender(Ledger(Cluster.uniform(2, "1GiB", LINK)), GRAPHS.__getitem__, lambda *_: None)


def test_over_http(extender: Extender, ledger: Ledger) -> None:
    with TestClient(create_extender_app(extender)) as web:
        asked = {"Pod": pod("a"), "NodeNames": NODES}
        (node,) = web.post("/filter", json=asked).json()["NodeNames"]
        assert len(web.post("/prioritize", json=asked).json()) == 3
        assert web.post("/bind", json=binding("a", node)).json() == {"Error": ""}
        task = {"task": {"pod": pod("b")}, "node": {"name": "node1"}}
        assert "errorMessage" in web.post("/volcano/predicate", json=task).json()
        assert web.get("/healthz").json() == {"status": "ok"}
        wrong = web.post("/prioritize", content=b"{")
        assert wrong.status_code == 422
    assert len(ledger.snapshot().jobs) == 1


def test_ended_pods_are_noticed_while_it_serves(extender: Extender, ledger: Ledger) -> None:
    extender.filter({"Pod": pod("a"), "NodeNames": NODES})
    extender.bind(binding("a", "node1"))
    said: list[str] = []

    def pods() -> Any:
        if not said:
            raise OSError("away")
        return {"items": []}

    app = create_extender_app(extender, pods, every_s=0.001, report=said.append)
    with TestClient(app) as web:
        while ledger.snapshot().jobs:
            assert web.get("/healthz").status_code == 200
    assert said == ["pods that have ended are not seen: away"]


def test_who_finds_no_room_gets_what_has_just_been_left(extender: Extender, ledger: Ledger) -> None:
    """kube-scheduler asks again when a pod ends, and not when the next look would release it."""
    listed: list[Any] = []
    app = create_extender_app(extender, lambda: listed, every_s=3600)
    for name, node in zip("abc", NODES, strict=True):
        extender.filter({"Pod": pod(name), "NodeNames": [node]})
        extender.bind(binding(name, node))
        listed.append(pod(name, node=node))
    with TestClient(app) as web:
        asked = {"Pod": pod("d"), "NodeNames": NODES}
        assert web.post("/filter", json=asked).json()["NodeNames"] == []
        del listed[1]
        assert web.post("/filter", json=asked).json()["NodeNames"] == ["node1"]
    assert list(ledger.snapshot().jobs) == ["pod/team/a/uid-a", "pod/team/c/uid-c"]


def test_a_pod_that_comes_while_pods_are_listed_keeps_its_devices(
    extender: Extender, ledger: Ledger
) -> None:
    asked: list[int] = []

    def pods() -> Any:
        asked.append(1)
        if len(asked) > 1:
            return {"items": [pod("a", node="node1")]}
        extender.filter({"Pod": pod("a"), "NodeNames": NODES})
        extender.bind(binding("a", "node1"))
        return {"items": []}

    with TestClient(create_extender_app(extender, pods, every_s=0.001)) as web:
        while len(asked) < 3:
            assert web.get("/healthz").status_code == 200
    assert ledger.snapshot().version == 1


class Api:
    """An API server with one pod: what was asked of it, and what it answers."""

    def __init__(self, **status: int) -> None:
        self.asked: list[tuple[str, str, Any, str]] = []
        self.status = status
        self.node = ""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        assert request.headers["authorization"] == "Bearer secret"
        kind = request.headers.get("content-type", "")
        self.asked.append((request.method, request.url.path, body, kind))
        status = self.status.get(request.method, 200)
        return httpx.Response(status, json=pod("a", node=self.node))


@pytest.fixture
def account(tmp_path) -> Any:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


def test_a_pod_is_annotated_and_bound_at_the_api_server(account: Any) -> None:
    api = Api()
    server = ApiServer("http://api", account, transport=httpx.MockTransport(api))
    server.bind("team", "a", "uid-a", "node1", {CLAIMS: "[]"})
    path = "/api/v1/namespaces/team/pods/a"
    _, (method, where, patch, kind), (verb, place, body, _) = api.asked
    assert (method, where, kind) == ("PATCH", path, "application/merge-patch+json")
    assert patch["metadata"] == {"uid": "uid-a", "annotations": {CLAIMS: "[]"}}
    assert (verb, place) == ("POST", f"{path}/binding")
    assert body["target"] == {"apiVersion": "v1", "kind": "Node", "name": "node1"}
    api.node = "node1"  # bound already, and the answer was lost
    del api.asked[:]
    server.bind("team", "a", "uid-a", "node1", {})
    assert [row[0] for row in api.asked] == ["GET", "PATCH"]
    server.close()


def test_what_the_api_server_refuses_is_told(account: Any, tmp_path) -> None:
    server = ApiServer("http://api", account, transport=httpx.MockTransport(Api(POST=409)))
    with pytest.raises(OSError, match="409"):
        server.bind("team", "a", "uid-a", "node1", {})
    with pytest.raises(OSError, match="is another one now"):
        server.bind("team", "a", "uid-before", "node1", {})
    assert server.ask("GET", "/api/v1/pods")["kind"] == "Pod"

    def away(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(OSError, match="refused"):
        ApiServer("http://api", account, transport=httpx.MockTransport(away)).ask("GET", "/")
    text = 'pods "a" not found'
    status = {"kind": "Status", "status": "Failure", "message": text, "code": 404}
    absent = httpx.MockTransport(lambda _: httpx.Response(404, json=status))
    with pytest.raises(ApiError, match=f"^GET /: 404 {text}$"):
        ApiServer("http://api", account, transport=absent).ask("GET", "/")
    page = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with pytest.raises(ApiError, match=r"no JSON but '<html>'"):
        ApiServer("http://api", account, transport=page).ask("GET", "/")
    with pytest.raises(InputError, match="no service account's token"):
        ApiServer(account=tmp_path / "nowhere")


def test_the_authority_of_the_account_is_trusted(account: Any) -> None:
    shutil.copy(certifi.where(), account / "ca.crt")
    ApiServer("https://api", account).close()  # a warning would be an error


def test_graphs_are_found_in_a_folder(tmp_path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "dangling.json").symlink_to("nowhere")
    graphs = GraphFolder(tmp_path)
    with pytest.raises(KeyError):
        graphs(GRAPH_OF_JOB.digest)
    baechi.dump(GRAPH_OF_JOB, tmp_path / "late.json")
    assert graphs(GRAPH_OF_JOB.digest) == GRAPH_OF_JOB
    with pytest.raises(InputError, match="no folder"):
        GraphFolder(tmp_path / "nowhere")


def test_the_manifests_say_what_the_extender_serves() -> None:
    folder = Path(__file__).parents[2] / "docs" / "deploy"
    (scheduler,) = yaml.safe_load_all((folder / "kube-scheduler.yaml").read_text())
    (asked,) = scheduler["extenders"]
    rows = list(yaml.safe_load_all((folder / "extender.yaml").read_text()))
    kinds = {row["kind"]: row for row in rows}
    port = kinds["Service"]["spec"]["ports"][0]["port"]
    assert asked["urlPrefix"].endswith(f":{port}")
    app = create_extender_app(Extender(Ledger(SITE), GRAPHS.__getitem__, lambda *_: None))
    paths = {route.path for route in app.routes}
    assert {f"/{asked[verb]}" for verb in ("filterVerb", "prioritizeVerb", "bindVerb")} <= paths
    (volcano,) = yaml.safe_load_all((folder / "volcano-scheduler.yaml").read_text())
    conf = yaml.safe_load(volcano["data"]["volcano-scheduler.conf"])
    (plugin,) = (p for tier in conf["tiers"] for p in tier["plugins"] if p["name"] == "extender")
    prefix = plugin["arguments"]["extender.urlPrefix"]
    assert prefix.endswith(f":{port}/volcano")
    assert f"/volcano/{plugin['arguments']['extender.predicateVerb']}" in paths
    # Who is told to ask may do so, from its own namespace.
    (ingress,) = kinds["NetworkPolicy"]["spec"]["ingress"]
    spaces = [row.get("namespaceSelector", {}).get("matchLabels") for row in ingress["from"]]
    assert spaces == [None, {"kubernetes.io/metadata.name": volcano["metadata"]["namespace"]}]
    # The least rights: no secrets, nothing of other resources.
    granted = {
        (r, v)
        for rule in kinds["ClusterRole"]["rules"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }
    assert granted == {
        ("pods", "get"),
        ("pods", "list"),
        ("pods", "patch"),
        ("pods/binding", "create"),
    }
