"""Costs computed from shapes alone, for a device that need not be here.

docs/estimation.md has the formula. Each distinct operator runs once on fake tensors, forward and
backward, and a dispatch mode sees every kernel that it would launch.

The fake tensors say that they are on a CPU, because PyTorch without CUDA aborts on the backward of
those that claim to be on a GPU. Where the two choose different kernels (attention with dropout, a
recurrent layer), the CPU's are counted.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx

from baechi.costs.example_inputs import Make, RealInputs, filled
from baechi.costs.flop_rules import kernel_of
from baechi.costs.held_gradients import held_gradients
from baechi.costs.operator_alone import Alone, Arriving, cpu_peaks
from baechi.errors import InputError
from baechi.records.cluster import lanes_of
from baechi.records.device_kinds import Calibration, DeviceKind, Kernel, find
from baechi.records.op_costs import OpCost, Profile
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.storages import distinct_storages
from baechi.torch_support.torch_devices import fp32_precisions
from baechi.torch_support.tracer_internals import FakeTensorMode, OpOverload, Watch, quiet
from baechi.traced.traced_model import Traced
from baechi.tracing.fake_tensors import fakes_removed
from baechi.tracing.fx_nodes import operator_name
from baechi.tracing.lowering import TracedModule
from baechi.tracing.model_notes import notes_kept
from baechi.tracing.node_facts import Value
from baechi.tracing.side_effects import gradients_kept
from baechi.tracing.subgraph import opaque_leaves
from baechi.tracing.workarounds import called_with
from baechi.validation import check_is, check_positive

SEEN: Final = "shapes alone do not run it: counted on the values of the example"
UNSEEN: Final = "shapes alone do not run it: counted as reading and writing its tensors once"
UNSEEN_BACKWARD: Final = (
    "shapes alone do not run its backward: counted as reading and writing its tensors twice"
)
_CPU: Final = torch.device("cpu")
# Classes of operators whose fp32 products may run as tf32.
_ROUNDED: Final = frozenset({"matmul", "convolution", "recurrent"})
# Operators that keep much for a backward, or take another kernel for it: attention does where its
# mask has a gradient. What a product copies depends on flags of its inputs.
_LIGHTER_IN_INFERENCE: Final = frozenset(
    {"lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention"}
)


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one operator: the kernels of its forward and of its backward, in order.

    Attributes:
        workspace_bytes: Scratch of its forward, as far as the dispatcher sees it.
        unseen_bytes: What its kernels keep for the backward that fake tensors do not show.
        backward_reused_bytes: What of its backward's gradients takes room of what it kept or got.
        inference_bytes: Scratch of a forward without gradients, where it may differ: of what keeps
            something inside for a backward, or has another kernel for it; else None.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    remark: str = ""
    unseen_bytes: int = 0
    backward_reused_bytes: int = 0
    inference_bytes: int | None = None


def estimate(
    traced: Traced,
    kind: str,
    *,
    kinds_file: str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    tf32: bool | None = None,
    microbatches: int = 1,
) -> Profile:
    """The computed cost of every operator of a traced model on one kind of device.

    Deterministic: it reads shapes and tables, and no clock.

    Args:
        traced: From `trace`, in this process; its model may be on the meta device.
        kind: A name or alias of the table, such as `"H100-SXM-80GB"` or what
            `torch.cuda.get_device_name` says, or `"H100-SXM-80GB, 2 lanes"` for each of two lanes
            that are both busy. The profile carries it as it is written here, so that it meets the
            `Device.kind` of a probed cluster.
        kinds_file: A TOML file with more kinds, in the form of `device_kinds.toml`.
        calibration: From `calibrate`, of this kind.
        tf32: Whether fp32 products run as tf32 where the kind can; `None` takes what torch is set
            to in this process: convolutions do, products of matrices do not.
        microbatches: Number of calls like the traced one in a step, as of `profile`.

    Raises:
        InputError: The traced model was loaded from a file, the kind is unknown, a row of the
            table is wrong, or the calibration is of another kind.
    """
    check_is(traced, Traced, "traced")
    name, lanes = lanes_of(check_is(kind, str, "kind"))
    row = find(name, kinds_file)
    if calibration is not None:
        row = row.calibrated(check_is(calibration, Calibration, "calibration"))
    rounded = rounded_classes(row, tf32)
    later = check_positive(microbatches, "microbatches") - 1

    def accumulation_ns(trained_bytes: int) -> tuple[int, int]:
        """Adding a micro-batch's gradients to those before, and its launch, on average over all."""
        if not trained_bytes:
            return 0, 0
        kernel = Kernel("elementwise", "fp32", 0, 3 * trained_bytes)
        whole_ns = row.run_ns((kernel,), lanes)
        return later * whole_ns // microbatches, later * row.host_launch_ns // microbatches

    costs = {
        key: OpCost(
            row.run_ns(as_run(load.forward, rounded), lanes),
            row.run_ns(as_run(load.backward, rounded), lanes),
            saved_bytes=load.unseen_bytes,
            workspace_bytes=load.workspace_bytes,
            backward_workspace_bytes=load.backward_workspace_bytes,
            backward_reused_bytes=load.backward_reused_bytes,
            inference_workspace_bytes=load.inference_bytes,
            remark=load.remark,
            forward_launch_ns=row.host_launch_ns * len(load.forward),
            backward_launch_ns=row.host_launch_ns * len(load.backward),
        )
        for key, load in workloads(traced).items()
    }
    added = [accumulation_ns(op.trained_bytes) for op in traced.ops]
    scratch = [costs[op.key].backward_workspace_bytes or 0 for op in traced.ops]
    rows = tuple(
        replace(
            costs[op.key],
            backward_ns=max(costs[op.key].backward_ns + added_ns, held.least_ns)
            if op.differentiable
            else 0,
            backward_launch_ns=costs[op.key].backward_launch_ns + launched_ns
            if op.differentiable
            else 0,
            parameter_bytes=op.trained_bytes + op.frozen_bytes,
            output_bytes=output_bytes,
            saved_bytes=op.saved_bytes + costs[op.key].saved_bytes,
            backward_workspace_bytes=held.workspace_bytes,
            backward_beside=held.beside,
        )
        for op, output_bytes, held, (added_ns, launched_ns) in zip(
            traced.ops, traced.made_bytes, held_gradients(traced, scratch), added, strict=True
        )
    )
    how = "calibrated" if calibration is not None else "uncalibrated"
    names = ", ".join(sorted(rounded)) or "nothing"
    environment = f"torch {torch.__version__}, {row.name} {how}, tf32 for {names}"
    return Profile(traced.digest, kind, rows, "computed", environment)


def rescaled(known: Sequence[tuple[Profile, Profile]], computed: Profile) -> Profile:
    """The costs at another size of a model.

    An operator's time is linear in its computed one, through those at two sizes that are known;
    where one is known, or the line falls, proportional to it. Bytes are those that are computed.

    Args:
        known: The costs at a size, and the computed ones there, for one size or two.
        computed: The computed ones at the other size.
    """
    costs = []
    for index, cost in enumerate(computed.costs):
        rows = [(priced.costs[index], told.costs[index]) for priced, told in known]
        forward = [(told.forward_ns, priced.forward_ns) for priced, told in rows]
        backward = [(told.backward_ns, priced.backward_ns) for priced, told in rows]
        alone = [(told.forward_ns, priced.inference_ns or 0) for priced, told in rows]
        known_alone = all(priced.inference_ns is not None for priced, _ in rows)
        more = replace(
            cost,
            forward_ns=_at(forward, cost.forward_ns),
            backward_ns=_at(backward, cost.backward_ns),
            inference_ns=_at(alone, cost.forward_ns) if known_alone else None,
        )
        costs.append(more)
    return replace(computed, kind=known[0][0].kind, costs=tuple(costs))


def _at(points: Sequence[tuple[int, int]], x: int) -> int:
    """The value at x of a line through one or two points; beyond them it may only rise."""
    (x0, y0), (x1, y1) = min(points), max(points)
    line = 0
    if x0 < x1 and (y0 < y1 or x0 <= x <= x1):
        line = y0 + (y1 - y0) * (x - x0) // (x1 - x0)
        if x0 <= x:
            return line
    near, value = (x0, y0) if x <= x0 else (x1, y1)
    return max(line, value * x // near if near else value)


def rounded_classes(kind: DeviceKind, tf32: bool | None) -> frozenset[str]:
    """The classes of operators whose fp32 products run as tf32 on a kind."""
    if "tf32" not in kind.flops_per_s or tf32 is False:
        return frozenset()
    chosen = fp32_precisions()
    return frozenset(name for name in _ROUNDED if tf32 or chosen[f"cuda {name}"] == "tf32")


def as_run(kernels: Sequence[Kernel], rounded: frozenset[str]) -> tuple[Kernel, ...]:
    """The kernels in the types that they run in."""
    return tuple(
        replace(kernel, dtype="tf32")
        if kernel.dtype == "fp32" and kernel.op_class in rounded
        else kernel
        for kernel in kernels
    )


def workloads(traced: Traced) -> dict[str, Workload]:
    """The work of every distinct operator of a traced model, by `TracedOp.key`."""
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no shapes to compute "
            "from; trace the model again in this process (on the meta device it needs no memory)."
        )
    module: TracedModule = traced.module
    rows: dict[str, Workload] = {}
    left: dict[str, tuple[tuple[fx.Node, ...], bool]] = {}

    def make(node: fx.Node, _: object) -> Any:
        return filled(module, node, _fake)

    whole = opaque_leaves(module.graph_module, module.graph_module.graph.nodes)
    with (
        fakes_removed(module.graph_module) if whole else contextlib.nullcontext(),
        notes_kept(module.graph_module),  # those of submodules that stay whole
        gradients_kept(module.model),
        quiet(),
        module.call.autocast.applied(),
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
                rows[op.key] = _count(traced, nodes, make, fakes)
            except Exception:  # whatever a fake tensor cannot do, such as tell its value
                left[op.key] = nodes, op.differentiable
    real_inputs = RealInputs(module)
    for key, (nodes, differentiable) in left.items():
        rows[key] = _unseen(module, nodes, differentiable)
        if module.facts.real:
            with contextlib.suppress(Exception):  # it may need what is not on a CPU
                rows[key] = _count_real(traced, nodes, real_inputs.make(nodes, _CPU, make))
    return rows


def _count_real(traced: Traced, nodes: Sequence[fx.Node], make: Make) -> Workload:
    """One operator, run on what it reads in a run of the model on its example."""
    with quiet(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        load = _count(traced, nodes, make)
    return replace(load, remark=load.remark or SEEN)


def _count(
    traced: Traced,
    nodes: Sequence[fx.Node],
    make: Make,
    leaves: Mapping[str, torch.nn.Module] | None = None,
) -> Workload:
    """One operator, run on what `make` gives for the nodes that it reads."""
    module = traced.module
    alone = Alone(module, nodes, make, _CPU, leaves=leaves, returns_loss=traced.returns_loss)
    meter, unseen = Meter([0]), list[int]()
    (run,) = alone.forward_runs(1)
    with alone.keeping():
        produced, forward, scratch_bytes, _ = _counted(meter, run, unseen)
    roots = alone.graded(produced)
    inference = None
    results = distinct_storages(produced).values()
    keeps = meter.live_bytes[0] > sum(row.nbytes() for row in results if meter.knows(row))
    lighter = any(operator_name(node) in _LIGHTER_IN_INFERENCE for node in nodes)
    if keeps or lighter or alone.looks_at_values:
        with torch.no_grad():
            _, _, inference, _ = _counted(Meter([0]), alone.inference, [])
    if not roots or not alone.differentiable:
        return Workload(forward, workspace_bytes=scratch_bytes, inference_bytes=inference)
    with meter.counting(0):
        arriving = Arriving(roots)
    try:
        run = partial(arriving.differentiated, alone.differentiable)
        gradients, backward, _, above = _counted(meter, run, [])
    except Exception:  # reversible layers refuse it in evaluation mode
        backward = _unseen(module, nodes, True).backward
        scratch, reused, remark = 0, 0, UNSEEN_BACKWARD
    else:
        scratch, reused = arriving.scratch(gradients, above)
        remark = ""
    return Workload(
        *(forward, backward, scratch_bytes, scratch, remark, sum(unseen), reused, inference)
    )


def _counted(
    meter: Meter, run: Callable[[], Any], unseen: list[int]
) -> tuple[Any, tuple[Kernel, ...], int, int]:
    """The result, the kernels, and the peak above what is live at the end, and at the start.

    `unseen` gets the bytes that kernels keep and fake tensors do not have.
    """
    kernels: list[Kernel] = []

    def see(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            unseen.append(_recurrent_bytes(*args[:3]))
        elif func is torch.ops.aten._embedding_bag.default:
            unseen.append(args[1].element_size())  # an offset more, behind the last bag
        kernel = kernel_of(func, args, kwargs, result) if isinstance(func, OpOverload) else None
        if kernel is not None:
            kernels.append(kernel)

    with Watch(see):
        result, scratch_bytes, above_bytes = cpu_peaks(meter, run)
    return result, tuple(kernels), scratch_bytes, above_bytes


def _recurrent_bytes(x: torch.Tensor, entering: torch.Tensor, again: torch.Tensor) -> int:
    """At most what oneDNN's LSTM keeps inside, of which a fake one shows nothing.

    Gates of every step, and rows as wide as the input and as the state, in seven regions of whole
    pages. Cells' states and all gradients of states are in fp32 (`set_conf` in `rnn_utils.hpp`).
    Fitted to what oneDNN asks for (torch 2.13).
    """
    steps, batch, _ = x.shape
    gates, width = entering.shape
    hidden, size = again.shape[1], x.element_size()

    def padded(n: int, size: int) -> int:
        line = 64 // size
        row = -(-n // line) * line
        return row if row % 256 else row + line  # oneDNN's `get_good_ld`

    wide = max(width, hidden)
    states = 2 * size * padded(wide, size) + 4 * 4 * padded(wide, 4)
    states += (size + 4 * 4) * padded(hidden, size)
    return batch * (steps * size * padded(gates, size) + (steps + 1) * states) + 7 * 4096


def _unseen(module: TracedModule, nodes: Sequence[fx.Node], differentiable: bool) -> Workload:
    """One operator that fake tensors cannot run, as a copy of all that it touches."""
    facts = module.facts
    touched = {a for node in nodes for a in (node, *node.all_input_nodes)}
    storages = {value.storage for node in touched for value in facts.nodes[node].values}
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
        own = {
            name: torch.nn.Parameter(torch.empty_like(row, device="cpu"), row.requires_grad)
            for name, row in leaf.named_parameters()
        }
        self._own = torch.nn.ParameterList(own.values())
        buffers = {n: torch.empty_like(row, device="cpu") for n, row in leaf.named_buffers()}
        state = {**own, **buffers}
        # A closure, because a module as an attribute would be a submodule with parameters.
        self._run: Callable[..., Any] = lambda *given: called_with(leaf, state, *given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The work of the leaf."""
        return self._run(args, kwargs)


def _fake(value: Value) -> torch.Tensor:
    """A tensor without memory."""
    tensor = torch.empty(value.shape, dtype=value.dtype)
    if value.stride:  # a sparse tensor has none
        tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return tensor.requires_grad_(value.requires_grad)
