"""Traces of calls: of one shape, or of a family that has symbols for the sizes that change."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, final
from weakref import WeakKeyDictionary

from torch import nn

from baechi.errors import TraceError
from baechi.runtime.executable import Executable
from baechi.traced.traced_model import Traced
from baechi.tracing import ladder
from baechi.tracing.calling_convention import Call
from baechi.tracing.families import (
    Dynamic,
    Family,
    Place,
    declared,
    differing,
    known_places,
    size_at,
)
from baechi.tracing.family_traces import is_same, same_beyond


@final
class CallTraces:
    """The traces of a model's calls, and why some have none with symbols.

    Args:
        dynamic: Whether sizes that change become symbols; or which, with their maxima.
        say: Is told what is done.
        floats: Whether floats that change become symbols, too: no CUDA graph can read one.
    """

    def __init__(
        self, dynamic: Dynamic, say: Callable[[str], None], *, floats: bool = True
    ) -> None:
        self._dynamic, self._floats = dynamic, floats
        self._say = say
        # Why there is a plan for each shape, by module, mode, form and what would be symbols.
        self._given_up: dict[Any, str] = {}
        # Where one call's sizes were fixed, perhaps by a branch for these alone.
        self._fixed_once: set[Any] = set()
        # Families that were traced at the calls of plans for one shape, by what would be symbols.
        self._families: WeakKeyDictionary[Executable, dict[Any, Traced | None]] = (
            WeakKeyDictionary()
        )

    def trace(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> Traced:
        """The trace of a call: of its family where calls of its kind have had other sizes."""
        for special in kin:  # one that takes the call, but does not fit at its shape
            if special.holds() and special.calls.joined(call) is not None:
                return special.traced
        self._say(f"tracing {type(model).__name__} for {call.shapes}")
        args, kwargs = call.structure.fill(call.tensors)
        places = self._places(call, kin)
        like, of_part = kin[0].traced if kin else None, bool(call.dims)
        trace = partial(ladder.trace, like=like, of_part=of_part, may_ask=call.may_ask)
        kept, static = _beyond(model, call, kin, trace)
        if kept is not None:
            return kept
        kind = self._kind(model, call, kin)
        if not places or kind in self._given_up:
            return static or trace(model, args, kwargs)
        try:
            traced = trace(model, args, kwargs, places=places)
            if fixed := _fixed(traced.module.family, kin):
                reason = f"forward or an operator fixes {fixed}, as range(size) does"
                if kind not in self._fixed_once:
                    self._fixed_once.add(kind)
                    return static or trace(model, args, kwargs)
            else:
                same = [
                    is_same(traced, each.traced)
                    for each in kin
                    if each.family is None and each.module.gradients is traced.module.gradients
                ]
                if True not in same:
                    static = static or trace(model, args, kwargs)
                    same.append(is_same(traced, static))
                    at = partial(self._at_earlier, model, trace, places)
                    traced = _of_earlier(call, kin, static, at) or traced
                if False not in same:
                    return traced
                reason = "with symbols for sizes, it runs other operators"
        except TraceError as error:
            reason = str(error).splitlines()[1].strip()
        if static is None:  # a call that does not run at all ends here
            static = trace(model, args, kwargs)
        self._given_up[kind] = f"a plan for each shape: {reason}"
        self._say(f"a plan for each shape: {reason}")
        return static

    def _at_earlier(
        self,
        model: nn.Module,
        trace: Callable[..., Traced],
        places: frozenset[Place],
        special: Executable,
    ) -> Traced | None:
        """The family that is traced at the call of a plan for one shape; None if there is none."""
        known = self._families.setdefault(special, {})
        if places not in known:
            call, known[places] = special.module.call, None
            args, kwargs = call.structure.fill(call.tensors)
            with suppress(TraceError):
                known[places] = trace(model, args, kwargs, places=places)
        return known[places]

    def _places(self, call: Call, kin: Sequence[Executable]) -> frozenset[Place]:
        """The sizes and numbers that are symbols: declared, or other ones in earlier calls."""
        if self._dynamic is False:
            return frozenset()
        if isinstance(self._dynamic, Mapping):
            rows = declared(call, self._dynamic).items()
            return frozenset(place for place, (least, _) in rows if size_at(call, place) >= least)
        known = chain.from_iterable(known_places(s.module.call, s.family, call) for s in kin)
        return frozenset(
            place for place in known if self._floats or not isinstance(size_at(call, place), float)
        )

    def references(
        self, traced: Traced, call: Call, kin: Sequence[Executable]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes that a family is placed for, the largest declared or so far; and others.

        The others are none where only one shape is known.
        """
        family: Family | None = traced.module.family
        if family is None:
            return None
        mine = family.joined(call) or family.traced_at
        static = (special.module.call for special in kin if special.family is None)
        rows = [mine, *(values for call in static if (values := family.joined(call)))]
        if isinstance(self._dynamic, Mapping):
            sizes = declared(call, self._dynamic).items()
            rows.append(family.maxima({place: largest for place, (_, largest) in sizes}))
        largest = tuple(map(max, zip(*rows, strict=True)))
        found = largest if family.holds(largest) else mine
        return found, next((row for row in rows if row != found and family.holds(row)), ())

    def note(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> str:
        """Why a call has no family though calls of other sizes came; empty if it has one."""
        return self._given_up.get(self._kind(model, call, kin), "")

    def _kind(self, model: nn.Module, call: Call, kin: Sequence[Executable]) -> Any:
        return model, model.training, call.structure.form, self._places(call, kin)


def _beyond(
    model: nn.Module, call: Call, kin: Sequence[Executable], trace: Callable[..., Traced]
) -> tuple[Traced | None, Traced | None]:
    """A family whose guards fail, though it runs the same at these sizes; and the call's own trace.

    Each is None if there is none, or none was needed.
    """
    static: Traced | None = None
    for special in kin:
        if special.holds() and special.calls.may_take(call):
            if static is None:
                args, kwargs = call.structure.fill(call.tensors)
                static = trace(model, args, kwargs)
            if special.calls.extend(static) and special.calls.joined(call) is not None:
                return special.traced, static
    return None, static


def _of_earlier(
    call: Call,
    kin: Sequence[Executable],
    static: Traced,
    family_at: Callable[[Executable], Traced | None],
) -> Traced | None:
    """The family of an earlier call that takes this one by its own trace, if its own takes none.

    Where a guard holds from these sizes on, as of a window, the one of smaller sizes takes more.
    """
    for special in kin:
        if special.family is None and special.holds() and differing(special.module.call, call):
            traced = family_at(special)
            found = traced and same_beyond(traced, static)
            if traced is not None and found is not None and is_same(traced, special.traced):
                traced.module.family.extend(found)
                return traced
    return None


def _fixed(family: Family | None, kin: Sequence[Executable]) -> str:
    """What keeps a family from all calls of before that it was made for; empty if nothing does."""
    if family is None or not (family.symbols or family.numbers):
        return "the sizes that changed"
    found = [family.fixes(each.module.call) for each in kin if each.family is None]
    return found[0] if found and all(found) else ""


def largest_that_fits(call: Call, kin: Sequence[Executable]) -> str:
    """The largest size that fits an earlier plan of the call's family, in a sentence."""
    for special in kin:
        values, admission = special.calls.joined(call), special.admission
        found = None if values is None or admission is None else admission.largest(values)
        if found is not None and values is not None and special.family is not None:
            symbol, fits = found
            fits, size = (special.family.size_of(symbol, n) for n in (fits, values[symbol]))
            return f" {special.family.named(symbol)}: {fits} fits, {size} does not."
    return ""
