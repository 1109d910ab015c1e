"""Where gradients leave a tape, and where they come back to it: what enters, and what it gives."""

from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Entry:
    """A tensor that may enter with a gradient.

    Attributes:
        argument: Which argument of the function holds it.
        leaf: Which of the argument's tensors it is.
        value: Whose flag says whether it needs a gradient; -1 for a parameter.
        grad: The slot that gets its gradient.
        given: Whether it is the caller's tensor.
        as_it_lies: Whether its gradient goes on as it lies in memory (`strided`).
    """

    argument: int
    leaf: int
    value: int
    grad: int
    given: bool = False
    as_it_lies: bool = False


@final
@dataclass(frozen=True)
class Output:
    """A value that leaves the tape.

    Attributes:
        result: Which result of the function it is; -1 if it is given by the caller or by the model.
        given: That value: the index of the caller's tensor, or the model's own tensor.
        value: Its number.
        bare: Whether it is a tensor and not a structure of several.
        slots: Where it goes.
        results: Where else, for the caller.
        watched: Whether the caller gets it and the model reads it, too.
    """

    result: int
    given: Any
    value: int
    bare: bool
    slots: tuple[int, ...]
    results: tuple[int, ...]
    watched: bool = False
