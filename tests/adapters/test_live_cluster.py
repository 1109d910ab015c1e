"""The operator and the extender in a real cluster, with their own rights.

    KUBECONFIG=~/.kube/config python3 -m pytest -m kubernetes tests/adapters

The cluster is the one that `kubectl` reaches, of Kubernetes 1.25 or later. It gets the custom
resource, the service accounts and their rights from docs/deploy, and a namespace, which goes again;
pods run on its nodes.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from baechi import Link, Op, OpGraph, Tensor, Topology
from baechi.adapters.api_server import ApiServer
from baechi.adapters.extender_service import PODS
from baechi.adapters.job_operator import Operator
from baechi.adapters.kueue import CONTROLLER
from baechi.adapters.scheduler_extender import CLAIMS, GRAPH, Extender
from baechi.records.cluster import Device
from baechi.scheduling import Ledger

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.skipif(
        "KUBECONFIG" not in os.environ or shutil.which("kubectl") is None,
        reason="needs kubectl, and KUBECONFIG that names a cluster",
    ),
]

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
NAMESPACE = "baechi-test"
GIB = 2**30
LINK = Link(5_000, 300 * 10**9)
IMAGE = "busybox:1.36"
GRAPH_OF_JOB = OpGraph(
    tuple(Op(f"layer{i}", 10**6, persistent_bytes=10 * GIB) for i in range(2)),
    (Tensor(0, (1,), 2**20),),
)
GRAPHS = {GRAPH_OF_JOB.digest: GRAPH_OF_JOB}


def kubectl(*words: str, text: str | None = None) -> str:
    command = ["kubectl", *words]
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kubectl_json(*words: str) -> Any:
    return json.loads(kubectl(*words, "-o", "json"))


class Live:
    """A namespace of a cluster, and its first node with two devices."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        (known,) = kubectl_json("config", "view", "--raw", "--minify", "--flatten")["clusters"]
        self._known, self._folder, self._closing = known["cluster"], folder, closing
        self.node = next(
            row["metadata"]["name"]
            for row in kubectl_json("get", "nodes")["items"]
            if not any(t["effect"] == "NoSchedule" for t in row["spec"].get("taints", ()))
        )
        devices = tuple(Device(f"{self.node}/gpu{place}", 16 * GIB) for place in range(2))
        self.ledger = Ledger(Topology(devices, (self.node,) * 2, ("switch",) * 2, LINK, None, None))
        self.operator = Operator(self.api("operator"), self.ledger, GRAPHS.__getitem__)

    def api(self, part: str) -> ApiServer:
        """The API server as the service account of a part sees it, with that one's rights."""
        kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
        rows = yaml.safe_load_all((DEPLOY / f"{part}.yaml").read_text())
        kubectl("apply", "-f", "-", text=yaml.safe_dump_all(r for r in rows if r["kind"] in kinds))
        account = self._folder / part
        account.mkdir()
        token = kubectl("create", "token", f"baechi-{part}", "-n", "kube-system")
        (account / "token").write_text(token)
        if authority := self._known.get("certificate-authority-data"):
            (account / "ca.crt").write_bytes(base64.b64decode(authority))
        server = ApiServer(self._known["server"], account)
        self._closing.callback(server.close)
        return server

    def job(self, name: str, *command: str, **spec: Any) -> str:
        """Makes a job; or says why it is refused."""
        asked = {"graph": {"digest": GRAPH_OF_JOB.digest}, "image": IMAGE, "command": command}
        item = {"apiVersion": "baechi.dev/v1alpha1", "kind": "BaechiJob"}
        item |= {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": {**asked, **spec}}
        return make(item)

    def status(self, name: str) -> Any:
        found = kubectl_json("get", "baechijob", name, "-n", NAMESPACE)
        return found.get("status") or {"phase": "", "conditions": [{"message": ""}]}

    def turn_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            assert time.monotonic() < deadline, kubectl("get", "all,baechijobs", "-n", NAMESPACE)
            self.operator.turn()
            time.sleep(1)

    def reaches(self, name: str, phase: str) -> None:
        self.turn_until(lambda: self.status(name)["phase"] == phase)

    def says(self, name: str, text: str) -> None:
        self.turn_until(lambda: text in self.status(name)["conditions"][0]["message"])


def make(item: dict[str, Any]) -> str:
    command = ["kubectl", "apply", "-n", NAMESPACE, "-f", "-"]
    done = subprocess.run(
        command, check=False, input=json.dumps(item), capture_output=True, text=True
    )
    return done.stderr if done.returncode else ""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    kubectl("apply", "-f", str(DEPLOY / "baechijob.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/baechijobs.baechi.dev", "--timeout=60s")
    kubectl("create", "namespace", NAMESPACE)
    with ExitStack() as closing:
        closing.callback(kubectl, "delete", "namespace", NAMESPACE)
        yield Live(tmp_path, closing)


def test_a_job_runs_to_its_end_and_leaves_nothing(live: Live) -> None:
    live.job("first", "sh", "-c", 'test "$WORLD_SIZE" = 2 && sleep 20')
    live.reaches("first", "Running")
    pods = kubectl_json("get", "pods", "-n", NAMESPACE)["items"]
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["first-0", "first-1"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {live.node}
    live.job("second", "sleep", "3600")
    live.says("second", "first")  # whose end is enough
    assert live.status("second")["phase"] == "Waiting"
    live.reaches("first", "Succeeded")
    live.reaches("second", "Running")
    reasons = {row["reason"] for row in kubectl_json("get", "events", "-n", NAMESPACE)["items"]}
    assert {"Reserved", "Waits", "Done"} <= reasons
    kubectl("delete", "baechijob", "second", "-n", NAMESPACE, "--cascade=orphan")
    for _ in range(3):
        live.operator.turn()
    assert live.ledger.snapshot().jobs  # its pods run still
    kubectl("delete", "pods", "-n", NAMESPACE, "--all")
    live.turn_until(lambda: not live.ledger.snapshot().jobs)


def test_what_cannot_run_is_refused_or_told(live: Live) -> None:
    assert "the name has letters" in live.job("1st")
    assert "spec.env[0].name" in live.job("a", env=[{"value": "1"}])
    assert "oneOf" in live.job("a", graph={})
    live.job("failing", "sh", "-c", "sleep 1; exit 1")
    live.says("failing", "exit code 1")
    live.turn_until(lambda: not live.ledger.snapshot().jobs)
    kubectl("run", "taken-0", f"--image={IMAGE}", "-n", NAMESPACE, "--", "sleep", "3600")
    live.job("taken", "sleep", "3600")
    live.says("taken", "'taken-0' already, which is not the job's")
    assert "does not change" in live.job("taken", "sleep", "1")
    kubectl("delete", "pod", "taken-0", "-n", NAMESPACE)
    live.reaches("taken", "Running")
    kubectl("delete", "baechijob", "taken", "-n", NAMESPACE)
    live.turn_until(lambda: not live.ledger.snapshot().jobs)


def test_the_extender_binds_a_pod_and_sees_its_end(live: Live) -> None:
    """As kube-scheduler asks it, of a pod that no scheduler looks at."""
    api = live.api("extender")
    extender = Extender(live.ledger, GRAPHS.__getitem__, api.bind)
    container = {"name": "c", "image": IMAGE, "command": ["sleep", "3600"]}
    spec = {"schedulerName": "nobody", "containers": [container]}
    notes = {GRAPH: GRAPH_OF_JOB.digest}
    made = make(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "annotations": notes},
            "spec": spec,
        }
    )
    assert not made
    get = partial(kubectl_json, "get", "pod", "p", "-n", NAMESPACE)
    uid = get()["metadata"]["uid"]
    assert extender.filter({"Pod": get(), "NodeNames": [live.node]})["NodeNames"] == [live.node]
    asked = {"PodNamespace": NAMESPACE, "PodName": "p", "PodUID": uid, "Node": live.node}
    for _ in range(2):  # the first answer was lost
        assert extender.bind(asked) == {"Error": ""}
    assert get()["spec"]["nodeName"] == live.node
    claims = json.loads(get()["metadata"]["annotations"][CLAIMS])
    assert [row["device"] for row in claims] == [f"{live.node}/gpu0", f"{live.node}/gpu1"]
    extender.reconcile(api.ask("GET", PODS), extender.version())
    assert live.ledger.snapshot().jobs
    kubectl("delete", "pod", "p", "-n", NAMESPACE)
    extender.reconcile(api.ask("GET", PODS), extender.version())
    assert not live.ledger.snapshot().jobs


def test_kueue_hears_that_its_checks_are_answered(live: Live) -> None:
    (check, *_) = yaml.safe_load_all((DEPLOY / "kueue.yaml").read_text())
    check["metadata"]["name"] = NAMESPACE
    if "no matches for kind" in make(check):
        pytest.skip("the cluster has no Kueue")
    try:
        live.operator.turn()
        (row,) = kubectl_json("get", "admissioncheck", NAMESPACE)["status"]["conditions"]
        assert (row["type"], row["status"]) == ("Active", "True")
        assert check["spec"]["controllerName"] == CONTROLLER
    finally:
        kubectl("delete", "admissioncheck", NAMESPACE)
