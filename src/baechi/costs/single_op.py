"""One operator on its own, ready to be timed: forward, inference, and backward.

In a training step of a large model some things are so that a tight loop would hide:

- An operator's parameters were last touched a whole step ago, and are in no cache. So where the
  step's bytes outgrow the caches (`Setting.evict`), and the operator has enough parameters for it
  to matter, everything is evicted before every reading, and the activations, or the gradients that
  have just arrived, are read once to bring them back. Others run on what is in the caches.
- Gradients of parameters stay until the optimizer has run. What the allocator does not keep of
  them after that (`Setting.fresh` is that share) lands in pages that the process has to get
  from the system in the next step. So those backwards are measured a second time, with gradients
  of parameters of earlier runs held, while those of activations are freed and used again.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from baechi.costs.cpu_timer import Run
from baechi.tracing.lowering import TracedModule
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.subgraph import extract, leaf_copies, located

# Fewer bytes of parameters come from memory in a small part of what the operator takes.
_MIN_COLD_BYTES: Final = 1 << 18
# Gradients held at most, to keep them fresh.
_HELD_BYTES: Final = 1 << 28


@final
@dataclass(frozen=True)
class Setting:
    """The state of memory in a whole step.

    Attributes:
        evict: Empties the caches but for what it is given, or `None` where a step's bytes fit.
        fresh: The share of the gradients that the allocator does not keep between steps.
    """

    evict: Callable[[Sequence[torch.Tensor]], None] | None
    fresh: float

    @property
    def words(self) -> str:
        """The words for the key of a stored result."""
        caches = "warm" if self.evict is None else "cold"
        # A tenth is finer than the difference that it makes.
        return f"caches {caches}, gradients {round(10 * self.fresh)}/10 fresh"


@final
class Alone:
    """One operator with inputs of its own.

    Args:
        module: The traced model.
        nodes: The operator's.
        make: A value for an input node, given the nodes that read it.
        device: Where to run.
        setting: The treatment of memory in the whole step.
    """

    def __init__(
        self,
        module: TracedModule,
        nodes: Sequence[fx.Node],
        make: Callable[[fx.Node, Sequence[fx.Node]], Any],
        device: torch.device,
        setting: Setting,
    ) -> None:
        inside = set(nodes)
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        outputs = [n for n in outputs or nodes if n.op not in ("get_attr", "placeholder")]
        leaves = leaf_copies(module.graph_module, nodes, device)
        part = extract(module.graph_module, nodes, outputs, device=device, leaves=leaves)
        self._function = part.function
        self._stays = [node.op == "get_attr" for node in part.inputs]
        self._inputs = [located(make(node, nodes), device) for node in part.inputs]
        parameters = [p for leaf in leaves.values() for p in leaf.parameters()]
        read = [
            (tensor, module.facts.is_state(node))
            for node, value in zip(part.inputs, self._inputs, strict=True)
            for tensor in tensors_in(value)
        ]
        wanted = read + [(p, True) for p in parameters]
        self.known = [t for t, _ in wanted]
        self.known += [b for leaf in leaves.values() for b in leaf.buffers()]
        wanted = [(t, is_state) for t, is_state in wanted if t.requires_grad and t.is_leaf]
        self._differentiable = [t for t, _ in wanted]
        self._is_state = [is_state for _, is_state in wanted]
        self._activations = [t for t, is_state in read if not is_state]
        # Autograd forbids in-place writes to a leaf, and what has got a gradient by one is of that
        # run; so an operator that writes gets copies.
        facts = module.facts.nodes
        written = {s for node in nodes for s in facts[node].writes}
        values = (v for node in [*part.inputs, *nodes] for v in facts[node].values)
        graded = written & {value.storage for value in values if value.requires_grad}
        self._overwritten = [
            any(value.storage in graded for value in facts[node].values) for node in part.inputs
        ]
        state = [t for t, is_state in read if is_state] + parameters
        state_bytes = sum(tensor.nbytes for tensor in state)
        self._evict = setting.evict if state_bytes >= _MIN_COLD_BYTES else None
        self.fresh = setting.fresh if any(self._is_state) else 0.0
        self._held: list[torch.Tensor] = []
        self._held_bytes = 0

    def forward_runs(self, n: int) -> list[Run]:
        """As many forwards, building autograd's graph as a training step does."""
        torch.set_grad_enabled(True)
        runs: list[Run] = [partial(self._function, *self._fresh_inputs()) for _ in range(n)]
        if self._evict is not None:
            self._evict(self._activations)
        return runs

    def fresh_backward_runs(self, n: int) -> list[Run]:
        """As many backwards whose gradients of parameters are in new pages."""
        if self._held_bytes > _HELD_BYTES:
            self._held.clear()
            self._held_bytes = 0
            _give_memory_back()
        return self.backward_runs(n, hold=True)

    def backward_runs(self, n: int, *, hold: bool = False) -> list[Run]:
        """As many backwards; empty where there is nothing to differentiate."""
        if not self._differentiable:
            return []
        torch.set_grad_enabled(True)
        runs: list[Run] = []
        arriving: list[torch.Tensor] = []
        for _ in range(n):
            outputs, gradients = self.seeded(self.forward())
            if not outputs:
                return []
            arriving += gradients
            runs.append(partial(self._backward, outputs, gradients, hold))
        if self._evict is not None:
            self._evict(arriving)
        return runs

    @property
    def single(self) -> bool:
        """True if every run needs preparing of its own."""
        return self._evict is not None

    def forward(self) -> Any:
        """One forward."""
        return self._function(*self._fresh_inputs())

    def inference(self) -> Any:
        """One forward on activations that need no gradient, as for inference."""
        return self._function(*self._plain_inputs())

    def _fresh_inputs(self) -> list[Any]:
        if not any(self._overwritten):
            return self._inputs
        pairs = zip(self._inputs, self._overwritten, strict=True)
        return [v.clone() if over else v for v, over in pairs]

    def _plain_inputs(self) -> list[Any]:
        """The inputs without gradients; parameters keep `requires_grad`."""
        pairs = zip(self._fresh_inputs(), self._stays, strict=True)
        return [v if stays else tree_map_only(torch.Tensor, _detached, v) for v, stays in pairs]

    @staticmethod
    def seeded(results: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results of a forward that have gradients, and gradients for them."""
        outputs = [t for t in tensors_in(results) if t.requires_grad]
        return outputs, [torch.ones_like(tensor) for tensor in outputs]

    def differentiated(
        self, outputs: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of what went in; nothing where it needs none."""
        if not outputs or not self._differentiable:
            return ()
        return torch.autograd.grad(outputs, self._differentiable, gradients, allow_unused=True)

    def _backward(
        self, outputs: list[torch.Tensor], gradients: list[torch.Tensor], hold: bool
    ) -> list[torch.Tensor]:
        found = self.differentiated(outputs, gradients)
        pairs = zip(found, self._is_state, strict=True)
        kept = [t for t, is_state in pairs if is_state and t is not None]
        if hold:
            self._held += kept
            self._held_bytes += sum(tensor.nbytes for tensor in kept)
        return kept


def evictor(device: torch.device, cache_bytes: int) -> Callable[[Sequence[torch.Tensor]], None]:
    """Empties the caches, but for some tensors that are read again."""
    # Twice the cache: replacement is not strictly of the oldest.
    scratch = torch.zeros(cache_bytes // 2, dtype=torch.float32, device=device)

    def evict(but: Sequence[torch.Tensor]) -> None:
        scratch.sum()  # read, not written: written lines would be paid for in the reading
        # The last made are the likeliest to be there still; more than half a cache is not.
        left = cache_bytes // 2
        for tensor in reversed(but):
            left -= tensor.nbytes
            if left < 0:
                break
            tensor.detach().clone()

    return evict


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _give_memory_back() -> None:
    """Return free pages to the system, where the C library can: glibc's allocator keeps some."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
