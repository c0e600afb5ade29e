"""What a setting is, and how the values that people write are read.

Each reader raises ValueError that says what is wanted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: how to read it and what it means."""

    key: str
    env: str
    parse: Callable[[object], Any]
    default: Callable[[Mapping[str, str], bool], Any]
    help: str


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A setting's value and where it was found."""

    value: Any
    origin: str


def to_text(value: object) -> str:
    """Return *value*, text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string is wanted")
    return value


def to_path(value: object) -> Path:
    """Return the path in *value*, its ``~`` expanded."""
    return Path(to_text(value)).expanduser()


def to_size(value: object) -> int:
    """Return the bytes in *value*, as in ``256MiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    size = parse_bytes(to_text(value))
    if size <= 0:
        raise ValueError("a size above zero is wanted")
    return size


def to_count(value: object) -> int | None:
    """Return *value*, a number from 0 to 1024."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1024:
        raise ValueError("a number from 0 to 1024 is wanted")
    return value


def to_bool(value: object) -> bool:
    """Return the truth of *value*: 1, 0, true, false."""
    words = {"1": True, "true": True, "0": False, "false": False, "": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in words:
        raise ValueError("1 or 0 is wanted")
    return words[value.lower()]


def to_positive(value: object) -> int:
    """Return *value*, a number from 1 to 1024."""
    count = to_count(value)
    if not count:
        raise ValueError("a number from 1 to 1024 is wanted")
    return count


def seconds_up_to(max_s: float) -> Callable[[object], float]:
    """Return a reader of seconds above zero, up to *max_s*."""

    def parse(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        else:
            seconds = parse_seconds(to_text(value))
        if not 0 < seconds <= max_s:
            raise ValueError(f"seconds above zero, up to {max_s:g}, are wanted")
        return seconds

    return parse
