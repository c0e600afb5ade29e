"""A check run as text: a table, a Nagios line, the list of suites."""

import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpuops.checks.core.check import CheckLimit
from gpuops.checks.core.runner import CheckRun
from gpuops.checks.core.suite import Suite
from gpuops.host.records import to_json
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Finding, Status, envelope
from gpuops.units import format_seconds

_WIDTH = 120
# With less, what is expected and its source move into the message, which gets more columns so.
_MESSAGE_MIN = 40
_NARROW_MESSAGE_MIN = 20
_LATE_MAX = 3
# The most columns that each cell but the last may have.
_COLUMN_WIDTHS_MAX = (7, 20, 18, 24, 24)
_HEAD = ("STATUS", "CHECK", "VALUE", "EXPECTED", "SOURCE", "MESSAGE")
_NAGIOS_WORD = {
    Status.PASS: "OK",
    Status.SKIP: "OK",
    Status.WARN: "WARNING",
    Status.FAIL: "CRITICAL",
    Status.UNKNOWN: "UNKNOWN",
}


def findings_table(check_run: CheckRun, *, width: int | None) -> str:
    """Return the findings as a table of *width* columns (80 or more), and the verdict below it.

    Checks with the same result share a row, and skipped ones a line for each reason. Failures are
    last, above the verdict.
    """
    judged = [finding for finding in check_run.findings if finding.status is not Status.SKIP]
    rows = [_HEAD, *_rows(sorted(judged, key=lambda finding: finding.status))]
    widths = _widths(rows, width or _WIDTH)
    if widths[-1] < _MESSAGE_MIN:
        rows = [_narrow(row) for row in rows]
        widths = _widths(rows, width or _WIDTH)
    passed = [row for row in rows if row[0] in (_HEAD[0], Status.PASS.word)]
    parts = [
        [line for row in passed for line in _wrapped(row, widths)],
        _skip_lines(check_run.findings, width or _WIDTH),
        [line for row in rows[len(passed) :] for line in _wrapped(row, widths)],
        [summary(check_run)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns of each cell; the message has what is left of *width*."""
    widths = [
        min(max(len(row[column]) for row in rows), most)
        for column, most in enumerate(_COLUMN_WIDTHS_MAX[: len(rows[0]) - 1])
    ]
    return [*widths, max(width - sum(widths) - 2 * len(widths), _NARROW_MESSAGE_MIN)]


def _narrow(row: Sequence[str]) -> Sequence[str]:
    """Return *row* without columns for what is expected and for its source."""
    status, check, value, expected, source, message = row
    if status != _HEAD[0] and expected != "-":
        message += (
            f" (expected {expected})" if source == "-" else f" (expected {expected}; {source})"
        )
    return status, check, value, message


def reason_lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each reason of a failure or an unknown, with all checks that have it."""
    checks: dict[tuple[str, str], dict[str, None]] = {}
    for finding in findings:
        if finding.status in {Status.FAIL, Status.UNKNOWN}:
            checks.setdefault((finding.status.word, finding.message), {})[finding.check] = None
    lines = []
    for (word, message), names in checks.items():
        first, *others = names
        more = f" (also {', '.join(others)})" if others else ""
        lines.append(f"{word} {first}: {message}{more}")
    return lines


def _rows(findings: Iterable[Finding]) -> list[Sequence[str]]:
    """Return a row for each finding; those that differ only in their check share one."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for finding in findings:
        status, check, *rest = _cells(finding)
        shared.setdefault((status, *rest), []).append(check)
    rows: list[Sequence[str]] = []
    for (status, *rest, message), checks in shared.items():
        more = f" (also {', '.join(checks[1:])})" if len(checks) > 1 else ""
        rows.append([status, checks[0], *rest, message + more])
    return rows


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
    return [
        "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]


def _skip_lines(findings: Iterable[Finding], width: int) -> list[str]:
    """Return one line for each reason to skip, with its checks."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status is Status.SKIP:
            text = printable(_entity_prefix(finding.entity) + finding.message).replace("\n", " ")
            reasons.setdefault(text, []).append(finding.check)
    lines = []
    for text, checks in reasons.items():
        named = ", ".join(dict.fromkeys(checks))
        lines += textwrap.wrap(
            f"{named}: {text}", width, initial_indent="skip  ", subsequent_indent="      "
        )
    return lines


def _cells(finding: Finding) -> Sequence[str]:
    value = (
        ""
        if finding.value is None
        else f"{_number_text(finding.value)} {finding.unit or ''}".strip()
    )
    cells = (
        finding.status.word,
        finding.check,
        value or "-",
        finding.threshold or "-",
        finding.source or "-",
        _entity_prefix(finding.entity) + finding.message,
    )
    return [printable(cell).replace("\n", " ") for cell in cells]


def _number_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _entity_prefix(entity: Entity) -> str:
    return "" if entity.kind is EntityKind.NODE else f"{entity.id}: "


def summary(check_run: CheckRun) -> str:
    """Return the verdict in one line: the worst finding, how many more, and who was late."""
    took = format_seconds((check_run.end_us - check_run.start_us) / 1e6)
    head = f"{check_run.node}: {check_run.verdict.word} (suite {check_run.suite}, {took})"
    why = _worst_finding_text(check_run)
    return printable(f"{head}{why and ': ' + why}{_late_text(check_run)}").replace("\n", " ")


def _worst_finding_text(check_run: CheckRun) -> str:
    worst = [finding for finding in check_run.findings if finding.status is check_run.verdict]
    if check_run.verdict <= Status.SKIP or not worst:
        return ""
    first = worst[0]
    more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
    return f"{first.check}: {_entity_prefix(first.entity)}{first.headline}{more}"


def _late_text(check_run: CheckRun) -> str:
    """Return the first checks that were late, and how many more: a hung driver delays twenty."""
    if not check_run.late:
        return ""
    more = f" and {len(check_run.late) - _LATE_MAX} more" if len(check_run.late) > _LATE_MAX else ""
    return f"; late: {', '.join(check_run.late[:_LATE_MAX])}{more}"


def nagios_line(check_run: CheckRun) -> str:
    """Return the line for Nagios; ``|`` would start its performance data."""
    text = _worst_finding_text(check_run) or f"{len(check_run.findings)} findings"
    line = f"GPUOPS {_NAGIOS_WORD[check_run.verdict]} - {text}{_late_text(check_run)}"
    return printable(line).replace("|", "/").replace("\n", " ")


def suite_list(suite: Suite, suites: Mapping[str, Path], *, as_json: bool) -> str:
    """Return all suites and, for *suite*, each check with its limits and their source."""
    if as_json:
        body = {
            "suites": [{"name": name, "path": str(path)} for name, path in suites.items()],
            "suite": suite.name,
            "checks": [
                {
                    "name": planned.check.name,
                    "about": planned.check.about,
                    "timeout_s": planned.timeout_s,
                    "parameters": to_json(planned.parameters),
                }
                for planned in suite.planned
            ],
        }
        return json.dumps(envelope("gpuops.check-list/1", body), indent=2)
    lines = [f"suites: {', '.join(suites)}", "", f"{suite.name}: {suite.about}"]
    for planned in suite.planned:
        lines.append(
            f"  {planned.check.name:<20} {planned.check.about} (up to {planned.timeout_s:g} s)"
        )
        lines.extend(f"  {'':<20}   {text}" for text in parameters(planned.parameters).values())
    return "\n".join(lines)


def parameters(record: object) -> Mapping[str, str]:
    """Return each parameter in *record* as text, by key: ``"width: warn at 8  [nvml]"``."""
    texts = {}
    for name in getattr(record, "__dataclass_fields__", ()):
        value = getattr(record, name)
        if value not in (None, (), {}):
            texts[name] = f"{name}: {_parameter(value)}"
    return texts


def _parameter(value: object) -> str:
    if isinstance(value, CheckLimit):
        given = (("warn", value.warn), ("fail", value.fail))
        limits = [f"{word} at {number:g}" for word, number in given if number is not None]
        return f"{', '.join(limits)}  [{value.source}]"
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_parameter(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)
