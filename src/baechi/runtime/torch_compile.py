"""Tapes handed to `torch.compile`, each as a graph of its own.

    first call of a mode    the caller's thread goes over all tapes, and each compiles as it runs
    every other call        workers run what is there

A compiled function is special for shapes, strides, what needs a gradient, autocast, and the number
of torch threads: a *mode*. That of a family of shapes has symbols for sizes, and runs at all for
which torch's own guards hold. torch compiles where a new mode first runs, one thread at a time, and
then puts random states back. So a mode's first step is made by one thread, which has as many torch
threads as a worker; else draws of others got lost.

Errors of generated and compiled code name the operator and the model's own line (`located`).
Forward, the error's traceback shows the line of the generated code. Backward there is none: the
error names the first and the last operator, and while torch detects anomalies, torch's own warning
has the line of the generated code, which begins with the operator's name.
"""

import linecache
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, final

import torch
from torch import fx

from baechi.errors import ExecutionError, InputError
from baechi.torch_support.torch_devices import kernel_choices, torch_threads
from baechi.torch_support.torch_internals import (
    backend_named,
    inductor_options,
    keeping_graphs,
    refusals,
)
from baechi.tracing.calling_convention import Call
from baechi.tracing.fx_nodes import op_and_line, op_name, operator_name
from baechi.tracing.guards import Autocast
from baechi.tracing.observers import observers_in
from baechi.tracing.recurrent_layers import RECURRENT
from baechi.validation import check_is

Tape = Callable[[list[Any]], tuple[Any, ...]]

# Warnings of torch while it compiles that no caller can avoid: it reads `.grad` of inputs, and uses
# its own deprecated parts.
_NOISE: Final = ("The .grad attribute of a Tensor", "`torch.jit.script_method` is deprecated")

_LOCK: Final = threading.RLock()  # settings of the compiler are the process's


@final
@dataclass(frozen=True)
class CompileOptions:
    """The compiler of a graph: a name that torch knows, or a function; and its keywords."""

    backend: Any
    keywords: dict[str, Any]

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        """The compiled graph: torch calls this with what it traced."""
        compiler = backend_named(self.backend)
        with keeping_graphs(force_non_lazy_backward_lowering=True):
            return compiler(graph, inputs, **self.keywords)


def compile_options(
    compile: bool | Mapping[str, Any],  # noqa: A002 (torch's own word)
    places: Sequence[torch.device],
) -> CompileOptions | None:
    """The options for `torch.compile`, or None not to compile.

    For inductor a mode becomes the options that it stands for, and random numbers are drawn by
    torch's own kernels, unless the options say otherwise: so masks equal the unsplit model's.

    Raises:
        InputError: An option is unknown, or one that the runtime sets; or the backend, the mode or
            one of its options is unknown to torch.
    """
    if compile is False:
        return None
    given = {} if compile is True else check_is(compile, Mapping, "compile")  # type: ignore[type-abstract]
    options = dict(given)
    unknown = sorted(map(str, options.keys() - {"backend", "mode", "options"}))
    if unknown:
        raise InputError(
            f"compile has {', '.join(unknown)}; it takes backend, mode and options. A segment is "
            "always compiled whole (fullgraph), with symbols for sizes (dynamic) in a plan for a "
            "family of shapes."
        )
    try:
        with _quiet():
            torch.compile(lambda x: x, **options)  # to try the options; it is never called
    except Exception as error:
        raise InputError(f"torch.compile refuses {options}: {_first_line(error)}") from error
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    own = dict(options.get("options") or {})
    if backend == "inductor":
        own = {**inductor_options(mode), **own}
    records = backend == "cudagraphs" or (backend == "inductor" and own["triton.cudagraphs"])
    if records and any(place.type == "cuda" for place in places):
        raise InputError(
            f"compile={options} records CUDA graphs of its own, which reuse memory that other "
            "segments still read. Take what records none, such as "
            "mode='max-autotune-no-cudagraphs', and cuda_graphs='auto' for Baechi's own."
        )
    if backend == "inductor":
        return CompileOptions(backend, {"config_patches": {"fallback_random": True, **own}})
    given = {"mode": mode, "options": own}
    return CompileOptions(backend, {key: value for key, value in given.items() if value})


@final
class CompiledTape:
    """A tape's function, compiled when it is first called in a mode.

    What was generated takes a list, which it empties; `plain`, which is compiled, the arguments. If
    `dynamic`, it is compiled with symbols for their sizes.

    Attributes:
        reason: Why it runs as generated instead; None if it does not.
    """

    def __init__(
        self,
        generated: Tape,
        plain: Callable[..., tuple[Any, ...]],
        options: CompileOptions,
        nodes: Sequence[fx.Node],
        label: str,
        *,
        dynamic: bool,
    ) -> None:
        self.reason: str | None = None
        self.label = label
        self.generated = generated
        self._nodes = {node.name: node for node in nodes}
        self._refusals = refusals()
        self._compiled = torch.compile(plain, fullgraph=True, dynamic=dynamic, backend=options)
        observer = next(observers_in(nodes), None)
        if observer is not None:
            self._refuse(f"it runs {observer.title}")
            return
        # Their modules are refused, and taken apart they can fail when they run (torch 2.13).
        recurrent = [node.name for node in nodes if operator_name(node) in RECURRENT]
        if recurrent:
            self._refuse(f"torch does not compile RNN, GRU or LSTM, and {recurrent[0]} is one")

    def __call__(self, arguments: list[Any]) -> tuple[Any, ...]:
        """The tape's results."""
        if self.reason is None:
            try:
                results: tuple[Any, ...] = self._compiled(*arguments)
            except self._refusals as error:  # before anything ran
                self._refuse(_first_line(error) + self._place(error))
            else:
                return results
        return self.generated(arguments)

    def _place(self, error: Exception) -> str:
        """At which operator torch gave up, where its message has the generated line."""
        lines = [line.strip() for line in str(error).splitlines()]
        for before, line in pairwise(lines):
            node = self._nodes.get(line.partition("=")[0].strip())
            if node is not None and "eval_with_key" in before:
                return f", at {op_and_line(node)}"
        return ""

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        warnings.warn(self.remark, stacklevel=3)

    @property
    def remark(self) -> str:
        """The tape that is not compiled, and the reason."""
        return f"{self.label} runs uncompiled: {self.reason}"


def _first_line(error: BaseException) -> str:
    """The error's kind and its first line that is not empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next((line for line in lines if line), 'it says no more')}"


def mode_of(call: Call, parameters: Sequence[torch.nn.Parameter], differentiate: bool) -> Any:
    """Equal modes run the same compiled functions."""
    return (
        differentiate,
        torch.is_inference_mode_enabled(),
        Autocast.current(),
        tuple((t.shape, t.stride(), t.requires_grad, t.is_inference()) for t in call.tensors),
        tuple(parameter.requires_grad for parameter in parameters),
        kernel_choices(),
        torch.get_default_dtype(),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _NOISE:
            warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def compiling(threads: int | None) -> Iterator[None]:
    """The context of a mode's first step; compiles for workers of so many torch threads."""
    with _LOCK, _quiet(), torch_threads(threads or torch.get_num_threads()):
        yield


def located(
    error: Exception,
    nodes: Sequence[fx.Node],
    function: Callable[..., Any],
    device: int,
) -> ExecutionError:
    """The error of a tape's function, which runs these nodes, with the operator that was running.

    It has the model's own line, too.
    """
    nodes = [node for node in nodes if node.op not in ("placeholder", "get_attr")]
    node = nodes[0] if len(nodes) == 1 else _running(error, nodes, function)
    if node is None:
        where = (
            f"one of {len(nodes)} operators from {op_name(nodes[0])} to {op_name(nodes[-1])} "
            "(under torch.autograd.set_detect_anomaly(True) a warning shows its generated line)"
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
