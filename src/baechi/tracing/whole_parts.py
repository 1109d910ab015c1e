"""Submodules that stay whole in what `torch.export` traces: those whose forward it cannot trace.

A layer of experts loops over those that are hit, which the values of tensors decide. The rest of
the model can be traced where something says what such a submodule returns: a run of the example
does. The trace gets a node that calls the submodule, and a check that in other calls its results
have the sizes that they had then, since forward may have read them.
"""

import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn, final
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


@final
@dataclass(frozen=True)
class _Form:
    """What is known of a tensor that is a result, before it is there."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    graded: bool


@final
class WholeParts:
    """The submodules that stay whole in one capture: more of them after each that failed.

    Args:
        model: The model.
        run: Runs the example for real.
    """

    def __init__(self, model: nn.Module, run: Callable[[], None]) -> None:
        self._model, self._run = model, run
        self._parts: dict[str, nn.Module] = {}
        self._forms: dict[str, list[Any]] = {}  # of the results of each call, in order
        self._calls: Counter[str] = Counter()
        self._set: set[tuple[int, str]] = set()  # by them: ids of modules' dicts, and names

    def give_way(self, error: Exception) -> bool:
        """Let the innermost submodule whose forward failed stay whole, and all of its class.

        It is of the model's own: layers of torch fail for what they are given.
        """
        parts = [row for row in self._model.named_modules() if not is_torchs(row[1])]
        names = {id(vars(part)): name for name, part in parts if name}
        found = ""
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
        self._forms = {name: [] for name in self._parts}
        with self._replaced(self._see):
            self._run()

    def _see(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with sets_noted() as found:
            result = plain_call(self._parts[name])(*args, **kwargs)
        self._set |= found
        self._forms[name].append(pytree.tree_map(_form, result))
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
        mode, calls = export_mode(), self._forms.get(name, [])
        if mode is None or given is None or self._calls[name] >= len(calls):
            raise RuntimeError(f"{name} cannot stay whole: the example has no call like this one")
        forms = calls[self._calls[name]]
        self._calls[name] += 1
        with below_export(), torch.enable_grad():
            result = pytree.tree_map(partial(_made, given), forms)
        arguments, named = pytree.tree_map(mode.tracer.unwrap_proxy, (args, kwargs))
        arguments = (_OURS + name, *arguments)
        node = mode.tracer.create_proxy(
            "call_function", held_function, arguments, named, name="whole"
        )
        track_tensor_tree(_plain(result), node, constant=None, tracer=mode.tracer)
        return result

    def restore(self, module: fx.GraphModule) -> None:
        """Let the nodes of an exported graph call what they stand for."""
        for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
            for node in part.graph.find_nodes(op="call_function", target=held_function):
                name = str(node.args[0])
                if not name.startswith(_OURS):
                    continue
                name = name.removeprefix(_OURS)
                if part is not module:
                    raise RuntimeError(
                        f"{name} cannot stay whole where forward switches gradients or autocast"
                    )
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


def check_sizes(module: fx.GraphModule) -> None:
    """Let each call of a submodule that stays whole check the sizes of what it gives."""
    target = torch.ops.aten._assert_tensor_metadata.default
    for node in [node for node in module.graph.nodes if node.op == "call_module"]:
        for value in _parts_of(node):
            made = value.meta.get("val")
            if isinstance(made, torch.Tensor):
                with node.graph.inserting_after(value):
                    arguments = (value, list(made.shape))
                    check = node.graph.create_node("call_function", target, arguments, name="sizes")
                check.meta = {key: node.meta[key] for key in node.meta.keys() - {"val"}}
    module.recompile()


def _parts_of(node: fx.Node) -> list[fx.Node]:
    """A result and what is taken out of it."""
    rows = [node]
    for row in rows:
        rows += [user for user in row.users if user.target is operator.getitem]
    return rows


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
    return _Form(value.shape, value.stride(), value.dtype, value.requires_grad)


def _made(given: torch.Tensor, form: _Form | None) -> torch.Tensor | None:
    """A tensor of a form, as one that forward computed."""
    if form is None:
        return None
    made = given.new_empty_strided(form.shape, form.stride, dtype=form.dtype)
    return made.requires_grad_().clone() if form.graded else made
