"""A traced model bound to a placement and to torch devices: what one call runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from operator import le
from typing import Any, Final, NoReturn, cast, final

import torch

from baechi.errors import ExecutionError
from baechi.placers.turn_orders import Rhythm, ordered_turns
from baechi.problem.segments import instant_ops, segments_of
from baechi.processes.agreement import compare_batches
from baechi.processes.world import Ranks
from baechi.program.compilation import Turns, compile_program
from baechi.program.race_proof import check_program
from baechi.program.stream_memory import scheduled
from baechi.records.cluster import Cluster
from baechi.records.graph import OpGraph, StepStructure
from baechi.records.instructions import Program
from baechi.records.placement import Measurement, Placement, Schedule
from baechi.runtime.accepted_calls import AcceptedCalls
from baechi.runtime.admission import Admission
from baechi.runtime.autograd.binding import Bound, bind
from baechi.runtime.autograd.step import Step
from baechi.runtime.executors.capture_rules import CudaGraphs, check_wish
from baechi.runtime.executors.cpu_workers import CpuExecutor, RunningCall
from baechi.runtime.executors.cuda_graphs import WARM_UP, Graphs
from baechi.runtime.executors.cuda_streams import CudaExecutor
from baechi.runtime.executors.rank_slice import RankCall, RankExecutor
from baechi.runtime.request_memory import check_requests, request_bytes
from baechi.runtime.returned_values import ReturnedValues
from baechi.runtime.runtime_checks import GradientGuard, StateGuard
from baechi.runtime.step_function import Executor, Leaves, Plan, StepFunction
from baechi.runtime.torch_compile import CompiledTape, CompileOptions, compiling, mode_of
from baechi.runtime.weights import devices_of_state, move
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_devices import gpus_of
from baechi.torch_support.torch_internals import gradient_hooks, is_hooked
from baechi.traced.traced_model import Traced
from baechi.tracing.batch_dimension import BatchDimensions
from baechi.tracing.calling_convention import Call
from baechi.tracing.lowering import TracedModule
from baechi.tracing.observers import RETURN_IT, has_observers, observers_in, observing
from baechi.tracing.recurrent_layers import compact
from baechi.tracing.subgraph import opaque_leaves, unsplit_part
from baechi.tracing.truth_values import truth_values_of

_AS_SHORT: Final = 1.01
_MOST_KEPT: Final = 1024  # compiled modes that are kept


@final
class Executable:
    """A traced model on its devices, for one shape of call or a family of them.

    `places` has the torch device of every logical device. `options` are of `torch.compile`; None
    leaves tapes as generated. `graph` and `cluster` are those that were placed, where known.
    `batches` is how many micro-batches of the traced shape it runs; `own_loss` whether the model
    returns a loss for each, so that a step is one phase; `dimensions` those along which
    outputs of micro-batches are put together. Of `ranks` each has one logical device, and this
    runs that of this process.

    Attributes:
        program: The program to run; proved.
        state_devices: The logical device of every parameter, buffer and constant.
        attributes: Of the model's modules, for whose values this runs.
        state_guard: The model's parameters and buffers, with which this runs; checked by callers,
            except where the model itself could have run.
        calls: The calls that it runs.
        family: Those of other sizes; None if there are none.
        admission: Those of them that fit; None if that is unknown.
        note: Why it has no family though calls of other sizes came; else empty.
        comparison: How it was found faster than another placement by measurement; else empty.
        measured: What its steps were measured to take, if they were.
        settled_at: The count of the model's moves when its weights were last in place; else -1.
        unsplit_on: The device of all, if the model itself runs in place of the program.

    Raises:
        InputError: CUDA graphs are demanded, and a tape cannot be one.
    """

    def __init__(
        self,
        traced: Traced,
        structure: StepStructure,
        placement: Placement,
        places: Sequence[torch.device],
        *,
        threads: int | None = None,
        options: CompileOptions | None = None,
        cuda_graphs: CudaGraphs = False,
        graph: OpGraph | None = None,
        cluster: Cluster | None = None,
        batches: int = 1,
        own_loss: bool = False,
        dimensions: BatchDimensions | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        check_wish(cuda_graphs, places, 1 if own_loss else batches)
        self.traced = traced
        self.placement = placement
        self.graph, self.cluster, self.ranks = graph, cluster, ranks
        module: TracedModule = traced.module
        self.module = module
        self.family = module.family
        self.admission: Admission | None = None
        self.unsplit_on: torch.device | None = None
        self.wants_gradients = True
        self._compared = False
        self.rhythm: Rhythm | None = None
        self.measured: Measurement | None = None
        self.note = self.comparison = ""
        self._request_bytes: dict[Any, list[tuple[int, int]]] = {}  # by sizes of a call
        self.places = tuple(places)
        self.training = structure.is_training
        self._structure = structure
        # With a graph those of the clock, so that segments and their turns are as predicted.
        self._instant = _instant(module, structure) if graph is None else instant_ops(graph)
        self.batches, self.dimensions, self.own_loss = batches, dimensions, own_loss
        self.state_devices = devices_of_state(module, placement.devices, named=ranks is not None)
        self._streams = ranks is None and any(place.type == "cuda" for place in places)
        # CPU workers share one generator: drawing in launch order makes a seed mean something.
        drawing = {i for i, op in enumerate(traced.ops) if op.random and not self._streams}
        self.program = self._compiled(copy_lanes=self._streams, in_turn=drawing)
        self.settle()
        bound = bind(module, structure, self.program, places, options)
        self._threads = threads
        self._modes: set[Any] | None = None if options is None else set()
        self.graphs: Graphs | None = None
        if cuda_graphs is not False and (batches == 1 or own_loss):
            self.graphs = Graphs(module, self.program, bound, places)
            if cuda_graphs is True:
                self.graphs.demand()
        self._executor = self._executor_of(bound, self.graphs)
        nodes = module.graph_module.graph
        numbers = {node: i for i, node in enumerate(bound.results)}
        self._returned = ReturnedValues(module, numbers, dimensions)
        self.calls = AcceptedCalls(traced, bound.parameters, training=self.training)
        self._gradient_guard = GradientGuard(module)
        self.state_guard = StateGuard(module.model, module.graph_module)
        self._trainable = [p for p in bound.parameters if p.requires_grad and not p.is_meta]
        self.renew(-1)
        leaves = list(opaque_leaves(module.graph_module, nodes.nodes).values())
        self.attributes = module.attributes
        self.observed = any(observers_in(nodes.nodes)) or any(map(has_observers, leaves))
        self._whole = frozenset(parameter for leaf in leaves for parameter in leaf.parameters())

    def _compiled(self, **options: Any) -> Program:
        if self.batches > 1 or self.own_loss:
            known = self.graph is not None and self.cluster is not None
            options |= {"batches": self.batches, "joined": not self.own_loss, "schedule": None}
            options |= {"writers": _writers(self.module), "order": self._turns if known else None}
        program = compile_program(self._structure, self.placement, instant=self._instant, **options)
        check_program(program)
        return program

    def _turns(self, segments: Sequence[Sequence[int]]) -> Turns:
        """The turns of the micro-batches in order, by the clock."""
        graph, cluster = cast(OpGraph, self.graph), cast(Cluster, self.cluster)
        joined = self.training and not self.own_loss
        gpus = gpus_of(self.places[: len(cluster.devices)])
        order = partial(ordered_turns, graph, segments=segments, joined=joined, gpus=gpus)
        self.rhythm = found = order(cluster, self.placement, self.batches)
        # Where memory is ample the shortest order may run far ahead: one with few micro-batches
        # in flight is often as short.
        few = len(set(self.placement.devices))
        while self.own_loss and few < self.batches:
            other = order(cluster, self.placement, self.batches, in_flight=few)
            peaks = other.peak_bytes, found.peak_bytes
            less = sum(peaks[0]) < sum(peaks[1]) and all(map(le, *peaks))
            if less and other.step_ns <= found.step_ns * _AS_SHORT:
                self.rhythm = other
                if other.segments == segments_of(graph, self.placement):
                    self.placement = replace(self.placement, turns=other.turns)
                break
            few *= 2
        return self.rhythm.turns

    def _executor_of(self, bound: Bound, graphs: Graphs | None = None) -> Executor:
        """Workers on CPUs, streams where a device is a GPU; of ranks one thread."""
        if self.ranks is not None:
            random, sizes = len(self._structure.groups), [0]
            if self.graph is not None:
                sizes += [tensor.nbytes for tensor in self.graph.tensors]
            return RankExecutor(self.program, bound, self.ranks, random, max(sizes))
        if self._streams:
            return CudaExecutor(self.program, bound, self.places, graphs)
        return CpuExecutor(self.program, bound, len(self.places), self._threads)

    @cached_property
    def schedule(self) -> Schedule | None:
        """The predicted schedule of a step, where graph and cluster are known."""
        graph, cluster = self.graph, self.cluster
        if graph is None or cluster is None:
            return None
        return scheduled(
            *(graph, cluster, self.placement, gpus_of(self.places[: len(cluster.devices)])),
            replayed=self.graphs is not None,
            program=self.program,
        )

    @cached_property
    def _counted(self) -> Executor:
        """For metered steps: on CPUs one thread, with copies as between real devices."""
        if self._streams and self._modes is None:
            return self._executor
        program = self.program
        if not self._streams:
            # Segments of micro-batches are those of other steps, and so is the order of turns.
            cut = self.batches > 1 or self.own_loss
            program = self._compiled(copy_lanes=not cut, one_thread=True, schedule=self.schedule)
        bound = bind(self.module, self._structure, program, self.places)
        return CudaExecutor(program, bound, self.places)

    @property
    def warm_up(self) -> int:
        """After how many calls of a kind all that can be a CUDA graph is one."""
        return 0 if self.graphs is None else WARM_UP + 1

    def unsplit(
        self, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of the model itself, which `plain` calls."""
        if self.wants_gradients:
            return plain(*args, **kwargs)
        with torch.no_grad():
            return plain(*args, **kwargs)

    @property
    def is_inference(self) -> bool:
        """True if calls with gradients are refused, as of a cache that forward writes into."""
        return bool(self._gradient_guard.rewritten)

    def holds(self) -> bool:
        """True if the model's attributes are those for which this runs; its own Python reads them.

        So where the model itself runs, they may be others.
        """
        return self.unsplit_on is not None or self.attributes.hold()

    @property
    def is_settled(self) -> bool:
        """True if every parameter and buffer is where this placement needs it."""
        return all(
            tensor.device == self.places[home] for tensor, home in self.state_devices.items()
        )

    def settle(self) -> None:
        """Move every parameter and buffer, and its gradient, to where this placement needs it."""
        for tensor, device in self.state_devices.items():
            move(tensor, self.places[device])
        compact(self.module.model)

    def renew(self, settled_at: int) -> None:
        """Forget torch's nodes of parameters that were elsewhere meanwhile, and have new ones."""
        self.settled_at = settled_at
        self._leaves: Leaves | None = None

    @contextmanager
    def running(self, change: Callable[[Bound], Bound]) -> Iterator[None]:
        """Run another code of the same program inside the block, on workers of its own."""
        usual = self._executor
        bound = change(bind(self.module, self._structure, self.program, self.places))
        self._executor = executor = self._executor_of(bound)
        try:
            yield
        finally:
            self._executor = usual
            executor.close()

    def close(self) -> None:
        """Stop the workers."""
        self._executor.close()

    @cached_property
    def _alone(self) -> Executor:
        """The same tapes in one thread: a mode's first step, which compiles; and hooked ones."""
        executor = self._executor
        if not isinstance(executor, CpuExecutor) or executor.threads is None:
            return executor
        return CudaExecutor(self.program, executor.bound, self.places)

    @property
    def stale(self) -> str:
        """A sentence about what forward changes in Python, if that does not run."""
        names = self.module.sets if self.unsplit_on is None else ()
        if not names:
            return ""
        return (
            f"forward of this {type(self.module.model).__name__} changes {', '.join(names[:4])} in "
            "Python, which placed calls do not run: they leave that as it is, and go on with the "
            "values of the trace. Return what is used outside; what goes on from call to call has "
            "to be an argument, or a buffer that forward writes into (`self.steps.add_(1)`), and "
            "random numbers torch's. What is the same in every call may stay."
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Reasons why parts do not run as requested; truth values that calls must repeat."""
        functions = (tape.function for tape in self._executor.bound.tapes)
        compiled = (f for f in functions if isinstance(f, CompiledTape))
        rows = tuple(function.remark for function in compiled if function.reason is not None)
        rows += truth_values_of(self.module.graph_module.graph)
        rows += tuple(text for text in (self.note, self.comparison) if text)
        if self.unsplit_on is not None and (changed := self.attributes.changed()):
            rows += (f"schedule and costs are of before a change, which calls see: {changed}.",)
        rows += () if self.dimensions is None else self.dimensions.remarks
        rows += (self.stale,) if self.stale else ()
        if len(self.places) > 1 and (unsplit := unsplit_part(self.traced)):
            rows += (unsplit,)
        return rows if self.graphs is None else rows + self.graphs.remarks

    def __call__(self, call: Call | Sequence[Call], meter: Meter | None = None) -> Any:
        """The model's own return value for a call of the traced shape, or one that joined.

        Of micro-batches the one that they make together.
        """
        self._check_own_state()
        calls = [self.calls.carrying(each) for each in ([call] if isinstance(call, Call) else call)]
        if not self.observed:
            return self._called(calls, meter)
        with observing():
            result = self._called(calls, meter)
        if not self.attributes.hold():
            names = {name for _, name in self.attributes.set_since() & self.module.reads}
            names |= self.attributes.set_outside()
            if names:
                raise ExecutionError(
                    f"a hook sets {min(names)!r}, which forward reads: the trace has the value of "
                    f"before. {RETURN_IT}"
                )
            self.attributes = self.attributes.settled()
        return result

    def _check_own_state(self) -> None:
        if self.unsplit_on is not None:
            self.state_guard.check()

    def _called(self, calls: Sequence[Call], meter: Meter | None) -> Any:
        with self._executing(calls[0], meter) as executor:
            return self._run(executor, calls, meter)

    def _mode(self, call: Call) -> Any:
        """Of the compiled functions that such a call runs."""
        parameters = tuple(self._executor.bound.parameters)
        hooked = any(gradient_hooks(parameter) for parameter in parameters)
        return mode_of(call, parameters, self.training and torch.is_grad_enabled()), hooked

    @contextmanager
    def _executing(self, call: Call, meter: Meter | None) -> Iterator[Executor]:
        """What runs such calls: in the first step of a compiled mode, the block, one thread."""
        if self.ranks is not None and not self._compared:
            compare_batches(self.ranks, call.tensors, any(op.random for op in self.traced.ops))
            self._compared = True
        executor, modes = self._executor if meter is None else self._counted, self._modes
        if modes is None or meter is not None or (mode := self._mode(call)) in modes:
            yield executor
            return
        waiting = nullcontext() if self.ranks is None else self.ranks.compiling()
        with waiting, compiling(executor.threads if isinstance(executor, CpuExecutor) else None):
            yield self._alone
        if len(modes) >= _MOST_KEPT:
            modes.clear()
        modes.add(mode)

    def _run(self, executor: Executor, calls: Sequence[Call], meter: Meter | None) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            executor = self._alone if self.observed and meter is None else executor
            with torch.no_grad():
                steps = [Step(False, meter, call.tensors, executor.bound.sizes) for call in calls]
                executor.run(steps, 0)
            for step in steps:
                step.write_back()
            return self._returned.of(calls, [step.results for step in steps])
        executor, steps = self._begun(executor, calls, meter)
        leaves = self._leaves
        if leaves is None or leaves.bound is not executor.bound or not leaves.are_same():
            leaves = self._leaves = Leaves(self._trainable, executor.bound)
        if leaves.hooked & self._whole:
            self._refuse_hook(leaves.hooked)
        for step in steps:
            step.apart = bool(leaves.hooked)
        plan = Plan(executor, steps, calls, leaves)
        inputs = [tensor for *_, tensor in plan.graded]
        tokens = StepFunction.apply(plan, plan.token, *inputs)  # type: ignore[no-untyped-call]
        return self._returned.of(calls, plan.merge(tokens))

    def forget_node(self) -> None:
        """Let go of the parameters' node, in which autograd has noted their shapes."""
        self._leaves = None

    def ran(self) -> Sequence[Sequence[tuple[str, int, int]]]:
        """What each rank did in its latest step, if there are ranks; each calls this."""
        return self._executor.ran() if isinstance(self._executor, RankExecutor) else ()

    @contextmanager
    def begun(
        self, calls: Sequence[Call], meter: Meter | None
    ) -> Iterator[tuple[Executor, list[Step]]]:
        """A step with gradients for each micro-batch, and what runs them in the block."""
        self._check_own_state()
        with self._executing(calls[0], meter) as executor:
            yield self._begun(executor, calls, meter)

    def _begun(
        self, executor: Executor, calls: Sequence[Call], meter: Meter | None
    ) -> tuple[Executor, list[Step]]:
        """A step with gradients for each micro-batch, and what runs them.

        Raises:
            ExecutionError: The arguments are such that their gradients would be lost.
        """
        self._gradient_guard.check(calls)
        if self.ranks is not None and any(t.requires_grad for c in calls for t in c.tensors):
            raise ExecutionError(
                "an argument needs a gradient, which only the rank that reads it would have. "
                "Detach it; or place the model in one process."
            )
        if is_hooked() or self.observed:
            # Hooks are of the caller's thread.
            executor = self._alone if meter is None else executor
        steps = [Step(True, meter, call.tensors, executor.bound.sizes) for call in calls]
        for step, call in zip(steps, calls, strict=True):
            for value, tensor in zip(executor.bound.input_values, call.tensors, strict=True):
                step.flags[value] = tensor.requires_grad
        return executor, steps

    @cached_property
    def _is_pure(self) -> bool:
        """True if calls without gradients neither write into state or arguments nor draw."""
        facts, nodes = self.module.facts, self.module.graph_module.graph.nodes
        given = [facts.nodes[n] for n in nodes if n.op in ("placeholder", "get_attr")]
        writes = any(value.storage in facts.written for row in given for value in row.values)
        unknown = opaque_leaves(self.module.graph_module, nodes)
        return not (writes or unknown or any(op.random for op in self.traced.ops))

    def overlaps(self, call: Call) -> bool:
        """True if such calls may be under way side by side, on workers."""
        executor = self._executor
        workers = isinstance(executor, CpuExecutor) and executor.threads is not None
        workers = workers or isinstance(executor, RankExecutor)
        modes = self._modes
        plain = not self.observed and not call.objects
        plain = plain and (modes is None or self._mode(self.calls.carrying(call)) in modes)
        return workers and plain and self.unsplit_on is None and self._is_pure

    def begin(self, calls: Sequence[Call], in_flight: int) -> RunningCall | RankCall:
        """Begin a call without gradients, beside up to `in_flight - 1` others."""
        executor = self._executor
        assert isinstance(executor, CpuExecutor | RankExecutor)
        self._check_memory(calls[0], in_flight)
        calls = [self.calls.carrying(call) for call in calls]
        with torch.no_grad():
            steps = [Step(False, None, call.tensors, executor.bound.sizes) for call in calls]
            results = [step.results for step in steps]
            return executor.begin(steps, lambda: self._returned.of(calls, results))

    def _check_memory(self, call: Call, in_flight: int) -> None:
        """Raise an error where so many calls, each at its peak, exceed a device's memory."""
        graph, cluster = self.graph, self.cluster
        if in_flight == 1 or graph is None or cluster is None:
            return
        sizes = None if self.family is None else self.family.joined(call)
        if sizes not in self._request_bytes:
            if sizes is not None and self.admission is not None:
                graph = self.admission.graph_at(sizes)
            self._request_bytes[sizes] = request_bytes(graph, cluster, self.placement)
        check_requests(in_flight, self._request_bytes[sizes], cluster, self.batches)

    def _refuse_hook(self, hooked: frozenset[torch.nn.Parameter]) -> NoReturn:
        """Refuse hooks that tapes cannot cut off: each would run them."""
        named = self.module.model.named_parameters()
        name = next(name for name, p in named if p in hooked & self._whole)
        raise ExecutionError(
            f"parameter {name!r} has a hook on its gradient (register_hook), which would run "
            "twice: it is in a submodule that tracing leaves whole. Use "
            "register_post_accumulate_grad_hook."
        )


def _writers(module: TracedModule) -> frozenset[int]:
    """The operators that write into state."""
    facts, graph = module.facts.nodes, module.graph_module.graph
    state = {v.storage for node in graph.find_nodes(op="get_attr") for v in facts[node].values}
    leaves = opaque_leaves(module.graph_module, graph.nodes)
    writing = {name for name, leaf in leaves.items() if list(leaf.buffers())}
    return frozenset(
        op
        for op, nodes in enumerate(module.nodes)
        for node in nodes
        if str(node.target) in writing or not state.isdisjoint(facts[node].writes)
    )


def _instant(module: TracedModule, structure: StepStructure) -> frozenset[int]:
    """Ops that take no time: they pass on inputs or state, or return results."""
    kinds = ("placeholder", "get_attr")
    rows = enumerate(module.nodes)
    given = {op for op, nodes in rows if all(node.op in kinds for node in nodes)}
    return frozenset(
        index
        for index, op in enumerate(structure.ops)
        if (index in given if op.phase == "forward" else given.issuperset(op.forward))
    )
