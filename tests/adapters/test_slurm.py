"""Slurm: the GPUs that `scontrol` says no job holds, and a script that runs on them."""

import os
import subprocess

import pytest

from baechi import InputError
from baechi.adapters.slurm import batch_script, slurm_devices

# As `scontrol show node -d` prints it, shortened.
NODES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=16 CPUEfctv=64 CPUTot=64 CPULoad=3.10
   Gres=gpu:a100:4(S:0-1)
   GresDrain=N/A
   GresUsed=gpu:a100:3(IDX:0,2-3)
   NodeAddr=n1 NodeHostName=n1 Version=24.05.4
   RealMemory=515000 AllocMem=64000 FreeMem=400000 Sockets=2 Boards=1
   State=MIXED+PLANNED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu

NodeName=n2 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:a100:2(S:0),gpu:h100:1
   GresUsed=gpu:a100:0(IDX:N/A),gpu:h100:0(IDX:N/A),shard:0
   State=IDLE

NodeName=n3 Arch=x86_64
   Gres=gpu:a100:4
   GresUsed=gpu:a100:0(IDX:N/A)
   State=IDLE+DRAIN
   Reason=kernel panic with State=IDLE [root@2026-01-01T00:00:00]

NodeName=n4 Arch=x86_64
   Gres=gpu:a100:4
   GresUsed=gpu:a100:0(IDX:N/A)
   State=DOWN*

NodeName=login Arch=x86_64
   Gres=(null)
   State=IDLE
"""
KINDS = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB"}


def test_the_gpus_that_no_job_holds_are_free() -> None:
    found = slurm_devices(NODES, KINDS)
    assert [row.full_name for row in found] == ["n1/a100:0", "n2/a100:0", "n2/a100:1", "n2/h100:0"]
    assert [row.kind for row in found][-1] == "H100-SXM-80GB"
    assert all(row.memory_bytes == 79 * 2**30 for row in found)


def test_a_line_for_each_node_is_read_alike() -> None:
    lines = "\n".join(" ".join(part.split()) for part in NODES.split("\n\n"))
    assert slurm_devices(lines, KINDS) == slurm_devices(NODES, KINDS)


def test_a_gpu_without_a_type_is_of_the_kind_that_is_given() -> None:
    text = "NodeName=n1\n Gres=gpu:2\n GresUsed=gpu:(null):1(IDX:0)\n State=IDLE"
    (row,) = slurm_devices(text, {"": "L4"})
    assert (row.full_name, row.kind) == ("n1/gpu:0", "L4")


def test_what_is_missing_is_told() -> None:
    with pytest.raises(InputError, match="scontrol show node -d"):
        slurm_devices("NodeName=n1 Gres=gpu:a100:4 State=IDLE", KINDS)
    with pytest.raises(InputError, match=r"'a100' is unknown\. Did you mean A100"):
        slurm_devices(NODES)
    for text in ("JobId=7 State=RUNNING", "", "slurm_load_node error: Unable to contact\n"):
        with pytest.raises(InputError, match="has no NodeName"):
            slurm_devices(text)
    with pytest.raises(InputError, match="NODE/TYPE:NUMBER"):
        batch_script("job", ["n1"], ["train.py"])
    with pytest.raises(InputError, match="a command"):
        batch_script("job", ["n1/a100:0"], [])


def test_nodes_that_are_alike_are_one_component() -> None:
    script = batch_script(
        "job", ["n1/a100:0", "n2/a100:1"], ["train.py", "a b"], options=["--time=1:00:00"]
    )
    assert script.splitlines()[:8] == [
        "#!/bin/bash",
        "#SBATCH --job-name=job",
        "#SBATCH --nodes=2",
        "#SBATCH --nodelist=n1,n2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:a100:1",
        "#SBATCH --time=1:00:00",
        "",
    ]
    assert "hetjob" not in script


def test_nodes_that_differ_are_components_of_one_job() -> None:
    devices = ["n1/a100:0", "n2/a100:0", "n2/a100:1", "n2/h100:0"]
    script = batch_script("job", devices, ["train.py"])
    assert script.count("#SBATCH hetjob") == 1
    assert "#SBATCH --gres=gpu:a100:2,gpu:h100:1\n" in script
    assert "srun --het-group=0-1 bash -c" in script
    untyped = batch_script("job", ["n1/gpu:0", "n1/gpu:1"], ["train.py"])
    assert "#SBATCH --gres=gpu:2\n" in untyped


def test_the_script_starts_torchrun_on_every_node(tmp_path) -> None:
    """With an `srun` that runs its command once per node, as a job of two nodes would."""
    (tmp_path / "srun").write_text('#!/bin/bash\nfor i in 0 1; do SLURM_PROCID=$i "${@}"; done\n')
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s|" "$@"; echo\n')
    for name in ("srun", "torchrun"):
        (tmp_path / name).chmod(0o755)
    script = batch_script("job", ["n1/a100:0", "n2/a100:0"], ["train.py", "it's a b"])
    said = subprocess.run(
        ["bash"],
        input=script,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    ).stdout.splitlines()
    assert [line.split("|")[1] for line in said] == ["--node-rank=0", "--node-rank=1"]
    assert said[0].split("|")[-3:] == ["train.py", "it's a b", ""]
    assert "--nnodes=2|" in said[0]
    assert "--master-addr=n1|" in said[1]
