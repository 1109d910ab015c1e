"""Models by name, as on the command line: a function in a package or in a file."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from baechi.errors import InputError


def load_model(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model, args and kwargs that the function named `name` returns.

    Args:
        name: `path/to/file.py:function` or `package.module:function`.

    Raises:
        InputError: There is no such file, module or function, it fails, or it returns something
            else.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise InputError(
            f"model {name!r} cannot be read; write file.py:function or package.module:function."
        )
    found: Any = import_file(Path(where)) if where.endswith(".py") else _import_name(where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in vars(found) if not n.startswith("_") and callable(vars(found)[n])]
            raise InputError(f"{where} has no {attribute!r}; it has {', '.join(public) or 'none'}.")
        found = getattr(found, part)
    return _checked(name, found)


def _checked(name: str, function: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    shape = "it must return (model, args) or (model, args, kwargs), with args a tuple"
    if not callable(function):
        raise InputError(f"{name} is {function!r}, no function; {shape}.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{name} cannot be called without arguments: {error}; {shape}.") from None
    returned = _run(name, function)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise InputError(f"{name} returned a value of type {type(returned).__name__}; {shape}.")
    model, args, kwargs = (*returned, {})[:3]
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} args and {type(kwargs).__name__} kwargs"
        raise InputError(f"{name} returned {kinds}; {shape} and kwargs a dict.")
    return model, args, kwargs


def import_file(path: Path) -> Any:
    """The module in a file.

    Raises:
        InputError: There is no such file, or it fails.
    """
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where classes look for their module
    sys.path.insert(0, str(path.resolve().parent))  # as `python file.py` does
    _run(str(path), partial(spec.loader.exec_module, module))
    return module


def _run(name: str, function: Callable[[], Any]) -> Any:
    """The value that the user's code returns; where it fails, the error names its line."""
    try:
        return function()
    except Exception as error:
        stack = traceback.extract_tb(error.__traceback__)
        lines = [f" at {row.filename}:{row.lineno}" for row in stack if _is_users(row.filename)]
        where = lines[-1] if lines else ""
        raise InputError(f"{name} raised {type(error).__name__}: {error}{where}.") from error


def _is_users(file: str) -> bool:
    """True if a file is neither Baechi's, nor a library's, nor Python's own."""
    others = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")
    return not file.startswith(others) and not {"site-packages", "dist-packages"} & {
        *Path(file).parts
    }


def _import_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return _run(name, partial(importlib.import_module, name))
    except InputError as error:
        missing = getattr(error.__cause__, "name", None)
        if not isinstance(error.__cause__, ModuleNotFoundError) or missing is None:
            raise
        if not (name + ".").startswith(missing + "."):
            raise  # the module is there, and what it imports is not
        raise InputError(f"there is no module {missing!r}; is {name!r} a file.py?") from error
