"""A model's notes in Python: attributes, lists and dicts of its modules, and tensors in these.

What is run of a model to plan it leaves none of its notes there: a counter counts calls alone.
"""

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from baechi.torch_support.torch_internals import version_of
from baechi.torch_support.tracer_internals import FakeTensorMode
from baechi.tracing.guards import OF_TORCH
from baechi.tracing.pytrees import is_container

_HOLDERS: Final = (list, dict, deque)
_NO_TENSORS: Final = (nn.Module, int, float, str, type(None))  # most of a model's attributes
# How many lists, dicts and objects of a model are looked into.
MOST_HOLDERS: Final = 100_000


@final
class Notes:
    """What a model's modules keep in attributes, lists and dicts, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._rows = [(holder, dict(entries(holder))) for holder in holders_in(model)]
        self._tensors = list(map(_noted, _loose(model, self._rows)))

    def put_back(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Let them hold the objects that they held; only those of some modules, if given."""
        if modules is None:
            _put_back(self._rows)
            return
        theirs = {id(vars(module)) for module in modules}
        for holder, own in self._rows:  # those inside of others come later
            if id(holder) in theirs:
                _put_back([(holder, own)])
                theirs |= {id(inner) for inner in _inside(own.values())}

    def undo_writes(self) -> None:
        """Let the tensors among them have the memory and the values that they had."""
        undo_writes(self._tensors)


@contextmanager
def undone_if_it_fails(notes: Notes) -> Iterator[None]:
    """Run the model's own Python inside; if it fails, what it noted until then is gone.

    Else a counter would count a run that failed, and a part that stays whole would go on from it.
    """
    try:
        yield
    except BaseException:
        notes.undo_writes()
        notes.put_back()
        raise


@contextmanager
def notes_kept(model: nn.Module) -> Iterator[None]:
    """Run the model's own Python inside; what it notes in the model is gone in the end.

    Attributes, lists and dicts have the objects of before, and tensors in them their values.
    """
    notes = Notes(model)
    try:
        with draws_kept(model):
            yield
    finally:
        notes.undo_writes()
        notes.put_back()


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
            held[id(value)] = value, dict(entries(value))
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
        now = dict(entries(holder))
        if now.keys() == own.keys() and all(now[key] is own[key] for key in own):
            continue
        if isinstance(holder, dict):
            # As the plain kind does it: a subclass may refuse.
            plain = OrderedDict if isinstance(holder, OrderedDict) else dict
            plain.clear(holder)
            for key, value in own.items():
                plain.__setitem__(holder, key, value)
        else:
            holder.clear()
            holder.extend(own.values())


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


# A tensor, its version, its memory and the values there.
NotedTensor = tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]


def _noted(tensor: torch.Tensor) -> NotedTensor:
    memory = tensor.detach()
    return tensor, version_of(tensor), memory, memory.clone()


def undo_writes(rows: Iterable[NotedTensor]) -> None:
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


def _loose(model: nn.Module, rows: Iterable[tuple[Any, dict[Any, Any]]]) -> list[torch.Tensor]:
    """The tensors that holders of a model have, each once, without parameters."""
    state = {id(parameter) for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}
    for _, own in rows:
        values = tuple(value for value in own.values() if not isinstance(value, _NO_TENSORS))
        for leaf in pytree.tree_leaves(values, is_leaf=is_container) if values else ():
            counts = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
            if counts and id(leaf) not in state:
                found[id(leaf)] = leaf
    return list(found.values())


def holders_in(model: nn.Module) -> list[Any]:
    """Dicts of attributes, and lists and dicts, in which the model's modules keep something."""
    found: dict[int, Any] = {}
    left: deque[Any] = deque(vars(module) for module in model.modules())
    while left and len(found) < MOST_HOLDERS:
        holder = left.popleft()
        if id(holder) not in found:
            found[id(holder)] = holder
            left += _inside(value for _, value in entries(holder))
    return list(found.values())


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    """The lists and dicts among values, and the attributes of objects among them."""
    for value in values:
        if is_container(value):
            yield value
        elif is_record(value):
            yield vars(value)


def entries(holder: Any) -> list[tuple[Any, Any]]:
    """The keys of a list, a dict or a deque with their values."""
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def is_record(value: Any) -> bool:
    """True if it is an object that may hold tensors in attributes: a cache, a state."""
    apart = isinstance(value, torch.Tensor | nn.Module | ModuleType | FakeTensorMode)
    return not apart and not callable(value) and type(getattr(value, "__dict__", None)) is dict
