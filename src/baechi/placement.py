"""The answer: where every op runs and in which order, and what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from baechi.errors import InputError
from baechi.values import FrozenDict, check_count


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """Which device runs which op, and the launch order.

    Attributes:
        graph_digest: `OpGraph.digest` of the graph that it is for.
        devices: Device index of every op.
        order: All op indices in launch order, topological.
        placer: Name of the placer that made it.
        stats: What the placer wants to say, such as the makespan of each candidate; no wall
            times, so that the same input gives the same bytes.
    """

    graph_digest: str
    devices: tuple[int, ...]
    order: tuple[int, ...]
    placer: str = ""
    stats: Mapping[str, int | float | str] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        devices = tuple(check_count(device, "device of a placement") for device in self.devices)
        order = tuple(check_count(op, "op in the order of a placement") for op in self.order)
        if sorted(order) != list(range(len(devices))):
            raise InputError(
                f"the order of a placement of {len(devices)} ops is no permutation of them; "
                "name every op index exactly once."
            )
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "stats", FrozenDict(self.stats))


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
    """A tensor on its way, in [start_ns, end_ns)."""

    tensor: int
    src: int
    dst: int
    start_ns: int
    end_ns: int


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """When everything happens.

    Attributes:
        spans: One per op, in launch order.
        transfers: In the order in which they were committed.
        peak_bytes: Peak memory of every device; of its pool, where it is in one.
        lower_bound_ns: No valid schedule of this graph on this cluster is shorter.
    """

    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    peak_bytes: tuple[int, ...]
    lower_bound_ns: int = 0

    @property
    def makespan_ns(self) -> int:
        """The end of the last op."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def gap(self) -> float:
        """How far the makespan may be above the optimum: (makespan - bound) / bound.

        0.0 where both are zero; infinite where only the bound is.
        """
        if self.lower_bound_ns == 0:
            return 0.0 if self.makespan_ns == 0 else float("inf")
        return (self.makespan_ns - self.lower_bound_ns) / self.lower_bound_ns
