"""Messages between processes in JSON, bounded, read and written by the types of their fields.

A message is a frozen dataclass that derives from `Message`; the types of its fields say what is
read and written: numbers, texts, bytes (base64), enums, ``X | None``, ``tuple[X, ...]``, `Mapping`,
messages, and other dataclasses, which are lists of their values. A default value is not written.
`Limit` bounds what is read from another process; without one `NUMBER_MAX`, `CHARS_MAX` and
`ITEMS_MAX` hold. `read_arguments` reads what a function is called with, likewise.
"""

import inspect
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from gpuops.errors import GpuopsError

T = TypeVar("T")
Annotation = Any  # the type of a field, as `typing.get_type_hints` returns it
NUMBER_MAX = 2**62
CHARS_MAX = 4096
ITEMS_MAX = 1024
_SHOWN_CHARS = 60


class MessageFormatError(ValueError):
    """What another process wrote is not a message of this type."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds, inclusive, of a number, or of the length of a text, list or mapping.

    ``is_cut``: a text or list that is longer is cut when it is written.
    """

    high: float
    low: float = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Using:
    """How a type that writes and reads itself does so; both raise ValueError for what cannot be."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


# Marks a field that is read as its default where what was written cannot be read.
LENIENT = "lenient"


class Message:
    """A dataclass that derives from this is written as an object, by the names of its fields."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the message as JSON."""
        kind: Annotation = type(self)
        found: dict[str, Any] = _converter(kind).write(self)
        return found

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the message in *data*; raises MessageFormatError where it is none."""
        kind: Annotation = cls
        found: Self = _converter(kind).read(data)
        return found


def plain(value: object) -> Annotation:
    """Return *value* as JSON, by what it is; mappings and lists may hold anything."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        kind: Annotation = type(value)
        return _converter(kind).write(value)
    return value


def read(kind: type[T], data: object) -> T:
    """Return the value of *kind* in *data*; raises MessageFormatError where it is none."""
    annotation: Annotation = kind
    found: T = _converter(annotation).read(data)
    return found


def read_arguments(
    function: Callable[..., object], data: object, given: Mapping[str, object]
) -> dict[str, Any]:
    """Return what to call *function* with: of its parameters those *given*, the others of *data*.

    The types of the parameters say what is read, and what is left out has its default.

    Raises:
        MessageFormatError: A value is missing, or is not of its type.
    """
    names, read_others = _parameters(function, frozenset(given))
    return {name: given[name] for name in names} | read_others(data)


@cache
def _parameters(
    function: Callable[..., object], given: frozenset[str]
) -> tuple[list[str], Callable[[object], dict[str, Any]]]:
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters.values()
    others = {each.name: each.default for each in found if each.name not in given}
    defaults = {n: MISSING if d is inspect.Parameter.empty else d for n, d in others.items()}
    names = [each.name for each in found if each.name in given]
    return names, _object(dict, {name: hints[name] for name in others}, defaults).read


class _Converter(NamedTuple):
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@cache
def _converter(kind: Annotation, limit: Limit | None = None) -> _Converter:
    origin: object = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        using = next((mark for mark in args[1:] if isinstance(mark, Using)), None)
        if using is not None:
            return _Converter(using.write, lambda data: _built(using.read, data))
        return _converter(args[0], *(mark for mark in args[1:] if isinstance(mark, Limit)))
    if origin in (Union, UnionType):
        return _optional(_converter(next(arg for arg in args if arg is not NoneType), limit))
    if kind in (bool, int, float, str, bytes, dict) or origin is dict:
        is_number = kind in (bool, int, float)
        size = Limit(NUMBER_MAX, -NUMBER_MAX) if is_number else Limit(CHARS_MAX)
        return _limited(_scalar(origin or kind), limit or size)
    if origin is Mapping or args[-1:] == (...,):
        found = _mapping_of(*args) if origin is Mapping else _list_of(args[0])
        return _limited(found, limit or Limit(ITEMS_MAX))
    return _of_class(kind, args)


def _of_class(kind: Annotation, args: tuple[Annotation, ...]) -> _Converter:
    if args:
        return _row(args, lambda *values: values, lambda value: value)
    if issubclass(kind, Enum):
        return _Converter(lambda value: value.value, lambda data: _built(kind, data))
    types, own = get_type_hints(kind, include_extras=True), [f for f in fields(kind) if f.init]
    hints = {field.name: types[field.name] for field in own}
    if not issubclass(kind, Message):
        return _row(
            list(hints.values()),
            lambda *values: kind(**dict(zip(hints, values, strict=True))),
            lambda value: [getattr(value, name) for name in hints],
        )
    defaults = {f.name: _default_of(f) for f in own}
    return _object(kind, hints, defaults)


def _default_of(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _scalar(kind: Annotation) -> _Converter:
    if kind is bytes:
        return _Converter(
            lambda value: b64encode(value).decode(),
            lambda data: _built(lambda: b64decode(data, validate=True)),
        )

    def read(data: object) -> object:
        found = float(data) if kind is float and type(data) is int else data
        if type(found) is not kind or (isinstance(found, str) and "\0" in found):
            raise _unfit(data, f"not of type {kind.__name__}")
        return found

    return _Converter(lambda value: value, read)


def _optional(inner: _Converter) -> _Converter:
    return _Converter(
        lambda value: None if value is None else inner.write(value),
        lambda data: None if data is None else inner.read(data),
    )


def _limited(inner: _Converter, limit: Limit) -> _Converter:
    def write(value: Annotation) -> object:
        return inner.write(value[: int(limit.high)] if limit.is_cut else value)

    def read(data: object) -> object:
        size = len(data) if isinstance(data, str | list | dict) else data
        if isinstance(size, int | float) and not limit.low <= size <= limit.high:
            raise _unfit(data, f"not within {limit.low:.16g} and {limit.high:.16g}")
        return inner.read(data)

    return _Converter(write, read)


def _list_of(kind: Annotation) -> _Converter:
    inner = _converter(kind)
    return _Converter(
        lambda values: [inner.write(value) for value in values],
        lambda data: tuple(inner.read(item) for item in _checked(data, list)),
    )


def _row(
    kinds: Sequence[Any], build: Callable[..., Any], values_of: Callable[[Any], Iterable[Any]]
) -> _Converter:
    inner = [_converter(kind) for kind in kinds]

    def read(data: object) -> object:
        items = _checked(data, list)
        if len(items) != len(inner):
            raise _unfit(data, f"not {len(inner)} values")
        return _built(build, *(each.read(item) for each, item in zip(inner, items, strict=True)))

    def write(value: object) -> list[Any]:
        return [each.write(item) for each, item in zip(inner, values_of(value), strict=True)]

    return _Converter(write, read)


def _mapping_of(key_kind: Annotation, value_kind: Annotation) -> _Converter:
    keys, inner = _converter(key_kind), _converter(value_kind)

    def read(data: object) -> dict[Any, Any]:
        return {
            keys.read(_built(int, key) if key_kind is int else key): inner.read(value)
            for key, value in _checked(data, dict).items()
        }

    return _Converter(
        lambda found: {str(key): inner.write(value) for key, value in found.items()}, read
    )


def _object(
    build: Annotation, hints: Mapping[str, Annotation], defaults: Mapping[str, object]
) -> _Converter:
    inner = {name: _converter(hints[name]) for name in hints}
    lenient = {n for n in inner if LENIENT in getattr(hints[n], "__metadata__", ())}

    def write(value: object) -> dict[str, Any]:
        found = {name: getattr(value, name) for name in inner}
        return {n: inner[n].write(v) for n, v in found.items() if v != defaults[n]}

    def read(data: object) -> object:
        body, values = _checked(data, dict), {}
        for name, each in inner.items():
            if name not in body and defaults[name] is not MISSING:
                continue
            try:
                values[name] = each.read(body.get(name))
            except MessageFormatError as exc:
                if name not in lenient:
                    raise MessageFormatError(f"{name}: {exc}") from exc
        return _built(lambda: build(**values))

    return _Converter(write, read)


def _built(build: Callable[..., Any], *values: object) -> Annotation:
    try:
        return build(*values)
    except (TypeError, ValueError, GpuopsError) as exc:
        raise MessageFormatError(str(exc)[:200]) from exc


def _checked(data: object, kind: type[T]) -> T:
    if not isinstance(data, kind):
        raise _unfit(data, f"not of type {kind.__name__}")
    return data


def _unfit(data: object, why: str) -> MessageFormatError:
    shown = repr(data)
    return MessageFormatError(f"{shown[:_SHOWN_CHARS]}{'…' * (len(shown) > _SHOWN_CHARS)} is {why}")
