"""Which operator failed: errors of generated and of compiled code, told at the model's own line."""

import linecache
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from baechi.errors import ExecutionError
from baechi.naming import op_name, source_line
from baechi.runtime.compiled import CompiledTape


def located(
    error: Exception, nodes: Sequence[fx.Node], function: Callable[..., Any], device: int
) -> ExecutionError:
    """The error with the operator that was running and the model's own line.

    Args:
        error: What was raised.
        nodes: What the function runs.
        function: The code of a tape.
        device: The logical device that ran it.
    """
    nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
    node = nodes[0] if len(nodes) == 1 else _running(error, nodes, function)
    if node is None:
        where = (
            f"one of {len(nodes)} operators from {op_name(nodes[0])} to {op_name(nodes[-1])} "
            "(torch.autograd.set_detect_anomaly(True) shows which)"
        )
    else:
        source = source_line(node)
        where = f"{op_name(node)} ({source})" if source else op_name(node)
    return ExecutionError(
        f"{where} failed on logical device {device}: {type(error).__name__}: {error}"
    )


def _running(
    error: Exception, nodes: Sequence[fx.Node], function: Callable[..., Any]
) -> fx.Node | None:
    """The node whose generated line the error came through; fx gives each a line of its own."""
    if isinstance(function, CompiledTape) and function.reason is None:
        return _calling(error, nodes)
    by_name = {node.name: node for node in nodes}
    for frame, number in traceback.walk_tb(error.__traceback__):
        if "eval_with_key" in frame.f_code.co_filename:
            line = linecache.getline(frame.f_code.co_filename, number)
            return by_name.get(line.split("=")[0].split(":")[0].strip())
    return None


def _calling(error: Exception, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The only node whose operator a line of compiled code calls that the error came through.

    What is fused into a kernel has no line of its own.
    """
    for frame, number in traceback.walk_tb(error.__traceback__):
        line = linecache.getline(frame.f_code.co_filename, number)
        callers = [node for node in nodes if f"torch.ops.{node.target}(" in line]
        if callers:
            return callers[0] if len(callers) == 1 else None
    return None
