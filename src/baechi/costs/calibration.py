"""Efficiencies and the launch floor of a device kind, fitted to measured profiles.

The fit is a linear program in the launch floor and the inverse efficiencies x (least absolute
deviations, `_program`; docs/estimation.md, "Calibrating"):

    minimize    sum of  weight * |predicted - measured|  +  a little * |x / x0 - 1|
    subject to  0 <= x, launch

What binds is settled anew with its answer, until it stays. The weight is 1 / sqrt(measured),
between relative and absolute errors. The second term keeps an efficiency that the profiles do not
determine at the table's x0; it is too small to move one that they do.

Source: Bloomfield and Steiger, "Least Absolute Deviations" (1983), chapter 1, for the program.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from baechi.costs.estimation import UNSEEN, UNSEEN_BACKWARD, as_run, rounded_classes, workloads
from baechi.errors import InputError
from baechi.placers.linear_programs import Highs, LinearProgram
from baechi.records.device_kinds import Calibration, DeviceKind, Efficiency, Fit, Kernel, find
from baechi.records.op_costs import Profile
from baechi.traced.traced_model import Traced
from baechi.validation import check_row

# (class of operator, element type, whether its FLOPs bind it)
_Column = tuple[str, str, bool]

_ROUNDS: Final = 10
# Against a weight of 1: what moving an efficiency by all of its size costs.
_INERTIA: Final = 1e-3
# An efficiency is between these: above 1 where the peaks are for one core and several run.
_SHARES: Final = (1e-4, 1e3)


@final
@dataclass(frozen=True, slots=True)
class _Sample:
    """One measured run: the forward or the backward of a distinct operator."""

    kernels: tuple[Kernel, ...]
    measured_ns: int
    count: int
    launch_ns: int


def calibrate(
    measured: Iterable[tuple[Traced, Profile]],
    kind: str | None = None,
    *,
    kinds_file: str | os.PathLike[str] | None = None,
    tf32: bool | None = None,
) -> Calibration:
    """The efficiencies and the launch floor with which computed costs meet measured ones best.

    Deterministic: equal profiles give an equal calibration.

    Args:
        measured: Traced models, each with its measured profile, all of one device.
        kind: The device kind whose peaks they are shares of; the profiles' own if absent.
        kinds_file: A file with more kinds.
        tf32: As in `estimate`.

    Raises:
        InputError: No profile, one that is computed or of another model or device, a trace from a
            file, an unknown kind, or profiles that have no time in them.
    """
    pairs = check_row(measured, "measured models")
    if not pairs:
        raise InputError("there is no profile to calibrate with; give one at least, and its model.")
    for pair in pairs:
        if not isinstance(pair, tuple) or list(map(type, pair)) != [Traced, Profile]:
            raise InputError("calibrate takes pairs of a traced model and its measured profile.")
        traced, profile = pair
        _check(traced, profile, pairs[0][1])
    row = find(kind if kind is not None else pairs[0][1].kind, kinds_file)
    rounded = rounded_classes(row, tf32)
    samples = [sample for traced, profile in pairs for sample in _samples(traced, profile, rounded)]
    if not samples:
        raise InputError("the profiles have no operator that takes time; measure a larger model.")
    fitted, launch_ns = _fit(samples, row)
    efficiencies = _efficiencies(fitted, row, len(pairs))
    environment = "; ".join(dict.fromkeys(profile.environment for _, profile in pairs))
    bare = Calibration(row.name, efficiencies, launch_ns)
    fits = _fits(samples, row, row.calibrated(bare))
    launches = [s.launch_ns / len(s.kernels) for s in samples if s.launch_ns]
    host_ns = round(statistics.median(launches)) if launches else 0
    return Calibration(row.name, efficiencies, launch_ns, fits, environment, host_ns)


def _check(traced: Traced, profile: Profile, first: Profile) -> None:
    if profile.source != "measured":
        raise InputError(
            f"the profile of {traced.name} is {profile.source}, so it would be fitted to itself; "
            "give one from baechi.profile."
        )
    if profile.traced_digest != traced.digest:
        raise InputError(
            f"the profile is of another model than this {traced.name}; profile this one."
        )
    if (profile.kind, profile.environment) != (first.kind, first.environment):
        raise InputError(
            f"profiles of different devices: {first.kind!r} ({first.environment}) and "
            f"{profile.kind!r} ({profile.environment}); calibrate each on its own."
        )


def _samples(traced: Traced, profile: Profile, rounded: frozenset[str]) -> list[_Sample]:
    """The measured runs of the distinct operators of one model."""
    first: dict[str, int] = {}
    counts: dict[str, int] = defaultdict(int)
    for index, op in enumerate(traced.ops):
        first.setdefault(op.key, index)
        counts[op.key] += 1
    samples = []
    for key, load in workloads(traced).items():
        cost, op = profile.costs[first[key]], traced.ops[first[key]]
        known = load.remark not in (UNSEEN, UNSEEN_BACKWARD)
        runs = []
        if load.remark != UNSEEN:
            runs.append((load.forward, cost.forward_ns, cost.forward_launch_ns))
        if known and op.differentiable:
            runs.append((load.backward, cost.backward_ns, cost.backward_launch_ns))
        for kernels, measured_ns, launch_ns in runs:
            if kernels and measured_ns:
                run = as_run(kernels, rounded)
                samples.append(_Sample(run, measured_ns, counts[key], launch_ns))
    return samples


def _fit(samples: Sequence[_Sample], kind: DeviceKind) -> tuple[dict[_Column, float], int]:
    """The fitted efficiencies by column, and the launch floor in ns."""
    shares: dict[_Column, float] = {}
    launch_ns = float(kind.launch_ns)
    for _ in range(_ROUNDS):
        ideals = [_ideals(sample.kernels, kind, shares) for sample in samples]
        columns = sorted({column for ideal in ideals for column in ideal})
        before = [_share(column, kind, shares) for column in columns]
        tables = [_share(column, kind, {}) for column in columns]
        program = _program(samples, ideals, columns, tables, kind.launch_ns)
        values = Highs().solve(program)
        if isinstance(values, str):
            break  # feasible and bounded by its making, so only the iteration limit
        inverses = values[: len(columns)]
        low, high = _SHARES
        found = [
            min(max(table / float(x), low), high) if x > 0 else high
            for table, x in zip(tables, inverses, strict=True)
        ]
        launch_ns = float(values[len(columns)]) * max(kind.launch_ns, 1)
        shares.update(zip(columns, found, strict=True))
        if np.allclose(found, before, rtol=1e-6, atol=0):
            break
    return shares, round(launch_ns)


def _share(column: _Column, kind: DeviceKind, shares: dict[_Column, float]) -> float:
    op_class, dtype, computes = column
    row = kind.efficiency(op_class, dtype)
    return shares.get(column, row.compute if computes else row.memory)


def _ideals(
    kernels: Sequence[Kernel], kind: DeviceKind, shares: dict[_Column, float]
) -> dict[_Column, float]:
    """The kernels' times at the peaks, by what binds each at the present shares."""
    ideal: dict[_Column, float] = defaultdict(float)
    for kernel in kernels:
        bounds = []
        for computes, ideal_ns in zip((True, False), kind.ideal_ns(kernel), strict=True):
            column = (kernel.op_class, kernel.dtype, computes)
            bounds.append((ideal_ns / _share(column, kind, shares), computes, ideal_ns))
        _, computes, ideal_ns = max(bounds)
        ideal[kernel.op_class, kernel.dtype, computes] += ideal_ns
    return ideal


def _program(
    samples: Sequence[_Sample],
    ideals: Sequence[dict[_Column, float]],
    columns: Sequence[_Column],
    tables: Sequence[float],
    launch_ns: int,
) -> LinearProgram:
    """The program at the head of this file, in numbers around 1.

    Variables: x / x0 per column and launch / launch0, and how far each of those is from 1; then how
    far each sample is from what was measured, in its weight's unit. Two rows bound each distance.
    """
    n, m = len(columns) + 1, len(samples)
    place = {column: i for i, column in enumerate(columns)}
    scale = sum(sample.measured_ns**0.5 for sample in samples) / m
    rows, target = np.eye(n + m, n), np.ones(n + m)
    for s, (sample, ideal) in enumerate(zip(samples, ideals, strict=True), start=n):
        weight = 1 / (scale * sample.measured_ns**0.5)
        for column, ns in ideal.items():
            rows[s, place[column]] = weight * ns / tables[place[column]]
        rows[s, n - 1] = weight * max(launch_ns, 1) * len(sample.kernels)
        target[s] = weight * sample.measured_ns
    # |rows @ z - target| <= distance, as two rows.
    row, place_of = np.nonzero(rows)
    value, at = rows[row, place_of], np.arange(n + m)
    signs = np.full(n + m, -1.0)
    return LinearProgram(
        cost=np.array([0.0] * n + [_INERTIA] * n + [1.0] * m),
        upper=np.full(2 * n + m, np.inf),
        row=np.concatenate([2 * row, 2 * row + 1, 2 * at, 2 * at + 1]),
        column=np.concatenate([place_of, place_of, n + at, n + at]),
        value=np.concatenate([value, -value, signs, signs]),
        limit=np.stack([target, -target], axis=1).ravel(),
    )


def _efficiencies(
    shares: dict[_Column, float], kind: DeviceKind, n_profiles: int
) -> tuple[Efficiency, ...]:
    """One row per class and type that was seen; a bound that was not seen stays as it was."""
    source = f"fitted to {n_profiles} measured profile{'s' if n_profiles > 1 else ''}"
    seen = sorted({(op_class, dtype) for op_class, dtype, _ in shares})
    return tuple(
        Efficiency(
            op_class,
            dtype,
            _share((op_class, dtype, True), kind, shares),
            _share((op_class, dtype, False), kind, shares),
            source,
        )
        for op_class, dtype in seen
    )


def _fits(samples: Sequence[_Sample], before: DeviceKind, after: DeviceKind) -> tuple[Fit, ...]:
    """Relative errors per class and type, and that of the sum over all operators."""
    by_class: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    totals = [0, 0, 0]
    for sample in samples:
        times = [sample.measured_ns, before.run_ns(sample.kernels), after.run_ns(sample.kernels)]
        totals = [t + ns * sample.count for t, ns in zip(totals, times, strict=True)]
        largest = max(sample.kernels, key=after.kernel_ns)
        errors = (_error(times[1], times[0]), _error(times[2], times[0]))
        by_class[largest.op_class, largest.dtype].append(errors)
    rows = []
    for (op_class, dtype), errors_of in sorted(by_class.items()):
        ahead, behind = zip(*errors_of, strict=True)
        medians = (statistics.median(ahead), max(ahead), statistics.median(behind), max(behind))
        rows.append(Fit(op_class, dtype, len(errors_of), *medians))
    worst = max(row.worst_before for row in rows), max(row.worst_after for row in rows)
    sums = [_error(total, totals[0]) for total in totals[1:]]
    return (*rows, Fit("all", "sum", len(samples), sums[0], worst[0], sums[1], worst[1]))


def _error(predicted_ns: int, measured_ns: int) -> float:
    return abs(predicted_ns - measured_ns) / measured_ns
