"""The batch dimension of every value of a traced model, and operators that mix the samples.

A model is traced at a batch and at twice that. The dimension of a value whose size doubles is its
batch dimension. Micro-batches give what the whole batch would where every sample is computed by
itself; so an operator that mixes samples is refused, by its name and line:

    x @ x.T                 a value has the batch in two dimensions
    softmax(x, 0)           it couples along the batch dimension (`_ALONG`)
    x.repeat(2, 1) + y      samples in two orders, [a b a b] and [a a b b] (`_rounds`)
    x - x.mean(0)           a value without the batch is read where the samples are
    x.mean(), a loss        allowed: it feeds numbers alone
    batch norm              allowed: each micro-batch is normalized by itself, which remarks say

Complexity: O(nodes + edges), and a trace.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, final

import torch
from torch import fx, nn

from baechi.errors import InputError, TraceError
from baechi.torch_support.tracer_internals import OpOverload
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import (
    node_arguments,
    nodes_inside,
    op_and_line,
    op_name,
    operator_name,
    target_name,
)
from baechi.tracing.ladder import trace
from baechi.tracing.lowering import TracedModule
from baechi.tracing.model_code import is_torchs
from baechi.tracing.node_facts import Facts
from baechi.tracing.recurrent_layers import RECURRENT

Shape = tuple[int, ...]
_MIXED: Final = -1  # the "dimension" of a value whose shape grows in another way

# Operators that couple along the dimensions that an argument names.
_ALONG: Final = frozenset(
    (
        *("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "cummax"),
        *("cummin", "logcumsumexp", "sort", "argsort", "topk", "kthvalue", "flip", "roll"),
        *("cat", "concat", "gather", "scatter", "scatter_add", "scatter_reduce"),
        *("index_select", "index_add", "index_copy", "index_fill", "glu", "diff", "split"),
        *("split_with_sizes", "chunk", "tensor_split", "unfold", "normalize", "renorm"),
    )
)
# Those that give sizes or types of their first argument on, and no values.
_SHAPES: Final = frozenset(
    (
        *("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like"),
        *("full_like", "empty_like", "sym_size", "size", "dim", "numel", "_shape_as_tensor"),
    )
)
# Those that give the first argument's values on, in the type or the shape of the second.
_LIKE: Final = frozenset(("type_as", "to", "view_as", "reshape_as", "expand_as"))
_RESHAPES: Final = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"),
        *("squeeze", "unsqueeze"),
    )
)
_BATCH_NORMS: Final = frozenset(
    (
        *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update"),
    )
)


_OUTSIDE: Final = "Compute it outside of the model, on the merged outputs of placed(x)"
_BATCHED_EXPERTS: Final = (
    'Call model.set_experts_implementation("batched_mm") before it is placed, with which experts '
    "keep samples apart"
)


@final
class OwnLossError(InputError):
    """A model returns its own loss, of which each micro-batch has one; a step adds them up."""


@final
class NoLossError(InputError):
    """What a step takes for its loss is no scalar: the model returns none, and none was given."""


@final
class _OtherOperatorsError(InputError):
    """A model runs other operators for twice the batch."""


@final
@dataclass(frozen=True)
class BatchDimensions:
    """The batch dimension of what a model returns, in the order of its flat outputs.

    Attributes:
        outputs: None for what is no tensor.
        remarks: Sentences on what is as for each micro-batch, and not as for the batch.
    """

    outputs: tuple[int | None, ...]
    remarks: tuple[str, ...]


def batch_dimensions(
    traced: Traced, call: Call, *, loss: bool, say: Callable[[str], None]
) -> BatchDimensions:
    """The batch dimensions of a trace of a micro-batch, and what it does to samples.

    Args:
        traced: The trace of the call.
        call: The call of one micro-batch.
        loss: Whether the model returns a loss of each micro-batch, and nothing else.
        say: Is told what is done.

    Raises:
        OwnLossError: A call of the model returns its own loss.
        NoLossError: What a step takes for its loss is no scalar.
        InputError: An operator mixes samples, forward writes into an argument, an output has no
            batch dimension, or the model runs other operators for twice the batch.
    """
    say("tracing twice the batch, to find its dimension")
    model = traced.module.model
    # What is alike for one sample and for any number is not told apart by one sample.
    sizes = [t.shape[d] for t, d in zip(call.tensors, call.dims, strict=True) if d is not None]
    times = 1 if min(sizes) > 1 else 2
    first = traced if times == 1 else _grown(model, call, times)
    twice = _grown(model, call, 2 * times)
    try:
        rows = _Rows(first.module, twice.module)
    except _OtherOperatorsError:  # a first call may choose a mode, as BigBird's its attention
        rows = _Rows(_grown(model, call, times).module, twice.module)
    return rows.dimensions(loss=loss)


def _grown(model: nn.Module, call: Call, times: int) -> Traced:
    """The trace of a call with so many times the samples."""
    rows = zip(call.tensors, call.dims, strict=True)
    tensors = [t if dim is None else torch.cat([t.detach()] * times, dim) for t, dim in rows]
    grown = [
        new.requires_grad_(old.requires_grad) if new is not old else new
        for new, old in zip(tensors, call.tensors, strict=True)
    ]
    args, kwargs = call.structure.fill(grown)
    try:
        return trace(model, args, kwargs, may_ask=call.may_ask, of_part=True)
    except TraceError as error:
        raise InputError(
            f"with {times} times the samples of a micro-batch the model does not run, so its batch "
            f"dimension is unknown: {error} Let forward ask its tensors for their sizes; or name "
            'the dimensions, batch={"x": 0}, if an argument is taken for what it is not.'
        ) from None


@final
class _Rows:
    """The nodes of two traces side by side."""

    def __init__(self, one: TracedModule, two: TracedModule) -> None:
        self._one = one
        nodes, others = (
            [each for node in m.graph_module.graph.nodes for each in (*nodes_inside(node), node)]
            for m in (one, two)
        )
        self._dims: dict[fx.Node, tuple[int | None, ...]] = {}  # of the values of each
        for node, other in zip(nodes, others, strict=False):
            if (node.op, target_name(node)) != (other.op, target_name(other)):
                self._refuse_other(node, other)
            shapes = zip(_shapes(node, one.facts), _shapes(other, two.facts), strict=False)
            self._dims[node] = tuple(_dimension(*pair) for pair in shapes)
        if len(nodes) != len(others):
            longer = max(nodes, others, key=len)
            self._refuse_other(longer[min(len(nodes), len(others))], None)
        self._tainted: dict[fx.Node, fx.Node] = {}  # with the node that mixed the samples
        # How often all samples come along the batch dimension, as twice in [a b a b].
        self._rounds: dict[fx.Node, int] = defaultdict(lambda: 1)
        self._remarks: dict[str, None] = {}

    def _refuse_other(self, node: fx.Node, other: fx.Node | None) -> None:
        there = "nothing" if other is None else op_and_line(other)
        raise _OtherOperatorsError(
            "the model runs other operators for twice the batch, so its batch dimension is "
            f"unknown: {op_and_line(node)} where there is {there}. Give microbatches=None, or let "
            "forward not ask for the size of the batch."
        )

    def dimensions(self, *, loss: bool) -> BatchDimensions:
        graph, facts = self._one.graph_module.graph, self._one.facts
        written = facts.written
        for node, name in zip(
            graph.find_nodes(op="placeholder"), self._one.call.names, strict=True
        ):
            if any(value.storage in written for value in facts.nodes[node].values):
                raise InputError(
                    f"forward writes into its argument {name!r}, which micro-batches do not give "
                    "back. Let it write into a copy (x = x.clone())."
                )
        self._check_writes()
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output") and node.users:
                self._visit(node)
        returned: Any = graph.output_node().args[0]
        outputs = [
            self._returned(number, leaf, loss=loss) if isinstance(leaf, fx.Node) else None
            for number, leaf in enumerate(returned)
        ]
        return BatchDimensions(tuple(outputs), tuple(self._remarks))

    def _check_writes(self) -> None:
        """Refuse a write to what the backward of an earlier micro-batch may still read."""
        facts = self._one.facts
        read = {storage for fact in facts.nodes.values() for storage in fact.saved}
        for node, fact in facts.nodes.items():
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                for name in (facts.storages[storage].attribute for storage in fact.writes & read):
                    if name is not None:
                        raise InputError(
                            f"{op_and_line(node)} writes into {name.removeprefix('model.')!r} in "
                            "every micro-batch, and the backward of one before may still read it. "
                            "Let forward write into a copy, or do without; or give "
                            "microbatches=None."
                        )

    def _visit(self, node: fx.Node) -> None:
        """Follow what a node does to the samples."""
        name = operator_name(node)
        read = node.all_input_nodes[: 1 if name in _LIKE else None]
        given = [arg for arg in read if set(self._dims[arg]) - {None}]
        origins = [self._tainted[arg] for arg in read if arg in self._tainted]
        if name in _SHAPES:
            return
        if given and node.target is not operator.getitem:
            self._check(node)
        elif given and not self._is_item(node):
            indices = [index for index in _listed(node.args[1]) if index is not None]
            self._check_index(node, node.args[0], indices)
        dims = self._dims[node]
        if given and node.op != "call_module":
            self._rounds[node] = self._count_rounds(node, name, given)
        if origins:
            self._tainted[node] = origins[0]
            if any(dim is not None for dim in dims):
                self._refuse(origins[0], f"and {op_and_line(node)} reads that for every sample")
        elif given and dims and all(dim is None for dim in dims) and not self._is_item(node):
            self._tainted[node] = node

    def _count_rounds(self, node: fx.Node, name: str, given: Sequence[fx.Node]) -> int:
        """The rounds of all samples in a node's values."""
        found = {self._rounds[arg] for arg in given}
        if len(found) > 1:
            self._refuse(node, "it reads values with the samples in different orders")
        (rounds,) = found
        (dim, *_), (new, *_) = self._dims[given[0]], self._dims[node] or (None,)
        if dim is None or new is None:
            return rounds
        before, after = (_shapes(each, self._one.facts)[0] for each in (given[0], node))
        if name in ("repeat", "tile"):
            arguments = node_arguments(node)
            counts = _listed(arguments.get("repeats", arguments.get("dims", ())))
            return rounds * int([*[1] * len(after), *counts][new - len(after)])
        if name in _RESHAPES:
            rounds, rest = divmod(rounds * prod(before[:dim]), prod(after[:new]))
            if rest:
                self._refuse(node, "it takes samples apart")
        return rounds

    def _is_item(self, node: fx.Node) -> bool:
        """True if it is one of several values, and not `x[...]` of a tensor."""
        if node.target is not operator.getitem:
            return False
        structure = self._one.facts.nodes[node.all_input_nodes[0]].structure
        return structure is None or not structure.spec.is_leaf()

    def _check(self, node: fx.Node) -> None:
        """Refuse an operator that couples the samples."""
        for inner in (node, *nodes_inside(node)):
            if _MIXED in self._dims.get(inner, ()):
                self._refuse(inner, "its result grows with the batch in more than one dimension")
            if inner.op == "call_module":
                self._check_module(inner)
            elif inner.op in ("call_function", "call_method"):
                self._check_operator(inner)

    def _check_module(self, node: fx.Node) -> None:
        leaf = self._one.graph_module.get_submodule(str(node.target))
        for part in leaf.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                if part.training or part.running_mean is None:
                    self._note_norm()
            elif isinstance(part, nn.RNNBase):
                self._check_recurrent(node, part.batch_first)
        if not is_torchs(leaf):
            path = str(node.target).removeprefix("model.")
            self._remarks[
                f"{path} stays whole: whether it mixes the samples of a batch was not looked into"
            ] = None

    def _check_operator(self, node: fx.Node) -> None:
        name = operator_name(node).rstrip("_")
        source = next(iter(node.all_input_nodes), None)
        dims = () if source is None else self._dims.get(source, ())
        dim = next((dim for dim in dims if dim is not None), None)
        if name in _BATCH_NORMS:
            given = node_arguments(node)
            if given.get("training", given.get("train", True)):
                self._note_norm()
            return
        if dim is None or source is None:
            return
        rank = len(_shapes(source, self._one.facts)[0])
        given = node_arguments(node)
        if name in _ALONG:
            names = [each for each in ("dim", "dims", "dimension") if each in given]
            along = given[names[0]] if names else -1 if name in ("topk", "sort") else 0
            if dim in [each % rank for each in _listed(along) if isinstance(each, int)]:
                self._refuse(node, "it couples the samples, along the dimension of the batch")
        elif name in RECURRENT:
            self._check_recurrent(node, bool(given.get("batch_first", False)))
        elif name == "index":
            self._check_index(node, source, _listed(given["indices"]))
        elif why := _taking(name, given, dim, rank):
            self._refuse(node, why)

    def _check_recurrent(self, node: fx.Node, batch_first: bool) -> None:
        source = node.all_input_nodes[0]
        if self._dims[source] and self._dims[source][0] != (0 if batch_first else 1):
            self._refuse(
                node,
                "its time is along the dimension that was taken for the batch; name that of each "
                'argument: batch={"x": 1}',
            )

    def _check_index(self, node: fx.Node, source: Any, indices: Sequence[Any]) -> None:
        """Refuse an index of samples, but that of each sample itself, `x[arange(n), last]`."""
        (dim, *_) = self._dims[source]
        place = 0
        for index in indices:
            if index is Ellipsis:
                place += len(_shapes(source, self._one.facts)[0]) - len(indices) + 1
                continue
            if index is None or isinstance(index, slice | int):
                place += 1
                continue
            if place == dim and not (isinstance(index, fx.Node) and _counts(index)):
                self._refuse(node, "it picks samples by an index")
            place += 1

    def _note_norm(self) -> None:
        self._remarks[
            "batch norm: each micro-batch is normalized by itself, and the running statistics move "
            "once for each, as in a loop"
        ] = None

    def _returned(self, number: int, leaf: fx.Node, *, loss: bool) -> int | None:
        """The batch dimension of an output."""
        shapes = _shapes(leaf, self._one.facts)
        if not shapes:
            raise InputError(
                f"{'the loss of a step' if loss else f'output {number} of the model'} is no tensor "
                f"({op_and_line(leaf)}); return one, without `.item()`."
            )
        shape = shapes[0]
        (dim, *_) = self._dims[leaf]
        if loss:
            if shape:
                raise NoLossError(
                    f"the loss of a step has the shape {list(shape)}; it must be a scalar, such as "
                    "the mean or the sum over the micro-batch. Of a model that returns none, give "
                    "step(..., targets=..., loss=...)."
                )
            return None
        if leaf in self._tainted:
            origin = self._tainted[leaf]
            if not shape:
                raise OwnLossError(
                    f"{op_and_line(leaf)}: the model returns a number made of all samples, such as "
                    "its own loss, and the numbers of micro-batches are not one. Train with "
                    "placed.step(...), which has a loss for each; or call it without labels."
                )
            self._refuse(origin, "and the model returns what is made of that")
        if self._rounds[leaf] != 1:
            self._refuse(leaf, "the model returns the samples in rounds, such as [a b a b]")
        if dim is None or dim == _MIXED:
            raise InputError(
                f"output {number} of the model, {op_and_line(leaf)} of shape {list(shape)}, has no "
                "batch dimension along which micro-batches could be put together. Let forward "
                "return only what has one, or give microbatches=None."
            )
        return dim

    def _refuse(self, node: fx.Node, why: str) -> None:
        raise InputError(
            f"{op_and_line(node)} mixes the samples of a batch: {why}. Micro-batches would change "
            f"the result. {_BATCHED_EXPERTS if self._is_of_experts(node) else _OUTSIDE}; or give "
            "microbatches=None."
        )

    def _is_of_experts(self, node: fx.Node) -> bool:
        """True if it is of experts of transformers, which sort all tokens unless they are told."""
        modules = self._one.model.modules()
        can_change = any(hasattr(module, "set_experts_implementation") for module in modules)
        return can_change and op_name(node).rpartition("/")[0].endswith("experts")


def _shapes(node: fx.Node, facts: Facts) -> list[Shape]:
    """The shapes of a node's tensors; of a node inside of another those that its tracer noted."""
    if node in facts.nodes:
        return [value.shape for value in facts.nodes[node].values]
    value = node.meta.get("val")
    rows = value if isinstance(value, list | tuple) else [value]
    return [tuple(map(int, row.shape)) for row in rows if isinstance(row, torch.Tensor)]


def _dimension(one: Shape, two: Shape) -> int | None:
    """The dimension that doubles; None if none changes."""
    if len(one) != len(two):
        return _MIXED
    grown = [dim for dim, (size, other) in enumerate(zip(one, two, strict=True)) if size != other]
    if not grown:
        return None
    (dim, *others) = grown
    return dim if not others and two[dim] == 2 * one[dim] else _MIXED


def _taking(name: str, given: Mapping[str, Any], dim: int, rank: int) -> str:
    """How an operator takes samples together, `dim` being that of the batch; empty if not."""
    if name == "slice" and given.get("step", 1) != 1 and given.get("dim", 0) % rank == dim:
        return "it takes some of the samples"
    if name == "embedding":
        return "it looks one sample up in another"
    if name.startswith(("conv", "_convolution")) and dim != 0:
        return "it convolves along the dimension of the batch"
    attends = "scaled_dot_product" in name and dim >= rank - 2
    return "one sample attends to others" if attends else ""


def _counts(node: fx.Node) -> bool:
    """True if a node is made of `arange` alone."""
    if operator_name(node) == "arange":
        return True
    given = node.all_input_nodes
    return bool(given) and all(map(_counts, given)) and isinstance(node.target, OpOverload)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
