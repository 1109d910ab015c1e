"""Arguments, output and errors that the commands share."""

import errno
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import baechi
from baechi.errors import BaechiError, InfeasibleError, InputError, described, reason_of
from baechi.records.cluster import Cluster, Topology
from baechi.storage.serialization import dump, load
from baechi.traced.checkpoint_units import named_units
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes

# What the extra `serve` installs for the service.
_SERVES = ("uvicorn", "fastapi", "prometheus_client", "starlette", "pydantic")


class Group(TyperGroup):
    """Turns what Baechi raises on purpose into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit 2 on an error, 3 where nothing fits, 130 on Ctrl-C."""
        try:
            with warnings.catch_warnings():
                # A line, without the place in the code that gave the warning.
                warnings.showwarning = lambda text, *_, **__: say(f"warning: {text}", error=True)
                return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            needs = f"error: `baechi {ctx.invoked_subcommand}` needs"
            code = 2
            match error:
                case InfeasibleError():
                    text, code = f"not placed: {error}", 3
                case BaechiError():
                    text = f"error: {error}"
                case ModuleNotFoundError(name="torch"):
                    text = f"{needs} torch 2.11 or later, which is not here: "
                    text += "pip install 'baechi[torch]'."
                case ModuleNotFoundError(name="httpx"):
                    text = f"{needs} httpx: pip install 'baechi[client]'."
                case ModuleNotFoundError(name=name) if name in _SERVES:
                    text = f"{needs} {name}: pip install 'baechi[serve]'."
                case OSError() if error.errno != errno.EPIPE:  # else the reader of it is gone
                    text = f"error: {error.filename or 'output'}: {reason_of(error)}."
                case KeyboardInterrupt():
                    text, code = "interrupted", 130
                case _:
                    raise
            say(text, error=True)
            raise typer.Exit(code) from error


MODEL_HELP = (
    "`file.py:function` or `package.module:function`; the function returns `(model, args)` or "
    "`(model, args, kwargs)`."
)


def writable(path: Path | None) -> Path | None:
    """The path, if a file can be made there: checked before minutes of work, not after."""
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {str(path.parent)!r}.")
    if path is not None and path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it.")
    return path


GraphArgument = Annotated[Path, typer.Argument(metavar="GRAPH", help="A graph file.")]
OutOption = Annotated[
    Path | None, typer.Option("-o", "--out", help="Write the result here.", callback=writable)
]


def trace_model(
    model: str,
    out: Path | None = None,
    *,
    inference: bool = False,
    checkpoint: list[str] | None = None,
) -> Traced:
    """The traced model behind a name on the command line; printed, and written to `out`."""
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


def devices_in(path: Path) -> Cluster | Topology:
    """The devices of a file that `probe` or `free` has written."""
    found = load(path)
    if not isinstance(found, Cluster | Topology):
        kind = type(found).__name__
        raise InputError(f"{path}: this file holds type {kind}, but Cluster or Topology is wanted.")
    return found


def cluster_in(path: Path) -> Cluster:
    """The cluster of a file of devices."""
    found = devices_in(path)
    return found if isinstance(found, Cluster) else found.cluster()


def write(value: object, out: Path | None) -> None:
    """Save a value and print its path, if there is one."""
    if out is not None:
        dump(value, out)
        say(f"wrote {out}")


def say(text: str, *, error: bool = False, style: str = "") -> None:
    """One line, not wrapped, not read as markup; red on stderr for an error."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=error, soft_wrap=True, highlight=False)
    console.print(Text(text, style="red" if error else style))


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


def load_model(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the function `file.py:function` or `package.module:function` returns."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise InputError(
            f"model {name!r} cannot be read; write file.py:function or package.module:function."
        )
    found: Any = import_file(Path(where)) if where.endswith(".py") else _import_name(where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if not n.startswith("_") and callable(vars(found)[n])]
            raise InputError(f"{where} has no {attribute!r}; it has {', '.join(public) or 'none'}.")
        found = getattr(found, part)
    return _checked(name, found)


def _checked(name: str, function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    shape = "it must return (model, args) or (model, args, kwargs), with args a tuple"
    if not callable(function):
        raise InputError(f"{name} is {function!r}, no function; {shape}.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{name} cannot be called without arguments: {error}; {shape}.") from None
    returned = _run(name, function)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise InputError(f"{name} returned a value of type {type(returned).__name__}; {shape}.")
    model, args, kwargs = (*returned, {})[:3]
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} args and {type(kwargs).__name__} kwargs"
        raise InputError(f"{name} returned {kinds}; {shape} and kwargs a dict.")
    return model, args, kwargs


def import_file(path: Path) -> Any:
    """The module in a file; raises `InputError` where there is none, or it fails."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where classes look for their module
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    _run(str(path), partial(spec.loader.exec_module, module))
    return module


def _run(name: str, function: Callable[[], Any]) -> Any:
    """The value that the user's code returns; where it fails, the error names its line."""
    try:
        return function()
    except Exception as error:
        raise InputError(f"{name} raised {described(error)}.") from error


def _import_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return _run(name, partial(importlib.import_module, name))
    except InputError as error:
        missing = getattr(error.__cause__, "name", None)
        if not isinstance(error.__cause__, ModuleNotFoundError) or missing is None:
            raise
        if not (name + ".").startswith(missing + "."):
            raise  # the module is there, and what it imports is not
        raise InputError(f"there is no module {missing!r}; is {name!r} a file.py?") from error
