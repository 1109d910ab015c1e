"""CUDA graphs of an executable: which tapes are recorded, and which steps replay them.

On one GPU all tapes of a phase are one graph, with its lanes inside, where no tape forbids it.
`graphed_tape.py` records and replays a tape. `docs/runtime.md` (CUDA graphs) says what is copied
and kept, and when a step is replayed.
"""

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final, final

import torch

from baechi.errors import InputError
from baechi.program.flights import flights
from baechi.records.instructions import Program
from baechi.runtime.autograd.binding import Bound
from baechi.runtime.autograd.step import Step
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.executors.capture_rules import LAUNCHES_NOTHING, obstacle
from baechi.runtime.executors.graphed_tape import GraphedTape, LaunchPhase, Statics, WholeStep
from baechi.torch_support.graph_capture import CudaRecorder, capture_stream
from baechi.torch_support.torch_devices import kernel_choices
from baechi.tracing.lowering import TracedModule

# As many as `torch.cuda.make_graphed_callables` takes: libraries choose their kernels meanwhile.
WARM_UP: Final = 3

# Of how many shapes a family keeps graphs at most, of training steps and of inferences each.
MOST_SHAPES: Final = 4
_MOST_WARMING: Final = 64  # shapes whose eager calls are counted

_IS_GRADED: Final = attrgetter("requires_grad")
_LATE: Final = "gradients of a parameter are added up at the end of a step"


@final
@dataclass
class _Recordings:
    """Of calls of one shape."""

    statics: Statics = field(default_factory=Statics)
    tapes: dict[int, GraphedTape] = field(default_factory=dict)  # by index
    whole: GraphedTape | None = None  # in the place of all


@final
class _Warming(threading.local):
    """The eager calls of each shape in this thread, since libraries warm up for each thread."""

    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}


@final
class _Mode:
    """Recordings of training steps, or of inferences, for the latest shapes of call."""

    def __init__(self) -> None:
        self._state: Any = None
        self._warming = _Warming()
        self.shapes: dict[Any, list[_Recordings]] = {}  # by slot; the latest last
        self.current: list[_Recordings] = []

    def find(self, key: Any, state: Any, most: int, slots: int) -> list[_Recordings]:
        """Those of a shape of call, by slot, empty ones at first; none while it is warming up.

        All are forgotten where the state has changed, whose addresses are in them. Beyond as many
        as may be kept the least recently used are let go of, before others take memory.
        """
        if state != self._state:
            self._state, self._warming, self.shapes = state, _Warming(), {}
            self.current = []
        found = self.shapes.pop(key, None)
        if found is None:
            warming = self._warming.calls
            calls = warming.pop(key, 0)
            if calls < WARM_UP:
                if len(warming) >= _MOST_WARMING:
                    del warming[next(iter(warming))]
                warming[key] = calls + 1
                return []
            while len(self.shapes) >= most:
                del self.shapes[next(iter(self.shapes))]
            found = [_Recordings() for _ in range(slots)]
        self.shapes[key] = self.current = found
        return found


@final
class Graphs:
    """The recordings of an executable, and the choice of the steps that replay them.

    Args:
        module: The traced model.
        program: The program to run.
        bound: To what.
        places: The torch device of every logical device.
        recorder: Makes the recorder of a logical device of any kind, for training steps or for
            inferences; each has memory of its own, since both kinds may be under way at once. By
            default CUDA devices alone are recorded for.
        whole: Whether lanes may share a graph: by default those of one GPU, not of a step in one
            phase.

    Attributes:
        flights: Of a step of one phase: its micro-batches, each with the recordings of its slot.
        most_shapes: The number of shapes of call whose recordings are kept.
    """

    def __init__(
        self,
        module: TracedModule,
        program: Program,
        bound: Bound,
        places: Sequence[torch.device],
        recorder: Callable[[int], CudaRecorder] | None = None,
        *,
        whole: bool | None = None,
    ) -> None:
        self._codes = codes = bound.tapes
        self._sizes = bound.sizes
        self._lanes = Counter(places[device] for device in {tape.device for tape in program.tapes})
        joint = len(program.phases) == 1 and program.is_training
        self.flights = flights(program) if joint else None
        added = {number for code in codes for number, _ in code.totals}
        rows = enumerate(bound.parameters.values())
        self._late = joint and any(slots and n not in added for n, (_, slots) in rows)
        several = len(self._lanes) > 1 and program.is_training
        self._obstacle = partial(obstacle, module, several=several)
        self._anywhere = recorder is not None
        if whole is None:
            whole = len(self._lanes) == 1 < len(codes) and recorder is None
            whole = whole and not joint
        self._why_apart = ""
        self._settle(together=whole)
        self._seeds = tuple((slot,) for result in bound.results.values() for slot in result.grads)
        self._recorder = recorder or _recorders(
            {code.device: code.place for code in self._captured}
        )
        self.most_shapes = 1
        self._modes = {False: _Mode(), True: _Mode()}
        self._ranks = _ranks(program)
        self._open: weakref.ref[Step] | None = None

    def _settle(self, *, together: bool) -> None:
        """Decide what is captured; lanes of one graph draw random numbers in its order."""
        self._obstacles = tuple(
            _LATE
            if self._late
            else self._obstacle(
                code,
                alone=together or self._lanes[code.place] == 1,
                on_cuda=self._anywhere or code.place.type == "cuda",
            )
            for code in self._codes
        )
        self._whole = together and set(self._obstacles) <= {"", LAUNCHES_NOTHING}
        if together and not self._whole:
            self._settle(together=False)
            return
        pairs = zip(self._codes, self._obstacles, strict=True)
        self._captured = [code for code, why in pairs if not why]
        given = (o.given for code in self._codes for o in code.outputs if self._whole)
        state = itertools.chain(given, *(code.template for code in self._captured))
        tensors = {id(value): value for value in state if isinstance(value, torch.Tensor)}
        self._state = tuple(tensors.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason why each tape runs eagerly; empty if it is replayed, or will be."""
        found = list(self._obstacles)
        for recorded in self._known():
            for index, tape in recorded.tapes.items():
                found[index] = found[index] or next(iter(tape.reasons), "")
        return tuple(found)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The number of tapes without CUDA graphs, for each reason; none if all have one."""
        counts = Counter(reason for reason in self.reasons if reason)
        n = len(self._codes)
        apart = f"its lanes are no common CUDA graph: {self._why_apart}"
        rows = [each.whole for each in self._known()]
        return (
            *(apart,) * bool(self._why_apart),
            *(
                f"its lanes are a common CUDA graph, but {why}"
                for whole in rows
                if whole is not None and whole.is_captured
                for why in whole.reasons
            ),
            *(
                f"{count} of {n} tapes run without CUDA graphs: {reason}"
                for reason, count in counts.most_common()
            ),
        )

    def _known(self) -> Iterator[_Recordings]:
        for mode in self._modes.values():
            yield from itertools.chain.from_iterable(mode.shapes.values())

    def demand(self) -> None:
        """Refuse that any tape runs eagerly.

        Raises:
            InputError: Some must.
        """
        reasons = enumerate(self.reasons)
        refused = [f"tape {i}: {why}" for i, why in reasons if why not in ("", LAUNCHES_NOTHING)]
        if refused:
            raise InputError(
                f"cuda_graphs=True, but {len(refused)} of {len(self._codes)} tapes cannot be "
                f'captured ({"; ".join(refused[:3])}). Give cuda_graphs="auto", which runs these '
                "eagerly."
            )

    def begin(self, step: Step, launch: LaunchPhase) -> bool:
        """True if the step that begins is replayed; or launched so, where that fails."""
        if step.meter is not None or not self._captured:
            return False
        if step.differentiate and self._open is not None and self._open() is not None:
            return False  # another has still to go backward: this one would overwrite its values
        key, state = self._key(step)
        mode = self._modes[step.differentiate]
        n_slots = 1 if self.flights is None else self.flights.n
        slots = mode.find(key, state, self.most_shapes, n_slots)
        if not slots:
            return False
        found = slots[0]
        if found.whole is not None and not found.whole.is_captured:
            self._why_apart, found.whole = found.whole.reasons[0], None
            self._settle(together=False)
        if self._whole and found.whole is None:
            found.whole = self._together(launch, found.statics)
        elif not (self._whole or found.tapes):
            for each in slots:
                self._apart(each)
        if step.differentiate:
            self._open = weakref.ref(step)
        return True

    def end(self, step: Step) -> None:
        """A step has gone backward for the last time."""
        if self._open is not None and self._open() is step:
            self._open = None

    def _apart(self, found: _Recordings) -> None:
        """Let every tape be a graph; those of each slot in memory of their own."""
        devices = dict.fromkeys(code.device for code in self._captured)
        recorders = {device: self._recorder(device) for device in devices}
        for code in self._captured:
            recorder, ranks = recorders[code.device], self._ranks[code.index]
            tape = GraphedTape(code, recorder, found.statics, self._sizes, ranks)
            found.tapes[code.index] = tape

    def _together(self, launch: LaunchPhase, statics: Statics) -> GraphedTape:
        first = self._captured[0]
        inputs = (index for code in self._codes for index in code.inputs)
        outputs = (replace(output, slots=()) for code in self._codes for output in code.outputs)
        step = WholeStep(launch, first.place, tuple(inputs), tuple(outputs), self._seeds)
        return GraphedTape(step, self._recorder(first.device), statics, self._sizes, (0, 1))

    def whole(self, step: Step) -> GraphedTape | None:
        """The runner of all tapes of a step that is replayed, where they are one graph."""
        return self._current(step).whole

    def tape(self, step: Step, index: int) -> TapeCode | GraphedTape:
        """The runner of a tape in a step that is replayed."""
        return self._current(step).tapes.get(index) or self._codes[index]

    def statics(self, step: Step) -> Statics:
        """The tensors that stay where they are from step to step."""
        return self._current(step).statics

    def _current(self, step: Step) -> _Recordings:
        return self._modes[step.differentiate].current[step.slot]

    def _key(self, step: Step) -> tuple[Any, Any]:
        """What is recorded for; and the state that must not change, or all is recorded anew."""
        graded = map(_IS_GRADED, self._state) if step.differentiate else ()
        state = (*map(torch.Tensor.data_ptr, self._state), *graded)
        inputs = tuple((t.dtype, t.shape, t.requires_grad) for t in step.inputs)
        casting = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        kernels = (casting, kernel_choices())
        return (kernels, torch.is_inference_mode_enabled(), inputs), state


def _ranks(program: Program) -> list[tuple[int, int]]:
    """The positions of every tape's forward and backward in the order of a step."""
    ranks = [[0, 0] for _ in program.tapes]
    count = itertools.count()
    for phase in program.phases:
        for segment in phase.segments:
            for tape in segment.tapes:
                ranks[tape][segment.backward] = next(count)
    return [(forward, backward) for forward, backward in ranks]


def _recorders(gpus: Mapping[int, torch.device]) -> Callable[[int], CudaRecorder]:
    """Makes recorders of logical devices, each with as much free memory as there is.

    While something is captured the allocator gives nothing back, and the eager steps before have
    left as much in its cache as the graphs will take. Those of one logical device, for training and
    for inference and whenever all is captured anew, capture on one stream: cuBLAS keeps a workspace
    for each, and a lane replays one graph at a time.
    """
    stream = cache(lambda device: capture_stream(gpus[device]))

    def recorder(device: int) -> CudaRecorder:
        torch.cuda.empty_cache()
        return CudaRecorder(gpus[device], stream(device))

    return recorder
