"""Questions about values that forward asks in a trace, which holds where the answers are the same.

The values are those of symbolic sizes, of arguments, and of single integers in buffers.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import fx

from baechi.torch_support.tracer_internals import untraced


@final
class Questions:
    """What forward asked about values of symbolic sizes and of arguments, with the answers.

    The functions on the way there are nodes of a graph, which runs anew for other values.
    """

    def __init__(self) -> None:
        self._graph = fx.Graph()
        self._sizes: dict[fx.Node, torch.SymInt] = {}
        self._arguments: dict[fx.Node, int | torch.Tensor] = {}
        self._constants: dict[fx.Node, torch.Tensor] = {}
        self._answers: dict[fx.Node, Any] = {}
        self._with_arguments: set[fx.Node] = set()  # that depend on arguments

    def size(self, size: torch.SymInt) -> fx.Node:
        """A symbolic size."""
        node = self._graph.placeholder("size")
        self._sizes[node] = size
        return node

    def argument(self, index: int) -> fx.Node:
        """One of the tensors among the arguments of a call."""
        return self._given(index)

    def buffer(self, buffer: torch.Tensor, value: torch.Tensor) -> fx.Node:
        """A buffer, which has its value of now wherever it is on meta, as on another rank."""
        node = self._given(buffer)
        self._constants[node] = value
        return node

    def _given(self, given: int | torch.Tensor) -> fx.Node:
        node = self._graph.placeholder("argument")
        self._arguments[node] = given
        self._with_arguments.add(node)
        return node

    def made(self, func: Callable[..., Any], arguments: Any, writes: bool = False) -> fx.Node:
        """The result of a function, which may write into what it gets."""

        def held(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                node = self._graph.placeholder("constant")
                self._constants[node] = leaf
                leaf = node
            if writes and isinstance(leaf, fx.Node) and leaf not in self._sizes:
                return self.made(torch.clone, ((leaf,), {}))
            return leaf

        args, kwargs = fx.node.map_aggregate(arguments, held)
        node = self._graph.call_function(func, args, kwargs)
        if self._with_arguments & set(node.all_input_nodes):
            self._with_arguments.add(node)
        return node

    def ask(self, node: fx.Node, answer: Any) -> None:
        """Note a question and its answer."""
        self._answers[node] = answer

    def is_argument(self, node: fx.Node) -> bool:
        """True if it is one of the tensors among the arguments of a call, or a buffer."""
        return node in self._arguments

    def needs_arguments(self, node: fx.Node | None = None) -> bool:
        """True if it, or a question, depends on arguments, and not on their sizes alone."""
        return node in self._with_arguments if node else bool(self._plans[True])

    def forget_unasked(self) -> "Questions":
        """These, without what no question depends on."""
        for node in reversed(self._graph.nodes):
            if not node.users and node not in self._answers:
                self._graph.erase_node(node)
                for row in (self._sizes, self._arguments, self._constants):
                    row.pop(node, None)
        return self

    @property
    def sizes(self) -> tuple[torch.SymInt, ...]:
        """The symbolic sizes."""
        return tuple(self._sizes.values())

    @cached_property
    def _plans(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """What runs for the questions without and with arguments."""
        plans = []
        for kind in (False, True):
            needed = {node for node in self._answers if (node in self._with_arguments) is kind}
            for node in reversed(self._graph.nodes):
                needed.update(node.all_input_nodes if node in needed else ())
            plans.append([n for n in self._graph.nodes if n in needed and n.op != "placeholder"])
        return plans[0], plans[1]

    def hold(self, sizes: Sequence[int], tensors: Sequence[torch.Tensor] | None = None) -> bool:
        """True if the answers are the same where sizes, and arguments, have these values.

        Without arguments it is about the questions that depend on sizes alone, else the others.
        """
        plan = self._plans[tensors is not None]
        if not plan:
            return True
        values: dict[Any, Any] = {**self._constants, **dict(zip(self._sizes, sizes, strict=True))}
        if tensors is not None:
            given = {n: tensors[i] if isinstance(i, int) else i for n, i in self._arguments.items()}
            values.update({n: t.detach().cpu() for n, t in given.items() if not t.is_meta})
        try:
            with untraced():
                for node in plan:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    func: Any = node.target
                    now = values[node] = func(*args, **kwargs)
                    if node in self._answers:
                        then = self._answers[node]
                        if type(now) is not type(then) or now != then:
                            return False
        except (RuntimeError, IndexError, TypeError, ValueError):  # a slice of nothing, for one
            return False
        return True
