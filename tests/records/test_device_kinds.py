"""The table of device kinds: what stands in it, what a user's file may add, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from baechi import Calibration, InputError, Link
from baechi.records import device_kinds
from baechi.records.cluster import HANDOVER_NS
from baechi.records.device_kinds import OP_CLASSES, DeviceKind, Efficiency, Kernel, find, known

ROW = """
[[kind]]
name = "box"
memory = "4GiB"
context = "1GiB"
bytes_per_s = 1e9
launch_ns = 100
flops_per_s = { fp32 = 2e12, fp16 = 8e12 }
source = "a sheet"
"""
SHARE = """
[[efficiency]]
op_class = "matmul"
dtype = "any"
compute = 0.5
memory = 0.25
source = "a guess"
"""
LINK = Link(1000, 10**10)


@pytest.fixture
def table(tmp_path):
    def write(text):
        path = tmp_path / "kinds.toml"
        path.write_text(text)
        return path

    return write


def test_every_kind_that_is_promised_is_there_with_a_source():
    names = {kind.name for kind in known()}
    promised = """H200 H100-SXM-80GB H100-PCIe-80GB A100-SXM-40GB A100-SXM-80GB A100-PCIe-40GB
    A100-PCIe-80GB L40S L4 A10G V100-SXM-16GB V100-SXM-32GB T4 RTX-4090 RTX-3090 RTX-2080
    RTX-2080-Ti MI300X cpu"""
    assert names >= set(promised.split())
    for kind in known():
        assert len(kind.source) > 10
        assert kind.peak("fp16") >= kind.peak("fp32") >= kind.flops_per_s.get("fp64", 0)
        assert kind.peak("fp8") >= kind.peak("fp32")


def test_an_h200_has_as_much_memory_as_one_showed():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    rows = (results / "2026-11-27-gpu-check-nvidia-h200.jsonl").read_text().splitlines()
    gpu = next(row["gpus"][0] for row in map(json.loads, rows) if "gpus" in row)
    shown = gpu["total_bytes"]
    assert 0.999 * shown <= find(gpu["name"]).memory_bytes <= shown


def test_every_kind_has_an_efficiency_for_every_class():
    for kind in known():
        for op_class in OP_CLASSES:
            share = kind.efficiency(op_class, "bf16")
            assert share.source
            if kind.name != "cpu":
                assert share.compute <= 1
                assert share.memory <= 1


def test_no_two_kinds_answer_to_one_name():
    plain = [re.sub(r"[^a-z0-9]", "", n.lower()) for k in known() for n in (k.name, *k.aliases)]
    shown = {(kind.name, name) for kind in known() for name in (kind.name, *kind.aliases)}
    owners = {}
    for owner, name in shown:
        assert owners.setdefault(re.sub(r"[^a-z0-9]", "", name.lower()), owner) == owner
    assert len(owners) == len(set(plain))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
        ("h100-sxm-80gb", "H100-SXM-80GB"),
        ("cpu", "cpu"),
    ],
)
def test_what_torch_prints_finds_its_kind(name, kind):
    assert find(name).name == kind


def test_an_unknown_kind_is_refused_with_those_that_are_near():
    with pytest.raises(InputError, match="Did you mean A100-PCIe-40GB or A100-PCIe-80GB or A100"):
        find("A100")
    with pytest.raises(InputError, match=r"Did you mean .*RTX-4090"):
        find("RTX 4091")
    with pytest.raises(InputError, match=r"'abacus' is unknown. The kinds are H200, H100"):
        find("abacus")


def test_peaks_are_dense_and_fall_back_to_fp32():
    h100, t4 = find("H100-SXM-80GB"), find("T4")
    assert h100.peak("bf16") == 989.4e12
    assert t4.peak("bf16") == t4.peak("fp32") == 8.1e12
    assert t4.peak("fp16") == 65e12


def test_the_time_of_a_kernel_is_the_larger_bound_by_hand(table):
    kind = find("box", table(ROW + SHARE))
    # 4e9 FLOPs at half of 8e12 per s: 1 ms. 1e6 bytes at a quarter of 1e9 per s: 4 ms.
    assert kind.kernel_ns(Kernel("matmul", "fp16", 4 * 10**9, 0)) == 1e6
    assert kind.kernel_ns(Kernel("matmul", "fp16", 4 * 10**9, 10**6)) == 4e6
    assert kind.run_ns([Kernel("matmul", "fp32", 10**9, 8)] * 2) == 2 * 1_000_100
    assert kind.run_ns([]) == 0


def test_a_users_row_goes_before_ours(table):
    file = table(ROW.replace('"box"', '"T4"') + SHARE)
    assert find("T4", file).bytes_per_s == 1e9
    assert find("T4", file).efficiency("matmul", "fp16").memory == 0.25
    assert find("T4", file).efficiency("gather", "fp16") == find("T4").efficiency("gather", "fp16")
    assert sum(kind.name == "T4" for kind in known(file)) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('source = "a sheet"', "", "device kind 'box' in .* has no source; a row needs name"),
        ('source = "a sheet"', 'source = " "', "device kind 'box' has no source"),
        ("fp32 = 2e12", "fp32 = 0", "the fp32 peak of device kind 'box' is 0; it must be a pos"),
        ("fp32 = 2e12", "fp32 = -1.0", "the fp32 peak of device kind 'box' is -1.0"),
        ("fp32 = 2e12", 'fp32 = "2e12"', "the fp32 peak of device kind 'box' is '2e12'"),
        ("fp32 = 2e12", "fp32 = inf", "the fp32 peak of device kind 'box' is inf"),
        ("fp32 = 2e12", "fp64 = 2e12", "flops_per_s of device kind 'box' has no fp32 peak"),
        ("fp16 = 8e12", "half = 8e12", "flops_per_s of device kind 'box' is 'half'"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0.0", "bytes_per_s of device kind 'box' is 0.0"),
        ("bytes_per_s = 1e9", "bytes_per_s = true", "bytes_per_s of device kind 'box' is True"),
        ("launch_ns = 100", "launch_ns = -1", "launch_ns of device kind 'box' is -1"),
        ("launch_ns = 100", "launch_ns = 1.5", "launch_ns of device kind 'box' is 1.5"),
        ("launch_ns = 100", "", "has no launch_ns"),
        ('memory = "4GiB"', 'memory = "much"', "memory of device kind 'box' 'much' cannot be"),
        ('memory = "4GiB"', 'memory = "1GiB"', "memory of device kind 'box' is 1073741824 bytes"),
        ('name = "box"', "name = 7", "name of device kind 7 in .* is 7; it must be a non-empty"),
        ('name = "box"', 'name = "box"\nwatts = 9', "has 'watts'; a row may have name, memory"),
        ('name = "box"', 'name = "box"\naliases = "b"', "aliases of device kind 'box' are 'b'"),
        ("[[kind]]", "[kind]", "has no lists of tables"),
        ("[[kind]]", "[[devices]]", "has 'devices'; it may have"),
        ("[[kind]]", "[[kind", "are no TOML"),
    ],
)
def test_a_wrong_row_is_refused_with_its_name(table, old, new, said):
    assert old in ROW
    with pytest.raises(InputError, match=said):
        known(table(ROW.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("compute = 0.5", "compute = 0", "compute of the efficiency of 'matmul' in 'any' is 0"),
        ("memory = 0.25", "memory = nan", "memory of the efficiency of 'matmul' in 'any' is nan"),
        ('source = "a guess"', "", "efficiency 'matmul' in .* has no source"),
        ('source = "a guess"', 'source = ""', "source of the efficiency of 'matmul'"),
        ('"matmul"', '"mathmul"', "op_class of the efficiency of 'mathmul' .* is 'mathmul'"),
        ('"any"', '"any"\nkind = "bix"', "'matmul' in .* is for kind 'bix', which is in no table"),
        ('"any"', '"fp4"', "dtype of the efficiency of 'matmul' in 'fp4' is 'fp4'"),
    ],
)
def test_a_wrong_efficiency_is_refused(table, old, new, said):
    with pytest.raises(InputError, match=said):
        known(table(ROW + SHARE.replace(old, new)))


def test_a_kind_that_stands_twice_is_refused(table):
    with pytest.raises(InputError, match=r"device kind 'box' is in .* twice"):
        known(table(ROW + ROW))


def test_an_efficiency_for_one_kind_goes_before_that_for_all(table):
    mine = SHARE.replace("0.25", "0.9") + 'kind = "box"\n'
    file = table(ROW + SHARE + mine)
    assert find("box", file).efficiency("matmul", "fp16").memory == 0.9
    assert find("T4", file).efficiency("matmul", "fp16").memory == 0.25


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the device kinds in .*none\.toml: No such"):
        known(tmp_path / "none.toml")


def test_a_cluster_of_a_kind_has_its_memory_less_its_context():
    cluster = device_kinds.cluster("8xH100-SXM-80GB", LINK)
    kind = find("H100-SXM-80GB")
    assert [device.name for device in cluster.devices] == [f"cuda:{i}" for i in range(8)]
    assert {d.memory_bytes for d in cluster.devices} == {kind.memory_bytes - kind.context_bytes}
    assert {device.kind for device in cluster.devices} == {"H100-SXM-80GB"}
    assert cluster.uniform_link == replace(LINK, overhead_ns=HANDOVER_NS)
    slow = replace(LINK, overhead_ns=77)
    assert device_kinds.cluster("2xT4", slow).uniform_link == slow
    cpus = device_kinds.cluster("2xcpu", LINK)
    assert cpus.devices[1].name == "cpu:1"
    assert cpus.uniform_link == LINK


@pytest.mark.parametrize("text", ["H200", "x", "2x", "-1xT4", "0xT4", "2 T4"])
def test_a_cluster_that_cannot_be_read_is_refused(text):
    with pytest.raises(InputError, match=r"cluster|device kind"):
        device_kinds.cluster(text, LINK)


def test_a_calibration_replaces_what_it_knows_and_nothing_else():
    kind = find("T4")
    fitted = Efficiency("matmul", "fp16", 0.33, 0.44, "measured")
    other = kind.calibrated(Calibration("T4", (fitted,), 777))
    assert other.efficiency("matmul", "fp16") == fitted
    assert other.efficiency("matmul", "fp32") == kind.efficiency("matmul", "fp32")
    assert other.launch_ns == 777
    with pytest.raises(InputError, match="is for device kind 'L4', not 'T4'"):
        kind.calibrated(Calibration("L4", (fitted,), 777))


def test_a_kind_without_an_efficiency_says_what_to_add():
    kind = DeviceKind("bare", 10, 1, 1.0, 1, {"fp32": 1.0}, "a sheet")
    with pytest.raises(InputError, match="no efficiency for gather in fp32; add an"):
        kind.kernel_ns(Kernel("gather", "fp32", 0, 1))
