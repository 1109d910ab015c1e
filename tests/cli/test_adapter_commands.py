"""`baechi free`, `claims` and `slurm`: from what a cluster manager prints to what it takes."""

import json

import pytest
from typer.testing import CliRunner

import baechi
from baechi import Op, OpGraph, Tensor, Topology
from baechi.cli.commands import app

SCONTROL = """\
NodeName=n1 Gres=gpu:a100:4 GresUsed=gpu:a100:3(IDX:0-2) State=MIXED
NodeName=n2 Gres=gpu:a100:4 GresUsed=gpu:a100:2(IDX:0-1) State=MIXED
"""
SMI = "0, GPU-a, NVIDIA A100-SXM4-80GB, 60000, 35, Disabled\n"


def gpu(name):
    return {
        "name": name,
        "attributes": {"uuid": {"string": f"GPU-{name}"}},
        "capacity": {"memory": {"value": "80Gi"}},
        "allowMultipleAllocations": True,
    }


SLICE = {
    "kind": "ResourceSlice",
    "spec": {
        "driver": "gpu.nvidia.com",
        "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": [gpu("gpu-0"), gpu("gpu-1")],
    },
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ops = tuple(Op(f"layer{i}", 10**6, persistent_bytes=30 * 2**30) for i in range(4))
    links = tuple(Tensor(i, (i + 1,), 2**20) for i in range(3))
    baechi.dump(OpGraph(ops, links), tmp_path / "graph.json")

    def invoke(*arguments, code=0, text=None):
        result = CliRunner().invoke(app, [*arguments], input=text)
        assert result.exit_code == code, result.output
        return result

    return invoke


def test_a_job_of_slurm_from_what_is_free_to_its_script(run, tmp_path):
    kind = ["--kind", "a100=A100-SXM-80GB"]
    said = run("free", "slurm", "-", *kind, "-o", "free.json", text=SCONTROL).stdout
    assert "n1/a100:0: 79.0 GiB, 100 % of its compute, A100-SXM-80GB" in said
    site = baechi.load(tmp_path / "free.json")
    assert isinstance(site, Topology)
    assert site.nodes == ("n1", "n2", "n2")
    result = run("slurm", "graph.json", "free.json", "--option=--time=1:00:00", "--", "t.py", "-x")
    assert result.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=baechi\n")
    assert "#SBATCH --time=1:00:00\n" in result.stdout
    assert "t.py -x" in result.stdout
    assert "predicted step" in result.stderr
    one = run("slurm", "graph.json", "free.json", "--same", "node", "--", "t.py")
    assert "--nodelist=n2\n" in one.stdout


def test_a_job_of_kubernetes_from_what_is_free_to_its_claims(run, tmp_path):
    (tmp_path / "slices.json").write_text(json.dumps({"kind": "List", "items": [SLICE]}))
    (tmp_path / "claims.json").write_text(json.dumps({"kind": "List", "items": []}))
    run("free", "dra", "slices.json", "claims.json", "-o", "free.json")
    result = run("claims", "graph.json", "free.json", "slices.json", "--job", "gpt2")
    items = json.loads(result.stdout)["items"]
    assert [item["metadata"]["name"] for item in items] == ["gpt2-0", "gpt2-1"]


def test_other_sources(run, tmp_path):
    assert "cuda:0: 58.6 GiB, 65 % of" in run("free", "nvidia-smi", "-", text=SMI).stdout
    register = '[{"id":"GPU-a","count":9,"devmem":81920,"devcore":100,"type":"A100","health":true}]'
    node = {
        "kind": "Node",
        "metadata": {
            "name": "n1",
            "annotations": {"hami.io/node-nvidia-register": register},
            "labels": {"nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "40960"},
        },
    }
    (tmp_path / "nodes.json").write_text(json.dumps(node))
    (tmp_path / "pods.json").write_text("[]")
    for source, left in (("hami", "n1/GPU-a: 80.0 GiB"), ("kai", "n1/gpu0: 40.0 GiB")):
        assert left in run("free", source, "nodes.json", "pods.json").stdout


def test_what_does_not_fit_is_told_with_exit_code_3(run):
    kind = ["--kind", "a100=A100-SXM-40GB"]
    run("free", "slurm", "-", *kind, "-o", "free.json", text=SCONTROL)
    said = run("slurm", "graph.json", "free.json", "--", "t.py", code=3)
    assert said.stdout == ""
    assert "not placed" in said.stderr


def test_an_extender_without_a_cluster_says_what_it_needs(run, tmp_path):
    (tmp_path / "graphs").mkdir()
    words = ["extender", "--ledger", "ledger.sqlite", "--graphs", "graphs"]
    assert "give FREE" in run(*words, code=2).stderr
    kind = ["--kind", "a100=A100-SXM-80GB"]
    run("free", "slurm", "-", *kind, "-o", "free.json", text=SCONTROL)
    said = run(*words, "free.json", "--account", "nowhere", code=2).stderr
    assert "no service account's token" in said
    assert not (tmp_path / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["free", "pbs", "x"], "must be one of dra, hami, kai, slurm, nvidia-smi"),
        (["free", "dra", "x"], "in this order: resourceslices, resourceclaims"),
        (["free", "slurm", "-", "--kind", "a100"], "has no ="),
        (["free", "slurm", "nowhere"], "nowhere"),
        (["free", "dra", "graph.json", "graph.json"], "ResourceSlice"),
        (["free", "hami", "broken", "broken"], "kubectl get -o json"),
        (["free", "slurm", "broken"], "it has no NodeName"),
        (["free", "slurm", "utf16"], "utf16 is no text in UTF-8"),
    ],
)
def test_what_is_wrong_is_named(run, tmp_path, arguments, message):
    (tmp_path / "broken").write_text("{")
    (tmp_path / "utf16").write_text(SCONTROL, encoding="utf-16")
    said = run(*arguments, code=2, text=SCONTROL).stderr
    assert message in said
