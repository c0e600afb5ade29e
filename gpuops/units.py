"""Quantities with units: parse what people write, format what people read.

GB is 1e9 bytes, GiB is 2**30. Durations are seconds inside, timestamps are microseconds since
the epoch in UTC (``_us``), as the store keeps them.
"""

import re
from datetime import UTC, datetime, timedelta

US_PER_S = 1_000_000
NS_PER_S = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ONE_US = timedelta(microseconds=1)

_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes in ``"256MiB"``, ``"4 GB"`` or ``"1000"``.

    Raises:
        ValueError: Not a number with a known unit.
    """
    number, unit = _split(text)
    factor = _BYTES.get(unit.upper() or "B")
    if factor is None:
        raise ValueError(f"{text!r} is not a size; units are {', '.join(_BYTES)}")
    return int(float(number) * factor)


def parse_seconds(text: str) -> float:
    """Return the seconds in ``"8s"``, ``"1.5h"``, ``"250ms"`` or ``"30"``.

    Raises:
        ValueError: Not a number with a known unit.
    """
    number, unit = _split(text)
    factor = _SECONDS.get(unit or "s")
    if factor is None:
        raise ValueError(f"{text!r} is not a duration; units are {', '.join(_SECONDS)}")
    return float(number) * factor


def _split(text: str) -> tuple[str, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return match[1], match[2]


def format_bytes(size_bytes: float) -> str:
    """Return ``"1.5 GB"`` for 1.5e9 (decimal units)."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_seconds(duration_s: float) -> str:
    """Return ``"0.43 s"``, ``"12.0 s"``, ``"3 min 20 s"`` or ``"2 h 05 min"``."""
    if abs(duration_s) < 10:
        return f"{duration_s:.2f} s"
    if abs(duration_s) < 120:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    if minutes < 120:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_step(step_s: float) -> str:
    """Return the time of a step with three digits: ``"0.415 s"``; of ten seconds on as others."""
    return f"{step_s:.3g} s" if step_s < 10 else format_seconds(step_s)


def iso_utc(time_us: int) -> str:
    """Return ISO 8601 in UTC with microseconds, ``"2026-03-02T09:14:00.123456Z"``."""
    moment = datetime.fromtimestamp(time_us // US_PER_S, tz=UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_us % US_PER_S:06d}Z"


def parse_iso_utc(text: str) -> int:
    """Return epoch microseconds of an ISO 8601 time; a time without an offset is UTC.

    Raises:
        ValueError: Not an ISO 8601 time.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _ONE_US
