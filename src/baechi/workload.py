"""What every operator does, from shapes alone: its kernels, their FLOPs and bytes, its scratch.

Each distinct operator runs once on fake tensors, forward and backward, and a dispatch mode sees
every kernel that it would launch. So compositions are taken apart as PyTorch takes them apart, a
backward has as many products as inputs need gradients, and nothing is allocated: a model on the
`meta` device is counted as any other.

The fake tensors say that they are on a CPU, because PyTorch without CUDA aborts on the backward of
those that claim to be on a GPU. Where the two choose different kernels (attention with dropout, a
recurrent layer), the CPU's are counted.

FLOPs: 2 m n k of a product, through `torch.utils.flop_counter` where it knows the kernel. Bytes:
every input and output once; of a broadcast input what is stored; of a gather what it picks; nothing
for a view.

Complexity: O(distinct operators), some milliseconds each.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from baechi.efficiency import Kernel
from baechi.errors import InputError
from baechi.extraction import extract, opaque_leaves
from baechi.lowering import TracedModule
from baechi.metering import Meter
from baechi.partition import attribute
from baechi.propagation import Value, quiet
from baechi.traced import Traced

UNSEEN: Final = "shapes alone do not run it: counted as reading and writing its tensors once"

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


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """What one operator does.

    Attributes:
        forward: Its kernels, in order.
        backward: Those of its backward.
        workspace_bytes: Scratch of its forward, as far as the dispatcher sees it.
        backward_workspace_bytes: The same of its backward.
        remark: What a reader should know of these; empty for most.
    """

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    remark: str = ""


def workloads(traced: Traced) -> dict[str, Workload]:
    """What every distinct operator of a traced model does, by `TracedOp.key`.

    Raises:
        InputError: The traced model was loaded from a file.
    """
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no shapes to compute "
            "from; trace the model again in this process (on the meta device it needs no memory)."
        )
    module: TracedModule = traced.module
    rows: dict[str, Workload] = {}
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for op, nodes in zip(traced.ops, module.nodes, strict=True):
            if op.key in rows:
                continue
            if all(node.op in ("get_attr", "placeholder") for node in nodes):
                rows[op.key] = Workload()
                continue
            try:
                rows[op.key] = _count(module, nodes)
            except Exception:  # whatever a fake tensor cannot do, such as tell its value
                rows[op.key] = _unseen(module, nodes, op.differentiable)
    return rows


def _count(module: TracedModule, nodes: Sequence[fx.Node]) -> Workload:
    """One operator, run on fake tensors."""
    inside = set(nodes)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    outputs = [n for n in outputs or nodes if n.op not in ("get_attr", "placeholder")]
    leaves = opaque_leaves(module.graph_module, nodes)
    fakes: dict[str, torch.nn.Module] = {t: _Leaf(leaf) for t, leaf in leaves.items()}
    cpu = torch.device("cpu")
    part = extract(module.graph_module, nodes, outputs, device=cpu, leaves=fakes)
    inputs = [_fake(module, node) for node in part.inputs]
    tensors = [*_tensors(inputs), *(p for leaf in fakes.values() for p in leaf.parameters())]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    # Autograd forbids in-place writes to a leaf, so an operator that writes gets copies.
    written = {s for node in nodes for s in module.facts.nodes[node].writes}
    inputs = [
        pytree.tree_map_only(torch.Tensor, torch.clone, value)
        if any(v.storage in written and v.requires_grad for v in module.facts.nodes[node].values)
        else value
        for node, value in zip(part.inputs, inputs, strict=True)
    ]
    with _Kernels() as forward:
        produced = _tensors(part.function(*inputs))
    scratch_bytes = forward.scratch_bytes  # now, while autograd keeps what it saved
    roots = [tensor for tensor in produced if tensor.requires_grad]
    if not roots or not differentiable:
        return Workload(tuple(forward.kernels), workspace_bytes=scratch_bytes)
    seeds = [torch.ones_like(root) for root in roots]
    with _Kernels() as backward:
        gradients = torch.autograd.grad(roots, differentiable, seeds, allow_unused=True)
    backward_bytes = backward.scratch_bytes
    del gradients
    kernels = (tuple(forward.kernels), tuple(backward.kernels))
    return Workload(*kernels, scratch_bytes, backward_bytes)


def _unseen(module: TracedModule, nodes: Sequence[fx.Node], differentiable: bool) -> Workload:
    """One operator that fake tensors cannot run, as a copy of all that it touches."""
    facts = module.facts
    inside = set(nodes)
    touched = {
        value
        for node in nodes
        for value in (
            *facts.nodes[node].values,
            *(v for a in node.all_input_nodes if a not in inside for v in facts.nodes[a].values),
        )
    }
    storages = {value.storage for value in touched}
    nbytes = sum(facts.storages[storage].nbytes for storage in storages)
    for leaf in opaque_leaves(module.graph_module, nodes).values():
        nbytes += sum(t.numel() * t.element_size() for t in (*leaf.parameters(), *leaf.buffers()))
    kernel = Kernel("copy", "fp32", 0, nbytes)
    backward = (Kernel("copy", "fp32", 0, 2 * nbytes),) if differentiable else ()
    return Workload((kernel,), backward, remark=UNSEEN)


@final
class _Leaf(torch.nn.Module):
    """An opaque leaf on fake parameters and buffers."""

    def __init__(self, leaf: torch.nn.Module) -> None:
        super().__init__()
        state: dict[str, torch.Tensor] = {}
        for name, parameter in leaf.named_parameters():
            fake = torch.empty_like(parameter, device="cpu")
            own = torch.nn.Parameter(fake, parameter.requires_grad)
            self.register_parameter(name.replace(".", "/"), own)
            state[name] = own
        for name, buffer in leaf.named_buffers():
            state[name] = torch.empty_like(buffer, device="cpu")
        # A closure, because a module as an attribute would be a submodule with parameters.
        self._run = lambda args, kwargs: torch.func.functional_call(leaf, state, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the leaf does."""
        return self._run(args, kwargs)


def _fake(module: TracedModule, node: fx.Node) -> Any:
    """A value without memory for a node that an operator reads."""
    facts = module.facts.nodes[node]
    if not facts.values:
        return attribute(module.graph_module, str(node.target))
    assert facts.structure is not None
    return facts.structure.fill([_empty(value) for value in facts.values])


def _empty(value: Value) -> torch.Tensor:
    stride = value.stride or None
    if stride is None:
        tensor = torch.empty(value.shape, dtype=value.dtype)
    else:
        tensor = torch.empty_strided(value.shape, stride, dtype=value.dtype)
    return tensor.requires_grad_(value.requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@final
class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every kernel that runs inside, and counts the scratch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self._meter = Meter([0])

    @property
    def scratch_bytes(self) -> int:
        """What was live inside at its fullest, beyond what is live now."""
        return max(self._meter.peak_bytes[0] - self._meter.live_bytes[0], 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        produced = _tensors(result)
        for tensor in produced:
            self._meter.hold(0, tensor)
        if isinstance(func, torch._ops.OpOverload) and not func.is_view:
            name = func._overloadpacket.__name__
            if produced and name.rstrip("_") not in _NOTHING:
                given = _tensors((args, kwargs))
                kernel = _kernel(func, name, args, kwargs or {}, given, produced, result)
                if kernel is not None:
                    self.kernels.append(kernel)
        return result


def _kernel(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    given: list[torch.Tensor],
    produced: list[torch.Tensor],
    result: Any,
) -> Kernel | None:
    """What one call of a kernel does; nothing where it gives out what it got, as an alias."""
    mutable = func._schema.is_mutable
    before = {id(tensor.untyped_storage()) for tensor in given}
    if not mutable and all(id(tensor.untyped_storage()) in before for tensor in produced):
        return None
    op_class = _class_of(name)
    floats = [t.dtype for t in (*given, *produced) if t.is_floating_point() or t.is_complex()]
    dtype = next(iter(floats), produced[0].dtype)
    flops = _flops(func, name, args, kwargs, result)
    written = sum(map(_stored_bytes, produced))
    read = [tensor for tensor in given if not (mutable and tensor is produced[0])]
    if op_class == "gather":
        nbytes = _gathered_bytes(read, written, mutable)
    else:
        nbytes = written + sum(map(_stored_bytes, _distinct(read)))
        if mutable and not any(word in name for word in _WRITERS):
            nbytes += _stored_bytes(produced[0])
    return Kernel(op_class, _DTYPES.get(dtype, "fp32"), flops, nbytes)


def _class_of(name: str) -> str:
    plain = name.strip("_")
    if plain in _PRODUCTS or name in _PRODUCTS:
        return "matmul"
    parts = plain.split("_")
    for title, words in _WORDS:
        if any(word in plain if "_" in word else _begins(parts, word) for word in words):
            return title
    return "elementwise"


def _begins(parts: Sequence[str], word: str) -> bool:
    return any(part.startswith(word) for part in parts)


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; a broadcast dimension is stored once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(int(n) for n, stride in sizes if stride or not n) * tensor.element_size()


def _distinct(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each tensor object once: a square reads its factor once."""
    return iter({id(tensor): tensor for tensor in tensors}.values())


def _gathered_bytes(read: Sequence[torch.Tensor], written: int, mutable: bool) -> int:
    """Of a gather: the indices, and what it picks, read and written.

    One that adds into a table reads the updates, and reads and writes as many rows of the table;
    where the table is new, it is filled first.
    """
    indices = sum(_stored_bytes(t) for t in read if not t.is_floating_point())
    values = [_stored_bytes(t) for t in read if t.is_floating_point()]
    if mutable:
        return indices + 3 * min(values, default=written)
    smallest = min(values, default=written)
    return indices + (2 * written if smallest >= written else written + 3 * smallest)


def _flops(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> int:
    if "convolution_backward" in name:
        return _convolution_backward_flops(*args, **kwargs)
    if "scaled_dot_product" in name:
        return _attention_flops(name, args)
    if "rnn_layer" in name:
        return _recurrent_flops(name, args)
    counted = flop_registry.get(func._overloadpacket)
    if counted is not None:
        return int(counted(*args, **kwargs, out_val=result))
    if name in ("mv", "addmv", "dot", "vdot"):
        return 2 * max(t.numel() for t in _tensors(args))
    return 0


def _convolution_backward_flops(*args: Any, **kwargs: Any) -> int:
    """One product of the forward's size for each of input and weight that needs a gradient.

    torch's own formula counts the weight's product once per group too often.
    """
    gradient, data, weight = args[:3]
    transposed = args[7]
    mask = kwargs.get("output_mask", args[-1])
    positions = math.prod((data if transposed else gradient).shape[2:]) * data.shape[0]
    return 2 * int(positions) * weight.numel() * (bool(mask[0]) + bool(mask[1]))


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    """Two products of the forward, five of the backward, which computes the scores again.

    A causal mask halves what fused kernels do, and is not always visible; it is not counted.
    """
    shift, products = (1, 5) if "backward" in name else (0, 2)
    query, key = args[shift], args[shift + 1]
    batch, heads, length, width = (int(n) for n in query.shape)
    return 2 * products * batch * heads * length * int(key.shape[-2]) * width


def _recurrent_flops(name: str, args: tuple[Any, ...]) -> int:
    """The products with both weights at every step; twice that backward."""
    data, weights = args[0], args[1:3]
    steps = data.numel() // data.shape[-1]
    products = 2 if "backward" in name else 1
    return 2 * products * int(steps) * sum(int(weight.numel()) for weight in weights)
