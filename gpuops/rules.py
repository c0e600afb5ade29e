"""Log rules: which line of which log means which failure class. Data, in ``checks/rules/*.toml``.

A rule is five TOML lines and an example; adding one needs no code. A pattern for a worker's log is
searched in the line. One for the kernel's log is matched from the beginning of the message, because
the kernel quotes what users choose, such as mount options and names of processes: a message that
begins with a name is left to the rules whose example does too, and an Xid is matched without the
name.

At most `LINE_MAX` characters of a line are read. A pattern that repeats a repetition is refused,
because its time doubles with every character of a hostile line. What a pattern may still cost is a
power of the line's length, by the repetitions that follow each other in it; alternatives that begin
alike under one repetition are not found out.

A line is searched only if it holds a text that the pattern cannot match without: most lines of a
log are told apart by that alone, so that a storm of them is read in time.
"""

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.config.resolve import (
    ErrorHandler,
    raise_error,
    read_or_default,
    read_toml,
    reject_unknown,
)
from gpuops.errors import ConfigError
from gpuops.host.kmsg import begins_with_name, message_of, quotes_user
from gpuops.host.xid import without_name
from gpuops.model import FailureClass, Role, Side, Status

LINE_MAX = 4096
_REPEATED_MAX = 10
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
    "within_s",
    "cleared_by",
    "check",
    "hardware_reported",
)
KERNEL_LOG = "kernel_log"
_ANY_TEXT = re.compile(r"[\^(?:]*\.(?:[*+]|\{\d*,(?:\d{2,})?\})")


class LogSource(StrEnum):
    """Whose log a rule reads."""

    KERNEL = "kernel"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One rule. ``status`` is what a check makes of a hit; ``reference`` says where it is from.

    ``within_s``: a hit that is older only warns. ``cleared_by``: a later line that takes back the
    hits about its ``subject``, or all of the rule's where it names none. Both are for a log in
    which a repair leaves the old lines: the kernel's. ``check``: the check that judges such lines
    of the kernel's log; others than `KERNEL_LOG` judge them by more than a rule can say.
    ``hardware_reported``: see `gpuops.model.Finding`; a rule is not, unless it says so.
    ``literals``: a line that holds none of them is not matched; empty: not known.
    ``about_process``: for messages of the kernel that begin with a process' name.
    """

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
    within_s: float | None = None
    cleared_by: re.Pattern[str] | None = None
    check: str = KERNEL_LOG
    hardware_reported: bool = False
    literals: tuple[str, ...] = ()
    about_process: bool = False

    def may_match(self, text: str) -> bool:
        """Say whether any line of *text* could be what this rule is about; False is sure."""
        return not self.literals or any(literal in text for literal in self.literals)

    def search(self, line: str) -> re.Match[str] | None:
        """Return where *line*, at most `LINE_MAX` characters of it, is what this rule is about."""
        if not self.may_match(line):
            return None
        if self.source is not LogSource.KERNEL:
            return self.pattern.search(line[:LINE_MAX])
        message = message_of(line[:LINE_MAX])
        if quotes_user(message) or begins_with_name(message) != self.about_process:
            return None
        text = without_name(message)
        return None if text is None else self.pattern.match(text)

    def matches(self, line: str) -> bool:
        """Say whether *line* is what this rule is about."""
        return self.search(line) is not None


def load_rules(
    directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> tuple[LogRule, ...]:
    """Return the rules of every ``*.toml`` in *directories*; a later one overrides by id.

    Raises:
        ConfigError: Malformed TOML, unknown key, bad or explosive pattern, unknown failure class,
            or an example that its own rule does not match.
    """
    rules: dict[str, LogRule] = {}
    for directory in directories:
        for path in sorted(directory.glob("*.toml")):
            no_entries: list[dict[str, Any]] = []
            for entry in read_or_default(partial(_entries, path, on_error), on_error, no_entries):
                rule = read_or_default(partial(_parse, entry, path), on_error, None)
                if rule is not None:
                    rules[rule.id] = rule
    return tuple(rules.values())


def _entries(path: Path, on_error: ErrorHandler) -> list[dict[str, Any]]:
    table = read_toml(path)
    reject_unknown(table, ("rule",), str(path), on_error)
    entries = table.get("rule", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: rules are written as [[rule]] tables")
    return entries


def first_match(rules: Sequence[LogRule], line: str, source: LogSource) -> LogRule | None:
    """Return the first rule for *source* that matches *line*."""
    return next((r for r in rules if r.source is source and r.matches(line)), None)


def _parse(entry: dict[str, Any], path: Path) -> LogRule:
    where = f"rule {entry.get('id', '?')!r} in {path}"
    reject_unknown(entry, _KEYS, where)
    try:
        pattern = safe_pattern(entry["pattern"])
        rule = LogRule(
            id=entry["id"],
            pattern=pattern,
            failure_class=FailureClass(entry["failure_class"]),
            source=LogSource(entry["source"]),
            role=Role(entry.get("role", "root")),
            side=Side(entry["side"]),
            status=Status.parse(entry.get("status", "warn")),
            reference=entry["reference"],
            example=entry["example"],
            counter_example=entry.get("counter_example"),
            within_s=_seconds(entry.get("within_s")),
            cleared_by=safe_pattern(entry["cleared_by"]) if "cleared_by" in entry else None,
            check=str(entry.get("check", KERNEL_LOG)),
            hardware_reported=entry.get("hardware_reported", False) is True,
            literals=required_literals(pattern),
            about_process=begins_with_name(message_of(str(entry["example"]))),
        )
    except KeyError as exc:
        raise ConfigError(f"{where}: missing or unknown {exc}") from exc
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    if not rule.matches(rule.example):
        how = "" if rule.source is not LogSource.KERNEL else ", from the message's beginning on"
        raise ConfigError(
            f"{where}: its pattern does not match its own example {rule.example!r}{how}"
        )
    _check_beginning(rule, where)
    if rule.counter_example and rule.matches(rule.counter_example):
        raise ConfigError(f"{where}: its pattern matches its own counter_example")
    _check_clearing(rule, where)
    return rule


def _check_beginning(rule: LogRule, where: str) -> None:
    of_kernel = rule.source is LogSource.KERNEL and not rule.about_process
    if of_kernel and _ANY_TEXT.match(rule.pattern.pattern):
        raise ConfigError(
            f"{where}: its pattern begins with any text, which a user can choose; begin it with the"
            " words of the kernel's message"
        )


def _check_clearing(rule: LogRule, where: str) -> None:
    if rule.source is not LogSource.KERNEL and (rule.within_s or rule.cleared_by):
        raise ConfigError(f"{where}: within_s and cleared_by are for rules of the kernel's log")
    if rule.cleared_by is not None and rule.cleared_by.match(rule.example):
        raise ConfigError(f"{where}: its cleared_by matches its own example")


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < float("inf")
    ):
        raise ValueError(f"within_s must be seconds above zero, got {value!r}")
    return float(value)


def safe_pattern(text: str) -> re.Pattern[str]:
    """Return *text* compiled.

    Raises:
        ValueError: Not a pattern of Python's re, or one that can take minutes over one line.
    """
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError) as exc:
        raise ValueError(f"the pattern {text!r} cannot be read: {exc}") from exc
    if _has_nested_repeat(text):
        raise ValueError(f"the pattern {text!r} repeats a repetition; bound one of the two")
    return pattern


def _has_nested_repeat(text: str) -> bool:
    """Say whether *text* holds a repetition of a repetition, each of more than a few times."""
    return _find_nested_repeat(_tree(text), inside=False)


def _tree(text: str) -> Any:  # noqa: ANN401 a private type of Python's
    """Return what Python's own parser makes of *text*; it is private, and may not be there."""
    try:
        return importlib.import_module("re._parser").parse(text)
    except (ImportError, AttributeError):
        return []


def required_literals(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Return texts of which every match of *pattern* holds at least one; none where none is known.

    Of several such sets the one whose shortest text is the longest.
    """
    if pattern.flags & (re.IGNORECASE | re.VERBOSE):
        return ()
    return _required(_tree(pattern.pattern))


def _required(tree: Iterable[tuple[Any, Any]]) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = [()]
    run = ""
    for operator, argument in tree:
        if str(operator) == "LITERAL":
            run += chr(argument)
            continue
        found += [(run,), _required_of(str(operator), argument)]
        run = ""
    found.append((run,))
    return max(found, key=lambda texts: min((len(text) for text in texts), default=0))


def _required_of(operator: str, argument: Any) -> tuple[str, ...]:  # noqa: ANN401 as the parser's
    match operator:
        case "SUBPATTERN":
            _group, added, _removed, body = argument
            return () if added & re.IGNORECASE else _required(body)
        case "BRANCH":
            each = [_required(branch) for branch in argument[1]]
            return tuple(text for texts in each for text in texts) if all(each) else ()
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT" if argument[0] > 0:
            return _required(argument[2])
        case "ATOMIC_GROUP":
            return _required(argument)
        case _:
            return ()


def _find_nested_repeat(node: object, *, inside: bool) -> bool:
    """Walk a parse tree of operators with their arguments, in lists and tuples of any depth."""
    if not isinstance(node, list | tuple) and not hasattr(node, "data"):
        return False
    parts = list(getattr(node, "data", node))  # type: ignore[call-overload]  # one of the three
    repeats = len(parts) == 2 and str(parts[0]) in {"MAX_REPEAT", "MIN_REPEAT"}
    if not repeats:
        return any(_find_nested_repeat(part, inside=inside) for part in parts)
    least, most, body = parts[1]
    many = int(most) > _REPEATED_MAX
    if many and inside and least != most:
        return True
    return _find_nested_repeat(body, inside=inside or many)
