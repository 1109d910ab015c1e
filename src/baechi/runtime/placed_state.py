"""What a placed model knows beside itself: its specializations, and how one more is made."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import nn

from baechi.errors import ExecutionError, NotSpecializedError
from baechi.records.placement import Measurement
from baechi.runtime.executable import Executable, move
from baechi.runtime.specialization import CallLock, Specializations, call_key
from baechi.runtime.step_measurement import measure_steps, planned_state_bytes
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_internals import FakeTensor, foreign_tracer
from baechi.tracing.calling_convention import Call, canonical_call

# The model, the call, and what other calls got so far, the first one first.
Specialize = Callable[[nn.Module, Call, Sequence[Executable]], Executable]
# Where the state is in the model's own `__dict__`.
KEY: Final = "_baechi_placed"


@final
class PlacedState:
    """The state of one placed model.

    Args:
        model: The model.
        places: The torch devices of the logical devices.
        specialize: Makes a specialization; None where there is only what `apply` was given.
        limit: The maximum number of specializations.
    """

    # Without `__dict__`: a trace looks into the objects that a model holds, and not into this one.
    __slots__ = (
        *("_limit", "_specialize", "latest", "lock", "measured", "meter", "model"),
        *("origins", "places", "specializations"),
    )

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[torch.device],
        specialize: Specialize | None = None,
        limit: int = 1,
    ) -> None:
        self.model = model
        self.places = tuple(places)
        self._specialize = specialize
        self._limit = limit
        self.specializations = Specializations()
        self.latest: Executable | None = None
        self.lock = CallLock()
        self.meter: Meter | None = None
        self.measured: dict[Executable, Measurement] = {}
        self.origins = [(tensor, tensor.device) for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def refuse_change(self) -> None:
        """Raise an `ExecutionError` where no new plan can be made."""
        if self._specialize is None:
            raise ExecutionError(
                "a cast of this placed model would need another plan, and `apply` was given one. "
                "Call model = placed.unplace(), cast the model, and trace and place it again."
            )

    @property
    def current(self) -> Executable:
        """The specialization of the latest call.

        Raises:
            NotSpecializedError: There was none yet.
        """
        if self.latest is None:
            raise NotSpecializedError(
                "this module is not specialized yet: call it once, or give `place` example_args."
            )
        return self.latest

    def known(self, what: str) -> Any:
        """The graph or the cluster of the latest call.

        Raises:
            NotSpecializedError: It is not known.
        """
        value = getattr(self.current, what)
        if value is None:
            raise NotSpecializedError(f"`apply` was not given the {what}; give it {what}=...")
        return value

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own result, computed on its devices.

        Raises:
            InputError: The arguments do not fit the model, or have another shape than the one
                traced, where no new trace can be made.
            ExecutionError: An operator failed, or another tracer is at work.
        """
        tracer = foreign_tracer()
        if tracer:
            raise ExecutionError(
                f"{tracer} looks through the Python of a model, and a placed one runs on its own "
                "workers: give it model = placed.unplace(), or a copy.deepcopy(placed)."
            )
        with self.lock.side_by_side():
            call = canonical_call(self.model, args, kwargs)
            special = self.specializations.find(call_key(self.model, call), call)
            if special is not None and (special is self.latest or special.is_settled):
                self.latest = special
                return special(call, self.meter)
        special = self.special(call)
        with self.lock.side_by_side():
            return special(call, self.meter)

    def special(self, call: Call) -> Executable:
        """The specialization for a call, made where there is none yet."""
        if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):
            raise ExecutionError("a placed model was called with fake tensors; unplace() it first.")
        with self.lock.alone():  # of calls from several threads one plans, and the others wait
            key = call_key(self.model, call)
            special = self.specializations.find(key, call) or self._make(call, key)
            self.latest = special
            special.settle()
            return special

    def _make(self, call: Call, key: Any) -> Executable:
        if self._specialize is None:
            raise self.specializations.unknown(self.model, call, key)
        if len(self.specializations) >= self._limit:
            raise self.specializations.too_many(self.model, call)
        if len({tensor.device for tensor, _ in self.origins}) > 1:
            self.move_back()  # a model is traced where it came from, in one place
        try:
            special = self._specialize(self.model, call, tuple(self.specializations))
        except BaseException:
            if self.latest is not None:
                self.latest.settle()
            raise
        self.specializations.add(key, special)
        return special

    def add(self, key: Any, special: Executable) -> None:
        """Take a specialization for calls of this key."""
        self.specializations.add(key, special)
        self.latest = special

    def measure(
        self, metered: Callable[[], Any], optimizer: torch.optim.Optimizer | None, steps: int
    ) -> Measurement:
        """As `PlacedModule.measure`."""
        special = self.current
        measured = measure_steps(special, metered, steps)
        if special.graph is not None and not (optimizer is not None and optimizer.state):
            n = len(measured.peak_bytes)
            absent = planned_state_bytes(special.traced, special.graph, special.placement, n)
            measured = replace(measured, absent_bytes=absent if any(absent) else ())
        self.measured[special] = measured
        return measured

    def hold(self, meter: Meter, optimizer: torch.optim.Optimizer | None) -> None:
        """Let a meter count what is there between steps."""
        for tensor, device in self.current.state_devices.items():
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            for value in (tensor, tensor.grad, *state.values()):
                if isinstance(value, torch.Tensor):
                    meter.hold(device, value)

    def forget(self) -> None:
        """Drop all specializations, after parameters and buffers were exchanged or cast."""
        self.close()
        self.specializations = Specializations()
        self.latest = None
        devices = (device for _, device in self.origins)
        self.origins = list(zip(self._tensors(), devices, strict=False))

    def close(self) -> None:
        """Stop the workers."""
        for special in self.specializations:
            special.close()

    def move_back(self) -> None:
        """Move every parameter and buffer to the device that it came from."""
        for tensor, device in self.origins:
            move(tensor, device)
