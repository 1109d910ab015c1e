"""The effects of the nodes of a graph on memory and autograd, and the storages between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import fx

from baechi.tracing.pytrees import Structure


@final
@dataclass(frozen=True)
class Value:
    """A tensor that a node yields; `storage` is an index into `Facts.storages`."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass
class NodeFacts:
    """The effects of one node on memory and autograd.

    `saved` are storages, each once; `structure` is around the values; `checks` says that it fails
    for some values, as a model's assertion does; `looks` that an observer runs. `several` are the
    input nodes (indices) to which it sends more than one gradient.
    """

    values: tuple[Value, ...] = ()
    structure: Structure | None = None
    writes: frozenset[int] = frozenset()
    saved: tuple[int, ...] = ()
    random: bool = False
    checks: bool = False
    looks: bool = False
    several: tuple[int, ...] = ()

    @property
    def acts(self) -> bool:
        """True if it has an effect besides its values."""
        return bool(self.writes or self.random or self.checks or self.looks)


NOTHING: Final = NodeFacts()


def viewed(node: fx.Node, nodes: Mapping[fx.Node, NodeFacts]) -> fx.Node | None:
    """What a node is a view of, if it computes nothing."""
    facts = nodes.get(node, NOTHING)
    mine = {value.storage for value in facts.values}
    if node.op in ("placeholder", "get_attr", "output") or not mine or facts.writes:
        return None
    for source in node.all_input_nodes:
        if mine <= {value.storage for value in nodes.get(source, NOTHING).values}:
            return source
    return None


@final
@dataclass
class Storage:
    """A storage: its bytes and the node, or the named attribute, that it comes from."""

    nbytes: int
    node: fx.Node | None = None
    attribute: str | None = None


@final
@dataclass
class Facts:
    """The effects of every node of a graph, and the storages between them.

    `real`: shapes alone did not determine it, so the example ran. `expected`: for symbols of sizes
    that values of tensors decide, terms of others.
    """

    nodes: dict[fx.Node, NodeFacts] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    real: bool = False
    expected: Mapping[Any, Any] = field(default_factory=dict)

    @cached_property
    def written(self) -> frozenset[int]:
        """The storages that a node writes."""
        return frozenset(storage for fact in self.nodes.values() for storage in fact.writes)

    def is_state(self, node: fx.Node) -> bool:
        """True if a node's value lies in a parameter or buffer: is one, or a view of one."""
        values = self.nodes[node].values
        return any(self.storages[value.storage].attribute is not None for value in values)
