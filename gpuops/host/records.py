"""Convert frozen dataclasses (facts, parameters) to JSON, and back with every type checked.

Facts are passed from a probe's child to its parent as JSON, never as pickles, and can be stored to
replay a verdict. The same reader parses a check's parameters from TOML.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gpuops.config.resolve import reject_unknown

T = TypeVar("T")


def to_json(record: object) -> Any:  # noqa: ANN401 JSON is what json.dumps takes
    """Return *record* (dataclasses, tuples, frozensets, mappings, scalars) as JSON values."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, frozenset):
        return sorted(to_json(item) for item in record)
    if isinstance(record, tuple | list):
        return [to_json(item) for item in record]
    if isinstance(record, Mapping):
        return {str(key): to_json(item) for key, item in record.items()}
    return record


def from_json(kind: type[T], data: object, where: str) -> T:
    """Return the dataclass *kind* that *data* describes.

    Args:
        kind: A dataclass of scalars, ``X | None``, ``tuple[X, ...]``, ``frozenset[X]``,
            ``Mapping[str, X]`` and dataclasses.
        data: From `to_json`, ``json`` or ``tomllib``.
        where: Names the place in error messages.

    Raises:
        ConfigError: A key that *kind* does not have; lists the valid ones.
        ValueError: A key is missing or its value has another type.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be a table, got {data!r}")  # noqa: TRY004 one error kind
    fields, hints = _shape(kind)  # type: ignore[arg-type]  # every class is hashable
    reject_unknown(data, fields, where)
    values = {}
    for name, spec in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{name} of {where}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {name!r}")
    return kind(**values)


@functools.cache
def _shape(kind: type) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """Return the fields of *kind* and their types; a snapshot holds hundreds of the same kind."""
    return {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)


def _value(hint: Any, data: Any, where: str) -> Any:  # noqa: ANN401 typed by its hint
    origin = get_origin(hint)
    if origin in {types.UnionType, Union}:
        if data is None:
            return None
        (inner,) = (item for item in get_args(hint) if item is not type(None))
        return _value(inner, data, where)
    if origin in {tuple, frozenset}:
        if not isinstance(data, list | tuple):
            raise ValueError(f"{where} must be a list, got {data!r}")
        return origin(_value(get_args(hint)[0], item, where) for item in data)
    if origin is Mapping:
        if not isinstance(data, Mapping):
            raise ValueError(f"{where} must be a table, got {data!r}")
        inner = get_args(hint)[1]
        return {str(key): _value(inner, item, f"{key} of {where}") for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(hint, data, where)  # type: ignore[arg-type]  # mypy takes it for an instance
    return _scalar(hint, data, where)


def _scalar(hint: Any, data: Any, where: str) -> Any:  # noqa: ANN401 typed by its hint
    if hint in {int, float} and isinstance(data, int | float) and not isinstance(data, bool):
        _check_range(data, where)
        data = hint(data) if isinstance(data, int) else data
    if not isinstance(data, hint) or (isinstance(data, bool) and hint is not bool):
        if isinstance(data, str) and issubclass(hint, str):
            return hint(data)
        raise ValueError(f"{where} must be {_WORDS.get(hint, hint.__name__)}, got {data!r}")
    return data


def _check_range(data: float, where: str) -> None:
    # NaN compares false with every limit, so it would pass every check.
    if isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"{where} must be a finite number, got {data!r}")
    if isinstance(data, int) and abs(data) >= 2**64:
        raise ValueError(f"{where} must be a number of at most 64 bits")


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
