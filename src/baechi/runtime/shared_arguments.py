"""Which arguments of a call are one tensor, or share memory.

A trace that is given one tensor for two arguments does not tell them apart. And one that writes
into an argument knows only of those readers that shared its memory then.
"""

from collections.abc import Sequence
from typing import final

import torch

from baechi.tracing.lowering import TracedModule


@final
class Sharing:
    """What the example of a trace shares, and which calls may run in its stead.

    Args:
        module: The traced model.
    """

    def __init__(self, module: TracedModule) -> None:
        tensors = module.call.tensors
        first: dict[int, int] = {}
        for i, tensor in enumerate(tensors):
            first.setdefault(id(tensor), i)
        # (i, j): the argument i is the very tensor that j is.
        self._one = [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
        facts = module.facts.nodes
        given = [facts[n].values for n in module.graph_module.graph.find_nodes(op="placeholder")]
        storages = [{value.storage for value in values} for values in given]
        written = {storage for fact in facts.values() for storage in fact.writes}
        # (i, j): i is written, and shares nothing with j.
        self._apart = [
            (i, j)
            for i, mine in enumerate(storages)
            for j, others in enumerate(storages)
            if mine & written and not mine & others
        ]

    def allows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what was one is one, and what is written is nobody else's memory."""
        if any(tensors[i] is not tensors[j] for i, j in self._one):
            return False
        return not any(_share(tensors[i], tensors[j]) for i, j in self._apart)


def _share(one: torch.Tensor, two: torch.Tensor) -> bool:
    dense = one.layout is two.layout is torch.strided
    if not (dense and one.numel() and two.numel()):
        return False
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
