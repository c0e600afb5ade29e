"""Silences: findings that a person accepts until a date; in the site's ``silences.toml``.

A silence has an owner, a reason and an end; after its end it has no effect.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

from gpuops import hostlist
from gpuops.checks import NAMES
from gpuops.config.resolve import ErrorHandler, raise_error, read_toml, reject_unknown
from gpuops.errors import ConfigError
from gpuops.model import Finding, Status
from gpuops.units import US_PER_S, iso_utc

LONG_S = 90 * 86400.0
_KEYS = ("check", "node", "entity", "until", "owner", "reason")
_NEVER_SILENCED = (Status.PASS, Status.SKIP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Which findings are silenced, on which nodes, until when, by whom and why.

    ``check`` and ``entity`` are patterns with ``*`` and ``?``; ``node`` is one of
    `gpuops.hostlist.matches`. ``until_us`` is exclusive. ``where`` is its place in its file.
    """

    check: str
    node: str
    until_us: int
    owner: str
    reason: str
    where: str
    entity: str = "*"

    def covers(self, finding: Finding, *, node: str, now_us: int) -> bool:
        """Return whether *finding*, made on *node*, is silenced at *now_us*."""
        return (
            now_us < self.until_us
            and fnmatch.fnmatchcase(finding.check, self.check)
            and fnmatch.fnmatchcase(finding.entity.id, self.entity)
            and hostlist.matches(self.node, node)
        )


def apply_silences(
    findings: Iterable[Finding], silences: Sequence[Silence], *, node: str, now_us: int
) -> list[Finding]:
    """Return *findings*; those that a silence covers become `skip` and keep their message.

    A silenced finding has no failure class: nothing acts on it and it counts as no strike.
    """
    return [
        _silenced(item, silences, node=node, now_us=now_us)
        if item.status not in _NEVER_SILENCED
        else item
        for item in findings
    ]


def _silenced(finding: Finding, silences: Sequence[Silence], *, node: str, now_us: int) -> Finding:
    by = next((item for item in silences if item.covers(finding, node=node, now_us=now_us)), None)
    if by is None or finding.status in _NEVER_SILENCED:
        return finding
    message = (
        f"silenced until {_shown(by.until_us)} by {by.owner}: {by.reason}"
        f" (was {finding.status.word}: {finding.message})"
    )
    return replace(
        finding, status=Status.SKIP, message=message, failure_class=None, unknown_reason=None
    )


def load_silences(
    paths: Iterable[Path], on_error: ErrorHandler = raise_error
) -> tuple[Silence, ...]:
    """Return the silences in *paths*, in order, including expired ones.

    Raises:
        ConfigError: Malformed TOML, an unknown key, no owner, reason or end, or a bad pattern.
    """
    found = []
    for path in paths:
        try:
            table = read_toml(path)
        except ConfigError as exc:
            on_error(exc)
            continue
        reject_unknown(table, ("silence",), str(path), on_error)
        entries = table.get("silence", [])
        if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
            on_error(ConfigError(f"{path}: silences are written as [[silence]] tables"))
            continue
        for number, entry in enumerate(entries, 1):
            try:
                found.append(_parsed(entry, f"silence {number} of {path}"))
            except ConfigError as exc:
                on_error(exc)
    return tuple(found)


def expired(silence: Silence, now_us: int) -> list[str]:
    """Return the error about *silence* if it is over at *now_us*."""
    if silence.until_us > now_us:
        return []
    return [f"{_about(silence)} ended {_shown(silence.until_us)}: remove it, or renew it"]


def warnings(silence: Silence, now_us: int) -> list[str]:
    """Return the warnings about *silence* at *now_us*: its length, or an unknown check."""
    found = []
    if silence.until_us - now_us > LONG_S * US_PER_S:
        end = _shown(silence.until_us)
        found.append(f"{_about(silence)} lasts until {end}, more than {LONG_S / 86400:g} days")
    if not silence.check.startswith("site/") and not fnmatch.filter(NAMES, silence.check):
        close = difflib.get_close_matches(silence.check, NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        found.append(f"{silence.where}: no suite runs a check called {silence.check!r}{hint}")
    return found


def _about(silence: Silence) -> str:
    return f"{silence.where} ({silence.check} on {silence.node}, by {silence.owner})"


def _parsed(entry: Mapping[str, Any], where: str) -> Silence:
    reject_unknown(entry, _KEYS, where)
    node = _text(entry, "node", where)
    try:
        hostlist.matches(node, "")
    except ValueError as exc:
        raise ConfigError(f"node of {where}: {exc}") from exc
    return Silence(
        check=_text(entry, "check", where),
        node=node,
        until_us=_end_us(entry.get("until"), where),
        owner=_text(entry, "owner", where),
        reason=_text(entry, "reason", where),
        where=where,
        entity=_text({"entity": "*", **entry}, "entity", where),
    )


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} needs {key}, a text, got {value!r}")
    return value.strip()


def _end_us(value: object, where: str) -> int:
    """Return the moment after the day *value* in UTC, or *value* itself if it has a time."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigError(
                f"until of {where}: a time needs its offset, as in {value.isoformat()}Z"
            )
        if value.year < 1970:
            raise ConfigError(f"until of {where}: {value} is out of range")
        return int(value.timestamp()) * US_PER_S
    if isinstance(value, date):
        if value == date.max or value.year < 1970:
            raise ConfigError(f"until of {where}: {value} is out of range")
        end = datetime.combine(value + timedelta(days=1), time(), tzinfo=UTC)
        return int(end.timestamp()) * US_PER_S
    raise ConfigError(
        f"{where} needs until, a date (2026-03-02: to its end, in UTC) or a time with its offset"
        f" (2026-03-02T18:00:00+01:00), without quotes, got {value!r}"
    )


def _shown(time_us: int) -> str:
    return f"{iso_utc(time_us)[:16]}Z"
