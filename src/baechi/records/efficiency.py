"""Efficiencies of operators: the shares of a device's peaks that they reach.

    time of a kernel = max(FLOPs / (compute * peak), bytes / (memory * bandwidth)) + launch

`compute` and `memory` are shares of the datasheet's peaks, one pair per class of operator and
element type. The shape of the model is the roofline's (Williams, Waterman and Patterson, "Roofline:
an insightful visual performance model", CACM 52(4), 2009) with a launch added.
"""

import math
from dataclasses import dataclass
from typing import Final, final

from baechi.errors import InputError
from baechi.validation import check_count, check_name

# Classes of kernels. Those of the first row may be bound by FLOPs; those of the second are bound by
# memory.
OP_CLASSES: Final = (
    *("matmul", "convolution", "attention", "recurrent", "pooling"),
    *("elementwise", "transcendental", "reduction", "normalization", "gather", "copy"),
)
DTYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
ANY: Final = "any"


@final
@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of one kernel, independent of the device.

    Attributes:
        op_class: One of `OP_CLASSES`.
        dtype: Element type of the computation, one of `DTYPES`.
        flops: Floating-point operations; 0 where only bytes count.
        nbytes: Bytes that it reads and writes, each once.
    """

    op_class: str
    dtype: str
    flops: int
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that a class of operators reaches.

    Attributes:
        op_class: One of `OP_CLASSES`.
        dtype: One of `DTYPES`, or `"any"` for types without a row of their own.
        compute: Share of the peak FLOP/s. Above 1 where the row's peak is for less than is used,
            such as for one core of several.
        memory: Share of the peak bytes/s.
        source: Source of the two shares.

    Raises:
        InputError: An unknown class or type, a share that is not positive and finite, no source.
    """

    op_class: str
    dtype: str
    compute: float
    memory: float
    source: str

    def __post_init__(self) -> None:
        what = f"the efficiency of {self.op_class!r} in {self.dtype!r}"
        _check_choice(self.op_class, OP_CLASSES, f"op_class of {what}")
        _check_choice(self.dtype, (*DTYPES, ANY), f"dtype of {what}")
        for attribute in ("compute", "memory"):
            share = check_positive_float(getattr(self, attribute), f"{attribute} of {what}")
            object.__setattr__(self, attribute, share)
        check_name(self.source, f"source of {what}")


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """Quality of a calibration: errors of computed times for the operators of one class.

    Attributes:
        op_class: The class that takes most of their time; `"all"` for the sum over all operators.
        dtype: Its element type.
        n: Number of distinct operators, counting forward and backward separately.
        before: Median relative error before the fit; of `"all"`, that of the sum.
        worst_before: The largest.
        after: Median relative error after it.
        worst_after: The largest.
    """

    op_class: str
    dtype: str
    n: int
    before: float
    worst_before: float
    after: float
    worst_after: float


@final
@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiencies and a launch floor that were fitted to measured profiles.

    Attributes:
        kind: Name of the device kind whose peaks the efficiencies are shares of.
        efficiencies: Those that the profiles determine; others stay as in the table of kinds.
        launch_ns: Minimum time of a kernel.
        fits: Errors of the fit, per class and element type; the last row is over all operators.
        environment: Environment of the measured profiles.

    Raises:
        InputError: No kind, or a negative launch floor.
    """

    kind: str
    efficiencies: tuple[Efficiency, ...]
    launch_ns: int
    fits: tuple[Fit, ...] = ()
    environment: str = ""

    def __post_init__(self) -> None:
        check_name(self.kind, "kind of a calibration")
        launch_ns = check_count(self.launch_ns, "launch_ns of a calibration")
        object.__setattr__(self, "launch_ns", launch_ns)
        object.__setattr__(self, "efficiencies", tuple(self.efficiencies))
        object.__setattr__(self, "fits", tuple(self.fits))

    def table(self) -> str:
        """The errors of the fit, as a readable table."""
        head = ("class", "dtype", "n", "median before", "worst", "median after", "worst")
        rows: list[tuple[str, ...]] = [head]
        for fit in self.fits:
            errors = (fit.before, fit.worst_before, fit.after, fit.worst_after)
            percents = tuple(f"{error:.1%}" for error in errors)
            rows.append((fit.op_class, fit.dtype, str(fit.n), *percents))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = []
        for row in rows:
            words = [row[i].ljust(widths[i]) for i in (0, 1)]
            words += [row[i].rjust(widths[i]) for i in range(2, len(head))]
            lines.append("  ".join(words).rstrip())
        return "\n".join(lines)


def check_positive_float(value: object, what: str) -> float:
    """`value` as a positive, finite float.

    Raises:
        InputError: It is not one.
    """
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise InputError(f"{what} is {value!r}; it must be a positive, finite number.")
    return float(value)  # type: ignore[arg-type]


def _check_choice(value: object, choices: tuple[str, ...], what: str) -> None:
    if value not in choices:
        raise InputError(f"{what} is unknown; it must be one of {', '.join(choices)}.")
