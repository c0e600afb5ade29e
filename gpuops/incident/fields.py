"""Parse values that another process wrote: bounded text, names, integers, seconds.

All raise `TypeError` or `ValueError` for other values; text that is too long is truncated.
"""

from collections.abc import Mapping
from math import isfinite

NAME_CHARS_MAX = 400  # of a node, a GPU, a rule, a signature
REASON_CHARS_MAX = 600
NODES_MAX = 8192
NUMBER_MAX = 2**63 - 1  # a database's widest integer


def text(value: object, chars_max: int = NAME_CHARS_MAX) -> str | None:
    """Return *value* as text of at most *chars_max* characters; None stays None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    return None if value is None else value[:chars_max]


def name(value: object) -> str:
    """Return *value* as a name that is not empty."""
    found = text(value)
    if not found:
        raise ValueError("a name is missing")
    return found


def number(value: object) -> int | None:
    """Return *value* as a whole number that a database can hold; None stays None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > NUMBER_MAX:
        raise TypeError(f"{str(value)[:40]!r} is not a whole number")
    return value


def required_number(value: object) -> int:
    """Return *value* as a whole number; None is an error."""
    found = number(value)
    if found is None:
        raise ValueError("a whole number is missing")
    return found


def seconds(value: object) -> float:
    """Return *value* as finite seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise TypeError(f"{str(value)[:40]!r} is not a number of seconds")
    return float(value)


def names(values: object, limit: int = NODES_MAX) -> tuple[str, ...]:
    """Return the first *limit* of *values* as names."""
    if not isinstance(values, list | tuple):
        raise TypeError("expected a list of names")
    return tuple(name(value) for value in values[:limit])


def reasons(values: object) -> dict[str, str]:
    """Return *values* as reasons by node."""
    if not isinstance(values, Mapping):
        raise TypeError("expected reasons by node")
    pairs = list(values.items())[:NODES_MAX]
    return {name(key): text(value, REASON_CHARS_MAX) or "" for key, value in pairs}
