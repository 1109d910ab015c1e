"""A run of a flat fx graph that writes down what each node does to memory and autograd.

A node that does what an earlier one did is not run again: its facts are those, with storages of its
own. So of equal layers the first is run; unless a write may change what was noted of a value.

Nodes that yield one and the same tensor become one, since autograd adds up the gradients of all its
readers: `x.float()` that is `x`, or `result[0]` and `result.last_hidden_state`.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from baechi.torch_support.autograd_graphs import gradients_sent
from baechi.torch_support.storages import key_of
from baechi.torch_support.symbolic_sizes import SYMBOLIC, has_symbols, term_of
from baechi.torch_support.torch_internals import version_of
from baechi.torch_support.tracer_internals import (
    OpOverload,
    TorchDispatchMode,
    decomposed_in_cpp,
    enable_python_dispatcher,
    is_composite,
    suggest_memory_format,
)
from baechi.tracing.fx_nodes import (
    chosen_by_values,
    may_be_views,
    node_arguments,
    nodes_inside,
    reads_again,
    schema_arguments,
    silently_written,
)
from baechi.tracing.model_code import is_torchs
from baechi.tracing.node_facts import Facts, NodeFacts, Storage, Value
from baechi.tracing.observers import Observer
from baechi.tracing.pytrees import Parts, tensors_in
from baechi.tracing.recurrent_layers import is_recurrent, kept_of
from baechi.tracing.truth_values import CHECK
from baechi.tracing.whole_parts import SIZES
from baechi.tracing.workarounds import (
    called_with,
    resized_by_symbols,
)

# A recurrent or attention kernel draws only where its dropout is positive and it is in training.
_PROBABILITIES = ("p", "dropout", "dropout_p")
_SWITCHES = ("train", "training")
# The mean or sum that they return has the memory of what they add up. Fake tensors do not show it
# (torch 2.13; `test_a_reduced_loss_holds_the_memory_of_what_it_adds_up` fails when it is mended).
_SHRUNK: Final = {
    *(torch.ops.aten.mse_loss, torch.ops.aten.smooth_l1_loss),
    *(torch.ops.aten.binary_cross_entropy, torch.ops.aten.soft_margin_loss),
}


# Their C++ kernels know sizes as ints alone (torch/_meta_registrations.py, 2.13), and Python's do
# not; others keep those of C++, since in Python `dropout`, for one, copies what it passes on.
_INTS_ALONE: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        *("pad", "constant_pad_nd", "rot90", "as_strided_scatter", "baddbmm", "masked_scatter"),
        *("linalg_solve_triangular", "im2col", "col2im", "polar"),
        *(() if torch.__version__ >= "2.13" else ("matmul", "linear")),
    )
)


# Operators whose decompositions in C++ fail on fake tensors of symbolic sizes (2.13).
_EQUIVALENT: Final = {
    "aten._is_all_true.default": torch.ops.aten.all.default,
    "aten._is_any_true.default": torch.ops.aten.any.default,
}


@final
class EffectRecorder(fx.Interpreter):
    """Runs a graph and writes down what each node does.

    Args:
        module: The graph.
        stand_in: Gives for a tensor the one to run on, always the same.
        once: Whether of nodes that do the same one is run: on fake tensors alone, and where what is
            noted of a value stays so.
        example: What submodules that stay whole did in a run of the example; else they are run.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        stand_in: Callable[[torch.Tensor], torch.Tensor],
        once: bool = False,
        example: Facts | None = None,
    ) -> None:
        # Values must live to the end: a storage's address is its name while it lives.
        super().__init__(module, garbage_collect_values=False)
        self._stand_in = stand_in
        self._facts = Facts()
        self._storage_of: dict[int, int] = {}
        self._alive: dict[int, torch.Tensor] = {}  # by storage
        self._once = once
        self._example = example
        self._may_view = may_be_views(module.graph)
        self._forms: dict[fx.Node, _Form] = {}
        self._ran: dict[Any, tuple[fx.Node, range]] = {}  # by what it does; the storages it made
        self._unmade: set[fx.Node] = set()  # those that were not run
        self._saved: list[int] = []
        self._current: fx.Node | None = None

    def record(self, inputs: Sequence[torch.Tensor]) -> Facts:
        """What each node does, run on stand-ins for inputs like these."""
        stand_ins = [self._stand_in(tensor) for tensor in inputs]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda saved: saved)
        try:
            with torch.enable_grad(), hooks:
                self.run(*stand_ins, enable_io_processing=False)
                self._note_gradients_written()
                self._merge_same()
        finally:  # autograd holds the hook and so this; what this held no collector would find
            self.env.clear()
            self._alive.clear()
        return self._facts

    def _note_gradients_written(self) -> None:
        """Note which values need a gradient because of what was written into them since."""
        for node, facts in self._facts.nodes.items():
            changed = any(value.storage in self._facts.written for value in facts.values)
            if changed and node.op == "call_function" and node in self.env:
                parts = Parts()
                parts.structure(self.env[node])
                values = tuple(
                    replace(value, requires_grad=tensor.requires_grad)
                    for value, tensor in zip(facts.values, parts.tensors, strict=True)
                )
                self._facts.nodes[node] = replace(facts, values=values)

    def _merge_same(self) -> None:
        """Let the first of the nodes that yield one and the same tensor stand for the others."""
        first: dict[int, fx.Node] = {}
        for node, facts in list(self._facts.nodes.items()):
            value = self.env.get(node)
            written = any(row.storage in self._facts.written for row in facts.values)
            if written or not isinstance(value, torch.Tensor):
                continue
            known = first.setdefault(id(value), node)
            if known is not node and not facts.acts and self._is_torchs(node):
                node.replace_all_uses_with(known)
                node.graph.erase_node(node)
                del self._facts.nodes[node]

    def _is_torchs(self, node: fx.Node) -> bool:
        """True if a node calls what is torch's own, which does the same in every call."""
        if node.op == "call_module":
            return is_torchs(self.fetch_attr(str(node.target)))
        return node.op in ("call_function", "call_method")

    def _on_save(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Note what autograd keeps; an operator saves its result before it yields it.

        Autograd gets it without its graph, which would hold itself for ever; or nothing, of an
        operator inside which no backward runs.
        """
        self._saved.append(self._storage(tensor, self._current))
        plain = self._current is not None and isinstance(self._current.target, OpOverload)
        return None if plain else tensor.detach()

    def _storage(
        self, tensor: torch.Tensor, node: fx.Node | None = None, attribute: str | None = None
    ) -> int:
        storage = tensor.untyped_storage()
        key = key_of(storage)
        index = self._storage_of.get(key)
        if index is None:
            index = self._storage_of[key] = len(self._facts.storages)
            self._facts.storages.append(Storage(storage.nbytes(), node, attribute))
            self._alive[index] = tensor
        return index

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, or do as an equal one did, and note what it does."""
        if n.op == "output":
            return None
        key = self._key(n)
        if key in self._ran:
            return self._repeat(n, *self._ran[key])
        if self._example is not None and n.op == "call_module":
            return self._as_before(n, self._example)
        for argument in self._unmade.intersection(n.all_input_nodes):
            self.env[argument] = self._made(argument)
        self._saved, self._current, known = [], n, len(self._facts.storages)
        before = [
            (t, version_of(t)) for arg in n.all_input_nodes for t in tensors_in(self.env[arg])
        ]
        plain = isinstance(n.target, OpOverload)
        single = plain and not is_composite(n.target) and not reads_again(n)
        ends = {} if single else self._ends(n)
        drawing = _Drawing()
        ints = any(str(each.target) in _INTS_ALONE for each in (n, *nodes_inside(n)))
        symbolic = enable_python_dispatcher() if ints else nullcontext()
        with nullcontext() if plain else drawing, symbolic:
            result = super().run_node(n)
        written = {self._storage(t) for t, version in before if version_of(t) != version}
        written |= {self._storage(t) for t in self._silently_written(n)}
        if n in self._may_view:
            self._join(n, result)
        parts = Parts()
        structure = parts.structure(result)
        values = tuple(self._value(tensor, n) for tensor in parts.tensors)
        packet = getattr(n.target, "overloadpacket", None)
        # `col2im` begins with memory like that of what it reads, too (Col2Im.cpp, Col2Im.cu).
        if packet is torch.ops.aten.col2im or (packet in _SHRUNK and values[0].shape == ()):
            read, own = self.env[n.all_input_nodes[0]], self._facts.storages[values[0].storage]
            sizes = own.nbytes, read.numel() * read.element_size()
            own.nbytes = torch.sym_max(*sizes)  # type: ignore[no-untyped-call]
        saved = tuple(dict.fromkeys([*self._saved, *self._held_by(parts.tensors)]))
        inner = [n, *nodes_inside(n)]
        random = _draws(n.target, node_arguments(n)) if plain else drawing.drew
        checks = any(str(node.target).startswith((CHECK, SIZES)) for node in inner)
        looks = any(isinstance(node.target, Observer) for node in inner)
        counts = gradients_sent(parts.tensors, ends.values()) if ends else []
        several = tuple(i for i, count in zip(ends, counts, strict=True) if count > 1)
        self._facts.nodes[n] = NodeFacts(
            values, structure, frozenset(written), saved, random, checks, looks, several
        )
        alone = isinstance(result, torch.Tensor)
        rows = parts.tensors if alone else result
        if self._once and type(rows) in (list, tuple) and all(map(_is_plain, rows)):
            places = tuple((row.storage_offset(), row.device) for row in rows)
            self._forms[n] = alone, places
        elif isinstance(result, NUMBERS):
            self._forms[n] = result, ()
        if n in self._forms:
            made = range(known, len(self._facts.storages))
            reached = {*(value.storage for value in values), *saved}.difference(made)
            if key is not None and not written and reached <= set(self._read(n)):
                self._ran[key] = n, made
        return result

    def _as_before(self, n: fx.Node, example: Facts) -> Any:
        """Note of a submodule what it did in the example, with results of the sizes of now.

        What it keeps inside grows with what it reads.

        Raises:
            ValueError: It gives what it was given, or the like.
        """
        self._take_state(str(n.target))
        known, before, storages = example.nodes[n], example.storages, self._facts.storages
        if any(before[value.storage].node is not n for value in known.values):
            raise ValueError(f"{n.target} gives a part of what it reads")
        graded = iter([value.requires_grad for value in known.values])
        result = pytree.tree_map(partial(_of_form, graded), n.meta["val"])
        values = tuple(self._value(tensor, n) for tensor in tensors_in(result))
        read = [value for source in n.all_input_nodes for value in self._facts.nodes[source].values]
        was = [value for source in n.all_input_nodes for value in example.nodes[source].values]
        now, then = (sum(math.prod(value.shape) for value in rows) for rows in (read, was))
        own = {old.storage: new.storage for old, new in zip(known.values, values, strict=True)}
        for old, new in zip(was, read, strict=True):
            own[old.storage] = new.storage
        named = {row.attribute: index for index, row in enumerate(storages)}
        for index in {*known.saved, *known.writes} - own.keys():
            if before[index].node is n:
                own[index] = len(storages)
                storages.append(Storage((before[index].nbytes * now + then - 1) // then, n))
            else:
                own[index] = named[before[index].attribute]
        self._facts.nodes[n] = replace(
            known,
            values=values,
            writes=frozenset(map(own.__getitem__, known.writes)),
            saved=tuple(map(own.__getitem__, known.saved)),
        )
        return result

    def _held_by(self, results: Sequence[torch.Tensor]) -> list[int]:
        """Storages of tensors that a custom function holds itself: `ctx.offsets = offsets`."""
        functions = {result.grad_fn for result in results}
        held = [value for each in functions for value in getattr(each, "__dict__", {}).values()]
        return [self._storage(value, self._current) for value in held if torch.is_tensor(value)]

    def _ends(self, n: fx.Node) -> dict[int, GradientEdge]:
        """Where the gradients of those inputs go, by index, that are tensors with one."""
        rows = ((i, self.env[argument]) for i, argument in enumerate(n.all_input_nodes))
        return {
            i: get_gradient_edge(value)
            for i, value in rows
            if isinstance(value, torch.Tensor) and value.requires_grad
        }

    def _join(self, n: fx.Node, result: Any) -> None:
        """Take a copy for a view of what it copies, as it is where kernels have other layouts."""
        source = self.env[n.all_input_nodes[0]]
        if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
            return
        key, index = key_of(result.untyped_storage()), self._storage(source)
        if key not in self._storage_of and result.dtype == source.dtype:
            self._storage_of[key] = index
            self._facts.storages[index].nbytes += result.untyped_storage().nbytes()

    def _read(self, n: fx.Node) -> list[int]:
        """The storages of the values that a node reads, in order."""
        rows = (self._facts.nodes[argument].values for argument in n.all_input_nodes)
        return [value.storage for values in rows for value in values]

    def _key(self, n: fx.Node) -> Any:
        """What a node does to which tensors; None if more is to be known."""
        aten = isinstance(n.target, OpOverload) and n.target.namespace == "aten"
        if not self._once or n in self._may_view or not (aten or n.target is operator.getitem):
            return None
        if chosen_by_values(n):
            return None
        number: dict[int, int] = {}  # of a storage
        rows: list[Any] = []
        for argument in n.all_input_nodes:
            if argument not in self._forms:
                return None
            kind, places = self._forms[argument]
            rows.append((type(kind), term_of(kind)))
            for value, (offset, device) in zip(
                self._facts.nodes[argument].values, places, strict=True
            ):
                storage = number.setdefault(value.storage, len(number))
                nbytes = self._facts.storages[value.storage].nbytes
                sizes = [nbytes, offset, *value.shape, *value.stride]
                rows.append((storage, device, value.dtype, value.requires_grad, len(value.shape)))
                rows.append(tuple(map(term_of, sizes)))
        local = {argument: i for i, argument in enumerate(n.all_input_nodes)}
        arguments = fx.node.map_arg((n.args, n.kwargs), lambda node: ("%", local[node]))
        return n.target, repr(arguments), tuple(rows)

    def _repeat(self, n: fx.Node, first: fx.Node, made: range) -> None:
        """Note of a node what an earlier one did, of its own storages."""
        storages, known = self._facts.storages, self._facts.nodes[first]
        own = dict(zip(self._read(first), self._read(n), strict=True))
        for index in made:
            own[index] = len(storages)
            storages.append(Storage(storages[index].nbytes, n))
        values = tuple(Value(own[value.storage], *_seen(value)) for value in known.values)
        saved = tuple(own[storage] for storage in known.saved)
        self._facts.nodes[n] = replace(known, values=values, saved=saved)
        self._forms[n] = self._forms[first]
        self._unmade.add(n)

    def _made(self, n: fx.Node) -> Any:
        """The result of a node that was not run."""
        self._unmade.remove(n)
        facts, rows = self._facts.nodes[n], []
        with torch.no_grad():
            for value, (offset, device) in zip(facts.values, self._forms[n][1], strict=True):
                if value.storage not in self._alive:
                    nbytes = self._facts.storages[value.storage].nbytes
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    self._alive[value.storage] = memory
                    self._storage_of[key_of(memory.untyped_storage())] = value.storage
                memory = self._alive[value.storage]
                row = torch.empty(0, dtype=value.dtype, device=device)
                row.set_(memory.untyped_storage(), offset, value.shape, value.stride)
                rows.append(row.requires_grad_(value.requires_grad))
        # No leaf of autograd, for autocast keeps casts of these, which their readers would share.
        rows = [torch.ops.aten.alias.default(row) if row.requires_grad else row for row in rows]
        assert facts.structure is not None
        return facts.structure.fill(rows)

    def _value(self, tensor: torch.Tensor, node: fx.Node) -> Value:
        attribute = str(node.target) if node.op == "get_attr" else None
        storage = self._storage(tensor, None if attribute else node, attribute)
        strides = tuple(tensor.stride()) if tensor.layout is torch.strided else ()
        return Value(storage, tuple(tensor.shape), strides, tensor.dtype, tensor.requires_grad)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator as its kernel would, where fake tensors or symbols do otherwise."""
        name = str(target)
        if name.startswith(SIZES) and self._example is not None:
            return None  # its fake kernel takes no symbols (2.13)
        if name.startswith(("aten.upsample_", "aten._upsample_")) and name.endswith(".vec"):
            arguments = schema_arguments(target, args, kwargs)
            sizes = (*arguments["input"].shape, *(arguments["output_size"] or ()))
            if any(isinstance(size, SYMBOLIC) for size in sizes):
                return resized_by_symbols(arguments)
        if name == "aten.linspace.default" and isinstance(args[2], torch.SymInt):
            return torch.empty(args[2], **kwargs)  # it knows the number as an int
        if is_recurrent(name, args):
            return self._recurrent(target, args)
        if name.startswith(("aten.gru", "aten.rnn_", "aten.lstm_cell")) and has_symbols(args[0]):
            # The C++ of these cuts chunks by ints, which Python does by symbols.
            return decomposed_in_cpp(target, *args)
        known = len(self._facts.storages)
        result = super().call_function(_EQUIVALENT.get(name, target), args, kwargs)
        if name in _NORMS and _is_mixed(args):
            for statistics in self._facts.storages[known:][-2:]:  # behind a dense copy of the input
                statistics.nbytes *= 2  # fake tensors have the input's precision (2.13)
        if name == "aten.batch_norm.default":
            # Kernels turn the dimensions back, fake tensors do not (torch 2.13;
            # `test_torch_still_keeps_a_norm_turned` fails when it is mended).
            result = result.contiguous(memory_format=suggest_memory_format(args[0]))
        return result

    def _recurrent(self, layer: Any, args: Sequence[Any]) -> Any:
        """The results of a recurrent layer that reads symbolic sizes."""
        kept = kept_of(layer, args)
        shapes_alone = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda saved: saved)
        with shapes_alone, enable_python_dispatcher():
            result = layer(*args)
        tensors = [*tensors_in(args), *result]
        self._saved += [self._storage(tensors[i], self._current) for i in kept.tensors]
        for nbytes in kept.nbytes:
            self._saved.append(len(self._facts.storages))
            self._facts.storages.append(Storage(nbytes, self._current))
        return result

    def fetch_attr(self, target: str) -> Any:
        """The stand-in for a parameter or buffer, and else the attribute itself."""
        value = super().fetch_attr(target)
        return self._stand_in(value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an opaque leaf on stand-ins for its parameters."""
        return called_with(self.fetch_attr(target), self._take_state(target), args, kwargs)

    def _take_state(self, target: str) -> dict[str, torch.Tensor]:
        """Stand-ins for the parameters and buffers of an opaque leaf, noted."""
        state = named_state(self.fetch_attr(target))
        stand_ins = {name: self._stand_in(tensor) for name, tensor in state.items()}
        for name, tensor in stand_ins.items():
            self._storage(tensor, attribute=f"{target}.{name}")
        return stand_ins

    def _silently_written(self, n: fx.Node) -> Iterator[torch.Tensor]:
        """The tensors that a node writes without raising a version counter."""
        if n.op == "call_module":
            leaf = self.fetch_attr(str(n.target))
            if leaf.training:
                for _, buffer in leaf.named_buffers():
                    yield self._stand_in(buffer)
        for statistics in silently_written(n):
            yield self.env[statistics]


# Of an input in half precision and weights that are not they keep statistics in the weights'.
_NORMS: Final = {f"aten.{kind}_norm.default" for kind in ("batch", "group", "instance", "layer")}


def _is_mixed(args: Sequence[Any]) -> bool:
    """True if the first tensor has half the precision of the others."""
    first, *others = (tensor.dtype.itemsize for tensor in tensors_in(args))
    return any(size == 2 * first == 4 for size in others)


# A number; or whether it is a tensor alone, and of each tensor its offset and its device.
_Form = tuple[Any, tuple[tuple[int, torch.device], ...]]
NUMBERS: Final = (int, float, *SYMBOLIC)


def _of_form(graded: Iterator[bool], value: Any) -> Any:
    """A fake tensor of a value's form, in memory of its own, that needs a gradient if told so."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.requires_grad_().clone() if next(graded) else made


def _seen(value: Value) -> tuple[Any, ...]:
    """A value without its storage."""
    return value.shape, value.stride, value.dtype, value.requires_grad


def _is_plain(row: Any) -> bool:
    """True if it is a fake tensor about which its `Value` and its place say all."""
    if not isinstance(row, torch.Tensor) or row.layout is not torch.strided:
        return False
    return not (row.is_conj() or row.is_neg() or getattr(row, "constant", None) is not None)


@final
class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether what runs inside draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            self.drew |= _draws(func, schema_arguments(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _draws(operator: Any, arguments: Mapping[str, Any]) -> bool:
    if any(arguments.get(name, True) is False for name in _SWITCHES):
        return False
    rates = (arguments.get(name, 1) for name in _PROBABILITIES)
    if any(not isinstance(rate, torch.Tensor) and rate == 0 for rate in rates):
        return False
    seeded = torch.Tag.nondeterministic_seeded in operator.tags
    dropout = "dropout" in operator.__name__ or bool({"dropout", "dropout_p"} & arguments.keys())
    return seeded or dropout


def named_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
