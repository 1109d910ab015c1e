"""Arguments, output and errors that the commands share."""

import errno
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from baechi.cli.named_models import load_model
from baechi.errors import BaechiError, InfeasibleError, InputError, reason_of
from baechi.records import device_kinds
from baechi.records.cluster import Cluster, Link
from baechi.records.constraints import Constraints
from baechi.records.op_costs import Profile
from baechi.records.optimizer_state import OPTIMIZERS, check_optimizer
from baechi.storage.serialization import dump, load
from baechi.traced.checkpoint_units import named_units
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes, format_ns

# What the extra `serve` installs for the service.
_SERVES = ("uvicorn", "fastapi", "prometheus_client", "starlette", "pydantic")


class Group(TyperGroup):
    """Turns what Baechi raises on purpose into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit 2 on an error, 3 where nothing fits, 130 on Ctrl-C."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            failure = _failure(error, ctx.invoked_subcommand)
            if failure is None:
                raise
            text, code = failure
            say(text, error=True)
            raise typer.Exit(code) from error


def _failure(error: BaseException, command: str | None) -> tuple[str, int] | None:
    """The message and the exit code for an error; `None` for an unexpected one."""
    needs = f"error: `baechi {command}` needs"
    code = 2
    match error:
        case InfeasibleError():
            text, code = f"does not fit: {error}", 3
        case BaechiError():
            text = f"error: {error}"
        case ModuleNotFoundError(name="torch"):
            text = f"{needs} torch 2.11 or later, which is not here: pip install 'baechi[torch]'."
        case ModuleNotFoundError(name=name) if name in _SERVES:
            text = f"{needs} {name}: pip install 'baechi[serve]'."
        case OSError() if error.errno != errno.EPIPE:  # else the reader of the output is gone
            text = f"error: {error.filename or 'output'}: {reason_of(error)}."
        case KeyboardInterrupt():
            text, code = "interrupted", 130
        case _:
            return None
    return text, code


MODEL_HELP = (
    "`file.py:function` or `package.module:function`; the function returns `(model, args)` or "
    "`(model, args, kwargs)`."
)
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
MaybeModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
GraphArgument = Annotated[Path, typer.Argument(metavar="GRAPH", help="A graph file.")]
ClusterArgument = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file.")]
PlacementArgument = Annotated[Path, typer.Argument(metavar="PLACEMENT", help="A placement file.")]


def writable(path: Path | None) -> Path | None:
    """The path, if a file can be made there: checked before minutes of work, not after."""
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {str(path.parent)!r}.")
    if path is not None and path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it.")
    return path


def no_folder(path: Path | None) -> Path | None:
    """The path of a file that is made where there is none."""
    if path is not None and path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it.")
    return path


def known_optimizer(name: str) -> str:
    """The name, if it is an optimizer's: checked before operators are measured."""
    check_optimizer(name)
    return name


def refuse(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raises an error for options that mean nothing beside the others."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')} means nothing here: {why}")


OutOption = Annotated[
    Path | None, typer.Option("-o", "--out", help="Write the result here.", callback=writable)
]
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
        callback=known_optimizer,
    ),
]
PlacerOption = Annotated[
    str,
    typer.Option(
        help="auto, m-topo, m-etf, m-sct, heft, peft, contiguous, metis, local-search, single, "
        "round-robin or random; auto takes the best of them and searches on."
    ),
]
EffortOption = Annotated[
    str, typer.Option(help="How long auto searches: fast, balanced (seconds), thorough (a minute).")
]
ConstraintsOption = Annotated[
    Path | None,
    typer.Option(
        help="A constraints file: pins, forbidden devices, margins. `--max-devices` and `--pin` "
        "go on top of it."
    ),
]
# Their maxima leave out what is endless and what an integer of ns or bytes cannot hold.
LatencyOption = Annotated[float, typer.Option(min=0, max=1e9, help="Their links' latency.")]
OverheadOption = Annotated[
    float,
    typer.Option(min=0, max=1e9, help="How long each transfer keeps the receiving device busy."),
]
RateOption = Annotated[float, typer.Option(min=1e-9, max=1e9, help="Their links' rate.")]
MaxDevicesOption = Annotated[int | None, typer.Option(help="Use at most this many devices.")]
CheckpointOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SUBMODULE",
        help="Run this submodule's forward again in the backward instead of keeping what it made: "
        "a path or a pattern such as 'h.*'; may be given repeatedly.",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(metavar="OP=DEVICE", help="Run an op or a group there; may be given repeatedly."),
]


def limits_of(
    file: Path | None, max_devices: int | None, pins: list[str] | None
) -> Constraints | None:
    """The constraints of a file, and those of the options on top; `None` where there are none."""
    limits = load(file, Constraints) if file is not None else Constraints()
    if max_devices is not None:
        limits = replace(limits, max_devices=max_devices)
    pinned = dict(limits.pins)
    for pin in pins or []:
        name, equals, device = pin.rpartition("=")
        if not equals:
            raise InputError(f"pin {pin!r} names no device; write OP=DEVICE.")
        if pinned.setdefault(name, device) != device:
            raise InputError(f"{name!r} is pinned to {pinned[name]!r} and to {device!r}.")
    limits = replace(limits, pins=pinned)
    return None if limits == Constraints() else limits


def is_counted(cluster: Path) -> bool:
    """True if it is a count and a kind, and no file."""
    return str(cluster).partition("x")[0].isdigit() and not cluster.exists()


def cluster_of(text: Path, link: Link) -> Cluster:
    """The cluster in a file, or a count and a kind such as `8xH100-SXM-80GB`, joined by `link`."""
    return device_kinds.cluster(str(text), link) if is_counted(text) else load(text, Cluster)


def trace_model(
    model: str,
    out: Path | None = None,
    *,
    inference: bool = False,
    checkpoint: list[str] | None = None,
) -> Traced:
    """The traced model behind a name on the command line; printed, and written to `out`.

    Raises:
        InputError: There is no such model, or no submodules for `--checkpoint`.
    """
    import baechi

    module, args, kwargs = load_model(model)
    traced: Traced = baechi.trace(module, args, kwargs)
    say(f"{traced.name}: {len(traced.ops)} operators, traced by {traced.rung}")
    for attempt in traced.attempts[:-1]:
        say(f"  {attempt.rung} did not work: {attempt.reason}")
    nbytes = sum(op.trained_bytes + op.frozen_bytes for op in traced.ops)
    say(f"  parameters and buffers: {format_bytes(nbytes)}")
    write(traced, out)
    if checkpoint and inference:
        raise InputError("give --inference or --checkpoint: an inference keeps nothing anyway.")
    if checkpoint:
        units = named_units(traced, checkpoint)
        say(f"  {len(units)} parts run forward again: {', '.join(unit.name for unit in units)}")
    return traced


def say_costs(heading: str, profile: Profile) -> None:
    """Prints the costs of all operators together, and their source."""
    forward_ns = sum(cost.forward_ns for cost in profile.costs)
    backward_ns = sum(cost.backward_ns for cost in profile.costs)
    say(
        f"{heading} ({profile.environment}): forward {format_ns(forward_ns)}, "
        f"backward {format_ns(backward_ns)}, one op after the other"
    )


def write(value: object, out: Path | None) -> None:
    """Save a value and print its path, if there is one."""
    if out is not None:
        dump(value, out)
        say(f"wrote {out}")


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a line, without the place in the code that gave it."""
    say(f"warning: {message}", error=True)


def say(text: str, *, error: bool = False) -> None:
    """One line, not wrapped, not read as markup; red on stderr for an error."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=error, soft_wrap=True, highlight=False)
    console.print(Text(text, style="red" if error else ""))


def show(renderable: Any) -> None:
    """Prints what rich can draw as wide as the terminal; a table wider, before it loses digits."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console()
    if isinstance(renderable, Table):
        free = console.options.update(max_width=160)
        needed = Measurement.get(console, free, renderable).maximum
        console = Console(width=max(console.width, needed))
    console.print(renderable)
