"""The work of one call of an ATen kernel: its class, element type, FLOPs and bytes.

docs/estimation.md, "The formula", has the rules. Source: torch/utils/flop_counter.py (2.13), but
where a docstring here says why not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from baechi.records.device_kinds import Kernel
from baechi.torch_support.storages import key_of
from baechi.torch_support.tracer_internals import OpOverload

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = Mapping[str, Any]

_DTYPES: Final = {
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
# Kernels by the beginnings of the words of their names, or by two words; the first row that is met
# counts, and `elementwise` is the rest.
_WORDS: Final = (
    ("attention", ("dot_product", "attention")),
    ("convolution", ("conv",)),
    ("recurrent", ("rnn", "lstm", "gru")),
    ("pooling", ("pool", "upsample", "grid_sampler")),
    ("gather", ("embedding", "index", "gather", "scatter", "take", "masked_select", "nonzero")),
    ("normalization", ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")),
    ("transcendental", ("normal", "bernoulli", "rand", "uniform", "exponential", "dropout")),
    ("elementwise", ("logical", "maximum", "minimum")),
    ("reduction", ("norm", "softmax", "sum", "mean", "var", "std", "max", "min", "amax", "amin")),
    ("reduction", ("aminmax", "arg", "prod", "cum", "logsumexp", "nll_loss", "sort", "topk")),
    ("copy", ("copy", "clone", "cat", "stack", "pad", "repeat", "roll", "flip", "slice", "select")),
    ("copy", ("tril", "triu", "contiguous")),
    ("transcendental", ("exp", "log", "tanh", "sigmoid", "silu", "gelu", "erf", "pow", "softplus")),
    ("transcendental", ("sin", "cos", "mish", "elu")),
)
_PRODUCTS: Final = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "mv", "addmv", "dot", "vdot", "addr")
)
# They make storage, or answer a question, and run nothing.
_NOTHING: Final = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)
# They do not read what they overwrite.
_WRITERS: Final = ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random")


def kernel_of(func: OpOverload, args: _Args, kwargs: _Kwargs, result: Any) -> Kernel | None:
    """The work of one call of a kernel, on fake tensors too; `None` where nothing runs."""
    name = func.overloadpacket.__name__
    given, produced = _tensors((*args, *kwargs.values())), _tensors((result,))
    if func.is_view or not produced or name.rstrip("_") in _NOTHING:
        return None
    writes = func._schema.is_mutable
    before = {key_of(tensor.untyped_storage()) for tensor in given}
    if not writes and all(key_of(tensor.untyped_storage()) in before for tensor in produced):
        return None
    op_class = _class_of(name)
    floats = [t.dtype for t in (*given, *produced) if t.is_floating_point() or t.is_complex()]
    dtype = _DTYPES.get(next(iter(floats), produced[0].dtype), "fp32")
    if op_class == "gather":
        nbytes = _gathered_bytes(given, produced, writes)
    else:
        nbytes = _streamed_bytes(name, given, produced, writes)
    return Kernel(op_class, dtype, _flops(func, name, args, kwargs, result), nbytes)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Those of a kernel's arguments, which are values and lists of values alone."""
    rows = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return [leaf for row in rows for leaf in row if isinstance(leaf, torch.Tensor)]


def _class_of(name: str) -> str:
    plain = name.strip("_")
    if plain in _PRODUCTS or name in _PRODUCTS:
        return "matmul"
    for title, words in _WORDS:
        # In `plain` a word begins it or is behind an underscore; two words are anywhere in it.
        if any((word if "_" in word else f"_{word}") in f"_{plain}" for word in words):
            return title
    return "elementwise"


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; a broadcast dimension is stored once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(int(n) for n, stride in sizes if stride or not n) * tensor.element_size()


def _streamed_bytes(
    name: str, given: Sequence[torch.Tensor], produced: Sequence[torch.Tensor], writes: bool
) -> int:
    """Every input and every output once; an output that is an input is read, too, or not."""
    read = list({id(tensor): tensor for tensor in given}.values())  # a square reads its factor once
    if writes and any(word in name for word in _WRITERS):
        read = [tensor for tensor in read if not any(tensor is t for t in produced)]
    return sum(map(_stored_bytes, (*read, *produced)))


def _gathered_bytes(
    given: Sequence[torch.Tensor], produced: Sequence[torch.Tensor], writes: bool
) -> int:
    """Of a gather: the indices, and what it picks, read and written.

    One that adds into a table reads the updates, and reads and writes as many rows of the table;
    where the table is new, it is filled first.
    """
    written = sum(map(_stored_bytes, produced))
    indices = sum(_stored_bytes(t) for t in given if not t.is_floating_point())
    values = [_stored_bytes(t) for t in given if t.is_floating_point()]
    smallest = min(values, default=written)
    if writes:
        return indices + 3 * smallest
    return indices + (2 * written if smallest >= written else written + 3 * smallest)


def _flops(func: OpOverload, name: str, args: _Args, kwargs: _Kwargs, result: Any) -> int:
    for word, formula in _FORMULAS:
        if word in name:
            return formula(name, args, kwargs, _tensors((result,))[0])
    counted: Any = flop_registry.get(func.overloadpacket)
    return int(counted(*args, **kwargs, out_val=result)) if counted is not None else 0


def _convolution_backward_flops(_name: str, args: _Args, kwargs: _Kwargs, *_: Any) -> int:
    """One product of the forward's size for each of input and weight that needs a gradient.

    torch's own formula counts the weight's product once per group too often.
    """
    gradient, data, weight = args[:3]
    transposed = args[7]
    mask = kwargs.get("output_mask", args[-1])
    positions = math.prod(map(int, (data if transposed else gradient).shape[2:]))
    return (
        2 * positions * int(data.shape[0]) * int(weight.numel()) * (bool(mask[0]) + bool(mask[1]))
    )


def _attention_flops(name: str, args: _Args, *_: Any) -> int:
    """Two products of the forward, five of the backward, which computes the scores again."""
    shift, products = (1, 5) if "backward" in name else (0, 2)
    query, key = args[shift], args[shift + 1]
    batch, heads, length, width = (int(n) for n in query.shape)
    return 2 * products * batch * heads * length * int(key.shape[-2]) * width


def _recurrent_flops(name: str, args: _Args, *_: Any) -> int:
    """The products with both weights at every step; twice that backward."""
    data, weights = args[0], args[1:3]
    steps = data.numel() // data.shape[-1]
    products = 2 if "backward" in name else 1
    return 2 * products * int(steps) * sum(int(weight.numel()) for weight in weights)


def _pooling_flops(name: str, args: _Args, _: _Kwargs, first: torch.Tensor) -> int:
    """One operation for every place of every window; of an adaptive window, of the input."""
    shift = 1 if "backward" in name else 0
    pooled = args[0] if shift else first
    window = args[shift + 1] if len(args) > shift + 1 else ()
    if "adaptive" in name or not isinstance(window, list | tuple) or not window:
        return int(max(tensor.numel() for tensor in (*_tensors(args), pooled)))
    sides = list(window) if len(window) > 1 else list(window) * (3 if "3d" in name else 2)
    return int(pooled.numel()) * math.prod(map(int, sides))


# By a word of the kernel's name, before what torch counts.
_FORMULAS: Final = (
    ("convolution_backward", _convolution_backward_flops),
    ("scaled_dot_product", _attention_flops),
    ("rnn_layer", _recurrent_flops),
    ("pool", _pooling_flops),
)
