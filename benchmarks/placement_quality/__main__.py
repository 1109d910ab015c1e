"""Measures every placer on every case: `python3 -m benchmarks.placement_quality --help`."""

import itertools
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.placement_quality.cases import Case, cases
from benchmarks.placement_quality.checks import checks
from benchmarks.placement_quality.instances import FOLDER
from benchmarks.placement_quality.plot import write_plots
from benchmarks.placement_quality.report import family_rows, placers_of, quality, write_files
from benchmarks.placement_quality.rows import EFFORTS, PLACERS, Row, known_placers, measure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results" / "placement_quality"


def main(
    quick: Annotated[
        bool, typer.Option(help="A tenth of the cases; a minute or two with CP-SAT.")
    ] = False,
    effort: Annotated[str, typer.Option(help="Efforts of auto, with commas.")] = ",".join(EFFORTS),
    placers: Annotated[str, typer.Option(help="The others, with commas.")] = ",".join(PLACERS),
    match: Annotated[str, typer.Option(help="Only cases with this in their name.")] = "",
    instances: Annotated[Path, typer.Option(help="Folder of measured graphs.")] = FOLDER,
    exact_seconds: Annotated[
        float, typer.Option(help="CP-SAT's limit per small case; 0 leaves it out.")
    ] = 20.0,
    jobs: Annotated[int, typer.Option(help="Processes; with 1 the times mean most.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    """Writes the table of cases x placers, a picture, and the checks; fails where a check does."""
    console = Console(width=200 if not sys.stdout.isatty() else None)
    known, unknown = known_placers(filter(None, placers.split(",")))
    if unknown:
        console.print(f"Left out, since solve does not know them: {', '.join(unknown)}.")
    if not instances.is_dir():
        console.print(f"No measured graphs: there is no folder {instances}.")
    chosen = [case for case in cases(instances, quick=quick) if match in case.name]
    if not chosen:
        console.print(f"No case has {match!r} in its name.")
        raise typer.Exit(2)
    efforts = [name for name in effort.split(",") if name]
    rows = _measured(chosen, known, efforts, exact_seconds, jobs, console)
    found = checks(rows)
    command = shlex.join(["python3", "-m", "benchmarks.placement_quality", *sys.argv[1:]])
    write_files(rows, found, out, command)
    write_plots(rows, out)
    _show(rows, console)
    for check in found:
        word = {True: "[green]pass", False: "[red]FAIL", None: "[dim]none"}[check.holds]
        console.print(f"{word}[/] {check.claim}: {check.figure}", highlight=False)
    console.print(f"Written to {out}.")
    raise typer.Exit(any(check.holds is False for check in found))


def _measured(
    chosen: list[Case],
    known: list[str],
    efforts: list[str],
    exact_s: float,
    jobs: int,
    console: Console,
) -> list[Row]:
    rows: list[Row] = []
    fixed = (known, efforts, exact_s)
    with Progress(console=console) as progress, ProcessPoolExecutor(jobs) as pool:
        bar = progress.add_task("cases", total=len(chosen))
        run = map if jobs == 1 else pool.map
        for found in run(_measure_all, chosen, *(itertools.repeat(value) for value in fixed)):
            rows += found
            progress.update(bar, advance=1, description=found[-1].case if found else "")
    return rows


def _measure_all(case: Case, placers: list[str], efforts: list[str], exact_s: float) -> list[Row]:
    return list(measure(case, placers, efforts, exact_s))


def _show(rows: list[Row], console: Console) -> None:
    names = placers_of(rows)
    table = Table(title="Step over the best known, geometric mean (in brackets: none found)")
    for column in ("source", "memory", "factor", "pass", "cases", *names):
        table.add_column(column, justify="left" if column in ("source", "memory") else "right")
    for line in family_rows(rows, quality):
        table.add_row(*line)
    console.print(table)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
