"""Comparison of two runs of a step operator by operator.

The gradient of a value is compared when it is complete: when the first reader of the value has gone
backward. In backward order, the first gradient that differs was computed by readers whose own
gradients are right, so the backward of one of these readers differs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch import fx

from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.tape import TapeCode
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import op_name, operator_name, source_line
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.pytrees import tensors_in

# What these give is whatever was in memory.
_UNWRITTEN: Final = ("empty", "new_empty")

# Kernels of another kind of device add up in another order, and may multiply in TF32 (10 bits).
_OTHER_KIND: Final = (1e-3, 1e-4)  # relative, absolute
_WIDE: Final = (torch.float32, torch.float64, torch.complex64, torch.complex128)

Gradients = Mapping[str, torch.Tensor | None]


@final
@dataclass
class Values:
    """The values and gradients of one run, by node and leaf."""

    made: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    grads: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


def difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """The distance of two tensors, if it exceeds rounding in their dtype; else empty."""
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{_kind(actual)} instead of {_kind(expected)}"
    other_kind = expected.device.type != actual.device.type and expected.dtype in _WIDE
    rtol, atol = _OTHER_KIND if other_kind else (None, None)
    with torch.no_grad():
        one, two = expected.detach(), actual.detach().to(expected.device)
        try:
            torch.testing.assert_close(two, one, equal_nan=True, rtol=rtol, atol=atol)
        except AssertionError:
            return _apart(one.to_dense(), two.to_dense())
    return ""


def _apart(one: torch.Tensor, two: torch.Tensor) -> str:
    wide = torch.complex128 if one.is_complex() else torch.float64
    error, size = (two.to(wide) - one.to(wide)).abs(), one.to(wide).abs()
    ratios = (error / size)[size > 0]
    relative = f", max rel error {float(ratios.max()):.3g}" if ratios.numel() else ""
    return f"max abs error {float(error.max()):.3g}{relative}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@final
@dataclass(frozen=True)
class Difference:
    """A difference in words, and its rank: the lowest came first."""

    rank: tuple[int, int]
    text: str


@final
class Operators:
    """The operators of a traced model, to be run one by one.

    Attributes:
        nodes: By name, in program order.
        draws: The names of those that draw random numbers, in program order.
    """

    def __init__(self, module: TracedModule) -> None:
        self._module = module
        self._rank = {node: i for i, node in enumerate(module.graph_module.graph.nodes)}
        own = sorted((n for row in module.nodes for n in row), key=self._rank.__getitem__)
        self.nodes = {node.name: node for node in own}
        facts = module.facts.nodes
        self._written = {storage for fact in facts.values() for storage in fact.writes}
        self._passing: set[fx.Node] = set()  # those seen to give the very tensor that they got
        self.draws = [name for name, node in self.nodes.items() if facts[node].random]

    # Runs.

    def unsplit(
        self, values: Values, seed: int | None, twin: Callable[[Any], Any]
    ) -> Callable[[Call], Any]:
        """The trace as a function that notes what each operator makes.

        Args:
            values: Gets what is made.
            seed: With one, each operator that draws begins from a seed of its own.
            twin: Gives what is to be read in the place of a tensor or submodule of the model.
        """

        def keep(node: fx.Node, made: list[torch.Tensor], graded: Sequence[int]) -> None:
            facts = self._module.facts.nodes[node].values
            values.made[node.name] = tuple(
                tensor.detach().clone() if fact.storage in self._written else tensor.detach()
                for tensor, fact in zip(made, facts, strict=True)
            )
            writes = self._module.facts.nodes[node].writes
            if not graded and not writes and any(t.grad_fn is not None for t in made):
                self._passing.add(node)
            for leaf in graded:

                def hook(gradient: torch.Tensor, leaf: int = leaf) -> None:
                    values.grads[node.name, leaf] = gradient.detach()

                made[leaf].register_hook(hook)  # type: ignore[no-untyped-call]

        def forward(call: Call) -> Any:
            runner = _Runner(self._module.graph_module, self.nodes, keep, self._seeds(seed), twin)
            returned = runner.run(*call.tensors, enable_io_processing=False)
            result, _ = self._module.returned.fill(list(returned), call.objects)
            return result

        return forward

    def split(
        self, bound: Bound, values: Values, found: list[Difference], seed: int | None
    ) -> Bound:
        """The same tapes, where each operator is compared with `values` as it runs.

        Args:
            bound: The placed model's code.
            values: The operators' results, unsplit.
            found: Gets what differs.
            seed: As in `unsplit`.
        """
        return replace(
            bound, tapes=tuple(self._compared(tape, values, found, seed) for tape in bound.tapes)
        )

    def _compared(
        self, tape: TapeCode, values: Values, found: list[Difference], seed: int | None
    ) -> TapeCode:
        where = f" on logical device {tape.device}"

        def compare(node: fx.Node, made: list[torch.Tensor], graded: Sequence[int]) -> None:
            found.extend(self._values(node, made, values, where))
            for leaf in graded:

                def hook(gradient: torch.Tensor, leaf: int = leaf) -> None:
                    found.extend(self._gradient(node, leaf, gradient, values, where))

                made[leaf].register_hook(hook)  # type: ignore[no-untyped-call]

        graph_module: fx.GraphModule = tape.function.__self__  # type: ignore[attr-defined]
        seeds = self._seeds(seed)

        def function(arguments: list[Any]) -> tuple[Any, ...]:
            runner = _Runner(graph_module, self.nodes, compare, seeds, lambda value: value)
            return tuple(runner.run(arguments, enable_io_processing=False))

        return replace(tape, function=function)

    def _seeds(self, seed: int | None) -> dict[str, int]:
        if seed is None:
            return {}
        return {name: (seed + i) % 2**63 for i, name in enumerate(self.draws)}

    # Comparisons.

    def between(self, values: Values, others: Values) -> Iterator[Difference]:
        """The differences between two unsplit runs."""
        for name, made in others.made.items():
            yield from self._values(self.nodes[name], made, values, "")
        for (name, leaf), gradient in others.grads.items():
            yield from self._gradient(self.nodes[name], leaf, gradient, values, "")

    def between_leaves(self, expected: Gradients, actual: Gradients) -> Iterator[Difference]:
        """The parameters and arguments whose gradients differ, where both have one."""
        for name, one in expected.items():
            two = actual[name]
            text = "" if one is None or two is None else difference(one, two)
            owners = self._owners(name) if text else []
            if owners:
                readers = self._readers(owners)
                yield self._backward(readers, owners[0], f"the gradient of {name}", text, "")

    def _values(
        self, node: fx.Node, made: Sequence[torch.Tensor], values: Values, where: str
    ) -> Iterator[Difference]:
        if node.op == "call_function" and operator_name(node).startswith(_UNWRITTEN):
            return
        for one, two in zip(values.made.get(node.name, ()), made, strict=False):
            text = difference(one, two)
            if text:
                yield Difference((0, self._rank[node]), f"{_named(node)}{where}: {text}")

    def _gradient(
        self, node: fx.Node, leaf: int, gradient: torch.Tensor, values: Values, where: str
    ) -> Iterator[Difference]:
        expected = values.grads.get((node.name, leaf))
        text = "" if expected is None else difference(expected, gradient)
        if text:
            what = f"the gradient of {op_name(node)}"
            yield self._backward(self._readers([node]), node, what, text, where)

    def _owners(self, name: str) -> list[fx.Node]:
        """The nodes that stand for a parameter or argument, or call the submodule with it."""
        inputs = [node for node in self._rank if node.op == "placeholder"]
        names = [f"argument {name}" for name in self._module.call.names]
        given = dict(zip(names, inputs, strict=True))
        if name in given:
            return [given[name]]
        parameter = dict(self._module.model.named_parameters())[name]
        root = self._module.graph_module
        owners = []
        for node in self._rank:
            if node.op == "get_attr" and attribute(root, str(node.target)) is parameter:
                owners.append(node)
            elif node.op == "call_module":
                leaf = root.get_submodule(str(node.target))
                owners += [node] if any(p is parameter for p in leaf.parameters()) else []
        return owners

    def _readers(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes whose backwards compute the gradient of the values of these."""
        rows = [user for node in nodes for user in node.users if node.op != "call_module"]
        for row in rows:  # a dropout that drops nothing has no backward
            rows += row.users if row in self._passing else ()
        rows = [row for row in rows if row not in self._passing]
        rows += [node for node in nodes if node.op == "call_module"]
        return sorted({n for n in rows if n.name in self.nodes}, key=self._rank.__getitem__)

    def _backward(
        self, readers: Sequence[fx.Node], node: fx.Node, what: str, text: str, where: str
    ) -> Difference:
        first = readers[0] if readers else node
        names = " or of ".join(map(_named, readers))
        makers = f"the backward of {names}" if names else "what the caller's loss gives"
        return Difference((1, -self._rank[first]), f"{makers}, which makes {what}{where}: {text}")


_Note = Callable[[fx.Node, list[torch.Tensor], Sequence[int]], None]


@final
class _Runner(fx.Interpreter):
    """Runs a graph node by node, and hands on what each operator of the model makes.

    That is its tensors, and the numbers of those that get a gradient of their own.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        operators: dict[str, fx.Node],
        note: _Note,
        seeds: dict[str, int],
        twin: Callable[[Any], Any],
    ) -> None:
        super().__init__(module)
        self._operators = operators
        self._note = note
        self._seeds = seeds
        self._twin = twin

    def fetch_attr(self, target: str) -> Any:
        return self._twin(super().fetch_attr(target))

    def run_node(self, n: fx.Node) -> Any:
        node = self._operators.get(n.name)
        # A tape's code takes what other tapes made under the name that it has there.
        runs = node is not None and n.op == node.op and n.target == node.target
        if n.name in self._seeds and runs:
            torch.manual_seed(self._seeds[n.name])
        given = [t for arg in n.all_input_nodes for t in tensors_in(self.env[arg])] if runs else []
        result = super().run_node(n)
        if node is not None and runs and n.op not in ("placeholder", "get_attr"):
            made = tensors_in(result)
            graded = [
                leaf
                for leaf, tensor in enumerate(made)
                if tensor.grad_fn is not None and not any(tensor is other for other in given)
            ]
            self._note(node, made, graded)
        return result


def _named(node: fx.Node) -> str:
    source = source_line(node)
    return f"{op_name(node)} ({source})" if source else op_name(node)
