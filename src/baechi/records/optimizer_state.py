"""Bytes of optimizer state per trained parameter, from shapes and types alone.

An optimizer is named by its torch class in lower case, such as `"adamw"`, with options after a `+`;
`"momentum"` is SGD with momentum. docs/memory.md ("Optimizer state") has all names and options.

Source: the contents of `optimizer.state` for each class of torch.optim (2.11 to 2.13); a test
compares with the classes themselves.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from baechi.errors import InputError

# Step counters are fp32 scalars unless torch's default type is a wider one.
_SCALAR_BYTES: Final = 4
_MASTER_BYTES: Final = 4


@final
@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """Shape, empty for a scalar, and bytes of an element of a parameter that has a gradient."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize


class _Rule(NamedTuple):
    """State that an optimizer keeps for a parameter."""

    scalars: int  # zero-dimensional tensors: a step counter, mostly
    moments: int  # tensors of the parameter's shape and type
    factored: bool = False  # the last moment of a matrix or more is kept as a row and a column


_RULES: Final = {
    "none": _Rule(0, 0),
    "sgd": _Rule(0, 0),
    "momentum": _Rule(0, 1),
    "adam": _Rule(1, 2),
    "adamw": _Rule(1, 2),
    "adamax": _Rule(1, 2),
    "nadam": _Rule(2, 2),
    "radam": _Rule(1, 2),
    "adadelta": _Rule(1, 2),
    "adagrad": _Rule(1, 1),
    "rmsprop": _Rule(1, 1),
    "adafactor": _Rule(1, 1, factored=True),
}
OPTIMIZERS: Final = tuple(_RULES)
_AMSGRAD: Final = ("adam", "adamw")


def optimizer_state_bytes(optimizer: str | None, parameter: TrainedParameter) -> int:
    """Bytes that the optimizer holds for one parameter from its first step on.

    Args:
        optimizer: A name of `OPTIMIZERS` with options, as the module says; `None` is `"none"`.
        parameter: The trained parameter.

    Raises:
        InputError: The optimizer or an option of it is unknown.
    """
    name, options = check_optimizer(optimizer)
    master = "master" in options and parameter.itemsize < _MASTER_BYTES
    if master:
        parameter = TrainedParameter(parameter.shape, _MASTER_BYTES)
    rule = _RULES[name]
    whole = rule.moments + ("amsgrad" in options)
    nbytes = rule.scalars * _SCALAR_BYTES + (parameter.nbytes if master else 0)
    if rule.factored and len(parameter.shape) > 1:
        *rest, rows, columns = parameter.shape
        nbytes += math.prod(rest) * (rows + columns) * parameter.itemsize
        whole -= 1
    return nbytes + whole * parameter.nbytes


def check_optimizer(optimizer: str | None) -> tuple[str, frozenset[str]]:
    """The name and the options of an optimizer, if they are known."""
    if not isinstance(optimizer, str | None):
        raise InputError(f"optimizer is {optimizer!r}; give its name, such as 'adamw', or None.")
    name, *options = ("none" if optimizer is None else optimizer).lower().split("+")
    if name not in _RULES:
        known = ", ".join(sorted(_RULES))
        raise InputError(f"optimizer {optimizer!r} is unknown; it must be one of {known}.")
    for option in options:
        if option not in ("amsgrad", "master") or (option == "amsgrad" and name not in _AMSGRAD):
            raise InputError(
                f"optimizer {optimizer!r} has the unknown option {option!r}; it may be '+master' "
                "(fp32 copies of smaller parameters) or, for adam and adamw, '+amsgrad'."
            )
    return name, frozenset(options)
