"""Functions that a model's `forward` may call, and builtins in them that are others in a trace.

Python's own `int`, `float` and `len` make numbers of what is a symbol in a trace.
"""

import builtins
import dis
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, reduce
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from baechi.torch_support.symbolic_sizes import SYMBOLIC, is_unbacked

OURS: Final = ("torch", "baechi")  # whose code is not the model's
_NO_MODELS: Final = (*OURS, "builtins", "einops")  # whose variables are no matter of a model
# Names by which calls go elsewhere begin so. No name in a program does: it is no identifier.
_ELSEWHERE: Final = "baechi:"
_NO_NUMBERS: Final = (torch.bool, torch.complex32, torch.complex64, torch.complex128)
NUMBERS: Final = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# An argument of an instruction that needs no other instruction before it.
_PLAIN: Final = 255
_LOAD_GLOBAL: Final = dis.opmap["LOAD_GLOBAL"]


def package_of(frame: FrameType) -> str:
    """The package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_torchs(module: nn.Module) -> bool:
    """True if it is a layer of torch's own."""
    return type(module).__module__.startswith("torch.nn.")


def own_modules(model: nn.Module) -> set[str]:
    """The Python modules of the model's classes, without torch's."""
    names = {type(part).__module__ for part in model.modules()}
    return {name for name in names if not name.startswith("torch.")}


def functions_of(
    model: nn.Module, *, nearby: bool = False
) -> Iterator[tuple[FunctionType, ModuleType]]:
    """The functions of their own packages that forwards may call, with the module of each.

    Args:
        model: Any module.
        nearby: Whether also what else its classes, and the modules of Python that they are in, do.
    """
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    packages = {kind.__module__.partition(".")[0] for kind in kinds}.difference(_NO_MODELS)
    held: dict[str, list[Any]] = {}
    for kind in kinds:
        for name, value in vars(kind).items():
            held.setdefault(name, []).append(value)
    left = [*held["forward"]]
    if nearby:
        own = (kind for kind in kinds if kind.__module__.partition(".")[0] in packages)
        left += [value for kind in own for value in vars(kind).values()]
        for name in sorted(own_modules(model) & sys.modules.keys()):
            left += _held_by(name)
    seen: set[FunctionType] = set()
    while left:
        function = python_function(left.pop())
        home = None if function is None else sys.modules.get(str(function.__module__))
        if function is None or home is None or vars(home) is not function.__globals__:
            continue
        if function in seen or home.__name__.partition(".")[0] not in packages:
            continue
        seen.add(function)
        yield function, home
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                left.append(cell.cell_contents)
        for code in codes_of(function.__code__):
            left += [vars(home)[name] for name in code.co_names if name in vars(home)]
            left += [value for name in code.co_names for value in held.get(name, ())]


def _held_by(name: str) -> list[Any]:
    """What a module of Python holds, and what its classes do."""
    values = [*vars(sys.modules[name]).values()]
    kinds = [v for v in values if isinstance(v, type) and v.__module__ == name]
    return [*values, *(value for kind in kinds for value in vars(kind).values())]


def python_function(value: Any) -> FunctionType | None:
    """The function behind a method, a property or decorators; None if it is none of Python's."""
    value = value.fget if isinstance(value, property) else value
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def codes_of(code: CodeType) -> list[CodeType]:
    """The code of a function, and that of the functions that it makes."""
    codes = [code]
    for each in codes:
        codes += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return codes


def globals_read(code: CodeType) -> Iterator[tuple[int, str, bool]]:
    """The instructions that read global variables: place, name, and whether what is read is called.

    As by `dis` (seen with Python 3.11 to 3.13), which would take a quarter of the time of a trace
    of a small model of transformers.
    """
    text = code.co_code
    operations = text[::2]
    at = operations.find(_LOAD_GLOBAL)
    while at >= 0:
        argument = text[2 * at + 1]
        if at and operations[at - 1] == dis.EXTENDED_ARG:
            argument += text[2 * at - 1] << 8
        # The lowest bit says that what is loaded is called.
        yield 2 * at, code.co_names[argument >> 1], bool(argument & 1)
        at = operations.find(_LOAD_GLOBAL, at + 1)


@contextmanager
def seen_by(model: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a builtin function be another one in the model's code, where that has none itself."""
    scopes = [vars(sys.modules[each]) for each in own_modules(model) if each in sys.modules]
    scopes = [scope for scope in scopes if name not in scope]
    for scope in scopes:
        scope[name] = function
    try:
        yield
    finally:
        for scope in scopes:
            del scope[name]


@contextmanager
def called_by(model: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let calls of builtin classes in the model's code go to these functions, by name.

    An instruction that loads a name knows whether it is called, so that calls alone go elsewhere:
    `isinstance(n, int)` and `dtype=int` are as they were.
    """
    elsewhere = {f"{_ELSEWHERE}{name}": function for name, function in functions.items()}
    # A function that the model makes meanwhile, such as a hook, keeps its code afterwards.
    vars(builtins).update({f"{_ELSEWHERE}{name}": getattr(builtins, name) for name in functions})
    with ExitStack() as stack:
        stack.enter_context(patch.dict(vars(builtins), elsewhere))
        for function, _ in functions_of(model, nearby=True):
            names = frozenset(functions.keys() - function.__globals__.keys())
            code = _redirected(function.__code__, names)
            if code is not function.__code__:
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = code
        yield


def _redirected(code: CodeType, names: frozenset[str]) -> CodeType:
    """The code with calls of global names that go elsewhere; itself where there are none."""
    consts = tuple(
        _redirected(const, names) if isinstance(const, CodeType) else const
        for const in code.co_consts
    )
    known, text = [*code.co_names], bytearray(code.co_code)
    for place, name, called in globals_read(code) if names.intersection(known) else ():
        if called and name in names:
            other = f"{_ELSEWHERE}{name}"
            known += [] if other in known else [other]
            argument = 2 * known.index(other) + 1
            if argument > _PLAIN:  # it has more than a hundred names
                return code
            text[place + 1] = argument
    if len(known) == len(code.co_names) and all(map(is_, consts, code.co_consts)):
        return code
    return code.replace(co_code=bytes(text), co_names=tuple(known), co_consts=consts)


def whole_number(value: torch.Tensor) -> Any:
    """As `int` of a tensor, but perhaps a symbol; a function of torch, which its modes see."""
    if has_torch_function_unary(value):
        return handle_torch_function(whole_number, (value,), value)
    return _int(True, value.item())


def _int(of_tensors: bool, /, *args: Any, **options: Any) -> Any:
    """As `int`, but of what is symbolic a symbol."""
    value: Any = args[0] if len(args) == 1 and not options else None
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, torch.SymFloat):
        return math.trunc(value)
    return whole_number(value) if of_tensors and _is_real(value) else int(*args, **options)


def _float(of_tensors: bool, /, *args: Any) -> Any:
    """As `float`, but of what is symbolic a symbol."""
    value: Any = args[0] if len(args) == 1 else None
    value = value.item() if of_tensors and _is_real(value) else value
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(value)  # type: ignore[no-untyped-call]
    return float(*args) if value is None else float(value)


def _is_real(value: Any) -> bool:
    """True of a tensor of integers or floats."""
    return isinstance(value, torch.Tensor) and value.dtype not in _NO_NUMBERS


def _is_instance(value: Any, kinds: Any) -> bool:
    """As `isinstance`, but a symbol is of the type that the number is of."""
    number = NUMBERS.get(type(value))
    return isinstance(value, kinds) or (number is not None and issubclass(number, kinds))


def _length(value: Any) -> Any:
    """As `len`, but of a tensor a symbol, where its size is one."""
    sized = isinstance(value, torch.Tensor) and value.dim()
    return value.shape[0] if sized else len(value)


def _quotient_and_rest(a: Any, b: Any) -> Any:
    """As `divmod`, of symbols, too."""
    symbolic = isinstance(a, SYMBOLIC) or isinstance(b, SYMBOLIC)
    return (a // b, a % b) if symbolic else divmod(a, b)


def _extreme(builtin: Callable[..., Any], of_two: Callable[..., Any]) -> Callable[..., Any]:
    """As `min` or `max`, but of whole numbers that values decide a symbol."""

    def extreme(*args: Any, **options: Any) -> Any:
        whole = not options and all(isinstance(arg, (int, torch.SymInt)) for arg in args)
        symbolic = whole and any(map(is_unbacked, args))
        return reduce(of_two, args) if symbolic else builtin(*args, **options)

    return extreme


@contextmanager
def _no_texts(model: nn.Module) -> Iterator[None]:
    """Refuse that the model's code writes a number into a text which values of tensors decide."""
    packages = {name.partition(".")[0] for name in own_modules(model)}

    def refusing(own: Callable[[Any], str]) -> Callable[[Any], str]:
        def text(number: Any) -> str:
            if package_of(sys._getframe(1)) in packages and is_unbacked(number):
                raise TypeError("forward writes a number of a tensor into a text")
            return own(number)

        return text

    with ExitStack() as stack:
        for kind in SYMBOLIC:
            stack.enter_context(patch.object(kind, "__repr__", refusing(kind.__repr__)))
        yield


@contextmanager
def symbols_kept(model: nn.Module, *, of_tensors: bool = True) -> Iterator[None]:
    """Let numbers that are symbols stay so in the model's code while `torch.export` runs it.

    With `of_tensors` those that it makes of tensors, by `int` and `float`, are symbols, too.
    """
    root: Any = math.sqrt

    def square_root(value: Any) -> Any:
        return torch.sym_sqrt(value) if isinstance(value, SYMBOLIC) else root(value)

    kinds = {"int": partial(_int, of_tensors), "float": partial(_float, of_tensors)}
    with (
        seen_by(model, "len", _length),
        seen_by(model, "divmod", _quotient_and_rest),
        seen_by(model, "min", _extreme(min, torch.sym_min)),
        seen_by(model, "max", _extreme(max, torch.sym_max)),
        called_by(model, {**kinds, "isinstance": _is_instance}),
        patch.object(math, "sqrt", square_root),
        _no_texts(model),
    ):
        yield
