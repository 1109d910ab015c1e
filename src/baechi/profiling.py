"""What every operator costs, measured: each distinct operator alone, once.

An operator runs on tensors made for it (its own shapes and strides; integer tensors keep the
values they have in the example where these do not depend on activations), so the whole model need
never fit one device, and twelve equal layers are measured as one. Forward and backward are timed
apart. Short operators are repeated; the cost of an empty call is measured and subtracted; the
median of the rounds is kept.

Complexity: O(distinct operators), about 0.1 s each.
"""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

import torch
from torch import fx
from torch.utils import _pytree as pytree

from baechi.costs import OpCost, Profile
from baechi.errors import InputError
from baechi.extraction import extract, opaque_leaves
from baechi.lowering import TracedModule
from baechi.metering import Meter
from baechi.partition import attribute
from baechi.propagation import Value
from baechi.saving import saved_inside_bytes
from baechi.traced import Traced

_T = TypeVar("_T")
# Enough rounds for a median, and no more than this long for one operator.
_ROUNDS: Final = (3, 30)
_BUDGET_NS: Final = 60_000_000
# Below this an operator is repeated inside one reading of the clock.
_SHORT_NS: Final = 100_000
_REPEATS: Final = 10


def profile(
    traced: Traced,
    device: str | torch.device = "cpu",
    *,
    threads: int | None = None,
    progress: bool = True,
) -> Profile:
    """The measured cost of every operator of a traced model on one device.

    Args:
        traced: From `trace`, in this process.
        device: A torch device; a logical name such as `"cpu:1"` is read as its torch device.
        threads: CPU threads per operator; `None` takes torch's own number.
        progress: Show a bar with what is being measured.

    Raises:
        InputError: The traced model was loaded from a file, or the device is not there.
    """
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to measure; "
            "trace the model again in this process."
        )
    place = torch_device(device)
    module: TracedModule = traced.module
    with _threads(threads) as count, torch.random.fork_rng([place] if place.type == "cuda" else []):
        clock = _Clock(place)
        overhead = _Overhead(clock)
        example = _ExampleValues(module, place)
        costs: dict[str, tuple[int, int, _Sizes]] = {}
        first = {op.key: index for index, op in reversed(list(enumerate(traced.ops)))}
        for key, op in _tracked(first, traced, progress):
            nodes = module.nodes[op]
            if any(node.op not in ("get_attr", "placeholder") for node in nodes):
                costs[key] = _measure(_Alone(module, nodes, example, place), clock, overhead)
            else:
                costs[key] = (0, 0, _Sizes())
    environment = f"torch {torch.__version__}, {count} threads, {torch.get_default_dtype()}"
    made = _made_bytes(traced)
    rows = []
    for row, output_bytes in zip(traced.ops, made, strict=True):
        forward_ns, backward_ns, sizes = costs[row.key]
        rows.append(
            OpCost(
                forward_ns,
                backward_ns if row.differentiable else 0,
                parameter_bytes=row.trained_bytes + row.frozen_bytes,
                output_bytes=output_bytes,
                saved_bytes=sizes.saved,
                workspace_bytes=sizes.forward,
                backward_workspace_bytes=sizes.backward,
                inference_workspace_bytes=sizes.inference,
            )
        )
    return Profile(traced.digest, device_kind(place), tuple(rows), "measured", environment)


def torch_device(name: str | torch.device) -> torch.device:
    """The torch device behind a logical device's name: `"cuda:0/a"` is on `cuda:0`.

    Raises:
        InputError: torch does not know it, or it is not in this machine.
    """
    text = str(name).split("/")[0]
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(
            f"device {str(name)!r} is unknown; write a torch device such as 'cuda:0' or 'cpu:0', "
            "with a suffix ('cuda:0/a') for several logical devices on one."
        ) from None
    if device.type == "cuda":
        n = torch.cuda.device_count()
        if (device.index is not None and device.index >= n) or n == 0:
            have = f"only {n} CUDA device(s)" if n else "no CUDA device"
            raise InputError(
                f"device {str(name)!r} is not there: torch sees {have}. "
                "Check CUDA_VISIBLE_DEVICES and the installed torch build, or use 'cpu:0'."
            )
        return torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {str(name)!r} is neither a CPU nor CUDA; only these are run on.")
    return torch.device("cpu")


def device_kind(device: torch.device) -> str:
    """The hardware kind, for `Device.kind` and `OpGraph.times`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise InputError(f"threads is {threads!r}; it must be a positive integer.")
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield threads or before
    finally:
        torch.set_num_threads(before)


def _tracked(first: dict[str, int], traced: Traced, progress: bool) -> Iterator[tuple[str, int]]:
    """The distinct operators, with a progress bar that names each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("profile"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[op]}"),
    )
    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("profile", total=len(first), op="")
        for key, op in sorted(first.items(), key=lambda item: item[1]):
            bar.update(task, op=traced.ops[op].name)
            yield key, op
            bar.advance(task)


def _made_bytes(traced: Traced) -> list[int]:
    made = [0] * len(traced.ops)
    for tensor in traced.tensors:
        made[tensor.producer] += tensor.nbytes
    return made


@final
class _Clock:
    """Reads the device's time: all work before a reading is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now_ns(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()


@final
class _ExampleValues:
    """Values of integer and boolean nodes that follow from the example alone, such as positions."""

    def __init__(self, module: TracedModule, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._known: dict[fx.Node, Any] = {}
        placeholders = iter(module.call.tensors)
        for node in module.graph_module.graph.nodes:
            facts = module.facts.nodes.get(node)
            if node.op == "placeholder":
                tensor = next(placeholders)
                if not tensor.is_floating_point() and not tensor.is_meta:
                    self._known[node] = tensor
            elif facts is not None and facts.values and _is_discrete(facts.values):
                self._evaluate(node, facts.writes)

    def _evaluate(self, node: fx.Node, writes: frozenset[int]) -> None:
        graph_module = self._module.graph_module
        if node.op == "get_attr":
            value = attribute(graph_module, str(node.target))
            if not value.is_meta:
                self._known[node] = value.detach()
            return
        known = all(argument in self._known for argument in node.all_input_nodes)
        if node.op == "call_function" and known and not writes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
            value = node.target(*args, **kwargs)  # type: ignore[operator]
            if not any(leaf.is_meta for leaf in _leaves(value)):
                self._known[node] = value

    def make(self, node: fx.Node) -> Any:
        """A value for a node that an operator reads."""
        facts = self._module.facts.nodes[node]
        if not facts.values:
            return attribute(self._module.graph_module, str(node.target))
        if node in self._known:
            known = self._known[node]
            return pytree.tree_map_only(  # a copy: an operator may count in it
                torch.Tensor, lambda t: t.to(self._device, copy=True), known
            )
        assert facts.structure is not None
        return facts.structure.fill([self._synthetic(value) for value in facts.values])

    def _synthetic(self, value: Value) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True) if n)
        if 0 in value.shape:
            extent = 0
        if value.dtype.is_floating_point or value.dtype.is_complex:
            # Positive and away from zero, so that logarithms, roots and variances are numbers.
            flat = torch.rand(extent, device=self._device).mul_(0.9).add_(0.1).to(value.dtype)
        elif value.dtype is torch.bool:
            flat = torch.ones(extent, dtype=torch.bool, device=self._device)
        else:
            flat = torch.zeros(extent, dtype=value.dtype, device=self._device)
        tensor = flat.as_strided(value.shape, value.stride)
        return tensor.requires_grad_(value.requires_grad)


def _is_discrete(values: Sequence[Value]) -> bool:
    return not any(value.dtype.is_floating_point or value.dtype.is_complex for value in values)


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@final
@dataclass(frozen=True)
class _Run:
    """One forward of an operator: what its backward starts and ends with."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


@final
class _Alone:
    """One operator with inputs of its own."""

    def __init__(
        self,
        module: TracedModule,
        nodes: Sequence[fx.Node],
        example: _ExampleValues,
        device: torch.device,
    ) -> None:
        inside = set(nodes)
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        outputs = [n for n in outputs or nodes if n.op not in ("get_attr", "placeholder")]
        # Copies, because an opaque leaf may update its buffers, or have no memory at all.
        leaves = {
            target: copy.deepcopy(leaf).to_empty(device=device)
            if any(tensor.is_meta for tensor in leaf.parameters())
            else copy.deepcopy(leaf).to(device)
            for target, leaf in opaque_leaves(module.graph_module, nodes).items()
        }
        self._extract = extract(module.graph_module, nodes, outputs, device=device, leaves=leaves)
        self._inputs = [example.make(node) for node in self._extract.inputs]
        tensors = [tensor for value in self._inputs for tensor in _leaves(value)]
        tensors += [p for leaf in leaves.values() for p in leaf.parameters()]
        self._differentiable = [t for t in tensors if t.requires_grad and t.is_leaf]
        self.known = [*tensors, *(b for leaf in leaves.values() for b in leaf.buffers())]

        # Autograd forbids in-place writes to a leaf, so an operator that writes gets copies.
        written = {s for node in nodes for s in module.facts.nodes[node].writes}
        self._overwritten = [
            any(v.storage in written and v.requires_grad for v in module.facts.nodes[node].values)
            for node in self._extract.inputs
        ]

    def forward(self) -> _Run:
        produced = _leaves(self.call())
        outputs = [tensor for tensor in produced if tensor.requires_grad]
        return _Run(outputs, [torch.ones_like(tensor) for tensor in outputs])

    def call(self) -> tuple[Any, ...]:
        if not any(self._overwritten):
            return self._extract.function(*self._inputs)
        pairs = zip(self._inputs, self._overwritten, strict=True)
        return self._extract.function(*(v.clone() if over else v for v, over in pairs))

    @property
    def differentiable(self) -> list[torch.Tensor]:
        return self._differentiable


@final
class _Overhead:
    """What an empty call and an empty backward cost, to be subtracted."""

    def __init__(self, clock: _Clock) -> None:
        leaf = torch.zeros((), requires_grad=True)
        seed = torch.ones(())
        self.call_ns = _median_ns(clock, lambda: None, 200, 10)
        runs = iter([leaf.view(()) for _ in range(2000)])

        def backward() -> None:
            torch.autograd.grad([next(runs)], [leaf], [seed])

        self.backward_ns = _median_ns(clock, backward, 100, 10)


def _median_ns(clock: _Clock, run: Callable[[], Any], rounds: int, repeats: int) -> int:
    readings = []
    for _ in range(rounds):
        start = clock.now_ns()
        for _ in range(repeats):
            run()
        readings.append((clock.now_ns() - start) // repeats)
    return int(statistics.median(readings))


def _measure(alone: _Alone, clock: _Clock, overhead: _Overhead) -> tuple[int, int, "_Sizes"]:
    """(forward ns, backward ns, its bytes) of one operator."""
    with torch.enable_grad():
        sizes = _sizes(alone)
        begin = clock.now_ns()
        alone.call()
        _backward_ns(alone, clock, 1)
        repeats = _REPEATS if clock.now_ns() - begin < _SHORT_NS else 1
        forward: list[int] = []
        backward: list[int] = []
        begin = clock.now_ns()
        while len(forward) < _ROUNDS[0] or (
            len(forward) < _ROUNDS[1] and clock.now_ns() - begin < _BUDGET_NS
        ):
            start = clock.now_ns()
            for _ in range(repeats):
                alone.call()
            forward.append((clock.now_ns() - start) // repeats)
            backward.append(_backward_ns(alone, clock, repeats))
    forward_ns = int(statistics.median(forward)) - overhead.call_ns
    backward_ns = int(statistics.median(backward)) - overhead.backward_ns
    return max(forward_ns, 0), max(backward_ns, 0), sizes


def _backward_ns(alone: _Alone, clock: _Clock, repeats: int) -> int:
    if not alone.differentiable:
        return 0
    runs = [alone.forward() for _ in range(repeats)]
    if not runs[0].outputs:
        return 0
    start = clock.now_ns()
    for run in runs:
        torch.autograd.grad(run.outputs, alone.differentiable, run.gradients, allow_unused=True)
    return (clock.now_ns() - start) // repeats


@final
@dataclass(frozen=True)
class _Sizes:
    """Bytes that autograd keeps besides the graph's tensors, and scratch.

    Scratch is what is live only inside: a forward with gradients, a backward, or a forward without.
    """

    saved: int = 0
    forward: int = 0
    backward: int = 0
    inference: int = 0


def _sizes(alone: _Alone) -> _Sizes:
    """What an operator takes; these first runs warm up, too."""
    saved = saved_inside_bytes(alone.call, alone.known)
    with torch.no_grad():
        _, inference = _scratch_bytes(alone.call)
    meter = Meter([0])
    with meter.counting(0):
        kept = alone.forward()
    before = meter.live_bytes[0]
    forward = max(meter.peak_bytes[0] - before, 0)
    if not alone.differentiable or not kept.outputs:
        return _Sizes(saved, forward, 0, inference)
    meter.forget_peaks()
    with meter.counting(0):
        gradients = torch.autograd.grad(
            kept.outputs, alone.differentiable, kept.gradients, allow_unused=True
        )
    made = {g.untyped_storage()._cdata: g.untyped_storage() for g in gradients if g is not None}
    # What autograd kept goes as the backward goes, and is not counted with its scratch again.
    backward = meter.peak_bytes[0] - before - sum(s.nbytes() for s in made.values())
    return _Sizes(saved, forward, max(backward, 0), inference)


def _scratch_bytes(run: Callable[[], _T]) -> tuple[_T, int]:
    """The result, and the bytes that were live meanwhile and are not now that it is there."""
    meter = Meter([0])
    with meter.counting(0):
        result = run()
    return result, max(meter.peak_bytes[0] - meter.live_bytes[0], 0)
