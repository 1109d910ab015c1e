"""What every operator costs, measured: each distinct operator alone, once.

An operator runs on tensors made for it, so the whole model need never fit one device, and twelve
equal layers are measured as one. Forward and backward are timed apart, each as it is in a step:
the forward builds autograd's graph, and memory is as a whole step leaves it (`isolation`). Where
gradients are wanted torch may choose another kernel, so the forward without is measured, too.
Where a tensor has several readers, adding up their gradients is a part of its producer's backward,
as it is in autograd. An operator that fails on made-up inputs is measured on the model's own.

What was measured is kept in a store (`profile_store`), so a second run measures nothing.

Complexity: O(distinct operators), about 0.2 s each; with a full store O(operators).
"""

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from baechi.costs import OpCost, Profile
from baechi.errors import InputError
from baechi.in_place import real_operands
from baechi.isolation import Alone, Setting, evictor
from baechi.lowering import TracedModule
from baechi.operands import Operands
from baechi.profile_store import Conditions, Measured, ProfileStore
from baechi.timing import CpuTimer, Reading, Run, Timer, no_collections
from baechi.torch_devices import cache_bytes, device_kind, hardware, torch_device
from baechi.traced import Traced
from baechi.training import backward_ops
from baechi.value_dependence import value_remark
from baechi.values import check_is, check_positive
from baechi.workspace import sizes

__all__ = ["device_kind", "profile", "torch_device"]

# Results of another method are not comparable: raise this when a time's meaning changes.
METHOD: Final = 3
# What glibc's allocator keeps at most of freed memory: twice its largest mmap threshold
# (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX). CUDA's keeps everything.
_ALLOCATOR_KEEPS_BYTES: Final = 64 * 2**20


def profile(
    traced: Traced,
    device: str | torch.device = "cpu",
    *,
    threads: int | None = None,
    progress: bool = True,
    cache: bool | str | Path = True,
) -> Profile:
    """The measured cost of every operator of a traced model on one device.

    Args:
        traced: From `trace`, in this process.
        device: A torch device; a logical name such as `"cpu:1"` is read as its torch device.
        threads: CPU threads per operator; `None` takes torch's own number.
        progress: Show a bar with what is being measured.
        cache: Where measured costs are kept for the next time: `True` is a file in the user's
            cache directory, a path is a file of your own, and `False` keeps nothing.

    Raises:
        InputError: The traced model was loaded from a file, the device is not there, or an
            operator can be measured neither alone nor in the model.
        FormatError: `cache` names a file that is no store.
    """
    check_is(traced, Traced, "traced")
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to measure; "
            "trace the model again in this process."
        )
    place = torch_device(device)
    with contextlib.ExitStack() as stack:
        count = stack.enter_context(_threads(threads))
        stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        stack.enter_context(traced.module.call.autocast.applied())
        torch.manual_seed(0)  # made-up values are the same each time
        store = None
        if cache is not False:
            store = stack.enter_context(ProfileStore(None if cache is True else cache))
        bench = _Bench(traced, place, count)
        measured = _measured(traced, bench, store, progress)
    environment = f"torch {torch.__version__}, {count} threads, {torch.get_default_dtype()}"
    rows = _rows(traced, measured)
    return Profile(traced.digest, device_kind(place), rows, "measured", environment)


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if threads is not None:
        threads = check_positive(threads, "threads")
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield threads or before
    finally:
        torch.set_num_threads(before)


def _measured(
    traced: Traced, bench: "_Bench", store: ProfileStore | None, progress: bool
) -> dict[str, Measured]:
    """The cost of every distinct job by its key: from the store, else measured and stored."""
    jobs = _jobs(traced)
    costs: dict[str, Measured] = {}
    try:
        for key, (_, measure) in _tracked(jobs, progress):
            found = store.find(key, bench.conditions) if store is not None else None
            if found is None:
                found = measure(bench)
                if store is not None:
                    store.keep(key, bench.conditions, found)
            costs[key] = found
    except KeyboardInterrupt:
        kept = "nothing is kept" if store is None else f"they are kept in {store.path}"
        sys.stderr.write(f"baechi: {len(costs)} of {len(jobs)} were measured; {kept}.\n")
        raise
    return costs


Job = tuple[str, Callable[["_Bench"], Measured]]


def _jobs(traced: Traced) -> dict[str, Job]:
    """What to measure, by key, with a name for people: distinct operators, then additions."""
    jobs: dict[str, Job] = {}
    module: TracedModule = traced.module
    for index, op in enumerate(traced.ops):
        if any(node.op not in ("get_attr", "placeholder") for node in module.nodes[index]):
            jobs.setdefault(op.key, (op.name, partial(_Bench.operator, index=index)))
    for row in _additions(traced):
        for addition in row:
            name = f"adding up gradients of {addition.nbytes} bytes"
            measure = partial(_Bench.addition, addition=addition)
            jobs.setdefault(addition.key, (name, measure))
    return jobs


def _tracked(jobs: dict[str, Job], progress: bool) -> Iterator[tuple[str, Job]]:
    """The jobs, with a progress bar that names each and says how many are left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("profile"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]} left: {task.fields[op]}"),
    )
    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("profile", total=len(jobs), op="", left=len(jobs))
        for done, (key, job) in enumerate(jobs.items()):
            bar.update(task, op=job[0], left=len(jobs) - done)
            yield key, job
            bar.advance(task)


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


def _additions(traced: Traced) -> list[Counter[Addition]]:
    """For every op the additions in its backward.

    Gradients of a tensor's readers, the caller's loss among them, are added up one by one; so are
    those of a parameter that later operators read, too.
    """
    rows: list[Counter[Addition]] = [Counter() for _ in traced.ops]
    differentiated = set(backward_ops(traced.ops, traced.tensors))
    for tensor in traced.tensors:
        if tensor.differentiable and tensor.producer in differentiated:
            readers = sum(consumer in differentiated for consumer in tensor.consumers)
            readers += tensor.kept
            if readers > 1 and tensor.nbytes:
                rows[tensor.producer][Addition(tensor.nbytes)] += readers - 1
    for op in differentiated:
        if traced.ops[op].shared_bytes:
            rows[op][Addition(traced.ops[op].shared_bytes, anew=True)] += 1
    return rows


def _rows(traced: Traced, measured: dict[str, Measured]) -> tuple[OpCost, ...]:
    """The cost of every op of the model."""
    made = traced.made_bytes
    rows = []
    for index, (op, additions) in enumerate(zip(traced.ops, _additions(traced), strict=True)):
        cost = measured.get(op.key, Measured(0))
        backward_ns = cost.backward_ns if op.differentiable else 0
        for addition, count in additions.items():
            backward_ns += count * measured[addition.key].forward_ns
        remarks = [cost.remark, value_remark(traced.module.nodes[index])]
        rows.append(
            OpCost(
                forward_ns=cost.forward_ns,
                backward_ns=backward_ns,
                parameter_bytes=op.trained_bytes + op.frozen_bytes,
                output_bytes=made[index],
                saved_bytes=cost.saved_bytes,
                workspace_bytes=cost.workspace_bytes,
                backward_workspace_bytes=cost.backward_workspace_bytes,
                inference_workspace_bytes=cost.inference_workspace_bytes,
                backward_reused_bytes=cost.backward_reused_bytes,
                forward_spread_ns=cost.forward_spread_ns,
                backward_spread_ns=cost.backward_spread_ns if op.differentiable else 0,
                remark="; ".join(filter(None, remarks)),
            )
        )
    return tuple(rows)


@final
@dataclass
class _Bench:
    """Measures operators of one traced model on one device."""

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
        self._operands: Operands | None = None
        self._timer: Timer | None = None
        self._engine_ns: int | None = None

    @property
    def timer(self) -> Timer:
        """The clock; made when something is measured, because it measures itself first."""
        if self._timer is None:
            if self.place.type == "cuda":
                from baechi.cuda_timing import CudaTimer

                self._timer = CudaTimer(self.place)
            else:
                self._timer = CpuTimer()
        return self._timer

    @property
    def engine_ns(self) -> int:
        """What starting autograd's engine costs, which a segment does once for all its ops."""
        if self._engine_ns is None:
            leaf = torch.zeros((), device=self.place, requires_grad=True)
            seed = torch.ones((), device=self.place)
            # The gradient of a leaf by itself: the engine starts, finds it, and runs no node.
            run = lambda: torch.autograd.grad([leaf], [leaf], [seed])  # noqa: E731
            self._engine_ns = self.timer.time([lambda n: [run] * n])[0].ns
        return self._engine_ns

    def operator(self, index: int) -> Measured:
        """The cost of an operator, alone or else in place.

        Raises:
            InputError: It runs neither alone nor in the model.
        """
        nodes = self._module.nodes[index]
        if self._operands is None:
            self._operands = Operands(self._module, self.place)
        try:
            return self._measure(self._operands.make, nodes)
        except Exception as error:  # whatever a made-up value makes an operator raise
            alone = error
        try:
            values = real_operands(self._module, nodes, self.place)
            operands = self._operands

            def make(node: Any, readers: Any) -> Any:
                return values[node] if node in values else operands.make(node, readers)

            measured = self._measure(make, nodes)
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

    def _measure(self, make: Any, nodes: Any) -> Measured:
        with torch.enable_grad(), no_collections(), warnings.catch_warnings():
            # Made-up weights of a recurrent layer are in pieces; cuDNN says so.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            alone = Alone(self._module, nodes, make, self.place, self._setting)
            size = sizes(alone, self.place)
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
                backward = Reading(backward.ns + more_ns, fresh.spread_ns)
        return Measured(
            forward_ns=forward.ns,
            backward_ns=max(backward.ns - self.engine_ns, 0),
            saved_bytes=size.saved,
            workspace_bytes=size.forward,
            backward_workspace_bytes=size.backward,
            inference_workspace_bytes=size.inference,
            forward_spread_ns=forward.spread_ns,
            backward_spread_ns=backward.spread_ns,
            backward_reused_bytes=size.reused,
        )

    def addition(self, addition: Addition) -> Measured:
        """What adding up two gradients costs."""
        with torch.no_grad(), no_collections():
            # Not zeros: a system may show one page of zeros for all of theirs.
            size = max(addition.nbytes // 4, 1)
            total, other = (torch.full((size,), 1e-3, device=self.place) for _ in range(2))
            run: Run = partial(torch.add, total, other)
            if not addition.anew:
                run = partial(total.add_, other)
            (reading,) = self.timer.time([lambda n: [run] * n])
        return Measured(reading.ns, forward_spread_ns=reading.spread_ns)


def _brief(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _library_settings() -> str:
    """What of torch's settings changes how fast an operator is."""
    settings = {
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "denormals": torch.tensor(1e-40).mul(1).item() == 0,
    }
    return ", ".join(f"{name} {value}" for name, value in settings.items())
