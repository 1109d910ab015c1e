"""Errors of generated and compiled code, with the operator and the model's own line.

Forward, the error's traceback shows the line of the generated code. Backward has no Python of the
model's; but while torch detects anomalies, each autograd node keeps the line that made it.
"""

import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import fx
from torch.autograd.graph import GradientEdge, Node

from baechi.errors import ExecutionError
from baechi.runtime.torch_compile import CompiledTape
from baechi.tracing.fx_nodes import op_and_line, op_name

# A line of a traceback that torch has kept as text: in generated code, and what is there.
_GENERATED: Final = re.compile(r'File "(<eval_with_key>[^"]*)".*\n\s*(\w+)')


@contextmanager
def running_node(ends: Iterable[GradientEdge]) -> Iterator[list[Node]]:
    """A list that holds the running autograd node while a backward from `ends` runs inside.

    It costs as much as a small kernel for each node.
    """
    running: list[Node] = []
    handles = []
    waiting = [edge.node for edge in ends]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()

        def note(_: Any, node: Node = node) -> None:
            running[:] = [node]

        handles.append(node.register_prehook(note))
        following = {n for n, _ in node.next_functions if n is not None and n.next_functions}
        waiting += following - seen
        seen |= following
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def located(
    error: Exception,
    nodes: Sequence[fx.Node],
    function: Callable[..., Any],
    device: int,
    backward: Sequence[Node] = (),
) -> ExecutionError:
    """The error of a tape's function with the operator that was running and the model's own line.

    `nodes` are those that the function runs, and `backward` has the autograd node that was running,
    if that is known.
    """
    nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
    node = nodes[0] if len(nodes) == 1 else _running(error, nodes, function)
    if node is None and backward:
        node = _made_by(backward[0], nodes, function)
    if node is None:
        where = (
            f"one of {len(nodes)} operators from {op_name(nodes[0])} to {op_name(nodes[-1])} "
            "(run it under torch.autograd.set_detect_anomaly(True) to see which)"
        )
    else:
        where = op_and_line(node)
    return ExecutionError(
        f"{where} failed on logical device {device}: {type(error).__name__}: {error}"
    )


def _running(
    error: Exception, nodes: Sequence[fx.Node], function: Callable[..., Any]
) -> fx.Node | None:
    """The node whose generated line the error came through; fx gives each a line of its own.

    Of compiled code it is the only node whose operator a line calls: what is fused into a kernel
    has no line of its own.
    """
    compiled = isinstance(function, CompiledTape) and function.reason is None
    by_name = {node.name: node for node in nodes}
    for frame, number in traceback.walk_tb(error.__traceback__):
        line = linecache.getline(frame.f_code.co_filename, number)
        if compiled:
            callers = [node for node in nodes if f"torch.ops.{node.target}(" in line]
            if callers:
                return callers[0] if len(callers) == 1 else None
        elif "eval_with_key" in frame.f_code.co_filename:
            return by_name.get(line.split("=")[0].split(":")[0].strip())
    return None


def _made_by(
    backward: Node, nodes: Sequence[fx.Node], function: Callable[..., Any]
) -> fx.Node | None:
    """The node whose generated line made an autograd node, if torch has kept the traceback."""
    if isinstance(function, CompiledTape):
        function = function.generated
    own = function.__code__.co_filename
    by_name = {node.name: node for node in nodes}
    metadata: Any = backward.metadata
    lines = map(_GENERATED.search, metadata.get("traceback_", ()))
    names = (line[2] for line in lines if line is not None and line[1] == own)
    return next((by_name[name] for name in names if name in by_name), None)
