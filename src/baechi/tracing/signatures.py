"""Which parameter of a forward each argument is for."""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """Without `self`, looked up once for each function, since every call asks."""
    function = getattr(forward, "__func__", None)
    return inspect.signature(forward) if function is None else _signature_of_method(function)


@functools.lru_cache(maxsize=64)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(MethodType(function, object()))


def canonical_arguments(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As many arguments by name as the signature allows, in the signature's order."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    has_rest = any(
        kind is inspect.Parameter.VAR_POSITIONAL and bound.arguments.get(name)
        for name, kind in kinds.items()
    )
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = kinds[name]
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)  # in the caller's order, which forward sees
        elif kind is inspect.Parameter.POSITIONAL_ONLY or (
            has_rest and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(value)
        else:
            named[name] = value
    return tuple(positional), named
