"""Recurrent layers: their shapes and memory where sizes are symbols, and defects of torch.

Torch runs GRUs, and plain recurrent layers, step by step, and keeps tensors for each step. With a
symbol for the number of steps they cannot be listed. Their bytes are linear in each size of what
the layer reads, as those of LSTMs are, so they follow from runs at two sizes of each (`kept_of`).

Recurrent layers with symbols for sizes
    Fake tensors run GRUs and plain layers step by step, and so LSTMs with gradients and all in an
    export, though oneDNN does without: it would fix the length. The shapes of the results need no
    steps. `test_torch_still_unrolls_lstms` and `test_torch_still_fixes_the_length_of_a_gru` fail
    when torch is mended.

Recurrent layers under autocast
    Fake tensors may have other dtypes than kernels give (`gives_traced_dtypes`): those of an LSTM
    that torch unrolls, and all on a GPU, where cuDNN is given fp16 (`AutocastRNN.cpp`).
    `test_torch_still_exports_recurrent_layers_in_other_dtypes` fails when torch is mended.

Weights of recurrent layers on a GPU (`torch/nn/modules/rnn.py`, `aten/.../cudnn/RNN.cpp`)
    A parameter that is moved by itself, or copied, leaves the one piece that they are in: torch
    then warns at each call, and each takes the weights' bytes once more. This is as meant.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from itertools import combinations, product
from operator import and_
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from baechi.torch_support.storages import key_of
from baechi.torch_support.symbolic_sizes import has_symbols, term_of
from baechi.torch_support.tracer_internals import FakeTensorMode, decompositions

_LEAST: Final = 3  # the smaller of the two sizes


@final
@dataclass(frozen=True)
class Kept:
    """What autograd keeps of a layer.

    Attributes:
        nbytes: Of each tensor made inside whose bytes depend on no size, as of weights' casts; and
            of all others together, a symbol where sizes are symbols.
        tensors: The indices of those that it gets or gives, first all of its arguments.
    """

    nbytes: tuple[Any, ...]
    tensors: tuple[int, ...]


RECURRENT: Final = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_LAYERS: Final = frozenset(f"aten.{name}.input" for name in RECURRENT)


def is_recurrent(name: str, args: Sequence[Any]) -> bool:
    """True if an operator is such a layer."""
    return name in _LAYERS and has_symbols(args[0])


def gives_traced_dtypes(layer: fx.Node) -> bool:
    """True if a layer's kernel gives the dtypes of the trace, with gradients and without.

    It runs a single step on zeros. Where it does not run, neither does the model.
    """

    def small(value: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.zeros(sizes or value.shape, dtype=value.dtype, device=value.device)

    if str(layer.target) not in _LAYERS:  # of sequences that are packed, of which nothing is known
        return False
    args: list[Any] = list(fx.node.map_arg(layer.args, lambda node: node.meta["val"]))
    args[0] = small(args[0], 1, 1, args[0].shape[-1])
    args[1] = pytree.tree_map(lambda state: small(state, len(state), 1, state.shape[-1]), args[1])
    args[2], args[5] = [small(weight).requires_grad_() for weight in args[2]], 0.0
    dtypes = [value.dtype for value in layer.meta["val"]]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), suppress(RuntimeError):
            if [value.dtype for value in layer.target(*args)] != dtypes:  # type: ignore[operator]
                return False
    return True


def kept_of(layer: Any, args: Sequence[Any]) -> Kept:
    """What autograd keeps of a layer, from runs on fake tensors of other sizes."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    sizes = {term_of(n): n for tensor in tensors for n in tensor.shape if type(n) is not int}
    symbols = list(sizes)
    found: dict[frozenset[Any], Counter[int]] = {}
    known: set[int] = set()
    for more in product((0, 1), repeat=len(symbols)):
        larger = frozenset(term for term, one in zip(symbols, more, strict=True) if one)
        numbers = {term: _LEAST + (term in larger) for term in symbols}
        found[larger], kept = _run(layer, args, numbers)
        known |= kept
    fixed = reduce(and_, found.values())
    others = {larger: sum((made - fixed).elements()) for larger, made in found.items()}
    nbytes: Any = 0
    for count in range(len(symbols) + 1):
        for chosen in map(frozenset, combinations(symbols, count)):
            # What these sizes add together, beyond what fewer of them do.
            step = sum((-1) ** (len(chosen) - len(few)) * others[few] for few in _subsets(chosen))
            nbytes += step * math.prod(sizes[term] - _LEAST for term in chosen)
    return Kept((*fixed.elements(), nbytes), tuple(sorted(known)))


def _subsets(terms: frozenset[Any]) -> list[frozenset[Any]]:
    return [frozenset(few) for n in range(len(terms) + 1) for few in combinations(terms, n)]


def _run(
    layer: Any, args: Sequence[Any], numbers: Mapping[Any, int]
) -> tuple[Counter[int], set[int]]:
    """The bytes of what a run keeps inside, and which of its arguments and results it keeps."""
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
    sizes = Counter(made[key].untyped_storage().nbytes() for key in made.keys() - places.keys())
    return sizes, {places[key] for key in made.keys() & places.keys()}


@contextmanager
def recurrent_in_one() -> Iterator[None]:
    """Let fake recurrent layers do without steps.

    LSTMs on a CPU, as the real ones do, with gradients and in an export, too; and others whose
    sizes are symbols.
    """
    names = ("select_one_layer_lstm_function", "one_layer_lstm", "one_layer_rnn")
    choose, lstm, other = (getattr(decompositions, name) for name in names)
    enabled = torch.backends.mkldnn.enabled
    patches = (
        lambda x, *rest: choose(x.detach(), *rest),
        partial(_at_once, lstm),
        partial(_at_once, other),
    )
    with ExitStack() as stack:
        for name, mine in zip(names, patches, strict=True):
            stack.enter_context(patch.object(decompositions, name, mine))
        stack.enter_context(patch.object(torch._C, "_get_mkldnn_enabled", lambda: enabled))
        yield


def _at_once(
    layer: Callable[..., Any], x: torch.Tensor, state: Any, *rest: Any, **options: Any
) -> Any:
    """What a layer gives, where the number of steps is a symbol by a single one."""
    several = has_symbols(x)
    made, last = layer(x[0].unsqueeze(0) if several else x, state, *rest, **options)
    # Torch 2.11 has one dimension more.
    last = pytree.tree_map(lambda one, given: one.view(given.shape), last, state)
    return made.expand(x.shape[0], -1, -1).contiguous() if several else made, last


def compact(model: nn.Module) -> None:
    """Put the weights of each recurrent layer on one GPU into one piece; parameters stay."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            places = {parameter.device for parameter in module.parameters()}
            if len(places) == 1 and places.pop().type == "cuda":
                with torch.inference_mode(False):
                    module.flatten_parameters()
