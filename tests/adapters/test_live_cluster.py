"""The operator in a real cluster, with its own rights.

    KUBECONFIG=~/.kube/config python3 -m pytest -m kubernetes tests/adapters

The cluster is the one that `kubectl` reaches. It gets the custom resource, the operator's service
account and its rights from docs/deploy, and a namespace, which goes again; pods run on its nodes.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baechi import Link, Op, OpGraph, Tensor, Topology
from baechi.adapters.api_server import ApiServer
from baechi.adapters.job_operator import Operator
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
GRAPH = OpGraph(
    tuple(Op(f"layer{i}", 10**6, persistent_bytes=10 * GIB) for i in range(2)),
    (Tensor(0, (1,), 2**20),),
)


def kubectl(*words: str, text: str | None = None) -> str:
    command = ["kubectl", *words]
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kubectl_json(*words: str) -> Any:
    return json.loads(kubectl(*words, "-o", "json"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[ApiServer, list[str]]]:
    """The API server as the operator's service account sees it, and the nodes' host names."""
    rights = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    rows = yaml.safe_load_all((DEPLOY / "operator.yaml").read_text())
    kubectl("apply", "-f", str(DEPLOY / "baechijob.yaml"))
    kubectl("wait", "--for=condition=Established", "crd/baechijobs.baechi.dev", "--timeout=60s")
    kubectl("apply", "-f", "-", text=yaml.safe_dump_all(r for r in rows if r["kind"] in rights))
    kubectl("create", "namespace", NAMESPACE)
    token = kubectl("create", "token", "baechi-operator", "-n", "kube-system").strip()
    (known,) = kubectl_json("config", "view", "--raw", "--minify", "--flatten")["clusters"]
    (tmp_path / "token").write_text(token)
    if authority := known["cluster"].get("certificate-authority-data"):
        (tmp_path / "ca.crt").write_bytes(base64.b64decode(authority))
    names = [
        row["metadata"]["labels"]["kubernetes.io/hostname"]
        for row in kubectl_json("get", "nodes")["items"]
        if not any(t["effect"] == "NoSchedule" for t in row["spec"].get("taints", ()))
    ]
    api = ApiServer(known["cluster"]["server"], tmp_path)
    try:
        yield api, names
    finally:
        api.close()
        kubectl("delete", "namespace", NAMESPACE)


def test_a_job_runs_to_its_end_and_leaves_nothing(cluster: tuple[ApiServer, list[str]]) -> None:
    api, names = cluster
    node = names[0]
    devices = tuple(Device(f"{node}/gpu{place}", 16 * GIB) for place in range(2))
    ledger = Ledger(Topology(devices, (node,) * 2, ("switch",) * 2, LINK, None, None))
    operator = Operator(api, ledger, {GRAPH.digest: GRAPH}.__getitem__)
    spec = {"graph": {"digest": GRAPH.digest}, "image": "busybox:1.36"}

    def job(name: str, *command: str) -> None:
        metadata = {"name": name, "namespace": NAMESPACE}
        item = {"apiVersion": "baechi.dev/v1alpha1", "kind": "BaechiJob", "metadata": metadata}
        kubectl("apply", "-f", "-", text=json.dumps({**item, "spec": {**spec, "command": command}}))

    def status(name: str) -> Any:
        return kubectl_json("get", "baechijob", name, "-n", NAMESPACE).get("status") or {}

    def turn_until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 180
        while not reached():
            assert time.monotonic() < deadline, kubectl("get", "all,baechijobs", "-n", NAMESPACE)
            operator.turn()
            time.sleep(1)

    job("first", "sh", "-c", 'test "$WORLD_SIZE" = 2 && sleep 20')
    turn_until(lambda: status("first").get("phase") == "Running")
    pods = kubectl_json("get", "pods", "-n", NAMESPACE)["items"]
    assert sorted(pod["metadata"]["name"] for pod in pods) == ["first-0", "first-1"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {node}
    job("second", "sleep", "3600")
    turn_until(lambda: bool(status("second")))
    assert status("second")["phase"] == "Waiting"
    assert "first" in status("second")["conditions"][0]["message"]
    turn_until(lambda: status("first")["phase"] == "Succeeded")
    turn_until(lambda: status("second")["phase"] == "Running")
    reasons = {row["reason"] for row in kubectl_json("get", "events", "-n", NAMESPACE)["items"]}
    assert {"Reserved", "Waits", "Done"} <= reasons
    kubectl("delete", "baechijob", "second", "-n", NAMESPACE)
    turn_until(lambda: not ledger.snapshot().jobs)
