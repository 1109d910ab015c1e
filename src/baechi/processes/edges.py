"""Edges: one-way streams of bytes from one rank to another, through slots that are there already.

    sender     slot ◄─copy─ parts of a message        waits where no slot is free
                 └──ready──►┐
    receiver                copy─► tensors            waits where none is ready
                 ┌◄──free───┘

Between ranks of a host slots are shared memory, and a byte in a pipe says that one is ready or
free: the kernel wakes who waits, and a pipe ends when the process at its other end does. Files and
pipes have no name any more once both ends have them open, so nothing is left however a rank ends.
Across hosts gloo brings blocks of memory.
"""

import mmap
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias, final

import torch
from torch import distributed

from baechi.errors import ExecutionError
from baechi.torch_support.storages import bytes_of

SLOT_BYTES: Final = 1 << 18
_LEAST_SLOTS: Final = 8
_FIRST_BYTES: Final = 1 << 14
_COUNT_BYTES: Final = 8
_BLOCKS: Final = 6  # under way on an edge of gloo
_LOOK_S: Final = 0.25  # how often who waits looks whether another rank has failed


class Watch(Protocol):
    """What looks after the other ranks while one waits."""

    def look(self, peer: int, since: float) -> None:
        """Raise an error if some rank has failed, or waiting since then takes too long."""

    def lost(self, peer: int) -> NoReturn:
        """Raise the error of a rank that is gone."""


def slots_for(nbytes: int) -> int:
    """So many slots that three messages of this size are under way at once."""
    return max(_LEAST_SLOTS, -(-3 * nbytes // SLOT_BYTES))


@final
class SharedSlots:
    """One end's view of slots in shared memory.

    Args:
        memory: All slots.
        credit: How many can be had at the beginning: all by the sender, none by the receiver.
        taken: The end of a pipe whose bytes are further ones.
        given: The end of another, for those handed to the other end.
        peer: The rank there.
        watch: Looks after it.
    """

    def __init__(
        self, memory: mmap.mmap, credit: int, taken: int, given: int, peer: int, watch: Watch
    ) -> None:
        self._memory, self._view = memory, memoryview(memory)
        self._n = len(memory) // SLOT_BYTES
        self._credit, self._next = credit, 0
        self._taken, self._given, self._peer, self._watch = taken, given, peer, watch
        self._poll = select.poll()
        self._poll.register(taken, select.POLLIN)
        self._closed = False

    def count(self) -> int:
        """How many can be had at once."""
        self._read()
        return self._credit

    def _read(self) -> None:
        try:
            found = os.read(self._taken, 4096)
        except BlockingIOError:
            return
        except OSError:  # it was closed, since a rank has failed
            self._watch.lost(self._peer)
        if not found:
            self._watch.lost(self._peer)
        self._credit += len(found)

    def take(self) -> memoryview:
        """The next one; waits for it."""
        if not self._credit:
            self._read()
        if not self._credit:
            since = time.monotonic()
            while not self._credit:
                if not self._poll.poll(_LOOK_S * 1e3):
                    self._watch.look(self._peer, since)
                self._read()
        self._credit -= 1
        at = self._next * SLOT_BYTES
        self._next = (self._next + 1) % self._n
        return self._view[at : at + SLOT_BYTES]

    def give(self) -> None:
        """Hand the slot that was taken to the other end."""
        try:
            os.write(self._given, b"\0")
        except OSError:
            self._watch.lost(self._peer)

    def close(self) -> None:
        """Let go of them; the other end sees that."""
        if not self._closed:
            self._closed = True
            os.close(self._taken)
            os.close(self._given)


@final
class SlotSender:
    """Messages cut into slots."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots

    def room(self) -> int:
        """Bytes that can be sent without waiting."""
        return self._slots.count() * SLOT_BYTES

    def send(self, parts: Iterable[memoryview]) -> None:
        """Send a message."""
        slot, used = None, 0
        for part in parts:
            done = 0
            while done < len(part):
                if slot is None:
                    slot, used = self._slots.take(), 0
                n = min(len(part) - done, SLOT_BYTES - used)
                slot[used : used + n] = part[done : done + n]
                done, used = done + n, used + n
                if used == SLOT_BYTES:
                    self._slots.give()
                    slot = None
        if slot is not None:
            self._slots.give()

    def close(self) -> None:
        """Let go of everything."""
        self._slots.close()


@final
class SlotReceiver:
    """Messages put together from slots."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots
        self._slot: memoryview | None = None
        self._used = 0

    def receive(self, into: memoryview) -> None:
        """The next bytes of a message, or the first of the next one."""
        done = 0
        while done < len(into):
            if self._slot is None:
                self._slot, self._used = self._slots.take(), 0
            n = min(len(into) - done, SLOT_BYTES - self._used)
            into[done : done + n] = self._slot[self._used : self._used + n]
            done, self._used = done + n, self._used + n
            if self._used == SLOT_BYTES:
                self.end()

    def end(self) -> None:
        """Be done with a message."""
        if self._slot is not None:
            self._slot = None
            self._slots.give()

    def look(self) -> None:
        """Raise an error if the other end is gone."""
        self._slots.count()

    def close(self) -> None:
        """Let go of everything."""
        self._slots.close()


@final
class SharedMemory:
    """A folder in the host's memory through which a rank receives, while edges are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_there(self, token: str) -> bool:
        """True if it is the folder that some rank has, and not one of that name on another host."""
        path = self.folder / "token"
        return path.exists() and path.read_text() == token

    def made(self, peer: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """Slots for what comes from a rank, and the pipe that says that they are ready."""
        path = self.folder / f"{peer}"
        with path.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full memory ends the process
            memory = mmap.mmap(file.fileno(), nbytes)
        os.mkfifo(f"{path}.ready", 0o600)
        os.mkfifo(f"{path}.free", 0o600)
        return memory, os.open(f"{path}.ready", os.O_RDONLY | os.O_NONBLOCK)

    def opened(self, rank: int, nbytes: int) -> tuple[mmap.mmap, int, int]:
        """The slots of the other end for this rank, and its pipes: free and ready."""
        path = self.folder / f"{rank}"
        with path.open("rb+") as file:
            memory = mmap.mmap(file.fileno(), nbytes)
        free = os.open(f"{path}.free", os.O_RDONLY | os.O_NONBLOCK)
        return memory, free, os.open(f"{path}.ready", os.O_WRONLY)

    def freeing(self, peer: int) -> int:
        """The pipe that says to a rank that slots are free; it has the other end open."""
        return os.open(self.folder / f"{peer}.free", os.O_WRONLY)


@final
class Work:
    """Something that torch.distributed does meanwhile.

    One looks whether it is done and never waits: gloo's own waiting cannot be ended without
    breaking all of its connections.

    Args:
        work: Torch's handle of it.
        peer: The rank that takes part.
        watch: Looks after it.
    """

    def __init__(self, work: Any, peer: int, watch: Watch) -> None:
        self._work, self._peer, self._watch = work, peer, watch

    @property
    def is_done(self) -> bool:
        """True if it has ended; an error if it cannot."""
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError:
            self._watch.lost(self._peer)
        return True

    def wait(self) -> None:
        """Return when it is done."""
        since = looked = time.monotonic()
        while not self.is_done:
            now = time.monotonic()
            if now - looked > _LOOK_S:
                self._watch.look(self._peer, since)
                looked = now
            time.sleep(2e-5 if now - since < 0.01 else 5e-4)


@final
class _Gloo:
    """Blocks of bytes by gloo, one way, between two ranks that have a group for it.

    Each is a broadcast in a group of two: torch does not tell when an `isend` is done.
    """

    def __init__(self, src: int, group: Any, peer: int, watch: Watch) -> None:
        self._src, self._group, self._peer, self._watch = src, group, peer, watch

    def begun(self, block: torch.Tensor) -> Work:
        try:
            work = distributed.broadcast(block, self._src, self._group, async_op=True)
        except RuntimeError:
            self._watch.lost(self._peer)
        return Work(work, self._peer, self._watch)


@final
class GlooSender:
    """Messages as a block of a fixed size, which begins with theirs, and a second one if need be.

    Args:
        group: Of this rank and its peer, for this direction.
        src: This rank.
        peer: The other one.
        watch: Looks after it.
    """

    def __init__(self, group: Any, src: int, peer: int, watch: Watch) -> None:
        self._gloo = _Gloo(src, group, peer, watch)
        self._works: deque[tuple[Work, torch.Tensor]] = deque()  # that may not be done yet

    def room(self) -> int:
        """Bytes that can be sent without waiting."""
        while self._works and self._works[0][0].is_done:
            self._works.popleft()
        return sys.maxsize if len(self._works) < _BLOCKS else 0

    def send(self, parts: Iterable[memoryview]) -> None:
        """Send a message."""
        while not self.room():
            self._works[0][0].wait()
        rows = list(parts)
        total = sum(map(len, rows))
        block = torch.empty(max(_FIRST_BYTES, _COUNT_BYTES + total), dtype=torch.uint8)
        view, at = bytes_of(block), _COUNT_BYTES
        view[:at] = total.to_bytes(at, "little")
        for part in rows:
            view[at : at + len(part)] = part
            at += len(part)
        for piece in (block[:_FIRST_BYTES], block[_FIRST_BYTES:at]):
            if len(piece):
                self._works.append((self._gloo.begun(piece), block))

    def finish(self) -> None:
        """Return when everything has arrived."""
        while self._works:
            self._works.popleft()[0].wait()

    def close(self) -> None:
        """Nothing: gloo lets go of what it has to send."""


@final
class GlooReceiver:
    """The other end of a `GlooSender`, with its arguments; `src` is the peer."""

    def __init__(self, group: Any, src: int, peer: int, watch: Watch) -> None:
        self._gloo, self._peer = _Gloo(src, group, peer, watch), peer
        self._first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._work = self._gloo.begun(self._first)
        self._views: list[memoryview] = []  # of the message that is being read

    def receive(self, into: memoryview) -> None:
        """The next bytes of a message, or the first of the next one."""
        if not self._views:
            self._work.wait()
            view = bytes_of(self._first)
            total = int.from_bytes(view[:_COUNT_BYTES], "little")
            self._views = [view[_COUNT_BYTES : _COUNT_BYTES + total]]
            rest = _COUNT_BYTES + total - _FIRST_BYTES
            if rest > 0:
                block = torch.empty(rest, dtype=torch.uint8)
                self._gloo.begun(block).wait()
                self._views.append(bytes_of(block))
        done = 0
        while done < len(into):
            if not self._views:
                raise ExecutionError(f"rank {self._peer} sent too little.")
            view = self._views[0]
            n = min(len(view), len(into) - done)
            into[done : done + n] = view[:n]
            done, self._views[0] = done + n, view[n:]
            if not len(self._views[0]) and len(self._views) > 1:
                del self._views[0]

    def end(self) -> None:
        """Be done with a message."""
        self._views = []
        self._work = self._gloo.begun(self._first)

    def look(self) -> None:
        """Raise an error if the other end is gone."""
        _ = self._work.is_done

    def close(self) -> None:
        """Nothing: gloo lets go of what it waits for when the process ends."""


Sender: TypeAlias = SlotSender | GlooSender
Receiver: TypeAlias = SlotReceiver | GlooReceiver
