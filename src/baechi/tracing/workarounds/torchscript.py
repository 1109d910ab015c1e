"""Functions of `torch.jit.script` and `torch.jit.trace`, while a tracer runs.

Once such a function has run, torch differentiates parts of it as a whole, and runs these without
autograd: a tracer would see a value that was detached, and its gradient would be lost (torch 2.13).
So while a tracer runs, a copy runs instead, whose operators autograd sees one by one.
"""

from typing import Any

import torch
from torch.jit import ScriptFunction
from torch.jit._fuser import optimized_execution


def run_scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the function gives, computed operator by operator."""
    named = function.schema.arguments[len(args) :]
    rest = [kwargs.get(argument.name, argument.default_value) for argument in named]
    # A copy, since what torch has made of the function itself it keeps.
    copy = torch._C._create_function_from_graph(function.name, function.inlined_graph.copy())
    with optimized_execution(False):
        return _CALL(copy, *args, *rest)


_CALL = ScriptFunction.__call__
