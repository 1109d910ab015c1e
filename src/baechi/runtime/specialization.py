"""Placed models by shape of call, and the lock under which a new one is made."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any, final

from torch import nn

from baechi.errors import InputError
from baechi.runtime.executable import Executable
from baechi.torch_support.torch_internals import hooks_of
from baechi.tracing.calling_convention import Call
from baechi.tracing.faithfulness import HOOKS
from baechi.tracing.pytrees import is_container


@final
class Specializations:
    """The specializations of a placed model, the first one first.

    Calls of one shape may have several: for other values of the modules' attributes.
    """

    def __init__(self) -> None:
        self._rows: dict[Any, list[Executable]] = {}

    def __iter__(self) -> Iterator[Executable]:
        return (special for row in self._rows.values() for special in row)

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def find(self, key: Any, call: Call) -> Executable | None:
        """The specialization that can run a call of this key, or None."""
        for special in self._rows.get(key, ()):
            if special.attributes.hold() and special.takes(call):
                return special
        return None

    def add(self, key: Any, special: Executable) -> None:
        """Take one more, instead of one for the same but for what needs a gradient."""
        told = special.traced.module.gradients
        others = [
            other
            for other in self._rows.get(key, ())
            if not other.attributes.hold() or other.traced.module.gradients != told
        ]
        self._rows[key] = [*others, special]

    def unknown(self, model: nn.Module, call: Call, key: Any) -> InputError:
        """The error for a call that none of these can run, where no other can be made."""
        mode = "training" if model.training else "evaluation"
        found = (s.attributes.changed() for s in self._rows.get(key, ()))
        changed = next((f": {text}" for text in found if text), "")
        return InputError(
            f"this placed {type(model).__name__} was made by `apply` for one shape of call; "
            f"called with {call.shapes} in {mode} mode, it differs in shapes, strides, dtypes, "
            "constants, mode, autocast, submodules, hooks, in whether gradients are on, in what "
            "needs a gradient, in which arguments are one tensor or share memory that is written, "
            f"or in attributes of its modules{changed}. Trace and apply that call, or use "
            "`baechi.place`, which traces each new one."
        )

    def too_many(self, model: nn.Module, call: Call) -> InputError:
        """Why a call is refused that would be one more than the limit."""
        mode = "training" if model.training else "evaluation"
        found = (special.attributes.changed() for special in self)
        changed = next((f" Of its attributes, {text}." for text in found if text), "")
        grown = (each for each in call.objects if not is_container(each))
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in grown))
        cache = (
            f" Its {kinds} may be what grows from call to call: of a cache of fixed size, as of "
            'generate(..., cache_implementation="static") of transformers, the steps of a '
            "generation have two shapes."
        )
        return InputError(
            f"this placed {type(model).__name__} has been traced for {len(self)} shapes of call, "
            f"its limit; this call has {call.shapes} in {mode} mode.{changed}"
            f"{cache if kinds else ''} Pad inputs to few "
            "shapes, or give `place(..., max_shapes=...)` a higher limit."
        )


def call_key(model: nn.Module, call: Call) -> tuple[Any, ...]:
    """Equal keys can run the same specialization: the call's own, submodules, modes and hooks."""
    modules = tuple(model.modules())
    rows = [hooks_of(module, kind) for module in (None, *modules) for kind in HOOKS]
    hooks = tuple(tuple(row) for row in rows if row)
    return (call.key, modules, tuple(module.training for module in modules), hooks)


@final
class CallLock:
    """A lock under which calls run side by side, and a trace alone. Reentrant within a thread.

    A trace replaces parameters, hooks and functions of the model while it lasts, so a call at the
    same time would see another model.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._calls: Counter[int] = Counter()  # by thread
        self._planner: int | None = None

    @property
    def is_mine(self) -> bool:
        """True if this thread calls or plans."""
        me = get_ident()
        return me in self._calls or self._planner == me

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Run the block when no thread plans."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._planner in (None, me))
            self._calls[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls[me] -= 1
                if not self._calls[me]:
                    del self._calls[me]
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block when no other thread calls or plans."""
        me = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._planner is None and not self._calls.keys() - {me})
            self._planner = me
        try:
            yield
        finally:
            with self._changed:
                self._planner = None
                self._changed.notify_all()
