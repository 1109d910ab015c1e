"""Device maps, by which `from_pretrained` and Accelerate load and run a model module by module.

Accelerate moves the arguments of a module to its device, and nothing else. So a module stays whole,
unless it is the model itself, a container without a forward of its own, or has a module inside that
transformers says not to split; and what the forward of a parted module computes between its
submodules runs on one device with all that it reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from baechi.costs.estimation import estimate
from baechi.placers.solving import solve
from baechi.probing.cluster_probe import probe
from baechi.records.graph import OpGraph
from baechi.torch_support.torch_devices import with_kinds
from baechi.traced.operators import TracedOp
from baechi.traced.traced_model import Traced
from baechi.tracing.ladder import trace
from baechi.tracing.partition import UnionFind

_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def device_map(
    model: nn.Module,
    devices: Any = None,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    placer: Any = "contiguous",
) -> dict[str, str]:
    """The device of every module, parameter or buffer of an inference: for `from_pretrained`.

    Costs are computed, so the model may be on meta, and the devices need not be there.

    Args:
        model: Any module; `_no_split_modules` of transformers are heeded.
        devices: As for `place`.
        example_args: Positional arguments of one call, whose memory counts.
        example_kwargs: Keyword arguments of that call.
        placer: As for `solve`; most others part the model more often, and each cut is a copy.

    Returns:
        Paths of modules, or names of parameters and buffers between them, to names of devices.

    Raises:
        InputError: An argument is wrong.
        TraceError: The model cannot be traced.
        InfeasibleError: It does not fit with its modules whole; names the largest that does not.
    """
    traced = trace(model, example_args, example_kwargs)
    cluster = with_kinds(probe(devices))
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    graph = traced.graph([estimate(traced, kind) for kind in kinds], training=False)
    parted = _parted(model)
    placement = solve(_whole(graph, traced, parted), cluster, placer=placer)
    found: dict[str, int] = {}
    for row, device in zip(traced.ops, placement.devices, strict=True):
        for path in (*_units(row, parted), *row.parameters):
            found.setdefault(path, device)
    names: dict[str, str] = {}
    device = min(placement.devices, default=0)
    for path in _entries(model, parted):
        device = found.get(path, device)  # what this call does not use is beside what is before it
        names[path] = cluster.devices[device].name
    return names


def _parted(model: nn.Module) -> set[str]:
    """The paths of the modules whose submodules may be on several devices."""
    modules = dict(model.named_modules())
    rows = [getattr(module, "_no_split_modules", None) or () for module in modules.values()]
    kept = {name for names in rows for name in names}
    whole = [path for path, module in modules.items() if type(module).__name__ in kept]
    parted = {""}
    for path, module in modules.items():  # parents come first
        outside = path.rpartition(".")[0] in parted and path not in whole
        inside = any(row.startswith(f"{path}.") for row in whole)
        if outside and (inside or isinstance(module, _CONTAINERS)):
            parted.add(path)
    return parted


def _entries(model: nn.Module, parted: set[str]) -> list[str]:
    """Every module that stays whole, and what parted ones have themselves, in order."""
    found = []
    for path, module in model.named_modules():
        if path in parted:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found += [f"{path}.{name}".lstrip(".") for name, _ in own]
        elif path.rpartition(".")[0] in parted:
            found.append(path)
    return found


def _units(op: TracedOp, parted: set[str]) -> list[str]:
    """The outermost module around an operator that stays whole, if there is one."""
    paths = [*op.modules, *(name.rpartition(".")[0] for name in op.parameters)]
    return [
        path for path in paths if path and path not in parted and path.rpartition(".")[0] in parted
    ]


def _whole(graph: OpGraph, traced: Traced, parted: set[str]) -> OpGraph:
    """The graph with a group for all that has to be on one device."""
    first: dict[str, int] = {}
    union = UnionFind(len(graph.ops))
    for index, (op, row) in enumerate(zip(graph.ops, traced.ops, strict=True)):
        units = _units(row, parted)
        labels = [*(f"unit {path}" for path in units), *([op.group] if op.group else [])]
        for label in labels:
            union.union([index, first.setdefault(label, index)])
        if not units:  # of a forward that is parted: beside all that it reads
            reads = [tensor.producer for tensor in graph.tensors if index in tensor.consumers]
            union.union([index, *reads])
    ops = (replace(op, group=f"whole {union.find(i)}") for i, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops))
