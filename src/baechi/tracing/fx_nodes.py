"""Nodes of traced graphs: names, arguments by name, the model's own lines, and rewrites.

Nodes without effect (`without_effectless`) are checks of shapes and types, and conversions with
nothing to convert, such as casts to the type that is there. Such a node separates one reader of a
tensor from the others: autograd would sum the gradients in another order than the model's, and so
round differently.

Values that one operator reads twice (`read_once`), as `x * x` and `stack([x, x])` do: autograd adds
each of the two gradients by itself to those of the value's other readers. A reader on another tape
gives back one gradient for each tensor that it reads, the sum of both. So where a value has another
reader, each further reading of an operator is of an alias of its own. That is done for operators
that are one node of autograd's graph, whose gradients come in the order of its arguments. For
attention and `einsum`, which are many nodes, and others `gradient_order` sees to it.
"""

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
from torch import fx

from baechi.torch_support.storages import key_of
from baechi.torch_support.symbolic_sizes import SYMBOLIC
from baechi.torch_support.tracer_internals import OpOverload
from baechi.tracing.modes import Under

# Beginnings of lines of a stack, in torch and in what watches it here.
_IN_TORCH: Final = f'File "{Path(torch.__file__).parent}'
_OURS: Final = f'File "{Path(__file__).parents[1]}'


def operator_of(node: fx.Node) -> Any:
    """What a node runs, in whichever modes."""
    return node.target.operator if isinstance(node.target, Under) else node.target


def operator_name(node: fx.Node) -> str:
    """`embedding` for `aten.embedding.default`, `torch.nn.functional.embedding`, `.embedding`."""
    target = operator_of(node)
    if isinstance(target, OpOverload):
        return target._schema.name.partition("::")[2]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def target_name(node: fx.Node) -> str:
    """What a node runs; a function by its name, since its text would have its address."""
    if isinstance(node.target, FunctionType | BuiltinFunctionType):
        return f"{node.target.__module__}.{node.target.__qualname__}"
    return str(node.target)


def nodes_inside(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graphs that a node runs, such as the branches of `torch.cond`, in order."""
    for given in node.all_input_nodes:
        owner = given.graph.owning_module
        if given.op == "get_attr" and owner is not None:
            value = attrgetter(str(given.target))(owner)
            for inner in value.graph.nodes if isinstance(value, fx.GraphModule) else ():
                yield inner
                yield from nodes_inside(inner)


def node_arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, in the operator's order, defaults included.

    Where names are unknown, as of a method's arguments, positions replace them.
    """
    target = operator_of(node)
    if isinstance(target, OpOverload):
        return schema_arguments(target, node.args, node.kwargs)
    owner = node.graph.owning_module
    assert owner is not None  # a traced graph belongs to its module
    try:
        normalized = node.normalized_arguments(owner, None, None, True)
    except RuntimeError:  # several schemas fit, of `torch.tanh` for one
        normalized = None
    if normalized is not None:
        return dict(normalized.kwargs)
    return {**{str(place): value for place, value in enumerate(node.args)}, **node.kwargs}


def schema_arguments(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, in the schema's order, defaults included."""
    schema = target._schema.arguments
    given = {**dict(zip([row.name for row in schema], args, strict=False)), **kwargs}
    return {row.name: given.get(row.name, row.default_value) for row in schema}


def op_name(node: fx.Node) -> str:
    """`h.0.mlp.c_fc/addmm_2`: the owning submodule's path and the node."""
    if node.op == "placeholder":
        return f"input:{node.name}"
    if node.op == "get_attr":
        return f"state:{_own_path(str(node.target))}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = _own_path(str(stack[-1][0])) if stack else ""
    return f"{path}/{node.name}" if path else node.name


def _own_path(path: str) -> str:
    """A path in the user's model, without the flat module around it."""
    path = path.removeprefix("L['self'].")
    return "" if path == "model" else path.removeprefix("model.")


def op_and_line(node: fx.Node) -> str:
    """The operator's name with its source line, if known."""
    source = source_line(node)
    return f"{op_name(node)} ({source})" if source else op_name(node)


def source_line(node: fx.Node) -> str:
    """`modeling_gpt2.py:680 in forward: hidden_states = ...`, from the tracer's own record.

    The innermost line that is neither torch's own, such as that of a layer in `torch.nn`, nor ours.
    """
    lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
    rows = [(i, line.strip()) for i, line in enumerate(lines)]
    rows = [row for row in rows if row[1].startswith('File "') and not row[1].startswith(_OURS)]
    rows = [row for row in rows if not row[1].startswith(_IN_TORCH)] or rows
    places = [i for i, _ in rows]
    if not places:
        return ""
    place = lines[places[-1]].strip()
    file, line, function = [*place.split(", ", 2), "", ""][:3]
    name = Path(file[6:].strip('"')).name
    code = lines[places[-1] + 1].strip() if places[-1] + 1 < len(lines) else ""
    return f"{name}:{line.removeprefix('line ')} {function}: {code}"


_CHECKS: Final = ("_guards_fn", "aten._assert_tensor_metadata.default")
# Operators of ATen that return the very tensor that they get where there is nothing to convert.
_CONVERSIONS: Final = frozenset(
    {"to", "type_as", "flatten", "sum_to_size", "to_dense", "real", "conj", "conj_physical"}
    | {"resolve_conj", "resolve_neg", "positive", "atleast_1d", "atleast_2d", "atleast_3d"}
)
_DROPOUTS: Final = tuple(
    f"aten.{kind}dropout{own}.default" for kind in ("", "feature_", "alpha_") for own in ("", "_")
)
_KNOWN: Final = ("aten.", "<built-in function")  # the beginnings of names of known functions


def without_effectless(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: the same values from fewer nodes."""
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        for node in list(part.graph.nodes):
            if str(node.target) in _CHECKS:
                part.graph.erase_node(node)
            elif _converts_nothing(node) or _drops_nothing(node):
                node.replace_all_uses_with(node.all_input_nodes[0])
                part.graph.erase_node(node)
        for node in reversed(part.graph.nodes):
            # What is not read fixes no sizes, as `mask.sum() == mask.numel()` would.
            known = str(node.target).startswith(_KNOWN)
            idle = not node.users and not node.is_impure() and not silently_written(node)
            if idle and (known or _is_sparse(part, node)):
                part.graph.erase_node(node)
        part.recompile()
    return module


def _is_sparse(module: fx.GraphModule, node: fx.Node) -> bool:
    """True if it is a sparse buffer, which has no storage to follow (openai-whisper has one)."""
    tensor = attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    return isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided


def _converts_nothing(node: fx.Node) -> bool:
    """Whether it is a conversion that returns the very tensor that it gets.

    Readers of either are readers of one tensor, to which autograd adds up gradients one by one.
    """
    if not str(node.target).startswith("aten.") or operator_name(node) not in _CONVERSIONS:
        return False
    source = node.all_input_nodes[0]
    given, made = source.meta.get("val"), node.meta.get("val")
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    same = all(getattr(given, name) == getattr(made, name) for name in ("layout", "dtype", "ndim"))
    return (
        same and given.layout is torch.strided and memory_in_trace(source) == memory_in_trace(node)
    )


def _drops_nothing(node: fx.Node) -> bool:
    """Whether it is a dropout that returns the very tensor that it gets, as ATen's then does."""
    if str(node.target) not in _DROPOUTS:
        return False
    given = node_arguments(node)
    return given["p"] == 0 or not given["train"]


# Schemas that omit the writes of running statistics.
_NORMALIZATIONS: Final = ("batch_norm", "instance_norm")


def silently_written(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a normalization writes without raising a version counter."""
    if not any(name in str(node.target) for name in _NORMALIZATIONS):
        return []
    given = node_arguments(node)
    moved = given.get("training") or given.get("use_input_stats")
    rows = [given.get(name) for name in ("running_mean", "running_var") if moved]
    return [row for row in rows if isinstance(row, fx.Node)]


# Operators whose results lie in memory in the same way on every device.
SAME_LAYOUT: Final = frozenset(
    ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "embedding", "layer_norm", "contiguous")
)


def without_layouts(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: it runs where kernels lay out their results in another way.

    `x.contiguous()` leaves no node where x was contiguous in the trace, which depends on the kernel
    that made x (pytorch/pytorch#186381). There `view` becomes `reshape`: the same view where there
    can be one. What is written to later stays a view: a write into a copy would be lost.
    Where the recorded `contiguous` matters otherwise (`workarounds.contiguous`), it stays.
    """
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        changed: set[int | None] = set()  # memory, by later nodes
        for node in reversed(part.graph.nodes):
            changed.update(map(memory_in_trace, written_into(node)))
            if node.target is _ATEN.contiguous.default:
                (given,) = node.all_input_nodes
                kept = memory_in_trace(node) in changed or _needs_strides(node)
                if memory_in_trace(node) == memory_in_trace(given) and not kept:
                    node.replace_all_uses_with(given)
                    part.graph.erase_node(node)
        makers = _makers(part.graph)
        written: set[fx.Node] = set()
        for node in reversed(part.graph.nodes):
            maker = makers[node]
            if node.target is _ATEN.view.default and maker not in written:
                given = maker.op == "get_attr" or (maker.op == "placeholder" and part is module)
                if not given and operator_name(maker) not in SAME_LAYOUT:
                    node.target = _ATEN.reshape.default
            written.update(makers[target] for target in written_into(node))
        part.recompile()
    return module


def chosen_by_values(node: fx.Node) -> bool:
    """True if values of tensors decide a number, or sizes, of what a node yields, as of a mask."""
    return bool(node.meta.get("unbacked_bindings"))


def may_be_views(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that give a view or a copy, as a kernel's layout has it, of what is written later.

    Complexity: O(writes * nodes).
    """
    makers, written = _makers(graph), set[fx.Node]()
    found = set()
    for node in reversed(graph.nodes):
        if node is not makers[node] and makers[node] in written:
            found.add(node)
        written.update(makers[target] for target in written_into(node) if layout_maker(target))
    return found


# Parts of the names of operators whose kernels lay out results each in its own way.
_CHOOSING: Final = ("conv", "norm", "attention", "pool", "upsample", "lstm", "gru", "rnn", "linalg")


def layout_maker(node: fx.Node) -> fx.Node | None:
    """The operator whose kernel chooses the strides of a value; None if each gives the same."""
    todo, seen = [node], {node}
    while todo:
        node = todo.pop()
        name = operator_name(node)
        number = isinstance(node.meta.get("val"), SYMBOLIC)  # such as a symbolic size
        if node.op != "call_function" or name in SAME_LAYOUT or number:
            continue
        known = node.target is operator.getitem or str(node.target).startswith("aten.")
        if not known or any(part in name for part in _CHOOSING):
            return node
        todo += {*node.all_input_nodes} - seen
        seen.update(todo)
    return None


def _makers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """By node the one that makes the memory of its value."""
    makers: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        makers[node] = makers[node.all_input_nodes[0]] if _is_view(node) else node
    return makers


def written_into(node: fx.Node) -> list[fx.Node]:
    """What an operator writes into, by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    rows = zip(node.target._schema.arguments, node.args, strict=False)
    targets = [value for row, value in rows if row.alias_info and row.alias_info.is_write]
    return [value for value in _flat(targets) if isinstance(value, fx.Node)]


# Beginnings of operators that read memory itself, by strides that are given or have to be so.
_BY_STRIDES: Final = ("aten.as_strided", "aten.view_as_complex", "aten.view.dtype")


def memory_in_trace(node: fx.Node) -> int | None:
    """What names the memory of a node's value in a trace; None if it is no tensor."""
    value = node.meta.get("val")
    return key_of(value.untyped_storage()) if isinstance(value, torch.Tensor) else None


def _needs_strides(node: fx.Node) -> bool:
    """True if more than the values of a node is read, of it or of views of it.

    Code of which nothing is seen, as a kernel of one's own, and the caller may rely on strides.
    """

    def needs(user: fx.Node) -> bool:
        known = user.target is operator.getitem or str(user.target).startswith("aten.")
        if not known or str(user.target).startswith(_BY_STRIDES):
            return True
        return _is_view(user) and _needs_strides(user)

    return any(map(needs, node.users))


def _is_view(node: fx.Node) -> bool:
    """True if a node gives a view of its first argument, or an item of it."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    returns = node.target._schema.returns
    return bool(returns and returns[0].alias_info is not None and node.all_input_nodes)


END: Final = sys.maxsize  # of a slice without one
_ATEN: Final = torch.ops.aten
_INDEXING: Final = frozenset(
    {_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.unsqueeze.default, _ATEN.index.Tensor}
)


def without_whole_slices(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: `x[:]` is an alias of x, as where sizes are no symbols.

    torch takes a slice that it knows to be whole for the tensor itself, and gives an alias where
    nothing else is in the brackets (torch/csrc/autograd/python_variable_indexing.cpp).
    """
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        for node in part.graph.find_nodes(op="call_function", target=_ATEN.slice.Tensor):
            given = node_arguments(node)
            if given["start"] not in (0, None) or given["end"] != END or given["step"] != 1:
                continue
            source = node.args[0]
            if any(_of_one_index(node, user) for user in node.users) or _of_one_index(source, node):
                node.replace_all_uses_with(source)
                part.graph.erase_node(node)
            else:
                node.target, node.args = _ATEN.alias.default, (source,)
        part.recompile()
    return module


def _of_one_index(source: fx.Node, node: fx.Node) -> bool:
    """True if both come from one expression `x[..., ...]`."""
    indexing = source.target in _INDEXING and node.target in _INDEXING
    return indexing and source.meta.get("stack_trace") == node.meta.get("stack_trace")


_PYTHONS: Final = frozenset({operator.add, operator.sub, operator.mul, operator.truediv})
_TORCHS: Final = frozenset({torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.stack})
_JOINS: Final = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})


def read_once(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: such operators read aliases beside the value itself.

    Its code is that of before until it is generated.
    """
    for node in list(module.graph.nodes):
        for value in node.all_input_nodes if is_one_node(node) else ():
            n = sum(given is value for given in _flat(node.args))
            is_tensor = isinstance(value.meta.get("val", value), torch.Tensor | fx.Node)
            if n > 1 and len(value.users) > 1 and value.op != "get_attr" and is_tensor:
                _read_aliases(node, value, n)
    return module


def _read_aliases(node: fx.Node, value: fx.Node, n: int) -> None:
    """Let a node read a value once, and aliases of it in the n - 1 places after the first.

    Autograd goes backward over the latest alias first, so that is the second place's.
    """
    aliases: list[fx.Node] = []
    with node.graph.inserting_before(node):
        for _ in range(n - 1):
            alias = node.graph.call_function(torch.ops.aten.alias.default, (value,))
            alias.meta = {**node.meta, "val": value.meta.get("val")}
            aliases.append(alias)
    readings = iter([value, *reversed(aliases)])
    node.args = fx.node.map_arg(node.args, lambda one: next(readings) if one is value else one)


def reads_again(node: fx.Node) -> bool:
    """True if an operator reads a value twice, under one name."""
    read = [given for given in _flat(node.args) if isinstance(given, fx.Node)]
    return len(read) > len(set(read))


def _flat(args: Any) -> list[Any]:
    return [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else (arg,))]


def is_one_node(node: fx.Node) -> bool:
    """True if an operator is one node of autograd's graph, which returns gradients in order."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        pointwise = torch.Tag.pointwise in target.tags and not target._schema.is_mutable
        return pointwise or target in _JOINS
    return target in _PYTHONS or target in _TORCHS
