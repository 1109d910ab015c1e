"""Worker processes with a deadline: a solve cannot be interrupted, but its process can be killed.

Each worker has the site and a few parsed graphs, gets the numbers of a snapshot, and changes
nothing. docs/design.md has why this is no library's pool.
"""

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, final

from baechi.errors import BaechiError
from baechi.records.graph import OpGraph
from baechi.scheduling.claims import Use
from baechi.scheduling.decision import choose, explore
from baechi.scheduling.messages import (
    GraphAnswer,
    Limits,
    ServiceError,
    SolveAnswer,
    SolveRequest,
    WhatIfRequest,
    encode,
)
from baechi.scheduling.snapshot import Reservation, Site, Snapshot
from baechi.scheduling.whatif import WhatIf, whatif
from baechi.storage.serialization import loads

_PARSED: Final = 64  # graphs that a worker keeps parsed
_START_SECONDS: Final = 60.0


class Question(NamedTuple):
    """A question about the graph in a text; without a request, whether it can be read.

    `state` has version, uses and jobs of the snapshot; every worker has its site already.
    """

    text: str
    request: SolveRequest | WhatIfRequest | None = None
    state: tuple[int, tuple[Use, ...], Mapping[str, Reservation]] = (0, (), {})


@final
class Workers:
    """A few processes that answer one question each at a time.

    The limit in seconds holds for one answer, and as much for waiting for a worker before.
    """

    def __init__(self, count: int, site: Site, limits: Limits) -> None:
        self._start = partial(_Worker, site, limits)
        self._count, self._seconds = count, limits.seconds
        self._seats = threading.Semaphore(count + limits.waiting)
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(self._start())

    def answer(self, question: Question) -> bytes:
        """The answer, as a message.

        Raises:
            ServiceError: It takes too long, or too many wait already.
            BaechiError: The error that answers the question.
        """
        if not self._seats.acquire(blocking=False):
            raise ServiceError("the service is overloaded; try again in a second.", 503)
        try:
            try:
                worker = self._idle.get(timeout=self._seconds)
            except queue.Empty:
                raise ServiceError("no worker was free in time; try again.", 503) from None
            try:
                answer = worker.answer(question, self._seconds)
            except (EOFError, OSError, TimeoutError) as error:
                worker.kill()
                worker = self._start()
                why = (
                    f"took longer than {self._seconds} s; use effort fast, or a coarser graph"
                    if isinstance(error, TimeoutError)
                    else "ended the worker that computed it, perhaps for want of memory"
                )
                raise ServiceError(f"the answer {why}.", 503) from error
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
                self._idle.get(timeout=self._seconds).kill()


@final
class _Worker:
    """One process and its pipe."""

    def __init__(self, site: Site, limits: Limits) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, site, limits), daemon=True)
        self._process.start()
        theirs.close()
        self._started = False

    def answer(self, question: Question, seconds: float) -> bytes | BaechiError:
        """The answer, or the error of it; raises `TimeoutError`, `EOFError`, `OSError`."""
        if not self._started:  # its start is no part of the time for an answer
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


def _work(pipe: Connection, site: Site, limits: Limits) -> None:
    """The main function of a worker; returns when its pipe is closed."""
    # Ctrl-C in a terminal reaches all processes of the group; the service decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read = lru_cache(_PARSED)(partial(_read, limits))
    with contextlib.suppress(EOFError, OSError):  # the service has ended, or wants no answer
        pipe.send("started")
        while True:
            question: Question = pipe.recv()
            answer: bytes | BaechiError
            try:
                answer = encode(_answer(read(question.text), site, question))
            except BaechiError as error:
                answer = error
            except MemoryError:
                answer = ServiceError("there is not enough memory for this question.", 503)
            pipe.send(answer)


def _read(limits: Limits, text: str) -> OpGraph:
    graph = loads(text, OpGraph, source="graph")
    if len(graph.ops) > limits.ops:
        raise ServiceError(f"the graph has {len(graph.ops)} ops; the limit is {limits.ops}.", 422)
    return graph


def _answer(graph: OpGraph, site: Site, question: Question) -> GraphAnswer | SolveAnswer | WhatIf:
    request = question.request
    if request is None:
        return GraphAnswer(graph.digest, len(graph.ops))
    snapshot = Snapshot(site, *question.state)
    if isinstance(request, WhatIfRequest):
        return whatif(graph, snapshot, request.wish, after=request.after, up_to=request.up_to)
    found = explore(graph, snapshot, request.wish)
    if not found:
        message = (
            "no placement was found on any tried set of free devices; try more effort, see whatif "
            "for what is missing, or wait."
        )
        return SolveAnswer("infeasible", snapshot.version, message=message)
    decision = choose(found, request.wish.slack_milli)
    return SolveAnswer("placed", snapshot.version, decision, decision.claims())
