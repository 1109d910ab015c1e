"""What autograd keeps of a recurrent layer that reads symbolic sizes.

Torch runs GRUs, and plain recurrent layers, step by step, and keeps tensors for each step. With a
symbol for the number of steps they cannot be listed. Their bytes are linear in each size of what
the layer reads, as those of LSTMs are, so they follow from runs at two sizes of each.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Final, final

import torch
from torch.utils import _pytree as pytree

from baechi.torch_support.storages import key_of
from baechi.torch_support.symbolic_sizes import term_of
from baechi.torch_support.tracer_internals import FakeTensorMode

_LEAST: Final = 3  # the smaller of the two sizes


@final
@dataclass(frozen=True)
class Kept:
    """What autograd keeps of a layer.

    Attributes:
        nbytes: Of what is made inside; a symbol where sizes are symbols.
        tensors: The indices of those that it gets or gives, first all of its arguments.
    """

    nbytes: Any
    tensors: tuple[int, ...]


_LAYERS: Final = tuple(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))


def is_recurrent(name: str, args: Sequence[Any]) -> bool:
    """True if an operator is such a layer."""
    return name in _LAYERS and any(isinstance(n, torch.SymInt) for n in args[0].shape)


def kept_of(layer: Any, args: Sequence[Any]) -> Kept:
    """What autograd keeps of a layer, from runs on fake tensors of other sizes."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    sizes = {term_of(n): n for tensor in tensors for n in tensor.shape if type(n) is not int}
    symbols = list(sizes)
    found: dict[frozenset[Any], int] = {}
    known: set[int] = set()
    for more in product((0, 1), repeat=len(symbols)):
        larger = frozenset(term for term, one in zip(symbols, more, strict=True) if one)
        numbers = {term: _LEAST + (term in larger) for term in symbols}
        found[larger], kept = _run(layer, args, numbers)
        known |= kept
    nbytes: Any = 0
    for count in range(len(symbols) + 1):
        for chosen in map(frozenset, combinations(symbols, count)):
            # What these sizes add together, beyond what fewer of them do.
            step = sum((-1) ** (len(chosen) - len(few)) * found[few] for few in _subsets(chosen))
            nbytes += step * math.prod(sizes[term] - _LEAST for term in chosen)
    return Kept(nbytes, tuple(sorted(known)))


def _subsets(terms: frozenset[Any]) -> list[frozenset[Any]]:
    return [frozenset(few) for n in range(len(terms) + 1) for few in combinations(terms, n)]


def _run(layer: Any, args: Sequence[Any], numbers: Mapping[Any, int]) -> tuple[int, set[int]]:
    """The bytes that a run keeps inside, and which of its arguments and results it keeps."""
    given: list[torch.Tensor] = []  # and, in the end, made
    kept: list[torch.Tensor] = []

    def of_size(tensor: torch.Tensor) -> torch.Tensor:
        shape = [numbers.get(term_of(n), n) for n in tensor.shape]
        made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        given.append(made.requires_grad_(tensor.requires_grad))
        return made

    def keep(tensor: torch.Tensor) -> None:
        kept.append(tensor.detach())

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved)
    with FakeTensorMode(), torch.enable_grad():
        own = pytree.tree_map_only(torch.Tensor, of_size, args)
        with hooks:
            given += layer(*own)
    places = {key_of(tensor.untyped_storage()): i for i, tensor in enumerate(given)}
    made = {key_of(tensor.untyped_storage()): tensor for tensor in kept}
    nbytes = sum(made[key].untyped_storage().nbytes() for key in made.keys() - places.keys())
    return nbytes, {places[key] for key in made.keys() & places.keys()}
