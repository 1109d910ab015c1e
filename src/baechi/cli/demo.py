"""The demo: two real models that fit no single device are split, trained and compared.

Each model is traced and profiled once. Then every placer places the same graph on logical CPU
devices whose memory is too small for the whole, the model runs and trains on them, and what was
predicted stands beside what was measured. The unsplit model, from the same weights on the same
data and with as many threads as one device has, is what every result is compared with. Each
placement's step and peaks are measured (`PlacedModule.measure`) and the prediction's error told.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import baechi
from baechi.cli.demo_models import Job, demo_jobs
from baechi.errors import ExecutionError, InfeasibleError, InputError
from baechi.records.cluster import Cluster, Link
from baechi.records.graph import OpGraph
from baechi.records.measurement import Measurement
from baechi.records.placement import Placement, Schedule
from baechi.reporting import error_text, write_html, write_trace
from baechi.reporting.figures import require_plotly
from baechi.storage.serialization import dump
from baechi.units import format_bytes, format_ns

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from baechi.traced.traced_model import Traced

PLACERS: Final = ("m-topo", "m-etf", "m-sct", "auto")
STEPS: Final = 5


@final
@dataclass(frozen=True)
class Training:
    """What a few steps of training gave; outputs and gradients are those of the first.

    Attributes:
        losses: Of every step.
        outputs: Tensors that the model returned.
        gradients: Parameter name to gradient.
        step_ns: The median time of a forward and a backward.
        measured: What `PlacedModule.measure` says, if this is of a placed model.
    """

    losses: tuple[float, ...]
    outputs: tuple["torch.Tensor", ...]
    gradients: dict[str, "torch.Tensor"]
    step_ns: int
    measured: Measurement | None = None


@final
@dataclass(frozen=True)
class Row:
    """One placer's result; `twin` is the placer whose placement, and so whose run, it shares."""

    placer: str
    placing_s: float
    placement: Placement
    schedule: Schedule
    training: Training
    difference: float
    is_close: bool
    twin: str = ""


def run(out: Path, *, quick: bool = False) -> None:
    """Shows both models and writes their reports into `out`.

    Raises:
        InputError: Something that the demo needs is not installed, or `out` cannot be made.
    """
    from rich.console import Console

    jobs = demo_jobs(quick=quick)
    require_plotly()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make folder {out}: {error.strerror}.") from error
    console = Console()
    started = time.perf_counter()
    for job in jobs:
        show(job, out, console)
    console.rule()
    _say(console, f"Done in {time.perf_counter() - started:.0f} s. What to look at next:\n")
    for job in jobs:
        path = out / job.name
        _say(console, f"  {path}.html: the placement of {job.title}; open it in a browser")
        _say(console, f"  {path}.trace.json: its step; load it at https://ui.perfetto.dev")
    name = jobs[0].name
    _say(console, "\nThe same without torch, from the files:\n")
    _say(console, f"  cd {out}")
    _say(console, f"  baechi solve {name}.graph.json {name}.cluster.json --placer m-etf")


def show(job: Job, out: Path, console: "Console") -> tuple[Row, ...]:
    """Places, runs, trains and reports one model; returns what each placer gave.

    Raises:
        ExecutionError: A placed model's results are not the unsplit model's.
    """
    import torch

    from baechi.torch_support.torch_devices import torch_threads

    console.rule(f"[bold]{job.title}")
    torch.manual_seed(0)
    model, args, kwargs = job.build()
    model.train()
    threads = max(1, torch.get_num_threads() // job.devices)
    with console.status("tracing"):
        traced = baechi.trace(model, args, kwargs)
    _say(console, f"Traced by {traced.rung}: {len(traced.ops)} operators.")
    profile = baechi.profile(traced, device="cpu", threads=threads)
    graph = traced.graph(profile, training=True, optimizer=job.optimizer)
    alone, cluster = _devices(job, graph)
    names = [device.name for device in cluster.devices]
    limit = format_bytes(cluster.devices[0].memory_bytes)
    _say(
        console,
        f"Training it with {job.optimizer} needs {format_bytes(alone.peak_bytes[0])} on one device;"
        f" {', '.join(names)} have {limit} each.",
    )
    _say(console, f"One device: {_refusal(graph, cluster)}", style="yellow")

    start = {name: value.clone() for name, value in model.state_dict().items()}
    rows: list[Row] = []
    with _progress(console) as progress, torch_threads(threads):
        task = progress.add_task("unsplit", total=(STEPS + 1) * (1 + len(PLACERS)))
        reference = _train(model, job, args, kwargs, lambda: progress.advance(task))
        for placer in PLACERS:
            progress.update(task, description=placer)
            model.load_state_dict(start)
            before = time.perf_counter()
            placement = baechi.solve(graph, cluster, placer=placer)
            placing_s = time.perf_counter() - before
            row = _row_of_twin(placer, placing_s, placement, rows)
            if row is None:
                schedule = baechi.simulate(graph, cluster, placement)
                placed = baechi.apply(
                    traced, placement, graph=graph, cluster=cluster, threads_per_device=threads
                )
                training = _train(placed, job, args, kwargs, lambda: progress.advance(task))
                placed.unplace()
                equality = _compare(training, reference)
                numbers = replace(training, outputs=(), gradients={})  # the tensors may go
                row = Row(placer, placing_s, placement, schedule, numbers, *equality)
            else:
                progress.advance(task, STEPS + 1)
            rows.append(row)
    unsplit_ns = (alone.makespan_ns, reference.step_ns)
    console.print(_costs(graph, rows, names, unsplit_ns))
    console.print(_results(rows, reference))
    for row in rows:
        fallback = row.placement.stats.get("fallback")
        if fallback is not None:
            _say(console, f"{row.placer} alone found none that fits; this is {fallback}'s.")
    _write(job, out, traced, (graph, cluster), rows[-1])
    wrong = [row.placer for row in rows if not row.is_close]
    if wrong:
        raise ExecutionError(
            f"{job.title} placed by {', '.join(wrong)} does not equal the unsplit model."
        )
    return tuple(rows)


def _row_of_twin(
    placer: str, placing_s: float, placement: Placement, rows: Sequence[Row]
) -> Row | None:
    """The row of a placer that found what an earlier one had found: the same run, told once."""
    for row in rows:
        found = row.placement
        if (found.devices, found.order) == (placement.devices, placement.order):
            twin = row.twin or row.placer
            return replace(row, placer=placer, placing_s=placing_s, placement=placement, twin=twin)
    return None


def _devices(job: Job, graph: OpGraph) -> tuple[Schedule, Cluster]:
    """The step on one device without a limit, and the cluster whose limits are below its need."""
    link = Link(latency_ns=0, bytes_per_s=10**9)
    unlimited = Cluster.uniform(1, 2**62, link)
    alone = baechi.simulate(graph, unlimited, baechi.solve(graph, unlimited, placer="single"))
    share_bytes = int(alone.peak_bytes[0] * job.share)
    limits = {f"cpu:{device}": share_bytes for device in range(job.devices)}
    cluster: Cluster = baechi.probe(limits)
    return alone, cluster


def _refusal(graph: OpGraph, cluster: Cluster) -> str:
    try:
        baechi.solve(graph, cluster, placer="single")
    except InfeasibleError as error:
        return str(error)
    return "it fits, against all expectation."


def _train(
    model: Any,
    job: Job,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    advance: Callable[[], None],
) -> Training:
    """Five steps from the model's present weights; a placed model's steps are then measured."""
    import torch

    from baechi.tracing.pytrees import tensors_in

    if job.optimizer == "momentum":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate)
    losses, times = [], []
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        before = time.perf_counter_ns()
        output = model(*args, **kwargs)
        loss = job.loss(output)
        loss.backward()
        times.append(time.perf_counter_ns() - before)
        losses.append(loss.item())
        if number == 0:
            outputs = tuple(tensor.detach().clone() for tensor in tensors_in(output))
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        del output, loss
        optimizer.step()
        advance()
    optimizer.zero_grad()
    measured = model.measure(STEPS, optimizer=optimizer) if hasattr(model, "measure") else None
    advance()
    step_ns = int(statistics.median(times))
    return Training(tuple(losses), outputs, gradients, step_ns, measured)


def _compare(placed: Training, reference: Training) -> tuple[float, bool]:
    """The largest difference of any output or gradient, and whether all are close."""
    import torch

    if placed.gradients.keys() != reference.gradients.keys():
        return float("inf"), False
    pairs = list(zip(placed.outputs, reference.outputs, strict=True))
    pairs += [(value, reference.gradients[name]) for name, value in placed.gradients.items()]
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    try:
        for one, other in pairs:
            torch.testing.assert_close(one, other)
    except AssertionError:
        return difference, False
    return difference, True


def _costs(
    graph: OpGraph, rows: Sequence[Row], names: Sequence[str], unsplit_ns: tuple[int, int]
) -> "Table":
    """For each placer what was predicted, below it what was measured, and the error in percent."""
    title = "Step, peak memory of each device, and bytes moved"
    table = _empty_table(title, ("placer", ""))
    for header in ("step", *names, "moved"):
        table.add_column(header, justify="right", no_wrap=True)
    predicted_ns, measured_ns = unsplit_ns
    table.add_row("unsplit", "predicted", format_ns(predicted_ns))
    table.add_row("", "measured", format_ns(measured_ns))
    table.add_row("", "error", error_text(predicted_ns, measured_ns))
    table.add_row("one device", "refused")
    for row in rows:
        schedule, measured = row.schedule, row.training.measured
        sent = sum(graph.tensors[transfer.tensor].nbytes for transfer in schedule.transfers)
        if measured is None:
            continue
        plan = (schedule.makespan_ns, *schedule.peak_bytes, sent)
        real = (measured.step_ns, *measured.peak_bytes, measured.moved_bytes)
        for title, what, (step_ns, *sizes) in (
            (row.placer, "predicted", plan),
            ("", "measured", real),
        ):
            table.add_row(title, what, format_ns(step_ns), *map(format_bytes, sizes))
        errors = (error_text(one, other) for one, other in zip(plan, real, strict=True))
        table.add_row("", "error", *errors)
    return table


def _results(rows: Sequence[Row], reference: Training) -> "Table":
    """For each placer its own time, its equality with the unsplit model, and its losses."""
    table = _empty_table("The same training: equality with the unsplit model, losses", ("placer",))
    headers = ("placed in", "equal", *(f"loss {step + 1}" for step in range(STEPS)))
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row("unsplit", "", "", *(f"{loss:.4f}" for loss in reference.losses))
    for row in rows:
        equal = "bitwise" if row.difference == 0 else f"to {row.difference:.0e}"
        equal = equal if row.is_close else f"[red]off by {row.difference:.0e}"
        equal = f"as {row.twin}" if row.twin else equal
        losses = (f"{loss:.4f}" for loss in row.training.losses)
        table.add_row(row.placer, f"{row.placing_s * 1e3:.0f} ms", equal, *losses)
    return table


def _empty_table(title: str, columns: Sequence[str]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False  # three devices in 80 columns
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _write(
    job: Job, out: Path, traced: "Traced", problem: tuple[OpGraph, Cluster], row: Row
) -> None:
    """The report, the trace and the files of one placement."""
    graph, cluster = problem
    path = str(out / job.name)
    parts = (*problem, row.placement, row.schedule)
    title = f"{job.title} on {len(cluster.devices)} devices"
    measured = row.training.measured
    write_html(f"{path}.html", *parts, traced=traced, measured=measured, title=title)
    write_trace(f"{path}.trace.json", *parts, traced=traced)
    dump(graph, f"{path}.graph.json")
    dump(cluster, f"{path}.cluster.json")
    dump(row.placement, f"{path}.placement.json")


@contextmanager
def _progress(console: "Console") -> Iterator["Progress"]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("training, {task.description:8}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _say(console: "Console", text: str, *, style: str = "") -> None:
    """A line of text that is not read as markup."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)
