"""Processes that think, so that an answer can be given up: nothing else interrupts a solve.

Each worker has the site and a few parsed graphs. A question that takes too long costs its worker
the life, and nobody else anything:

    request thread ──question──▶ pipe ──▶ worker ──▶ answer (bytes)
         │ no answer in time: kill, start another, say 503

What a worker is told about the ledger is a snapshot's numbers; it changes nothing.
"""

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, final

from baechi.errors import BaechiError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Use
from baechi.scheduling.decision import choose, explore
from baechi.scheduling.messages import (
    GraphAnswer,
    LimitError,
    Limits,
    SolveAnswer,
    SolveRequest,
    WhatIfRequest,
    check_depth,
    encode,
)
from baechi.scheduling.snapshot import Reservation, Site, Snapshot
from baechi.scheduling.whatif import whatif
from baechi.storage.serialization import loads

# Graphs that a worker keeps parsed.
_PARSED: Final = 64
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0


class State(NamedTuple):
    """A snapshot without its site, which every worker has."""

    version: int
    uses: tuple[Use, ...]
    jobs: Mapping[str, Reservation]


class Question(NamedTuple):
    """What a worker is asked: about a graph, given by its text where it does not know it.

    Without a request and a state it only reads the graph.
    """

    digest: str
    text: str | None
    limits: Limits
    request: SolveRequest | WhatIfRequest | None = None
    state: State | None = None


@final
class Workers:
    """A few processes that answer questions, one each at a time.

    Args:
        count: How many.
        site: What questions are about.
        seconds: Time for one answer, and as much to wait for a worker before.
        waiting: Questions that may wait.
    """

    def __init__(self, count: int, site: Site, seconds: int, waiting: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._site, self._seconds = site, seconds
        self._seats = threading.Semaphore(count + waiting)
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(_Worker(self._context, site))
        self._count = count

    def ask(self, question: Question, text: str) -> bytes:
        """The answer, as a message.

        Args:
            question: Without a text.
            text: The graph, for a worker that does not know it.

        Raises:
            LimitError: It takes too long, or too many wait already.
            BaechiError: What the question is answered with.
        """
        if not self._seats.acquire(blocking=False):
            raise LimitError("the service has too much to do; ask again in a second.", 503)
        try:
            try:
                worker = self._idle.get(timeout=self._seconds)
            except queue.Empty:
                raise LimitError("no worker was free in time; ask again.", 503) from None
            try:
                answer = worker.ask(question, text, self._seconds)
            except (EOFError, OSError, TimeoutError) as error:
                worker.kill()
                worker = _Worker(self._context, self._site)
                why = (
                    f"took longer than {self._seconds} s; use effort fast, or a coarser graph"
                    if isinstance(error, TimeoutError)
                    else "ended the worker that thought about it; was it out of memory?"
                )
                raise LimitError(f"the answer {why}.", 503) from error
            finally:
                self._idle.put(worker)
        finally:
            self._seats.release()
        if isinstance(answer, BaechiError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends all workers, after the answers that are under way."""
        for _ in range(self._count):
            with contextlib.suppress(queue.Empty):
                self._idle.get(timeout=self._seconds).close()


@final
class _Worker:
    """One process, its pipe, and the digests of the graphs that it knows."""

    def __init__(self, context: Any, site: Site) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, site), daemon=True)
        self._process.start()
        theirs.close()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._started = False

    def ask(self, question: Question, text: str, seconds: float) -> bytes | BaechiError:
        """The answer, or what it failed with; raises `TimeoutError`, `EOFError`, `OSError`."""
        if not self._started:
            # Its start is no part of the time for an answer.
            if not self._pipe.poll(_START_SECONDS):
                raise TimeoutError
            self._pipe.recv()
            self._started = True
        known = question.digest in self._known
        self._pipe.send(question if known else question._replace(text=text))
        if not self._pipe.poll(seconds):
            raise TimeoutError
        answer: bytes | BaechiError = self._pipe.recv()
        if isinstance(answer, bytes):
            _remember(self._known, question.digest, None)
        return answer

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def close(self) -> None:
        """Lets it end."""
        self._pipe.close()
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self.kill()


def _remember(known: "OrderedDict[str, Any]", digest: str, value: Any) -> None:
    """Keeps the newest graphs; both ends of a pipe do the same, so that they agree."""
    known[digest] = value
    known.move_to_end(digest)
    if len(known) > _PARSED:
        known.popitem(last=False)


def _work(pipe: Connection, site: Site) -> None:
    """The life of a worker: until its pipe is closed."""
    # Ctrl-C in a terminal reaches all processes of the group; the service decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    graphs: OrderedDict[str, OpGraph] = OrderedDict()
    with contextlib.suppress(OSError):
        pipe.send("started")
    while True:
        try:
            question: Question = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            graph = graphs.get(question.digest)
            if graph is None:
                graph = _read(question.text or "", question.limits)
            answer: bytes | BaechiError = _answer(graph, site, question)
            _remember(graphs, question.digest, graph)
        except BaechiError as error:
            answer = error
        except MemoryError:
            answer = LimitError("there is not enough memory for this question.", 503)
        with contextlib.suppress(OSError):
            pipe.send(answer)


def _read(text: str, limits: Limits) -> OpGraph:
    check_depth(text.encode(), limits.depth)
    graph = loads(text, OpGraph, source="graph")
    if len(graph.ops) > limits.ops:
        raise LimitError(f"the graph has {len(graph.ops)} ops; the limit is {limits.ops}.", 422)
    return graph


def _answer(graph: OpGraph, site: Site, question: Question) -> bytes:
    request, state = question.request, question.state
    if request is None or state is None:
        return encode(GraphAnswer(graph.digest, len(graph.ops)))
    snapshot = Snapshot(site, *state)
    if isinstance(request, WhatIfRequest):
        return encode(
            whatif(graph, snapshot, request.wish, after=request.after, up_to=request.up_to)
        )
    found = explore(graph, snapshot, request.wish)
    if not found:
        return encode(
            SolveAnswer(
                "infeasible",
                snapshot.version,
                message="no placement was found on any choice of what is left; ask with more "
                "effort, ask whatif for what is missing, or wait.",
            )
        )
    decision = choose(found, request.wish.slack_milli)
    return encode(SolveAnswer("placed", snapshot.version, decision, decision.claims()))
