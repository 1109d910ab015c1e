"""One operator of a traced model on inputs of its own: its runs, and the memory that they take."""

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx

from baechi.costs.example_inputs import Make, function_of, looks_at_values
from baechi.costs.profile_cache import Measured
from baechi.costs.timers import Run
from baechi.torch_support.memory_meter import Meter, saved_inside_bytes
from baechi.torch_support.storages import distinct_storages, key_of
from baechi.torch_support.torch_internals import TapeEnd
from baechi.tracing.lowering import TracedModule
from baechi.tracing.pytrees import map_tensors, tensors_in
from baechi.tracing.subgraph import leaf_copies, located

# Fewer bytes of parameters come from memory in a small part of what the operator takes.
MIN_COLD_BYTES: Final = 1 << 18
# Gradients held at most, to keep them fresh.
_HELD_BYTES: Final = 1 << 28

# Empties the caches, but for some tensors that are read again.
Evict = Callable[[Sequence[torch.Tensor]], None]


def evictor(device: torch.device, cache_bytes: int) -> Evict:
    """An `Evict` of caches of this size."""
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


@final
class Alone:
    """One operator with inputs of its own.

    Attributes:
        known: The tensors that it reads; their bytes are the graph's or the model's.
        differentiable: Those of them that get a gradient.
        fresh: The share of its gradients that the allocator does not keep between steps; 0 where
            it has no parameters.
        is_read: Whether others read a result.
        single: Whether every run needs preparing of its own, since the caches are emptied.
        looks_at_values: Whether values decide what it does.
    """

    def __init__(
        self,
        module: TracedModule,
        nodes: Sequence[fx.Node],
        make: Make,
        device: torch.device,
        evict: Evict | None = None,
        fresh: float = 0.0,
        leaves: Mapping[str, torch.nn.Module] | None = None,
        returns_loss: bool = False,
    ) -> None:
        if leaves is None:
            leaves = leaf_copies(module.graph_module, nodes, device)
        part = function_of(module, nodes, device, leaves)
        self._function = part.function
        self.is_read = bool(part.outputs)
        self._ungraded = [
            returns_loss and _goes_to_caller_alone(module, node, nodes) for node in part.outputs
        ]
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
        self.differentiable = [t for t, _ in wanted]
        self._is_state = [is_state for _, is_state in wanted]
        self._activations = [t for t, is_state in read if not is_state]
        # Autograd forbids in-place writes to a leaf, so an operator that writes gets copies.
        facts = module.facts.nodes
        written = {s for node in nodes for s in facts[node].writes}
        values = (v for node in [*part.inputs, *nodes] for v in facts[node].values)
        graded = written & {value.storage for value in values if value.requires_grad}
        self._overwritten = [
            any(value.storage in graded for value in facts[node].values) for node in part.inputs
        ]
        state_bytes = sum(t.nbytes for t, is_state in read if is_state)
        state_bytes += sum(parameter.nbytes for parameter in parameters)
        self._evict = evict if state_bytes >= MIN_COLD_BYTES else None
        self.single = self._evict is not None
        self.fresh = fresh if any(self._is_state) else 0.0
        self._held: list[torch.Tensor] = []
        self.looks_at_values = looks_at_values(module, nodes)
        self._kept: list[torch.Tensor] = []

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Hold what autograd keeps of a forward, if values decide when the backward drops it.

        Which experts are hit, and in what order, another batch decides otherwise.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks if self.looks_at_values else contextlib.nullcontext():
            yield

    def forward_runs(self, n: int) -> list[Run]:
        """As many forwards, building autograd's graph as a training step does."""
        torch.set_grad_enabled(True)
        runs: list[Run] = [partial(self._function, *self._fresh_inputs()) for _ in range(n)]
        if self._evict is not None:
            self._evict(self._activations)
        return runs

    def backward_runs(self, n: int, *, fresh: bool = False) -> list[Run]:
        """As many backwards; none where there is nothing to differentiate.

        Those of `fresh` make gradients of parameters in new pages.
        """
        if not self.differentiable:
            return []
        if fresh and sum(tensor.nbytes for tensor in self._held) > _HELD_BYTES:
            self._held.clear()
            _give_memory_back()
        torch.set_grad_enabled(True)
        runs: list[Run] = []
        arriving: list[torch.Tensor] = []
        for _ in range(n):
            outputs, gradients = self.seeded(self.forward())
            if not outputs:
                return []
            arriving += gradients
            runs.append(partial(self._backward, outputs, gradients, fresh))
        if self._evict is not None:
            self._evict(arriving)
        return runs

    def forward(self) -> Any:
        """One forward."""
        return self._function(*self._fresh_inputs())

    def inference(self) -> Any:
        """One forward on activations that need no gradient; parameters keep `requires_grad`."""
        pairs = zip(self._fresh_inputs(), self._stays, strict=True)
        return self._function(
            *(value if stays else map_tensors(torch.Tensor.detach, value) for value, stays in pairs)
        )

    def _fresh_inputs(self) -> list[Any]:
        pairs = zip(self._inputs, self._overwritten, strict=True)
        return [value.clone() if over else value for value, over in pairs]

    def graded(self, results: Sequence[Any]) -> list[torch.Tensor]:
        """The results of a forward that get a gradient."""
        pairs = zip(results, self._ungraded, strict=True)
        rows = [result for result, ungraded in pairs if not ungraded]
        return [tensor for tensor in tensors_in(rows) if tensor.requires_grad]

    def seeded(self, results: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results of a forward that have gradients, and gradients for them."""
        outputs = self.graded(results)
        return outputs, [torch.ones_like(tensor) for tensor in outputs]

    def differentiated(
        self, outputs: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of what went in; nothing where it needs none."""
        if not outputs or not self.differentiable:
            return ()
        return torch.autograd.grad(outputs, self.differentiable, gradients, allow_unused=True)

    def _backward(
        self, outputs: list[torch.Tensor], gradients: list[torch.Tensor], fresh: bool
    ) -> list[torch.Tensor]:
        found = self.differentiated(outputs, gradients)
        pairs = zip(found, self._is_state, strict=True)
        kept = [t for t, is_state in pairs if is_state and t is not None]
        if fresh:
            self._held += kept
        return kept


def _goes_to_caller_alone(module: TracedModule, node: fx.Node, nodes: Sequence[fx.Node]) -> bool:
    """True of logits beside a model's own loss, which alone gets a gradient from the caller."""
    outside = [user for user in node.users if user not in nodes]
    scalar = any(value.shape == () for value in module.facts.nodes[node].values)
    return not scalar and all(user.op == "output" for user in outside)


def _give_memory_back() -> None:
    """Return free pages to the system, where the C library can: glibc's allocator keeps some."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def memory_of(alone: Alone, place: torch.device) -> Measured:
    """The memory of an operator; these first runs warm up, too."""
    meter = Meter([0])
    peaks = partial(_cuda_peaks, place) if place.type == "cuda" else partial(cpu_peaks, meter)
    # What nobody reads has no backward, so its graph goes at once.
    saved_bytes = saved_inside_bytes(alone.forward, alone.known) if alone.is_read else 0
    with torch.no_grad():
        _, inference_bytes, _ = peaks(alone.inference)
    if place.type == "cuda":
        # Autograd's thread has handles of its own, whose workspaces stay: no operator's scratch.
        alone.differentiated(*alone.seeded(alone.forward()))
    with alone.keeping():
        outputs, forward_bytes, _ = peaks(alone.forward)
    graded = alone.graded(outputs)
    scratch_bytes = reused_bytes = 0
    if graded and alone.differentiable:
        arriving, *_ = peaks(lambda: Arriving(graded))
        gradients, _, above = peaks(lambda: arriving.differentiated(alone.differentiable))
        scratch_bytes, reused_bytes = arriving.scratch(gradients, above)
    return Measured(
        forward_ns=0,
        saved_bytes=saved_bytes,
        workspace_bytes=forward_bytes,
        backward_workspace_bytes=scratch_bytes,
        inference_workspace_bytes=inference_bytes,
        backward_reused_bytes=reused_bytes,
    )


@final
class Arriving:
    """Gradients that a backward is handed over, as in a step: each lives until it is used.

    One comes for a tensor that several results show as a whole. What comes for others of them is
    added to it before.
    """

    def __init__(self, roots: Sequence[torch.Tensor]) -> None:
        last = {key_of(t.untyped_storage()): t for t in roots if _is_whole(t)}
        whole = {id(t) for t in last.values()}
        roots = [t for t in roots if id(t) in whole or not _is_whole(t)]
        seeds: list[torch.Tensor | None] = [_gradient_of(root) for root in roots]
        self._arrived = [weakref.ref(s) for s in distinct_storages(seeds).values()]
        self._end: torch.Tensor = TapeEnd.apply(seeds, *roots)  # type: ignore[no-untyped-call]

    def differentiated(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of some inputs."""
        end = self._end
        return torch.autograd.grad([end], inputs, [end.detach()], allow_unused=True)

    def scratch(
        self, gradients: Sequence[torch.Tensor | None], above_bytes: int
    ) -> tuple[int, int]:
        """Scratch, and what gradients reuse, of a backward whose peak was so far above its start.

        The gradients count by themselves. What they are parts of is scratch, but for a spectrum of
        which one is the real part: the graph counts that as a gradient.
        """
        passed_on = {key_of(storage) for ref in self._arrived if (storage := ref()) is not None}
        made = {key: row.nbytes() for key, row in distinct_storages(gradients).items()}
        beyond = {key: nbytes for key, nbytes in made.items() if key not in passed_on}
        new_bytes = sum(beyond.values())
        for gradient in gradients:
            for key in beyond.keys() & distinct_storages(gradient).keys():
                assert gradient is not None
                base = gradient._base
                real = base is not None and base.is_complex() and not gradient.is_complex()
                beyond[key] -= gradient.nbytes * (2 if real else 1)
        beyond_bytes = sum(nbytes for nbytes in beyond.values() if nbytes > 0)
        scratch_bytes = max(above_bytes - sum(made.values()), 0) + beyond_bytes
        return scratch_bytes, max(new_bytes - above_bytes, 0)


def _is_whole(tensor: torch.Tensor) -> bool:
    """True if it shows all of its memory."""
    dense = tensor.layout is torch.strided
    return dense and tensor.nbytes == tensor.untyped_storage().nbytes()


def _gradient_of(root: torch.Tensor) -> torch.Tensor:
    """A gradient as readers send it: of a view, such as `x.mT`, one that is no part of another.

    Of windows that overlap (`as_strided`) it may be turned, as by `einsum`, and is copied then.
    """
    if root._is_view() and root.nbytes > root.untyped_storage().nbytes() and 0 not in root.stride():
        turned = torch.ones(root.shape[::-1], dtype=root.dtype, device=root.device)
        return turned.permute(*reversed(range(root.dim())))
    like = torch.contiguous_format if root._is_view() else torch.preserve_format
    return torch.ones_like(root, memory_format=like)


def cpu_peaks(meter: Meter, run: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result; the peak above what is live at the end, and above what was at the start."""
    meter.forget_peaks()
    (before,) = meter.live_bytes
    with meter.counting(0):
        result = run()
    (peak,), (after,) = meter.peak_bytes, meter.live_bytes
    return result, max(peak - after, 0), peak - before


def _cuda_peaks(place: torch.device, run: Callable[[], Any]) -> tuple[Any, int, int]:
    """The same, by the statistics of CUDA's allocator."""
    torch.cuda.synchronize(place)
    before = torch.cuda.memory_allocated(place)
    torch.cuda.reset_peak_memory_stats(place)
    result = run()
    torch.cuda.synchronize(place)
    peak, after = torch.cuda.max_memory_allocated(place), torch.cuda.memory_allocated(place)
    return result, max(peak - after, 0), peak - before
