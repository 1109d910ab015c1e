"""The placed module: the user's model, run over several devices.

`placed.generate(...)` is the model's own method on the model itself: its properties, its `super()`
and its other methods are as ever. But while the method runs, in its thread alone, the model's
`__call__` is the placed module's:

    placed.generate(ids)
      method of the model        self(...) -> Methods -> placed(...)
        placed forward           self(...) -> Methods -> the model's own, for a trace

`self.forward(...)` and calls of submodules are the model's own: they run where their weights are.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, wraps
from threading import Lock, get_ident
from typing import Any, Final, NoReturn, cast, final

import torch
from torch import nn

from baechi.errors import ExecutionError, InputError
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.instructions import Program
from baechi.records.placement import Measurement, Placement, Schedule
from baechi.runtime.executable import Executable, move
from baechi.runtime.executors.capture_rules import CudaGraphs
from baechi.runtime.runtime_checks import placed_step, refuse_meta
from baechi.runtime.specialization import CallLock, Specializations, call_key
from baechi.runtime.step_measurement import measure_steps, planned_state_bytes
from baechi.runtime.torch_compile import compile_options
from baechi.runtime.weights import save_weights
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_devices import torch_device
from baechi.torch_support.torch_internals import CALL, plain_call, share_state
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call, canonical_call
from baechi.validation import check_is, check_row, check_threads

# The model, the call, and what other calls got so far, the first one first.
Specialize = Callable[[nn.Module, Call, Sequence[Executable]], Executable]


def apply(
    traced: Traced,
    placement: Placement,
    devices: Sequence[str | torch.device] | None = None,
    *,
    graph: OpGraph | None = None,
    cluster: Cluster | None = None,
    threads_per_device: int | None = None,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002 (torch's own word)
    cuda_graphs: CudaGraphs = False,
) -> "PlacedModule":
    """The traced model as an executable that runs the placement.

    Args:
        traced: From `trace`, in this process.
        placement: Of `traced.graph(...)`, for training or for inference.
        devices: The torch device of every logical device; several may be the same. By default
            the names of the cluster's devices.
        graph: The graph that was placed: the placement is checked against it, and `schedule` and
            `report` need it. It says what runs forward again, where it has `checkpoint`.
        cluster: The cluster that it was placed on.
        threads_per_device: torch threads of every logical CPU device; by default an equal share.
        compile: Hand every segment to `torch.compile`; or a dict of its backend, mode and options.
        cuda_graphs: Whether what runs on CUDA devices is captured as CUDA graphs after a few calls:
            `"auto"` where that can be, and `placed.remarks` says what cannot; `True` everywhere.

    Raises:
        InputError: The placement is of another model, parts a group, is in no topological order,
            or names more devices than there are; a torch device is not there; or torch.compile
            does not know an option.
    """
    check_is(traced, Traced, "traced")
    check_is(placement, Placement, "placement")
    if graph is not None:
        check_is(graph, OpGraph, "graph")
    if cluster is not None:
        check_is(cluster, Cluster, "cluster")
    if traced.module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to run; "
            "trace the model again in this process."
        )
    refuse_meta(traced.module.model)
    step = placed_step(traced, placement, graph)
    if devices is None:
        if cluster is None:
            raise InputError("no torch devices: give devices=[...] or the cluster.")
        devices = [device.name for device in cluster.devices]
    if threads_per_device is not None:
        check_threads(threads_per_device, "threads_per_device")
    places = [torch_device(name) for name in check_row(devices, "devices")]
    needed = max(placement.devices, default=0) + 1
    if len(places) < needed:
        raise InputError(
            f"the placement uses {needed} logical devices, but {len(places)} torch devices were "
            "given; name one for each, the same one several times if they share it."
        )
    options = compile_options(compile, places)
    placed = PlacedModule(traced.module.model, None, 1)
    placed._latest = Executable(
        *(traced, step, placement, places, threads_per_device),
        *(options, cuda_graphs, graph, cluster),
    )
    placed._specializations.add(call_key(traced.module.model, traced.module.call), placed._latest)
    return placed


_LOCK: Final = Lock()


@final
class Methods:
    """The methods of a placed model; in threads that run one, the model's call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # By thread the callees of the running methods, innermost last; None: the model's own.
        self._targets: dict[int, list[Callable[..., Any] | None]] = defaultdict(list)
        self._before: Callable[..., Any] | None = None  # the call, where it was not the model's own

    def routed(self, value: Any, placed: Callable[..., Any]) -> Any:
        """An attribute of the model; if it is a method, then one whose calls go to `placed`."""
        if not (inspect.ismethod(value) and value.__self__ is self._model):
            return value

        def steps(*args: Any, **kwargs: Any) -> Any:
            rows = value(*args, **kwargs)
            while True:  # between two rows the thread is the caller's
                with self._running(placed):
                    try:
                        row = next(rows)
                    except StopIteration as end:
                        return end.value
                yield row

        def method(*args: Any, **kwargs: Any) -> Any:
            with self._running(placed):
                return value(*args, **kwargs)

        return wraps(value)(steps if inspect.isgeneratorfunction(value) else method)

    @contextmanager
    def _running(self, target: Callable[..., Any]) -> Iterator[None]:
        """In this thread the model's calls go to this target inside the block."""
        slot = vars(self._model)
        with _LOCK:
            call = slot.get(CALL)
            switch = call if isinstance(call, Methods) else self  # another's, of the same model
            if switch is not call:
                switch._before = call
                slot[CALL] = switch
            targets = switch._targets[get_ident()]
            targets.append(target)
        try:
            yield
        finally:
            with _LOCK:
                targets.pop()
                if not targets:
                    del switch._targets[get_ident()]
                if not switch._targets and slot.get(CALL) is switch:
                    del slot[CALL]
                    if switch._before is not None:
                        slot[CALL] = switch._before

    @cached_property
    def _call(self) -> Callable[..., Any]:
        # A compiler around the call would not make a step of a placed model of it.
        return torch.compiler.disable(self._chosen)  # type: ignore[no-untyped-call,no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call."""
        return self._call(*args, **kwargs)

    def _chosen(self, *args: Any, **kwargs: Any) -> Any:
        targets = self._targets.get(get_ident(), [])
        target = targets[-1] if targets else None
        if target is None:
            return (self._before or plain_call(self._model))(*args, **kwargs)
        targets.append(None)
        try:
            return target(*args, **kwargs)
        finally:
            targets.pop()


# What Python looks up in a class and not in an object: no attribute can stand for it.
_CONTAINER: Final = ("__len__", "__iter__", "__getitem__", "__contains__")


@final
class PlacedModule(nn.Module):
    """A model split over devices; called, trained and saved like the model itself.

    It shares the model's parameters, buffers and submodules, so `parameters()`, `state_dict()` and
    every optimizer see the model's own names. Each shape of call has a specialization, made on its
    first call where `place` made this module.

    Attributes of the model that it does not have itself, such as `config`, are the model's; so are
    its length, its items and an iteration over it, where the model has these, as `nn.Sequential`
    does. Methods of the model that call it, such as `generate`, call the placed one.
    """

    _model: nn.Module
    _methods: Methods

    def __init__(self, model: nn.Module, specialize: Specialize | None, limit: int) -> None:
        super().__init__()
        # The model itself is no submodule: names must stay the model's own.
        self.__dict__.update(_model=model, _methods=Methods(model))
        share_state(self, model)
        self.training = model.training
        self._specializations = Specializations()
        self._specialize = specialize
        self._limit = limit
        self._latest: Executable | None = None
        self._lock = CallLock()
        self._meter: Meter | None = None
        self._measured: dict[Executable, Measurement] = {}
        self._original_devices = [(t, t.device) for t in [*model.parameters(), *model.buffers()]]
        self._closed = False
        shared = {name: _forwarded(name) for name in _CONTAINER if hasattr(type(model), name)}
        if shared:
            self.__class__ = type("PlacedModule", (PlacedModule,), shared)

    def __dir__(self) -> list[str]:
        own = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*own, *dir(self._model)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_model" not in self.__dict__:
                raise
            return self._methods.routed(getattr(self._model, name), self)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name)
        if own or not (name in vars(model) or hasattr(type(model), name)):
            super().__setattr__(name, value)
        else:  # what forward reads is the model's
            setattr(model, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own result, computed on its devices.

        Raises:
            InputError: The arguments do not fit the model, or have another shape than the one
                traced, where no new trace can be made.
            ExecutionError: An operator failed, or the module was unplaced.
        """
        self._check_open()
        with self._lock.side_by_side():
            call = canonical_call(self._model, args, kwargs)
            special = self._specializations.find(call_key(self._model, call), call)
            if special is not None and (special is self._latest or special.is_settled):
                self._latest = special
                return special(call, self._meter)
        special = self._special(self._model, call)
        with self._lock.side_by_side():
            return special(call, self._meter)

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutionError("this module was unplaced; call the model that unplace() gave.")

    def _special(self, model: nn.Module, call: Call) -> Executable:
        with self._lock.alone():  # of calls from several threads one plans, and the others wait
            key = call_key(model, call)
            special = self._specializations.find(key, call) or self._make(model, call, key)
            self._latest = special
            special.settle()
            return special

    def _make(self, model: nn.Module, call: Call, key: Any) -> Executable:
        if self._specialize is None:
            raise self._specializations.unknown(model, call, key)
        if len(self._specializations) >= self._limit:
            raise self._specializations.too_many(model, call)
        loaded = any(device.type == "meta" for _, device in self._original_devices)
        if len({tensor.device for tensor, _ in self._original_devices}) > 1 and not loaded:
            self._move_back()  # a model is traced where it came from, in one place
        try:
            special = self._specialize(model, call, tuple(self._specializations))
        except BaseException:
            if self._latest is not None:
                self._latest.settle()
            raise
        self._specializations.add(key, special)
        return special

    @property
    def _current(self) -> Executable:
        if self._latest is None:
            raise ExecutionError(
                "this module is not specialized yet: call it once, or give `place` example_args."
            )
        return self._latest

    @property
    def traced(self) -> Traced:
        """The trace of the latest shape of call."""
        return self._current.traced

    @property
    def placement(self) -> Placement:
        """The placement of the latest shape of call."""
        return self._current.placement

    @property
    def program(self) -> Program:
        """The program of the latest shape of call, proved free of races."""
        return self._current.program

    @property
    def remarks(self) -> tuple[str, ...]:
        """Reasons why parts do not run as requested; truth values of the example that must hold."""
        return self._current.remarks

    @property
    def graph(self) -> OpGraph:
        """The graph that was placed."""
        return cast(OpGraph, self._known("graph"))

    @property
    def cluster(self) -> Cluster:
        """The cluster that it was placed on."""
        return cast(Cluster, self._known("cluster"))

    @property
    def schedule(self) -> Schedule:
        """The predicted schedule of a step; on GPUs its peaks include what streams hold."""
        self._known("graph")
        self._known("cluster")
        return cast(Schedule, self._current.schedule)

    def _known(self, what: str) -> Any:
        value = getattr(self._current, what)
        if value is None:
            raise ExecutionError(f"`apply` was not given the {what}; give it {what}=...")
        return value

    def report(self, path: Any = None, *, trace: Any = None) -> str:
        """The placement for people.

        Args:
            path: Where to write a page that a browser opens without a network.
            trace: Where to write a trace that Perfetto opens.

        Returns:
            The report as text.
        """
        from baechi.reporting import Plan, text_report, write_html, write_trace

        parts = (self.graph, self.cluster, self.placement, self.schedule)
        plan = Plan(*parts, self.traced, self._measured.get(self._current))
        if path is not None:
            write_html(path, plan)
        if trace is not None:
            write_trace(trace, Plan(*parts))
        text = str(text_report(plan))
        return "\n".join([text.rstrip("\n"), *self.remarks, ""]) if self.remarks else text

    def measure(
        self, steps: int = 20, *, optimizer: torch.optim.Optimizer | None = None
    ) -> Measurement:
        """Time and peaks of a step of the latest shape, as measured; `report` shows them, too.

        The example inputs run forward, and backward where this was placed for training: from the
        model's own loss where it returns a scalar that has a gradient, else from the sum of all
        outputs that have one. The optimizer makes no step, and gradients, buffers and the random
        state are put back.

        Args:
            steps: The number of timed steps, after some to warm up; the peaks are of others.
            optimizer: Its state counts as memory. Without one, or before its first step, there
                is no state to be measured, and `absent_bytes` says what the plan keeps for it.

        Raises:
            InputError: `steps` is no positive integer.
            ExecutionError: Nothing was placed yet, an operator failed, or this was unplaced.
        """
        self._check_open()
        special = self._current
        measured = measure_steps(special, partial(self.metered, optimizer), steps)
        if special.graph is not None and not (optimizer is not None and optimizer.state):
            n = len(measured.peak_bytes)
            absent = planned_state_bytes(special.traced, special.graph, special.placement, n)
            measured = replace(measured, absent_bytes=absent if any(absent) else ())
        self._measured[special] = measured
        return measured

    @contextmanager
    def metered(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Meter]:
        """Count memory and moved bytes per logical device inside the block; slows it down.

        Args:
            optimizer: The optimizer whose state to count on its parameters' devices.
        """
        if optimizer is not None:
            check_is(optimizer, torch.optim.Optimizer, "optimizer")
        special = self._current
        used = max(special.placement.devices, default=0) + 1
        meter = Meter([0] * (used if special.cluster is None else len(special.cluster.devices)))
        for tensor, device in special.state_devices.items():
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            for value in (tensor, tensor.grad, *state.values()):
                if isinstance(value, torch.Tensor):
                    meter.hold(device, value)
        self._meter = meter
        try:
            yield meter
        finally:
            self._meter = None

    def save(self, folder: Any, *, max_shard: int | str = "5GB") -> None:
        """Write the weights in the safetensors format, as transformers names the files.

        One tensor after the other, tied ones once, through a buffer of 16 MiB on the host. The
        files are what `from_pretrained` and `place(weights=folder)` read; a `config.json` is not
        among them. They are written whole or not at all.

        Args:
            folder: Is made where it is not there; weights that were there go.
            max_shard: The most bytes of a file, such as `"5GB"`; more make several, with an index.
        """
        save_weights(self._model, folder, max_shard)

    def unplace(self) -> nn.Module:
        """The model itself, back on the devices it came from; this module runs no more."""
        for special in self._specializations:
            special.close()
        self._closed = True
        self._move_back()
        return self._model

    def _move_back(self) -> None:
        for tensor, device in self._original_devices:
            if not tensor.is_meta:  # what was read from a file came from no device
                move(tensor, torch.device("cpu") if device.type == "meta" else device)

    def train(self, mode: bool = True) -> "PlacedModule":
        """Set the model's mode; the next call in a new mode is traced anew."""
        self.training = check_is(mode, bool, "mode")
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own state, under its own names."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's own state, in place."""
        return self._model.load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        raise ExecutionError(
            "a placed module stays on the devices that its placement names, so it cannot be moved "
            "or cast: .to(), .cuda(), .cpu(), .half() and their like would undo the placement. "
            "Call model = placed.unplace(), change the model, and place it again."
        )

    def __repr__(self) -> str:
        kind, n = type(self._model).__name__, len(self._specializations)
        return f"PlacedModule({kind}, {n} specialization{'s' if n != 1 else ''})"

    def __reduce__(self) -> NoReturn:
        raise ExecutionError(
            "a placed module has workers and streams and cannot be pickled or copied, nor by "
            "DataParallel. Save placed.state_dict(), and place the model again where you load it."
        )

    _replicate_for_data_parallel = __reduce__


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that is the model's own."""
    return lambda self, *args: getattr(self._model, name)(*args)
