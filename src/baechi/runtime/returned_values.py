"""Return values of a call: the caller's structure, filled with what tapes computed."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from baechi.errors import ExecutionError
from baechi.tracing.batch_dimension import BatchDimensions
from baechi.tracing.calling_convention import Call
from baechi.tracing.lowering import TracedModule
from baechi.tracing.partition import attribute
from baechi.tracing.pytrees import Structure, change

_MOST_KEPT: Final = 1024  # structures of results that are kept, by shape


class ReturnedValues:
    """The model's own return values.

    `numbers` has the position of every result that tapes compute; `dimensions` those along which
    outputs of micro-batches are put together.
    """

    def __init__(
        self,
        module: TracedModule,
        numbers: Mapping[fx.Node, int],
        dimensions: BatchDimensions | None,
    ) -> None:
        graph = module.graph_module.graph
        self._module, self._numbers, self._dimensions = module, numbers, dimensions
        self._given = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._nodes: Any = graph.output_node().args[0]
        self._at: dict[tuple[torch.Size, ...], Structure] = {}

    def of(self, calls: Sequence[Call], results: Sequence[Sequence[Any]]) -> Any:
        """The caller's structure; what was an input or a parameter is that very object.

        Objects among the arguments are left as forward leaves them.

        Raises:
            ExecutionError: Forward changes an object among the arguments of micro-batches.
        """
        call = calls[0]
        values = self._values(call, results[0])
        if len(calls) > 1 and self._dimensions is not None:
            parts = list(zip(*map(self._values, calls, results), strict=True))
            dims = zip(parts, self._dimensions.outputs, strict=True)
            values = [row[0] if dim is None else torch.cat(row, dim) for row, dim in dims]
        result, changes = self._structure(call).fill(values, call.objects)
        if changes and len(calls) > 1:
            raise ExecutionError(
                "forward changes a list, dict or object among its arguments, such as a cache, "
                "which micro-batches do not share. Call it without, or give microbatches=None."
            )
        change(call.objects, changes)
        return result

    def _structure(self, call: Call) -> Structure:
        """The structure of the results of a call, in which numbers may depend on sizes."""
        family = self._module.family
        if family is None or not family.returns_sizes:
            return self._module.returned
        key = tuple(tensor.shape for tensor in call.tensors)
        if key not in self._at:
            if len(self._at) >= _MOST_KEPT:
                self._at.clear()
            values = family.values(call)
            assert values is not None  # it has joined
            self._at[key] = family.returned(values)
        return self._at[key]

    def _values(self, call: Call, results: Sequence[Any]) -> list[Any]:
        """What the caller gets of one micro-batch, as a flat list."""
        values: list[Any] = []
        for node in self._nodes:
            if not isinstance(node, fx.Node):
                values.append(node)
            elif node in self._given:
                values.append(call.tensors[self._given[node]])
            elif node.op == "get_attr":
                values.append(attribute(self._module.graph_module, str(node.target)))
            else:
                values.append(results[self._numbers[node]])
        return values
