"""One spool line: an event under a checksum, numbered by its writer.

A line is one JSON object of ASCII characters that starts with ``{"crc":"xxxxxxxx",``; the CRC-32
(zlib) is over every byte after that prefix up to the newline, so that a damaged line is detected
before it is parsed. Lines are treated as hostile: size first, then checksum, then structure.
"""

import json
import math
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from gpuops.model import Event, Json
from gpuops.scrub import scrub_value

VERSION = 1
LINE_BYTES_MAX = 256 * 1024
DEPTH_MAX = 32
ORIGIN_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.[0-9a-f]{12}")
_T_US_MAX = 253_402_300_800_000_000  # the year 10000, where calendars in Python end
_SEQ_MAX = 2**53
_PREFIX = b'{"crc":"'
_BODY_AT = len(_PREFIX) + 8 + 2
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_KIND = re.compile(r"[a-z_]{1,32}(?:\.[a-z_]{1,32}){1,3}")
NAME_PATTERN = re.compile(r"[!-~]{1,255}")
RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHRINK_TO = ((8192, 512), (1024, 64), (128, 8))


class SpoolLineError(ValueError):
    """A line that no gpuops writer produces, with the reason."""


@dataclass(frozen=True, slots=True)
class SpoolLine:
    """One event with its writer's sequence number: unique by (origin, boot_id, seq)."""

    origin: str
    boot_id: str
    seq: int
    event: Event
    version: int = VERSION


class LineEncoder:
    """Numbers the events of one writer, from 1 without gaps; threads may share it."""

    def __init__(self, *, node: str, boot_id: str, randomness: Callable[[int], bytes]) -> None:
        safe = re.sub(r"[^A-Za-z0-9_-]", "-", node)[:64] or "node"
        self.origin = f"{safe.lstrip('-') or 'node'}.{randomness(6).hex()}"
        self.boot_id = boot_id
        self._seq = 0
        self._lock = threading.Lock()

    def encode(self, event: Event) -> bytes:
        """Return the line for *event*, with its newline, scrubbed and at most `LINE_BYTES_MAX`."""
        with self._lock:
            self._seq += 1
            seq = self._seq
        event = sanitize_event(event)
        line = encode_line(SpoolLine(self.origin, self.boot_id, seq, event))
        for text_max, list_max in _SHRINK_TO:
            if len(line) <= LINE_BYTES_MAX:
                break
            payload = cast("Json", _shorten(event.payload, text_max, list_max))
            small = replace(event, payload={**payload, "shortened": True})
            line = encode_line(SpoolLine(self.origin, self.boot_id, seq, small))
        if len(line) > LINE_BYTES_MAX:
            empty = replace(event, payload={"shortened": True})
            line = encode_line(SpoolLine(self.origin, self.boot_id, seq, empty))
        return line


def sanitize_event(event: Event) -> Event:
    """Return *event* with a payload that any store accepts: no secrets, plain JSON, valid text."""
    return replace(event, payload=cast("Json", _sanitize(scrub_value(event.payload))))


def _sanitize(value: object) -> object:
    match value:
        case str():
            # Postgres rejects NUL, and half of a surrogate pair is not valid in UTF-8.
            plain: object = value.replace("\0", "�").encode("utf-8", "replace").decode("utf-8")
        case bool() | None:
            plain = value
        case int():
            plain = int(value) if abs(value) < 2**63 else str(value)
        case float():
            plain = value if math.isfinite(value) else str(value)
        case Mapping():
            plain = {str(_sanitize(str(key))): _sanitize(item) for key, item in value.items()}
        case list() | tuple():
            plain = [_sanitize(item) for item in value]
        case _:
            plain = _sanitize(str(value))
    return plain


def _shorten(value: object, text_max: int, list_max: int) -> object:
    if isinstance(value, str) and len(value) > text_max:
        return value[:text_max] + "…"
    if isinstance(value, list):
        # The last lines of a log matter most.
        return [_shorten(item, text_max, list_max) for item in value[-list_max:]]
    if isinstance(value, dict):
        return {key: _shorten(item, text_max, list_max) for key, item in value.items()}
    return value


def canonical_json(value: object) -> str:
    """Return *value* as JSON with sorted keys and no spaces: equal values, equal text.

    Raises:
        ValueError: Not finite, or not JSON.
    """
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def encode_line(line: SpoolLine) -> bytes:
    """Return the bytes of *line*, with its checksum and its newline."""
    fields = {
        "v": line.version,
        "origin": line.origin,
        "boot_id": line.boot_id,
        "seq": line.seq,
        "event": line.event.to_json(),
    }
    body = canonical_json(fields).encode("ascii")[1:]
    return b'%s%08x",%s\n' % (_PREFIX, zlib.crc32(body), body)


def decode_line(raw: bytes) -> SpoolLine:
    """Return the line in *raw*, with or without its newline.

    Raises:
        SpoolLineError: Too long, damaged, or not a line of a version that this code reads.
    """
    if len(raw) > LINE_BYTES_MAX:
        raise SpoolLineError(f"longer than {LINE_BYTES_MAX} bytes")
    body = _verify_checksum(raw.rstrip(b"\n"))
    try:
        fields = json.loads(b"{" + body, parse_float=_finite_float, parse_constant=_reject_constant)
    except SpoolLineError:
        raise
    except (ValueError, RecursionError) as exc:
        raise SpoolLineError(f"not JSON ({exc.__class__.__name__})") from exc
    if not isinstance(fields, dict):
        raise SpoolLineError("not a JSON object")
    if _is_deeper_than(fields, DEPTH_MAX):
        raise SpoolLineError(f"nested deeper than {DEPTH_MAX}")
    if b"\\u" in body:
        _check_text(fields)
    return _parse_line(fields)


def _verify_checksum(raw: bytes) -> bytes:
    if not raw.startswith(_PREFIX) or raw[_BODY_AT - 2 : _BODY_AT] != b'",':
        raise SpoolLineError("no checksum at its start")
    body = raw[_BODY_AT:]
    if raw[len(_PREFIX) : _BODY_AT - 2] != b"%08x" % zlib.crc32(body):
        raise SpoolLineError("its checksum does not fit")
    return body


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise SpoolLineError(f"number {text[:20]} is out of range")
    return value


def _reject_constant(text: str) -> float:
    raise SpoolLineError(f"{text} is not JSON")


def _is_deeper_than(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        return levels == 0 or any(_is_deeper_than(item, levels - 1) for item in value.values())
    if isinstance(value, list):
        return levels == 0 or any(_is_deeper_than(item, levels - 1) for item in value)
    return False


def _check_text(fields: Json) -> None:
    try:
        data = json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise SpoolLineError("its text is not Unicode") from exc
    # A NUL that was text is "\u0000" in JSON; one after an even run of backslashes.
    if re.search(rb"(?<!\\)(?:\\\\)*\\u0000", data):
        raise SpoolLineError("its text holds a NUL")


def _parse_line(fields: Mapping[str, Any]) -> SpoolLine:
    version = _integer(fields, "v", 1, 1 << 16)
    if version > VERSION:  # an older one may wait in the spool while gpuops is upgraded
        raise SpoolLineError(f"line version {version}; this gpuops reads up to {VERSION}")
    raw_event = fields.get("event")
    if not isinstance(raw_event, dict):
        raise SpoolLineError("no event in it")
    _check_event(raw_event)
    try:
        event = Event.from_json(raw_event)
    except (KeyError, TypeError, ValueError) as exc:
        raise SpoolLineError(f"not an event: {exc}") from exc
    return SpoolLine(
        origin=_text(fields, "origin", ORIGIN_PATTERN),
        boot_id=_text(fields, "boot_id", NAME_PATTERN),
        seq=_integer(fields, "seq", 1, _SEQ_MAX),
        event=event,
        version=version,
    )


def _check_event(event: Mapping[str, Any]) -> None:
    _text(event, "id", _UUID)
    _text(event, "kind", _KIND)
    _text(event, "node", NAME_PATTERN)
    _integer(event, "t_us", 0, _T_US_MAX - 1)
    _integer(event, "severity", 0, 100)
    if event.get("run_id") is not None:
        _text(event, "run_id", RUN_ID_PATTERN)
    if event.get("attempt") is not None:
        _integer(event, "attempt", 0, 1_000_000)


def _text(fields: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise SpoolLineError(f"its {name} is not one")
    return value


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpoolLineError(f"its {name} is not a number from {low} to {high}")
    return value
