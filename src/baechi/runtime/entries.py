"""Entries of a placed model: what is called from outside of a placed step.

An entry is the model, or a part of it that has weights: calls of it that come from outside of a
placed step have plans of their own, around the weights where earlier calls put them.

    placed(x)                  the root's entry
    placed.encoder(x)          the encoder's, as `generate` of an encoder-decoder calls it
      trace, step, backward    no entry: in these threads every part runs as it is
"""

from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import nn

from baechi.runtime.specialization import Specializations
from baechi.torch_support.torch_internals import CALL, backward_id, plain_call


class Runner(Protocol):
    """What runs calls of entries: the state of the placed model."""

    @property
    def is_inside(self) -> bool:
        """True if what this thread runs of the model is for a trace or a step."""

    def run(
        self,
        entry: "Entry",
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plain: Callable[..., Any],
    ) -> Any:
        """The module's own result, computed on its devices; `plain` is its own call."""


@final
class Entry:
    """A module's specializations; of a part of the model also what runs when it is called.

    Attributes:
        module: The module.
        path: Its path in the model; empty for the model itself.
        plain: Its own call: hooks and forward, or what `module.compile()` made of them.
        is_told: Whether somebody was told that it ran unsplit.
        specializations: Its plans.
    """

    def __init__(self, module: nn.Module, path: str, runner: Runner) -> None:
        self.module, self.path, self._runner = module, path, runner
        self.plain = vars(module).get(CALL) or plain_call(module)
        self.is_told = False
        self.specializations = Specializations(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module."""
        # Whoever compiles a part compiles what it is.
        if torch.compiler.is_dynamo_compiling() or self._runner.is_inside or backward_id() != -1:
            return self.plain(*args, **kwargs)
        return self._runner.run(self, args, kwargs, self.plain)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a copy of a part is not placed."""
        return type(None), ()

    def __str__(self) -> str:
        n = len(self.specializations)
        return f"{n} of {self.path}" if n else f"{self.path} unsplit"

    def release(self) -> None:
        """Let the module call what it called before."""
        if vars(self.module).get(CALL) is self:
            del vars(self.module)[CALL]
            if self.plain != plain_call(self.module):
                vars(self.module)[CALL] = self.plain
