"""Live and peak bytes, counted where tensors are made and freed; for CPUs, which have no counter.

A `Meter` has an account per logical device. Each thread that computes for a device enters
`Meter.counting(device)`: a dispatch mode that sees every storage that an operator makes. A storage
leaves its account when its last owner lets go of it, autograd included.
"""

import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@final
class Meter:
    """Counts bytes per account, from `base_bytes` on.

    Attributes:
        moved_bytes: Bytes handed over or copied between devices.
    """

    def __init__(self, base_bytes: Sequence[int]) -> None:
        self._live = list(base_bytes)
        self._peak = list(base_bytes)
        self._known: set[int] = set()
        self._loans: dict[tuple[int, Hashable], int] = {}
        self._sent: set[tuple[int, Hashable]] = set()
        self._lock = threading.RLock()  # a finalizer may run inside a locked section
        self.moved_bytes = 0

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak of every account so far."""
        return tuple(self._peak)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """What every account holds now."""
        return tuple(self._live)

    @contextmanager
    def counting(self, account: int) -> Iterator[None]:
        """Count what this thread makes, inside the block, for `account`."""
        with _Counting(self, account):
            yield

    def hold(self, account: int, tensor: torch.Tensor) -> None:
        """Count the tensor's storage once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._known:
                return
            self._known.add(key)
            self._charge(account, storage.nbytes())
        weakref.finalize(storage, self._release, account, storage.nbytes(), key)

    def borrow(self, account: int, key: Hashable, tensor: torch.Tensor) -> None:
        """Count a copy that `account` got of another's tensor, as long as any borrower lives.

        Logical devices on one CPU hand tensors over without copying; the copy that separate
        devices would hold is counted all the same.

        Args:
            account: Who got it.
            key: What it is: a second borrower of the same thing counts nothing more.
            tensor: The borrower.
        """
        nbytes = tensor.numel() * tensor.element_size()  # a view is sent without its base
        with self._lock:
            count = self._loans.get((account, key), 0)
            self._loans[account, key] = count + 1
            if count == 0:
                self.moved_bytes += 0 if (account, key) in self._sent else nbytes
                self._sent.add((account, key))
                self._charge(account, nbytes)
        weakref.finalize(tensor, self._return, account, key, nbytes)

    def move(self, nbytes: int) -> None:
        """Count bytes that were copied from one account to another."""
        with self._lock:
            self.moved_bytes += nbytes

    def _return(self, account: int, key: Hashable, nbytes: int) -> None:
        with self._lock:
            self._loans[account, key] -= 1
            if self._loans[account, key] == 0:
                self._live[account] -= nbytes

    def _charge(self, account: int, nbytes: int) -> None:
        self._live[account] += nbytes
        self._peak[account] = max(self._peak[account], self._live[account])

    def _release(self, account: int, nbytes: int, key: int) -> None:
        with self._lock:
            self._live[account] -= nbytes
            self._known.discard(key)


@final
class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds, for one account, every tensor that an operator returns."""

    def __init__(self, meter: Meter, account: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._account = account

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._meter.hold(self._account, leaf)
        return result
