"""One measurement of an operator on one device: its times, and at first its sizes.

An operator runs on tensors made for it. Forward and backward are timed apart, each as it is in a
step: the forward builds autograd's graph, and memory is as a whole step leaves it (`single_op`).
Where gradients are wanted torch may choose another kernel, so the scratch of a forward without is
measured, too. An operator that fails on made-up inputs is measured on the model's own.
"""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch

from baechi.costs.cpu_timer import CpuTimer, Reading, Run, Timer, no_collections
from baechi.costs.example_inputs import ExampleInputs, real_inputs
from baechi.costs.profile_cache import Conditions, Measured
from baechi.costs.single_op import Alone, Setting, evictor
from baechi.costs.workspace import Sizes, sizes
from baechi.errors import InputError
from baechi.torch_support.torch_devices import cache_bytes, device_kind, fp32_precisions, hardware
from baechi.traced.traced_model import Traced
from baechi.tracing.lowering import TracedModule

# Results of another method are not comparable: raise this when a time's meaning changes.
METHOD: Final = 5
# What glibc's allocator keeps at most of freed memory: twice its largest mmap threshold
# (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX). CUDA's keeps everything.
_ALLOCATOR_KEEPS_BYTES: Final = 64 * 2**20


@final
@dataclass(frozen=True, slots=True)
class Addition:
    """The sum of two gradients.

    Attributes:
        nbytes: Of each.
        anew: Whether the sum is new memory, as for a parameter's, which stay; else it is in place.
    """

    nbytes: int
    anew: bool = False

    @property
    def key(self) -> str:
        """Equal keys cost the same."""
        return f"{'add' if self.anew else 'accumulate'} float32[{self.nbytes // 4}]"


@final
@dataclass
class Bench:
    """Measures operators of one traced model on one device, one pass at a time (`repetition`)."""

    traced: Traced
    place: torch.device
    threads: int

    def __post_init__(self) -> None:
        self._module: TracedModule = self.traced.module
        step_bytes = sum(op.trained_bytes + op.frozen_bytes for op in self.traced.ops)
        gradient_bytes = sum(op.trained_bytes for op in self.traced.ops)
        step_bytes += sum(tensor.nbytes for tensor in self.traced.tensors)
        cache = cache_bytes(self.place)
        kept_bytes = _ALLOCATOR_KEEPS_BYTES if self.place.type == "cpu" else gradient_bytes
        self._setting = Setting(
            evictor(self.place, cache) if step_bytes > cache else None,
            max(1 - kept_bytes / max(gradient_bytes, 1), 0.0),
        )
        self.conditions = Conditions(
            kind=device_kind(self.place),
            hardware=hardware(self.place),
            threads=self.threads,
            torch=torch.__version__,
            settings=f"{_library_settings()}, {self._setting.words}",
            method=METHOD,
        )
        if self.place.type == "cuda":
            # Autograd's thread has no context before its first kernel, and cuBLAS would warn of it.
            leaf = torch.ones(2, device=self.place, requires_grad=True)
            torch.autograd.grad(leaf.exp().sum(), leaf)
        self._inputs: ExampleInputs | None = None
        self._timer: Timer | None = None
        self._engine_ns: int | None = None

    @property
    def timer(self) -> Timer:
        """The clock; made when something is measured, because it measures itself first."""
        if self._timer is None:
            if self.place.type == "cuda":
                from baechi.costs.cuda_timer import CudaTimer

                self._timer = CudaTimer(self.place)
            else:
                self._timer = CpuTimer()
        return self._timer

    @property
    def engine_ns(self) -> int:
        """The time to start autograd's engine, which a segment does once for all its ops."""
        if self._engine_ns is None:
            leaf = torch.zeros((), device=self.place, requires_grad=True)
            seed = torch.ones((), device=self.place)
            # The gradient of a leaf by itself: the engine starts, finds it, and runs no node.
            run = lambda: torch.autograd.grad([leaf], [leaf], [seed])  # noqa: E731
            self._engine_ns = self.timer.time([lambda n: [run] * n])[0].ns
        return self._engine_ns

    def operator(self, index: int, before: Measured | None = None) -> Measured:
        """One pass over an operator, alone or else in place.

        Args:
            index: The operator.
            before: The result of earlier passes; its sizes are taken over.

        Raises:
            InputError: It runs neither alone nor in the model.
        """
        nodes = self._module.nodes[index]
        if self._inputs is None:
            self._inputs = ExampleInputs(self._module, self.place)
        try:
            return self._measure(self._inputs.make, nodes, before)
        except Exception as error:  # whatever a made-up value makes an operator raise
            alone = error
        try:
            values = real_inputs(self._module, nodes, self.place)
            made_up = self._inputs

            def make(node: Any, readers: Any) -> Any:
                return values[node] if node in values else made_up.make(node, readers)

            measured = self._measure(make, nodes, before)
        except Exception as error:
            raise self._unmeasurable(index, alone, error) from error
        return replace(measured, remark=f"fails alone ({_brief(alone)}); measured in place")

    def _unmeasurable(self, index: int, alone: Exception, inside: Exception) -> InputError:
        op = self.traced.ops[index]
        where = f" ({op.source})" if op.source else ""
        return InputError(
            f"cannot measure op {op.name!r}{where} on {self.place}: alone it fails with "
            f"{_brief(alone)}, and in the model, run on its example, with {_brief(inside)}. "
            "Give an example that the model runs on with real weights and enough memory."
        )

    def _measure(self, make: Any, nodes: Any, before: Measured | None) -> Measured:
        with torch.enable_grad(), no_collections(), warnings.catch_warnings():
            # Made-up weights of a recurrent layer are in pieces; cuDNN says so.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            alone = Alone(self._module, nodes, make, self.place, self._setting)
            known = _sized(sizes(alone, self.place)) if before is None else before
            ways = [alone.forward_runs, alone.backward_runs]
            ways += [alone.fresh_backward_runs] if alone.fresh else []
            ways = [way for way in ways if way(1)]
            readings = self.timer.time(ways, single=alone.single)
            reading_of = dict(zip(ways, readings, strict=True))
            forward = reading_of[alone.forward_runs]
            backward = reading_of.get(alone.backward_runs, Reading(0))
            fresh = reading_of.get(alone.fresh_backward_runs)
            if fresh is not None:
                more_ns = round(alone.fresh * (fresh.ns - backward.ns))
                held_up = backward.held_up or fresh.held_up
                backward = Reading(backward.ns + more_ns, held_up)
        backward_ns = max(backward.ns - self.engine_ns, 0)
        return replace(
            known,
            forward_ns=forward.ns,
            backward_ns=backward_ns,
            forward_spread_ns=forward.ns if forward.held_up else 0,
            backward_spread_ns=backward_ns if backward.held_up else 0,
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
            (reading,) = self.timer.time([lambda n: [run] * n])
        return Measured(reading.ns, forward_spread_ns=reading.ns if reading.held_up else 0)


def _sized(size: Sizes) -> Measured:
    return Measured(
        forward_ns=0,
        saved_bytes=size.saved,
        workspace_bytes=size.forward,
        backward_workspace_bytes=size.backward,
        inference_workspace_bytes=size.inference,
        backward_reused_bytes=size.reused,
    )


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
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "denormals": torch.tensor(1e-40).mul(1).item() == 0,
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items())
