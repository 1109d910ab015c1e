"""Replay of an executable's steps: warm-up, recording, replay.

call 1..3   eager: libraries choose their kernels
call 4      recorded, tape by tape, and replayed
call 5..    replayed
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from baechi.errors import InputError
from baechi.records.instructions import Program
from baechi.runtime.autograd.step_state import Sizes, Step
from baechi.runtime.autograd.tape import TapeCode
from baechi.runtime.cuda_graphs.capture_rules import LAUNCHES_NOTHING
from baechi.runtime.cuda_graphs.recorded_tape import GraphedTape, Recorder, Statics

# As many as `torch.cuda.make_graphed_callables` takes: libraries choose their kernels meanwhile.
WARM_UP: Final = 3


@final
@dataclass
class _Mode:
    """Recordings of training steps, or of inferences.

    Attributes:
        key: State that must not change, or they are recorded anew.
        steps: The number of eager steps that warmed up.
        statics: Where everything stays.
        tapes: By index, those that may be recorded.
    """

    key: Any = None
    steps: int = 0
    statics: Statics = field(default_factory=Statics)
    tapes: dict[int, GraphedTape] = field(default_factory=dict)


@final
class Graphs:
    """The recordings of an executable, and the choice of the steps that replay them.

    A step runs eagerly while it warms up, while it is metered, and while another step, whose
    forward was a replay, has still to go backward: its activations are where this one's would go.
    Recordings are made anew when a parameter or buffer has moved or was frozen, when other inputs
    need a gradient, or under another autocast.

    Args:
        program: The program to run.
        codes: Its tapes.
        sizes: Of a step's lists.
        obstacles: For each tape why it must run eagerly; empty if it need not.
        recorder: Makes the recorder of a logical device, for training steps or for inferences;
            each has memory of its own, since both kinds may be under way at once.
    """

    def __init__(
        self,
        program: Program,
        codes: Sequence[TapeCode],
        sizes: Sizes,
        obstacles: Sequence[str],
        recorder: Callable[[int], Recorder],
    ) -> None:
        self._codes = codes
        self._sizes = sizes
        self._obstacles = tuple(obstacles)
        self._recorder = recorder
        self._modes = {False: _Mode(), True: _Mode()}
        self._ranks = _ranks(program)
        self._open: weakref.ref[Step] | None = None
        state = {
            id(value): value
            for code, obstacle in zip(codes, obstacles, strict=True)
            if not obstacle
            for value in code.template
            if isinstance(value, torch.Tensor)
        }
        self._state = tuple(state.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason why each tape runs eagerly; empty if it is replayed, or will be."""
        found = list(self._obstacles)
        for mode in self._modes.values():
            for index, tape in mode.tapes.items():
                found[index] = found[index] or tape.reason
        return tuple(found)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The number of tapes without CUDA graphs, for each reason; none if all have one."""
        counts = Counter(reason for reason in self.reasons if reason)
        n = len(self._codes)
        return tuple(
            f"{count} of {n} tapes run without CUDA graphs: {reason}"
            for reason, count in counts.most_common()
        )

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

    def begin(self, step: Step) -> bool:
        """True if the step that begins is replayed."""
        if step.meter is not None or all(self._obstacles):
            return False
        mode = self._modes[step.differentiate]
        if step.differentiate and self._open is not None and self._open() is not None:
            return False
        key = self._key(step)
        if key != mode.key:
            mode = self._modes[step.differentiate] = _Mode(key)
        if mode.steps < WARM_UP:
            mode.steps += 1
            return False
        if not mode.tapes:
            recorders: dict[int, Recorder] = {}
            for code, obstacle in zip(self._codes, self._obstacles, strict=True):
                if not obstacle:
                    if code.device not in recorders:
                        recorders[code.device] = self._recorder(code.device)
                    recorder, ranks = recorders[code.device], self._ranks[code.index]
                    tape = GraphedTape(code, recorder, mode.statics, self._sizes, ranks)
                    mode.tapes[code.index] = tape
        if step.differentiate:
            self._open = weakref.ref(step)
        return True

    def end(self, step: Step) -> None:
        """A step has gone backward for the last time."""
        if self._open is not None and self._open() is step:
            self._open = None

    def tape(self, step: Step, index: int) -> TapeCode | GraphedTape:
        """The runner of a tape in a step that is replayed."""
        return self._modes[step.differentiate].tapes.get(index) or self._codes[index]

    def statics(self, step: Step) -> Statics:
        """The tensors that stay where they are from step to step."""
        return self._modes[step.differentiate].statics

    def _key(self, step: Step) -> tuple[Any, ...]:
        state = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in self._state)
        inputs = tuple((t.dtype, t.shape, t.requires_grad) for t in step.inputs)
        casting = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return casting, torch.is_inference_mode_enabled(), inputs, state


def _ranks(program: Program) -> list[tuple[int, int]]:
    """The positions of every tape's forward and backward in the order of a step."""
    ranks = [[0, 0] for _ in program.tapes]
    count = 0
    for number, phase in enumerate(program.phases):
        for segment in phase.segments:
            for tape in segment.tapes:
                ranks[tape][number] = count
                count += 1
    return [(forward, backward) for forward, backward in ranks]
