"""Costs of operators: time and memory on one kind of device."""

from dataclasses import dataclass
from typing import final

from baechi.validation import (
    check_choice,
    check_count,
    check_is,
    check_name,
    check_pairs,
    check_row,
    settle,
)


@final
@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of one operator on one kind of device.

    Attributes:
        forward_ns: Time of its forward.
        backward_ns: Time of its backward; 0 where it has none.
        parameter_bytes: Parameters and buffers that it owns.
        output_bytes: New storage of its outputs; views and in-place results are 0.
        saved_bytes: Internal storage that autograd saves for its backward; saved inputs and
            outputs are tensors of the graph and not counted here.
        workspace_bytes: Scratch memory of its forward.
        backward_workspace_bytes: Scratch memory of its backward; `None`: as much as the forward's.
        backward_reused_bytes: Bytes of gradients that reuse the memory of saved tensors and of
            gradients that came, which are freed gradually while the backward runs.
        forward_spread_ns: Uncertainty of `forward_ns`: the gap to the next lowest measured pass.
            Equal to `forward_ns` where no other pass confirms it, 0 where computed.
        backward_spread_ns: The same for its backward.
        remark: A caveat about these numbers, such as that they depend on values, or
            that the operator failed alone and was measured in place; empty for most.
        inference_workspace_bytes: Scratch of a forward without gradients, for which torch may
            choose another kernel. `None`: not known.
        forward_launch_ns: Time that the launching host is busy with its forward.
        backward_launch_ns: The same of its backward.
        inference_ns: Time of a forward without gradients; `None`: as long as the other.
        backward_beside: Rows `(op, bytes)`, ascending: so much of `backward_workspace_bytes` is
            there only on the device of that op of the model, whose gradient is held meanwhile.
    """

    forward_ns: int
    backward_ns: int = 0
    parameter_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    backward_workspace_bytes: int | None = None
    forward_spread_ns: int = 0
    backward_spread_ns: int = 0
    remark: str = ""
    inference_workspace_bytes: int | None = None
    backward_reused_bytes: int = 0
    forward_launch_ns: int = 0
    backward_launch_ns: int = 0
    inference_ns: int | None = None
    backward_beside: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.backward_workspace_bytes is None:
            object.__setattr__(self, "backward_workspace_bytes", self.workspace_bytes)
        known = [name for name in self.__slots__ if getattr(self, name) is not None]
        known = [name for name in known if name not in ("remark", "backward_beside")]
        settle(self, check_count, known, "of an op cost")
        settle(self, check_pairs, ["backward_beside"], "of an op cost")


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """The cost of every operator of one traced model on one kind of device.

    Attributes:
        traced_digest: `Traced.digest` of its model.
        kind: Device kind, as in `Device.kind`.
        costs: One per traced op.
        source: `"measured"` or `"computed"`.
        environment: Circumstances that affect the costs: torch version, threads, processor.
    """

    traced_digest: str
    kind: str
    costs: tuple[OpCost, ...]
    source: str = "measured"
    environment: str = ""

    def __post_init__(self) -> None:
        check_name(self.traced_digest, "traced_digest of a profile")
        check_is(self.kind, str, "kind of a profile")
        object.__setattr__(self, "costs", check_row(self.costs, "costs", OpCost))
        check_choice(self.source, ("measured", "computed"), "source of a profile")
