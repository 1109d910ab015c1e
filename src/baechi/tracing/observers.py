"""Hooks that only observe: they run in every call on real tensors, and not in its planning.

    hook = lambda module, args, output: seen.append(output.detach())

Such a hook is a node of the graph that yields nothing. It belongs to the operator that makes the
last of what it sees, and follows the observer before it. That it returns nothing is read from its
code: a hook may print or count, which it must not do when a model is traced.
"""

import builtins
import dis
import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, takewhile
from operator import attrgetter, is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import fx, nn

from baechi.errors import ExecutionError
from baechi.torch_support.symbolic_sizes import SYMBOLIC
from baechi.torch_support.torch_internals import hooks_of, state_of, version_of
from baechi.torch_support.tracer_internals import FakeTensor
from baechi.tracing.fx_nodes import nodes_inside
from baechi.tracing.modes import Modes
from baechi.tracing.pytrees import Parts, Structure

FORWARD: Final = ("_forward_hooks", "_forward_pre_hooks")
# Hooks that only serve the forward they run in: torch's own, and those by which transformers keeps
# hidden states for the model's output, which stay once hidden states were requested.
_INSIDE: Final = ("torch.nn.", "transformers.utils.output_capturing")
# By which embeddings need a gradient, for reentrant checkpointing: of transformers, PEFT, scripts.
_GRADED: Final = "make_inputs_require_grad"
_NOTES: Final = (list, dict, set, deque)  # their methods return nothing that a hook could mean
_LOADS: Final = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST", "LOAD_NAME")
_RUNNING: Final = threading.local()
_MOST_SEEN: Final = 1_000  # objects that are looked into for what a hook holds
RETURN_IT: Final = (
    "Let the hook, a function with a name, end with `return output`: then it is traced as a part "
    "of forward."
)


@contextmanager
def observing() -> Iterator[None]:
    """Run a step in this thread inside; elsewhere, and in `without_observers`, none runs."""
    before = getattr(_RUNNING, "on", None)
    _RUNNING.on = before is not False
    try:
        yield
    finally:
        _RUNNING.on = before


@final
class Observer:
    """A hook as the target of an fx node, whose arguments are the tensors that the hook sees.

    Args:
        hook: The hook.
        place: Its kind, and its key and number among the module's hooks of this kind.
        module: The module that has it.
        title: Both, for people.
        seen: The hook's arguments after the module, without tensors.

    Attributes:
        constants: What forward reads beside its arguments and parameters. Where the hook holds such
            a tensor before it runs and another afterwards, the trace does not read that.
        modes: What forward switched on or off around the hook.
    """

    __name__ = __qualname__ = "observe"

    def __init__(
        self,
        hook: Callable[..., Any],
        place: tuple[str, int, int],
        module: nn.Module,
        title: str,
        seen: Structure,
    ) -> None:
        self._hook, self._place, self._module, self._seen = hook, place, module, seen
        self.title = title
        self.constants: Sequence[torch.Tensor] = ()
        self.modes = Modes()
        self._stale = False

    def __repr__(self) -> str:
        return self.__name__  # in the key of an operator, whose cost does not depend on it

    def __call__(self, *tensors: Any, after: Any = None) -> None:  # noqa: ARG002
        """Let the hook see these, in a step; `after` is the observer before it.

        Raises:
            ExecutionError: The hook returns something, writes into what it sees, or exchanges or
                writes what forward reads.
        """
        if not getattr(_RUNNING, "on", False) or any(isinstance(t, FakeTensor) for t in tensors):
            return
        kind, key, number = self._place
        hooks = hooks_of(self._module, kind)  # another like it may have come in its place
        hook = self._hook if key in hooks else list(hooks.values())[number]
        seen = self._seen.fill(tensors)
        before = [(t, _version(t)) for t in (*tensors, *self._state())]
        reached = _reached(hook) if self.constants else None
        held = [(t, _version(t)) for t in self.constants if reached and id(t) in reached]
        returned = self.modes.around(hook)(self._module, *seen)
        now = _reached(hook) if held else None
        exchanged = now is not None and any(id(t) not in now for t, _ in held)
        self._stale |= exchanged or any(_version(t) != version for t, version in held)
        if self._stale:
            raise ExecutionError(
                f"{self.title} keeps a tensor that forward reads, which the trace does not know "
                f"of. {RETURN_IT}"
            )
        if returned is not None:
            raise ExecutionError(
                f"{self.title} returned something, though by its code it only observes, so it was "
                "not traced with the model. Let it end with `return result`, in a function with a "
                "name, and it is."
            )
        parts = Parts(look_into=True)
        parts.structure(seen)
        left = [*parts.tensors, *self._state()]
        same = len(left) == len(before) and all(map(is_, left, (t for t, _ in before)))
        if not same or any(_version(t) != version for t, version in before):
            raise ExecutionError(
                f"{self.title} changes what it sees, or its module's parameters or buffers, which "
                "a trace would not know of. Let it return what it changes."
            )

    def _state(self) -> list[torch.Tensor]:
        _, parameters, buffers = state_of(self._module)
        return [t for t in (*parameters.values(), *buffers.values()) if t is not None]


def _reached(hook: Any) -> dict[int, torch.Tensor] | None:
    """The tensors that a hook can exchange for others, by id; None of one that holds too much.

    They are in what it names, what it closes over, and the object that it belongs to.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    ahead = [hook]
    while ahead:
        if len(seen) > _MOST_SEEN:
            return None
        each = ahead.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif id(each) not in seen:
            seen.add(id(each))
            ahead += _inside(each)
    return found


def _inside(each: Any) -> list[Any]:
    if isinstance(each, FunctionType):
        cells = [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
        names = (name for name in each.__code__.co_names if name in each.__globals__)
        return [*cells, *(each.__globals__[name] for name in names), *(each.__defaults__ or ())]
    if isinstance(each, MethodType):
        return [each.__func__, each.__self__]
    if isinstance(each, partial):
        return [each.func, *each.args, *each.keywords.values()]
    if isinstance(each, dict | list | tuple | set | deque):
        return [*(each.values() if isinstance(each, dict) else each)]
    own = {} if isinstance(each, type | ModuleType) else getattr(each, "__dict__", {})
    state = ("_parameters", "_buffers", "_modules") if isinstance(each, nn.Module) else ()
    return [value for name, value in own.items() if name not in state]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


Record = Callable[[Observer, Sequence[Any]], None]


def recording(
    hook: Callable[..., Any], place: tuple[str, int, int], title: str, record: Record
) -> Callable[..., None]:
    """What stands for an observing hook while a tracer runs: it makes a node and runs nothing."""

    def recorded(module: nn.Module, *seen: Any) -> None:
        parts = Parts(look_into=True)
        structure = parts.structure(seen)
        if any(isinstance(constant, SYMBOLIC) for constant in structure.constants):
            raise TypeError(f"{title} sees a number that depends on sizes")
        observer = Observer(hook, place, module, title, structure)
        proxy = next((t for t in parts.tensors if isinstance(t, fx.Proxy)), None)
        if proxy is None:
            record(observer, parts.tensors)
        else:
            proxy.tracer.create_proxy("call_function", observer, tuple(parts.tensors), {})

    return recorded


def observers_in(nodes: Iterable[fx.Node]) -> Iterator[Observer]:
    """The observers among the nodes, and in the graphs that these run."""
    for node in nodes:
        for each in (node, *nodes_inside(node)):
            if isinstance(each.target, Observer):
                yield each.target


def in_turn(module: fx.GraphModule) -> fx.GraphModule:
    """The module, changed in place: every observer waits for the one before it.

    Each knows what forward reads beside its arguments and the model's parameters.
    """
    before = None
    found = module.graph.find_nodes(op="get_attr")
    rows = [attrgetter(str(node.target))(module) for node in found]
    constants = [row for row in rows if type(row) is torch.Tensor]
    for node in module.graph.nodes:
        if isinstance(node.target, Observer):
            node.target.constants = constants
            node.kwargs = {} if before is None else {"after": before}
            before = node
    module.recompile()  # an operator that cannot be written down fails here
    return module


def has_observers(module: nn.Module) -> bool:
    """True if the module or a submodule has a hook that only observes."""
    hooks = (hooks_of(part, kind) for part in module.modules() for kind in FORWARD)
    return any(observes(hook) for row in hooks for hook in row.values())


@contextmanager
def without_observers(module: nn.Module) -> Iterator[None]:
    """Run the module inside on tensors that no observer shall see, split or not."""
    running, _RUNNING.on = getattr(_RUNNING, "on", None), False
    rows = [hooks_of(part, kind) for part in module.modules() for kind in FORWARD]
    with ExitStack() as stack:
        stack.callback(setattr, _RUNNING, "on", running)
        for row in filter(None, rows):
            stack.enter_context(patch.dict(row))
            for key in [key for key, hook in row.items() if observes(hook)]:
                del row[key]
        yield


def identity_of(key: int, hook: Any) -> Any:
    """Equal for hooks of which a plan may run either.

    Those are of the same code, only observe, hold no tensor that forward could read, and remove no
    hook: the one that comes anew is found by its place among the others.
    """
    plain = isinstance(hook, FunctionType) and observes(hook) and _reached(hook) == {}
    return hook.__code__ if plain and "remove" not in hook.__code__.co_names else key


def serves_inside(hook: Any) -> bool:
    """True if a hook only serves the forward it runs in, which needs it."""
    name = getattr(hook, "__name__", "")
    return name.startswith(_GRADED) or getattr(hook, "__module__", "").startswith(_INSIDE)


def observes(hook: Any) -> bool:
    """True if by its code a hook returns nothing: it never returns a value, or is such a lambda.

    One that serves the forward it runs in does not.
    """
    if serves_inside(hook):
        return False
    while isinstance(hook, partial):
        hook = hook.func
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    if not isinstance(function, FunctionType):
        method = vars(type(function)).get("__call__")
        return isinstance(method, FunctionType) and observes(method)
    rows = list(dis.get_instructions(function))
    for before, row in pairwise(rows):
        if row.opname == "RETURN_CONST" and row.argval is not None:
            return False
        if row.opname == "RETURN_VALUE":
            if row.is_jump_target:  # of a conditional expression
                return False
            nothing = before.opname == "LOAD_CONST" and before.argval is None
            noted = before.opname.startswith("CALL") and function.__name__ == "<lambda>"
            if not nothing and not (noted and _is_note(function, rows)):
                return False
    return not inspect.isgeneratorfunction(function)


def _is_note(function: FunctionType, rows: list[dis.Instruction]) -> bool:
    """True if what a lambda calls, which its code loads first, returns nothing."""
    start = next((i for i, row in enumerate(rows) if row.opname.startswith(_LOADS)), len(rows))
    name = str(rows[start].argval) if start < len(rows) else ""
    scopes = inspect.getclosurevars(function)
    known = {**scopes.builtins, **scopes.globals, **scopes.nonlocals}
    for given in inspect.signature(function).parameters.values():
        if given.default is not inspect.Parameter.empty:
            known[given.name] = given.default
    if name not in known:  # the module, or what it got or gave
        return "retain_grad" in function.__code__.co_names
    called = known[name]
    for row in takewhile(lambda row: row.opname in ("LOAD_ATTR", "LOAD_METHOD"), rows[start + 1 :]):
        called = getattr(called, row.argval, None)
    if isinstance(called, FunctionType | MethodType):
        return observes(called)
    owner = getattr(called, "__self__", called)
    return owner is builtins or isinstance(owner, _NOTES)
