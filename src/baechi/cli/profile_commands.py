"""The command `baechi profile`: measured costs of a model, and the cache of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baechi.cli.console import (
    CheckpointOption,
    GraphOption,
    InferenceOption,
    MaybeModelArgument,
    OptimizerOption,
    OutOption,
    TraceOption,
    no_folder,
    say,
    say_costs,
    show,
    trace_model,
    write,
)
from baechi.costs.profile_cache import ProfileStore, default_path
from baechi.errors import InputError
from baechi.validation import MAX_THREADS

if TYPE_CHECKING:
    from baechi.records.op_costs import Profile


def profile(
    model: MaybeModelArgument = None,
    *,
    device: Annotated[str, typer.Option(help="Where to measure, as torch names it.")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, help="CPU threads per operator; torch's own if absent."
        ),
    ] = None,
    out: OutOption = None,
    graph: GraphOption = None,
    trace_file: TraceOption = None,
    inference: InferenceOption = False,
    optimizer: OptimizerOption = "adamw",
    checkpoint: CheckpointOption = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep measured costs in this file, not in the user's cache directory.",
            callback=no_folder,
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure everything anew and keep nothing.")
    ] = False,
    list_stored: Annotated[
        bool, typer.Option("--list", help="Say what has been measured before, and leave.")
    ] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget what has been measured before, and leave.")
    ] = False,
) -> None:
    r"""Measure what every operator of a model costs, alone, on one device.

    With `--graph` also writes the operator graph of one step, which is all that `solve` needs.
    The model need not fit the device: operators are measured one by one. What was measured is
    kept, so that the next run measures only what is new.

    For example:

        baechi profile model.py:gpt2 --threads 1 \
          -o gpt2.profile.json --graph gpt2.graph.json
        baechi profile --list
    """
    if list_stored or clear:
        if model is not None or no_cache or (list_stored and clear):
            raise InputError("give --list or --clear alone, or with --cache FILE.")
        _show_or_clear(cache, clear=clear)
        return
    if model is None:
        raise InputError("name a model, file.py:function, or give --list or --clear.")
    if cache is not None and no_cache:
        raise InputError("give --cache FILE or --no-cache, and not both.")

    import baechi

    traced = trace_model(model, trace_file, inference=inference, checkpoint=checkpoint)
    where: bool | Path = not no_cache if cache is None else cache
    measured: Profile = baechi.profile(traced, device=device, threads=threads, cache=where)
    say_costs(f"measured on {device}", measured)
    names = [op.name for op in traced.ops]
    _say_remarks(list(zip(names, (cost.remark for cost in measured.costs), strict=True)))
    write(measured, out)
    if graph is not None:
        kept = checkpoint or None
        step = traced.graph(measured, training=not inference, optimizer=optimizer, checkpoint=kept)
        write(step, graph)


def _say_remarks(rows: list[tuple[str, str]]) -> None:
    """Every remark once, with the first operator that it is about."""
    by_remark: dict[str, list[str]] = {}
    for name, remark in rows:
        if remark:
            by_remark.setdefault(remark, []).append(name)
    for remark, names in by_remark.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"  {names[0]}{more}: {remark}")


def _show_or_clear(cache: Path | None, *, clear: bool) -> None:
    """Prints the contents of a cache, or empties it; a missing file is not made."""
    path = default_path() if cache is None else cache
    if not path.exists():
        say(f"{path}: nothing has been measured yet")
        return
    with ProfileStore(cache) as store:
        if clear:
            say(f"{path}: forgot {store.clear()} operators")
            return
        holdings = store.holdings()
        say(f"{path}: {sum(row.operators for row in holdings)} operators")
        if holdings:
            from rich.table import Table

            table = Table("kind", "hardware", "threads", "torch", "operators", "last measured")
            for row in holdings:
                numbers = (str(row.threads), row.torch, str(row.operators), f"{row.last} UTC")
                table.add_row(row.kind, row.hardware, *numbers)
            show(table)
