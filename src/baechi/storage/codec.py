"""Codecs from type hints: pairs of functions that turn a value into plain JSON and back.

Covered are scalars, choices of strings, optionals and unions, tuples, mappings from strings, and
dataclasses of these. Values that a hint does not allow are refused in both directions, with the
path of the field. docs/design.md explains why no library is used.
"""

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, NamedTuple, Union, final

from baechi.errors import InputError
from baechi.validation import INT64_MAX, FrozenDict


@final
class Refusal(InputError):  # noqa: N818 (its user says what could not be read or written)
    """A wrong value and its path, which is filled from the inside out."""

    def __init__(self, reason: str, *, sentence: bool = False) -> None:
        super().__init__(reason, sentence)
        self.sentence = sentence  # the reason stands alone, as those of the constructors do
        self.path: list[str] = []

    def __str__(self) -> str:
        reason, where = str(self.args[0]), "".join(reversed(self.path)).removeprefix(".")
        if self.sentence:
            return f"{where}: {reason}" if where else reason
        return f"{where or 'value'} {reason}"


class Codec(NamedTuple):
    """Writer and reader of one type hint; both refuse values that the hint does not allow."""

    name: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@cache
def codec(hint: Any) -> Codec:
    """The codec of a type hint, built once.

    Raises:
        TypeError: No codec is known for the hint: an error of the dataclass, not of a file.
    """
    if hint in _SCALARS:
        return _scalar(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis):
        return _sequence(codec(arguments[0]), origin)
    if origin is Literal:
        return _choice(arguments)
    if origin in (types.UnionType, Union):
        return _union(arguments)
    if origin is Mapping and arguments[0] is str:
        return _mapping(codec(arguments[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"no JSON form is known for {hint!r}")


_SCALARS: Final = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _scalar(kind: Any) -> Codec:
    name = _SCALARS[kind]

    def check(value: Any) -> Any:
        if kind is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                raise Refusal(f"is {show(value)}, which is too large.") from None
        if type(value) is not kind:
            raise Refusal(f"is {show(value)}; it must be {name}.")
        if kind is int and not -INT64_MAX <= value <= INT64_MAX:
            raise Refusal(f"is {show(value)}; it does not fit 64 bits.")
        if kind is float and not math.isfinite(value):
            raise Refusal(f"is {value!r}, which JSON cannot hold; it must be finite.")
        if kind is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise Refusal(f"is {show(value)}, which is no Unicode text: it holds a lone surrogate.")
        return value

    return Codec(name, check, check)


def _choice(options: tuple[str, ...]) -> Codec:
    """One of some strings."""
    name = " or ".join(map(repr, options))

    def check(value: Any) -> Any:
        if type(value) is not str or value not in options:
            raise Refusal(f"is {show(value)}; it must be {name}.")
        return value

    return Codec(name, check, check)


def _union(members: tuple[Any, ...]) -> Codec:
    """One of several scalars, one of several dataclasses, or `None` and one other type."""
    if all(is_dataclass(member) for member in members):
        return _variant(members)
    others = {member: codec(member) for member in members if member is not type(None)}
    optional = len(others) < len(members)
    name = " or ".join(codec.name for codec in others.values()) + (" or null" if optional else "")
    alone = next(iter(others.values())) if len(others) == 1 else None
    if alone is None and not others.keys() <= _SCALARS.keys():
        raise TypeError(f"no JSON form is known for a union of {name}")

    def member_of(value: Any) -> Codec:
        found = others.get(type(value)) if alone is None else alone
        if found is None:
            raise Refusal(f"is {show(value)}; it must be {name}.")
        return found

    def write(value: Any) -> Any:
        return None if optional and value is None else member_of(value).write(value)

    def read(value: Any) -> Any:
        return None if optional and value is None else member_of(value).read(value)

    return Codec(name, write, read)


def _variant(members: tuple[Any, ...]) -> Codec:
    """One of several dataclasses, as an object whose one key is the name of the type."""
    kinds = {member.__name__: member for member in members}
    codecs = {name: codec(kind) for name, kind in kinds.items()}
    name = " or ".join(kinds)

    def write(value: Any) -> dict[str, Any]:
        kind = type(value).__name__
        if kinds.get(kind) is not type(value):
            raise Refusal(f"is {show(value)}; it must be of type {name}.")
        return {kind: codecs[kind].write(value)}

    def read(raw: Any) -> Any:
        if not isinstance(raw, dict) or len(raw) != 1 or not raw.keys() <= kinds.keys():
            raise Refusal(f"is {show(raw)}; it must be an object with one key, {name}.")
        ((kind, entry),) = raw.items()
        try:
            return codecs[kind].read(entry)
        except Refusal as refusal:
            refusal.path.append(f".{kind}")
            raise

    return Codec(name, write, read)


def _each(step: Callable[[Any], Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Entries converted by `step`; the index or key of a refused one is added to its path."""
    done: dict[Any, Any] = {}
    key: Any = None
    try:
        for key, value in items:
            done[key] = step(value)
    except Refusal as refusal:
        refusal.path.append(f"[{key!r}]")
        raise
    return done


def _sequence(inner: Codec, kind: Any) -> Codec:
    def write(values: Any) -> list[Any]:
        if not isinstance(values, kind) or isinstance(values, list | str):
            raise Refusal(f"is {show(values)}; it must be a tuple.")
        return list(_each(inner.write, enumerate(values)).values())

    def read(raw: Any) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise Refusal(f"is {show(raw)}; it must be a list.")
        return tuple(_each(inner.read, enumerate(raw)).values())

    return Codec("a list", write, read)


def _mapping(inner: Codec) -> Codec:
    def write(items: Any) -> dict[str, Any]:
        if not isinstance(items, Mapping) or not all(isinstance(key, str) for key in items):
            raise Refusal(f"is {show(items)}; it must be a mapping of strings.")
        return _each(inner.write, sorted(items.items()))

    def read(raw: Any) -> Mapping[str, Any]:
        if not isinstance(raw, dict):
            raise Refusal(f"is {show(raw)}; it must be an object.")
        return FrozenDict(_each(inner.read, raw.items()))

    return Codec("an object", write, read)


def _record(kind: type) -> Codec:
    """The codec of a dataclass: its fields in order, without those equal to their default."""
    hints = typing.get_type_hints(kind)
    saved = [field for field in fields(kind) if field.metadata.get("json", True)]
    codecs = {field.name: codec(hints[field.name]) for field in saved}
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in saved
    }

    def write(value: Any) -> dict[str, Any]:
        if type(value) is not kind:
            raise Refusal(f"is {show(value)}; it must be of type {kind.__name__}.")
        raw: dict[str, Any] = {}
        name = ""
        try:
            for name, codec in codecs.items():
                entry = getattr(value, name)
                if defaults[name] is MISSING or entry != defaults[name]:
                    raw[name] = codec.write(entry)
        except Refusal as refusal:
            refusal.path.append(f".{name}")
            raise
        return raw

    def read(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise Refusal(f"is {show(raw)}; it must be an object of type {kind.__name__}.")
        found: dict[str, Any] = {}
        name = ""
        try:
            for name, entry in raw.items():
                if name not in codecs:
                    known = ", ".join(codecs)
                    raise Refusal(f"is unknown; the fields of {kind.__name__} are {known}.")
                found[name] = codecs[name].read(entry)
            for name, default in defaults.items():
                if default is MISSING and name not in found:
                    raise Refusal(f"is missing; every {kind.__name__} has it.")
        except Refusal as refusal:
            # A wrong name may hold characters that cannot be written.
            refusal.path.append(f".{name}" if name.isidentifier() else f"[{name!r}]")
            raise
        try:
            return kind(**found)
        except InputError as error:
            raise Refusal(str(error), sentence=True) from error

    return Codec(kind.__name__, write, read)


def show(value: Any) -> str:
    """A wrong value as short text for an error, with its type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {dict: "an object", list: "a list", type(None): "null", **_SCALARS}
    name = kinds.get(type(value), f"a {type(value).__name__}")
    if value is None or isinstance(value, dict | list):
        return name
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'}, {name}"
