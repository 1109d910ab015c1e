"""Sets predictions beside measurements: `python3 -m benchmarks.prediction --help`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from benchmarks.prediction.checks import checks
from benchmarks.prediction.models import MODELS
from benchmarks.prediction.plot import write_plots
from benchmarks.prediction.report import (
    FAMILY_HEADER,
    ROW_HEADER,
    disturbed_line,
    family_rows,
    read_rows,
    row_lines,
    segment_line,
    write_files,
)
from benchmarks.prediction.rows import MODES, measure
from benchmarks.quiet import Quiet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results" / "prediction"


def main(
    quick: Annotated[bool, typer.Option(help="Few models, 1 and 2 devices.")] = False,
    models: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    modes: Annotated[str, typer.Option(help="With commas.")] = ",".join(MODES),
    counts: Annotated[str, typer.Option(help="Numbers of logical devices, with commas.")] = "",
    devices: Annotated[str, typer.Option(help="cpu, or cuda for the first GPU.")] = "",
    threads: Annotated[
        int, typer.Option(help="torch threads that logical CPU devices share; torch's own if 0.")
    ] = 0,
    patience: Annotated[
        float, typer.Option(help="Seconds, in all, to wait for the machine to be quiet.")
    ] = 900.0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the folder has, and measure the rest.")
    ] = False,
) -> None:
    """Writes a table, pictures and every sample; fails where a prediction misses its target."""
    console = Console(width=160 if not sys.stdout.isatty() else None)
    kind = devices or ("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in models.split(",") if name]
    wrong = [name for name in names if name not in MODELS] or set(modes.split(",")) - set(MODES)
    if wrong or kind not in ("cpu", "cuda"):
        console.print(f"Models are {', '.join(MODELS)}; modes {', '.join(MODES)}; cpu or cuda.")
        raise typer.Exit(2)
    chosen = [name for name, model in MODELS.items() if name in names or not names]
    if quick and not names:
        chosen = [name for name in chosen if MODELS[name].is_quick]
    cases = [(n, b) for n in chosen for b in MODELS[n].batches[: 1 if quick else None]]
    default = "1,2" if quick or kind == "cuda" else "1,2,4"
    numbers = [int(count) for count in (counts or default).split(",")]
    if threads:
        torch.set_num_threads(threads)
    command = shlex.join(["python3", "-m", "benchmarks.prediction", *sys.argv[1:]])
    quiet = Quiet(patience)
    rows = read_rows(out) if resume else []
    kept = {(row.model, row.batch) for row in rows}
    cases = [case for case in cases if case not in kept]
    found = checks(rows, kind)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(cases))
        for name, batch in cases:
            rows += measure(
                name,
                batch,
                modes.split(","),
                numbers,
                kind,
                quiet,
                lambda text: progress.update(bar, description=text),
            )
            progress.advance(bar)
            found = checks(rows, kind)
            write_files(rows, found, out, command)  # what is measured is kept, whatever ends this
    write_plots(rows, out)
    for title, header, lines in (
        ("Every placement", ROW_HEADER, row_lines(rows)),
        ("Errors: (predicted - measured) / measured", FAMILY_HEADER, family_rows(rows)),
    ):
        table = Table(title=title)
        for column in header:
            table.add_column(column, justify="right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(disturbed_line(rows), highlight=False)
    console.print(segment_line(rows), highlight=False)
    for check in found:
        word = "[green]holds[/]" if check.holds else "[red]FAILS[/]"
        console.print(f"{word} {check.claim}: {check.figure}", highlight=False)
    console.print(f"Written to {out}.")
    raise typer.Exit(not all(check.holds for check in found))


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
