"""The command line: a command for each function of the API, which reads and writes files.

Everything that needs torch, plotly or the core is imported by the command that needs it, so that
`baechi --help` comes at once.
"""

import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import baechi
from baechi.cli import adapter_commands, cost_commands
from baechi.cli.cluster_commands import cluster as simulate_jobs
from baechi.cli.cluster_commands import serve
from baechi.cli.console import (
    MODEL_HELP,
    GraphArgument,
    Group,
    OutOption,
    cluster_in,
    import_file,
    say,
    show,
    trace_model,
    writable,
    write,
)
from baechi.errors import InputError
from baechi.records import device_kinds
from baechi.records.cluster import Cluster, Constraints, Link
from baechi.records.graph import OpGraph
from baechi.records.placement import Placement, Schedule
from baechi.storage.serialization import load
from baechi.traced.traced_model import Traced
from baechi.units import format_bytes, format_ns

ClusterArgument = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster file.")]
PlacementArgument = Annotated[Path, typer.Argument(metavar="PLACEMENT", help="A placement file.")]
ConstraintsOption = Annotated[
    Path | None,
    typer.Option(
        help="A constraints file: pins, forbidden devices, margins. `--max-devices` and `--pin` "
        "go on top of it."
    ),
]
MaxDevicesOption = Annotated[int | None, typer.Option(help="Use at most this many devices.")]
_DEMO = Path("benchmarks", "demo.py")
PinOption = Annotated[
    list[str] | None,
    typer.Option(metavar="OP=DEVICE", help="Run an op or a group there; may be given repeatedly."),
]

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
        say(f"baechi {baechi.__version__}")
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
def trace(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)], out: OutOption = None
) -> None:
    """Find the operators of a model and the tensors between them.

    Prints the rung that worked, and why earlier ones failed. The file holds the operators
    but not the model, so it can be read where there is no torch.

    For example, write `model.py` with

        import torch, transformers

        def gpt2():
            config = transformers.GPT2Config()
            ids = torch.randint(0, config.vocab_size, (2, 64))
            return transformers.GPT2LMHeadModel(config), (ids,), {"labels": ids}

    and type

        baechi trace model.py:gpt2 -o gpt2.trace.json
    """
    trace_model(model, out)


app.command()(cost_commands.profile)
app.command()(cost_commands.estimate)
app.command()(cost_commands.calibrate)


@app.command()
def solve(
    ctx: typer.Context,
    graph: GraphArgument,
    cluster: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER", help="A cluster file, or a count and a kind: 8xH100-SXM-80GB."
        ),
    ] = None,
    *,
    placer: Annotated[
        str,
        typer.Option(
            help="auto, m-topo, m-etf, m-sct, heft, peft, contiguous, metis, local-search, single, "
            "round-robin or random; auto takes the best of them and searches on."
        ),
    ] = "auto",
    effort: Annotated[
        str,
        typer.Option(help="How long auto searches: fast, balanced (seconds), thorough (a minute)."),
    ] = "balanced",
    out: OutOption = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Instead of CLUSTER: this many equal devices.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Their memory.")] = "16GiB",
    # The maxima leave out what is endless and what an integer of ns or bytes cannot hold.
    latency_us: Annotated[float, typer.Option(min=0, max=1e9, help="Their links' latency.")] = 10.0,
    overhead_us: Annotated[
        float,
        typer.Option(
            min=0,
            max=1e9,
            help="How long each transfer keeps the receiving device busy, or the thread that "
            "launches for it; 0 stands for 15 between GPUs of a kind.",
        ),
    ] = 0.0,
    gbytes_per_s: Annotated[
        float, typer.Option(min=1e-9, max=1e9, help="Their links' rate.")
    ] = 12.0,
    save_cluster: Annotated[
        Path | None, typer.Option(help="Write the cluster here, for `report`.", callback=writable)
    ] = None,
    constraints: ConstraintsOption = None,
    max_devices: MaxDevicesOption = None,
    pin: PinOption = None,
    microbatches: Annotated[
        str,
        typer.Option(help="Run the graph so many times in a step: it is of a micro-batch."),
    ] = "1",
    objective: Annotated[
        str, typer.Option(help="step; or throughput, of runs one behind the other.")
    ] = "step",
) -> None:
    """Decide which device runs which operator, and in what order.

    Prints the predicted step, how far it may be above the shortest possible one, and every device's
    memory. If no placement fits, prints what is missing and exits with code 3. The cluster comes
    from `baechi probe`, from your scheduler, or from `--devices`.

    With `--microbatches` the devices take turns with several runs of the graph, as in a pipeline.

    For example:

        baechi solve gpt2.graph.json --devices 4 --memory 2GiB -o gpt2.placement.json
        baechi solve gpt2.graph.json cluster.json --pin lm_head/linear=cuda:0
        baechi solve llama.graph.json 8xH100-SXM-80GB --latency-us 5 --gbytes-per-s 200
        baechi solve gpt2.graph.json --devices 4 --microbatches 8
        baechi solve gpt2.graph.json --devices 4 --objective throughput
    """
    from baechi.reporting import Plan, text_report

    if cluster is None and devices is None:
        raise InputError("there is no cluster; give a file, a count and a kind, or --devices.")
    if cluster is not None and devices is not None:
        raise InputError(f"give {cluster} or --devices, and not both.")
    link = Link(
        round(latency_us * 1e3), round(gbytes_per_s * 1e9), overhead_ns=round(overhead_us * 1e3)
    )
    if cluster is None:
        target = Cluster.uniform(devices or 1, memory, link)
    else:
        _refuse(ctx, ("memory",), f"it is that of --devices, and {cluster} says its own.")
        if str(cluster).partition("x")[0].isdigit() and not cluster.exists():
            target = device_kinds.cluster(str(cluster), link)
        else:
            options = ("latency_us", "overhead_us", "gbytes_per_s")
            _refuse(ctx, options, f"the links are those of {cluster}.")
            target = cluster_in(cluster)
    operators = load(graph, OpGraph)
    limits = _limits_of(constraints, max_devices, pin)
    placement = baechi.solve(
        operators,
        target,
        placer,
        effort=effort,
        constraints=limits,
        microbatches=int(microbatches) if microbatches.isdecimal() else microbatches,
        objective=objective,
    )
    schedule = baechi.simulate(operators, target, placement, limits)
    show(text_report(Plan(operators, target, placement, schedule)))
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
    r"""Predict when everything happens: one step of a placement on a cluster.

    The schedule has the start and end of every operator and transfer, and the peak of every
    device's memory; where that is more than there is, it says so. A constraint that the placement
    violates is an error.

    For example:

        baechi simulate gpt2.graph.json cluster.json gpt2.placement.json \
          -o gpt2.schedule.json
    """
    from baechi.problem.simulation import overflows

    operators, target = load(graph, OpGraph), cluster_in(cluster)
    limits = _limits_of(constraints, max_devices, pin)
    schedule = baechi.simulate(operators, target, load(placement, Placement), limits)
    gap = f"{schedule.gap:.1%} above the lower bound" if schedule.lower_bound_ns else "no bound"
    say(f"one step takes {format_ns(schedule.makespan_ns)} ({gap})")
    for device, peak_bytes in zip(target.devices, schedule.peak_bytes, strict=True):
        limit = format_bytes(device.memory_bytes)
        say(f"{device.name}: at most {format_bytes(peak_bytes)} of {limit}")
    for name, missing in overflows(schedule, target, limits):
        say(f"this placement does not fit: {name} lacks {format_bytes(missing)}", error=True)
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
    r"""Show a placement: as text, as a page that opens without a network, as a trace.

    Without `-o` and `--trace` it prints text.

    For example:

        baechi report gpt2.graph.json cluster.json gpt2.placement.json \
          -o plan.html --trace plan.trace.json
    """
    from baechi.reporting import Plan, text_report, write_html, write_trace

    operators, target = load(graph, OpGraph), cluster_in(cluster)
    decided = load(placement, Placement)
    if schedule is not None:
        times = load(schedule, Schedule)
    else:
        times = baechi.simulate(operators, target, decided)
    known = load(traced, Traced) if traced is not None else None
    plan = Plan(operators, target, decided, times, known)
    if out is None and trace_file is None:
        show(text_report(plan))
    if out is not None:
        write_html(out, plan)
        say(f"wrote {out}; open it in a browser")
    if trace_file is not None:
        write_trace(trace_file, plan)
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
    from baechi.probing.cluster_probe import survey
    from baechi.probing.link_probe import FREE_BYTES_PER_S

    found = survey(_targets(devices or []), anew=True)
    cluster = found.cluster
    for device in cluster.devices:
        say(f"{device.name}: {format_bytes(device.memory_bytes)} left, kind {device.kind or '-'}")
    for src, row in enumerate(cluster.links):
        for dst, link in enumerate(row):
            if link is not None and src != dst:
                names = f"{cluster.devices[src].name} to {cluster.devices[dst].name}"
                by_reference = link.bytes_per_s >= FREE_BYTES_PER_S
                rate = "no copy" if by_reference else f"{link.bytes_per_s / 1e9:.2f} GB/s"
                receiver = cluster.devices[dst]
                whose = "host" if receiver.host and receiver.launches_ahead else "receiver"
                busy = f"{format_ns(link.overhead_ns)} of the {whose}'s time"
                say(f"{names}: {rate}, after {format_ns(link.latency_ns)}, {busy}")
    for remark in found.remarks:
        say(remark)
    write(cluster, out)


app.command()(serve)
app.command()(adapter_commands.free)
app.command()(adapter_commands.claims)
app.command()(adapter_commands.slurm)
app.command()(adapter_commands.extender)
app.command()(adapter_commands.operator)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("baechi-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Small models, in seconds.")] = False,
) -> None:
    """Split two real models that fit no single device, train them, compare with the prediction.

    A GPT-2 and an Inception-v3 with random weights, on logical CPU devices; then the GPT-2 in
    micro-batches. Takes five to eight minutes and some 6 GB of memory. Needs torch, transformers,
    plotly, and a checkout of Baechi.

    For example:

        baechi demo --out baechi-demo
    """
    paths = [root / _DEMO for root in (Path.cwd(), Path(__file__).resolve().parents[3])]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise InputError(
            f"the demo is {_DEMO}, which is in the source but not in the installed package: run "
            "it in a checkout of Baechi."
        )
    import_file(found).run(out, quick=quick)


app.command("cluster")(simulate_jobs)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    ctx: typer.Context,
    placement: PlacementArgument,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A script of ranks.")],
) -> None:
    """Start a script in as many processes as a placement has devices.

    It is `torchrun` with that number. The script places its model on `baechi.ranks()`; what follows
    it on the command line is its own. For example:

        baechi run plan.json train.py --epochs 3
    """
    if not script.is_file():
        raise InputError(f"there is no script {script}.")
    n = max(load(placement, Placement).devices, default=0) + 1
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)]
    raise typer.Exit(subprocess.run([*launcher, script, *ctx.args], check=False).returncode)


def _targets(devices: list[str]) -> Any:
    """The argument of `probe`: names, names with a limit, or `None` for all."""
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


def _refuse(ctx: typer.Context, names: Sequence[str], why: str) -> None:
    """Raises an error for options that mean nothing beside the others."""
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"--{name.replace('_', '-')} means nothing here: {why}")


def _limits_of(
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


def main() -> None:
    """The entry point `baechi`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of a terminal that is not UTF-8, perhaps
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="baechi")
