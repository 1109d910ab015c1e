"""Measured steps of a placed model: first their times, then, in other steps, their peaks.

    warm-up          not counted: pages, caches, kernels that are chosen at the first call, captures
    timed steps      without a meter, since counting storages slows a CPU down
    metered steps    the peak of each device, the highest of a few steps

What a step is, and what its loss, is in docs/prediction.md. Nothing of it stays: gradients, buffers
and the random state are put back, whatever ends the steps, Ctrl-C too.
"""

import contextlib
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from baechi.costs.profile_cache import Conditions, Measured, ProfileStore
from baechi.records.graph import OpGraph
from baechi.records.placement import Measurement, Placement
from baechi.runtime.batched_calls import train
from baechi.runtime.executable import Executable
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_devices import device_kind, hardware, torch_threads
from baechi.traced.step_costs import graded_owners, persistent_bytes
from baechi.traced.traced_model import Traced
from baechi.tracing.alias_analysis import copy_of
from baechi.tracing.calling_convention import Call, canonical_call
from baechi.tracing.model_notes import notes_kept
from baechi.tracing.observers import has_observers, without_observers
from baechi.tracing.pytrees import tensors_in
from baechi.tracing.side_effects import step_roots, values_kept
from baechi.units import format_ns
from baechi.validation import check_positive

_WARM_UP: Final = 2
# Workers meet in another order in each step, and so do their peaks.
_METERED: Final = 2
# Rounds of a comparison: the fewest, and the most while it is not clear.
_ROUNDS: Final = (3, 12)
_LONG_ROUNDS: Final = (2, 3)  # of steps that take longer than a round should
_ENOUGH_NS: Final = 4_000_000_000  # after so long, the fewest rounds do
_MOST_STEPS: Final = 5  # of one round
_ROUND_NS: Final = 500_000_000  # steps of a round take about as long, or there is one
_GAIN: Final = 0.02  # less is taken for noise, and the split goes
_METHOD: Final = 3  # changes with what is measured

Reading = Callable[[Callable[[], object]], int]
Metered = Callable[[], AbstractContextManager[Meter]]


def measure_steps(executable: Executable, metered: Metered, steps: int) -> Measurement:
    """Measured steps of a placed model on copies of the call's tensors; `metered` makes a meter.

    Raises:
        InputError: `steps` is no positive integer.
    """
    check_positive(steps, "steps")
    with _running(executable) as run:
        samples = run.times(steps)
        peaks, moved = _peaks(run, metered, executable.places)
    return Measurement(int(statistics.median(samples)), peaks, samples, moved)


@contextlib.contextmanager
def _running(executable: Executable) -> Iterator["_Steps"]:
    """Steps on copies of the call's tensors, of which nothing stays."""
    module = executable.module
    loss = len(executable.traced.ops)  # the op after the forward's, where there is a backward
    loss_device = executable.placement.devices[loss] if executable.training else 0
    placed_for = executable.admission  # a family's graph and schedule may be of a larger shape
    call = module.call if placed_for is None else placed_for.family.call_at(placed_for.reference)
    gpus = sorted({place.index for place in executable.places if place.type == "cuda"})
    with (
        torch.random.fork_rng(gpus),
        values_kept(module.model),
        notes_kept(module.model),
        call.autocast.applied(),
    ):
        yield _Steps(executable, module.model, call, loss_device)


def planned_state_bytes(
    traced: Traced, graph: OpGraph, placement: Placement, n_devices: int
) -> tuple[int, ...]:
    """The optimizer state that the plan keeps on every device, above what it holds without one."""
    graded = graded_owners(traced) if graph.is_training else frozenset()
    state = [0] * n_devices
    for index, (own, op) in enumerate(zip(traced.ops, graph.ops, strict=False)):
        without = persistent_bytes(own, training=index in graded, optimizer=None)
        state[placement.devices[index]] += max(op.persistent_bytes - without, 0)
    return tuple(state)


def _peaks(
    run: "_Steps", metered: Metered, places: Sequence[torch.device]
) -> tuple[tuple[int, ...], int]:
    """The highest peak of every device over a few steps, and the bytes moved in one.

    The allocator reports the peak of a GPU with one logical device, workspaces and rounding
    included. Of several on one GPU, as of CPUs, the live storages are counted. The inputs that the
    caller has are in no peak, but what a device copies or writes of them is.
    """
    alone = {
        device: place
        for device, place in enumerate(places)
        if place.type == "cuda" and places.count(place) == 1
    }
    rows = []
    moved = 0
    for _ in range(_METERED):
        run.clear()
        gc.collect()  # what a cycle still holds is of another step
        with metered() as meter:
            resident = meter.live_bytes
            before: dict[int, int] = {}

            def begun(part: Callable[[], object], before: dict[int, int] = before) -> int:
                if not before:  # the inputs are there
                    for device, place in alone.items():
                        torch.cuda.synchronize(place)
                        torch.cuda.reset_peak_memory_stats(place)
                        before[device] = torch.cuda.memory_allocated(place)
                part()
                return 0

            run.step(begun, meter)
            written = [t for t in run.inputs if meter.knows(t.untyped_storage())]
            peaks = list(meter.peak_bytes)
            for device, place in alone.items():
                if device < len(peaks):  # more torch devices may be given than there are accounts
                    torch.cuda.synchronize(place)
                    above = torch.cuda.max_memory_allocated(place) - before[device]
                    mine = sum(tensor.nbytes for tensor in written if tensor.device == place)
                    peaks[device] = resident[device] + above + mine
            rows.append(peaks)
            moved = meter.moved_bytes
        run.clear()
    return tuple(map(max, zip(*rows, strict=True))), moved


@final
@dataclass
class _Steps:
    """Runs a step at a time, with the same inputs."""

    executable: Executable
    model: nn.Module
    call: Call
    loss_device: int  # is charged with gradients of outputs that are nowhere else
    gradients: list[torch.Tensor] | None = None  # of the outputs
    inputs: tuple[torch.Tensor, ...] = ()

    def times(self, steps: int, warm_up: int = _WARM_UP) -> tuple[int, ...]:
        """Of so many steps, after some to warm up."""
        clock = _Clock(self.executable.places)
        for _ in range(warm_up + self.executable.warm_up):
            self.step(clock.reading, None)
        return tuple(self.step(clock.reading, None) for _ in range(steps))

    def clear(self) -> None:
        """Leave no gradient, and no input."""
        self.inputs = ()
        for parameter in self.model.parameters():
            parameter.grad = None

    def step(self, reading: Reading, meter: Meter | None) -> int:
        """One step; its time, where `reading` runs a part of it and returns the time of that.

        A meter counts the gradients of the outputs too, which a loss would make. The outputs are
        held to the end, as by a training loop that has them in a variable.
        """
        self.clear()
        # Threads of torch's pool that have just worked look for more for some milliseconds, on the
        # cores that the devices' workers are to have.
        with torch_threads(1):
            self.inputs = inputs = tuple(map(copy_of, self.call.tensors))
        args, kwargs = self.call.structure.fill(inputs)
        outputs: list[torch.Tensor] = []
        n = self.executable.batches
        if self.executable.own_loss:
            with without_observers(self.model):
                calls = [replace(self.call, tensors=inputs)] * n
                return reading(partial(train, self.executable, calls, [1 / n] * n, meter))

        # Hooks may take notes that the model's own forward reads; its program does without.
        own = self.executable.unsplit_on is not None and not has_observers(self.model)

        def forward() -> None:
            if own and meter is None:
                plain = partial(type(self.model).__call__, self.model)
                outputs.extend(tensors_in(self.executable.unsplit(plain, args, kwargs)))
                return
            call = replace(canonical_call(self.model, args, kwargs), tensors=inputs)
            with without_observers(self.model):
                outputs.extend(tensors_in(self.executable([call] * n, meter)))

        mode = self.executable.module.gradients
        either = torch.is_grad_enabled() and not self.executable.is_inference
        with torch.set_grad_enabled(either if mode is None else mode):
            forward_ns = reading(forward)
        if not self.executable.training:
            return forward_ns
        roots = step_roots(outputs)
        if not roots:
            return forward_ns
        if meter is not None:
            loss = _Loss.apply(meter, self.loss_device, *roots)  # type: ignore[no-untyped-call]
            return forward_ns + reading(lambda: torch.autograd.backward(loss))
        if [gradient.shape for gradient in self.gradients or ()] != [root.shape for root in roots]:
            with torch_threads(1):  # again where sizes are drawn at random
                self.gradients = [torch.ones_like(root) for root in roots]
        gradients = self.gradients
        return forward_ns + reading(lambda: torch.autograd.backward(roots, gradients))


class _Loss(torch.autograd.Function):
    """A loss whose backward makes the outputs' gradients where these are, and holds on to none."""

    @staticmethod
    def forward(ctx: Any, meter: Meter, account: int, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.meter = meter
        rows = ((meter.account_of(t, account), t.shape, t.dtype, t.device) for t in outputs)
        ctx.outputs = list(rows)
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        found = []
        for account, shape, dtype, on in ctx.outputs:
            with ctx.meter.counting(account):
                found.append(torch.ones(shape, dtype=dtype, device=on))
        return None, None, *found


@final
class _Clock:
    """Times a part of a step: on one GPU between two events of its stream, else on the wall.

    Events of two GPUs cannot be compared, so there the wall's clock runs from when all are idle to
    when all are again.
    """

    def __init__(self, places: Sequence[torch.device]) -> None:
        self._gpus = sorted({p for p in places if p.type == "cuda"}, key=lambda p: p.index)
        self._by_events = len(self._gpus) == 1 and all(p.type == "cuda" for p in places)

    def reading(self, part: Callable[[], object]) -> int:
        """The time of `part` in ns."""
        self._synchronize()
        if self._by_events:
            stream = torch.cuda.current_stream(self._gpus[0])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            part()
            end.record(stream)
            end.synchronize()
            return int(start.elapsed_time(end) * 1e6)
        began = time.perf_counter_ns()
        part()
        self._synchronize()
        return time.perf_counter_ns() - began

    def _synchronize(self) -> None:
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured times of a step: split as placed, and on the best single device.

    Attributes:
        spread_ns: Between the quartiles, over the rounds, of what the split saves.
    """

    split_ns: int
    single_ns: int
    spread_ns: int = 0

    @property
    def prefers_split(self) -> bool:
        """True if the split is clearly faster."""
        return self.single_ns - self.split_ns > self._noise_ns

    @property
    def is_clear(self) -> bool:
        """True if what lies between the two is more than noise."""
        return abs(self.single_ns - self.split_ns) > self._noise_ns

    @property
    def _noise_ns(self) -> float:
        return max(_GAIN * self.single_ns, self.spread_ns)

    def __str__(self) -> str:
        kept = "the split" if self.prefers_split else "one device"
        return (
            f"measured: {format_ns(self.split_ns)} a step as split, {format_ns(self.single_ns)} on "
            f"one device; {kept} is kept (guard=False takes the predicted one)"
        )


def remembered(
    traced: Traced, n_ops: int, places: Sequence[torch.device], *, graphs: bool
) -> Comparison | None:
    """What `compare` found before for a model whose graph has so many ops; None if nothing."""
    with ProfileStore() as store:
        known = store.find(_key(traced, n_ops, graphs=graphs), _conditions(places))
    if known is None:
        return None
    return Comparison(known.forward_ns, known.backward_ns, known.forward_spread_ns)


def compare(split: Executable, single: Executable) -> Comparison:
    """The steps of both, from the store of costs or measured; nothing of the steps stays."""
    traced, n_ops, places = split.traced, len(split.placement.devices), split.places
    graphs = split.graphs is not None
    if known := remembered(traced, n_ops, places, graphs=graphs):
        return known
    predicted_ns = 0 if split.schedule is None else split.schedule.makespan_ns
    steps = min(_MOST_STEPS, _ROUND_NS // max(1, predicted_ns))
    found = compared(partial(_medians, (split, single), steps), long=not steps)
    kept = Measured(found.split_ns, found.single_ns, forward_spread_ns=found.spread_ns)
    with ProfileStore() as store:
        store.keep(_key(traced, n_ops, graphs=graphs), _conditions(places), kept)
    return found


def compared(
    measure: Callable[[], Sequence[int]],
    *,
    long: bool = False,
    wall: Callable[[], int] = time.perf_counter_ns,
) -> Comparison:
    """What rounds of (split, single) times say, more of them while that is not clear.

    The two are compared within each round, so a machine whose speed changes changes both. Of `long`
    steps few rounds are made; of any, once time is up, no more than the fewest.
    """
    least, most = _LONG_ROUNDS if long else _ROUNDS
    end = wall() + _ENOUGH_NS
    rows: list[Sequence[int]] = []
    while True:
        rows.append(measure())
        if len(rows) < least:
            continue
        split_ns, single_ns = (int(statistics.median(column)) for column in zip(*rows, strict=True))
        low, _, high = statistics.quantiles([one - two for two, one in rows], n=4)
        found = Comparison(split_ns, single_ns, int(high - low))
        if found.is_clear or len(rows) == most or wall() > end:
            return found


def _medians(ways: Sequence[Executable], steps: int) -> list[int]:
    """Of a step of each, after one that finds the caches of the way before."""
    found = []
    for special in ways:
        special.settle()
        with _running(special) as run:
            found.append(int(statistics.median(run.times(max(1, steps), warm_up=1))))
    return found


def _key(traced: Traced, n_ops: int, *, graphs: bool) -> str:
    """The operators, with shapes and constants: a split of them, and all on one device.

    Not which split: links of GPUs are measured anew in each process, and splits differ by that.
    """
    text = f"{traced.digest} {n_ops}{' as graphs' if graphs else ''}"
    return f"step {hashlib.sha256(text.encode()).hexdigest()}"


def _conditions(places: Sequence[torch.device]) -> Conditions:
    return Conditions(
        kind=", ".join(map(device_kind, places)),
        hardware=", ".join(dict.fromkeys(map(hardware, places))),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        settings="a step",
        method=_METHOD,
    )
