"""Log rules: which line of which log means which failure class. Data, in ``checks/rules/*.toml``.

A rule is five TOML lines and an example; adding one needs no code. Patterns are searched in one
line of at most `LINE_MAX` characters, so that a hostile log line costs a bounded time.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuops.config import read_toml, reject_unknown
from gpuops.errors import ConfigError
from gpuops.model import FailureClass, Role, Side, Status

LINE_MAX = 4096
_KEYS = (
    "id",
    "pattern",
    "failure_class",
    "source",
    "role",
    "side",
    "status",
    "reference",
    "example",
    "counter_example",
)


class LogSource(StrEnum):
    """Whose log a rule reads."""

    KERNEL = "kernel"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One rule. ``status`` is what a check makes of a hit; ``reference`` says where it is from."""

    id: str
    pattern: re.Pattern[str]
    failure_class: FailureClass
    source: LogSource
    role: Role
    side: Side
    status: Status
    reference: str
    example: str
    counter_example: str | None = None

    def matches(self, line: str) -> bool:
        """Say whether *line* is what this rule is about."""
        return self.pattern.search(line[:LINE_MAX]) is not None


def load_rules(directories: Iterable[Path]) -> tuple[LogRule, ...]:
    """Return the rules of every ``*.toml`` in *directories*; a later one overrides by id.

    Raises:
        ConfigError: Malformed TOML, unknown key, bad pattern, unknown failure class, or an example
            that its own rule does not match.
    """
    rules: dict[str, LogRule] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.toml")):
            table = read_toml(path)
            reject_unknown(table, ("rule",), str(path))
            for entry in table.get("rule", []):
                rule = _parse(entry, path)
                rules[rule.id] = rule
    return tuple(rules.values())


def first_match(rules: Sequence[LogRule], line: str, source: LogSource) -> LogRule | None:
    """Return the first rule for *source* that matches *line*."""
    return next((r for r in rules if r.source is source and r.matches(line)), None)


def _parse(entry: dict[str, Any], path: Path) -> LogRule:
    where = f"rule {entry.get('id', '?')!r} in {path}"
    reject_unknown(entry, _KEYS, where)
    try:
        rule = LogRule(
            id=entry["id"],
            pattern=re.compile(entry["pattern"]),
            failure_class=FailureClass(entry["failure_class"]),
            source=LogSource(entry["source"]),
            role=Role(entry.get("role", "root")),
            side=Side(entry["side"]),
            status=Status.parse(entry.get("status", "warn")),
            reference=entry["reference"],
            example=entry["example"],
            counter_example=entry.get("counter_example"),
        )
    except KeyError as exc:
        raise ConfigError(f"{where}: missing or unknown {exc}") from exc
    except (ValueError, TypeError, re.error) as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    if not rule.matches(rule.example):
        raise ConfigError(f"{where}: its pattern does not match its own example {rule.example!r}")
    if rule.counter_example and rule.matches(rule.counter_example):
        raise ConfigError(f"{where}: its pattern matches its own counter_example")
    return rule
