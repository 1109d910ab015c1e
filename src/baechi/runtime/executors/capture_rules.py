"""Rules for what may be captured as a CUDA graph, decided before anything runs.

Nothing in a graph may wait for the host, take its size from values, or write outside of the graph's
own memory. A tape that the rules miss fails at its capture, and then runs eagerly, too.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (constraints), and
`aten/src/ATen/cuda/CUDAGeneratorImpl.cpp` for what a replay does to the random state.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from baechi.errors import InputError
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.torch_compile import CompiledTape
from baechi.torch_support.torch_devices import is_allocator_native
from baechi.tracing.fx_nodes import op_name, operator_name, operator_of
from baechi.tracing.lowering import TracedModule
from baechi.tracing.observers import Observer

CudaGraphs: TypeAlias = bool | Literal["auto"]

_SIZED: Final = (
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim"),
    *("_unique", "_unique2", "bincount", "tensor_split", "repeat_interleave", "combinations"),
)
_ASKING: Final = (
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "multinomial", "histc"),
    *("_assert_async", "_assert_scalar", "tolist", "linalg_inv", "linalg_cholesky"),
    *("linalg_solve", "linalg_eigh", "linalg_eig", "linalg_svd", "svd", "cholesky", "inverse"),
    *("linalg_lu_factor", "linalg_ldl_factor", "linalg_tensorinv", "linalg_tensorsolve"),
    *("linalg_eigvals", "linalg_eigvalsh", "_linalg_eigh", "_linalg_svd", "linalg_svdvals"),
    *("linalg_pinv", "pinverse", "linalg_matrix_rank", "linalg_lstsq"),  # their parts check
    # Those that return what they would check, which on an H200 wait for it all the same.
    *("linalg_lu", "linalg_lu_factor_ex", "_lu_with_info", "linalg_cond"),
    *("linalg_inv_ex", "linalg_solve_ex", "_linalg_solve_ex", "_linalg_det", "linalg_det", "det"),
    *("_linalg_slogdet", "linalg_slogdet", "slogdet", "logdet"),  # by the same factorization
    *("linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_matrix_exp", "matrix_exp"),
    *("cov", "corrcoef", "segment_reduce", "gaussian_nll_loss"),  # check what they are given
    *("ctc_loss", "_ctc_loss", "_pack_padded_sequence", "_pad_packed_sequence"),
)
_SPARSE: Final = {"embedding": 4, "embedding_bag": 5}  # where the flag is among the arguments
_SPACED: Final = ("linspace", "logspace")
_STRIDED: Final = ("as_strided", "as_strided_scatter")
_INDEXED: Final = ("index", "index_put", "_unsafe_index", "_index_put_impl")
# Of a tape that only passes on what it is given; that is no reason to refuse a placement.
LAUNCHES_NOTHING: Final = "it launches nothing"
_MASKS: Final = (torch.bool, torch.uint8)


def check_wish(wish: CudaGraphs, places: Sequence[torch.device], batches: int = 1) -> None:
    """Refuse a `cuda_graphs` that means nothing, and what no device or allocator can fulfil.

    Memory that a lane lets go of belongs to its stream, which waits for other lanes before it takes
    it again. `cudaMallocAsync` may give it to any stream at once.

    Raises:
        InputError: It is none of `True`, `False` and `"auto"`, or true without a CUDA device; or a
            GPU has several logical devices, and torch's allocator is not its own; or a call has
            several micro-batches.
    """
    crowded = [str(place) for place, n in Counter(places).items() if n > 1 and place.type == "cuda"]
    if crowded and not is_allocator_native():
        raise InputError(
            f"{', '.join(crowded)} has several logical devices, whose streams share memory as "
            f"torch's own allocator orders it, not {torch.cuda.get_allocator_backend()}. Give one "
            "logical device for each GPU, or set no backend in PYTORCH_ALLOC_CONF."
        )
    if wish not in (True, False, "auto"):
        raise InputError(f'cuda_graphs is {wish!r}; it must be True, False or "auto".')
    if wish is True and all(place.type != "cuda" for place in places):
        names = ", ".join(dict.fromkeys(map(str, places)))
        raise InputError(
            f"cuda_graphs=True, but the devices are {names}; only CUDA devices have graphs. Give "
            'cuda_graphs="auto", which takes them where there are some, or leave it out.'
        )
    if wish is True and batches > 1:
        raise InputError(
            f"cuda_graphs=True, but a call has {batches} micro-batches: all would be in flight at "
            "once, with graphs for each. Call step(), which keeps fewer in flight, or give "
            'cuda_graphs="auto", which runs calls without graphs.'
        )


def obstacle(  # noqa: PLR0911 (a rule each)
    module: TracedModule,
    code: TapeCode,
    *,
    alone: bool,
    on_cuda: bool = True,
    several: bool = False,
) -> str:
    """The reason why a tape cannot be a CUDA graph; empty if it can.

    Args:
        module: The traced model.
        code: The tape.
        alone: Whether no other lane of its GPU computes.
        on_cuda: Whether its device is one for which graphs are captured.
        several: Whether it goes backward on several torch devices.
    """
    if not on_cuda:
        return f"a {code.place.type} device has no CUDA graphs"
    if code.place.type == "cuda" and not is_allocator_native():
        # One capture at a time in a process, in no pool (c10/cuda/CUDAMallocAsyncAllocator.cpp).
        return f"captures share no memory with {torch.cuda.get_allocator_backend()}"
    if code.written:
        return "it writes into a tensor of the caller's"
    if several and isinstance(code.function, CompiledTape):
        # torch's setting that allows it is the thread's (`keeping_graphs`), and autograd has a
        # thread for each GPU.
        return "torch.compile keeps no graph for the threads of several devices"
    if code.recomputation is not None:
        return "it runs forward again in the backward"
    runs = _operators(code.nodes)
    if not runs:
        return LAUNCHES_NOTHING
    if _writes_others(module, code):
        return "it writes in place into what another tape made"
    random = next((node for node in runs if module.facts.nodes[node].random), None)
    if random is not None and not alone:
        return (
            f"{op_name(random)} draws random numbers, and graphs that run side by side on a GPU "
            "share where its generator is"
        )
    for node in runs:
        reason = _reason(module, node)
        if reason:
            return f"{op_name(node)} {reason}"
    return ""


def _reason(module: TracedModule, node: fx.Node) -> str:  # noqa: PLR0911 (a rule each)
    if node.op == "call_module":
        return "is an opaque module, which may look at values"
    if isinstance(node.target, Observer):
        return f"runs {node.target.title}"
    target = operator_of(node)
    if isinstance(target, HigherOrderOperator):
        return "decides on the host what runs"
    if isinstance(target, OpOverload) and target.namespace not in ("aten", "prims"):
        return f"is {target.namespace}'s own; nobody knows whether it asks the host"
    name = operator_name(node).rstrip("_")
    if name in _SIZED and node.kwargs.get("output_size") is None:
        return "takes its size from values"
    spectral = name == "linalg_matrix_norm" and (*node.args, None)[1] in ("nuc", 2, -2)
    spread = name == "normal" and getattr(target, "_overloadname", "").endswith("_Tensor")
    if name in _ASKING or spectral or spread:
        return "reads values on the host"
    if name in _SPACED and "Tensor" in getattr(target, "_overloadname", ""):
        return "takes its ends from values"
    if name in _INDEXED and _has_mask(module, node):
        return "indexes with a mask, so its size depends on values"
    if name in _STRIDED:
        return "reads memory as it lies, and copies lie otherwise"
    place = _SPARSE.get(name)
    if place is not None and (*node.args, *[False] * 6)[place]:
        return "gives a sparse gradient, as large as values say"
    if node.kwargs.get("generator") is not None:
        return "draws from a generator of its own"
    return ""


def _operators(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]


def _has_mask(module: TracedModule, node: fx.Node) -> bool:
    """True if an index is boolean, or may be."""
    indices = node.args[1] if len(node.args) > 1 else node.kwargs.get("indices", ())
    for index in indices if isinstance(indices, (list, tuple)) else ():
        if isinstance(index, fx.Node):
            facts = module.facts.nodes.get(index)
            known = facts.values[0] if facts is not None and facts.values else index.meta.get("val")
            if getattr(known, "dtype", torch.bool) in _MASKS:
                return True
    return False


def _writes_others(module: TracedModule, code: TapeCode) -> bool:
    """True if an operator writes into a storage that the tape gets from another tape."""
    facts = module.facts.nodes
    given = {argument for node in code.nodes for argument in node.all_input_nodes}
    others = (n for n in given - set(code.nodes) if n in facts and n.op != "get_attr")
    theirs = {value.storage for node in others for value in facts[node].values}
    return any(storage in theirs for node in code.nodes for storage in facts[node].writes)
