"""Comparison of a split with the best single device, by measured steps.

    split, one device, split, one device        rounds in turns, so that a busy minute meets both

A prediction may be wrong where operators are short. What was measured once is kept beside the
costs, for a placement of the same operators on the same hardware.
"""

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from baechi.costs.profile_cache import Conditions, Measured, ProfileStore
from baechi.runtime.executable import Executable
from baechi.runtime.step_measurement import step_times
from baechi.torch_support.torch_devices import device_kind, hardware
from baechi.units import format_ns

_ROUNDS: Final = 3
_MOST_STEPS: Final = 5  # of one round
_ROUND_NS: Final = 500_000_000  # steps of a round take about as long, or there is one
_GAIN: Final = 0.02  # less is taken for noise, and the prediction holds
METHOD: Final = 1  # changes with what is measured


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """Measured times of a step: split as placed, and on the best single device."""

    split_ns: int
    single_ns: int

    @property
    def prefers_split(self) -> bool:
        """True if one device is not clearly faster."""
        return self.single_ns >= self.split_ns * (1 - _GAIN)

    def __str__(self) -> str:
        kept = "the split" if self.prefers_split else "one device"
        return (
            f"measured: {format_ns(self.split_ns)} a step as split, {format_ns(self.single_ns)} on "
            f"one device; {kept} is kept (guard=False takes the predicted one)"
        )


def compare(split: Executable, single: Executable) -> Comparison:
    """The steps of both, from the store of costs or measured; nothing of the steps stays."""
    conditions, keys = _conditions(split), [_key(split), _key(single)]
    with ProfileStore() as store:
        known = [store.find(key, conditions) for key in keys]
        if known[0] is not None and known[1] is not None:
            return Comparison(known[0].forward_ns, known[1].forward_ns)
        samples: tuple[list[int], list[int]] = ([], [])
        for _ in range(_ROUNDS):
            for special, row in zip((split, single), samples, strict=True):
                special.settle()
                row.extend(step_times(special, _steps(special)))
        medians = [int(statistics.median(row)) for row in samples]
        for key, step_ns in zip(keys, medians, strict=True):
            store.keep(key, conditions, Measured(step_ns))
    return Comparison(*medians)


def _steps(special: Executable) -> int:
    schedule = special.schedule
    predicted_ns = 0 if schedule is None else schedule.makespan_ns
    return max(1, min(_MOST_STEPS, _ROUND_NS // max(1, predicted_ns)))


def _key(special: Executable) -> str:
    """The operators, with shapes and constants, and the device of each."""
    text = "\n".join(
        (
            special.traced.digest,
            " ".join(map(str, special.placement.devices)),
            " ".join(map(str, special.placement.order)),
        )
    )
    return f"step {hashlib.sha256(text.encode()).hexdigest()}"


def _conditions(special: Executable) -> Conditions:
    places: Sequence[torch.device] = special.places
    return Conditions(
        kind=", ".join(map(device_kind, places)),
        hardware=", ".join(dict.fromkeys(map(hardware, places))),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        settings="a step",
        method=METHOD,
    )
