"""PEFT: predict earliest finish time, under memory.

Source: Arabnejad and Barbosa, "List scheduling algorithm for heterogeneous systems by an optimistic
cost table" (IEEE TPDS 25(3), 2014), section 4. The table says for every op i and device p what must
follow at best once i has ended there,

    OCT(i, p) = max over children j of min over q of OCT(j, q) + w(j, q) + (c(i, j) if p != q),

with mean transfers c (`optimistic_costs` in `csrc/schedulers/ranked_schedule.cc`). Of the ready ops
the one with the largest mean OCT is next, and goes to the device with the smallest end + OCT.

Where we leave the paper: as `placers/heft.py` does; and devices of one kind and speed share a
column. Where all devices are alike, the table is the longest way to the end without transfers, and
the device is chosen as by HEFT. Complexity: as HEFT, plus O(tensors * kinds of devices).
"""

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from baechi import _core
from baechi.placers.heft import by_rank
from baechi.placers.placer import Placer
from baechi.problem.problem_arrays import Problem
from baechi.records.placement import Placement
from baechi.validation import check_count


@final
@dataclass(frozen=True, slots=True)
class PEFT(Placer):
    """Predict earliest finish time.

    Attributes:
        retries: How often a dead end is met with one more group pinned.
    """

    name: ClassVar[str] = "peft"
    retries: int = 16

    def __post_init__(self) -> None:
        check_count(self.retries, "retries")

    def place(self, problem: Problem) -> Placement | None:
        """As the module says."""
        table, ranks = (np.array(row, np.int64) for row in _core.optimistic_costs(problem.core))
        return by_rank(problem, ranks, table, self.name, self.retries)
