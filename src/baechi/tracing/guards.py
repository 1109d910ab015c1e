"""Guards: what has to be as in the trace for a call to be valid, besides its arguments.

    Autocast       a cast that changes nothing is not in a trace, and shapes are of the dtypes seen
    GradientMode   a trace is made with gradients on, so that its plan has a backward; the model's
                   code sees the caller's mode, and where it reads it, the trace is of that mode
    Attributes     plain attributes of modules and of their configurations, global variables, code:
                   after `dropout.p = 0.1`, `config.output_hidden_states = True` or `SCALE = 0.5`
                   the model is another program
    HeldObjects    what all these look at, by identity: some nanoseconds for each element

What is in a tensor is no guard, since a placed model reads it: `truth_values.py` has what forward
asks of it.
"""

import argparse
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Number
from operator import attrgetter, is_, itemgetter
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, final

import numpy as np
import torch
from torch import fx, nn

from baechi._core import same_contents
from baechi.torch_support.torch_internals import CALL, hooks_given
from baechi.tracing.model_code import (
    OURS,
    codes_of,
    functions_of,
    globals_read,
    is_torchs,
    python_function,
)

_KINDS: Final = ("cpu", "cuda")


@final
@dataclass(frozen=True)
class Autocast:
    """The dtype that autocast casts to on each kind of device where it is on.

    `cached` says whether the readers of a weight share its cast; it is where none is on, too.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    cached: bool = True

    @staticmethod
    def current() -> "Autocast":
        """The state of this thread."""
        on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
        if not on:
            return _OFF
        dtypes = tuple([(kind, torch.get_autocast_dtype(kind)) for kind in on])
        return Autocast(dtypes, torch.is_autocast_cache_enabled())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exactly this state, in this thread."""
        present = Autocast.current()
        wanted, on = dict(self.dtypes), dict(present.dtypes)
        with ExitStack() as stack:
            for kind in _KINDS:
                dtype = wanted.get(kind)
                if dtype != on.get(kind) or self.cached != present.cached:
                    state = torch.autocast(kind, dtype, dtype is not None, self.cached)
                    stack.enter_context(state)
            yield

    def __str__(self) -> str:
        """`autocast to bfloat16 on cpu`; empty where none is on."""
        rows = [f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in self.dtypes]
        uncached = "" if self.cached else ", without its cache"
        return f"autocast to {', '.join(rows)}{uncached}" if rows else ""


_OFF: Final = Autocast()


# Packages whose decorators cast, and compute nothing.
_CASTING_ONLY: Final = ("torch", "accelerate")


def autocast_of(function: Any) -> AbstractContextManager[Any]:
    """The autocast that a function is decorated with, as Accelerate does with a model's `forward`.

    Around the whole call it is a part of no operator, and all of them can be apart. Nobody else's
    decorator may be around it, which might compute outside of autocast.
    """
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        plain = getattr(function, "__func__", function)
        module = getattr(plain, "__globals__", {}).get("__name__", type(plain).__module__)
        if module.partition(".")[0] not in _CASTING_ONLY:
            break
        for cell in getattr(plain, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                own = cell.cell_contents
                if isinstance(own, torch.autocast) and own._enabled:
                    return torch.autocast(own.device, own.fast_dtype, True, own._cache_enabled)
        function = inner
    return nullcontext()


@final
class GradientMode:
    """The caller's mode in one trace, and whether the model's code read it."""

    def __init__(self, on: bool) -> None:
        self._on = on
        self._was_read = False

    @property
    def observed(self) -> bool | None:
        """The mode that the model's code read; None if it read none."""
        return self._on if self._was_read else None

    def read(self) -> bool:
        """The caller's mode, for which the trace then holds."""
        self._was_read = True
        return self._on


@final
class HeldObjects:
    """Elements of dicts, lists and sets, classes and attributes of other objects, as they are now.

    An equal element that is not the very same object counts as another one, except in sets. What an
    element holds itself does not count, unless it is among the holders, too.

    Args:
        holders: Dicts, lists and sets; and tuples of objects, whose classes count.
        attributes: Other objects, each with names of attributes that it has.
        unhooked: What changes only when torch is given a hook, so that it is looked at only then.
    """

    def __init__(
        self,
        holders: Iterable[Any],
        attributes: Iterable[tuple[Any, tuple[str, ...]]] = (),
        unhooked: "HeldObjects | None" = None,
    ) -> None:
        self._holders = list({id(holder): holder for holder in holders}.values())
        self._rows = list(map(_row, self._holders))
        for owner, names in attributes:
            self._holders.append(owner)
            self._rows.append(tuple(x for name in names for x in (name, getattr(owner, name))))
        self._unhooked, self._given = unhooked, hooks_given()

    def are_same(self) -> bool:
        """True if all hold what they held."""
        given = hooks_given()
        if self._unhooked is not None and given != self._given:
            if not self._unhooked.are_same():
                return False
            self._given = given
        return same_contents(self._holders, self._rows)


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """The dicts, lists and sets among values, and those that are inside."""
    for value in values:
        if isinstance(value, dict | list | set):
            yield value
        if isinstance(value, dict | list | tuple):
            yield from _containers(value.values() if isinstance(value, dict) else value)


def _row(holder: Any) -> Any:
    if isinstance(holder, dict):
        return tuple(x for row in holder.items() for x in row)
    if isinstance(holder, list):
        return tuple(holder)
    return tuple(map(type, holder)) if isinstance(holder, tuple) else frozenset(holder)


_ITSELF: Final = (MethodType, partial, torch.Tensor, np.ndarray, np.generic)  # are not copied
_PLAIN: Final = (
    *(Number, range, slice, str, bytes, type(None), Enum, torch.dtype),
    *(FunctionType, BuiltinFunctionType, *_ITSELF),
)
_NAMESPACES: Final = (SimpleNamespace, argparse.Namespace)
_HAVE: Final = (ModuleType, type, FunctionType)  # the attributes that are looked at themselves
_NO_RECORDS: Final = (*_PLAIN, nn.Module, ModuleType, type, list, tuple, set, frozenset, dict)
# Modes, hooks, parameters: checked elsewhere; and what `generate` of transformers alone reads.
OF_TORCH: Final = frozenset((*vars(nn.Module()), CALL, "generation_config"))


@final
class _Row:
    """Plain attributes of one module or record, and the values that they have now."""

    def __init__(self, path: str, owner: Any, names: Iterable[str]) -> None:
        # The owner is the module's own dict; or the module, for attributes of its class; a module
        # of Python, for its global variables; a class, for its methods; a function, for its code.
        self.path, self.owner, self.names = path, owner, tuple(names)
        self._read = _reader(owner, self.names)
        values = self._read(owner)
        same = {
            id(leaf): leaf
            for leaf in _leaves(values)
            if isinstance(leaf, (*_ITSELF, nn.Module)) or _is_record(leaf)
        }
        self._values = copy.deepcopy(values, same)
        self._tensors = _tensors(values)

    def values(self) -> Any:
        """The values that they have now."""
        return self._read(self.owner)

    def holds(self) -> bool:
        """True if all still have their values."""
        return _holds(self._read, self.owner, self._values, self._tensors)

    def changed(self) -> dict[str, Any]:
        """The value that each had of those that have another, or are gone."""
        values = self._values if len(self.names) > 1 else (self._values,)
        return {
            name: value
            for name, value in zip(self.names, values, strict=True)
            if not _holds(_reader(self.owner, (name,)), self.owner, value, _tensors(value))
        }


@final
class _Names:
    """The names of the attributes that a module or a record itself has now."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module, self.own = path, module, vars(module)
        self.known = frozenset(self.own)

    def hiding(self) -> list[str]:
        """Those that came since; of a module those that hide what its class has."""
        new = sorted(self.own.keys() - self.known - {CALL})  # compiled, it is the same program
        module = isinstance(self.module, nn.Module)
        return [name for name in new if not module or hasattr(type(self.module), name)]


_Record = tuple[str, dict[Any, Any], Any, Any]  # path and dict of its owner, name in it, itself


@final
class Attributes:
    """The plain attributes of a model's modules as they are now.

    Plain are numbers, those of NumPy, too, strings, flags, functions, tensors, and lists, tuples,
    sets and dicts of these. A tensor counts by its identity, since a placed model reads its
    contents; so do an array of NumPy, whose contents are not looked at, and a module that is in a
    list and not registered, as in `self.teacher = [teacher]`. Of records (configurations,
    dataclasses, namespaces) the plain attributes count, too, once for all modules that share one; a
    record counts by its identity besides. Other objects are not looked into.
    Attributes that come later count if they hide one of the class, as `layer.forward = f` does.
    Global variables that the model's code reads count as attributes of their module, functions not.
    Of functions that it may call the code counts, and of classes the methods: both are others where
    a notebook loads a file again, or somebody replaces them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: list[_Row] = []
        self._names = [_Names(path, module) for path, module in model.named_modules()]
        self._records: list[_Record] = []
        seen: set[int] = set()
        for path, module in model.named_modules():
            for owner, names in ((vars(module), _own(module)), (module, _of_class(module))):
                if names:
                    self._rows.append(_Row(path, owner, names))
            own = {name: v for name, v in vars(module).items() if name not in OF_TORCH}
            self._look_into(path, vars(module), own, seen)
        functions = dict(functions_of(model))
        for path, owner, variables in _globals(functions):
            names = [name for name, v in variables.items() if _is_plain(v) or _is_record(v)]
            self._rows += [_Row(path, owner, names)] if names else []
            self._look_into(path, owner, variables, seen)
        self._code = [_Row(*row) for row in _code(model, functions)]
        self._has_code = _held(self._code)
        self._lengths: list[int] = []  # of what the modules have, at which nothing was hidden

    def _look_into(self, path: str, owner: Any, values: dict[Any, Any], seen: set[int]) -> None:
        """Take the records among the values, and those inside them, that were not seen yet."""
        found = {name: value for name, value in values.items() if _is_record(value)}
        if isinstance(owner, dict):
            self._records += [(path, owner, name, value) for name, value in found.items()]
        for name, value in values.items():
            nested = isinstance(value, list | tuple | dict) and not _is_plain(value)
            if id(value) in seen or not (name in found or nested):
                continue
            seen.add(id(value))
            title = f"{path}.{name}".lstrip(".")
            if name not in found:
                rows = value.items() if isinstance(value, dict) else enumerate(value)
                self._look_into(title, value, dict(rows), seen)
                continue
            own, inner = getattr(value, "__dict__", value), dict(_fields(value))
            plain = [n for n, v in inner.items() if _is_plain(v)]
            for part, names in ((own, plain), (value, _of_class(value))):
                self._rows += [_Row(title, part, names)] if names else []
            self._names += [_Names(title, value)] if own is not value else []
            self._look_into(title, own, inner, seen)

    def settled(
        self, leaves: Iterable[nn.Module] = (), reads: Set[tuple[int, str]] | None = None
    ) -> "Attributes":
        """These without the ones that have changed since, which forward sets itself.

        And without those of submodules that stay whole, whose Python reads what is there, and
        without those of modules that forward does not read: `self.losses` of a training loop.
        """
        modules = [module for leaf in leaves for module in leaf.modules()]
        whole = {id(owner) for module in modules for owner in (module, vars(module))}
        parts = [row for row in self._names if isinstance(row.module, nn.Module)]
        owners = {id(own) for row in parts for own in (row.module, row.own)}

        def read(owner: Any, name: str) -> bool:
            if reads is None or id(owner) not in owners:
                return True
            if name == "_code":  # what the forward of a GraphModule is made of
                return True
            return (id(owner), name) in reads or (id(owner), "__dict__") in reads

        found = object.__new__(Attributes)
        found._rows, found._lengths = [], []
        found._code = [row for row in self._code if row.holds()]
        found._has_code = _held(found._code)
        for row in (row for row in self._rows if id(row.owner) not in whole):
            changed = {} if row.holds() else row.changed()
            kept = [name for name in row.names if name not in changed and read(row.owner, name)]
            if kept:
                same = len(kept) == len(row.names)
                found._rows.append(row if same else _Row(row.path, row.owner, kept))
        names = (row for row in self._names if id(row.module) not in whole)
        found._names = [_Names(row.path, row.module) for row in names]
        records = (row for row in self._records if id(row[1]) not in whole)
        found._records = [r for r in records if r[1].get(r[2]) is r[3] and read(r[1], r[2])]
        return found

    def set_since(self) -> set[tuple[int, str]]:
        """The attributes that are not as they were, each by the id of its owner and its name."""
        return {
            (id(row.owner), name) for row in self._rows if not row.holds() for name in row.changed()
        }

    def set_outside(self) -> set[str]:
        """The variables outside of the model that are not as they were."""
        outside = (row for row in self._rows if isinstance(row.owner, ModuleType | CellType))
        return {name for row in outside if not row.holds() for name in row.changed()}

    def modes_since(self) -> list[tuple[dict[str, Any], str, str]]:
        """The strings that changed since, each with the dict of its module, and its name there."""
        return [
            (row.owner, name, row.owner[name])
            for row in self._rows
            if isinstance(row.owner, dict) and not row.holds()
            for name in row.changed()
            if isinstance(row.owner.get(name), str)
        ]

    def named_since(self) -> list[str]:
        """The names of those that changed or have come since.

        Without those of torch's own layers, and without modes that a first call settles, such as
        `problem_type` of transformers: strings, devices, and private flags.
        """
        rows = [
            (row.path, name, row.owner.get(name) if isinstance(row.owner, dict) else None)
            for row in (row for row in self._rows if not row.holds())
            for name in row.changed()
        ]
        rows += [
            (row.path, name, row.own[name])
            for row in self._names
            for name in row.own.keys() - row.known - {CALL}
        ]
        layers = {r.path for r in self._names if is_torchs(r.module)}
        named = {
            f"{path}.{name}".lstrip(".")
            for path, name, value in rows
            if path not in layers
            and not isinstance(value, str | torch.device)
            and not (isinstance(value, bool) and str(name).startswith("_"))
        }
        return sorted(named)

    def hold(self) -> bool:
        """True if all are unchanged; takes about 0.4 us a module."""
        lengths = [len(names.own) for names in self._names]
        if lengths != self._lengths:
            if any(names.hiding() for names in self._names):
                return False
            self._lengths = lengths
        for _, owner, name, was in self._records:
            if owner.get(name) is not was:
                return False
        return self._has_code.are_same() and all(row.holds() for row in self._rows)

    def held(self, others: Iterable[Any], unhooked: HeldObjects) -> HeldObjects:
        """What everything that these look at holds now, and other holders; unchanged, they hold."""
        owners = (*(row.owner for row in self._rows), *(names.own for names in self._names))
        return HeldObjects(
            (
                *others,
                *(owner for owner in owners if isinstance(owner, dict)),
                *(owner for _, owner, _, _ in self._records),
                *_containers(row.values() for row in self._rows),
            ),
            {
                (id(holder), row.names): (holder, row.names)
                for row in (*self._rows, *self._code)
                if not isinstance(row.owner, dict)
                # What an object does not have itself is its class's.
                for own in [isinstance(row.owner, _HAVE) or not hasattr(row.owner, "__dict__")]
                for holder in [row.owner if own else type(row.owner)]
            }.values(),
            unhooked,
        )

    def changed(self) -> str:
        """One that is not as it was, for people; empty if there is none."""
        for row in (*self._rows, *self._code):
            if not row.holds():
                name, was = min(row.changed().items(), key=itemgetter(0))
                owner = row.owner
                read = owner.get if isinstance(owner, dict) else partial(getattr, owner)
                title = f"{row.path}.{name}".lstrip(".")
                if isinstance(was, torch.Tensor):
                    return f"{title} was another tensor"
                if isinstance(was, FunctionType | CodeType):
                    return f"{title.removesuffix('.__code__')} was another function"
                return f"{title} was {was!r} and is {read(name, 'gone')!r}"
        for path, owner, name, was in self._records:
            if owner.get(name) is not was:
                return f"{path}.{name}".lstrip(".") + f" was another {type(was).__name__}"
        for names in self._names:
            for name in names.hiding():
                title = f"{names.path}.{name}".lstrip(".")
                was = "its class's" if hasattr(type(names.module), name) else "not there"
                return f"{title} was {was} and is {names.own[name]!r}"
        return ""


def _held(rows: Iterable[_Row]) -> HeldObjects:
    return HeldObjects((), ((row.owner, row.names) for row in rows))


def _own(module: nn.Module) -> list[str]:
    held = {name: v for name, v in vars(module).items() if name not in OF_TORCH}
    return [name for name, v in held.items() if _is_plain(v, (*_PLAIN, nn.Module))]


def _globals(
    functions: Mapping[FunctionType, ModuleType],
) -> list[tuple[str, Any, dict[str, Any]]]:
    """The variables outside that forwards read, and what of their own packages they may call.

    Global ones by module of Python, those of an enclosing function each by its cell.
    """
    found: dict[ModuleType, dict[str, Any]] = {}
    cells: list[tuple[str, Any, dict[str, Any]]] = []
    for function, home in functions.items():
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is in it yet
                if not callable(cell.cell_contents):
                    title = f"{function.__qualname__}.{name}"
                    cells.append((title, cell, {"cell_contents": cell.cell_contents}))
        for code in codes_of(function.__code__):
            named = {name: vars(home)[name] for name in code.co_names if name in vars(home)}
            values = {name: value for name, value in named.items() if not callable(value)}
            for _, name, _ in globals_read(code) if values else ():
                if name in values:
                    found.setdefault(home, {})[name] = values[name]
    return [*((home.__name__, home, row) for home, row in found.items()), *cells]


def _code(
    model: nn.Module, functions: Collection[FunctionType]
) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The functions that forwards may call, each with its code, and the classes with these."""
    for function in sorted(functions, key=attrgetter("__module__", "__qualname__")):
        yield function.__qualname__, function, ("__code__",)
    kinds = dict.fromkeys(map(type, model.modules()))
    for kind in (kind for kind in kinds if not issubclass(kind, fx.GraphModule)):  # see `_code`
        held = {name: value for each in kind.__mro__[::-1] for name, value in vars(each).items()}
        names = [
            name
            for name, value in held.items()
            if isinstance(value, FunctionType | property)
            and (name == "forward" or python_function(value) in functions)
        ]
        yield kind.__qualname__, kind, tuple(names)


def _is_record(value: Any, depth: int = 3) -> bool:
    """True if it is a configuration: a dataclass, a namespace, what has `to_dict`.

    Or any object that holds plain values and records alone.
    """
    kind = type(value)
    if isinstance(value, _NO_RECORDS) or kind.__module__.partition(".")[0] in OURS:
        return False
    if isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value):
        return True
    # What is called in C, as a function with a cache, may be anything.
    native = callable(value) and not isinstance(kind.__call__, FunctionType)
    if native or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return callable(getattr(kind, "to_dict", None)) or (
        depth > 0 and all(_is_plain(v) or _is_record(v, depth - 1) for v in vars(value).values())
    )


def _fields(value: Any) -> list[tuple[str, Any]]:
    """A record's own attributes."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _of_class(module: Any) -> list[str]:
    """Plain attributes of its classes, but for torch's, that it does not have itself."""
    found: dict[str, Any] = {}
    own = getattr(module, "__dict__", {})
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch."):
            found = {**vars(kind), **found}
    return [
        name
        for name, value in found.items()
        if name not in own
        and not name.startswith("__")
        and not isinstance(value, FunctionType | BuiltinFunctionType)
        and _is_plain(value)
    ]


def _reader(owner: Any, names: tuple[str, ...]) -> Callable[[Any], Any]:
    return itemgetter(*names) if isinstance(owner, dict) else attrgetter(*names)


def _holds(
    read: Callable[[Any], Any], owner: Any, value: Any, tensors: Sequence[torch.Tensor]
) -> bool:
    """True if the value read is equal, with these tensors; not-a-number equals itself."""
    try:
        now = read(owner)
        if (now,) != (value,):
            return False
    except Exception:  # deleted, or compared with what has no one truth, such as a tensor
        return False
    return not tensors or all(map(is_, _tensors(now), tensors))


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in lists, tuples, sets and dicts, those of other classes, too, as `hparams`."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _is_plain(value: Any, kinds: tuple[Any, ...] = _PLAIN) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(row, kinds) for row in value)
    if isinstance(value, dict):
        return all(_is_plain(row, kinds) for pair in value.items() for row in pair)
    return isinstance(value, kinds)
