"""Placed models by shape of call, and the lock under which a new one is made."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, starmap
from threading import Condition, RLock, get_ident
from typing import Any, Final, Protocol, final

import torch
from torch import nn

from baechi.errors import InputError
from baechi.runtime.batched_calls import Microbatches
from baechi.runtime.executable import Executable
from baechi.torch_support.torch_internals import hooks_of
from baechi.tracing.calling_convention import Call, changes
from baechi.tracing.faithfulness import HOOKS
from baechi.tracing.guards import Attributes, HeldObjects
from baechi.tracing.observers import identity_of

_MOST_KEYS: Final = 4096  # calls that are found by their key alone, and join no family again

_Key = tuple[Any, int]  # a call's, and the kind of the module


class Specialize(Protocol):
    """What makes specializations."""

    @property
    def needs_runtime(self) -> bool:
        """True if an option asks for what only the runtime does."""

    def choose(
        self, model: nn.Module, call: Call, cutting: Microbatches
    ) -> "tuple[Specialize, Microbatches]":
        """What makes those for the best number of micro-batches, and that."""

    def joined(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> Executable | None:
        """The one among those for such calls whose family takes this one, too, if it fits."""

    def __call__(
        self,
        model: nn.Module,
        call: Call,
        kin: Sequence[Executable],
        homes: Mapping[torch.Tensor, int],
    ) -> Executable:
        """A new one, with parameters where they are at home; or one of these, if it will do."""


@final
class Specializations:
    """The specializations of a module, the first one first.

    Calls of one shape may have several: for other values of the modules' attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._module_kind = ModuleKind(module)
        self._rows: dict[_Key, list[Executable]] = {}  # the oldest key first
        self._refused: dict[_Key, str] = {}  # why calls of these have none
        self._used: dict[Executable, int] = {}  # when each was last used; the first one first
        self._kind: dict[Executable, int] = {}  # the module's, where it runs
        self._latest: dict[Any, Executable] = {}  # by the call's key
        self._held: dict[Executable, tuple[int, HeldObjects | None]] = {}  # after so many finds
        self._clock = count()
        self._warned = False

    def __iter__(self) -> Iterator[Executable]:
        return iter(self._used)

    def __len__(self) -> int:
        return len(self._used)

    def _key(self, call: Call) -> _Key:
        """Equal for calls that can run one plan: the call's own, and the number of the module."""
        return call.key, self._module_kind.now()

    def find(self, call: Call) -> Executable | None:
        """The specialization that can run a call, or None.

        Takes some 0.2 us a module, if all objects of the model are those of when one was found
        before for such a call; else 1 us.

        Raises:
            InputError: None could be made for such a call before.
        """
        latest = self._latest.get(call.key)
        _, held = (0, None) if latest is None else self._held[latest]
        if latest is not None and held is not None and held.are_same() and latest.calls.takes(call):
            self._used[latest] = next(self._clock)
            return latest
        key = self._key(call)
        if key in self._refused:
            raise InputError(self._refused[key])
        for special in self._rows.get(key, ()):
            if special.holds() and special.calls.takes(call):
                self._used[special] = next(self._clock)
                self._found(special, call)
                return special
        return None

    def _found(self, special: Executable, call: Call) -> None:
        """Keep what the model holds, to know it again.

        Of a model that changes itself in every call, ever more rarely.
        """
        if len(self._latest) >= _MOST_KEYS:
            self._latest.clear()
        self._latest[call.key] = special
        times, held = self._held.get(special, (0, None))
        times += 1
        if times.bit_count() == 1 and (held is None or not held.are_same()):
            held = held_by(special.module.model, special.attributes)
        self._held[special] = times, held

    def refuse(self, call: Call, reason: str) -> None:
        """Note why calls like this one have none."""
        self._refused[self._key(call)] = reason

    def add(self, call: Call, special: Executable) -> None:
        """Take one more, instead of one for the same but for what needs a gradient."""
        key = self._key(call)
        self._latest.clear()
        for each in self._used:  # a parameter may be of another size now, as a resized embedding
            each.forget_node()
        told = special.traced.module.gradients
        rows = self._rows.get(key, [])
        others = [
            other
            for other in rows
            if other is not special
            and other.holds()
            and other.traced.module.gradients == told
            and other.calls.ask_the_same(call)
        ]
        self._rows[key] = [row for row in rows if row not in others and row is not special]
        self._rows[key].append(special)
        if len(self._rows) > _MOST_KEYS:
            del self._rows[next(iter(self._rows))]
        self._used[special] = next(self._clock)
        self._kind.setdefault(special, key[1])
        for other in others:
            if not any(other in row for row in self._rows.values()):
                self._forget(other)

    def kin(self) -> tuple[Executable, ...]:
        """Those for the module as it is now, whatever the arguments, the latest first."""
        kind = self._module_kind.now()
        return tuple(s for s in reversed(self._used) if self._kind[s] == kind)

    def make_room(self, call: Call, special: Executable, limit: int) -> None:
        """Drop what one more makes needless, and the least recently used at the limit.

        A family comes instead of those that ran one shape each, which it takes. The first time that
        another is dropped, there is a warning.
        """
        for other in self.kin():
            once = sum(other in row for row in self._rows.values()) == 1
            if not once or not other.holds():
                continue
            fixed = other.family is None and special.calls.joined(other.module.call) is not None
            if fixed or special.calls.extend(other.traced):
                self._forget(other)
        while len(self) >= limit:
            oldest = min(self._used, key=self._used.__getitem__)
            if not self._warned:
                self._warned = True
                warnings.warn(self._dropped(oldest, call, limit), stacklevel=5)
            self._forget(oldest)

    def _forget(self, special: Executable) -> None:
        # Its workers end with it: a graph whose backward is still to come may hold it.
        self._latest.clear()
        self._held.pop(special, None)
        del self._used[special], self._kind[special]
        for key, row in list(self._rows.items()):
            rest = [other for other in row if other is not special]
            if not rest:
                del self._rows[key]
            elif len(rest) < len(row):
                self._rows[key] = rest

    def _dropped(self, special: Executable, call: Call, limit: int) -> str:
        """The warning that a plan is dropped, with what the new call has of its own."""
        latest = max(self._used, key=self._used.__getitem__)
        changed = next((text for each in self if (text := each.attributes.changed())), "")
        news = [*changes(latest.module.call, call), *([changed] if changed else [])]
        differs = f" It differs from the one before in {'; '.join(news[:3])}." if news else ""
        name, mode = type(self._module).__name__, _mode(self._module)
        return (
            f"this placed {name} has plans for {len(self)} families of calls, its "
            f"limit, and a call with {call.shapes} in {mode} mode fits none of them.{differs} From "
            f"now on the least recently used plan is dropped for a new one, such as that for "
            f"{special.module.call.shapes}; if its calls come back, they are planned again. Give "
            "numbers that change from call to call as tensors, keep such attributes in a tensor "
            "that is written in place (tau = torch.tensor(1.0); tau.fill_(0.9)), pad inputs to "
            f"few shapes, or give place(..., max_shapes=...) more than {limit}."
        )

    def unknown(self, call: Call) -> InputError:
        """The error for a call that none of these can run, where no other can be made."""
        name, mode = type(self._module).__name__, _mode(self._module)
        found = (s.attributes.changed() for s in self._rows.get(self._key(call), ()))
        changed = next((f": {text}" for text in found if text), "")
        return InputError(
            f"this placed {name} was made by `apply` for one shape of call; "
            f"called with {call.shapes} in {mode} mode, it differs in shapes, strides, dtypes, "
            "constants, mode, autocast, default dtype, submodules, hooks, in whether gradients are "
            "on, in what needs a gradient, in which arguments are one tensor or share memory that "
            "is written, in what forward asks about values of arguments (as `mask.all()`), "
            f"or in attributes of its modules{changed}. Trace and apply that call, or use "
            "`baechi.place`, which traces each new one."
        )


def _mode(module: nn.Module) -> str:
    return "training" if module.training else "evaluation"


def held_by(model: nn.Module, attributes: Attributes) -> HeldObjects:
    """What a model holds now: modules, classes, modes, hooks, and what its attributes look at."""
    modules = list(model.modules())
    dicts, unhooked = _submodules_and_hooks(modules)
    return attributes.held((*map(vars, modules), *dicts, tuple(modules)), unhooked)


OWN_CLASS: Final = "_baechi_own_class"


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without what placing derives from it."""
    kind: type[nn.Module] = getattr(type(module), OWN_CLASS, type(module))
    return kind


_STATE: Final = ("training", "_modules", *HOOKS)


def _submodules_and_hooks(modules: Iterable[nn.Module]) -> tuple[list[dict[Any, Any]], HeldObjects]:
    """The dicts in which modules have them, and torch those of all modules; and the empty ones."""
    hooks = [hooks_of(module, kind) for module in (None, *modules) for kind in HOOKS]
    dicts = [vars(module)["_modules"] for module in modules] + [rows for rows in hooks if rows]
    return dicts, HeldObjects(rows for rows in hooks if not rows)


@final
class ModuleKind:
    """The submodules, classes, modes and hooks of a module, as a number equal for equal ones.

    What it was for before is compared by identity.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers: dict[Any, int] = {}
        self._held: HeldObjects | None = None
        self._number = -1

    def now(self) -> int:
        """The number of what is there now."""
        if self._held is not None and self._held.are_same():
            return self._number
        modules = tuple(self._module.modules())
        hooks = [hooks_of(module, kind) for module in (None, *modules) for kind in HOOKS]
        modes = tuple(module.training for module in modules)
        kinds = tuple(map(own_class, modules))
        rows = ((i, tuple(starmap(identity_of, row.items()))) for i, row in enumerate(hooks) if row)
        kind = (modules, kinds, modes, tuple(rows))
        self._number = self._numbers.setdefault(kind, len(self._numbers))
        state = ((module, _STATE) for module in modules)
        dicts, unhooked = _submodules_and_hooks(modules)
        self._held = HeldObjects((*dicts, modules), state, unhooked)
        return self._number


@final
class CallLock:
    """A lock under which one thread runs programs or plans, and the others wait. Reentrant.

    A trace replaces parameters, hooks and functions of the model while it lasts, so a call at the
    same time would see another model; and the executor runs one call at a time anyway. Calls that
    run the model itself are guests: they run side by side, and not while another thread has the
    lock.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._owners: list[int] = []  # the one thread that has it, each time that it entered
        self._guests: dict[int, int] = {}  # calls, by thread
        self._left = Condition()

    @property
    def is_mine(self) -> bool:
        """True if this thread calls or plans."""
        me = get_ident()
        return me in self._guests or me in self._owners

    def __enter__(self) -> None:
        me = get_ident()
        self._lock.acquire()
        self._owners.append(me)
        if not self._guests:
            return
        try:
            with self._left:
                self._left.wait_for(lambda: not self._guests.keys() - {me})
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._owners.pop()
        self._lock.release()

    # A guest first says that it is there and then looks for an owner, who does the reverse: so one
    # of the two sees the other, and without an owner no guest takes a lock.

    def enter(self) -> None:
        """Begin a call of the model itself."""
        me, guests = get_ident(), self._guests
        while True:
            guests[me] = guests.get(me, 0) + 1
            if guests[me] > 1 or not self._owners or me in self._owners:
                return
            self.leave()
            with self._lock:
                pass

    def leave(self) -> None:
        """End a call of the model itself."""
        me, guests = get_ident(), self._guests
        if guests[me] > 1:
            guests[me] -= 1
            return
        del guests[me]
        if self._owners:
            with self._left:
                self._left.notify_all()
