"""The benchmark of predictions: its errors, targets and pictures are what they say."""

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from benchmarks.prediction import rows as rows_module
from benchmarks.prediction.checks import checks, errors, families, peak_errors, segment_ns
from benchmarks.prediction.models import MODELS, Model
from benchmarks.prediction.plot import peak_points, svg, time_points
from benchmarks.prediction.report import (
    disturbed_line,
    family_rows,
    read_rows,
    row_lines,
    segment_line,
    write_files,
)
from benchmarks.prediction.rows import Row, device_names, measure
from benchmarks.quiet import Quiet, others_ns, reference_ns
from torch import nn

import baechi
from baechi import Measurement

pytestmark = pytest.mark.usefixtures("one_thread")


def row(placement="single", devices=1, segments=1, predicted=100, measured=100, peaks=(), **other):
    predicted_bytes = tuple(one for one, _ in peaks) or (50,) * devices
    real = tuple(two for _, two in peaks) or (50,) * devices
    fields = {"model": "m", "batch": 1, "mode": "training", "ops": 9, "transfers": 0}
    fields |= {"passes_ns": ((predicted, measured, True),), "disturbed": False, **other}
    return Row(
        **fields,
        devices=devices,
        placement=placement,
        segments=segments,
        predicted_ns=predicted,
        predicted_bytes=predicted_bytes,
        measured=Measurement(measured, real, (measured,)),
    )


def test_errors_are_shares_of_what_was_measured():
    found = errors([row(predicted=90), row(predicted=130), row(predicted=100)])
    assert found.times == (-0.1, 0.3, 0.0)
    assert found.median_time == pytest.approx(0.1)
    assert found.worst_time == pytest.approx(0.3)
    assert peak_errors(row(devices=3, peaks=((97, 100), (0, 0), (5, 0)))) == [-0.03]


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"predicted": 89}, ["step time, median"]),
        ({"predicted": 70}, ["step time, median", "step time, worst"]),
        ({"peaks": ((106, 100),)}, ["peak memory, median"]),
        ({"peaks": ((96, 100),)}, ["peak memory, most"]),
        ({"peaks": ((96, 100),), "devices": 4}, []),  # more devices than the targets are about
    ],
)
def test_a_target_that_is_missed_fails(changes, failing):
    found = checks([row(**changes)], "cpu")
    assert len(found) == 4
    missed = [check.claim for check in found if not check.holds]
    assert len(missed) == len(failing)
    for claim, start in zip(missed, failing, strict=True):
        assert claim.startswith(start)


def test_rows_of_a_disturbed_machine_are_told_and_count():
    calm, disturbed = row(), row(predicted=50, disturbed=True)
    assert [c.holds for c in checks([calm, calm, disturbed], "cpu")] == [True, False, True, True]
    assert "1 of 3 rows" in disturbed_line([calm, calm, disturbed])
    assert "quiet for all 2" in disturbed_line([calm, calm])
    assert "(disturbed)" in row_lines([disturbed])[0][8]
    assert row_lines([calm])[0][8:10] == ["+0.0%", "+0%"]


def test_a_machine_is_quiet_where_the_reference_is_near_its_best():
    readings = iter([130.0, 100.0, 130.0, 115.0, 130.0, 130.0, 130.0, 130.0])
    quiet = Quiet(0.002, warm_up_s=0, pause_s=0.001, reference=lambda: next(readings))
    assert quiet.is_now()
    assert quiet.wait()  # 130 is not, 115 is
    assert not quiet.wait()  # patience ends
    assert not quiet.wait()
    assert reference_ns() > 0


def test_a_machine_is_watched_while_something_is_measured(monkeypatch):
    readings = iter([100.0, 100.0, 100.0, 100.0, 130.0])
    quiet = Quiet(0, warm_up_s=0, reference=lambda: next(readings))
    others = iter([0, 40_000_000, 0, 10**18])
    monkeypatch.setattr("benchmarks.quiet.others_ns", lambda: next(others))
    with quiet.watching() as watch:
        assert not watch.calm
    assert watch.calm
    with quiet.watching() as watch:
        pass
    assert not watch.calm  # another program computed
    monkeypatch.setattr("benchmarks.quiet.others_ns", lambda: 0)
    with quiet.watching() as watch:
        pass
    assert not watch.calm  # the reference is slow now


def test_what_others_compute_is_counted():
    stat = Path("/proc/stat")
    if not stat.exists():
        assert others_ns() == 0
        return
    before = others_ns()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert others_ns() - before > 0


def test_a_pass_of_a_disturbed_machine_is_in_parentheses():
    line = row_lines([row(passes_ns=((90, 100, True), (50, 100, False)))])[0]
    assert line[9] == "-10% (-50%)"


def test_the_price_of_a_segment_is_what_many_cuts_miss_more_than_few():
    few = row("few", 2, segments=10, predicted=1_000_000, measured=1_100_000)
    many = row("many", 2, segments=60, predicted=1_000_000, measured=3_100_000)
    assert segment_ns([few, many]) == 40_000
    assert "40.0 us" in segment_line([few, many])
    assert segment_ns([few]) is None
    assert "No placements" in segment_line([row()])


def test_families_keep_every_row_once():
    table = [row(), row("auto", 2), row("auto", 2, mode="forward"), row("many", 4)]
    found = [line for *_, group in families(table) for line in group]
    assert len(found) == len(table)
    assert len(family_rows(table)) == 4
    assert len(row_lines(table)) == 4


def test_pictures_show_every_point_inside(tmp_path):
    table = [row(predicted=10**6, measured=2 * 10**6), row("many", 2, predicted=10**9)]
    for points, title in ((time_points(table), "Step, ms"), (peak_points(table), "Peak, MiB")):
        picture = ET.fromstring(svg(points, title))
        dots = [
            e for e in picture.iter("{http://www.w3.org/2000/svg}circle") if e.get("r") == "3.5"
        ]
        assert len(dots) == len(points)
        for dot in dots:
            assert 70 <= float(dot.get("cx")) <= 530
            assert 40 <= float(dot.get("cy")) <= 500
    ET.fromstring(svg([], "nothing"))
    write_files(table, checks(table, "cpu"), tmp_path, "a command")
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == 2
    assert "a command" in (tmp_path / "tables.md").read_text()
    assert read_rows(tmp_path) == table  # what a run goes on from
    assert read_rows(tmp_path / "nowhere") == []


def test_logical_devices_have_names_that_torch_knows():
    assert device_names("cpu", 2) == ["cpu:0", "cpu:1"]
    assert device_names("cuda", 1) == ["cuda:0"]
    assert device_names("cuda", 2) == ["cuda:0/0", "cuda:0/1"]


def test_a_model_is_predicted_and_measured_by_every_placement(monkeypatch):
    def tiny(batch):
        layers = [nn.Linear(8, 8), nn.Tanh()] * 4
        return nn.Sequential(*layers), (torch.randn(batch, 8),), {}

    monkeypatch.setitem(MODELS, "tiny", Model(tiny, (2,)))
    monkeypatch.setattr(rows_module, "_BUDGET_NS", 1)
    monkeypatch.setattr(rows_module, "_MOST_PASSES", 4)
    quiet = Quiet(0, warm_up_s=0, reference=lambda: 1.0)
    said = []
    found = list(measure("tiny", 2, ("training",), (1, 2), "cpu", quiet, said.append))
    for line in found:
        calm = [one for one in line.passes_ns if one[2]]
        ratios = sorted(predicted / step for predicted, step, _ in calm or line.passes_ns)
        assert line.predicted_ns / line.measured.step_ns == ratios[len(ratios) // 2]
        assert len(calm) == 3 or len(line.passes_ns) == 4
        assert line.disturbed == (not calm)
    assert [(r.mode, r.devices, r.placement) for r in found] == [
        ("training", *rest) for rest in ((1, "single"), (2, "auto"), (2, "few"), (2, "many"))
    ]
    for line in found:
        assert line.predicted_ns > 0
        assert line.measured.step_ns > 0
        assert len(line.predicted_bytes) == len(line.measured.peak_bytes) == line.devices
    assert said


def test_pieces_are_few_and_keep_groups_together():
    graph = baechi.OpGraph(
        tuple(baechi.Op(f"o{i}", 1, group=f"g{i // 2}") for i in range(20)),
        tuple(baechi.Tensor(i, (i + 1,), 1) for i in range(19)),
    )
    cluster = baechi.Cluster.uniform(2, "1GiB", baechi.Link(0, 1))
    devices = rows_module._in_pieces(graph, cluster)
    assert devices[::2] == devices[1::2]
    assert sum(a != b for a, b in itertools.pairwise(devices)) == 3
