"""A recorder for CPUs: what a CUDA graph does, by PyTorch's own operators.

While a function runs, every operator below autograd is written down with its arguments and results.
A replay runs them again and puts the results where they were the first time, whoever has changed
the inputs meanwhile. So stale addresses, missing copies and values that were baked in show.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(TorchDispatchMode):
    """Writes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = _bare(args), _bare(kwargs or {})  # shapes as they are now, whatever `t_` does later
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, *given, _bare(result)))
        return result


def _bare(value: Any) -> Any:
    """The same memory without autograd and without its version counters, as a graph sees it."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.data, value)


class CpuRecorder:
    """Records for one logical device.

    Args:
        refuse: Tells by a count over all recordings which of them fails.
        ranks: Where the ranks of what is recorded are noted.
    """

    def __init__(self, refuse: Callable[[], bool], ranks: list[int]) -> None:
        self._refuse = refuse
        self._ranks = ranks

    def record(self, function: Callable[[], None], rank: int) -> Callable[[], None]:
        """The function is run now, which is what the first replay would do."""
        if self._refuse():
            raise RuntimeError("not permitted when stream is capturing\nCompile with ...")
        self._ranks.append(rank)
        recording = Recording()
        with recording:
            function()
        done = [True]

        def replay() -> None:
            if done:
                done.clear()
                return
            for func, args, kwargs, result in recording.calls:
                again = func(*_bare(args), **_bare(kwargs))
                rows = zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True)
                for old, new in rows:
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay

    def run(self, function: Callable[[], None]) -> None:
        """Run it."""
        function()
