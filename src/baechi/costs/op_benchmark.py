"""One operator measured on its own: the times of its forward and backward, and its memory.

An operator runs on tensors made for it (`example_inputs`), or where it fails on these on the
model's own, as it would in a step: with parameters in no cache, but for the activations, or the
gradients that have just arrived, which are read once to bring them back; and with gradients of
parameters in new pages. docs/cost-model.md, "Where the numbers come from", has when and why.
"""

import contextlib
import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from typing import Any, Final, final

import torch
from torch import fx

from baechi.costs.example_inputs import (
    ExampleInputs,
    Make,
    RealInputs,
    function_of,
    looks_at_values,
)
from baechi.costs.profile_cache import Conditions, Measured
from baechi.costs.timers import CpuTimer, CudaTimer, Preparation, Reading, Run
from baechi.errors import InputError
from baechi.records.cluster import lane_kind
from baechi.torch_support.graph_capture import no_collections
from baechi.torch_support.memory_meter import Meter, saved_inside_bytes
from baechi.torch_support.storages import distinct_storages, key_of
from baechi.torch_support.torch_devices import cache_bytes, device_kind, fp32_precisions, hardware
from baechi.torch_support.torch_internals import TapeEnd, is_profiled
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.tracing.pytrees import map_tensors, tensors_in
from baechi.tracing.subgraph import leaf_copies, located

# Results of another method are not comparable: raise this when a number's meaning changes.
METHOD: Final = 13
# What glibc's allocator keeps at most of freed memory, twice DEFAULT_MMAP_THRESHOLD_MAX; CUDA's
# keeps everything.
_ALLOCATOR_KEEPS_BYTES: Final = 64 * 2**20
# Fewer bytes of parameters come from memory in a small part of what the operator takes.
_MIN_COLD_BYTES: Final = 1 << 18
# Gradients held at most, to keep them fresh.
_HELD_BYTES: Final = 1 << 28

# Empties the caches, but for some tensors that are read again.
Evict = Callable[[Sequence[torch.Tensor]], None]


@final
@dataclass(frozen=True, slots=True)
class Addition:
    """The sum of two gradients of so many bytes, in place or anew, as for parameters' that stay.

    Attributes:
        earlier: One of them is of an earlier micro-batch, and so in no cache.
    """

    nbytes: int
    anew: bool = False
    earlier: bool = False

    @property
    def key(self) -> str:
        """Equal keys cost the same."""
        name = "accumulate earlier" if self.earlier else "add" if self.anew else "accumulate"
        return f"{name} float32[{self.nbytes // 4}]"


@final
@dataclass
class Bench:
    """Measures operators of one traced model on one device, one pass at a time (`profiling`)."""

    traced: Traced
    place: torch.device
    threads: int
    lanes: int = 1

    def __post_init__(self) -> None:
        self._module: TracedModule = self.traced.module
        step_bytes = sum(op.trained_bytes + op.frozen_bytes for op in self.traced.ops)
        gradient_bytes = sum(op.trained_bytes for op in self.traced.ops)
        step_bytes += sum(tensor.nbytes for tensor in self.traced.tensors)
        cache = cache_bytes(self.place)
        kept_bytes = _ALLOCATOR_KEEPS_BYTES if self.place.type == "cpu" else gradient_bytes
        self._evict = evictor(self.place, cache) if step_bytes > cache else None
        self._fresh = max(1 - kept_bytes / max(gradient_bytes, 1), 0.0)
        caches = "warm" if self._evict is None else "cold"
        tenths = round(10 * self._fresh)  # finer than the difference that it makes
        self.conditions = Conditions(
            kind=lane_kind(device_kind(self.place), self.lanes),
            hardware=hardware(self.place),
            threads=self.threads,
            torch=torch.__version__,
            settings=f"{_library_settings()}, caches {caches}, gradients {tenths}/10 fresh",
            method=METHOD,
        )
        if self.place.type == "cuda":
            # Autograd's thread has no context before its first kernel: cuBLAS would warn of it.
            leaf = torch.ones(2, device=self.place, requires_grad=True)
            torch.autograd.grad(leaf.exp().sum(), leaf)

    # Made when something is measured, because they measure themselves first.
    @cached_property
    def timer(self) -> CpuTimer | CudaTimer:
        """What times runs there."""
        return CudaTimer(self.place, self.lanes) if self.place.type == "cuda" else CpuTimer()

    @cached_property
    def _inputs(self) -> ExampleInputs:
        return ExampleInputs(self._module, self.place)

    @cached_property
    def _real_inputs(self) -> RealInputs:
        return RealInputs(self._module)

    @cached_property
    def _engine(self) -> Reading:
        """The time to start autograd's engine, which a segment does once for all its ops."""
        leaf = torch.zeros((), device=self.place, requires_grad=True)
        seed = torch.ones((), device=self.place)
        # The gradient of a leaf by itself: the engine starts, finds it, and runs no node.
        run = partial(torch.autograd.grad, [leaf], [leaf], [seed])
        return self.timer.time([lambda n: [run] * n])[0]

    @cached_property
    def _lock_ns(self) -> int:
        """On a CPU, at most how long a call of torch holds Python's lock: one with next to no work.

        torch gives the lock back where an operator's own work begins; autograd's engine runs
        without it.
        """
        one = torch.ones((), device=self.place)
        (reading,) = self.timer.time([lambda n: [partial(torch.neg, one)] * n])
        return reading.ns if self.place.type == "cpu" else 0

    def check_settings(self) -> None:
        """Refuse to measure where every kernel is waited for, or watched.

        Raises:
            InputError: It would be; what was measured earlier can be used all the same.
        """
        if self.place.type != "cuda":
            return
        # The second is by which Nsight and compute-sanitizer get into a process.
        names = ("CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH")
        found = [f"{name} is set" for name in names if os.environ.get(name, "0") not in ("", "0")]
        for why in (["a profiler of torch is running"] if is_profiled() else found)[:1]:
            raise InputError(
                f"{why}, so nothing takes on {self.place} what it takes in a step. End that to "
                "measure; or give costs='estimate', which computes costs."
            )

    def operator(self, index: int, before: Measured | None = None) -> Measured:
        """One pass over an operator, alone or else in place; sizes are taken over from before.

        Raises:
            InputError: It runs neither alone nor in the model.
        """
        nodes, op = self._module.nodes[index], self.traced.ops[index]
        make_up = self._inputs.make
        # Fused layers, which a run without gradients takes, have no derivative.
        ways: list[Make] = [make_up]
        ways += [partial(_detached, make_up)] if self._module.gradients is False else []
        in_place = partial(self._in_place, nodes, before)
        if looks_at_values(self._module, nodes):
            with contextlib.suppress(Exception):  # of an example that the model does not run on
                return in_place()
        for make in ways:
            try:
                return self._measure(make, nodes, before)
            except Exception as error:  # whatever a made-up value makes an operator raise
                alone = error
        try:
            measured = in_place()
        except Exception as error:
            where = f" ({op.source})" if op.source else ""
            raise InputError(
                f"cannot measure op {op.name!r}{where} on {self.place}: alone it fails with "
                f"{_brief(alone)}, and in the model, run on its example, with {_brief(error)}. "
                "Give an example that the model runs on with real weights and enough memory."
            ) from error
        why = f"fails alone ({_brief(alone)}); measured in place"
        return replace(measured, remark="; ".join(filter(None, (why, measured.remark))))

    def _in_place(self, nodes: Sequence[fx.Node], before: Measured | None) -> Measured:
        """One pass over an operator on what it reads in a run of the model on its example."""
        make = self._real_inputs.make(nodes, self.place, self._inputs.make)
        return self._measure(make, nodes, before)

    def _measure(self, make: Make, nodes: Sequence[fx.Node], before: Measured | None) -> Measured:
        with torch.enable_grad(), no_collections(), warnings.catch_warnings():
            # Made-up weights of a recurrent layer are in pieces; cuDNN says so.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            # A lane has leaves of its own: autograd gives a leaf's gradient on one stream.
            lanes = [
                Alone(self._module, nodes, make, self.place, self._evict, self._fresh)
                for _ in range(self.lanes)
            ]
            alone = lanes[0]
            known = _sizes(alone, self.place) if before is None else before
            kinds = [Alone.forward_runs, Alone.backward_runs]
            kinds += [partial(Alone.backward_runs, fresh=True)] if alone.fresh else []
            ways = [_in_turn([partial(kind, lane) for lane in lanes]) for kind in kinds]
            ways = [way for way in ways if way(1)]
            readings = self.timer.time(ways, single=alone.single)
        forward, backward, fresh = [*readings, Reading(0), Reading(0)][:3]
        backward_ns = backward.ns
        if len(ways) == 3:
            backward_ns += round(alone.fresh * (fresh.ns - backward.ns))
        backward_ns = max(backward_ns - self._engine.ns, 0)
        remarks = dict.fromkeys(reading.remark for reading in readings if reading.remark)
        locked_ns = self._lock_ns * sum(node.op.startswith("call") for node in nodes)
        return replace(
            known,
            forward_ns=forward.ns,
            backward_ns=backward_ns,
            forward_spread_ns=forward.ns if forward.held_up else 0,
            backward_spread_ns=backward_ns if backward.held_up or fresh.held_up else 0,
            forward_launch_ns=forward.launch_ns or min(locked_ns, forward.ns),
            backward_launch_ns=max(backward.launch_ns - self._engine.launch_ns, 0),
            remark="; ".join(remarks),
        )

    def addition(self, addition: Addition) -> Measured:
        """One pass over adding up two gradients."""
        with torch.no_grad(), no_collections():
            # Not zeros: a system may show one page of zeros for all of theirs.
            size = max(addition.nbytes // 4, 1)
            total, other = (torch.full((size,), 1e-3, device=self.place) for _ in range(2))
            run: Run = partial(torch.add, total, other)
            if not addition.anew:
                run = partial(total.add_, other)
            cold = addition.earlier and addition.nbytes >= _MIN_COLD_BYTES
            evict = self._evict if cold else None

            def prepare(n: int) -> list[Run]:
                if evict is not None:
                    evict([other])
                return [run] * n

            (reading,) = self.timer.time([prepare], single=evict is not None)
        return Measured(
            reading.ns,
            forward_spread_ns=reading.ns if reading.held_up else 0,
            forward_launch_ns=reading.launch_ns,
        )


def _detached(make: Make, node: fx.Node, readers: Sequence[fx.Node]) -> Any:
    return map_tensors(torch.Tensor.detach, make(node, readers))


def _brief(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _library_settings() -> str:
    """The settings of torch that change an operator's speed."""
    settings = {
        "dtype": torch.get_default_dtype(),
        **fp32_precisions(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "denormals": torch.tensor(1e-40).mul(1).item() == 0,
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items())


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
    ) -> None:
        if leaves is None:
            leaves = leaf_copies(module.graph_module, nodes, device)
        part = function_of(module, nodes, device, leaves)
        self._function = part.function
        self.is_read = bool(part.outputs)
        self._ungraded = [_has_no_gradient(module, node, nodes) for node in part.outputs]
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
        self._evict = evict if state_bytes >= _MIN_COLD_BYTES else None
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


def _has_no_gradient(module: TracedModule, node: fx.Node, nodes: Sequence[fx.Node]) -> bool:
    """True if the caller alone gets a value, such as logits beside the model's own loss."""
    values = module.facts.nodes[node].values
    if not all(user.op == "output" for user in node.users if user not in nodes):
        return False
    returned = module.graph_module.graph.output_node().all_input_nodes
    rows = [value for each in returned for value in module.facts.nodes[each].values]
    has_loss = any(value.shape == () and value.requires_grad for value in rows)
    return has_loss and all(value.shape != () for value in values)


def _in_turn(preparations: Sequence[Preparation]) -> Preparation:
    """Prepares by one after the other, so that lanes that prepare together have one each."""
    turns = cycle(preparations)

    def prepare(n: int) -> Sequence[Run]:
        return next(turns)(n)

    return prepare


def _give_memory_back() -> None:
    """Return free pages to the system, where the C library can: glibc's allocator keeps some."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _sizes(alone: Alone, place: torch.device) -> Measured:
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
    """A gradient as readers send it: of a view, such as `x.mT`, one that is no part of another."""
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
