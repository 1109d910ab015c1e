"""One operator measured on its own: the times of its forward and backward, and its memory.

An operator runs on tensors made for it (`example_inputs`), or where it fails on these on the
model's own, as it would in a step: with parameters in no cache, but for the activations, or the
gradients that have just arrived, which are read once to bring them back; and with gradients of
parameters in new pages. docs/cost-model.md, "Where the numbers come from", has when and why.
"""

import contextlib
import os
import warnings
from collections.abc import Sequence
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
    looks_at_values,
)
from baechi.costs.operator_alone import MIN_COLD_BYTES, Alone, evictor, memory_of
from baechi.costs.profile_cache import Conditions, Measured
from baechi.costs.timers import CpuTimer, CudaTimer, Preparation, Reading, Run
from baechi.errors import InputError
from baechi.records.cluster import lane_kind
from baechi.torch_support.graph_capture import no_collections
from baechi.torch_support.torch_devices import cache_bytes, device_kind, fp32_precisions, hardware
from baechi.torch_support.torch_internals import is_profiled
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule
from baechi.tracing.pytrees import map_tensors

# Results of another method are not comparable: raise this when a number's meaning changes.
METHOD: Final = 13
# What glibc's allocator keeps at most of freed memory, twice DEFAULT_MMAP_THRESHOLD_MAX; CUDA's
# keeps everything.
_ALLOCATOR_KEEPS_BYTES: Final = 64 * 2**20


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
                Alone(
                    *(self._module, nodes, make, self.place, self._evict, self._fresh),
                    returns_loss=self.traced.returns_loss,
                )
                for _ in range(self.lanes)
            ]
            alone = lanes[0]
            known = memory_of(alone, self.place) if before is None else before
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
            cold = addition.earlier and addition.nbytes >= MIN_COLD_BYTES
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


def _in_turn(preparations: Sequence[Preparation]) -> Preparation:
    """Prepares by one after the other, so that lanes that prepare together have one each."""
    turns = cycle(preparations)

    def prepare(n: int) -> Sequence[Run]:
        return next(turns)(n)

    return prepare
