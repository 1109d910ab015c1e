"""`baechi cluster`: files in, files out."""

import csv
import json
import re

import pytest
from typer.testing import CliRunner

import baechi
from baechi import Op, OpGraph
from baechi.cli.commands import app
from baechi.cluster_simulation.fleet import Fleet
from baechi.cluster_simulation.jobs import Job
from baechi.cluster_simulation.policies import POLICIES
from baechi.cluster_simulation.policies.fifo import Fifo
from baechi.cluster_simulation.results import (
    JOB_COLUMNS,
    ROW,
    cluster_figure,
    summary,
    write_comparison,
)
from baechi.cluster_simulation.simulator import simulate_cluster

TRACE = """job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,tiny,100,30
1,4,10,133,tiny,50,23
2,2,20,157,other,10,26
3,9,20,157,other,10,26
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trace.csv").write_text(TRACE)

    def invoke(*arguments, code=0):
        result = CliRunner().invoke(
            app,
            [
                *("cluster", "--trace", str(tmp_path / "trace.csv"), "--format", "tiresias"),
                *("--switches", "1", "--nodes", "1", "--gpus-per-node", "4"),
                *("--out", str(tmp_path / "out"), *arguments),
            ],
        )
        assert result.exit_code == code, result.output
        return result

    return invoke


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_it_writes_jobs_cluster_summary_and_plot(run, tmp_path):
    pytest.importorskip("plotly")
    result = run("--policy", "fifo", "--scheme", "count")
    assert "4 jobs on 4 GPUs of 1 node" in result.output
    assert "refused job 3: asks for 9 GPUs of 4" in result.output
    out = tmp_path / "out"
    jobs = table(out / "job.csv")
    assert tuple(jobs[0]) == JOB_COLUMNS
    columns = "job_id,num_gpu,submit_time,start_time,end_time,executed_time,JCT,duration"
    assert ",".join(jobs[0]) == f"{columns},pending_time,preempt,resume,promote"
    assert jobs[1:] == [
        ["0", "1", "0", "0", "100", "100", "100", "100", "0", "0", "0", "0"],
        ["1", "4", "10", "100", "150", "50", "140", "50", "90", "0", "0", "0"],
        ["2", "2", "20", "150", "160", "10", "140", "10", "130", "0", "0", "0"],
    ]
    rows = table(out / "cluster.csv")
    assert tuple(rows[0]) == ROW
    assert rows[1] == ["0", "0", "1", "1", "3", "1", "0", "1", "0"]
    assert rows[-1] == ["160", "1", "0", "0", "4", "0", "0", "0", "3"]
    figures = json.loads((out / "summary.json").read_text())
    assert figures["mean_jct"] == pytest.approx(380 / 3)
    assert figures["median_jct"] == figures["p99_jct"] == 140
    assert (figures["makespan"], figures["preemptions"]) == (160, 0)
    assert figures["utilization"] == (100 + 200 + 20) / (4 * 160)
    assert figures["refused"][0]["job_id"] == "3"
    page = (out / "plot.html").read_text()
    assert "busy GPUs" in page
    assert "https://cdn" not in page.split("<body>")[0]


def test_the_same_input_gives_the_same_bytes(run, tmp_path):
    pytest.importorskip("plotly")
    files = ("job.csv", "cluster.csv", "summary.json", "plot.html")
    options = ("--policy", "sjf", "--scheme", "random", "--seed", "5")
    run(*options)
    first = [(tmp_path / "out" / file).read_bytes() for file in files]
    run(*options)
    assert [(tmp_path / "out" / file).read_bytes() for file in files] == first


def test_all_policies_are_compared(run, tmp_path):
    result = run("--policy", "all", "--compat", "tiresias")
    rows = table(tmp_path / "out" / "comparison.csv")
    assert [row[0] for row in rows[1:]] == list(POLICIES)
    assert "…" not in result.output  # a narrow terminal cuts no digits off
    for policy in POLICIES:
        assert policy in result.output
        assert len(table(tmp_path / "out" / policy / "job.csv")) == 4
    assert len(json.loads((tmp_path / "out" / "comparison.json").read_text())) == len(POLICIES)
    pytest.importorskip("plotly")
    page = (tmp_path / "out" / "plot.html").read_text()
    means = {row[0]: float(row[rows[0].index("mean_jct")]) for row in rows[1:]}
    shown = re.findall(r"<tr><td>([^<]*)</td><td>3</td><td>([^<]*)</td>", page)
    assert dict(shown) == {policy: f"{mean:,.0f}" for policy, mean in means.items()}
    assert [policy for policy, _ in shown] == sorted(POLICIES, key=means.__getitem__)


def test_energy_is_told_where_gpus_have_watts(run, tmp_path):
    pytest.importorskip("plotly")
    result = run("--policy", "all", "--watts", "36:36000", "--power-budget", "20000")
    assert "kWh" in result.output
    rows = table(tmp_path / "out" / "comparison.csv")
    energy = {row[0]: float(row[rows[0].index("energy_kwh")]) for row in rows[1:]}
    # Four GPUs, 160 s, and 100 + 200 + 20 s of one that is busy.
    assert energy["fifo"] == pytest.approx((4 * 160 * 0.036 + 320 * 36) / 3600)
    assert energy["powerflow"] < energy["optimus"]
    page = (tmp_path / "out" / "plot.html").read_text()
    assert "<th>energy kwh</th>" in page
    for text in ("60", "60:", "a:b", "1:2:3"):
        result = run("--watts", text, code=2)
        assert f"--watts '{text}' cannot be read; write 60:240" in " ".join(result.output.split())
    run("--policy", "fifo")
    assert "energy_kwh" not in json.loads((tmp_path / "out" / "summary.json").read_text())


def test_a_policy_that_never_ends_is_left_out_of_the_comparison(run, tmp_path):
    long = "job_id,num_gpu,submit_time,duration\na,4,0,1000\nb,4,0,1000\n"
    (tmp_path / "trace.csv").write_text(long)
    result = run("--policy", "all", "--preempt-cost", "100", "--no-plot")
    assert "left out: under policy 'gandiva' jobs lose" in " ".join(result.output.split())
    names = [row[0] for row in table(tmp_path / "out" / "comparison.csv")[1:]]
    assert "gandiva" not in names
    assert (names[0], names[-1]) == (POLICIES[0], POLICIES[-1])
    alone = run("--policy", "gandiva", "--preempt-cost", "100", "--no-plot", code=2)
    assert "would never end" in " ".join(alone.output.split())


def test_a_job_that_one_scheme_refuses_is_named_in_a_comparison(run):
    """Four GPUs under one switch, which Muri's scheme wants, are not there."""
    result = run("--policy", "all", "--switches", "2", "--gpus-per-node", "2", "--no-plot")
    said = " ".join(result.output.split())
    assert "refused job 1 under muri-s: asks for 4 GPUs with room for" in said
    assert "refused job 3: asks for 9 GPUs of 4" in said


def test_jobs_are_elastic_with_a_serial_part(run, tmp_path):
    def times(*options):
        run("--policy", "optimus", "--no-plot", *options)
        return [row[4] for row in table(tmp_path / "out" / "job.csv")[1:]]

    # The first has four GPUs at once; then one job has one (20 of work) and one three (200).
    assert times("--serial", "0") == ["25", "45", "92"]
    assert times() == ["30", "100", "150"]


def test_what_is_not_given_goes_with_what_is(run, tmp_path):
    alone = run("--policy", "split-or-wait", "--no-plot")
    assert "no job has one. Give --graphs" in " ".join(alone.output.split())
    together = run("--policy", "all", "--scheme", "count", "--no-plot")
    assert "--graphs" not in together.output
    assert not (tmp_path / "out" / "job.csv").exists()  # of the run before
    counted = (tmp_path / "out" / "fifo" / "job.csv").read_text()
    assert (tmp_path / "out" / "big-brain" / "job.csv").read_text() == counted
    run("--policy", "fifo", "--sharing", "time-sliced", "--no-plot")
    assert (tmp_path / "out" / "job.csv").read_text() != counted
    run("--policy", "big-brain", "--packing", "1", "--no-plot")
    assert (tmp_path / "out" / "job.csv").read_text() == counted
    failed = run("--scheme", "count", "--sharing", "mps", code=2)
    assert "counting tells no GPU from another" in failed.output


def test_sharing_memory_and_costs_are_options(run, tmp_path):
    run(
        *("--policy", "fifo", "--scheme", "best-fit", "--sharing", "time-sliced", "--packing", "3"),
        *("--memory", "16GiB", "--restart-cost", "2", "--preempt-cost", "1", "--no-plot"),
    )
    jobs = {row[0]: row for row in table(tmp_path / "out" / "job.csv")[1:]}
    assert jobs["1"][3] == "10"  # beside job 0
    assert not (tmp_path / "out" / "plot.html").exists()


def test_gpus_may_be_cut_into_slices(run, tmp_path):
    result = run(
        *("--scheme", "best-fit", "--memory", "80GiB", "--no-plot"),
        *("--slice", "500:40GiB", "--slice", "250:20GiB"),
    )
    assert "4 jobs on 8 GPUs" in result.output
    jobs = {row[0]: row for row in table(tmp_path / "out" / "job.csv")[1:]}
    assert jobs["0"][5] in {"200", "400"}  # half or a quarter of a GPU
    assert "slice 'half' cannot be read" in run("--slice", "half", code=2).output


def test_jobs_carry_the_graphs_of_their_models(run, tmp_path):
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    parts = OpGraph(tuple(Op(f"op{i}", 1000, persistent_bytes=60) for i in range(2)), ())
    baechi.dump(parts, graphs / "tiny.graph.json")
    run("--policy", "split-or-wait", "--graphs", str(graphs), "--memory", "100")
    # Two ops that no GPU holds together run beside each other: half the time of one after another.
    jobs = {row[0]: row for row in table(tmp_path / "out" / "job.csv")[1:]}
    assert "0" not in jobs  # may use one GPU alone
    assert jobs["1"][5] == "25"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "MODEL.graph.json" in run("--graphs", str(empty), code=2).output


def test_samples_for_the_gittins_index_may_be_given(run, tmp_path):
    samples = tmp_path / "samples.csv"
    samples.write_text("duration\n10\n20\n400\n")
    run("--policy", "dlas-gpu-gittins", "--gittins-samples", str(samples))
    for text in ("duration\nten\n", "1" * 200_000):
        samples.write_text(text)
        failed = run("--policy", "dlas-gpu-gittins", "--gittins-samples", str(samples), code=2)
        assert "cannot read GPU-times" in failed.output


def test_malformed_lines_are_errors_or_counted(run, tmp_path):
    (tmp_path / "trace.csv").write_text(TRACE + "4,1,x,1,m,1,1\n")
    assert "line 6: submit_time is 'x'" in run(code=2).output
    skipped = run("--malformed", "skip")
    assert "skipped line 6: submit_time is 'x'" in skipped.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--policy", "best"), ("--scheme", "worst"), ("--sharing", "green")),
        *(("--compat", "gavel"), ("--format", "slurm"), ("--memory", "much")),
    ],
)
def test_a_wrong_option_is_named(run, option, value):
    assert repr(value) in run(option, value, code=2).output


def test_the_folder_must_be_one(run, tmp_path):
    (tmp_path / "out").write_text("")
    assert "no folder" in run(code=2).output


def test_pictures_have_every_policy_and_few_points():
    pytest.importorskip("plotly")
    jobs = [Job(f"job{i}", 1, i, 3) for i in range(5000)]
    result = simulate_cluster(jobs, Fleet.uniform(1, 1, 2), Fifo())
    figure = cluster_figure([result, result])
    assert len(figure.data) == 6
    assert all(len(trace.x) <= 2001 for trace in figure.data)
    assert figure.data[0].x[-1] == result.rows[-1][0]


def test_nothing_to_compare_is_an_empty_table(tmp_path):
    write_comparison([], tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text()) == []


def test_quantiles_are_by_rank():
    jobs = [Job(f"job{i}", 1, 0, i) for i in range(1, 201)]
    figures = summary(simulate_cluster(jobs, Fleet.uniform(1, 1, 200), Fifo()))
    assert figures["p99_jct"] == 198
    assert figures["median_jct"] == 100.5
    assert figures["mean_jct"] == 100.5
