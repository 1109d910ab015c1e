"""Submodules that stay whole in what `torch.export` traces: those whose forward it cannot trace.

A layer of experts loops over those that are hit, which the values of tensors decide. The rest of
the model can be traced where something says what such a submodule returns: a run of the example
does. The trace gets a node that calls the submodule, and a check that in other calls its results
have the sizes that they had then, since forward may have read them.

Where sizes are symbols, more runs at other sizes say how those of the results follow from those of
what the submodule reads: a size of a result is a constant, one that is read, a multiple of one, or
the product of two.
"""

import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, final
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from baechi.torch_support.torch_internals import CALL, plain_call
from baechi.torch_support.tracer_internals import (
    below_export,
    export_mode,
    held_function,
    track_tensor_tree,
)
from baechi.tracing.model_code import is_torchs
from baechi.tracing.side_effects import refuse_hidden_parameters

SIZES: Final = "aten._assert_tensor_metadata."  # prefix of the operators that check sizes
_OURS: Final = "submodule:"  # begins the name of what a node stands for
_CHECKED: Final = "sizes"  # of a node that stands for a check of sizes


@final
@dataclass(frozen=True)
class _Form:
    """What is known of a tensor that is a result, before it is there."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    graded: bool


@final
class _Seen(NamedTuple):
    """A call of a submodule: the sizes of the tensors that it reads, and its result's forms."""

    sizes: tuple[int, ...]
    result: Any


@final
class PartError(Exception):
    """A submodule, of this path, cannot be traced."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(reason)
        self.path = path


@final
class WholeParts:
    """The submodules that stay whole in one capture: more of them after each that failed.

    Args:
        model: The model.
        runs: Run the example for real; where sizes are symbols, others run it at other sizes.
    """

    def __init__(self, model: nn.Module, *runs: Callable[[], None]) -> None:
        self._model, self._runs = model, runs
        self._parts: dict[str, nn.Module] = {}
        self._seen: list[dict[str, list[_Seen]]] = []  # in each run, the calls in order
        self._calls: Counter[str] = Counter()
        self._set: set[tuple[int, str]] = set()  # by them: ids of modules' dicts, and names

    def give_way(self, error: Exception) -> bool:
        """Let the innermost submodule whose forward failed stay whole, and all of its class.

        It is of the model's own: layers of torch fail for what they are given.
        """
        parts = [row for row in self._model.named_modules() if not is_torchs(row[1])]
        names = {id(vars(part)): name for name, part in parts if name}
        found = error.path if isinstance(error, PartError) else ""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                owner = frame.f_locals.get(code.co_varnames[0])
                found = names.get(id(getattr(owner, "__dict__", None)), found)
        if not found or found in self._parts:
            return False
        kind = type(self._model.get_submodule(found))
        self._parts |= {name: m for name, m in self._model.named_modules() if type(m) is kind}
        self._see_results()
        return True

    def _see_results(self) -> None:
        """Run the example, and note the results of the submodules."""
        self._seen.clear()
        for run in self._runs:
            self._seen.append({name: [] for name in self._parts})
            with self._replaced(self._see):
                run()

    def _see(self, name: str, *args: Any, **kwargs: Any) -> Any:
        sizes = tuple(_sizes((args, kwargs)))
        with sets_noted() as found:
            result = plain_call(self._parts[name])(*args, **kwargs)
        self._set |= found
        self._seen[-1][name].append(_Seen(sizes, pytree.tree_map(_form, result)))
        return result

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Trace inside: a call of such a submodule is a node."""
        self._calls.clear()
        with self._replaced(self._call), untold(self._parts, self._set):
            yield

    @contextmanager
    def _replaced(self, call: Callable[..., Any]) -> Iterator[None]:
        """Inside the block this is what calls of the submodules do."""
        with ExitStack() as stack:
            for name, part in self._parts.items():
                stack.enter_context(patch.dict(vars(part), {CALL: partial(call, name)}))
            yield

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        given = next((a for a in pytree.tree_leaves((args, kwargs)) if _is_tensor(a)), None)
        mode, calls = export_mode(), [seen.get(name, []) for seen in self._seen]
        number = self._calls[name]
        if mode is None or given is None or any(number >= len(row) for row in calls):
            raise RuntimeError(f"{name} cannot stay whole: the example has no call like this one")
        self._calls[name] += 1
        forms = _combined(name, [row[number] for row in calls], _sizes((args, kwargs)))
        with below_export(), torch.enable_grad():
            result = pytree.tree_map(partial(_made, given), forms)
        arguments, named = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
        arguments = (_OURS + name, *arguments)
        node = mode.tracer.create_proxy(
            "call_function", held_function, arguments, named, name="whole"
        )
        track_tensor_tree(_plain(result), node, constant=None, tracer=mode.tracer)
        for made in filter(_is_tensor, pytree.tree_leaves(result)):
            told = pytree.tree_map(mode.tracer.unwrap_proxy, (_CHECKED, made, list(made.shape)))
            mode.tracer.create_proxy("call_function", held_function, told, {}, name="sizes")
        return result

    def restore(self, module: fx.GraphModule) -> None:
        """Let the nodes of an exported graph call what they stand for."""
        for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
            for node in part.graph.find_nodes(op="call_function", target=held_function):
                name = str(node.args[0])
                if name == _CHECKED:
                    node.target, node.args = _awaited, node.args[1:]
                if not name.startswith(_OURS):
                    continue
                name = name.removeprefix(_OURS)
                if part is not module:
                    raise RuntimeError(f"{name} cannot stay whole inside of a branch or a loop")
                path = f"model.{name}"
                module.add_submodule(path, self._parts[name])
                node.op, node.target, node.args = "call_module", path, node.args[1:]
            part.recompile()
        refuse_hidden_parameters(self._model, self._parts.values())


@contextmanager
def sets_noted() -> Iterator[set[tuple[int, str]]]:
    """Gets what is set inside of modules: names, by ids of the modules' dicts."""
    found: set[tuple[int, str]] = set()
    write = nn.Module.__setattr__

    def written(module: nn.Module, attribute: str, value: Any) -> None:
        found.add((id(vars(module)), attribute))
        write(module, attribute, value)

    with patch.object(nn.Module, "__setattr__", written):
        yield found


@contextmanager
def untold(
    parts: Mapping[str, nn.Module], set_by_them: Set[tuple[int, str]] = frozenset()
) -> Iterator[None]:
    """Trace inside: forward may tell these submodules nothing by attributes, nor be told.

    They do not run where forward is traced, and forward does not run where they do.
    """
    inside = {id(vars(module)): name for name, part in parts.items() for module in part.modules()}
    write, read = nn.Module.__setattr__, nn.Module.__getattribute__

    def refuse(does: str, module: nn.Module, attribute: str) -> NoReturn:
        name = inside.get(id(read(module, "__dict__")))
        whose = f"of {name}, which" if name else "that a submodule sets, and that"
        raise RuntimeError(f"forward {does} {attribute!r} {whose} cannot be traced")

    def written(module: nn.Module, attribute: str, value: Any) -> None:
        own = read(module, "__dict__")
        if id(own) in inside and (attribute not in own or own[attribute] is not value):
            refuse("sets", module, attribute)
        write(module, attribute, value)

    def looked_up(module: nn.Module, attribute: str) -> Any:
        if (id(read(module, "__dict__")), attribute) in set_by_them:
            refuse("reads", module, attribute)
        return read(module, attribute)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "__setattr__", written))
        if set_by_them:
            stack.enter_context(patch.object(nn.Module, "__getattribute__", looked_up))
        yield


def _awaited(value: torch.Tensor, sizes: Sequence[int]) -> None:
    """A check of sizes that is no operator of torch yet, which would be dropped."""


def check_sizes(module: fx.GraphModule) -> None:
    """Let the nodes that stand for them check the sizes of what submodules give."""
    for node in module.graph.find_nodes(op="call_function", target=_awaited):
        node.target = torch.ops.aten._assert_tensor_metadata.default
    module.recompile()


def _sizes(tree: Any) -> list[Any]:
    """All sizes of the tensors in a tree, in order."""
    return [size for leaf in pytree.tree_leaves(tree) if _is_tensor(leaf) for size in leaf.shape]


def _combined(name: str, seen: Sequence[_Seen], sizes: Sequence[Any]) -> Any:
    """The forms of the results where what a submodule reads has these sizes.

    Raises:
        RuntimeError: They do not follow from those.
    """
    rows, specs = zip(*(pytree.tree_flatten(each.result) for each in seen), strict=True)
    counts = {len(sizes), *(len(each.sizes) for each in seen)}
    if any(spec != specs[0] for spec in specs) or len(counts) > 1:
        raise RuntimeError(f"{name} cannot stay whole: at other sizes it is called otherwise")
    columns = list(zip(*(each.sizes for each in seen), strict=True))
    known = list(zip(sizes, columns, strict=True))
    try:
        return pytree.tree_unflatten(map(partial(_following, known), *rows), specs[0])
    except LookupError:
        raise RuntimeError(
            f"{name} cannot stay whole where sizes are symbols: those of its results do not follow "
            "from those of what it reads"
        ) from None


# Sizes, which may be symbols, and what they are in each run.
_Known: TypeAlias = Sequence[tuple[Any, tuple[int, ...]]]


def _following(known: _Known, *forms: _Form | None) -> _Form | None:
    """A form whose sizes follow from known ones, as they do in all runs.

    Raises:
        LookupError: They do not, or the memory of some form has gaps.
    """
    found = [form for form in forms if form is not None]
    if not found:
        return None
    if len(found) < len(forms) or len({(form.dtype, form.graded) for form in found}) > 1:
        raise LookupError
    first, shapes = found[0], list(zip(*(form.shape for form in found), strict=True))
    if len(found) == 1:
        return first
    shape = [_size(known, numbers) for numbers in shapes]
    stride: list[Any] = [1] * len(shape)
    step, steps = 1, [1] * len(found)
    for dim in sorted(range(len(shape)), key=lambda dim: (first.stride[dim], -dim)):
        if first.shape[dim] > 1 and [form.stride[dim] for form in found] != steps:
            raise LookupError
        stride[dim] = step
        step, steps = step * shape[dim], list(map(operator.mul, steps, shapes[dim]))
    return replace(first, shape=tuple(shape), stride=tuple(stride))


def _size(known: _Known, numbers: tuple[int, ...]) -> Any:
    """A size that is these numbers in the runs."""
    if len(set(numbers)) == 1:
        return numbers[0]
    for size, others in known:
        times = numbers[0] // others[0] if others[0] else 0
        if tuple(times * n for n in others) == numbers:
            return size * times if times > 1 else size
    for (one, mine), (two, theirs) in combinations(known, 2):
        if tuple(map(operator.mul, mine, theirs)) == numbers:
            return one * two
    raise LookupError


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _plain(result: Any) -> Any:
    """A result with tuples for named tuples, which `track_tensor_tree` cannot make (torch 2.14)."""
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        rows = map(_plain, result)
        return list(rows) if isinstance(result, list) else tuple(rows)
    return result


def _form(value: Any) -> Any:
    """What stands for a part of a result in a trace.

    Raises:
        RuntimeError: It is no tensor, so its value is known in a call alone.
    """
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise RuntimeError(f"a submodule that would stay whole returns a {type(value).__name__}")
    return _Form(tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def _made(given: torch.Tensor, form: _Form | None) -> torch.Tensor | None:
    """A tensor of a form, as one that forward computed."""
    if form is None:
        return None
    made = given.new_empty_strided(form.shape, form.stride, dtype=form.dtype)
    return made.requires_grad_().clone() if form.graded else made
