"""Streams of requests: several calls of a placed model under way, their outputs in order.

requests ──► taken, begun ──► under way on the workers ──► outputs, in the order of requests
             └──────────── at most `in_flight` ───────┘
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from threading import RLock
from typing import Any, NoReturn, final

import torch

from baechi.runtime.executors.cpu_workers import RunningCall
from baechi.runtime.executors.rank_slice import RankCall
from baechi.runtime.placed_state import PlacedState


@final
class Stream(Iterator[Any]):
    """The outputs of requests, as `PlacedModule.stream` says.

    No thread of its own: requests are taken, and begun, where an output is asked for. Several
    threads may ask; each output goes to one of them.
    """

    def __init__(
        self,
        state: PlacedState,
        call: Callable[..., Any],
        requests: Iterable[Any],
        in_flight: int,
    ) -> None:
        self._state = state
        self._call = call
        self._requests = iter(requests)
        self._in_flight = in_flight
        self._ended = False
        self._lock = RLock()
        self._taken: deque[Callable[[], Any]] = deque()  # what gives an output, or raises an error

    def __next__(self) -> Any:
        """The next request's output, or its error; those after it can still be had."""
        with self._lock:
            return self._next()

    def _next(self) -> Any:
        while len(self._taken) < self._in_flight and not self._ended:
            self._take()
        if not self._taken:
            raise StopIteration
        try:
            found = self._taken[0]()
        except Exception:  # a Ctrl-C loses nothing
            self._taken.popleft()
            raise
        self._taken.popleft()
        return found

    def _take(self) -> None:
        """Take one more, and begin it."""
        try:
            request = next(self._requests, self)
            if request is self:
                self._ended = True
            else:
                self._taken.append(self._begun(request))
        except Exception as error:
            self._taken.append(partial(_fail, error))

    def _begun(self, request: Any) -> Callable[[], Any]:
        """What waits for the output of a request."""
        args = request if isinstance(request, tuple) else (request,)
        kwargs = {}
        if isinstance(request, Mapping):
            args, kwargs = (), dict(request)
        state = self._state
        with torch.no_grad():
            found = state.run(state.root, args, kwargs, self._call, self._in_flight)
        return found.end if isinstance(found, RunningCall | RankCall) else lambda: found


def _fail(error: Exception) -> NoReturn:
    raise error
