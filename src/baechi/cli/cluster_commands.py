"""The commands about clusters of jobs: `baechi cluster` and `baechi serve`."""

import csv
import ipaddress
import os
import signal
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baechi.cli.console import devices_in, say, show
from baechi.errors import InputError, reason_of
from baechi.records.graph import OpGraph
from baechi.storage.serialization import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from baechi.cluster_simulation.fleet import Fleet, Slice
    from baechi.cluster_simulation.jobs import Job
    from baechi.cluster_simulation.results import SimulationResult
    from baechi.cluster_simulation.traces import Trace


def cluster(
    trace: Annotated[Path, typer.Option(help="The job trace.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the results.")],
    *,
    format: Annotated[  # noqa: A002
        str, typer.Option(help="tiresias, muri, philly, helios or pai.")
    ] = "tiresias",
    switches: Annotated[int, typer.Option(min=1, help="Switches.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes under each switch.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs on each node.")] = 4,
    policy: Annotated[
        str,
        typer.Option(
            help="fifo, shortest, dlas-gpu, ..., one of the table in docs/cluster.md; all compares "
            "them."
        ),
    ] = "fifo",
    scheme: Annotated[
        str | None,
        typer.Option(
            help="count, first-fit, consolidated, random, best-fit, spread, least-loaded or "
            "baechi; if absent, what the policy is meant for, which is best-fit for most."
        ),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            help="exclusive, time-sliced, mps, packed, interleaved or opportunistic; if absent, "
            "what the policy is meant for, which is exclusive for most."
        ),
    ] = None,
    packing: Annotated[int, typer.Option(min=1, help="At most so many jobs on a GPU.")] = 2,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU, such as 16GiB; not modeled if absent.")
    ] = None,
    slices: Annotated[
        list[str] | None,
        typer.Option(
            "--slice",
            metavar="SHARE[:MEMORY]",
            help="Cut every GPU into slices as MIG does: thousandths of its compute, and memory; "
            "given once per slice.",
        ),
    ] = None,
    graphs: Annotated[
        Path | None,
        typer.Option(help="Folder of MODEL.graph.json: jobs of these models carry their graph."),
    ] = None,
    serial: Annotated[
        float | None,
        typer.Option(
            help="Give jobs speed-up curves by Amdahl's law, for elastic policies: the part of "
            "their work that is serial."
        ),
    ] = None,
    watts: Annotated[
        str | None,
        typer.Option(
            metavar="IDLE:BUSY",
            help="What a GPU draws idle, and what more when it is busy, such as 60:240; results "
            "then have the energy.",
        ),
    ] = None,
    power_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Watts that all GPUs may draw in the mean under powerflow."),
    ] = None,
    preempt_cost: Annotated[int, typer.Option(min=0, help="Work lost when preempted.")] = 0,
    restart_cost: Annotated[int, typer.Option(min=0, help="Work that going on costs.")] = 0,
    compat: Annotated[
        str | None, typer.Option(help="tiresias: with the defects that its results need.")
    ] = None,
    gittins_samples: Annotated[
        Path | None, typer.Option(help="GPU-times, one per line; Tiresias' own if absent.")
    ] = None,
    malformed: Annotated[
        str, typer.Option(help="strict: a bad line is an error; skip: it is counted.")
    ] = "strict",
    seed: Annotated[int, typer.Option(help="For schemes that draw.")] = 0,
    plot: Annotated[bool, typer.Option(help="Draw plot.html (needs plotly).")] = True,
) -> None:
    r"""Run a trace of jobs on a simulated cluster: which job runs when, and what that costs.

    Writes `job.csv`, `cluster.csv`, `summary.json` and `plot.html` into the folder; with
    `--policy all` one folder per policy, a comparison and one picture of all. Times are in the
    trace's unit, seconds. The nine policies up to `dlas-gpu-gittins` are those of the Tiresias
    simulator, and with `--compat tiresias` agree with it job by job.

    For example:

        baechi cluster --trace jobs.csv --format tiresias --nodes 2 \
          --gpus-per-node 4 --policy dlas-gpu --scheme count --out results
    """
    from baechi.cluster_simulation.fleet import Fleet
    from baechi.cluster_simulation.jobs import amdahl
    from baechi.cluster_simulation.policies import (
        DEFAULTS,
        POLICIES,
        policy_named,
        scheme_named,
        sharing_named,
    )
    from baechi.cluster_simulation.results import (
        COMPARISON_FILES,
        RESULT_FILES,
        write_comparison,
        write_figure,
        write_result,
    )
    from baechi.cluster_simulation.simulator import simulate_cluster
    from baechi.cluster_simulation.traces import read_trace
    from baechi.units import parse_bytes

    names = POLICIES if policy == "all" else (policy,)
    samples = None if gittins_samples is None else _samples(gittins_samples)
    policies = [
        policy_named(name, compat=compat, samples=samples, budget_w=power_budget) for name in names
    ]
    chosen = [_usual(scheme, sharing, DEFAULTS.get(name)) for name in names]
    schemes = [scheme_named(where) for where, _ in chosen]
    sharings = [sharing_named(how, packing) for _, how in chosen]
    size = None if memory is None else parse_bytes(memory, what="--memory")
    pieces = tuple(_slice(text) for text in slices or [])
    fleet = Fleet.uniform(
        switches, nodes, gpus_per_node, memory_bytes=size, slices=pieces, watts=_watts(watts)
    )
    known = read_trace(trace, format, malformed=malformed)
    if out.exists() and not out.is_dir():
        raise InputError(f"cannot write to {out}: it is no folder.")
    out.mkdir(parents=True, exist_ok=True)
    jobs = known.jobs if graphs is None else _with_graphs(known.jobs, graphs)
    if serial is not None:
        curves = {job.gpus: amdahl(job.gpus, 4 * job.gpus, serial) for job in jobs}
        jobs = [replace(job, curve=curves[job.gpus]) for job in jobs]
    _say_sizes(known, fleet)
    needing = [name for name, (where, _) in zip(names, chosen, strict=True) if where == "baechi"]
    if needing and all(job.graph is None for job in jobs):
        say(
            f"note: scheme baechi ({', '.join(needing)}) splits jobs by their graphs, and no job "
            "has one. Give --graphs FOLDER.",
            error=True,
        )
    for stale in RESULT_FILES if policy == "all" else COMPARISON_FILES:
        (out / stale).unlink(missing_ok=True)  # of an earlier run of the other form
    results: list[SimulationResult] = []
    for each, where, how in zip(policies, schemes, sharings, strict=True):
        try:
            with _progress(each.name, len(jobs)) as progress:
                result = simulate_cluster(
                    jobs,
                    fleet,
                    each,
                    where,
                    sharing=how,
                    preempt_cost=preempt_cost,
                    restart_cost=restart_cost,
                    seed=seed,
                    progress=progress,
                )
        except InputError as error:
            if not results:  # of one policy, or what is wrong for all
                raise
            say(f"left out: {error}", error=True)
            continue
        results.append(result)
        write_result(result, out / each.name if policy == "all" else out)
    if policy == "all":
        write_comparison(results, out)
    _report(results)
    if plot:
        try:
            write_figure(results, out / "plot.html")
        except InputError as error:  # such as that plotly is not installed
            say(f"no plot: {error}", error=True)
    say(f"wrote {out}")


@contextmanager
def _progress(name: str, jobs: int) -> "Iterator[Callable[[int, int], None] | None]":
    """A bar on a terminal while a simulation runs."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(name, total=jobs)
        yield lambda done, _: bar.update(task, completed=done)


def _usual(
    scheme: str | None, sharing: str | None, meant: tuple[str, str] | None
) -> tuple[str, str]:
    """The scheme and the sharing where one or both are not given: what goes with the rest."""
    if meant is None:
        meant = ("count" if sharing in {None, "exclusive"} else "least-loaded", "exclusive")
    how = sharing or ("exclusive" if scheme == "count" else meant[1])
    return scheme or meant[0], how


def _slice(text: str) -> "Slice":
    """A slice as it is written on the command line."""
    from baechi.cluster_simulation.fleet import Slice
    from baechi.units import parse_bytes

    share, colon, memory = text.partition(":")
    if not (share.isascii() and share.isdecimal() and len(share) < 9):
        raise InputError(f"slice {text!r} cannot be read; write 285:10GiB, or 285 without memory.")
    if not 1 <= int(share) <= 1000:
        raise InputError(f"slice {text!r} has {share} thousandths of a GPU; give 1 to 1000.")
    return Slice(int(share), parse_bytes(memory, what=f"slice {text!r}") if colon else None)


def _watts(text: str | None) -> tuple[int, int]:
    """What a GPU draws, as it is written on the command line."""
    if text is None:
        return 0, 0
    idle, _, busy = text.partition(":")
    if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in (idle, busy)):
        raise InputError(f"--watts {text!r} cannot be read; write 60:240.")
    return int(idle), int(busy)


def _with_graphs(jobs: "Sequence[Job]", folder: Path) -> "Sequence[Job]":
    """The jobs, each with the graph of its model where the folder has it."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r} with graphs.")
    models = {job.model for job in jobs if job.model}
    if not models:
        raise InputError("the trace names no models, so no graph can be that of a job.")
    files = {model: folder / f"{model}.graph.json" for model in sorted(models)}
    known = {model: load(file, OpGraph) for model, file in files.items() if file.is_file()}
    if not known:
        raise InputError(
            f"{folder} has a graph of none of the trace's models ({', '.join(sorted(models))}); "
            "files are named MODEL.graph.json."
        )
    return [replace(job, graph=known.get(job.model)) for job in jobs]


def _samples(path: Path) -> "Sequence[int]":
    """The numbers of a file with one per line, under a header or not."""
    try:
        rows = [row[0].strip() for row in csv.reader(path.read_text().splitlines()) if row]
        return [int(row) for row in rows if row and row != "duration" and not row.startswith("#")]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"cannot read GPU-times from {path}: {reason_of(error)}.") from error


def _say_sizes(trace: "Trace", fleet: "Fleet") -> None:
    """Prints the size of the simulation, and the entries that were left out."""
    sizes = ((len(trace.jobs), "job"), (len(fleet.gpus), "GPU"), (fleet.nodes, "node"))
    jobs, gpus, nodes = (f"{count:,} {what}{'s' if count != 1 else ''}" for count, what in sizes)
    say(f"{jobs} on {gpus} of {nodes}")
    if trace.without_gpus:
        say(f"left out {len(trace.without_gpus)} entries without GPUs")
    for row in trace.malformed[:10]:
        say(f"skipped line {row.line}: {row.reason}", error=True)
    if len(trace.malformed) > 10:
        say(f"skipped {len(trace.malformed)} malformed lines in all", error=True)


def _report(results: "Sequence[SimulationResult]") -> None:
    """A row per policy, and the jobs that were refused."""
    from rich.table import Table

    from baechi.cluster_simulation.results import summary

    table = Table()
    table.add_column("policy", no_wrap=True)
    for column in ("jobs", "mean JCT", "median", "p99", "makespan", "preempted", "use"):
        table.add_column(column, justify="right", no_wrap=True)
    energy = any(result.milliwatt_ticks is not None for result in results)
    if energy:
        table.add_column("kWh", justify="right", no_wrap=True)
    for result in results:
        row = summary(result)
        times = [_number(row[key]) for key in ("mean_jct", "median_jct", "p99_jct", "makespan")]
        use = "-" if row["utilization"] is None else f"{row['utilization']:.1%}"
        count = str(row["completed"])
        drawn = [f"{row['energy_kwh']:.1f}"] if energy else []
        table.add_row(result.policy, count, *times, str(row["preemptions"]), use, *drawn)
    show(table)
    refused: dict[str, str] = {}  # by the first policy whose scheme does
    for result in results:
        for refusal in result.refused:
            where = "" if result is results[0] else f" under {result.policy}"
            text = f"refused job {refusal.job.name}{where}: {refusal.reason}"
            refused.setdefault(refusal.job.name, text)
    for text in list(refused.values())[:10]:
        say(text, error=True)
    if len(refused) > 10:
        say(f"refused {len(refused)} jobs in all; summary.json names them", error=True)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def serve(
    cluster: Annotated[
        Path | None,
        typer.Argument(metavar="CLUSTER", help="A cluster or topology file, for a new ledger."),
    ] = None,
    *,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Keep reservations in this file; in memory if absent."),
    ] = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            help="How devices are shared: fractional, whole or mig; if absent, as in the ledger, "
            "and fractional in a new one."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8642,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the bearer token that requests must carry."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that solve.")] = 2,
    seconds: Annotated[int, typer.Option(min=1, help="Time for one answer.")] = 30,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a graph file.")] = 64 * 2**20,
    max_ops: Annotated[int, typer.Option(min=1, help="Ops of a graph.")] = 100_000,
) -> None:
    """Answer a scheduler over HTTP: what fits where, what if, reserve, release.

    Listens on this machine alone, unless there is a token. Needs fastapi, uvicorn and
    prometheus-client: `pip install 'baechi[serve]'`.

    For example:

        baechi serve cluster.json --ledger ledger.sqlite
        curl -s localhost:8642/v1/snapshot
    """
    token = _token(token_file)
    if not token and not _is_loopback(host):
        raise InputError(
            f"{host!r} can be reached from other machines; give --token-file, or listen on "
            "127.0.0.1."
        )
    from baechi.scheduling.ledger import Ledger
    from baechi.scheduling.messages import Limits
    from baechi.scheduling.service import create_app

    if cluster is None and (ledger is None or not ledger.exists()):
        which = "no cluster" if ledger is None else f"no ledger {ledger} yet, and no cluster"
        raise InputError(f"there is {which}; give a cluster file (`baechi probe` writes one).")
    base = None if cluster is None else devices_in(cluster)
    listener = listener_on(host, port)
    try:
        book = Ledger(base, ledger, sharing=sharing)
    except BaseException:
        listener.close()
        raise
    limits = Limits(body_bytes=max_body, ops=max_ops, seconds=seconds)
    app = create_app(book, token=token, workers=workers, limits=limits)
    run_service(app, listener, host, 2 * seconds, book.close)


def run_service(
    app: Any, listener: socket.socket, host: str, grace_s: int, close: "Callable[[], None]"
) -> None:
    """Serves until SIGTERM or Ctrl-C, and then to the end of the requests that are under way.

    uvicorn raises the signal once more when it has stopped; that one must not end the process
    before everything is closed.
    """
    import uvicorn

    shown = f"[{host}]" if ":" in host else host
    say(f"serving on http://{shown}:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_s
    )
    stops = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(stop, lambda *_: None) for stop in stops]
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        close()
        listener.close()
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)
    say("stopped")


def _token(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read a token from {file}: {reason_of(error)}.") from error
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise InputError(f"the token in {file} must be 16 or more letters or digits in one line.")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listener_on(host: str, port: int) -> socket.socket:
    """A socket that listens there, so that its port is known before the service starts."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}: {reason_of(error)}.") from error
    family, *_, address = found[0]
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:  # clients that connect before the service has started wait for it
        return socket.create_server(address, family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(f"cannot listen on {host}:{port}: {reason}.") from error
