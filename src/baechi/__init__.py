"""Automatic splitting of PyTorch models over devices.

`place` is the one call; `trace`, `profile` or `estimate`, `probe`, `solve`, `simulate` and `apply`
are its steps.
Importing this package loads neither torch nor numpy: every name resolves on first use.
"""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The names that are modules; all others, and where they are from, are in `__init__.pyi`.
_MODULES = {"bounds": "baechi.problem.bounds", "scheduling": "baechi.scheduling"}
_HOMES = {}
with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as _file:
    for _line in _file:
        if _line.startswith("from "):
            _module, _, _rest = _line.removeprefix("from ").partition(" import ")
            _HOMES.update((row.split(" as ")[0], _module) for row in _rest.strip().split(", "))

__all__ = sorted(_HOMES.keys() - _MODULES)  # noqa: PLE0605 (a list of str)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'baechi' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"baechi.{name} needs torch 2.11 or later, which is not installed here: "
            "pip install 'baechi[torch]'. Solving, simulating and reporting do without.",
            name="torch",
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
