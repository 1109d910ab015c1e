"""The class of a placed model, derived from the user's own on the fly.

    Placed          what has to be ours: the call, moves and casts, copies
    the user's      its methods, properties and `super()`; `self(...)` in them is the placed call
    PlacedModule    what we add: `traced`, `schedule`, `report`, ... where the model has none

Where a model has an attribute, method or submodule named as one of ours, its own is what everybody
gets; `baechi.PlacedModule.graph.fget(placed)` is still ours.
"""

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import fx, nn

from baechi.errors import ExecutionError, InputError
from baechi.processes.world import Ranks
from baechi.runtime.placed_state import KEY, PlacedState
from baechi.runtime.rank_state import gathered, loadable, own_rows
from baechi.runtime.specialization import OWN_CLASS, own_class
from baechi.runtime.weights import move
from baechi.torch_support.torch_internals import state_of
from baechi.tracing.guards import autocast_of


def placed_state(model: nn.Module) -> PlacedState | None:
    """The state of a placed model; None for one that is not placed."""
    state: PlacedState | None = vars(model).get(KEY)
    return state


def derive(model: nn.Module, added: type[nn.Module], state: PlacedState) -> None:
    """Make a model an instance of a class derived from its own and from `added`.

    Raises:
        InputError: Python or its metaclass allows no such class.
    """
    own = type(model)
    holders = (vars(model), *state_of(model))
    ours = [name for name in vars(added) if not name.startswith("_")]
    names: dict[str, Any] = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    uncompiled = torch.compiler.disable(Placed._call)  # type: ignore[no-untyped-call]
    names |= {"__doc__": own.__doc__, "_uncompiled": uncompiled, OWN_CLASS: own}
    if issubclass(own, fx.GraphModule):
        names["recompile"] = _recompile
    names |= {name: _Elsewhere() for name in ours if any(name in holder for holder in holders)}
    try:
        kind = types.new_class(own.__name__, (Placed, own, added), {}, lambda ns: ns.update(names))
        object.__setattr__(model, "__class__", kind)
    except Exception as error:  # whatever a metaclass raises
        raise InputError(
            f"{own.__name__} cannot be placed: no class can be derived from it "
            f"({type(error).__name__}: {error}). Place a module that holds it."
        ) from error
    vars(model)[KEY] = state


def restore(model: nn.Module) -> None:
    """Make a placed model an instance of its own class again."""
    del vars(model)[KEY]
    object.__setattr__(model, "__class__", own_class(model))


def _recompile(model: fx.GraphModule) -> Any:
    """As `recompile`, which writes the new forward and a call of it into the object's class."""
    kind = type(model)
    object.__setattr__(model, "__class__", own_class(model))
    try:
        return model.recompile()
    finally:
        object.__setattr__(model, "__class__", kind)


class _Elsewhere:
    """A name that is not in the class: an instance has it, or a submodule, parameter or buffer."""

    def __get__(self, model: Any, owner: Any) -> NoReturn:
        raise AttributeError


class Placed:
    """What comes before the model's own class."""

    def __init_subclass__(cls) -> None:
        """Nothing: a class that keeps a list of its subclasses shall not have this one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The placed call; inside of a trace or of a placed step the model's own."""
        if torch.compiler.is_dynamo_compiling():  # a constant to it; it breaks its graph here
            return self._uncompiled(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        state: PlacedState | None = self.__dict__.get(KEY)
        own = super().__call__  # type: ignore[misc]
        if state is None or state.is_inside:
            return own(*args, **kwargs)
        with autocast_of(self.forward):
            return state.run(state.root, args, kwargs, own)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            last = vars(type(self).__bases__[-1]).get(name)
            if isinstance(last, property) and last.fget is not None:
                return last.fget(self)  # which says why
            raise

    def __repr__(self) -> str:
        state: PlacedState | None = self.__dict__.get(KEY)
        if state is None:
            return super().__repr__()
        n = len(state.root.specializations)
        used = [e for e in state.entries.values() if e.is_told or len(e.specializations)]
        entries = "".join(f", {entry}" for entry in used)
        plural = "s" if n != 1 else ""
        return f"PlacedModule({type(self).__name__}, {n} specialization{plural}{entries})"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts.

        What changes nothing, or moves to a device of the placement, leaves the weights where they
        are. On the host they stay until the next call. A cast drops the plans.
        """
        own: Callable[..., Any] = super()._apply  # type: ignore[misc]
        state: PlacedState | None = self.__dict__.get(KEY)
        if state is None or state.lock.is_mine:
            return own(fn, recurse)
        with state.lock, torch.no_grad():
            # A small tensor of each kind that the model has, to see what `fn` does to it.
            kinds = dict.fromkeys((tensor.device, tensor.dtype) for tensor, _ in state.origins)
            probes = [torch.empty((2, 2, 2, 2), device=on, dtype=dtype) for on, dtype in kinds]
            rows = [(probe, fn(probe)) for probe in probes]
            host = _host(rows, state)
            stays = all(old.device == new.device for old, new in rows)
            if any(old.dtype != new.dtype or old.stride() != new.stride() for old, new in rows):
                state.refuse_change()
                own(lambda tensor: fn(tensor).to(tensor.device), recurse)
                state.forget()
            elif stays:
                own(fn, recurse)
                if any(old is not new for old, new in rows):
                    state.forget()
            if host is not None:
                state.unsettle()
                for tensor, _ in state.origins:
                    move(tensor, host)
        return self

    def _ranks(self) -> Ranks | None:
        """The ranks whose own state is asked for."""
        state: PlacedState | None = self.__dict__.get(KEY)
        return None if state is None or state.is_inside else state.ranks

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the model's; of ranks each has its own."""
        rows: Iterator[tuple[str, nn.Parameter]]
        rows = super().named_parameters(*args, **kwargs)  # type: ignore[misc]
        return rows if self._ranks() is None else (row for row in rows if not row[1].is_meta)

    def state_dict(self, *args: Any, full: bool = False, **kwargs: Any) -> Any:
        """As the model's; of ranks each has its own, or with `full` rank 0 has all, on its CPU."""
        rows = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if (ranks := self._ranks()) is None:
            return rows
        found = gathered(ranks, rows) if full else own_rows(rows)
        for name in [name for name in rows if name not in found]:
            del rows[name]  # the same dict, with its metadata
        rows.update(found)
        return rows

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As the model's, after what is under way.

        Of ranks each loads its own of what is the model's or its own.
        """
        load = super().load_state_dict  # type: ignore[misc]
        if self._ranks() is not None:
            state_dict = loadable(super().state_dict(), state_dict)  # type: ignore[misc]
        if (state := self.__dict__.get(KEY)) is not None:
            state.drain()
        return load(state_dict, strict, assign)

    def _twin(self) -> nn.Module:
        """An instance of the model's own class that shares all with it."""
        own = own_class(self)  # type: ignore[arg-type]
        twin = object.__new__(own)
        twin.__dict__.update((k, v) for k, v in self.__dict__.items() if k != KEY)
        slots = [name for kind in own.__mro__ for name in vars(kind).get("__slots__", ())]
        for name in slots:
            if hasattr(self, name) and name not in ("__dict__", "__weakref__"):
                object.__setattr__(twin, name, getattr(self, name))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is not placed, with every tensor on the device that it came from."""
        state: PlacedState | None = self.__dict__.get(KEY)
        for tensor, device in () if state is None else state.origins:
            if tensor.device != device:
                move(copy.deepcopy(tensor, memo), device)
        twin: Any = self._twin()
        if hasattr(twin, "__deepcopy__"):
            return twin.__deepcopy__(memo)
        return copy._reconstruct(self, memo, *twin.__reduce_ex__(4))  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the model that is not placed, with every tensor on the device that it came from."""
        state: PlacedState | None = self.__dict__.get(KEY)
        moved = state is not None and any(t.device != device for t, device in state.origins)
        # By protocol 1: later ones check that what they make is of this object's class.
        return (copy.deepcopy(self) if moved else self._twin()).__reduce_ex__(min(protocol, 1))

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ExecutionError(
            "a placed model is on several devices already, and DataParallel cannot copy it to "
            "others: one process per copy can, with DistributedDataParallel(placed)."
        )


def _host(rows: list[tuple[torch.Tensor, torch.Tensor]], state: PlacedState) -> torch.device | None:
    """The host's memory, if a function moves there and no device of the placement is the host.

    Raises:
        ExecutionError: It moves elsewhere.
    """
    for old, new in rows:
        if new.device != old.device and new.device not in state.places:
            if new.device.type == "cpu":
                return new.device
            places = ", ".join(dict.fromkeys(map(str, state.places)))
            raise ExecutionError(
                f"a placed model stays on the devices of its placement ({places}), and "
                f"{new.device} is none of them. Leave out the move; or call model = "
                f"placed.unplace(), and place it with {str(new.device)!r} among its devices."
            )
    return None
