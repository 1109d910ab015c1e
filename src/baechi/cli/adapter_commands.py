"""The commands for cluster managers: `baechi free`, `claims`, `slurm`, `extender`, `operator`."""

import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from baechi.cli.cluster_commands import listener_on, run_service
from baechi.cli.console import GraphArgument, OutOption, say, write
from baechi.errors import InputError
from baechi.records.cluster import Link, Topology
from baechi.records.graph import OpGraph
from baechi.storage.serialization import load
from baechi.units import format_bytes, format_ns
from baechi.validation import check_choice

if TYPE_CHECKING:
    from baechi.adapters.free_devices import FreeDevice
    from baechi.scheduling.decision import Decision

_FreeArgument = Annotated[
    Path, typer.Argument(metavar="FREE", help="The free devices, as `baechi free` writes them.")
]
_SameOption = Annotated[
    str, typer.Option(help="node or switch: all devices must be of one; anywhere if empty.")
]
_NewArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FREE", help="The devices, as `baechi free` writes them, for a new ledger."
    ),
]
_LedgerOption = Annotated[Path, typer.Option(help="Keep reservations in this file.")]
_GraphsOption = Annotated[
    Path, typer.Option(help="A folder of graph files, found by their digests.")
]
_ApiOption = Annotated[str, typer.Option(help="The API server.")]
_AccountOption = Annotated[
    Path, typer.Option(help="A folder with the service account's token and ca.crt.")
]
_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ShareOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=1000, help="Thousandths of each device's compute; all that is left if absent."
    ),
]


# What each source prints, in the order of the files.
_SOURCES: Final = {
    "dra": ("resourceslices", "resourceclaims"),
    "hami": ("nodes", "pods"),
    "kai": ("nodes", "pods"),
    "slurm": ("scontrol show node -d",),
    "nvidia-smi": ("nvidia-smi --query-gpu=...",),
}


def free(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="dra, hami, kai, slurm or nvidia-smi.")
    ],
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="What it prints; - is standard input.")
    ],
    *,
    out: OutOption = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=KIND", help="With slurm: the device kind of a type: a100=A100-SXM-80GB."
        ),
    ] = None,
    node_gbytes_per_s: Annotated[
        float, typer.Option(min=1e-9, max=1e9, help="Rate between two devices of a node.")
    ] = 12.0,
    switch_gbytes_per_s: Annotated[
        float, typer.Option(min=1e-9, max=1e9, help="Rate between two nodes.")
    ] = 3.0,
    node_latency_us: Annotated[
        float, typer.Option(min=0, max=1e9, help="Latency between two devices of a node.")
    ] = 10.0,
    switch_latency_us: Annotated[
        float, typer.Option(min=0, max=1e9, help="Latency between two nodes.")
    ] = 50.0,
) -> None:
    """Read from a cluster manager what is left of every device.

    dra takes the ResourceSlices and ResourceClaims of Kubernetes, hami and kai its nodes and pods,
    all as JSON; slurm what `scontrol show node -d` prints, and nvidia-smi what
    `nvidia-smi --query-gpu=index,uuid,name,memory.free,utilization.gpu,mig.mode.current
    --format=csv,noheader,nounits` does. Managers do not tell what the links are.

    For example:

        kubectl get resourceslices -o json > slices.json
        kubectl get resourceclaims -A -o json > claims.json
        baechi free dra slices.json claims.json -o free.json
        scontrol show node -d | baechi free slurm - --kind a100=A100-SXM-80GB -o free.json
    """
    if source not in _SOURCES:
        raise InputError(f"the source is {source!r}; it must be one of {', '.join(_SOURCES)}.")
    from baechi.adapters.free_devices import topology

    wanted = _SOURCES[source]
    if len(files) != len(wanted):
        raise InputError(f"{source} takes {len(wanted)} files, in this order: {', '.join(wanted)}.")
    kinds = {}
    for text in kind or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--kind {text!r} has no =; write a100=A100-SXM-80GB.")
        kinds[name] = value
    found = _read(source, files, kinds)
    within = Link(round(node_latency_us * 1e3), round(node_gbytes_per_s * 1e9))
    between = Link(round(switch_latency_us * 1e3), round(switch_gbytes_per_s * 1e9))
    for row in found:
        left = f"{format_bytes(row.memory_bytes)}, {row.share_milli / 10:g} % of its compute"
        say(f"{row.full_name}: {left}{f', {row.kind}' if row.kind else ''}")
    write(topology(found, within, between), out)


def claims(
    graph: GraphArgument,
    left: _FreeArgument,
    slices: Annotated[
        str, typer.Argument(metavar="SLICES", help="The ResourceSlices that it was read from.")
    ],
    *,
    job: Annotated[str, typer.Option(help="The prefix of the claims' names.")] = "job",
    device_class: Annotated[
        str | None, typer.Option(help="The DeviceClass; the driver's name if absent.")
    ] = None,
    same: _SameOption = "",
    share_milli: _ShareOption = None,
) -> None:
    """Print the ResourceClaims of a job, for `kubectl apply -f -`.

    Decides which of the free devices the graph uses; a claim is for each of them. If nothing fits,
    prints what is missing and exits with code 3.

    For example:

        baechi claims gpt2.graph.json free.json slices.json --job gpt2 | kubectl apply -f -
    """
    from baechi.adapters.dynamic_resources import resource_claims

    decision = _decided(graph, left, same, share_milli)
    items = resource_claims(job, decision, _json(slices), device_class=device_class)
    typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2))


def slurm(
    graph: GraphArgument,
    left: _FreeArgument,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The script, and its arguments.")
    ],
    *,
    job: Annotated[str, typer.Option(help="The job's name.")] = "baechi",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A further option of sbatch, such as --time=2:00:00."),
    ] = None,
    same: _SameOption = "",
) -> None:
    """Print a batch script that starts a rank with torchrun for each device of a placement.

    Decides which of the free GPUs the graph uses. If nothing fits, prints what is missing and exits
    with code 3.

    For example:

        baechi slurm gpt2.graph.json free.json --option=--time=2:00:00 -- train.py | sbatch
    """
    from baechi.adapters.slurm import batch_script

    decision = _decided(graph, left, same, None)
    script = batch_script(job, decision.devices, command, options=option or ())
    typer.echo(script, nl=False)


def extender(
    free: _NewArgument = None,
    *,
    ledger: _LedgerOption,
    graphs: _GraphsOption,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8643,
    api: _ApiOption = "https://kubernetes.default.svc",
    account: _AccountOption = _ACCOUNT,
    effort: Annotated[str, typer.Option(help="fast, balanced or thorough.")] = "fast",
) -> None:
    """Answer kube-scheduler and Volcano: which node a pod's graph goes to.

    A pod names its graph in the annotation baechi.dev/graph. Listens on this machine alone, beside
    the scheduler, unless told otherwise. docs/deploy/ has manifests. Needs fastapi, uvicorn and
    httpx: `pip install 'baechi[kubernetes]'`.

    For example:

        baechi extender free.json --ledger ledger.sqlite --graphs graphs/
    """
    from baechi.adapters.api_server import ApiServer
    from baechi.adapters.extender_service import PODS, create_extender_app
    from baechi.adapters.graph_folder import GraphFolder
    from baechi.adapters.scheduler_extender import Extender
    from baechi.scheduling.ledger import Ledger

    base = _base(free, ledger)
    with ExitStack() as closing:
        server = ApiServer(api, account)
        closing.callback(server.close)
        listener = listener_on(host, port)
        closing.callback(listener.close)
        book = Ledger(base, ledger)
        closing.callback(book.close)
        asked = Extender(book, GraphFolder(graphs), server.bind, effort=effort)
        pods = partial(server.ask, "GET", PODS)
        app = create_extender_app(asked, pods, report=lambda text: say(text, error=True))
        run_service(app, listener, host, 10, closing.close)


def operator(
    free: _NewArgument = None,
    *,
    ledger: _LedgerOption,
    graphs: _GraphsOption,
    api: _ApiOption = "https://kubernetes.default.svc",
    account: _AccountOption = _ACCOUNT,
    spelling: Annotated[
        str,
        typer.Option(
            help="How pods say which part of a GPU they take: none, hami, kai or device-plugin."
        ),
    ] = "none",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two turns.")] = 5.0,
) -> None:
    """Run BaechiJobs of Kubernetes, and answer Kueue's admission checks.

    A BaechiJob gets devices for its graph and a pod on each; docs/deploy/ has the resource and
    manifests. Needs httpx: `pip install 'baechi[kubernetes]'`.

    For example:

        baechi operator free.json --ledger ledger.sqlite --graphs graphs/ --spelling hami
    """
    from baechi.adapters.api_server import ApiServer
    from baechi.adapters.baechi_job import SPELLINGS
    from baechi.adapters.graph_folder import GraphFolder
    from baechi.adapters.job_operator import Operator
    from baechi.scheduling.ledger import Ledger

    check_choice(spelling, SPELLINGS, "spelling")
    base = _base(free, ledger)
    with ExitStack() as closing:
        server = ApiServer(api, account)
        closing.callback(server.close)
        book = Ledger(base, ledger)
        closing.callback(book.close)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        turns = Operator(server, book, GraphFolder(graphs), spelling=spelling)
        say(f"running BaechiJobs of {api}")
        turns.run(every, stop, lambda text: say(text, error=True))
    say("stopped")


def _base(free: Path | None, ledger: Path) -> Topology | None:
    """The devices of a new ledger; none for one that is there."""
    if free is None and not ledger.exists():
        raise InputError(f"there is no ledger {ledger} yet, and no devices; give FREE.")
    return None if free is None else load(free, Topology)


def _read(source: str, files: Sequence[str], kinds: Mapping[str, str]) -> "tuple[FreeDevice, ...]":
    from baechi.adapters.dynamic_resources import free_devices
    from baechi.adapters.nvidia_smi import smi_devices
    from baechi.adapters.shared_gpus import hami_devices, kai_devices
    from baechi.adapters.slurm import slurm_devices

    if source == "slurm":
        return slurm_devices(_text(files[0]), kinds)
    if source == "nvidia-smi":
        return smi_devices(_text(files[0]))
    first, second = map(_json, files)
    if source == "dra":
        return free_devices(first, second)
    return hami_devices(first, second) if source == "hami" else kai_devices(first, second)


def _json(file: str) -> Any:
    try:
        return json.loads(_text(file))
    except ValueError as error:
        raise InputError(f"{file}: {error}; give what `kubectl get -o json` prints.") from error


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no text in UTF-8: {error}.") from error


def _decided(graph: Path, left: Path, same: str, share_milli: int | None) -> "Decision":
    """What a graph takes of the free devices; said on stderr, since stdout is for a program."""
    from baechi.scheduling.claims import Wish
    from baechi.scheduling.decision import decide
    from baechi.scheduling.ledger import Ledger

    wish = Wish(same=same, share_milli=share_milli, effort="balanced")
    decision = decide(load(graph, OpGraph), Ledger(load(left, Topology)).snapshot(), wish)
    for device, nbytes in zip(decision.devices, decision.peak_bytes, strict=True):
        typer.echo(f"{device}: {format_bytes(nbytes)}", err=True)
    typer.echo(f"predicted step {format_ns(decision.step_ns)}", err=True)
    return decision
