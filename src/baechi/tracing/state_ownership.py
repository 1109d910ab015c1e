"""The state that each operator owns, and the groups of operators that share a device for it.

Users of one parameter (or of a buffer that is written) share a group: they run on one device but
may be launched apart. Buffers and constants that are only read travel as tensors.

Complexity: O(nodes + edges), with a sort.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final, final

import torch
from torch import fx, nn

from baechi.records.optimizer_state import TrainedParameter
from baechi.torch_support.storages import memory_of
from baechi.tracing.node_facts import Facts
from baechi.tracing.partition import Partition, UnionFind, attribute

_SMALL_PART: Final = 4  # this much of a buffer, at most, counts twice where it lives


@final
@dataclass
class Owned:
    """State that an operator owns: bytes and names; and per storage what later ones share."""

    trained: int = 0
    frozen: int = 0
    names: list[str] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    parameters: list[TrainedParameter] = field(default_factory=list)
    lent: list[tuple[int, ...]] = field(default_factory=list)


def crossing_bytes(facts: Facts, parts: Partition, storage: int) -> int:
    """The bytes of a storage; of a buffer, such as a table of positions, of the parts read.

    Where these are small: the buffer counts beside them where it lives.
    """
    nbytes, home = facts.storages[storage].nbytes, parts.home(storage)
    if home is None or not parts.is_source(storage):
        return nbytes
    read = sum(
        value.nbytes
        for node in parts.nodes_of_op[home]
        for value in parts.values(node)
        if value.storage == storage and any(parts.op_of.get(user) != home for user in node.users)
    )
    return read if read * _SMALL_PART <= nbytes else nbytes


@final
class StateOwnership:
    """The state of the operators of one partition."""

    def __init__(
        self, model: nn.Module, module: fx.GraphModule, facts: Facts, parts: Partition
    ) -> None:
        self._module = module
        self._facts = facts
        self._parts = parts
        named = [*model.named_buffers(), *model.named_parameters()]
        self._owner = {id(tensor): name for name, tensor in named}
        layers = [module for module in model.modules() if _may_fuse(module)]
        self._layer = {id(p): layer for layer in reversed(layers) for p in layer.parameters()}

    def of(self, backward: Set[int], linked: Set[int]) -> tuple[list[Owned], dict[int, str]]:
        """What each op owns, and the names of the groups of those that are in one.

        Some ops have a `backward`; those that are `linked` read another's result, or another reads
        theirs. State is counted once, by storage, at the first operator that uses it; a parameter
        at the first that may send it a gradient, which one under `no_grad` does not.
        """
        n = len(self._parts.nodes_of_op)
        owned = [Owned() for _ in range(n)]
        users: dict[int, set[int]] = defaultdict(set)
        labels: dict[int, str] = {}
        lent: dict[int, tuple[int, int]] = {}  # owner and bytes of what has a gradient
        seen: set[str] = set()
        fused: dict[nn.Module, set[int]] = defaultdict(set)
        union = UnionFind(n)
        for node in self._parts.program:
            for label, tensor, storage in self._state_of(node):
                readers = self._readers(node, storage)
                if not readers:
                    continue
                key = memory_of(tensor)
                new = key not in users
                users[key].update(readers)
                if layer := self._layer.get(id(tensor)):
                    fused[layer].update(readers)
                    labels.setdefault(key, label)
                runs = node.op == "get_attr" and node in self._parts.op_of
                travels = runs and self._parts.travels(node)
                nbytes = tensor.untyped_storage().nbytes()
                grading = users[key] & backward if tensor.requires_grad and not runs else set()
                first = min(grading or users[key])
                if not travels and len(users[key]) > 1:
                    union.union(users[key])
                    labels.setdefault(key, label)
                for op in sorted(grading)[:-1]:
                    owned[op].shared.setdefault(key, nbytes)
                if tensor.requires_grad and label not in seen:
                    # An optimizer keeps state for every parameter, if two share a storage too.
                    seen.add(label)
                    trained = TrainedParameter(tuple(tensor.shape), tensor.element_size())
                    owned[first].parameters.append(trained)
                if new:
                    owner = owned[first]
                    owner.names.append(label)
                    owner.trained += nbytes if tensor.requires_grad else 0
                    if grading:
                        lent[key] = first, nbytes
                    stays = (
                        not travels or crossing_bytes(self._facts, self._parts, storage) < nbytes
                    )
                    owner.frozen += nbytes if stays and not tensor.requires_grad else 0
        for key, (owner_op, nbytes) in lent.items():
            later = sorted(op for op in users[key] & backward if op > owner_op)
            owned[owner_op].lent += [(nbytes, *later)] if later else []
        for together in fused.values():
            union.union(together)
        self._join_split_views(union)
        _join_counters(union, owned, linked)
        members: dict[int, list[int]] = defaultdict(list)
        for op in range(n):
            members[union.find(op)].append(op)
        titles = {union.find(min(users[key])): label for key, label in labels.items()}
        groups = {
            op: f"shared:{titles.get(root, self._parts.nodes_of_op[root][0].name)}"
            for root, ops in members.items()
            if len(ops) > 1
            for op in ops
        }
        return owned, groups

    def _join_split_views(self, union: UnionFind) -> None:
        """A view that could not join its base's operator at least shares its device."""
        for node, op in self._parts.op_of.items():
            for value in self._parts.values(node):
                home = self._parts.home(value.storage)
                if home is not None and home != op:
                    union.union([home, op])

    def _state_of(self, node: fx.Node) -> list[tuple[str, torch.Tensor, int]]:
        """(name, tensor, storage or -1) of every parameter, buffer and constant it stands for."""
        target = str(node.target)
        tensors: list[torch.Tensor] = []
        if node.op == "get_attr" and self._parts.values(node):
            tensors = [attribute(self._module, target)]
        elif node.op == "call_module":
            leaf = self._module.get_submodule(target)
            tensors = [*leaf.parameters(), *leaf.buffers()]
        storage_of = self._parts.storage_of
        return [
            (self._owner.get(id(t), target), t, storage_of.get(memory_of(t), -1)) for t in tensors
        ]

    def _readers(self, node: fx.Node, storage: int) -> list[int]:
        if node.op == "call_module":
            return [self._parts.op_of[node]]
        readers = {self._parts.op_of[u] for u in self._parts.users(node) if u in self._parts.op_of}
        for position in self._parts.touches[storage]:
            touching = self._parts.program[position]
            if touching in self._parts.op_of and (touching.op != "get_attr" or touching is node):
                readers.add(self._parts.op_of[touching])
        return sorted(readers)


def _may_fuse(layer: nn.Module) -> bool:
    """True if it may be one kernel in evaluation without gradients, with all weights together."""
    attention = layer.self_attn if isinstance(layer, nn.TransformerEncoderLayer) else layer
    return isinstance(attention, nn.MultiheadAttention) and attention.batch_first


def _join_counters(union: UnionFind, owned: Sequence[Owned], linked: Set[int]) -> None:
    """Join ops that only write a submodule's state, such as a call counter, to that submodule's op.

    Nothing else draws it to a device, so it would go to one that is idle, and wake it up.
    """
    ops = [*sorted(linked), *sorted(set(range(len(owned))) - linked)]
    rows = [(name.rpartition(".")[0], op) for op in ops for name in owned[op].names]
    home = {owner: op for owner, op in reversed(rows) if op in linked}
    for owner, op in rows:
        if op not in linked and owner in home:
            union.union([home[owner], op])
