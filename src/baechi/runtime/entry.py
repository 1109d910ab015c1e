"""A module of a placed model that can be called from outside of a placed step."""

from typing import Any, Protocol, final

import torch
from torch import nn

from baechi.errors import InputError
from baechi.runtime.executable import Executable
from baechi.runtime.specialization import Specializations, call_key
from baechi.torch_support.torch_internals import CALL, backward_id, plain_call
from baechi.tracing.calling_convention import Call


class Runner(Protocol):
    """What runs the calls of entries."""

    @property
    def is_inside(self) -> bool:
        """True if what this thread runs of the model is for a trace or a step."""
        ...

    def run(self, entry: "Entry", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the entry's module."""
        ...


@final
class Entry:
    """A module's specializations; of a part of the model also what runs when it is called.

    Attributes:
        module: The module.
        path: Its path in the model; empty for the model itself.
        plain: Its own call: hooks and forward, or what `module.compile()` made of them.
        is_told: Whether somebody was told that it ran unsplit.
    """

    def __init__(self, module: nn.Module, path: str, runner: Runner) -> None:
        self.module, self.path, self._runner = module, path, runner
        self.plain = vars(module).get(CALL) or plain_call(module)
        self.is_told = False
        self.forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module."""
        # Whoever compiles a part compiles what it is.
        if torch.compiler.is_dynamo_compiling() or self._runner.is_inside or backward_id() != -1:
            return self.plain(*args, **kwargs)
        return self._runner.run(self, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a copy of a part is not placed."""
        return type(None), ()

    def __str__(self) -> str:
        n = len(self.specializations)
        return f"{n} of {self.path}" if n else f"{self.path} unsplit"

    @property
    def is_used(self) -> bool:
        """True if it was called."""
        return self.is_told or len(self.specializations) > 0

    @property
    def is_held(self) -> bool:
        """True if the module calls this."""
        return vars(self.module).get(CALL) is self

    def hold(self) -> None:
        """Let the module call this."""
        vars(self.module)[CALL] = self

    def release(self) -> None:
        """Let the module call what it called before."""
        if self.is_held:
            del vars(self.module)[CALL]
            if self.plain != plain_call(self.module):
                vars(self.module)[CALL] = self.plain

    def find(self, call: Call) -> Executable | None:
        """The specialization that can run a call, or None.

        Raises:
            InputError: None could be made for such a call before.
        """
        key = call_key(self.module, call)
        refused = self._refused.get(key)
        if refused is not None:
            raise InputError(refused)
        return self.specializations.find(key, call)

    def add(self, call: Call, special: Executable) -> None:
        """Take a specialization for calls like this one."""
        self.specializations.add(call_key(self.module, call), special)

    def refuse(self, call: Call, reason: str) -> None:
        """Remember why such calls have no plan."""
        self._refused[call_key(self.module, call)] = reason

    def unplanned(self, call: Call) -> InputError:
        """The error for a call that needs a plan where `apply` was given another."""
        if self.path:
            return InputError(
                "`apply` was given one plan, of the model itself; `baechi.place` makes one for "
                "such calls, too."
            )
        return self.specializations.unknown(self.module, call, call_key(self.module, call))

    def forget(self) -> None:
        """Drop all specializations."""
        self.specializations = Specializations()
        self._refused: dict[Any, str] = {}
