"""Requests per second and the time of an answer, from several clients of a real server process."""

import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.service.decisions import NODE, SITE, SWITCH, graph_of, need_of

import baechi
from baechi import Topology
from baechi.scheduling.client import Client

CLIENTS = 4


class Load(NamedTuple):
    """What was asked, how many answers came in how many seconds, and the time of each."""

    what: str
    seconds: float
    ms: tuple[float, ...]


class Server:
    """`baechi serve` with two workers, over an empty ledger of 64 GPUs in a folder."""

    def __init__(self, folder: Path, cluster: Topology) -> None:
        baechi.dump(cluster, folder / "cluster.json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baechi", "serve", str(folder / "cluster.json"), "--ledger",
             str(folder / "ledger.sqlite"), "--port", "0", "--workers", "2"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise RuntimeError(f"the server did not start: {line}")
        self.url = match[0]

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


def loads(seconds: float) -> Iterator[Load]:
    """One kind of request after the other, each for so many seconds."""
    graph = graph_of()
    cluster = Topology.grid(
        2, 4, 8, need_of(graph), node_link=NODE, switch_link=SWITCH, site_link=SITE
    )
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), cluster)
        try:
            with Client(server.url) as client:
                digest = client.upload(graph)
                client.solve(digest)
            wish = {"same": "node", "slack_milli": 100}
            solve = {"schema": 1, "graph": digest}
            claim = {"device": "node0/0", "memory_bytes": 1, "share_milli": 1}
            kinds: dict[str, Callable[[int, int], tuple[str, dict[str, object] | None]]] = {
                "GET /healthz": lambda _who, _turn: ("/healthz", None),
                "GET /v1/snapshot": lambda _who, _turn: ("/v1/snapshot", None),
                "POST /v1/solve": lambda _who, _turn: ("/v1/solve", solve),
                "POST /v1/solve, same node": lambda _who, _turn: (
                    "/v1/solve",
                    {**solve, "wish": wish},
                ),
                "POST /v1/reserve, /v1/release": lambda who, turn: (
                    ("/v1/release", {"schema": 1, "job": f"{who}"})
                    if turn % 2
                    else ("/v1/reserve", {"schema": 1, "job": f"{who}", "claims": [claim]})
                ),
            }
            for what, ask in kinds.items():
                yield _measured(server.url, what, ask, seconds)
        finally:
            server.stop()


def _measured(
    url: str,
    what: str,
    ask: Callable[[int, int], tuple[str, dict[str, object] | None]],
    seconds: float,
) -> Load:
    """As many requests of a kind as some clients manage, each with one connection."""
    times: list[list[float]] = [[] for _ in range(CLIENTS)]
    wrong: list[str] = []
    begin = time.perf_counter()

    def client(who: int) -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        turn = 0
        while not wrong and (time.perf_counter() - begin < seconds or turn % 2):
            path, body = ask(who, turn)
            start = time.perf_counter()
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, text)
            response = connection.getresponse()
            content = response.read()
            times[who].append(1e3 * (time.perf_counter() - start))
            if response.status != http.client.OK:
                wrong.append(content.decode())
            turn += 1
        connection.close()

    threads = [threading.Thread(target=client, args=(who,)) for who in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise RuntimeError(wrong[0])
    elapsed = time.perf_counter() - begin
    return Load(what, elapsed, tuple(row for mine in times for row in mine))
