"""Side effects of a forward on its model and on torch, while a tracer runs it.

A tracer runs the model's Python on tensors without values. After each run nothing of it is left: a
tensor that forward puts elsewhere is removed, a write into a real tensor is undone, and what it
registers with a module, or replaces there, is refused.
`docs/runtime.md`, "What a trace keeps", has the effects on a placed model.
"""

import functools
import gc
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any, Final, final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from baechi.errors import TraceError
from baechi.torch_support.symbolic_sizes import SYMBOLIC
from baechi.torch_support.torch_internals import (
    state_of,
    version_of,
    without_gradient_hooks,
)
from baechi.torch_support.tracer_internals import (
    FakeTensor,
    FakeTensorMode,
    FunctionMode,
    tracers_ended,
    untraced,
)
from baechi.tracing.guards import OF_TORCH
from baechi.tracing.pytrees import is_container
from baechi.tracing.truth_values import model_line

_REGISTER: Final = (
    "Register it (torch.nn.Parameter in an attribute, ParameterList, ModuleList), give it as an "
    "argument, or let it need none (requires_grad_(False))."
)
_HOLDERS: Final = (list, dict, deque)
_NO_TENSORS: Final = (nn.Module, int, float, str, type(None))  # most of a model's attributes


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Run a forward inside; each buffer is the same tensor after, and no parameter is a new one.

    What forward computes from a parameter and puts in the place of another, as weight dropout does,
    is none.

    Raises:
        RuntimeError: Forward has replaced one.
    """
    before = [
        (f"{path}.{name}".lstrip("."), own, name, tensor)
        for path, module in model.named_modules()
        for own in state_of(module)[1:]
        for name, tensor in own.items()
    ]
    replaced = []
    try:
        yield
    finally:
        for path, own, name, tensor in before:
            now = own.get(name)
            of_parameter = isinstance(tensor, nn.Parameter) and not isinstance(now, nn.Parameter)
            if now is not tensor and not of_parameter:
                own[name] = tensor
                kind = "parameter" if isinstance(now, nn.Parameter) else "buffer"
                replaced.append(f"{kind} {path!r}")
    if replaced:
        raise RuntimeError(
            f"forward replaces {replaced[0]}, which would be lost; let it write into the "
            "tensor that is there (`copy_`), or put it in a submodule, which then stays whole"
        )


@contextmanager
def unchanged(model: nn.Module) -> Iterator["Notes"]:
    """Trace inside; the model and the state of torch.func are as before.

    If it succeeds, what forward notes in attributes, lists and dicts stays, as after a call. Yields
    the notes of before.

    Raises:
        TraceError: Forward made a parameter, a buffer or a submodule.
    """
    before = [(path, module, _snapshot(module)) for path, module in model.named_modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    known = _state_of(model)
    loose = list(map(_noted, _loose(model)))
    try:
        with (
            draws_kept(model),
            tracers_ended(),
            fakes_removed(model),
            undone_if_it_fails(model) as notes,
        ):
            yield notes
    finally:
        _undo_writes(loose)
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        made = [
            f"{path}.{name}".lstrip(".")
            for path, module, own in before
            for name in _restore(module, own, known)
        ]
    if made:
        raise TraceError(
            f"forward makes {made[0]!r}, a parameter, buffer or submodule; the placed model would "
            "make it anew in each call. Run the model once, on the largest sizes if it makes a new "
            "one for larger ones, then trace it."
        )


@contextmanager
def undone_if_it_fails(model: nn.Module) -> Iterator["Notes"]:
    """Run the model's own Python inside; if it fails, what it noted until then is gone.

    Else a counter would count a run that failed, and a part that stays whole would go on from it.
    """
    notes = Notes(model)
    try:
        yield notes
    except BaseException:
        notes.put_back()
        raise


@contextmanager
def notes_kept(model: nn.Module) -> Iterator[None]:
    """Run the model's own Python inside; what it notes in the model is gone in the end.

    Attributes, lists and dicts have the objects of before, and tensors in them their values.
    """
    before = Notes(model)
    loose = list(map(_noted, _loose(model)))
    try:
        with draws_kept(model):
            yield
    finally:
        _undo_writes(loose)
        before.put_back()


@contextmanager
def containers_kept(model: nn.Module) -> Iterator[None]:
    """Export inside: the model has the very lists and dicts that it had, with what was in them.

    torch.export lets all attributes be as they were, but puts copies in the place of containers, so
    that the model and what shares one with it, such as the caller, would part (2.13,
    `_detect_attribute_assignment`; `test_torch_still_copies_lists` fails when torch is mended).
    """
    before = [(vars(module), vars(module).copy()) for module in model.modules()]
    left = [v for _, own in before for name, v in own.items() if name not in OF_TORCH]
    held: dict[int, tuple[Any, dict[Any, Any]]] = {}
    while left:
        value = left.pop()
        if type(value) in pytree.SUPPORTED_NODES and not isinstance(value, _HOLDERS):
            value = getattr(value, "__dict__", value)
        if isinstance(value, _HOLDERS) and id(value) not in held:
            held[id(value)] = value, dict(_entries(value))
            left += held[id(value)][1].values()
        elif isinstance(value, tuple):
            left += tuple.__iter__(value)  # a subclass may refuse to tell its length
    try:
        yield
    finally:
        for now, own in before:
            now.update({name: value for name, value in own.items() if name not in OF_TORCH})
        _put_back(held.values())


def _put_back(rows: Iterable[tuple[Any, dict[Any, Any]]]) -> None:
    """Let lists and dicts hold what they held."""
    for holder, own in rows:
        now = dict(_entries(holder))
        if now.keys() == own.keys() and all(now[key] is own[key] for key in own):
            continue
        if isinstance(holder, dict):
            dict.clear(holder)
            dict.update(holder, own)
        else:
            holder.clear()
            holder.extend(own.values())


@final
class Notes:
    """What a model's modules keep in attributes, lists and dicts, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._rows = [(holder, dict(_entries(holder))) for holder in _holders(model)]

    def put_back(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Let them hold the objects that they held; only those of some modules, if given."""
        if modules is None:
            _put_back(self._rows)
            return
        theirs = {id(vars(module)) for module in modules}
        for holder, own in self._rows:  # those inside of others come later
            if id(holder) in theirs:
                _put_back([(holder, own)])
                inner = (vars(v) if _is_record(v) else v for v in own.values())
                theirs.update(map(id, filter(is_container, inner)))


@contextmanager
def draws_kept(model: nn.Module) -> Iterator[list[str]]:
    """Run Python inside; its generators of random numbers, NumPy's and the model's are as before.

    Gets the names of those that drew, in the end.
    """
    drew: list[str] = []
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    before, others = random.getstate(), numpy and numpy.get_state(legacy=False)
    known, own = _leaves(others), _generators(model)
    try:
        yield drew
    finally:
        for generator, state in own:
            generator.set_state(state)
        if random.getstate() != before:
            drew.append("the state of `random`")
            random.setstate(before)
        if numpy and _leaves(numpy.get_state(legacy=False)) != known:
            drew.append("the state of `numpy.random`")
            numpy.set_state(others)


def _generators(model: nn.Module) -> list[tuple[torch.Generator, torch.Tensor]]:
    """The generators in attributes of the model's modules, each with its state."""
    held = (value for module in model.modules() for value in vars(module).values())
    return [(each, each.get_state()) for each in held if isinstance(each, torch.Generator)]


def _leaves(state: Any) -> list[Any]:
    """What a state of NumPy's generator has, arrays as bytes, so that two can be compared."""
    return [row.tobytes() if hasattr(row, "tobytes") else row for row in pytree.tree_leaves(state)]


def _state_of(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _snapshot(module: nn.Module) -> tuple[list[dict[str, Any]], set[str], dict[str, Any]]:
    rows = [dict(row) for row in state_of(module)]
    return rows, set(module._non_persistent_buffers_set), vars(module).copy()


def _restore(module: nn.Module, before: tuple[Any, ...], known: set[int]) -> list[str]:
    """Let a module have the parameters, buffers and submodules that it had; names of the others.

    A submodule in the place of another is none of those where it has the model's own state alone:
    forward has chosen another way to compute with it, and noted that.
    """
    rows, volatile, attributes = before
    made: list[str] = []
    for now, then in zip(state_of(module), rows, strict=True):
        for name, value in now.items():
            if value is then.get(name):
                continue
            if not isinstance(value, nn.Module) or not _state_of(value) <= known:
                made.append(name)
        if len(now) != len(then) or made:
            now.clear()
            now.update(then)
    if made:
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(volatile)
        for name in attributes.keys() - vars(module).keys():
            vars(module)[name] = attributes[name]
    return made


# A tensor, its version, its memory and the values there.
_Noted = tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]


def _noted(tensor: torch.Tensor) -> _Noted:
    memory = tensor.detach()
    return tensor, version_of(tensor), memory, memory.clone()


def _undo_writes(rows: Iterable[_Noted]) -> None:
    """Give tensors the memory that they had, and the values if they were written since."""
    for tensor, version, memory, value in rows:
        if memory is not tensor and not _is_memory(tensor, memory):
            tensor.data = memory
        if version_of(tensor) != version:
            memory.detach().copy_(value)


def _is_memory(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """False if forward has exchanged its memory, as by `tensor.data = ...`, which is no write."""
    same = tensor.device == memory.device and tensor.shape == memory.shape
    known = tensor.layout is torch.strided and not tensor.is_meta
    return same and (not known or tensor.is_set_to(memory))


def _loose(model: nn.Module) -> list[torch.Tensor]:
    """The tensors in plain attributes of the model's modules, each once; parameters are not."""
    state = {id(parameter) for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}
    for holder in _holders(model):
        rows = tuple(v for _, v in _entries(holder) if not isinstance(v, _NO_TENSORS))
        for leaf in pytree.tree_leaves(rows, is_leaf=is_container) if rows else ():
            counts = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
            if counts and id(leaf) not in state:
                found[id(leaf)] = leaf
    return list(found.values())


def refuse_hidden_parameters(model: nn.Module, leaves: Iterable[nn.Module]) -> None:
    """Refuse parameters of submodules that stay whole which are not registered: no gradient."""
    known = {id(tensor) for tensor in model.parameters()}
    parts = {id(part): part for leaf in leaves for part in leaf.modules()}.values()
    # A recurrent layer of torch has a list of its parameters, or of what stands for them.
    for module in (part for part in parts if not type(part).__module__.startswith("torch.")):
        for value in pytree.tree_leaves(vars(module)):
            rows = [value] if isinstance(value, nn.Parameter) else []
            rows += value.parameters() if isinstance(value, nn.Module) else []
            lost = [row for row in rows if row.requires_grad and id(row) not in known]
            if lost:
                raise TraceError(
                    f"a {type(module).__name__} holds a parameter of shape {list(lost[0].shape)} "
                    f"that is not registered with it: its gradient would be lost. {_REGISTER}"
                )


@final
class OutsideTensors(FunctionMode):
    """Watches what forward reads beside its arguments, and the model's parameters and buffers.

    To a tracer such a tensor is a constant. So a gradient that flows into it would be lost, and it
    would be written when the model is traced, besides in each call.

    Attributes:
        stand_ins: What stands for the model's own tensors while it is traced, by their ids: forward
            may find these in a list or a dict, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stand_ins: dict[int, torch.Tensor] = {}
        self._written: dict[int, _Noted] = {}

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, with what it reads and writes noted."""
        if kwargs.get("generator") not in (None, torch.default_generator):
            raise RuntimeError(
                "forward draws from a torch.Generator of its own, which is in no plan; put it in a "
                "submodule, which then stays whole, or draw without `generator`"
            )
        real = list(filter(_is_real, pytree.tree_leaves((args, kwargs))))
        if not real:
            return func(*args, **kwargs)
        if any(id(tensor) in self.stand_ins for tensor in real):
            args, kwargs = pytree.tree_map(
                lambda leaf: self.stand_ins.get(id(leaf), leaf), (args, kwargs)
            )
            return self.run(func, args, kwargs)
        writes = _may_write(func, kwargs)
        for tensor in real if writes else ():
            if id(tensor) not in self._written:
                with untraced():
                    copy = tensor.detach().clone()
                self._written[id(tensor)] = tensor, version_of(tensor), tensor, copy
        result = func(*args, **kwargs)
        graded = [tensor for tensor in real if tensor.requires_grad]
        if torch.is_grad_enabled() and graded:
            rows = pytree.tree_leaves((result, args[:1] if writes else ()))
            if any(isinstance(row, FakeTensor) and row.requires_grad for row in rows):
                raise TraceError(
                    f"forward reads a tensor of shape {list(graded[0].shape)} that needs a "
                    f"gradient and is no parameter of the model, at {model_line()}: its gradient "
                    f"would be lost. {_REGISTER}"
                )
        return result

    def close(self) -> None:
        """Let all be as it was before it was written."""
        _undo_writes(self._written.values())


def _is_real(value: Any) -> bool:
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return real and not value.is_inference()


def _may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    special = name == "__setitem__" or name.startswith("__i")
    return inplace or special or "norm" in name or "out" in kwargs


# How many lists, dicts and objects of a model are looked into.
_MOST_HOLDERS: Final = 100_000
# Packages whose own caches keep no tensor of a model. All else is looked into in every trace.
_NO_MODELS: Final = {
    *("baechi", "torch", "numpy", "sympy", "mpmath", "scipy", "networkx", "highspy", "rich"),
    *sys.stdlib_module_names,
}
# What may hold a function with a cache in its `__wrapped__`, or as a function's closure.
_WRAPPERS: Final = (FunctionType, staticmethod, classmethod)
# Of each file of an installed package, how many names it has and its functions with a cache. To
# look at all that transformers has takes as long as to trace a small model.
_LOOKED: Final[dict[str, tuple[int, dict[int, Any]]]] = {}
_INSTALLED: Final = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Run backwards inside; the gradients of parameters are those of before in the end.

    A backward of the model's own, such as that of reversible layers, may add to them, too.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Run steps inside; gradients, and the values of buffers, are those of before in the end.

    No hook of a parameter runs, as some step an optimizer.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with gradients_kept(model), without_gradient_hooks(model.parameters()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def step_roots(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a step goes backward from: the model's own loss, or each output that has a gradient.

    What is returned twice has one gradient.
    """
    roots = list({id(tensor): tensor for tensor in outputs if tensor.requires_grad}.values())
    return next(([root] for root in roots if root.dim() == 0), roots)


@contextmanager
def fakes_removed(model: nn.Module) -> Iterator[None]:
    """Run the model's Python on a tracer's tensors inside; none of them is left in it after that.

    Except parameters, buffers and submodules that forward makes: `unchanged` reports these.
    """
    known = {id(row) for module in model.modules() for row in state_of(module)}
    scopes = [value for scope in _scopes(model) for value in list(scope.values())]
    rows = {id(row): row for row in (*_holders(model), *filter(is_container, scopes))}
    before = [(row, dict(_entries(row))) for key, row in rows.items() if key not in known]
    values = [value for _, own in before for value in own.values()]
    caches = [(row, row.cache_info().misses) for row in _cached_functions(scopes + values)]
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # a weight's cast may be a fake one
        for cache, misses in caches:
            if cache.cache_info().misses != misses and _holds_fake(gc.get_referents(cache)):
                cache.cache_clear()
        for holder, own in before:
            _clean(holder, own)


def _cached_functions(values: list[Any]) -> list[Any]:
    """Functions with `functools.lru_cache` among these values, and in all files.

    A file of an installed package is looked into again where it has more names or fewer.
    """
    found, values = dict[int, Any](), values.copy()
    for name, file in list(sys.modules.items()):
        if name.partition(".")[0] in _NO_MODELS or not issubclass(type(file), ModuleType):
            continue
        names = vars(file)
        if not str(names.get("__file__")).startswith(_INSTALLED):
            values += list(names.values())
            continue
        if name not in _LOOKED or _LOOKED[name][0] != len(names):
            _LOOKED[name] = len(names), _caches_in(list(names.values()))
        found |= _LOOKED[name][1]
    return list((found | _caches_in(values)).values())


def _caches_in(values: list[Any]) -> dict[int, Any]:
    """Functions with a cache among the values and in the classes of these, by their ids."""
    kinds = {id(value): value for value in values if issubclass(type(value), type)}
    values = values + [value for kind in kinds.values() for value in list(vars(kind).values())]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while values:
        inner: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is functools._lru_cache_wrapper:
                found[id(value)] = value
            elif kind is FunctionType and not (value.__closure__ or value.__dict__):
                continue  # most are: it wraps nothing
            elif kind in _WRAPPERS and id(value) not in seen:
                seen.add(id(value))
                inner.append(getattr(value, "__wrapped__", None))
                for cell in getattr(value, "__closure__", None) or ():
                    with suppress(ValueError):  # it is empty
                        inner.append(cell.cell_contents)
        values = inner
    return found


def _holders(model: nn.Module) -> list[Any]:
    """Dicts of attributes, and lists and dicts, in which the model's modules keep something."""
    found: dict[int, Any] = {}
    left: deque[Any] = deque(vars(module) for module in model.modules())
    while left and len(found) < _MOST_HOLDERS:
        holder = left.popleft()
        if id(holder) not in found:
            found[id(holder)] = holder
            for _, value in _entries(holder):
                if is_container(value):
                    left.append(value)
                elif _is_record(value):
                    left.append(vars(value))
    return list(found.values())


def _entries(holder: Any) -> list[tuple[Any, Any]]:
    """The keys of a list, a dict or a deque with their values."""
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _scopes(model: nn.Module) -> list[Mapping[str, Any]]:
    """What the classes of the model's modules define, and the files of these."""
    kinds = {
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if kind.__module__.partition(".")[0] not in ("torch", "builtins")
    }
    files = {kind.__module__ for kind in kinds} & sys.modules.keys()
    return [*map(vars, kinds), *(vars(sys.modules[name]) for name in files)]


def _is_record(value: Any) -> bool:
    """True if it is an object that may hold tensors in attributes: a cache, a state."""
    apart = isinstance(value, torch.Tensor | nn.Module | ModuleType | FakeTensorMode)
    return not apart and not callable(value) and type(getattr(value, "__dict__", None)) is dict


def _clean(holder: Any, before: dict[Any, Any]) -> None:
    """Remove a tracer's tensors from a list or a dict."""
    new = [key for key, value in _entries(holder) if value is not before.get(key)]
    fakes = [key for key in new if _holds_fake(holder[key])]
    if fakes and not isinstance(holder, dict):
        holder.clear()
        holder.extend(before.values())
        return
    for key in fakes:
        if key in before:
            holder[key] = before[key]
        else:
            del holder[key]


def _holds_fake(value: Any) -> bool:
    """True if it holds a tracer's tensor or size, also in the attributes of an object."""
    left, seen = [value], {id(value)}
    while left:
        for leaf in pytree.tree_leaves(left.pop()):
            if isinstance(leaf, (FakeTensor, fx.Proxy, *SYMBOLIC)):
                return True
            if _is_record(leaf) and id(leaf) not in seen and len(seen) < _MOST_HOLDERS:
                seen.add(id(leaf))
                left.append(vars(leaf))
    return False
