"""The graphs that autograd records."""

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge


def gradients_sent(results: Sequence[torch.Tensor], ends: Iterable[GradientEdge]) -> list[int]:
    """How many gradients come to each of these ends from the graph between them and the results."""
    wanted = [(end.node, end.output_nr) for end in ends]  # of which two may be one
    counts = dict.fromkeys(wanted, 0)
    seen = {None, *(node for node, _ in counts)}
    left = [tensor.grad_fn for tensor in results if tensor.grad_fn not in seen]
    seen.update(left)
    while left:
        node = left.pop()
        for edge in node.next_functions if node is not None else ():
            if edge in counts:
                counts[edge] += 1
            elif edge[0] not in seen:
                seen.add(edge[0])
                left.append(edge[0])
    return [counts[end] for end in wanted]
