"""A meter of live and peak bytes for CPUs, which have no counter of their own.

A `Meter` has an account per logical device. Each thread that computes for a device enters
`Meter.counting(device)`: a dispatch mode that sees every storage that an operator makes. A storage
leaves its account when its last owner lets go of it, autograd included.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch

from baechi.torch_support.storages import (
    distinct_storages,
    key_of,
    laid_out,
    memory_of,
    once,
    storages,
)
from baechi.torch_support.tracer_internals import Watch


@final
class Meter:
    """Counts bytes per account, from `base_bytes` on.

    Attributes:
        moved_bytes: Bytes handed over or copied between devices.
    """

    def __init__(self, base_bytes: Sequence[int]) -> None:
        self._live = list(base_bytes)
        self._peak = list(base_bytes)
        self._known: dict[int, tuple[int, int]] = {}  # storage -> account and bytes charged
        self._thread = threading.local()  # which account this thread counts for
        self._latest = 0
        self._lock = threading.RLock()  # a finalizer may run inside a locked section
        self.moved_bytes = 0

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak of every account so far."""
        return tuple(self._peak)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """The bytes that every account holds now."""
        return tuple(self._live)

    def forget_peaks(self) -> None:
        """Make what is live now the peak so far."""
        with self._lock:
            self._peak = list(self._live)

    @property
    def account(self) -> int:
        """The account to which this thread's tensors are charged.

        In a thread that did not enter `counting` itself, the latest that another did: autograd
        runs CUDA's backwards in threads of its own, one step of the one launching thread at a time.
        """
        return int(getattr(self._thread, "account", self._latest))

    @contextmanager
    def counting(self, account: int) -> Iterator[None]:
        """Count what this thread makes, inside the block, for `account`, and for no other."""
        before = getattr(self._thread, "account", None)
        self._thread.account = account
        if before is None:
            self._latest = account
        try:
            with Watch(self._made) if before is None else nullcontext():
                yield
        finally:
            if before is None:
                del self._thread.account
            else:
                self._thread.account = before

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """True if the storage is counted."""
        return key_of(storage) in self._known

    def account_of(self, tensor: torch.Tensor, default: int) -> int:
        """The account to which a tensor is charged, if it is counted."""
        account, _ = self._known.get(memory_of(tensor), (default, 0))
        return account

    def hold(self, account: int, what: torch.Tensor | torch.UntypedStorage) -> None:
        """Count a storage once, until it is freed; what it grew by since, too."""
        if isinstance(what, torch.Tensor):
            for part in storages(what):
                self.hold(account, part)
            return
        key, nbytes = key_of(what), what.nbytes()
        with self._lock:
            new = key not in self._known
            owner, counted = self._known.get(key, (account, 0))
            self._known[key] = (owner, nbytes)
            self._live[owner] += nbytes - counted
            self._peak[owner] = max(self._peak[owner], self._live[owner])
        if new:
            weakref.finalize(what, self._release, key)

    def sent(self, tensor: torch.Tensor) -> None:
        """Count what crosses between devices of a tensor: each byte that it shows once."""
        dense = tensor.layout is torch.strided
        nbytes = once(tensor).nbytes if dense else sum(part.nbytes() for part in storages(tensor))
        with self._lock:
            self.moved_bytes += nbytes

    def copy(self, account: int, tensor: torch.Tensor, moved: bool = True) -> torch.Tensor:
        """A copy of another device's tensor, counted for `account` until it is freed.

        Logical devices on one CPU hand tensors over without copying; separate devices would hold
        a copy of each byte that it shows, without the rest of what it is a view of, and so does a
        metered step.

        `moved` says that it comes from another logical device, and not from the caller.
        """
        if moved:
            self.sent(tensor)
        part = once(tensor)
        with torch.no_grad(), self.counting(account):
            return laid_out(part.clone(), part, tensor)

    def _made(self, _: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Hold every storage that an operator makes, for its thread's account.

        What it returns of its arguments' storages is made by others, but may have grown.
        """
        given = distinct_storages((args, kwargs))
        for key, storage in distinct_storages(result).items():
            if key not in given or self.knows(storage):
                self.hold(self.account, storage)

    def _release(self, key: int) -> None:
        with self._lock:
            account, nbytes = self._known.pop(key)
            self._live[account] -= nbytes


def saved_inside_bytes(call: Callable[[], Any], known: Sequence[torch.Tensor]) -> int:
    """Bytes autograd saves during `call`, counting each storage once and ignoring known ones.

    The trace sees on fake tensors what is saved of the graph's tensors. What a kernel saves
    besides, such as a recurrent kernel's workspace or the statistics of a normalization, depends on
    the kernel that the device has; so it is measured where the operator is.

    What is known, the inputs, parameters and buffers, and the results of the call, are tensors of
    the graph or state.
    """
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]  # a result itself would hold its graph, and that its result, for ever

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        result = call()
    own = distinct_storages([*known, result])
    return sum(row.nbytes() for key, row in distinct_storages(kept).items() if key not in own)
