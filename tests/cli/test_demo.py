import importlib.util
import json
from pathlib import Path

import pytest
import torch
from benchmarks import demo
from benchmarks.demo import Job, demo_jobs, run, show, show_microbatches
from seeds import some
from typer.testing import CliRunner

import baechi
from baechi import ExecutionError, InputError
from baechi.cli.commands import app
from baechi.units import format_ns

drawn = pytest.mark.skipif(
    importlib.util.find_spec("plotly") is None, reason="plotly is not installed"
)


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
            for _ in range(2)
        )

    def forward(self, x, y=None):
        return self.left(x) + self.right(x if y is None else y)


class Loss(Branches):
    def forward(self, x):
        return super().forward(x).square().mean()


def build():
    x = torch.randn(4, 32)
    return Branches(), (x,), {"y": x}  # one tensor under two names, as GPT-2's ids and labels


JOB = Job(
    name="toy",
    title="Two branches",
    build=build,
    loss=lambda output: output.square().mean(),
    optimizer="adamw",
    learning_rate=1e-2,
    devices=2,
    share=0.7,
)


@drawn
@pytest.mark.parametrize("optimizer", some(["adamw", "momentum"], 2))
def test_a_job_is_refused_on_one_device_and_trained_on_two(
    tmp_path, capsys, optimizer, monkeypatch
):
    threads = torch.get_num_threads()
    plans, write = [], demo._write
    monkeypatch.setattr(demo, "_write", lambda *args: (write(*args), plans.append(args[2])))
    show(JOB._replace(optimizer=optimizer), tmp_path)
    assert plans[0].measured.absent_bytes == ()  # the optimizer has made steps
    assert len(set(baechi.load(tmp_path / "toy.placement.json").devices)) == 2
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert f"Training it with {optimizer} needs" in flat
    assert "One device: " in flat
    assert "does not fit" in flat
    assert "one device refused" in flat
    costs, results = text.split("The same training")
    errors = [line for line in costs.splitlines() if line.split()[:1] == ["error"]]
    assert len(errors) == 1 + 4  # the unsplit model's, too
    for line in errors[1:]:
        assert line.count("%") == 4  # the step, two devices, bytes moved
    rows = [line.split() for line in results.splitlines()[4:9]]
    assert [row[0] for row in rows] == ["unsplit", "m-topo", "m-etf", "m-sct", "auto"]
    assert len({tuple(row[-5:]) for row in rows}) == 1  # all have the same losses, which fall
    assert float(rows[0][-1]) < float(rows[0][-5])
    assert "off by" not in text
    assert "…" not in text
    assert torch.get_num_threads() == threads


@drawn
def test_a_job_leaves_a_page_a_trace_and_files(tmp_path, capsys):
    show(JOB, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "toy.cluster.json", "toy.graph.json", "toy.html", "toy.placement.json", "toy.trace.json"
    ]  # fmt: skip
    graph = baechi.load(tmp_path / "toy.graph.json")
    cluster = baechi.load(tmp_path / "toy.cluster.json")
    placement = baechi.load(tmp_path / "toy.placement.json")
    step = format_ns(baechi.simulate(graph, cluster, placement).makespan_ns)
    assert f"auto predicted {step}" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "toy.html").read_text()
    assert "Two branches on 2 devices" in page
    assert "Predicted beside measured" in page
    assert json.loads((tmp_path / "toy.trace.json").read_text())["traceEvents"]


@drawn
def test_microbatches_stand_beside_the_loop_with_the_same_bits(tmp_path, capsys):
    job = JOB._replace(
        name="cut",
        share=0.9,
        loss=lambda loss: loss,
        build=lambda: (Loss(), (torch.randn(8, 32),), {}),
    )
    show_microbatches(job._replace(microbatches=2, steps=2), tmp_path)
    flat = " ".join(capsys.readouterr().out.split())
    assert "A step of 2 micro-batches: 2 devices beside the loop on one" in flat
    assert "step bitwise" in flat
    assert "of the loop's time" in flat
    placement = baechi.load(tmp_path / "cut.placement.json")
    assert placement.microbatches == 2
    assert baechi.load(tmp_path / "cut.graph.json").digest == placement.graph_digest
    assert "2 micro-batches" in (tmp_path / "cut.html").read_text()


@drawn
def test_other_gradients_than_the_loop_s_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_compare", lambda *_: ("off", False))
    job = JOB._replace(loss=lambda loss: loss, build=lambda: (Loss(), (torch.randn(8, 32),), {}))
    with pytest.raises(ExecutionError, match="does not equal the loop"):
        show_microbatches(job._replace(share=0.9, microbatches=2, steps=1), tmp_path)


@drawn
def test_a_wrong_result_is_an_error(tmp_path, capsys, monkeypatch):
    real, calls = demo._train, []

    def spoil(*args):
        training = real(*args)
        calls.append(training)
        if len(calls) == 1:  # the unsplit model's
            return training
        return training._replace(values={k: value + 1 for k, value in training.values.items()})

    monkeypatch.setattr(demo, "_train", spoil)
    with pytest.raises(ExecutionError, match=r"placed by m-topo.* does not equal the unsplit"):
        show(JOB, tmp_path)
    assert "off by 1e+00" in capsys.readouterr().out
    assert (tmp_path / "toy.html").exists()


def test_missing_gradients_are_no_equality():
    one = {"gradient of w": torch.ones(1)}
    assert demo._compare({}, one) == ("[red]off by inf", False)
    assert demo._compare(one, one) == ("bitwise", True)


@drawn
def test_what_the_demo_needs_is_checked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="the demo needs torch: pip install torch"):
        run(tmp_path / "out")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make folder"):
        run(tmp_path / "file" / "out")


def test_the_demo_is_found_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    (tmp_path / "file").touch()
    found = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file" / "out")])
    assert "cannot make folder" in found.output
    monkeypatch.setattr(Path, "is_file", lambda _: False)
    found = CliRunner().invoke(app, ["demo", "--out", "out"])
    assert found.exit_code == 2
    assert "run it in a checkout" in found.output


def test_the_models_are_those_that_the_demo_names():
    pytest.importorskip("transformers")
    gpt2, inception, cut = demo_jobs()
    with torch.device("meta"):
        model, _, kwargs = gpt2.build()
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert kwargs["labels"].shape == (2, 64)
    with torch.device("meta"):
        model, (image,), _ = inception.build()
    assert sum(p.numel() for p in model.parameters()) == 23_834_568
    assert image.shape == (2, 3, 299, 299)
    with torch.device("meta"):
        _, (ids,), _ = cut.build()
    assert (ids.shape, cut.microbatches) == ((8, 64), 4)


@pytest.mark.slow
def test_the_quick_demo_runs(tmp_path, capsys):
    run(tmp_path / "out", quick=True)
    text = capsys.readouterr().out
    assert "Done in" in text
    assert "…" not in text
    pages = {"gpt2.html", "inception.html", "gpt2-microbatches.html"}
    assert pages <= {path.name for path in (tmp_path / "out").iterdir()}
