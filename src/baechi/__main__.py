"""The command line: the words of the API, reading and writing its files.

Everything that needs torch, plotly or the core is imported by the command that needs it, so that
`baechi --help` comes at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baechi import __version__
from baechi.console import (
    ClusterArgument,
    ConstraintsOption,
    EffortOption,
    GraphArgument,
    Group,
    MaxDevicesOption,
    ModelArgument,
    OutOption,
    PinOption,
    PlacementArgument,
    PlacerOption,
    limits_of,
    say,
    show,
    writable,
    write,
)
from baechi.devices import Cluster, Link
from baechi.errors import InputError
from baechi.graph import OpGraph
from baechi.named_models import load_model
from baechi.placement import Placement, Schedule
from baechi.serialization import load
from baechi.serving import serve
from baechi.traced import Traced
from baechi.units import format_bytes, format_ns

if TYPE_CHECKING:
    from baechi.costs import Profile


app = typer.Typer(
    cls=Group,
    name="baechi",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"baechi {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Splits a PyTorch model over devices: traces it, costs it, places it, predicts the step.

    The way of the files:

        baechi profile model.py:gpt2 -o gpt2.profile.json --graph gpt2.graph.json
        baechi probe cuda:0 cuda:1 -o cluster.json
        baechi solve gpt2.graph.json cluster.json -o gpt2.placement.json
        baechi report gpt2.graph.json cluster.json gpt2.placement.json -o plan.html

    `solve`, `simulate` and `report` need no torch and no device. `baechi demo` shows all of it.
    """


@app.command()
def trace(model: ModelArgument, out: OutOption = None) -> None:
    """Find the operators of a model and the tensors between them.

    Says which way of tracing worked, and why the better ones did not. The file holds the operators
    but not the model, so it can be read where there is no torch.

    For example, write `model.py` with

        def gpt2():
            config = transformers.GPT2Config()
            ids = torch.randint(0, config.vocab_size, (2, 64))
            return transformers.GPT2LMHeadModel(config), (ids,), {"labels": ids}

    and type

        baechi trace model.py:gpt2 -o gpt2.trace.json
    """
    _describe(_trace(model), out)


@app.command()
def profile(
    model: ModelArgument,
    *,
    device: Annotated[str, typer.Option(help="Where to measure, as torch names it.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads per operator; torch's own if absent.")
    ] = None,
    out: OutOption = None,
    graph: Annotated[
        Path | None, typer.Option(help="Write the operator graph here.", callback=writable)
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", help="Write the traced model here.", callback=writable),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="The graph of a forward alone, not of training.")
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(help="Whose state a training step holds: none, sgd, momentum, adam, adamw."),
    ] = "adamw",
) -> None:
    """Measure what every operator of a model costs, alone, on one device.

    With `--graph` also writes the operator graph of one step, which is all that `solve` needs.
    The model need not fit the device: operators are measured one by one.

    For example:

        baechi profile model.py:gpt2 --threads 1 -o gpt2.profile.json \
          --graph gpt2.graph.json
    """
    import baechi

    traced = _trace(model)
    _describe(traced, trace_file)
    measured: Profile = baechi.profile(traced, device=device, threads=threads)
    forward_ns = sum(cost.forward_ns for cost in measured.costs)
    backward_ns = sum(cost.backward_ns for cost in measured.costs)
    say(
        f"measured on {device} ({measured.environment}): forward {format_ns(forward_ns)}, "
        f"backward {format_ns(backward_ns)}, one op after the other"
    )
    write(measured, out)
    if graph is not None:
        training_optimizer = None if inference else optimizer
        write(traced.graph(measured, training=not inference, optimizer=training_optimizer), graph)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def estimate() -> None:
    """Compute what every operator costs, without the device (comes in a later version).

    Until then `baechi profile` measures it.
    """
    raise InputError(
        "computed costs come in a later version. `baechi profile MODEL --device cuda:0` measures "
        "them on a device that is here."
    )


@app.command()
def solve(
    graph: GraphArgument,
    cluster: Annotated[
        Path | None, typer.Argument(metavar="CLUSTER", help="A cluster file.")
    ] = None,
    *,
    placer: PlacerOption = "auto",
    effort: EffortOption = "balanced",
    out: OutOption = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Instead of CLUSTER: this many equal devices.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Their memory.")] = "16GiB",
    latency_us: Annotated[float, typer.Option(min=0, help="Their links' latency.")] = 10.0,
    gbytes_per_s: Annotated[float, typer.Option(min=1e-9, help="Their links' rate.")] = 12.0,
    save_cluster: Annotated[
        Path | None, typer.Option(help="Write the cluster here, for `report`.", callback=writable)
    ] = None,
    constraints: ConstraintsOption = None,
    max_devices: MaxDevicesOption = None,
    pin: PinOption = None,
) -> None:
    """Decide which device runs which operator, and in what order.

    Prints the predicted step, how far it may be above the shortest possible one, and every device's
    memory. If no placement fits, says what is missing and leaves with code 3. The cluster comes
    from `baechi probe`, from your scheduler, or from `--devices`.

    For example:

        baechi solve gpt2.graph.json --devices 4 --memory 2GiB -o gpt2.placement.json
        baechi solve gpt2.graph.json cluster.json --effort thorough --pin embed=cuda:0
    """
    import baechi
    from baechi.reporting import text_report

    if (cluster is None) == (devices is None):
        raise InputError("give a cluster file or --devices, and not both.")
    if cluster is not None:
        target = load(cluster, Cluster)
    else:
        link = Link(round(latency_us * 1e3), round(gbytes_per_s * 1e9))
        target = Cluster.uniform(devices or 1, memory, link)
    operators = load(graph, OpGraph)
    limits = limits_of(constraints, max_devices, pin)
    placement = baechi.solve(operators, target, placer, effort=effort, constraints=limits)
    schedule = baechi.simulate(operators, target, placement, limits)
    show(text_report(operators, target, placement, schedule))
    write(placement, out)
    write(target, save_cluster)


@app.command()
def simulate(
    graph: GraphArgument,
    cluster: ClusterArgument,
    placement: PlacementArgument,
    out: OutOption = None,
    *,
    constraints: ConstraintsOption = None,
    max_devices: MaxDevicesOption = None,
    pin: PinOption = None,
) -> None:
    """Predict when everything happens: one step of a placement on a cluster.

    The schedule has the start and end of every operator and transfer, and the peak of every
    device's memory. A constraint that the placement violates is an error.

    For example:

        baechi simulate gpt2.graph.json cluster.json gpt2.placement.json -o \
          gpt2.schedule.json
    """
    import baechi

    operators, target = load(graph, OpGraph), load(cluster, Cluster)
    limits = limits_of(constraints, max_devices, pin)
    schedule = baechi.simulate(operators, target, load(placement, Placement), limits)
    gap = f"{schedule.gap:.1%} above the lower bound" if schedule.lower_bound_ns else "no bound"
    say(f"one step takes {format_ns(schedule.makespan_ns)} ({gap})")
    for device, peak_bytes in zip(target.devices, schedule.peak_bytes, strict=True):
        limit = format_bytes(device.memory_bytes)
        say(f"{device.name}: at most {format_bytes(peak_bytes)} of {limit}")
    write(schedule, out)


@app.command()
def report(
    graph: GraphArgument,
    cluster: ClusterArgument,
    placement: PlacementArgument,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write a page for a browser.", callback=writable),
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace for ui.perfetto.dev.", callback=writable),
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option(help="A schedule file; simulated if absent.")
    ] = None,
    traced: Annotated[
        Path | None, typer.Option(help="A trace file, for the model's name and lines of code.")
    ] = None,
) -> None:
    """Show a placement: as text, as a page that opens without a network, as a trace.

    Without `-o` and `--trace` it prints text.

    For example:

        baechi report gpt2.graph.json cluster.json gpt2.placement.json -o plan.html \
          --trace plan.trace.json
    """
    import baechi
    from baechi.reporting import text_report, write_html, write_trace

    operators, target = load(graph, OpGraph), load(cluster, Cluster)
    decided = load(placement, Placement)
    if schedule is not None:
        times = load(schedule, Schedule)
    else:
        times = baechi.simulate(operators, target, decided)
    known = load(traced, Traced) if traced is not None else None
    if out is None and trace_file is None:
        show(text_report(operators, target, decided, times, traced=known))
    if out is not None:
        write_html(out, operators, target, decided, times, traced=known)
        say(f"wrote {out}; open it in a browser")
    if trace_file is not None:
        write_trace(trace_file, operators, target, decided, times, traced=known)
        say(f"wrote {trace_file}; open it at ui.perfetto.dev")


@app.command()
def probe(
    devices: Annotated[
        list[str] | None,
        typer.Argument(metavar="DEVICE[=MEMORY]", help="All visible devices if absent."),
    ] = None,
    out: OutOption = None,
) -> None:
    """Find what is left on devices: free memory, and how fast tensors move between them.

    A memory after `=` is a limit that you set. `cpu:0` and `cpu:1` are two logical devices on the
    CPU, to try a placement without a GPU.

    For example:

        baechi probe cpu:0=1GiB cpu:1=1GiB -o cluster.json
    """
    import baechi

    cluster: Cluster = baechi.probe(_targets(devices or []))
    for device in cluster.devices:
        say(f"{device.name}: {format_bytes(device.memory_bytes)} left, kind {device.kind or '-'}")
    for src, row in enumerate(cluster.links):
        for dst, link in enumerate(row):
            if link is not None and src != dst:
                names = f"{cluster.devices[src].name} to {cluster.devices[dst].name}"
                rate = f"{link.bytes_per_s / 1e9:.2f} GB/s"
                say(f"{names}: {rate} after {format_ns(link.latency_ns)}")
    write(cluster, out)


app.command()(serve)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("baechi-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Small models, in seconds.")] = False,
) -> None:
    """Split two real models that fit no single device, train them, compare with the prediction.

    A GPT-2 and an Inception-v3 with random weights, on logical CPU devices. Takes up to three
    minutes and some 6 GB of memory. Needs torch, transformers and plotly.

    For example:

        baechi demo --out baechi-demo
    """
    from baechi.demo import run

    run(out, quick=quick)


def _trace(model: str) -> Traced:
    import baechi

    module, args, kwargs = load_model(model)
    traced: Traced = baechi.trace(module, args, kwargs)
    return traced


def _describe(traced: Traced, out: Path | None) -> None:
    say(f"{traced.name}: {len(traced.ops)} operators, traced by {traced.rung}")
    for attempt in traced.attempts[:-1]:
        say(f"  {attempt.rung} did not work: {attempt.reason}")
    nbytes = sum(op.trained_bytes + op.frozen_bytes for op in traced.ops)
    say(f"  parameters and buffers: {format_bytes(nbytes)}")
    write(traced, out)


def _targets(devices: list[str]) -> Any:
    """What `probe` takes: names, names with a limit, or `None` for all."""
    if not any("=" in device for device in devices):
        return devices or None
    limits = {}
    for device in devices:
        name, equals, memory = device.partition("=")
        if not equals:
            raise InputError(f"device {device!r} has no limit; write {device}=1GiB as the others.")
        if name in limits:
            raise InputError(f"device {name!r} is named twice.")
        limits[name] = memory
    return limits


def main() -> None:
    """The entry point `baechi`."""
    app(prog_name="baechi")


if __name__ == "__main__":
    main()
