"""Placements of ops on devices, with their steps as predicted and as measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from baechi.errors import InputError
from baechi.validation import (
    FrozenDict,
    check_count,
    check_counts,
    check_is,
    check_positive,
    check_row,
    settle,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = TypeVar("_T")
_END: Final = 3  # the column of a span's end


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """The device of every op, and the launch order.

    Attributes:
        graph_digest: `OpGraph.digest` of its graph.
        devices: Device index of every op.
        order: All op indices in launch order, topological.
        placer: Name of its placer.
        stats: Figures from the placer, such as the makespan of each candidate; no wall times, so
            that equal inputs give equal bytes.
        microbatches: How many times a step runs the graph, which is that of one micro-batch.
        turns: The order of these runs where there are several: pairs of a segment of the placed
            graph (an index into `segments_of`) and a micro-batch, each once, in launch order.
    """

    graph_digest: str
    devices: tuple[int, ...]
    order: tuple[int, ...]
    placer: str = ""
    stats: Mapping[str, int | float | str] = field(default_factory=FrozenDict)
    microbatches: int = 1
    turns: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_is(self.graph_digest, str, "graph_digest of a placement")
        check_is(self.placer, str, "placer of a placement")
        check_is(self.stats, Mapping, "stats of a placement")  # type: ignore[type-abstract]
        devices = check_counts(self.devices, "device of a placement")
        order = check_counts(self.order, "op in the order of a placement")
        if sorted(order) != list(range(len(devices))):
            raise InputError(
                f"the order of a placement of {len(devices)} ops is no permutation of them; "
                "name every op index exactly once."
            )
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "stats", FrozenDict(self.stats))
        check_positive(self.microbatches, "microbatches of a placement")
        turns = check_row(self.turns, "turns of a placement")
        turns = tuple(check_counts(turn, "a turn of a placement") for turn in turns)
        segments = 1 + max((turn[0] for turn in turns), default=-1)
        batches = range(self.microbatches if self.microbatches > 1 else 0)
        every = [(row, batch) for row in range(segments) for batch in batches]
        if sorted(turns) != every or (not turns and batches and devices):
            raise InputError(
                f"the turns of a placement of {self.microbatches} micro-batches are not each "
                "segment with each of them once; give those of `solve` or of `ordered_turns`."
            )
        object.__setattr__(self, "turns", turns)


@final
class Rows(Sequence[_T]):
    """The rows of a table stored as columns; each row is built on access.

    Compares, hashes and pickles as the tuple of its rows.
    """

    __slots__ = ("_columns", "_make")

    def __init__(self, make: Callable[..., _T], columns: "Sequence[NDArray[Any]]") -> None:
        self._make = make
        self._columns = columns

    def column(self, index: int) -> "NDArray[Any]":
        """One column, as it was given."""
        return self._columns[index]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(map(self._make, *(column[index].tolist() for column in self._columns)))
        return self._make(*(int(column[index]) for column in self._columns))

    def __iter__(self) -> Iterator[_T]:
        return map(self._make, *(column.tolist() for column in self._columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | Rows):
            return NotImplemented
        return len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (tuple, (tuple(self),))


@final
@dataclass(frozen=True, slots=True)
class Span:
    """An op on its device, in [start_ns, end_ns)."""

    op: int
    device: int
    start_ns: int
    end_ns: int


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor in transit, in [start_ns, end_ns)."""

    tensor: int
    src: int
    dst: int
    start_ns: int
    end_ns: int


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Start and end of every op and transfer, with peak memory and a lower bound.

    Attributes:
        spans: One per op, in launch order.
        transfers: In the order in which they were committed.
        peak_bytes: Peak memory of every device; of its pool, where it is in one.
        lower_bound_ns: No valid schedule of this graph on this cluster is shorter. After `simulate`
            it is computed on first access, which takes longer than the simulation.
    """

    spans: Sequence[Span]
    transfers: Sequence[Transfer]
    peak_bytes: tuple[int, ...]
    lower_bound_ns: int = 0
    # Computes `lower_bound_ns` on first access, and is called at most once. The last field, so that
    # `pickle` and `replace` find the bound before.
    late_bound: Callable[[], int] | None = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )

    def __post_init__(self) -> None:
        for name, kind in (("spans", Span), ("transfers", Transfer)):
            rows = getattr(self, name)
            if not isinstance(rows, Rows):
                object.__setattr__(self, name, check_row(rows, name, kind))
        settle(self, check_counts, ("peak_bytes",), "of a schedule")
        check_count(self.lower_bound_ns, "lower_bound_ns of a schedule")
        if self.late_bound is not None:
            object.__delattr__(self, "lower_bound_ns")

    if not TYPE_CHECKING:  # mypy would assume that every attribute exists

        def __getattr__(self, name: str) -> int:
            # Called where the slot is empty.
            if name != "lower_bound_ns":
                raise AttributeError(f"a Schedule has no {name!r}", name=name, obj=self)
            compute = self.late_bound
            if compute is None:  # another thread has computed it meanwhile
                return object.__getattribute__(self, name)
            bound = compute()
            object.__setattr__(self, "lower_bound_ns", bound)
            object.__setattr__(self, "late_bound", None)
            return bound

    @property
    def makespan_ns(self) -> int:
        """The end of the last op."""
        if isinstance(self.spans, Rows):
            return int(self.spans.column(_END).max(initial=0))
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def gap(self) -> float:
        """Relative gap between makespan and lower bound: (makespan - bound) / bound.

        0.0 where both are zero; infinite where only the bound is.
        """
        if self.lower_bound_ns == 0:
            return 0.0 if self.makespan_ns == 0 else float("inf")
        return (self.makespan_ns - self.lower_bound_ns) / self.lower_bound_ns


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured step.

    Attributes:
        step_ns: The median of `samples_ns`.
        peak_bytes: Peak memory of every logical device, in the order of the cluster.
        samples_ns: The time of every counted step, in order.
        moved_bytes: Bytes sent between devices in one step.
        absent_bytes: Bytes of every device that the plan includes but the measured steps did not
        use: the state of an optimizer that was not given. Compare `peak_bytes` with the
            predicted peak less this. Empty where nothing is absent.

    Raises:
        InputError: A number is negative or not whole, or `absent_bytes` is of other devices.
    """

    step_ns: int
    peak_bytes: tuple[int, ...]
    samples_ns: tuple[int, ...]
    moved_bytes: int = 0
    absent_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        settle(self, check_count, ("step_ns", "moved_bytes"), "measured")
        for name in ("peak_bytes", "samples_ns", "absent_bytes"):
            values = check_counts(getattr(self, name), f"one of the {name} measured")
            object.__setattr__(self, name, values)
        if self.absent_bytes and len(self.absent_bytes) != len(self.peak_bytes):
            raise InputError(
                f"absent_bytes is of {len(self.absent_bytes)} devices and peak_bytes of "
                f"{len(self.peak_bytes)}; give one number for each device, or none at all."
            )

    def absent(self, device: int) -> int:
        """Bytes on `device` that the plan includes and the measured steps did not use."""
        return self.absent_bytes[device] if self.absent_bytes else 0


def error_of(predicted: int, measured: int) -> float | None:
    """Relative error of a prediction; positive if it was too high.

    `None` where it is undefined: measured is 0 and predicted is not.
    """
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured
