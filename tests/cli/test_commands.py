import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import baechi
from baechi import (
    Calibration,
    Cluster,
    Constraints,
    Device,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    Profile,
    Schedule,
    Tensor,
    Topology,
)
from baechi.cli.commands import app
from baechi.cli.console import load_model
from baechi.placers.searching import PLACERS
from baechi.records.optimizer_state import OPTIMIZERS
from baechi.traced.traced_model import Traced

COMMANDS = (
    *("trace", "profile", "estimate", "calibrate", "solve", "simulate", "report", "probe", "demo"),
    *("serve", "cluster", "run"),
)
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return (self.left(x) + self.right(x)).relu() * scale

def tiny():
    return Net(), (torch.ones(4, 8),), {"scale": 2.0}

def short():
    return Net(), (torch.ones(4, 8),)

def fails():
    raise RuntimeError("the model's own error")

def wrong():
    return Net()

def listed():
    return Net(), [torch.ones(4, 8)]

number = 7

def needs(x):
    return x
"""
GRAPH = OpGraph(
    tuple(Op(f"op{i}", 1000, persistent_bytes=60) for i in range(4)),
    (Tensor(0, (1, 2), 8), Tensor(1, (3,), 8), Tensor(2, (3,), 8)),
)
CLUSTER = Cluster.uniform(2, 200, Link(10, 10**9))


def run(*words, code=0):
    """The output of a command, stdout and stderr, after checking its exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    unexpected = None if isinstance(result.exception, SystemExit) else result.exception
    assert unexpected is None, unexpected
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    baechi.dump(GRAPH, "a.graph.json")
    baechi.dump(CLUSTER, "cluster.json")
    baechi.dump(baechi.solve(GRAPH, CLUSTER), "a.placement.json")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "lacking.py").write_text("import none_such\n")
    (tmp_path / "jobs.csv").write_text("job_id,num_gpu,submit_time,duration\n1,1,0,10\n")
    graph = '{"format": "baechi", "type": "OpGraph", "version": 1, "value": {"ops": [%s]}}'
    (tmp_path / "digits.json").write_text(graph % f'{{"name": "a", "time_ns": {"9" * 5000}}}')
    (tmp_path / "fast.json").write_text(
        '{"format": "baechi", "type": "Cluster", "version": 1, "value": {"devices": [{"name": "a", '
        f'"memory_bytes": 1, "speed": {"9" * 400}}}], "links": [[null]]}}}}'
    )
    (tmp_path / "half.json").write_text(graph % '{"name": "\\ud800", "time_ns": 1}')
    before = (list(sys.path), dict(sys.modules))
    yield tmp_path
    sys.path[:] = before[0]
    for name in set(sys.modules) - set(before[1]):
        if name in ("model", "broken", "lacking", "package", "package.inner"):
            del sys.modules[name]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command):
    text = run(command, "--help")
    assert f"baechi {command}" in text
    assert "or example" in text


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", [("estimate", "--kind", "T4"), ("profile", "--threads", 1)])
def test_costs_of_micro_batches_have_the_additions_of_their_gradients(words):
    command, *options = words
    for n in (1, 8):
        run(command, "model.py:tiny", *options, "--microbatches", n, "-o", f"{n}.json")
    one, eight = (baechi.load(f"{n}.json").costs for n in (1, 8))
    assert sum(cost.backward_ns for cost in one) < sum(cost.backward_ns for cost in eight)
    run(command, "model.py:tiny", *options, "--inference", "--microbatches", 8, "-o", "i.json")
    trained = [cost.parameter_bytes and cost.backward_ns for cost in baechi.load("i.json").costs]
    assert trained == [cost.parameter_bytes and cost.backward_ns for cost in one]


@pytest.mark.parametrize(("command", "names"), [("solve", tuple(PLACERS)), ("profile", OPTIMIZERS)])
def test_help_names_every_choice(command, names):
    words = set(re.findall(r"[\w-]+", run(command, "--help")))
    assert set(names) <= words


def test_help_lists_the_words_of_the_api():
    text = run("--help")
    assert all(command in text for command in COMMANDS)
    assert "baechi solve gpt2.graph.json" in text


def test_version():
    assert run("--version") == f"baechi {baechi.__version__}\n"


def test_help_loads_no_torch():
    code = (
        "import sys, baechi.cli.commands as m\n"
        "try: m.app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'plotly', 'numpy', 'networkx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_whole_way_from_a_model_to_a_report(files):
    pytest.importorskip("plotly")
    text = run("trace", "model.py:tiny", "-o", "t.trace.json")
    assert "Net: " in text
    assert "wrote t.trace.json" in text
    assert baechi.load("t.trace.json", Traced).name == "Net"

    text = run("profile", "model.py:tiny", "--threads", 1, "-o", "t.profile.json",
               "--graph", "t.graph.json", "--trace", "t2.trace.json")  # fmt: skip
    assert "forward" in text
    graph = baechi.load("t.graph.json", OpGraph)
    profile = baechi.load("t.profile.json", Profile)
    assert profile.traced_digest == baechi.load("t2.trace.json", Traced).digest
    assert any(op.name.startswith("backward:") for op in graph.ops)
    parameter_bytes = 2 * (64 + 8) * 4
    assert (
        sum(op.persistent_bytes for op in graph.ops) == 4 * parameter_bytes + 4 * 4
    )  # and step counters

    text = run("probe", "cpu:0=1MiB", "cpu:1=2MiB", "-o", "two.json")
    assert "cpu:0 to cpu:1: no copy, after" in text
    assert "of the receiver's time" in text
    cluster = baechi.load("two.json", Cluster)
    assert [device.memory_bytes for device in cluster.devices] == [2**20, 2**21]

    text = run("solve", "t.graph.json", "two.json", "--placer", "m-etf", "-o", "t.placement.json")
    assert "One step takes" in text
    placement = baechi.load("t.placement.json", Placement)
    assert placement == baechi.solve(graph, cluster, placer="m-etf")

    run("simulate", "t.graph.json", "two.json", "t.placement.json", "-o", "t.schedule.json")
    schedule = baechi.load("t.schedule.json", Schedule)
    assert schedule == baechi.simulate(graph, cluster, placement)

    text = run("report", "t.graph.json", "two.json", "t.placement.json", "-o", "plan.html",
               "--trace", "plan.json", "--schedule", "t.schedule.json",
               "--traced", "t.trace.json")  # fmt: skip
    assert "wrote plan.html; open it in a browser" in text
    assert "Net on 2 devices" in (files / "plan.html").read_text()
    assert json.loads((files / "plan.json").read_text())["traceEvents"]


def test_the_way_without_the_device(files):
    text = run("estimate", "model.py:tiny", "--kind", "H100-SXM-80GB", "-o", "t.profile.json",
               "--graph", "t.graph.json", "--trace", "t.trace.json")  # fmt: skip
    assert "computed for H100-SXM-80GB" in text
    profile = baechi.load("t.profile.json", Profile)
    assert profile.source == "computed"
    assert profile.traced_digest == baechi.load("t.trace.json", Traced).digest
    graph = baechi.load("t.graph.json", OpGraph)
    assert any(op.name.startswith("backward:") for op in graph.ops)
    run("solve", "t.graph.json", "2xH100-SXM-80GB", "--latency-us", 5, "--overhead-us", 2,
        "-o", "p.json", "--save-cluster", "c.json")  # fmt: skip
    cluster = baechi.load("c.json", Cluster)
    assert [device.kind for device in cluster.devices] == ["H100-SXM-80GB"] * 2
    assert cluster.uniform_link == Link(5000, 12 * 10**9, overhead_ns=2000)
    run("estimate", "model.py:short", "--kind", "T4", "--inference", "--graph", "i.graph.json")
    graph = baechi.load("i.graph.json", OpGraph)
    assert not any(op.name.startswith("backward:") for op in graph.ops)
    assert (files / "i.graph.json").exists()


@pytest.mark.usefixtures("files")
def test_calibrating_with_a_profile():
    run("profile", "model.py:tiny", "--threads", 1, "-o", "t.profile.json")
    text = run("calibrate", "model.py:tiny=t.profile.json", "-o", "c.json")
    assert "median before" in text
    assert "a kernel takes at least" in text
    fitted = baechi.load("c.json", Calibration)
    assert fitted.kind == "cpu"
    text = run("estimate", "model.py:short", "--kind", "cpu", "--calibration", "c.json")
    assert "cpu calibrated" in text
    text = run("estimate", "model.py:short", "--kind", "T4", "--calibration", "c.json", code=2)
    assert "the calibration is for device kind 'cpu', not 'T4'" in text


def test_the_kinds_are_listed(files):
    (files / "more.toml").write_text(
        '[[kind]]\nname = "box"\nmemory = "4GiB"\ncontext = "1GiB"\nbytes_per_s = 1e9\n'
        'launch_ns = 100\nflops_per_s = { fp32 = 2e12 }\nsource = "a sheet"\n'
    )
    text = run("estimate", "--list", "--kinds", "more.toml")
    assert "box" in text
    assert "MI300X" in text
    h100 = next(line.split() for line in text.splitlines() if line.startswith("H100-SXM-80GB "))
    assert h100[1:] == ["80", "3350", "66.9", "66.9", "495", "989", "989", "1979", "1979", "2.5"]
    assert "box: a sheet" in text


def test_inference_and_optimizers(files):
    run("profile", "model.py:short", "--inference", "--graph", "i.graph.json")
    graph = baechi.load("i.graph.json", OpGraph)
    assert not any(op.name.startswith("backward:") for op in graph.ops)
    assert sum(op.persistent_bytes for op in graph.ops) == 2 * (64 + 8) * 4
    run("profile", "model.py:short", "--optimizer", "sgd", "--graph", "s.graph.json")
    graph = baechi.load("s.graph.json", OpGraph)
    assert sum(op.persistent_bytes for op in graph.ops) == 2 * 2 * (64 + 8) * 4
    text = run("profile", "model.py:short", "--optimizer", "x", "--graph", "x.json", code=2)
    assert "optimizer 'x' is unknown" in text
    assert not (files / "x.json").exists()


def test_what_was_measured_is_kept_listed_and_forgotten(files):
    assert "nothing has been measured yet" in run("profile", "--list", "--cache", "a.sqlite")
    assert not (files / "a.sqlite").exists()
    words = ("profile", "model.py:tiny", "--threads", 1, "--cache", "a.sqlite")
    run(*words, "-o", "one.profile.json")
    run(*words, "-o", "two.profile.json")
    one, two = (baechi.load(f"{name}.profile.json", Profile) for name in ("one", "two"))
    assert one == two  # two measurements never are
    text = run("profile", "--list", "--cache", "a.sqlite")
    count = int(text.split("a.sqlite: ")[1].split(" operators")[0])
    assert count > 0
    assert "hardware" in text
    assert f"forgot {count} operators" in run("profile", "--clear", "--cache", "a.sqlite")
    assert "a.sqlite: 0 operators" in run("profile", "--list", "--cache", "a.sqlite")
    run("profile", "model.py:tiny", "--threads", 1, "--no-cache")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("profile",), "name a model"),
        (("profile", "--list", "--clear"), "alone"),
        (("profile", "model.py:tiny", "--list"), "alone"),
        (("profile", "model.py:tiny", "--no-cache", "--cache", "a.sqlite"), "not both"),
        (("profile", "model.py:tiny", "--cache", "model.py"), "no store of profiles"),
    ],
)
def test_a_store_is_asked_for_in_one_way(files, words, said):
    assert said in run(*words, code=2)
    assert (files / "model.py").read_text() == MODEL


@pytest.mark.usefixtures("files")
def test_solve_on_a_uniform_cluster():
    run("solve", "a.graph.json", "--devices", 3, "--memory", "150", "--latency-us", 0.01,
        "--gbytes-per-s", 1, "-o", "p.json", "--save-cluster", "c.json")  # fmt: skip
    assert baechi.load("c.json") == Cluster.uniform(3, 150, Link(10, 10**9))
    assert baechi.load("p.json") == baechi.solve(GRAPH, baechi.load("c.json"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("effort", ["fast", "thorough"])
def test_solve_takes_an_effort(effort):
    run("solve", "a.graph.json", "cluster.json", "--effort", effort, "-o", "p.json")
    assert baechi.load("p.json") == baechi.solve(GRAPH, CLUSTER, effort=effort)
    labels = {label for label in baechi.load("p.json").stats if "/" in label}
    assert ("peft/fine" in labels) == (effort == "thorough")


@pytest.mark.usefixtures("files")
def test_solve_and_report_of_micro_batches():
    text = run("solve", "a.graph.json", "cluster.json", "--microbatches", 3, "-o", "p.json")
    assert "One step of 3 micro-batches" in text
    assert baechi.load("p.json") == baechi.solve(GRAPH, CLUSTER, microbatches=3)
    run("simulate", "a.graph.json", "cluster.json", "p.json", "-o", "s.json")
    run("report", "a.graph.json", "cluster.json", "p.json", "--schedule", "s.json",
        "--trace", "t.json")  # fmt: skip
    assert '"forward of batch 2"' in Path("t.json").read_text()
    text = run("solve", "a.graph.json", "cluster.json", "--microbatches", "auto", code=2)
    assert "a graph of each size" in text


@pytest.mark.usefixtures("files")
def test_solve_and_report_for_throughput():
    wish = ("--objective", "throughput", "--effort", "fast")
    text = run("solve", "a.graph.json", "cluster.json", *wish, "-o", "p.json")
    assert "one can end every" in text
    assert "(the period, " in text
    expected = baechi.solve(GRAPH, CLUSTER, effort="fast", objective="throughput")
    assert baechi.load("p.json") == expected


@pytest.mark.usefixtures("files")
def test_solve_and_simulate_under_constraints():
    baechi.dump(Constraints({"op0": "device2"}, max_devices=3), "rules.json")
    run("solve", "a.graph.json", "--devices", 4, "--memory", "150", "--constraints", "rules.json",
        "--max-devices", 2, "--pin", "op3=device1", "-o", "p.json", "--save-cluster",
        "c.json")  # fmt: skip
    placement = baechi.load("p.json")
    assert placement.devices[::3] == (2, 1)
    assert set(placement.devices) == {1, 2}
    run("simulate", "a.graph.json", "c.json", "p.json", "--constraints", "rules.json")
    text = run("simulate", "a.graph.json", "c.json", "p.json", "--pin", "op0=device0", code=2)
    assert "op 'op0' is on 'device2', but the constraints pin op 'op0' to 'device0'" in text


@pytest.mark.usefixtures("files")
def test_what_a_cluster_manager_says_is_free_is_a_cluster():
    """A file that `baechi free` writes: nodes, and a link for each level."""
    site = Topology.grid(1, 2, 2, 200, node_link=Link(10, 10**9), switch_link=Link(90, 10**8))
    baechi.dump(site, "free.json")
    run("solve", "a.graph.json", "free.json", "-o", "p.json")
    assert baechi.load("p.json") == baechi.solve(GRAPH, site.cluster())
    assert "one step takes" in run("simulate", "a.graph.json", "free.json", "p.json")
    assert "node1/1" in run("report", "a.graph.json", "free.json", "p.json")


def test_report_without_files_prints_text(files):
    before = os.listdir(files)
    text = run("report", "a.graph.json", "cluster.json", "a.placement.json")
    assert "The fullest device is" in text
    assert os.listdir(files) == before


@pytest.mark.usefixtures("files")
def test_simulate_prints_what_it_found():
    text = run("simulate", "a.graph.json", "cluster.json", "a.placement.json")
    schedule = baechi.simulate(GRAPH, CLUSTER, baechi.load("a.placement.json"))
    assert f"one step takes {schedule.makespan_ns / 1000:.2f} us" in text
    assert f"device0: at most {schedule.peak_bytes[0]} B of 200 B" in text


def test_what_does_not_fit_leaves_with_code_3(files):
    text = run("solve", "a.graph.json", "--devices", 2, "--memory", "100", "-o", "p.json", code=3)
    assert text.startswith("not placed: ")
    assert "more to device" in text
    assert "Traceback" not in text
    assert not (files / "p.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate"], "give a model and --kind, or --list for the kinds"),
        (["estimate", "model.py:tiny"], "give a model and --kind"),
        (["estimate", "model.py:tiny", "--kind", "H100"], "Did you mean H100-PCIe-80GB or H100-SX"),
        (["estimate", "t.json", "--kind", "T4"], "t.json is a file, and a trace in a file has no"),
        (["estimate", "--list", "--kinds", "none.toml"], "none.toml: No such file"),
        (["calibrate", "model.py:tiny"], "'model.py:tiny' names no profile; write MODEL=PROFILE"),
        (["solve", "a.graph.json", "4xH100"], "device kind 'H100' is unknown"),
        (["solve", "a.graph.json", "0xT4"], "the count in cluster '0xT4' is 0"),
        (["solve", "a.graph.json", "99999999xT4"], "must be an integer from 1 to 4096"),
        (["solve", "a.graph.json", "--devices", "99999999"], "an integer from 1 to 4096"),
        (["solve", "none.json", "cluster.json"], "cannot read none.json: there is no such file"),
        (["solve", "model.py", "cluster.json"], "model.py: this is not JSON"),
        (["solve", "cluster.json", "cluster.json"], "holds type Cluster, but OpGraph is wanted"),
        (["solve", "a.graph.json"], "there is no cluster; give a file, a count and a kind, or"),
        (["solve", "a.graph.json", "cluster.json", "--devices", "2"], "and not both"),
        (
            ["solve", "a.graph.json", "cluster.json", "--memory", "1GiB"],
            "--memory means nothing",
        ),
        (["solve", "a.graph.json", "2xcpu", "--memory", "1GiB"], "--memory means nothing"),
        (
            ["solve", "a.graph.json", "cluster.json", "--latency-us", "5"],
            "--latency-us means nothing",
        ),
        (["solve", "a.graph.json", "fast.json"], "devices[0].speed is"),
        (["solve", "a.graph.json", "cluster.json", "--placer", "best"], "placer 'best' is unknown"),
        (
            ["solve", "a.graph.json", "cluster.json", "--effort", "much"],
            "effort is 'much'; it must",
        ),
        (["solve", "a.graph.json", "--devices", "2", "--memory", "10 gigs"], "'10 gigs' cannot be"),
        (["solve", "a.graph.json", "--devices", "2", "--memory", "9" * 5000], "cannot be read"),
        (["solve", "a.graph.json", "cluster.json", "--pin", "op1"], "'op1' names no device; write"),
        (
            ["solve", "a.graph.json", "cluster.json", "--pin", "op1=x", "--pin", "op1=y"],
            "'op1' is pinned to 'x' and to 'y'",
        ),
        (["solve", "a.graph.json", "cluster.json", "--max-devices", "0"], "max_devices is 0"),
        (["probe", "cpu:0=much"], "'much' cannot be read"),
        (["probe", "cpu:0=1GiB", "cpu:1"], "device 'cpu:1' has no limit; write cpu:1=1GiB"),
        (["probe", "cpu:0=1GiB", "cpu:0=2GiB"], "device 'cpu:0' is named twice"),
        (["trace", "model.py"], "write file.py:function or package.module:function"),
        (["trace", "none.py:f"], "there is no file 'none.py'"),
        (["trace", "no.such.module:f"], "there is no module 'no'"),
        (["trace", "model.py:other"], "model.py has no 'other'; it has "),
        (["trace", "model.py:wrong"], "returned a value of type Net; it must return (model, args)"),
        (["trace", "model.py:listed"], "returned list args and dict kwargs"),
        (["trace", "model.py:number"], "is 7, no function"),
        (["trace", "model.py:needs"], "cannot be called without arguments: missing"),
        (["trace", "model.py:short", "-o", "."], "cannot write .: it is a folder"),
        (["profile", "model.py:short", "--optimizer", "best"], "optimizer 'best' is unknown"),
        (["cluster", "--trace", "no.csv", "-o", "x"], "cannot read trace no.csv: No such file or"),
        (["trace", "model.py:short", "-o", "no/such/folder/t.json"], "cannot write no/such"),
        (["trace", "broken.py:f"], "broken.py raised SyntaxError: "),
        (
            ["trace", "lacking.py:f"],
            "lacking.py raised ModuleNotFoundError: No module named",
        ),
        (["profile", "model.py:short", "--optimizer", ""], "optimizer '' is unknown"),
        (["profile", "model.py:short", "--cache", "."], ". is a folder; name a file in it"),
        (["solve", "digits.json", "--devices", "2"], "an integer of thousands of digits"),
        (["solve", "half.json", "--devices", "2"], "is no Unicode text"),
        (["cluster", "--trace", "jobs.csv", "-o", "x", "--nodes", "9" * 9], "give 1000000 at most"),
        (["cluster", "--trace", "jobs.csv", "-o", "x", "--slice", "0"], "has 0 thousandths"),
        (
            ["cluster", "--trace", "jobs.csv", "-o", "x", "--graphs", "no"],
            "there is no folder 'no'",
        ),
        (
            ["cluster", "--trace", "jobs.csv", "-o", "x", "--graphs", "."],
            "the trace names no models",
        ),
        (["cluster", "--trace", "jobs.csv", "-o", "jobs.csv/x"], "jobs.csv/x: Not a directory"),
        (["serve"], "there is no cluster; give a cluster file"),
        (["serve", "--ledger", "no.sqlite"], "there is no ledger no.sqlite yet, and no cluster"),
        (["serve", "a.graph.json"], "holds type OpGraph, but Cluster or Topology is wanted"),
    ],
)
@pytest.mark.usefixtures("files")
def test_bad_input_is_one_message_and_code_2(words, said):
    if words[0] == "serve":
        pytest.importorskip("uvicorn")
    text = run(*words, code=2)
    assert text.startswith("error: ")
    assert said in text
    assert "Traceback" not in text
    assert text.count("\n") == 1


@pytest.mark.usefixtures("files")
def test_simulate_says_what_does_not_fit():
    baechi.dump(Cluster.uniform(2, 0, Link(1, 10**9)), "none.cluster.json")
    text = run("simulate", "a.graph.json", "none.cluster.json", "a.placement.json")
    assert "this placement does not fit: device0 lacks " in text
    text = run("report", "a.graph.json", "none.cluster.json", "a.placement.json")
    assert "(over), which is " in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.usefixtures("files")
def test_a_full_disk_is_one_line():
    words = [sys.executable, "-m", "baechi", "solve", "a.graph.json", "cluster.json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: output: No space left on device.\n"


@pytest.mark.usefixtures("files")
def test_a_terminal_that_is_not_utf_8_shows_codes():
    baechi.dump(Cluster.connected([Device("gpü", 2**40)], Link(1, 1)), "one.cluster.json")
    words = [sys.executable, "-m", "baechi", "solve", "a.graph.json", "one.cluster.json"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert r"The fullest device is gp\xfc" in result.stdout


@pytest.mark.usefixtures("files")
def test_a_result_goes_into_a_pipe():
    words = [sys.executable, "-m", "baechi", "simulate", "a.graph.json", "cluster.json"]
    words += ["a.placement.json", "-o", "/dev/stdout"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert '"type": "Schedule"' in result.stdout


@pytest.mark.parametrize("words", ["probe cpu:0", "profile json:loads", "trace json:loads"])
def test_without_torch_a_command_says_that_it_needs_it(words, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "baechi"]:
        if name in ("baechi.probing.cluster_probe", "baechi.tracing.ladder"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("baechi.trace", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    model = (None, (), {})
    monkeypatch.setattr("baechi.cli.console.load_model", lambda _: model)
    text = run(*words.split(), code=2)
    assert text == (
        f"error: `baechi {words.split()[0]}` needs torch 2.11 or later, which is not here: "
        "pip install 'baechi[torch]'.\n"
    )


def test_an_endless_rate_is_refused():
    text = run("solve", "a.graph.json", "--devices", "2", "--gbytes-per-s", "inf", code=2)
    assert "--gbytes-per-s" in text


@pytest.mark.usefixtures("files")
def test_the_message_goes_to_stderr():
    result = CliRunner().invoke(app, ["estimate"])
    assert result.stdout == ""
    assert "give a model and --kind" in result.stderr


@pytest.mark.usefixtures("files")
def test_a_changed_graph_is_refused():
    baechi.dump(OpGraph(GRAPH.ops), "b.graph.json")
    text = run("report", "b.graph.json", "cluster.json", "a.placement.json", code=2)
    assert "placement" in text


@pytest.mark.usefixtures("files")
def test_an_error_inside_the_model_names_its_line():
    text = run("trace", "model.py:fails", code=2)
    assert "model.py:fails raised RuntimeError: the model's own error at " in text
    line = MODEL.splitlines().index('    raise RuntimeError("the model\'s own error")') + 1
    assert f"model.py:{line}." in text


@pytest.mark.usefixtures("files")
def test_an_interrupt_leaves_with_code_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("baechi.cli.commands.load", interrupt)
    assert "interrupted" in run("solve", "a.graph.json", "cluster.json", code=130)


def test_models_are_found_in_packages_of_the_working_folder(files):
    (files / "package").mkdir()
    (files / "package" / "__init__.py").touch()
    (files / "package" / "inner.py").write_text(MODEL)
    model, args, kwargs = load_model("package.inner:tiny")
    assert type(model).__name__ == "Net"
    assert (len(args), kwargs) == (1, {"scale": 2.0})
    (files / "package" / "inner.py").write_text("import no_such_dependency\n")
    del sys.modules["package.inner"]
    with pytest.raises(InputError, match=r"No module named 'no_such_dependency' at .*inner\.py:1"):
        load_model("package.inner:tiny")
    with pytest.raises(InputError, match=r"there is no module 'package\.other'"):
        load_model("package.other:tiny")


@pytest.mark.usefixtures("files")
def test_python_m_baechi_runs_and_returns_its_code():
    command = [sys.executable, "-m", "baechi"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"baechi {baechi.__version__}\n"
    done = subprocess.run([*command, "estimate"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.ranks
def test_a_plan_says_how_many_processes_a_script_gets(tmp_path):
    baechi.dump(Placement("", (0, 2, 1), (0, 1, 2)), tmp_path / "plan.json")
    lines = (
        "import os, pathlib, sys",
        "name = os.environ['RANK'] + '-' + os.environ['WORLD_SIZE']",
        "pathlib.Path(sys.argv[2], name).touch()",
        "sys.exit(int(os.environ['RANK'] == '9'))",
    )
    (tmp_path / "train.py").write_text("\n".join(lines))
    words = (
        "run",
        str(tmp_path / "plan.json"),
        str(tmp_path / "train.py"),
        "--into",
        str(tmp_path),
    )
    assert CliRunner().invoke(app, words).exit_code == 0
    assert {path.name for path in tmp_path.glob("*-3")} == {"0-3", "1-3", "2-3"}
    assert CliRunner().invoke(app, ("run", words[1], "none.py")).exit_code != 0
