"""Worker processes with a deadline: a solve cannot be interrupted, but its process can be killed.

Each worker has the site and a few parsed graphs. A question that takes too long costs its worker
only, and no other question:

    request thread ──question──▶ pipe ──▶ worker ──▶ answer (bytes)
         │ no answer in time: kill, start another, answer 503

Workers get the numbers of a snapshot and change nothing. docs/design.md has why this is no
library's pool.
"""

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Mapping
from functools import lru_cache
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
    """A snapshot without its site, which every worker has already."""

    version: int
    uses: tuple[Use, ...]
    jobs: Mapping[str, Reservation]


class Question(NamedTuple):
    """A question about a graph; without a request and a state, whether the graph can be read."""

    text: str
    limits: Limits
    request: SolveRequest | WhatIfRequest | None = None
    state: State | None = None


@final
class Workers:
    """A few processes that answer one question each at a time.

    Args:
        count: How many.
        site: The devices that questions are about.
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

    def answer(self, question: Question) -> bytes:
        """The answer, as a message.

        Raises:
            LimitError: It takes too long, or too many wait already.
            BaechiError: The error that answers the question.
        """
        if not self._seats.acquire(blocking=False):
            raise LimitError("the service is overloaded; try again in a second.", 503)
        try:
            try:
                worker = self._idle.get(timeout=self._seconds)
            except queue.Empty:
                raise LimitError("no worker was free in time; try again.", 503) from None
            try:
                answer = worker.answer(question, self._seconds)
            except (EOFError, OSError, TimeoutError) as error:
                worker.kill()
                worker = _Worker(self._context, self._site)
                why = (
                    f"took longer than {self._seconds} s; use effort fast, or a coarser graph"
                    if isinstance(error, TimeoutError)
                    else "ended the worker that computed it; was it out of memory?"
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
    """One process and its pipe."""

    def __init__(self, context: Any, site: Site) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, site), daemon=True)
        self._process.start()
        theirs.close()
        self._started = False

    def answer(self, question: Question, seconds: float) -> bytes | BaechiError:
        """The answer, or the error of it; raises `TimeoutError`, `EOFError`, `OSError`."""
        if not self._started:
            # Its start is no part of the time for an answer.
            self._received(_START_SECONDS)
            self._started = True
        self._pipe.send(question)
        answer: bytes | BaechiError = self._received(seconds)
        return answer

    def _received(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

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


def _work(pipe: Connection, site: Site) -> None:
    """The main function of a worker; returns when its pipe is closed."""
    # Ctrl-C in a terminal reaches all processes of the group; the service decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read = lru_cache(_PARSED)(_read)
    with contextlib.suppress(EOFError, OSError):  # the service has ended, or wants no answer
        pipe.send("started")
        while True:
            question: Question = pipe.recv()
            answer: bytes | BaechiError
            try:
                answer = _answer(read(question.text, question.limits), site, question)
            except BaechiError as error:
                answer = error
            except MemoryError:
                answer = LimitError("there is not enough memory for this question.", 503)
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
                message="no placement was found on any tried set of free devices; try more effort, "
                "see whatif for what is missing, or wait.",
            )
        )
    decision = choose(found, request.wish.slack_milli)
    return encode(SolveAnswer("placed", snapshot.version, decision, decision.claims()))
