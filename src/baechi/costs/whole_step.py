"""The model's own step: what its operators, each measured alone, take one after the other.

    alone   |a a a a a|  |b b b b b|    code and data in the nearest caches, nothing in between
    whole   a . b . c ...               the model's Python (.), each operator after others

docs/cost-model.md, "Where the numbers come from", has what becomes of the difference.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Final, final

import torch

from baechi.costs.profile_cache import Measured
from baechi.costs.timers import ROUNDS, CpuTimer, CudaTimer, Reading, Run, median_ns
from baechi.records.op_costs import OpCost
from baechi.torch_support.torch_devices import free_host_bytes
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import inside
from baechi.tracing.lowering import TracedModule
from baechi.tracing.model_notes import notes_kept
from baechi.tracing.observers import without_observers
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.side_effects import state_kept, step_roots, values_kept

# Longer steps are of longer operators, for which the difference is small.
LONGEST_NS: Final = 300_000_000


@final
class WholeStep:
    """A traced model's own forward and backward on its example, of which nothing stays.

    Args:
        gradients: Whether forward is that of training, with its backward.

    Attributes:
        gradients: As given.
        key: The same of models whose operators are the same.
    """

    def __init__(self, traced: Traced, *, gradients: bool) -> None:
        module: TracedModule = traced.module
        self.key = f"{'step' if gradients else 'forward'} of {traced.digest}"
        self._model, self._call = module.model, module.call
        self.gradients = gradients
        self._result: Any = None  # of the latest forward, for its backward
        rows = traced.tensors
        self._most_bytes = sum(row.nbytes for row in rows) * (1 + gradients)
        self._most_bytes += gradients * sum(op.trained_bytes for op in traced.ops)

    def runs_on(self, place: torch.device) -> bool:
        """True if all of it is there, and the rest of a step fits there, too."""
        tensors = [*self._model.parameters(), *self._model.buffers(), *self._call.tensors]
        here = all(tensor.device == place for tensor in tensors)
        return here and (place.type != "cpu" or self._most_bytes < free_host_bytes())

    def measured(self, timer: CpuTimer | CudaTimer) -> Measured:
        """One pass: on a CPU its times, on a GPU for how long it keeps the host; 0 if it fails."""
        kinds = [self._forwards, self._backwards] if self.gradients else [self._forwards]
        try:
            with contextlib.ExitStack() as stack:
                for kept in (notes_kept, values_kept, state_kept, without_observers):
                    stack.enter_context(kept(self._model))
                stack.enter_context(inside())
                stack.enter_context(torch.set_grad_enabled(self.gradients))
                kinds = [kind for kind in kinds if kind(1)]
                if isinstance(timer, CudaTimer):
                    rows = [timer.launched(kind, ROUNDS) for kind in kinds]
                    readings = [Reading(0, launch_ns=median_ns(row, 1, 0.0)) for row in rows]
                else:
                    readings = list(timer.time(kinds, single=True))
        except Exception:  # whatever the model's own Python raises
            readings = []
        self._result = None
        forward, backward = [*readings, Reading(0), Reading(0)][:2]
        return Measured(
            forward.ns,
            backward.ns,
            forward_spread_ns=forward.ns if forward.held_up else 0,
            backward_spread_ns=backward.ns if backward.held_up else 0,
            forward_launch_ns=forward.launch_ns,
            backward_launch_ns=backward.launch_ns,
        )

    def _forwards(self, n: int) -> Sequence[Run]:
        torch.set_grad_enabled(self.gradients)
        self._result = None  # that of the forward before goes now, not while the next is measured
        for parameter in self._model.parameters():
            parameter.grad = None
        return [self._forward() for _ in range(n)]

    def _forward(self) -> Run:
        graded = self.gradients
        inputs = [
            t.detach().clone().requires_grad_(t.requires_grad and graded)
            for t in self._call.tensors
        ]
        args, kwargs = self._call.structure.fill(inputs)
        return partial(self._run, args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._result = result = type(self._model).__call__(self._model, *args, **kwargs)
        return result

    def _backwards(self, n: int) -> Sequence[Run]:
        # Each is that of the forward whose turn was before.
        result, self._result = self._result, None
        results = [result] if result is not None else [run() for run in self._forwards(n)]
        self._result = None
        rows = [step_roots(tensors_in(result)) for result in results]
        seeded = [(roots, [torch.ones_like(root) for root in roots]) for roots in rows if roots]
        return [partial(torch.autograd.backward, *pair) for pair in seeded]


def together(
    costs: Sequence[OpCost], alone: Sequence[OpCost], training: Measured, inference: Measured
) -> tuple[OpCost, ...]:
    """The costs such that operators take together what the model's own step takes.

    Where a GPU is busy for longer than the host, the host may have waited for room in its queue:
    launches take at most what was measured.

    Args:
        costs: Those of a step.
        alone: Those of operators whose sum is to be the whole.
        training: The whole's forward and backward; no time where that is unknown.
        inference: The whole's forward without gradients.
    """
    launches = training if training.forward_launch_ns else inference
    parts: dict[str, Callable[[OpCost], Any]] = {}
    for way in ("forward", "backward"):
        name, launch = f"{way}_ns", f"{way}_launch_ns"
        busy_ns = sum(getattr(row, name) for row in alone)
        parts[name] = _part(name, alone, getattr(training, name))
        parts[launch] = _part(launch, alone, getattr(launches, launch), busy_ns)
    if inference.forward_ns:
        parts["inference_ns"] = _part("forward_ns", alone, inference.forward_ns)
    return tuple(replace(c, **{name: own(c) for name, own in parts.items()}) for c in costs)


def _part(
    name: str, alone: Sequence[OpCost], whole_ns: int, busy_ns: int = 0
) -> Callable[[OpCost], int]:
    """An operator's part of the whole; its own time where nothing follows from that.

    That is where it is unknown, or longer than all alone while a GPU was busy for longer still.
    """
    own = attrgetter(name)
    alone_ns = sum(map(own, alone))
    if not alone_ns or not whole_ns or alone_ns <= whole_ns <= busy_ns:
        return own
    # What takes next to no time is not taken for nothing.
    return lambda cost: max(min(own(cost), 2), own(cost) * whole_ns // alone_ns)
