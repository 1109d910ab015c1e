"""The work of operators, from shapes alone: kernels, their FLOPs and bytes, and scratch.

Each distinct operator runs once on fake tensors, forward and backward, and a dispatch mode sees
every kernel that it would launch. So compositions are taken apart as PyTorch takes them apart, a
backward has as many products as inputs need gradients, and nothing is allocated: a model on the
`meta` device is counted as any other. Only an operator that looks at values, in a model whose trace
had to run the example as well, runs on these.

The fake tensors say that they are on a CPU, because PyTorch without CUDA aborts on the backward of
those that claim to be on a GPU. Where the two choose different kernels (attention with dropout, a
recurrent layer), the CPU's are counted.

Complexity: O(distinct operators), some milliseconds each.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from baechi.costs.example_inputs import real_inputs
from baechi.costs.flop_rules import kernel_of
from baechi.errors import InputError
from baechi.records.efficiency import Kernel
from baechi.torch_support.memory_meter import Meter
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import Value, quiet
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.side_effects import fakes_removed
from baechi.tracing.subgraph import extract, leaf_copies, opaque_leaves

SEEN: Final = "shapes alone do not run it: counted on the values of the example"
UNSEEN: Final = "shapes alone do not run it: counted as reading and writing its tensors once"
UNSEEN_BACKWARD: Final = (
    "shapes alone do not run its backward: counted as reading and writing its tensors twice"
)
_CPU: Final = torch.device("cpu")


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one operator.

    Attributes:
        forward: Its kernels, in order.
        backward: Those of its backward.
        workspace_bytes: Scratch of its forward, as far as the dispatcher sees it.
        backward_workspace_bytes: The same of its backward.
        remark: A note for the reader; empty for most.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    remark: str = ""


def workloads(traced: Traced) -> dict[str, Workload]:
    """The work of every distinct operator of a traced model, by `TracedOp.key`.

    Raises:
        InputError: The traced model was loaded from a file.
    """
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no shapes to compute "
            "from; trace the model again in this process (on the meta device it needs no memory)."
        )
    module: TracedModule = traced.module
    rows: dict[str, Workload] = {}
    left: dict[str, Sequence[fx.Node]] = {}
    whole = opaque_leaves(module.graph_module, module.graph_module.graph.nodes)
    with (
        fakes_removed(module.graph_module) if whole else contextlib.nullcontext(),
        quiet(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.enable_grad(),
    ):
        for op, nodes in zip(traced.ops, module.nodes, strict=True):
            if op.key in rows or op.key in left:
                continue
            if all(node.op in ("get_attr", "placeholder") for node in nodes):
                rows[op.key] = Workload()
                continue
            leaves = opaque_leaves(module.graph_module, nodes)
            try:
                fakes = {target: _Leaf(leaf) for target, leaf in leaves.items()}
                rows[op.key] = _count(module, nodes, partial(_fake, module), fakes)
            except Exception:  # whatever a fake tensor cannot do, such as tell its value
                left[op.key] = nodes
    if left and module.facts.real:
        for key, row in left.items():
            with contextlib.suppress(Exception):  # it may need what is not on a CPU
                rows[key] = _count_real(module, row)
    for op in traced.ops:
        if op.key not in rows:
            rows[op.key] = _unseen(module, left[op.key], op.differentiable)
    return rows


def _count_real(module: TracedModule, nodes: Sequence[fx.Node]) -> Workload:
    """One operator, run on what it reads in a run of the model on its example."""
    with quiet(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        values = real_inputs(module, nodes, _CPU)

        def make(node: fx.Node) -> Any:
            return values[node] if node in values else _fake(module, node)

        load = _count(module, nodes, make, leaf_copies(module.graph_module, nodes, _CPU))
    return replace(load, remark=load.remark or SEEN)


def _count(
    module: TracedModule,
    nodes: Sequence[fx.Node],
    make: Callable[[fx.Node], Any],
    leaves: Mapping[str, torch.nn.Module],
) -> Workload:
    """One operator, run on what `make` gives for the nodes that it reads."""
    inside = set(nodes)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    outputs = [n for n in outputs or nodes if n.op not in ("get_attr", "placeholder")]
    part = extract(module.graph_module, nodes, outputs, device=_CPU, leaves=leaves)
    inputs = [make(node) for node in part.inputs]
    tensors = [*tensors_in(inputs), *(p for leaf in leaves.values() for p in leaf.parameters())]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    # Autograd forbids in-place writes to a leaf, so an operator that writes gets copies.
    written = {s for node in nodes for s in module.facts.nodes[node].writes}
    inputs = [
        pytree.tree_map_only(torch.Tensor, torch.clone, value)
        if any(v.storage in written and v.requires_grad for v in module.facts.nodes[node].values)
        else value
        for node, value in zip(part.inputs, inputs, strict=True)
    ]
    with _Kernels() as forward:
        produced = tensors_in(part.function(*inputs))
    scratch_bytes = forward.scratch_bytes  # now, while autograd keeps what it saved
    roots = [tensor for tensor in produced if tensor.requires_grad]
    if not roots or not differentiable:
        return Workload(tuple(forward.kernels), workspace_bytes=scratch_bytes)
    seeds = [torch.ones_like(root) for root in roots]
    try:
        with _Kernels() as backward:
            gradients = torch.autograd.grad(roots, differentiable, seeds, allow_unused=True)
    except Exception:  # reversible layers refuse it in evaluation mode
        kernels = (tuple(forward.kernels), _unseen(module, nodes, True).backward)
        return Workload(*kernels, scratch_bytes, remark=UNSEEN_BACKWARD)
    backward_bytes = backward.scratch_bytes
    del gradients
    kernels = (tuple(forward.kernels), tuple(backward.kernels))
    return Workload(*kernels, scratch_bytes, backward_bytes)


def _unseen(module: TracedModule, nodes: Sequence[fx.Node], differentiable: bool) -> Workload:
    """One operator that fake tensors cannot run, as a copy of all that it touches."""
    facts = module.facts
    inside = set(nodes)
    touched = {
        value
        for node in nodes
        for value in (
            *facts.nodes[node].values,
            *(v for a in node.all_input_nodes if a not in inside for v in facts.nodes[a].values),
        )
    }
    storages = {value.storage for value in touched}
    nbytes = sum(facts.storages[storage].nbytes for storage in storages)
    for leaf in opaque_leaves(module.graph_module, nodes).values():
        nbytes += sum(tensor.nbytes for tensor in (*leaf.parameters(), *leaf.buffers()))
    kernel = Kernel("copy", "fp32", 0, nbytes)
    backward = (Kernel("copy", "fp32", 0, 2 * nbytes),) if differentiable else ()
    return Workload((kernel,), backward, remark=UNSEEN)


@final
class _Leaf(torch.nn.Module):
    """An opaque leaf on fake parameters and buffers."""

    def __init__(self, leaf: torch.nn.Module) -> None:
        super().__init__()
        state: dict[str, torch.Tensor] = {}
        for name, parameter in leaf.named_parameters():
            fake = torch.empty_like(parameter, device="cpu")
            own = torch.nn.Parameter(fake, parameter.requires_grad)
            self.register_parameter(name.replace(".", "/"), own)
            state[name] = own
        for name, buffer in leaf.named_buffers():
            state[name] = torch.empty_like(buffer, device="cpu")
        # A closure, because a module as an attribute would be a submodule with parameters.
        call: Callable[..., Any] = torch.func.functional_call
        self._run: Callable[..., Any] = lambda args, kwargs: call(leaf, state, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The work of the leaf."""
        return self._run(args, kwargs)


def _fake(module: TracedModule, node: fx.Node) -> Any:
    """A value without memory for a node that an operator reads."""
    facts = module.facts.nodes[node]
    if node.op == "get_attr" and not facts.values:
        return attribute(module.graph_module, str(node.target))
    assert facts.structure is not None
    return facts.structure.fill([_empty(value) for value in facts.values])


def _empty(value: Value) -> torch.Tensor:
    stride = value.stride or None
    if stride is None:
        tensor = torch.empty(value.shape, dtype=value.dtype)
    else:
        tensor = torch.empty_strided(value.shape, stride, dtype=value.dtype)
    return tensor.requires_grad_(value.requires_grad)


@final
class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every kernel that runs inside, and counts the scratch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._meter = Meter([0])

    @property
    def scratch_bytes(self) -> int:
        """The peak of live bytes inside, beyond what is live now."""
        return max(self._meter.peak_bytes[0] - self._meter.live_bytes[0], 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            # A view of what was there before is nothing new, but may come after the peak.
            if storage._cdata not in given or self._meter.knows(storage):
                self._meter.hold(0, storage)
        if isinstance(func, torch._ops.OpOverload):
            kernel = kernel_of(func, args, kwargs or {}, result)
            if kernel is not None:
                self.kernels.append(kernel)
        return result
