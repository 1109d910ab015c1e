"""The command `baechi serve`: the scheduling service on an address."""

import ipaddress
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from baechi.cli.console import say
from baechi.errors import InputError, reason_of
from baechi.records.cluster import Cluster, Topology
from baechi.storage.serialization import load

_BACKLOG = 512


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
    import uvicorn

    from baechi.scheduling.ledger import Ledger
    from baechi.scheduling.messages import Limits
    from baechi.scheduling.service import create_app

    if cluster is None and (ledger is None or not ledger.exists()):
        which = "no cluster" if ledger is None else f"no ledger {ledger} yet, and no cluster"
        raise InputError(f"there is {which}; give a cluster file (`baechi probe` writes one).")
    base = None if cluster is None else load(cluster)
    if base is not None and not isinstance(base, Cluster | Topology):
        raise InputError(
            f"{cluster}: this file holds type {type(base).__name__}, but Cluster or Topology is "
            "wanted."
        )
    listener = _listener(host, port)
    try:
        book = Ledger(base, ledger, sharing=sharing)
    except BaseException:
        listener.close()
        raise
    limits = Limits(body_bytes=max_body, ops=max_ops, seconds=seconds)
    app = create_app(book, token=token, workers=workers, limits=limits)
    shown = f"[{host}]" if ":" in host else host
    say(f"serving on http://{shown}:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2 * seconds
    )
    # Stops on SIGTERM or Ctrl-C after the requests that are under way. uvicorn raises the signal
    # once more when it has stopped; that one must not end the process before the ledger is closed.
    stops = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(stop, lambda *_: None) for stop in stops]
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        book.close()
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


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens there, so that its port is known before the service starts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot listen on {host}: {reason_of(error)}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Clients that connect before the service has started wait for it.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}.") from error
    return listener
