"""The state of a placed model: its entries, and the specializations of each.

What has no plan, as no tracer takes it or it does not fit, runs unsplit, which it says once.

A plan that leaves all on one device, and asks nothing of the runtime, runs the model itself: calls
like one before find that by a glance at their arguments.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, final
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn

from baechi.errors import (
    BaechiError,
    ExecutionError,
    InputError,
    NotSpecializedError,
    TraceError,
)
from baechi.processes.world import Ranks
from baechi.records.placement import Measurement, Schedule
from baechi.runtime.batched_calls import (
    BatchWeights,
    Microbatches,
    ModelWithLoss,
    step_call,
    train,
)
from baechi.runtime.entries import Entry
from baechi.runtime.executable import Executable
from baechi.runtime.executors.cpu_workers import RunningCall
from baechi.runtime.executors.rank_slice import RankCall
from baechi.runtime.loss_key import key_of_loss
from baechi.runtime.specialization import CallLock, Specializations, Specialize
from baechi.runtime.step_measurement import measure_steps, planned_state_bytes
from baechi.runtime.weights import move
from baechi.torch_support.memory_meter import Meter
from baechi.torch_support.torch_internals import CALL, keeps_weights, unhooked
from baechi.torch_support.tracer_internals import FakeTensor, foreign_tracer
from baechi.tracing.batch_dimension import OwnLossError
from baechi.tracing.calling_convention import INSIDE, Call, canonical_call, inside, look
from baechi.tracing.pytrees import tensors_in

# Where the state is in the model's own `__dict__`.
KEY: Final = "_baechi_placed"
_MOST_GLANCES: Final = 4096  # kinds of calls that run the model itself
_MOST_LOSSES: Final = 8
_OFTEN: Final = 3
_RENEWED: Final = (
    "parameters or buffers of a placed model were replaced by others for the third time, and every "
    "time its calls are planned anew. Write into those that are there: parameter.data.copy_(new), "
    "buffer.copy_(new), load_state_dict without assign=True."
)


@final
class PlacedState:
    """The state of one placed model.

    Args:
        model: The model.
        places: The torch devices of the logical devices.
        specialize: Makes a specialization; None where there is only what `apply` was given.
        limit: The maximum number of specializations of an entry.
        microbatches: How calls are cut.
        ranks: Those that run it together, if it is not this process alone.
    """

    # Without `__dict__`: a trace looks into the objects that a model holds, and not into this one.
    __slots__ = (
        *("_glances", "_limit", "_moves", "_renewed", "_specialize", "_streaming", "_unsplit"),
        "entries",
        "homes",
        *("latest", "loaded", "lock", "meter", "microbatches", "model", "origins", "places"),
        *("ranks", "root", "steps", "underway"),
    )

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[torch.device],
        specialize: Specialize | None = None,
        limit: int = 1,
        microbatches: Microbatches = Microbatches(1),  # noqa: B008 (it is frozen)
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.places = tuple(places)
        self._specialize = specialize
        self._limit = limit
        self.root = Entry(model, "", self)
        self.entries: dict[nn.Module, Entry] = {}  # of the parts
        self.steps: dict[Any, Entry] = {}  # of the model with a loss, by that
        self.microbatches = microbatches
        self.latest: Executable | None = None
        self._renewed = 0  # how often plans were dropped for other weights
        self._moves = 0  # of weights; a plan knows at which of them it had its own in place
        # Of calls that run the model itself; none keeps a plan that is dropped.
        self._glances: WeakValueDictionary[Any, Executable] = WeakValueDictionary()
        # Of each tensor in the first plan that had it, whatever became of that: optimizers' state
        # is there.
        self.homes: dict[torch.Tensor, int] = {}
        self._unsplit: list[str] = []
        self.lock = CallLock()
        self.meter: Meter | None = None
        # Calls of streams; what changes weights or state waits for them.
        self.underway: WeakSet[RunningCall | RankCall] = WeakSet()
        self._streaming: Executable | None = None  # whose they are
        # What is read from files comes to several devices at once, and leaves them for the host.
        self.loaded = any(tensor.is_meta for tensor in self._tensors())
        host = torch.device("cpu")
        self.origins = [(t, host if t.is_meta else t.device) for t in self._tensors()]

    def every_parameter(self) -> Iterator[nn.Parameter]:
        """The model's parameters, also those that are at other ranks."""
        return (parameter for _, parameter in nn.Module.named_parameters(self.model))

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.every_parameter(), *self.model.buffers()]

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
                if not self.root.is_told
                else self._unsplit[0]
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

    def schedule_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """As `PlacedModule.schedule_of`."""
        call = canonical_call(self.model, args, kwargs)
        with self.lock:
            for special in self.root.specializations.kin():
                values = special.calls.joined(call) if special.holds() else None
                if values is not None and special.admission is not None:
                    with torch.inference_mode(False), torch.enable_grad(), unhooked():
                        return special.admission.schedule_at(values)
            known = self.root.specializations.find(call)
        if known is None or known.schedule is None:
            raise NotSpecializedError(
                f"no plan is known to take a call with {call.shapes}: call the placed model twice, "
                "with other sizes, so that a plan for any size is made."
            )
        return known.schedule

    @property
    def is_inside(self) -> bool:
        """True if what this thread runs of the model is for a trace or a step."""
        return self.lock.is_mine or INSIDE.get()

    @property
    def all(self) -> tuple[Executable, ...]:
        """The specializations of all entries, the root's first."""
        return tuple(chain.from_iterable(e.specializations for e in self._all_entries))

    @property
    def _all_entries(self) -> tuple[Entry, ...]:
        return (self.root, *self.steps.values(), *self.entries.values())

    @property
    def remarks(self) -> tuple[str, ...]:
        """Those of the latest call, and of the parts that ran unsplit."""
        return (*self.current.remarks, *self._unsplit)

    def run(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain: Callable[..., Any],
        in_flight: int = 0,
    ) -> Any:
        """The module's own result, computed on its devices; `plain` is its own call.

        With a number of requests in flight, a `RunningCall` if it can run beside others.

        Raises:
            InputError: The arguments do not fit the model, or have another shape than the one
                traced, where no new trace can be made.
            ExecutionError: An operator failed, or another tracer is at work.
        """
        glances = self._glances if entry is self.root else {}
        special = glances.get(self._glance(args, kwargs)) if glances else None
        if special is None or special.settled_at != self._moves or self.meter is not None:
            with self.lock:
                try:
                    if tracer := foreign_tracer():
                        if self._is_unsplit:
                            return plain(*args, **kwargs)
                        raise ExecutionError(
                            f"{tracer} looks into the run of a model, and a placed one runs on "
                            "its own workers: give it model = placed.unplace(), or a "
                            "copy.deepcopy(placed)."
                        )
                    call = canonical_call(entry.module, args, kwargs)
                    cut = entry is self.root and self.microbatches.n != 1
                    calls = self.cut(entry.module, call) if cut else [call]
                    special, calls = self._for_all(entry, calls)
                    if in_flight and self.meter is None and special.overlaps(call):
                        if special is not self._streaming:  # the same devices, other workers
                            self.drain()
                            self._streaming = special
                        running = special.begin(calls, in_flight)
                        self.underway.add(running)
                        return running
                    self.drain()
                    if cut:
                        return special(calls, self.meter)
                except BaechiError as error:
                    # The cause of a `TraceError` is an error of the model's own, which cannot run.
                    untraced = isinstance(error, TraceError) and error.__cause__ is None
                    if entry is self.root and not (untraced and self._is_alone):
                        raise
                    return self._whole(entry, str(error), args, kwargs, plain)
                home = special.unsplit_on
                if not home or self.meter or any(tensor.device != home for tensor in call.tensors):
                    return special(call, self.meter)
                if entry is self.root and (glance := self._glance(args, kwargs)) is not None:
                    if len(self._glances) >= _MOST_GLANCES:
                        self._glances.clear()
                    self._glances[glance] = special
        self.latest = special
        self.drain()
        self.lock.enter()
        try:
            return special.unsplit(plain, args, kwargs)
        finally:
            self.lock.leave()

    def drain(self) -> None:
        """Wait for calls that are under way."""
        for call in tuple(self.underway) if self._streaming else ():
            call.wait()
            self.underway.discard(call)

    @property
    def _is_alone(self) -> bool:
        """True if there is one device, and the model on it can run as it is."""
        planner = self._specialize
        free = planner is not None and not planner.needs_runtime
        return free and len(self.places) == 1 and not any(t.is_meta for t in self._tensors())

    @property
    def _is_unsplit(self) -> bool:
        """True if the model runs as it is in all calls so far."""
        return all(special.unsplit_on is not None for special in self.all) and (
            bool(self.all) or self._is_alone
        )

    def _glance(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Equal for calls whose arguments are alike; None if one is more than tensors and numbers.

        Some 5 us.
        """
        try:
            arguments = look(args), look(kwargs)
        except TypeError:
            return None
        return torch.is_grad_enabled(), self.model.training, arguments

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Any,
        loss: Callable[..., Any] | None,
        weights: BatchWeights,
    ) -> torch.Tensor:
        """As `PlacedModule.step`."""
        if self._specialize is None:
            raise InputError("`apply` has no plan with a loss; `baechi.place` makes one.")
        with self.lock, torch.inference_mode(False), torch.enable_grad():
            self.drain()
            entry = self._step_entry(loss)
            calls = self.cut(entry.module, step_call(entry.module, args, kwargs, targets))
            rows = self.microbatches.weights(weights)
            special, calls = self._for_all(entry, calls)
            return train(special, calls, rows, self.meter)

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Plan for an example: a call, or a step where it returns its own loss and is to be cut.

        Raises:
            NoLossError: It is to be cut, and returns a number made of all samples that is no loss.
        """
        try:
            call = canonical_call(self.model, args, kwargs)
            self.special(self.root, self.cut(self.model, call)[0])
        except OwnLossError:
            entry = self._step_entry(None)
            call = step_call(entry.module, args, kwargs or {}, None)
            self.special(entry, self.cut(entry.module, call)[0])

    def cut(self, module: nn.Module, call: Call) -> list[Call]:
        """The calls of the micro-batches; where their number is to be chosen, the first one is."""
        if self.microbatches.n == 0:
            assert self._specialize is not None
            with self.lock:
                found = self._specialize.choose(module, call, self.microbatches)
                self._specialize, self.microbatches = found
        return self.microbatches.split(call)

    def _step_entry(self, loss: Callable[..., Any] | None) -> Entry:
        """The entry of the model with a loss; the oldest of many goes."""
        key = key_of_loss(loss)
        if key not in self.steps:
            while len(self.steps) >= _MOST_LOSSES:
                oldest = self.steps.pop(next(iter(self.steps)))
                for special in oldest.specializations:
                    special.close()
            self.steps[key] = Entry(ModelWithLoss(self.model, loss), "", self)
        self.steps[key].module.training = self.model.training
        return self.steps[key]

    def special(self, entry: Entry, call: Call) -> Executable:
        """The specialization for a call, made where there is none yet, with weights in place.

        The caller has the lock.
        """
        special = entry.specializations.find(call)
        if special is None or not special.state_guard.are_same():
            special = self._of_this_state(special)
        if special is None or special.settled_at != self._moves:
            if special is None or not special.is_settled:
                self.drain()
                if special is None:
                    special = self._make(entry, call)
                    self._check_state(special)
                self.cover()
                special.settle()
                self._moves += 1
            special.renew(self._moves)
        if not special.unsplit_on and keeps_weights(entry.module):
            raise ExecutionError(
                "torch.nn.utils.parametrize.cached() keeps weights from call to call, and a split "
                "model computes them in each: end the block before its calls."
            )
        self.latest = special
        return special

    def _of_this_state(self, special: Executable | None) -> Executable | None:
        """The plan; None after others came in place of parameters or buffers: all plans go.

        Raises:
            ExecutionError: What came is nothing to plan for.
        """
        if (special is None or self._is_outdated(special)) and any(
            map(self._is_outdated, self.all)
        ):
            self._renewed += 1
            if self._renewed == _OFTEN:
                warnings.warn(_RENEWED, stacklevel=7)
            self.forget()
            return None
        if special is not None:
            self._check_state(special)
        return special

    def _check_state(self, special: Executable) -> None:
        if self._runs(special):
            special.state_guard.check()

    def _is_outdated(self, special: Executable) -> bool:
        """True if others came in place of a plan's parameters or buffers, and it is dropped."""
        if special.state_guard.are_same() or self._specialize is None or self.ranks is not None:
            return False
        return self._runs(special) and special.state_guard.are_exchanged()

    def _runs(self, special: Executable) -> bool:
        """True if a call is the plan's to run, not the model's own."""
        return special.unsplit_on is None or self.meter is not None

    def _for_all(self, entry: Entry, calls: list[Call]) -> tuple[Executable, list[Call]]:
        """The specialization for micro-batches, and these as it takes them.

        Where they differ in what forward asks for, as whether a mask masks anything, their trace is
        one in which it cannot ask.
        """
        special = self.special(entry, calls[0])
        if not all(map(special.calls.ask_the_same, calls[1:])):
            calls = [replace(call, may_ask=False) for call in calls]
            special = self.special(entry, calls[0])
        return special, calls

    def _make(self, entry: Entry, call: Call) -> Executable:
        if any(isinstance(tensor, FakeTensor) for tensor in call.tensors):
            raise ExecutionError("a placed model was called with fake tensors; unplace() it first.")
        if self._specialize is None:
            if entry is self.root:
                raise entry.specializations.unknown(call)
            raise InputError(
                "`apply` was given one plan, of the model itself; `baechi.place` makes one for "
                "such calls, too."
            )
        kin = entry.specializations.kin()
        special = self._specialize.joined(entry.module, call, kin)
        if special is not None:
            entry.specializations.add(call, special)
            return special
        if len({tensor.device for tensor, _ in self.origins}) > 1 and not self.loaded:
            self.move_back()  # a model is traced where it came from, in one place
        try:
            special = self._specialize(entry.module, call, kin, self.homes)
            if special in kin:
                entry.specializations.add(call, special)
                return special
            entry.specializations.make_room(call, special, self._limit)
        except BaseException as error:
            if self.latest is not None:
                self.latest.settle()
            if isinstance(error, BaechiError) and entry is not self.root:
                entry.specializations.refuse(call, str(error))
            raise
        self.add(entry, call, special)
        return special

    def add(self, entry: Entry, call: Call, special: Executable) -> None:
        """Take a specialization for calls like this one."""
        entry.specializations.add(call, special)
        known = set(self._tensors()).union(*(each.state_devices for each in self.all))
        homes = {**special.state_devices, **self.homes}
        self.homes = {tensor: home for tensor, home in homes.items() if tensor in known}
        self.latest = special

    def _whole(
        self,
        entry: Entry,
        reason: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain: Callable[..., Any],
    ) -> Any:
        """The result of a part that has no plan, on the device of its first argument."""
        if self.ranks is not None:
            raise ExecutionError(
                f"{entry.path or type(self.model).__name__} cannot run whole, as its weights are "
                f"at several ranks: {reason}"
            )
        own = [*entry.module.parameters(), *entry.module.buffers()]
        home = next((tensor.device for tensor in tensors_in((args, kwargs))), self.places[0])
        if not entry.is_told:
            entry.is_told = True
            what = f"the placed {type(self.model).__name__}"
            if entry.path:
                what = f"{entry.path} of {what} was called from outside of its forward and"
            text = f"{what} ran unsplit, on {home}: {reason}"
            self._unsplit.append(text)
            warnings.warn(text, stacklevel=4)
        if any(tensor.device != home for tensor in own):
            self._moves += 1
            for tensor in own:
                move(tensor, home)
        return plain(*args, **kwargs)

    def cover(self) -> None:
        """Make an entry of every part with weights that the model has now, and of no other.

        While the model itself runs its parts do, too.
        """
        specials = [*self.root.specializations]
        specials += [special for entry in self.steps.values() for special in entry.specializations]
        whole = specials and all(special.unsplit_on for special in specials)
        parts = {
            module: path
            for path, module in ([] if whole else self.model.named_modules())
            if path and next(chain(module.parameters(), module.buffers()), None) is not None
        }
        for module in self.entries.keys() - parts.keys():
            entry = self.entries.pop(module)
            entry.release()
            for special in entry.specializations:
                special.close()
                self.latest = None if special is self.latest else self.latest
        for module, path in parts.items():
            known = self.entries.get(module)
            if known is None or vars(module).get(CALL) is not known:
                self.entries[module] = vars(module)[CALL] = Entry(module, path, self)

    def measure(
        self, metered: Callable[[], Any], optimizer: torch.optim.Optimizer | None, steps: int
    ) -> Measurement:
        """As `PlacedModule.measure`."""
        special = self.current
        with inside():
            measured = measure_steps(special, metered, steps)
        if special.graph is not None and not (optimizer is not None and optimizer.state):
            n = len(measured.peak_bytes)
            absent = planned_state_bytes(special.traced, special.graph, special.placement, n)
            measured = replace(measured, absent_bytes=absent if any(absent) else ())
        special.measured = measured
        return measured

    def hold(self, meter: Meter, optimizer: torch.optim.Optimizer | None) -> None:
        """Let a meter count what is there between steps."""
        for tensor, device in self.current.state_devices.items():
            state = {} if optimizer is None else optimizer.state.get(tensor, {})
            for value in (tensor, tensor.grad, *state.values()):
                if isinstance(value, torch.Tensor):
                    meter.hold(device, value)

    def forget(self) -> None:
        """Drop all specializations, after parameters and buffers were exchanged or cast.

        Their workers end with them: a graph whose backward is still to come may hold one.
        """
        self.drain()
        self.homes.clear()
        self._moves += 1
        self._glances.clear()
        for entry in self._all_entries:
            entry.specializations = Specializations(entry.module)
        self.latest = None
        devices = (device for _, device in self.origins)
        self.origins = list(zip(self._tensors(), devices, strict=False))

    def unsettle(self) -> None:
        """Take note that weights will move."""
        self.drain()
        self._moves += 1

    def close(self) -> None:
        """Stop the workers."""
        self.drain()
        for special in self.all:
            special.close()

    def release(self) -> None:
        """Stop the workers, and let every part be called as it is."""
        self.close()
        for entry in self.entries.values():
            entry.release()
        self.entries.clear()

    def move_back(self) -> None:
        """Move every parameter and buffer to the device that it came from."""
        self._moves += 1
        for tensor, device in self.origins:
            move(tensor, device)
