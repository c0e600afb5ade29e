"""Suites: which checks to run, with which limits, within which time. Data, in ``checks/suites``.

A suite is named after its file; a later folder (the site's own) replaces a shipped suite of that
name. A suite ``inherits`` another's checks, lists in ``run`` those it keeps (patterns; ``!``
excludes), and may change their keys.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpuops.checks import NAMES, check_named, is_check
from gpuops.checks.core.check import AnyCheck, check_units
from gpuops.checks.core.profile import NumberExpectation
from gpuops.config.resolve import (
    ErrorHandler,
    raise_error,
    read_or_default,
    read_toml,
    reject_unknown,
)
from gpuops.errors import ConfigError, UsageError
from gpuops.host.records import from_json
from gpuops.model import Status, UnknownReason

DEADLINE_MAX_S = 3600.0
_SUITE_KEYS = ("about", "deadline_s", "unknown", "check", "inherits", "run")
_CHECK_KEYS = ("name", "timeout_s")
# A probe that could not run must not fail a node.
_POLICY_STATUSES = (Status.SKIP, Status.WARN, Status.UNKNOWN)


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check with its parameters and its timeout."""

    check: AnyCheck
    parameters: Any
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What to run. ``unknown``: the status of what could not be judged, by reason."""

    name: str
    about: str
    deadline_s: float
    unknown: Mapping[UnknownReason, Status]
    planned: tuple[PlannedCheck, ...]
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the checks, in order."""
        return tuple(planned.check.name for planned in self.planned)

    def only(self, names: Sequence[str]) -> "Suite":
        """Return this suite with only the checks in *names* (patterns); all of it if empty.

        Raises:
            UsageError: There is no such check, or this suite does not run it.
        """
        if not names:
            return self
        for name in names:
            if fnmatch.filter(self.names, name):
                continue
            if not is_check(name) and not fnmatch.filter(NAMES, name):
                raise UsageError(unknown_name("check", name, NAMES))
            raise UsageError(
                f"suite {self.name!r} does not run the check {name!r}"
                f" (it runs {', '.join(self.names)})"
            )
        kept = tuple(item for item in self.planned if _matches(item.check.name, names))
        return replace(self, planned=kept)

    def within(self, deadline_s: float | None) -> "Suite":
        """Return this suite with *deadline_s*, if given."""
        return self if deadline_s is None else replace(self, deadline_s=deadline_s)

    def expecting_gpus(self, expected: int | None, source: str) -> "Suite":
        """Return this suite with *expected* GPUs, if given."""
        if expected is None:
            return self
        planned = tuple(
            replace(item, parameters=replace(item.parameters, expected=expected, source=source))
            if item.check.name == "gpu_count"
            else item
            for item in self.planned
        )
        return replace(self, planned=planned)

    @property
    def gpus_expected(self) -> NumberExpectation | None:
        """Return how many GPUs a node must have, if the suite's `gpu_count` says so."""
        for item in self.planned:
            if item.check.name == "gpu_count" and item.parameters.expected is not None:
                return NumberExpectation(
                    value=item.parameters.expected, source=item.parameters.source
                )
        return None


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the message about an unknown name, with the closest one and the list of all."""
    known = sorted(valid)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"there is no {kind} {name!r}{hint} (there is: {', '.join(known)})"


def suite_paths(directories: Iterable[Path]) -> dict[str, Path]:
    """Return the file of each suite by name; the last folder wins."""
    found = {}
    for directory in directories:
        for path in sorted(directory.glob("*.toml")):
            found[path.stem] = path
    return found


def load_suite(
    name: str, directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> Suite:
    """Return the suite called *name*, without what was reported to *on_error*.

    Raises:
        UsageError: There is none of that name; lists those there are.
        ConfigError: Malformed TOML, an unknown key or check, a parameter of another type.
    """
    paths = suite_paths(directories)
    if name not in paths:
        raise UsageError(unknown_name("suite", name, paths))
    return parse_suite(name, _resolved(name, paths, ()), paths[name], on_error)


def _resolved(name: str, paths: Mapping[str, Path], chain: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the table of suite *name* with what it inherits; *chain* led to it."""
    table = read_toml(paths[name])
    where = f"the suite {paths[name]}"
    reject_unknown(table, _SUITE_KEYS, where)
    base = table.get("inherits")
    if base is None:
        if "run" in table:
            raise ConfigError(f"{where}: `run` selects inherited checks, and it has no `inherits`")
        return table
    if base in (*chain, name):
        raise ConfigError(f"{where} inherits itself: {' > '.join((*chain, name, str(base)))}")
    if base not in paths:
        raise ConfigError(f"{where}: {unknown_name('suite', str(base), paths)}")
    return _merged(table, _resolved(base, paths, (*chain, name)), where)


def _merged(own: Mapping[str, Any], base: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    changes = {str(entry.get("name")): entry for entry in _entries(own, where)}
    given = {str(entry.get("name")): entry for entry in _entries(base, where)}
    kept = _select(own.get("run", ["*"]), tuple(given), where)
    checks = [{**given[name], **changes.pop(name, {})} for name in kept]
    unknown = {**base.get("unknown", {}), **own.get("unknown", {})}
    return {**base, **own, "unknown": unknown, "check": [*checks, *changes.values()]}


def _select(patterns: object, names: Sequence[str], where: str) -> list[str]:
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise ConfigError(f"{where}: run is a list of names of checks, got {patterns!r}")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern.removeprefix("!")):
            raise ConfigError(f"{where}: {unknown_name('check', pattern, names)}")
    include = [pattern for pattern in patterns if not pattern.startswith("!")]
    exclude = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    return [name for name in names if _matches(name, include) and not _matches(name, exclude)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _entries(table: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    entries = table.get("check", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}: checks are written as [[check]] tables")
    return entries


def parse_suite(
    name: str, table: Mapping[str, Any], path: Path, on_error: ErrorHandler = raise_error
) -> Suite:
    """Return the suite in *table* (from *path*), without what was reported to *on_error*.

    Raises:
        ConfigError: See `load_suite`.
    """
    where = f"the suite {path}"
    reject_unknown(table, _SUITE_KEYS, where, on_error)
    none: list[Mapping[str, Any]] = []
    entries = read_or_default(lambda: _entries(table, where), on_error, none)
    if not table.get("check"):
        on_error(ConfigError(f"{where} runs no check, so that every node would pass"))
    planned = [
        read_or_default(partial(_plan_check, entry, where), on_error, None) for entry in entries
    ]
    names = [item.check.name for item in planned if item is not None]
    for doubled in sorted({item for item in names if names.count(item) > 1}):
        on_error(ConfigError(f"{where} runs the check {doubled!r} twice"))
    limit, policy = table.get("deadline_s"), table.get("unknown", {})
    return Suite(
        name=name,
        about=str(table.get("about", "")),
        deadline_s=read_or_default(
            lambda: _seconds(limit, f"deadline_s of {where}"), on_error, 0.0
        ),
        unknown=read_or_default(lambda: _parse_policy(policy, where), on_error, {}),
        planned=tuple(item for item in planned if item is not None),
        path=path,
    )


def _plan_check(entry: Mapping[str, Any], where: str) -> PlannedCheck:
    name = entry.get("name")
    if not is_check(name):
        raise ConfigError(f"{where}: {unknown_name('check', str(name), NAMES)}")
    check = check_named(name)
    where = f"check {name!r} in {where}"
    own = [field.name for field in fields(check.parameters)]
    reject_unknown(entry, (*_CHECK_KEYS, *own), where)
    table = {key: value for key, value in entry.items() if key in own}
    try:
        parameters = from_json(check.parameters, table, where)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    check_units(parameters, where)
    return PlannedCheck(
        check, parameters, _seconds(entry.get("timeout_s"), f"timeout_s of {where}")
    )


def _seconds(value: object, what: str) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value <= DEADLINE_MAX_S
    ):
        raise ConfigError(f"{what} must be seconds up to {DEADLINE_MAX_S:g}, got {value!r}")
    return float(value)


def _parse_policy(table: object, where: str) -> Mapping[UnknownReason, Status]:
    reasons = [reason.value for reason in UnknownReason]
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: unknown is a table of reasons, got {table!r}")
    reject_unknown(table, reasons, f"the table `unknown` of {where}")
    policy = {}
    for reason, word in table.items():
        words = [status.word for status in _POLICY_STATUSES]
        if word not in words:
            raise ConfigError(
                f"{where}: unknown.{reason} must be one of {', '.join(words)}, got {word!r}"
            )
        policy[UnknownReason(reason)] = Status.parse(word)
    return MappingProxyType(policy)
