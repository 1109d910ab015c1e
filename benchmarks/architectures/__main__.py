"""Places every architecture of the catalog: `python3 -m benchmarks.architectures --help`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.architectures.catalog import names, names_found
from benchmarks.architectures.forms import FORMS, MICRO_BATCHES, described
from benchmarks.architectures.report import write_calls, write_table
from rich.progress import track

RESULTS = Path(__file__).parents[1] / "results" / "architectures"


def main(
    only: Annotated[str, typer.Option(help="Only these, with commas.")] = "",
    found: Annotated[
        bool, typer.Option("--found", help="Of transformers, those that the catalog lacks.")
    ] = False,
    sizes: Annotated[bool, typer.Option("--sizes", help="Call each with four batches.")] = False,
    generate: Annotated[
        bool, typer.Option("--generate", help="Let those that generate answer a prompt.")
    ] = False,
    form: Annotated[str, typer.Option(help=f"With commas: {described(FORMS)}.")] = "",
    timeout: Annotated[int, typer.Option(help="Seconds for each.")] = 300,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    """Writes a table and every row; each architecture has a process of its own."""
    known = names_found() if found else names()
    chosen = only.split(",") if only else known
    wrong = [name for name in chosen if name not in known]
    if wrong:
        near = [n for name in wrong for n in get_close_matches(name, known, cutoff=0.4)]
        others = f"{'Near are' if near else 'There are'} {', '.join(dict.fromkeys(near or known))}."
        typer.echo(f"No architecture is called {', '.join(wrong)}. {others}")
        raise typer.Exit(2)
    forms = form.split(",") if form else []
    calls = [name for name, given in (("sizes", sizes), ("generate", generate)) if given]
    if not FORMS.keys() >= set(forms) or len([*calls, *(["form"] if forms else [])]) > 1:
        typer.echo(f"A form is one of {', '.join(FORMS)}, without --sizes and --generate.")
        raise typer.Exit(2)
    if {MICRO_BATCHES, "autocast"} <= set(forms):
        typer.echo(
            "A step of micro-batches takes no autocast around it: give one of the two forms."
        )
        raise typer.Exit(2)
    rows: list[dict[str, Any]] = []
    for name in track(chosen, description=""):
        row = _row(name, timeout, [f"--{each}" for each in calls] or forms)
        if row.get("generates", True):
            rows.append(row)
        # What is found is kept, whatever ends this.
        write_calls(rows, out, calls[0]) if calls else write_table(rows, out, forms, found)


def _row(name: str, timeout: int, options: Sequence[str]) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.architectures.check",
        name,
        *options,
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "unbuilt": f"no answer in {timeout} s"}
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"ended with {run.returncode}"]
        return {"name": name, "unbuilt": said[-1]}
    return dict(json.loads(run.stdout.splitlines()[-1]))


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
