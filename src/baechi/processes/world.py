"""The ranks that run one placed model: what they tell each other, and what ends them all.

`torch.distributed` starts and connects them. Its store carries what is decided once, as text, and
the first error of any rank; edges carry tensors, in an order that the program gives:

    store    exchange: a text of each for all      decide: the first rank's for all      failure
    edges    from every rank to every other one, through shared memory or gloo

Who waits looks at the store for a failure, and at the pipe of whom it waits for.
"""

import atexit
import ctypes
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, final

import torch
from torch import distributed

from baechi import errors
from baechi.errors import BaechiError, ExecutionError, InfeasibleError, InputError, described
from baechi.processes.edges import (
    SLOT_BYTES,
    GlooReceiver,
    GlooSender,
    Receiver,
    Sender,
    SharedMemory,
    SharedSlots,
    SlotReceiver,
    SlotSender,
    Work,
    slots_for,
)
from baechi.processes.tensor_messages import Flag, Message, receive, send
from baechi.records.cluster import Cluster
from baechi.torch_support.torch_internals import default_store

TRANSPORTS: Final = ("auto", "gloo")
# Who is told of a failure waits so long for its reason.
_REASON_S: Final = 2.0
# For a step in which ranks compile: of a large model that takes minutes.
_COMPILATION_S: Final = 1_800.0
# For what is decided once: another rank may trace, measure and solve meanwhile.
_DECISION_S: Final = 3_600.0
_LATER: Final = "Restart all ranks, from a checkpoint: torchrun does with --max-restarts."
_FOREVER: Final = timedelta(days=365)  # edges have a limit of their own
_SHARED: Final = Path("/dev/shm")
_FAILURE: Final = "failure"
_KNOWN: Final = "known"  # so many ranks know it


@final
class Ranks:
    """The ranks of a job, each with one logical device; `baechi.ranks()` makes them.

    Of replicas each has a copy of the model, over consecutive ranks of the job.

    Attributes:
        rank: Of this process among those of its replica, from 0.
        size: Their number.
        replicas: The number of replicas.
        first: The rank in the job that is this replica's rank 0.
        device: The torch device of this one.
        places: The torch device of every logical device: meta but for this one's.
        timeout_s: How long a rank may take beyond the longest predicted step.
        step_ns: The longest predicted step so far.
    """

    cluster: Cluster

    def __init__(
        self, device: torch.device, timeout_s: int, transport: str, replicas: int = 1
    ) -> None:
        self._me, self._all = distributed.get_rank(), distributed.get_world_size()
        self.size, self.replicas = self._all // replicas, replicas
        self.rank = self._me % self.size
        self.first = self._me - self.rank
        self.device, self.timeout_s, self.step_ns = device, timeout_s, 0
        meta = torch.device("meta")
        self.places = tuple(device if rank == self.rank else meta for rank in range(self.size))
        self._store = default_store()
        self._round = self._messages = 0
        # Several of a job have names of their own.
        self._name = f"baechi/{self._store.add(f'baechi/{self._me}', 1)}"
        self._transport = transport
        self._groups: dict[tuple[int, int], Any] = {}  # of gloo, for each direction of a pair
        self._gloo: dict[int, tuple[GlooReceiver, GlooSender]] = {}
        self._nbytes = 0
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self._failed = ""
        self._more_s = 0.0
        atexit.register(self._finish)
        # Of what is the same rank in all replicas.
        alike = [list(range(rank, self._all, self.size)) for rank in range(self.size)]
        self._alike: Any = None
        for rank, row in enumerate(alike if replicas > 1 else []):
            # Two ranks may share a GPU, which NCCL refuses; gloo takes what GPUs have, too.
            group = distributed.new_group(row, backend="gloo", timeout=_FOREVER)
            self._alike = group if rank == self.rank else self._alike
        self.reserve(0)

    def __repr__(self) -> str:
        copies = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"Ranks({self._all} ranks{copies}, this is {self._me}, on {self.device})"

    @property
    def others(self) -> list[int]:
        """The other ranks, ascending."""
        return [rank for rank in range(self.size) if rank != self.rank]

    # What is decided once.

    def exchange(self, what: str, text: str = "") -> list[str]:
        """The text of every rank of the job; all have to call this for the same purpose."""
        self._round += 1
        keys = [f"{self._name}/{self._round}/{rank}" for rank in range(self._all)]
        self._store.set(keys[self._me], json.dumps([what, text]))
        self._await(keys)
        rows = [json.loads(self._store.get(key)) for key in keys]
        for rank, (other, _) in enumerate(rows):
            if other != what:
                self.fail(
                    ExecutionError(
                        f"rank {rank} is at {other!r} where rank {self._me} is at {what!r}: every "
                        "rank has to make the same calls of Baechi in the same order."
                    )
                )
        return [text for _, text in rows]

    def told(self, what: str, value: Any) -> list[Any]:
        """What every rank of the replica tells, through JSON."""
        rows = self.exchange(what, json.dumps(value))
        return [json.loads(row) for row in rows[self.first : self.first + self.size]]

    def decide(self, what: str, decision: Callable[[], str], rank: int = 0) -> str:
        """What one rank decides, or its error, for all."""
        found = failure = ""
        if rank == self._me:
            try:
                found = decision()
            except BaechiError as error:
                failure = json.dumps([type(error).__name__, error.args])
        rows = self.exchange(what, json.dumps([found, failure]) if rank == self._me else "")
        text: str
        text, failure = json.loads(rows[rank])
        if failure:
            raise _error(*json.loads(failure))
        return text

    def compare(self, what: str, digest: str, rows: Callable[[], Sequence[str]]) -> None:
        """Raise an error unless all ranks have the same, with the first row that differs."""
        digests = self.exchange(f"the digest of {what}", digest)
        other = next((rank for rank, found in enumerate(digests) if found != digests[0]), 0)
        if other == 0:
            return
        texts = self.exchange(f"the rows of {what}", json.dumps(list(rows())))
        first, second = json.loads(texts[0]), json.loads(texts[other])
        pairs = zip([*first, "nothing"], [*second, "nothing"], strict=False)
        at, (one, two) = next(
            ((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), (0, ("?", "?"))
        )
        begin = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0)
        begin = max(begin - 50, 0)  # rows are long
        one, two = (f"{row[:50]} ... {row[begin : begin + 150]} ..." for row in (one, two))
        raise InputError(
            f"{what} differs between ranks 0 and {other}, first in row {at}:\n  {one}\n  {two}\n"
            "Every rank has to make the same model, seeded alike (torch.manual_seed), in the same "
            "mode, and call it with arguments of the same shapes."
        )

    def _await(self, keys: Sequence[str]) -> None:
        since, pause = time.monotonic(), 0.0005
        while not self._asked(keys):
            for edge in self.receivers.values():
                edge.look()
            if time.monotonic() - since > _DECISION_S:
                self.fail(ExecutionError(f"rank {self._me} waited an hour for the other ranks."))
            self._look_for_failure()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _asked(self, keys: Sequence[str]) -> bool:
        try:
            return bool(self._store.check(list(keys)))
        except Exception as error:
            raise ExecutionError(
                f"the store of torch.distributed is gone ({error}): the launcher, or the rank that "
                f"serves it, has ended. {_LATER}"
            ) from error

    # Failures.

    def fail(self, error: BaseException) -> NoReturn:
        """Tell all ranks of an error, and raise it."""
        self.tell(error)
        raise error

    def tell(self, error: BaseException | str) -> None:
        """Tell all ranks of an error, if it is the first one."""
        if self._failed:
            return
        self._failed = f"rank {self._me} failed: {error}"
        with suppress(Exception):  # the store may be gone, too
            self._store.compare_set(f"{self._name}/{_FAILURE}", "", self._failed)
            self._store.add(f"{self._name}/{_KNOWN}", 1)
        self.close()

    def check(self) -> None:
        """Raise the error of a rank that has failed."""
        if self._failed:
            raise ExecutionError(f"{self._failed}\nNo rank goes on. {_LATER}")

    def _look_for_failure(self) -> None:
        key = f"{self._name}/{_FAILURE}"
        if self._asked([key]):
            self._failed = self._store.get(key).decode()
            self._store.add(f"{self._name}/{_KNOWN}", 1)
            self.close()
            self.check()

    def look(self, peer: int, since: float) -> None:
        """Raise an error if some rank has failed, or waiting since then takes too long."""
        self._look_for_failure()
        ahead = f"{self._name}/{self._round + 1}/{self.first + peer}"
        if self._asked([ahead]):
            what, _ = json.loads(self._store.get(ahead))
            self.fail(
                ExecutionError(
                    f"rank {self.first + peer} plans a call ({what}) where rank {self._me} runs "
                    "one: every "
                    "rank has to make the same calls, with arguments of the same shapes."
                )
            )
        limit = self.timeout_s + self.step_ns / 1e9 + self._more_s
        if time.monotonic() - since > limit:
            self.fail(
                ExecutionError(
                    f"rank {self._me} has waited {limit:.0f} s for rank {self.first + peer}, "
                    "which is stopped, cut off, or slower than predicted by more than "
                    "ranks(timeout_s=...) allows."
                )
            )

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, wait longer for a rank: it may compile."""
        self._more_s = _COMPILATION_S
        try:
            yield
        finally:
            self._more_s = 0.0

    def lost(self, peer: int) -> NoReturn:
        """Raise the error of a rank that is gone."""
        self.check()
        since = time.monotonic()
        while time.monotonic() - since < _REASON_S:  # another may know why
            self._look_for_failure()
            time.sleep(0.02)
        self.fail(
            ExecutionError(
                f"rank {self.first + peer} is gone: its process has ended or was killed, without a "
                "word. Its own output may say why, or the machine's log (out of memory?)."
            )
        )

    def _finish(self) -> None:
        """Before the process ends: others learn of the error that ends it, or have what was sent.

        Rank 0 may serve the store, and stays until all know.
        """
        error = getattr(sys, "last_value", None)  # which Python has printed
        if error is not None:
            self.tell(described(error))
        with suppress(Exception):
            for _, sender in self._gloo.values() if not self._failed else ():
                sender.finish()
            since, known = time.monotonic(), f"{self._name}/{_KNOWN}"
            while self._failed and self._me == 0 and self._store.add(known, 0) < self._all:
                if time.monotonic() - since > _REASON_S:
                    break
                time.sleep(0.02)

    def close(self) -> None:
        """Let go of all edges; whoever waits at their other ends sees that."""
        for sender, receiver in zip(self.senders.values(), self.receivers.values(), strict=True):
            sender.close()
            receiver.close()

    # Tensors.

    def reserve(self, nbytes: int) -> None:
        """Have edges on which messages of so many bytes need not wait; all ranks call this."""
        n = slots_for(nbytes)
        if self.size == 1 or n * SLOT_BYTES <= self._nbytes:
            return
        self.close()
        self.senders, self.receivers = {}, {}
        self._nbytes = n * SLOT_BYTES
        shared = self._shared() if self._transport == "auto" else {}
        me, others = self.rank, self.others
        for peer, (receiving, sending) in shared.items():
            self.receivers[peer], self.senders[peer] = SlotReceiver(receiving), SlotSender(sending)
        lacking = self.exchange("what is not shared", "gloo" * (len(shared) < len(others)))
        if any(lacking) and not self._groups:
            # Every rank of the job makes every group; there is one for each direction.
            pairs = [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
            for first in range(0, self._all, self.size):
                for a, b in pairs:
                    both = [first + a, first + b]
                    group = distributed.new_group(both, backend="gloo", timeout=_FOREVER)
                    if first == self.first:
                        self._groups[a, b] = group
                        # ~ProcessGroupGloo would wait for what has begun, though it be with a rank
                        # that is stopped (torch, csrc/distributed/c10d/ProcessGroupGloo.cpp).
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        for peer in (rank for rank in others if rank not in shared):
            if peer not in self._gloo:
                there = self.first + peer
                receiver = GlooReceiver(self._groups[peer, me], there, peer, self)
                sender = GlooSender(self._groups[me, peer], self._me, peer, self)
                self._gloo[peer] = receiver, sender
            self.receivers[peer], self.senders[peer] = self._gloo[peer]

    def _shared(self) -> Mapping[int, tuple[SharedSlots, SharedSlots]]:
        """The slots from and to every rank with which this one shares memory."""
        folder = Path(tempfile.mkdtemp(prefix="baechi-", dir=_SHARED if _SHARED.is_dir() else None))
        mine = SharedMemory(folder)
        try:
            text = secrets.token_hex()
            (folder / "token").write_text(text)
            rows = self.told("shared memory", [str(folder), text])
            theirs = {rank: SharedMemory(Path(path)) for rank, (path, _) in enumerate(rows)}
            seen = [rank for rank in self.others if theirs[rank].is_there(rows[rank][1])]
            lists = self.told("who sees whom", seen)
            peers = [rank for rank in seen if self.rank in lists[rank]]
            try:
                made = {rank: mine.made(rank, self._nbytes) for rank in peers}
            except OSError as error:
                raise ExecutionError(
                    f"rank {self._me} finds no room for {len(peers)} x {self._nbytes} bytes in "
                    f"{folder.parent} ({error.strerror}). Make it larger (docker run --shm-size), "
                    'or give ranks(transport="gloo").'
                ) from error
            self.exchange("edges made")
            opened = {rank: theirs[rank].opened(self.rank, self._nbytes) for rank in peers}
            self.exchange("edges opened")
            found = {}
            for rank in peers:
                memory, ready = made[rank]
                receiving = SharedSlots(memory, 0, ready, mine.freeing(rank), rank, self)
                memory, free, readying = opened[rank]
                n = self._nbytes // SLOT_BYTES
                found[rank] = receiving, SharedSlots(memory, n, free, readying, rank, self)
            self.exchange("edges ready")
            return found
        except BaseException as error:
            self.tell(error)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def key(self) -> int:
        """The number of the next message, or run, of all ranks."""
        self._messages += 1
        return self._messages

    def share(
        self, owner: int, tensors: Sequence[torch.Tensor | None] = (), flags: Sequence[Flag] = ()
    ) -> tuple[Sequence[torch.Tensor | None], Sequence[Flag]]:
        """Tensors that one rank has, on the devices of all; every rank calls this."""
        self.check()
        key = (self.key(),)
        if owner != self.rank:
            return receive(self.receivers[owner], key, self.device)
        for rank in self.others:
            send(self.senders[rank], Message(key, tensors, flags))
        return tensors, flags

    def average(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to make a tensor the mean over the replicas, in place; what waits for that."""
        work = distributed.all_reduce(tensor, group=self._alike, async_op=True)
        watched = Work(work, self.rank, self)

        def end() -> None:
            watched.wait()
            tensor.div_(self.replicas)

        return end


def _error(name: str, args: Sequence[Any]) -> BaechiError:
    kind = getattr(errors, name)
    if kind is InfeasibleError:
        text, subject, needed, left, *extra = args
        return InfeasibleError(text, subject, needed, tuple(map(tuple, left)), *extra)
    found: BaechiError = kind(*args)
    return found
