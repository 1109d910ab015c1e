"""Splitting over left-overs against whole GPUs and packing: `python3 -m benchmarks.residual`."""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.environment import environment
from benchmarks.residual.names import KIND, NAMES, QUICK
from benchmarks.residual.plot import svg
from benchmarks.residual.report import csv_of, tables
from benchmarks.residual.runs import ARMS, SHARINGS, Row, row_of
from benchmarks.residual.workload import TENANTS, Kind, fleet_of, jobs_of, kind_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import baechi
from baechi import OpGraph

RESULTS = Path(__file__).parents[1] / "results" / "residual"
LOADS = "0.3,0.6,0.9,1.2"


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per load.")] = 10,
    loads: Annotated[str, typer.Option(help="GPU-time asked for over what there is.")] = LOADS,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs of each simulation.")] = 200,
    tenants: Annotated[
        float, typer.Option(help="Share of GPUs that others hold a part of, but on the first node.")
    ] = TENANTS,
    quick: Annotated[bool, typer.Option(help="Small models, three seeds, two loads.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for graphs and results.")] = RESULTS,
) -> None:
    """Simulates, prints the tables, and writes them, every simulation and a picture.

    Graphs are traced once, into OUT/graphs, which takes a minute and torch; the rest needs none. A
    whole run takes 5 minutes of processor time besides, a quick one 10 seconds.
    """
    console = Console(width=160 if not sys.stdout.isatty() else None)
    if quick:
        seeds, loads, jobs = min(seeds, 3), "0.6,1.0", min(jobs, 60)
    steps = [float(load) for load in loads.split(",")]
    command = shlex.join(["python3", "-m", "benchmarks.residual", *sys.argv[1:]])
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    rows: list[Row] = []
    with Progress(*columns, console=console) as progress:
        kinds = kinds_of(out / "graphs", quick, progress)
        bar = progress.add_task("simulating", total=seeds * len(steps))
        for seed in range(seeds):
            fleet = fleet_of(seed, tenants, KIND)
            memo: dict[object, object] = {}
            for load in steps:
                progress.update(bar, description=f"seed {seed}, load {load:g}")
                drawn = jobs_of(kinds, fleet, seed, jobs, load)
                rows += [
                    row_of(arm, sharing, load, seed, drawn, fleet, memo)
                    for arm in ARMS
                    for sharing in (SHARINGS if arm.most > 1 else SHARINGS[:1])
                ]
                progress.advance(bar)
    text = "\n".join(
        [
            f"$ {command}",
            json.dumps(environment()),
            f"{time.process_time():.0f} s of processor time, load average {os.getloadavg()[0]:.1f}",
            f"{seeds} seeds, {jobs} jobs each; mean over seeds and half its 95 % interval. JCT is",
            "completion time; differences of its mean are seed by seed, from packing with as many",
            "jobs on a GPU. `refused` and `OOM` are sums over seeds, `split` is the mean number of",
            "jobs on more GPUs than their user asks for; memory is that which others leave.",
            "",
            *(line_of(kind) for kind in kinds),
            tables(rows),
            "",
        ]
    )
    print(text)
    (out / "tables.txt").write_text(text)
    (out / "simulations.csv").write_text(csv_of(rows))
    (out / "completion.svg").write_text(svg(rows))
    console.print(f"Written to {out}.")
    raise typer.Exit(any(row.oom for row in rows))


def kinds_of(folder: Path, quick: bool, progress: Progress) -> list[Kind]:
    """The models, from graphs in the folder, which are traced where they are not there."""
    names = QUICK if quick else NAMES
    bar = progress.add_task("models", total=len(names))
    folder.mkdir(parents=True, exist_ok=True)
    kinds = []
    for name in names:
        progress.update(bar, description=name)
        path = folder / f"{name}.graph.json"
        if not path.exists():
            from benchmarks.residual.models import graph_of

            baechi.dump(graph_of(name), path)
        kinds.append(kind_of(name, baechi.load(path, OpGraph), KIND))
        progress.advance(bar)
    return kinds


def line_of(kind: Kind) -> str:
    """What jobs of a model ask for."""
    return (
        f"{kind.name:14}{len(kind.graph.ops):5} ops, {kind.gpus} GPUs of "
        f"{kind.memory_bytes / 2**30:4.1f} GiB, step {kind.step_ns / 1e6:5.0f} ms, keeps "
        f"{kind.compute / 10:.0f} % busy"
    )


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
