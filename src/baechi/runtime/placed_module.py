"""The placed model: the user's own object, run over several devices.

    placed(x)                self(...) -> Placed -> the placed call
      trace, or placed step    self(...) -> Placed -> the model's own, in this thread

`derived_class.py` has the class, `placed_state.py` what is kept beside the model. Calls of
submodules from outside have plans of their own; `self.forward` runs its submodules each by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn

from baechi.errors import BaechiError, ExecutionError, InputError, NotSpecializedError
from baechi.placers.turn_orders import Rhythm
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph
from baechi.records.instructions import Program
from baechi.records.placement import Measurement, Placement, Schedule
from baechi.runtime.batched_calls import BatchWeights
from baechi.runtime.derived_class import Placed, derive, placed_state, restore
from baechi.runtime.executable import Executable
from baechi.runtime.executors.capture_rules import CudaGraphs
from baechi.runtime.placed_state import KEY, PlacedState
from baechi.runtime.request_streams import Stream
from baechi.runtime.runtime_checks import placed_step, refuse_meta
from baechi.runtime.specialization import Specializations
from baechi.runtime.torch_compile import compile_options
from baechi.runtime.weights import save_weights
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_devices import torch_device
from baechi.traced.traced_model import Traced
from baechi.tracing.faithfulness import refuse_scripted
from baechi.tracing.lowering import TracedModule
from baechi.validation import check_is, check_positive, check_row, check_threads


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
    """The traced model itself, placed: its calls of this shape run over the devices.

    A placement that it has already, by an earlier `apply` or `place`, is replaced.

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
    model = _module_of(traced).model
    refuse_holding(model)
    state = PlacedState(model, ())  # which notes where the weights are, before they move
    special = executable(
        *(traced, placement, devices),
        graph=graph,
        cluster=cluster,
        threads_per_device=threads_per_device,
        compile=compile,
        cuda_graphs=cuda_graphs,
    )
    state.places = special.places
    state.add(state.root, special.module.call, special)
    return installed(state)


def executable(
    traced: Traced,
    placement: Placement,
    devices: Sequence[str | torch.device] | None = None,
    *,
    graph: OpGraph | None,
    cluster: Cluster | None,
    threads_per_device: int | None,
    compile: bool | Mapping[str, Any],  # noqa: A002 (torch's own word)
    cuda_graphs: CudaGraphs,
    **microbatches: Any,
) -> Executable:
    """What `apply` makes of a placement, with its arguments and errors.

    `microbatches` are those of `Executable` that have to do with them.
    """
    if graph is not None:
        check_is(graph, OpGraph, "graph")
    if cluster is not None:
        check_is(cluster, Cluster, "cluster")
    refuse_meta(_module_of(traced).model)
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
    return Executable(
        *(traced, step, placement, places),
        threads=threads_per_device,
        options=options,
        cuda_graphs=cuda_graphs,
        graph=graph,
        cluster=cluster,
        **microbatches,
    )


def _module_of(traced: Traced) -> TracedModule:
    module: TracedModule | None = traced.module
    if module is None:
        raise InputError(
            f"this trace of {traced.name} was loaded from a file and has no model to run; "
            "trace the model again in this process."
        )
    return module


def installed(state: PlacedState) -> "PlacedModule":
    """The model of the state, placed by it and by no other."""
    model = state.model
    earlier = placed_state(model)
    if earlier is None:
        try:
            derive(model, PlacedModule, state)
        except BaechiError:
            state.release()
            raise
    else:
        with earlier.lock:
            earlier.release()
            state.origins = earlier.origins
            vars(model)[KEY] = state
    state.cover()
    return cast(PlacedModule, model)


def refuse_holding(model: nn.Module) -> None:
    """Raise an error for a model that is scripted or holds a placed module."""
    refuse_scripted(model)
    for name, module in model.named_modules():
        if name and isinstance(module, PlacedModule):
            raise InputError(
                f"the model holds a placed module, {name!r}, which no trace goes through; call its "
                "unplace(), and place the whole."
            )


class PlacedModule(nn.Module):
    """A model split over devices: the user's own object, of a class derived from this and its own.

    So it is called, trained, saved and looked into as ever, and its methods, such as `generate`,
    call the placed model. Each shape of call has a specialization, made on its first call where
    `place` made this. Where the model has a name of these itself, that is the model's.

    `.to()`, `.cuda()` and their like leave the weights on the placement's devices; after `.cpu()`
    they are on the host until the next call; a cast plans anew. Copies, pickles and
    `torch.save(placed)` are of the model that is not placed.
    """

    @property
    def traced(self) -> Traced:
        """The trace of the latest shape of call."""
        return _state(self).current.traced

    @property
    def placement(self) -> Placement:
        """The placement of the latest shape of call."""
        return _state(self).current.placement

    @property
    def program(self) -> Program:
        """The program of the latest shape of call, proved free of races."""
        return _state(self).current.program

    @property
    def remarks(self) -> tuple[str, ...]:
        """Reasons why parts do not run as requested; truth values of the example that must hold."""
        return _state(self).remarks

    @property
    def graph(self) -> OpGraph:
        """The graph that was placed."""
        return cast(OpGraph, _state(self).known("graph"))

    @property
    def cluster(self) -> Cluster:
        """The cluster that it was placed on."""
        return cast(Cluster, _state(self).known("cluster"))

    @property
    def schedule(self) -> Schedule:
        """The predicted schedule of a step; on GPUs its peaks include what streams hold."""
        state = _state(self)
        state.known("graph"), state.known("cluster")
        return cast(Schedule, state.current.schedule)

    @property
    def rhythm(self) -> Rhythm | None:
        """The turns of micro-batches of the latest call in order, as they run; None without any."""
        return _state(self).current.rhythm

    def schedule_of(self, *args: Any, **kwargs: Any) -> Schedule:
        """The predicted schedule of a step of another shape, for a call of which there is a plan.

        Nothing of the model runs. Times follow from the costs at the two shapes with which the plan
        began; where costs are measured, those of the second shape are when this is first called.

        Raises:
            NotSpecializedError: There is no plan for such calls.
        """
        return _state(self).schedule_of(args, kwargs)

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The devices, and the device of every parameter: for Accelerate and transformers.

        By it they neither move nor wrap the model. On CPUs alone there is none.
        """
        places = dict.fromkeys(place for place in _state(self).places if place.type != "meta")
        if all(place.type == "cpu" for place in places):
            raise NotSpecializedError("a placement on CPUs has no hf_device_map.")
        return {
            **{str(place): place for place in places},
            **{name: tensor.device for name, tensor in self.named_parameters()},
        }

    @property
    def device(self) -> torch.device:
        """The device of the first parameter; without any, the first of the placement."""
        return next((tensor.device for tensor in self.parameters()), _state(self).places[0])

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first parameter that holds numbers with a fraction."""
        kinds = (tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    @property
    def _specializations(self) -> Specializations:
        return _state(self).root.specializations

    @property
    def _current(self) -> Executable:
        return _state(self).current

    def step(
        self,
        *args: Any,
        targets: Any = None,
        loss: Callable[..., Any] | None = None,
        weights: BatchWeights = "mean",
        **kwargs: Any,
    ) -> torch.Tensor:
        """One training step, forward and backward, whose gradients are added to `.grad`.

        As this loop over the micro-batches, in every bit, but with all devices at work at once, and
        memory for as many of them as that takes:

            for c in chunks: (w_c * loss(model(c), t_c)).backward()

        Args:
            args: Of the model, for the whole batch.
            targets: What the loss compares with; cut like the arguments.
            loss: Of the model's result and the targets, a scalar. None for a model that returns its
                own: as its result, its first item, or as `loss`.
            weights: The weight w_c of each micro-batch: `"mean"`, the same with a sum of 1;
                `"sum"`, 1; or a number for each, such as its share of all tokens.
            kwargs: Of the model.

        Returns:
            The weighted sum of the losses, without a graph.

        Raises:
            InputError: The number of micro-batches does not divide the batch, or an operator mixes
                samples.
            ExecutionError: An operator failed, an argument needs a gradient, or a parameter has a
                hook on its gradient.
        """
        return _state(self).step(args, kwargs, targets, loss, weights)

    def stream(self, requests: Iterable[Any], *, in_flight: int = 4) -> Stream:
        """Outputs of requests, in order, several of them under way at once; without gradients.

        Each is what `placed(...)` gives, in every bit: devices that have nothing to do for one
        request work on later ones. Place for that with `objective="throughput"`; docs/pipelining.md
        has what runs one after the other. Weights and requests must stay as they are meanwhile; a
        call, step or move of the model waits for what is under way.

        Args:
            requests: For each call a tuple of positional arguments, a mapping of keyword arguments,
                or the one argument. They are taken as the outputs are asked for.
            in_flight: The most requests that are taken and whose output is not given yet.

        Returns:
            An iterator. If a request or `requests` fails, its turn raises the error, and the next
            ones go on.

        Raises:
            InputError: `in_flight` is no positive integer; or, at a request's turn, so many, each
                at its peak, do not fit, and the text has the largest number that does.
        """
        call = super(Placed, self).__call__  # type: ignore[misc]
        return Stream(_state(self), call, requests, check_positive(in_flight, "in_flight"))

    def report(self, path: Any = None, *, trace: Any = None) -> str:
        """The placement for people; of ranks each calls this, and gets the same.

        Args:
            path: Where to write a page that a browser opens without a network.
            trace: Where to write a trace that Perfetto opens.

        Returns:
            The report as text.
        """
        from baechi.reporting import Plan, text_report, write_html, write_trace

        state = _state(self)
        special = state.current
        parts = (state.known("graph"), state.known("cluster"), special.placement)
        schedule = cast(Schedule, special.schedule)
        ran = special.ran()
        plan = Plan(*parts, schedule, special.traced, special.measured, ran)
        if path is not None:
            write_html(path, plan)
        if trace is not None:
            write_trace(trace, Plan(*parts, schedule, ran=ran))
        text = str(text_report(plan))
        remarks = state.remarks
        return "\n".join([text.rstrip("\n"), *remarks, ""]) if remarks else text

    def measure(
        self, steps: int = 20, *, optimizer: torch.optim.Optimizer | None = None
    ) -> Measurement:
        """Time and peaks of a step of the latest plan, as measured; `report` shows them, too.

        The example inputs, at the sizes that `schedule` is of, run forward, and backward where this
        was placed for training: from the model's own loss where it returns a scalar that has a
        gradient, else from the sum of all outputs that have one. The optimizer makes no step, and
        gradients, buffers and the random state are put back.

        Args:
            steps: The number of timed steps, after some to warm up; the peaks are of others.
            optimizer: Its state counts as memory. Without one, or before its first step, there
                is no state to be measured, and `absent_bytes` says what the plan keeps for it.

        Raises:
            InputError: `steps` is no positive integer.
            ExecutionError: Nothing was placed yet, or an operator failed.
        """
        metered = partial(PlacedModule.metered, self, optimizer)
        return _state(self).measure(metered, optimizer, steps)

    @contextmanager
    def metered(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Meter]:
        """Count memory and moved bytes per logical device inside the block; slows it down.

        Args:
            optimizer: The optimizer whose state to count on its parameters' devices.
        """
        if optimizer is not None:
            check_is(optimizer, torch.optim.Optimizer, "optimizer")
        state = _state(self)
        if state.ranks is not None:
            raise InputError("steps of ranks are not metered; place the model in one process.")
        special = state.current
        used = max(special.placement.devices, default=0) + 1
        meter = Meter([0] * (used if special.cluster is None else len(special.cluster.devices)))
        state.hold(meter, optimizer)
        state.meter = meter
        try:
            yield meter
        finally:
            state.meter = None

    def save(self, folder: Any, *, max_shard: int | str = "5GB") -> None:
        """Write the weights in the safetensors format, under the names that transformers gives.

        One tensor after the other, tied ones once, through 16 MiB on the host. The files are what
        `from_pretrained` and `place(weights=folder)` read; a `config.json` is not among them. They
        are written whole or not at all.

        Args:
            folder: Is made where it is not there; weights that were there go.
            max_shard: The most bytes of a file, such as `"5GB"`; more make several, with an index.

        Raises:
            InputError: The format has no such dtype, the state is not tensors alone, or a rank has
                a part of it.
            ExecutionError: Nothing was placed yet, so the weights are not there.
        """
        if _state(self).ranks is not None:
            raise InputError("a rank has a part of the model: save what state_dict(full=True) is.")
        save_weights(self, folder, max_shard)

    def unplace(self) -> Self:
        """The same object as it was: of its own class, on the devices it came from.

        What came from files (`weights=`) is on the host then.
        """
        state = _state(self)
        with state.lock:
            state.release()
            state.move_back()
            restore(self)
        return self


def _state(placed: nn.Module) -> PlacedState:
    state = placed_state(placed)
    if state is None:
        raise ExecutionError("this module is not placed: it was copied, or made by hand.")
    return state
