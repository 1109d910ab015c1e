"""The calls that a trace stands for: of its sizes, or its family's, where its guards hold."""

from collections.abc import Iterable

import torch

from baechi.runtime.runtime_checks import SharingGuard
from baechi.traced.traced_model import Traced
from baechi.tracing.calling_convention import Call
from baechi.tracing.family_traces import same_beyond
from baechi.tracing.guards import HeldObjects
from baechi.tracing.lowering import TracedModule


class AcceptedCalls:
    """The calls that what was traced can run, with the gradients that are planned for.

    `parameters` are those that it reads; `training` says whether it plans for gradients.
    """

    def __init__(
        self, traced: Traced, parameters: Iterable[torch.nn.Parameter], *, training: bool
    ) -> None:
        module: TracedModule = traced.module
        self._traced, self._module, self._training = traced, module, training
        self._family = module.family
        self._sharing_guard = SharingGuard(module)
        frozen = ((p, ("requires_grad",)) for p in parameters if not p.requires_grad)
        self._frozen = HeldObjects((), frozen)

    def takes(self, call: Call) -> bool:
        """True if arguments share what they shared in the trace, and their gradients are planned.

        The mode of gradients must be the trace's if forward reads it; and what forward asks about
        values of arguments must have the same answers.
        """
        mode = self._module.gradients
        if mode is not None and mode != torch.is_grad_enabled():
            return False
        call = self.carrying(call)
        if not self._sharing_guard.allows(call.tensors):
            return False
        if self._training and torch.is_grad_enabled():
            if not self._frozen.are_same():
                return False
            planned = zip(call.tensors, self._module.call.tensors, strict=True)
            if not all(mine.requires_grad <= own.requires_grad for mine, own in planned):
                return False
        return self._module.answers(call)

    def ask_the_same(self, call: Call) -> bool:
        """True if what forward asks the arguments of a call has the answers of the traced one."""
        return self._module.answers(self.carrying(call))

    def joined(self, call: Call) -> tuple[int, ...] | None:
        """The sizes of a call that this can run, as values of its family's symbols; else None."""
        values = None if self._family is None else self._family.joined(call)
        return values if values is not None and self.takes(call) else None

    def may_take(self, call: Call) -> bool:
        """True if the sizes of a call are of its family, whatever the guards say."""
        family = self._family
        if family is None or not family.carries(call):
            return False
        return family.beyond(family.carrying(call)) is not None and self.takes(call)

    def extend(self, other: Traced) -> bool:
        """Take the call of another trace, too, if at its sizes the family's runs what that does."""
        call = same_beyond(self._traced, other)
        if call is not None and self._family is not None:
            self._family.extend(call)
        return call is not None

    def carrying(self, call: Call) -> Call:
        """The call with its family's sizes as tensors, where forward takes numbers."""
        return call if self._family is None else self._family.carrying(call)
