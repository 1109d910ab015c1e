"""Casts of weights under autocast, which their readers share and its cache keeps.

Autocast casts a weight once for all operators that read it, so their gradients are added up in the
lower precision, and their sum is cast back. On several tapes each would cast for itself. So the
cast of a weight with several such readers is a node that they share.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any, Final, final

import torch
from torch import fx

from baechi.torch_support.tracer_internals import OpOverload
from baechi.tracing.fx_nodes import operator_name
from baechi.tracing.node_facts import Facts
from baechi.tracing.recurrent_layers import RECURRENT

AUTOCASTING: Final = {
    "cpu": torch._C.DispatchKey.AutocastCPU,
    "cuda": torch._C.DispatchKey.AutocastCUDA,
}


def is_cast_once(weight: Any) -> bool:
    """True if autocast keeps its casts: fp32 leaves that need a gradient and are no views.

    See `cached_cast` in aten/src/ATen/autocast_mode.cpp.
    """
    leaf = isinstance(weight, torch.Tensor) and weight.is_leaf and not weight._is_view()
    return leaf and bool(weight.requires_grad) and weight.dtype == torch.float32


def casts_shared(module: fx.GraphModule, dtypes: Sequence[tuple[str, torch.dtype]]) -> None:
    """Let readers of one weight share its cast; code of which nothing is seen may cast, too."""
    graph = module.graph
    names: dict[int, list[fx.Node]] = {}  # of each weight
    for node in graph.find_nodes(op="get_attr") if dtypes else ():
        weight = attrgetter(str(node.target))(module)
        if is_cast_once(weight):
            names.setdefault(id(weight), []).append(node)
    for nodes in names.values():
        readers = {reader for node in nodes for reader in node.users}
        seen = all(isinstance(r.target, OpOverload) or r.op == "output" for r in readers)
        for kind, dtype in dtypes if seen else ():
            casting = [r for r in graph.nodes if r in readers and _is_cast_for(r, kind, dtype)]
            if len(casting) > 1:
                first = casting[0]
                with graph.inserting_before(first):
                    cast = graph.call_function(torch.ops.aten.to.dtype, (nodes[0], dtype))
                cast.meta = {key: first.meta[key] for key in first.meta.keys() - {"val"}}
                for reader in casting:
                    for node in nodes:
                        reader.replace_input_with(node, cast)


@final
@dataclass(frozen=True)
class CachedCasts:
    """The casts of weights that autocast keeps while it is on; each is of the first to read it.

    Attributes:
        nbytes: Their bytes.
        own_bytes: Those of weights that no other operator reads.
        saved_bytes: Those of them that autograd saves, too.
    """

    nbytes: int
    own_bytes: int
    saved_bytes: int


def cached_casts(
    ops: Collection[Iterable[fx.Node]], facts: Facts, dtypes: Sequence[tuple[str, torch.dtype]]
) -> list[CachedCasts]:
    """The casts of each operator, by its nodes.

    An eager run, and a worker, hold them to the end of the block under autocast.
    """
    readers: Counter[tuple[int, torch.dtype]] = Counter()
    for nodes in ops:
        pairs = product(nodes, dtypes)
        readers.update({(id(w), to) for node, (kind, to) in pairs for w in _cast(node, kind, to)})
    known: set[tuple[int, torch.dtype]] = set()
    found = []
    for nodes in ops:
        kept = own = saved = 0
        for node, (kind, dtype) in product(nodes, dtypes):
            inside = (facts.storages[storage] for storage in facts.nodes[node].saved)
            saves = _saves_weights(node, facts)
            sizes = [storage.nbytes for storage in inside if saves and storage.node is node]
            for weight in _cast(node, kind, dtype):
                nbytes, key = weight.numel() * dtype.itemsize, (id(weight), dtype)
                if key in known:
                    continue
                known.add(key)
                kept += nbytes
                own += nbytes * (readers[key] == 1)
                if nbytes in sizes:
                    sizes.remove(nbytes)
                    saved += nbytes
        found.append(CachedCasts(kept, own, saved))
    return found


def _saves_weights(node: fx.Node, facts: Facts) -> bool:
    """True unless it is a product with what needs no gradient, whose backward reads no weight."""
    sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
    graded = any(row.requires_grad for source in sources for row in facts.nodes[source].values)
    return graded or node.op == "call_module" or _is_recurrent(node)


def _is_recurrent(node: fx.Node) -> bool:
    name = operator_name(node)
    return name in RECURRENT or name.endswith("_cell")


def _cast(node: fx.Node, kind: str, dtype: torch.dtype) -> list[Any]:
    """The weights that a node reads by itself and autocast casts; of a submodule all parameters."""
    owner: Any = node.graph.owning_module
    if node.op == "call_module":
        return [*filter(is_cast_once, owner.get_submodule(str(node.target)).parameters())]
    if not (_is_cast_for(node, kind, dtype) or _is_recurrent(node)):
        return []
    names = (source.target for source in node.all_input_nodes if source.op == "get_attr")
    return [*filter(is_cast_once, (attrgetter(str(name))(owner) for name in names))]


def _is_cast_for(node: fx.Node, kind: str, dtype: torch.dtype) -> bool:
    """True if it is an operator that autocast gives what it reads in a lower precision."""
    value: Any = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or getattr(value, "dtype", None) != dtype:
        return False
    return node.target.has_kernel_for_dispatch_key(AUTOCASTING[kind])
