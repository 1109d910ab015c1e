"""The commands for costs: `baechi profile`, `baechi estimate` and `baechi calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

import baechi
from baechi.cli.console import (
    MODEL_HELP,
    OutOption,
    load_model,
    say,
    show,
    trace_model,
    writable,
    write,
)
from baechi.costs.profile_cache import ProfileStore, default_path
from baechi.errors import InputError
from baechi.records import device_kinds
from baechi.records.device_kinds import DTYPES, Calibration
from baechi.records.op_costs import Profile
from baechi.records.optimizer_state import OPTIMIZERS, check_optimizer
from baechi.storage.serialization import load
from baechi.traced.traced_model import Traced
from baechi.units import format_ns
from baechi.validation import MAX_THREADS


def _known_optimizer(name: str) -> str:
    """The name, if it is an optimizer's: checked before operators are measured."""
    check_optimizer(name)
    return name


def _no_folder(path: Path | None) -> Path | None:
    """The path of a file that is made where there is none."""
    if path is not None and path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it.")
    return path


ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
GraphOption = Annotated[
    Path | None,
    typer.Option("--graph", help="Write the operator graph here.", callback=writable),
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Write the traced model here.", callback=writable)
]
InferenceOption = Annotated[
    bool, typer.Option("--inference", help="The graph of a forward alone, not of training.")
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        help=f"Whose state a training step holds: {', '.join(OPTIMIZERS)}; with `+master` an "
        "fp32 copy of the parameters, too, or `+amsgrad`.",
        callback=_known_optimizer,
    ),
]
CheckpointOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUBMODULE",
        help="Run this submodule's forward again in the backward instead of keeping what it made: "
        "a path or a pattern such as 'h.*'; may be given repeatedly.",
    ),
]
MicrobatchesOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Number of such calls in a step, as in `solve --microbatches`: the others add their "
        "gradients of parameters to those of the first.",
    ),
]
KindsOption = Annotated[
    Path | None, typer.Option("--kinds", help="A TOML file with more device kinds.")
]


def profile(
    model: ModelArgument = None,
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
    microbatches: MicrobatchesOption = 1,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Keep measured costs in this file, not in the user's cache directory.",
            callback=_no_folder,
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

    traced = trace_model(model, trace_file, inference=inference, checkpoint=checkpoint)
    where: bool | Path = not no_cache if cache is None else cache
    calls = 1 if inference else microbatches
    measured: Profile = baechi.profile(
        traced, device=device, threads=threads, cache=where, microbatches=calls
    )
    _say_costs(f"measured on {device}", measured)
    _say_remarks(traced, measured)
    write(measured, out)
    if graph is not None:
        kept = checkpoint or None
        step = traced.graph(measured, training=not inference, optimizer=optimizer, checkpoint=kept)
        write(step, graph)


def estimate(
    model: ModelArgument = None,
    *,
    kind: Annotated[
        str | None, typer.Option(help="The device kind; `--list` prints those that are known.")
    ] = None,
    list_kinds: Annotated[
        bool, typer.Option("--list", help="Print the table of device kinds and leave.")
    ] = False,
    kinds: KindsOption = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration file of this kind, from `calibrate`.")
    ] = None,
    out: OutOption = None,
    graph: GraphOption = None,
    trace_file: TraceOption = None,
    inference: InferenceOption = False,
    optimizer: OptimizerOption = "adamw",
    checkpoint: CheckpointOption = None,
    microbatches: MicrobatchesOption = 1,
) -> None:
    r"""Compute what every operator of a model costs, on a device that need not be here.

    From shapes alone: FLOPs and bytes against the peaks of a device kind. A model on the meta
    device needs no memory for its weights. The files are those that `profile` writes.

    For example:

        baechi estimate --list
        baechi estimate model.py:llama70b --kind H100-SXM-80GB --inference \
          --graph llama.graph.json
        baechi solve llama.graph.json 8xH100-SXM-80GB -o llama.placement.json
    """
    if list_kinds:
        rows = device_kinds.known(kinds)
        show(_table(rows))
        for row in rows:
            say(f"{row.name}: {row.source}")
        return
    if model is None or kind is None:
        raise InputError("give a model and --kind, or --list for the kinds that are known.")
    row = device_kinds.find(kind, kinds)
    if model.endswith(".json"):
        raise InputError(
            f"{model} is a file, and a trace in a file has no shapes to compute from; give the "
            "model as file.py:function (on the meta device it needs no memory)."
        )
    fitted = load(calibration, Calibration) if calibration is not None else None
    traced = trace_model(model, trace_file, inference=inference, checkpoint=checkpoint)
    calls = 1 if inference else microbatches
    computed: Profile = baechi.estimate(
        traced, kind, kinds_file=kinds, calibration=fitted, microbatches=calls
    )
    _say_costs(f"computed for {row.name}", computed)
    unseen = sum(bool(cost.remark) for cost in computed.costs)
    if unseen:
        say(f"  {unseen} operators depend on values; their times are a guess from their bytes")
    write(computed, out)
    if graph is not None:
        kept = checkpoint or None
        step = traced.graph(computed, training=not inference, optimizer=optimizer, checkpoint=kept)
        write(step, graph)


def calibrate(
    profiles: Annotated[
        list[str],
        typer.Argument(metavar="MODEL=PROFILE...", help="Models, each with its profile file."),
    ],
    *,
    kind: Annotated[
        str | None, typer.Option(help="The device kind; that of the profiles if absent.")
    ] = None,
    kinds: KindsOption = None,
    out: OutOption = None,
) -> None:
    """Fit the efficiencies behind `estimate` to profiles that were measured on a device.

    Prints how well computed times meet measured ones, before and after.

    For example:

        baechi profile model.py:gpt2 --threads 1 -o gpt2.profile.json
        baechi calibrate model.py:gpt2=gpt2.profile.json -o cpu.calibration.json
        baechi estimate model.py:bert --kind cpu --calibration cpu.calibration.json
    """
    named = [text.rpartition("=") for text in profiles]
    for text, (model, _, file) in zip(profiles, named, strict=True):
        if not model or not file:
            raise InputError(f"{text!r} names no profile; write MODEL=PROFILE.")
    measured = [load(file, Profile) for _, _, file in named]
    pairs = [
        (baechi.trace(*load_model(model)), p)
        for (model, _, _), p in zip(named, measured, strict=True)
    ]
    fitted: Calibration = baechi.calibrate(pairs, kind, kinds_file=kinds)
    say(fitted.table())
    say(f"a kernel takes at least {format_ns(fitted.launch_ns)}")
    write(fitted, out)


def _say_remarks(traced: Traced, measured: Profile) -> None:
    """Every remark once, with the first operator that it is about."""
    by_remark: dict[str, list[str]] = {}
    for op, cost in zip(traced.ops, measured.costs, strict=True):
        if cost.remark:
            by_remark.setdefault(cost.remark, []).append(op.name)
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


def _table(kinds: tuple[device_kinds.DeviceKind, ...]) -> object:
    """The device kinds as rich draws them, on 80 columns."""
    from rich.table import Table

    table = Table(title="Dense peaks in TFLOP/s", title_justify="left", box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    for title in ("GiB", "GB/s", *DTYPES, "us"):
        table.add_column(title, justify="right", no_wrap=True)
    for kind in kinds:
        peaks = [kind.flops_per_s.get(dtype) for dtype in DTYPES]
        cells = ["-" if peak is None else _short(peak / 1e12) for peak in peaks]
        sizes = (f"{kind.memory_bytes / 2**30:.4g}", _short(kind.bytes_per_s / 1e9))
        table.add_row(kind.name, *sizes, *cells, f"{kind.launch_ns / 1e3:.2g}")
    return table


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _say_costs(heading: str, profile: Profile) -> None:
    """Prints the costs of all operators together, and their source."""
    forward_ns = sum(cost.forward_ns for cost in profile.costs)
    backward_ns = sum(cost.backward_ns for cost in profile.costs)
    say(
        f"{heading} ({profile.environment}): forward {format_ns(forward_ns)}, "
        f"backward {format_ns(backward_ns)}, one op after the other"
    )
