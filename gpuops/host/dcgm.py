"""NVIDIA DCGM's diagnostic: ``dcgmi diag -j`` and its output.

Its JSON has no published schema. Two layouts are known: DCGM 3 prints ``DCGM GPU Diagnostic``, a
result for each GPU (``gpu_id``) and warnings as text or as tables; DCGM 4 prints ``DCGM
Diagnostic``, a result for each entity (``entity_group``, ``entity_id``), a summary for each test
and warnings as tables. All entities and all warnings of both are read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import ask, find
from gpuops.model import UnknownReason

_MARGIN_S = 0.6
_OUTPUT_MAX = 2**23
_WARNINGS_MAX = 1000
_HEADS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmError:
    """One warning of one result, with its numbers in dcgm_errors.h; None: not reported."""

    text: str
    code: int | None = None
    category: int | None = None
    severity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmResult:
    """The result of one test for one entity: ``GPU 3``, or ``all`` for a summary.

    ``status`` is that of DCGM in lower case (``pass``, ``fail``, ``warn``, ``skip``).
    """

    category: str
    test: str
    entity: str
    status: str
    errors: tuple[DcgmError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmDiagnostic:
    """One run. ``installed``: dcgmi was found. ``error``: it could not run the tests at all.

    ``exit_code`` is the program's.
    """

    installed: bool
    version: str | None = None
    exit_code: int | None = None
    error: str | None = None
    results: tuple[DcgmResult, ...] = ()


def read_dcgm(root: Path, budget_s: float, level: str) -> DcgmDiagnostic:
    """Return the result of ``dcgmi diag -r`` *level*.

    Raises:
        ProbeError: It gave no answer in time (``timeout``) or printed no JSON (``crash``).
    """
    tool = find(root, "dcgmi")
    if tool is None:
        return DcgmDiagnostic(installed=False)
    argv: list[Path | str] = [tool, "diag", "-r", level, "-j"]
    answer = ask(argv, max(budget_s - _MARGIN_S, 0.1), bytes_max=_OUTPUT_MAX, left=abandoned())
    if answer.timed_out:
        raise ProbeError(f"dcgmi diag {answer.ending}", UnknownReason.TIMEOUT)
    found = parse_diag(answer.output)
    if found is None:
        why = f"dcgmi diag {answer.ending}: {answer.first_line()}"
        # Without nv-hostengine, or with an unknown driver, it prints plain text.
        return DcgmDiagnostic(installed=True, exit_code=answer.exit_code, error=why.rstrip(": "))
    version, error, results = found
    return DcgmDiagnostic(
        installed=True, version=version, exit_code=answer.exit_code, error=error, results=results
    )


Parsed = tuple[str | None, str | None, tuple[DcgmResult, ...]]


def parse_diag(text: str) -> Parsed | None:
    """Return version, error and all results of *text*, None if it is no JSON.

    Lines around the JSON (``Successfully ran diagnostic for group.``) are ignored.
    """
    document = _document(text)
    if document is None:
        return None
    body: Mapping[str, Any] = next(
        (document[head] for head in _HEADS if isinstance(document.get(head), dict)), document
    )
    metadata = document.get("metadata", body.get("metadata"))
    version = _text(body.get("version")) or (
        _text(metadata.get("version")) or _text(metadata.get("DCGM Version"))
        if isinstance(metadata, dict)
        else None
    )
    error = _text(body.get("runtime_error")) or _text(document.get("runtime_error"))
    return version, error, tuple(_results(body))


def _document(text: str) -> Mapping[str, Any] | None:
    start, end = text.find("{"), text.rfind("}")
    try:
        document = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _results(body: Mapping[str, Any]) -> Iterator[DcgmResult]:
    for category in _tables(body.get("test_categories")):
        for test in _tables(category.get("tests")):
            names = _text(category.get("category")) or "", _text(test.get("name")) or ""
            entries = list(_tables(test.get("results")))
            for entry in entries:
                yield _result(*names, entry, _entity(entry))
            summary = test.get("test_summary")
            if isinstance(summary, dict) and (_errors(summary) or not entries):
                yield _result(*names, summary, "all")


def _result(category: str, test: str, entry: Mapping[str, Any], entity: str) -> DcgmResult:
    return DcgmResult(
        category=category,
        test=test,
        entity=entity,
        status=(_text(entry.get("status")) or "").lower(),
        errors=_errors(entry),
    )


def _entity(entry: Mapping[str, Any]) -> str:
    if "entity_id" in entry:
        return f"{_text(entry.get('entity_group')) or 'entity'} {entry['entity_id']}"
    for key in ("gpu_id", "gpu_ids"):
        if key in entry:
            return f"GPU {entry[key]}"
    return "all"


def _errors(entry: Mapping[str, Any]) -> tuple[DcgmError, ...]:
    warnings = entry.get("warnings", ())
    if not isinstance(warnings, list):
        warnings = [warnings] if warnings else []
    found = []
    for warning in warnings[:_WARNINGS_MAX]:
        if isinstance(warning, dict):
            found.append(
                DcgmError(
                    text=_text(warning.get("warning")) or "",
                    code=_whole(warning.get("error_id")),
                    category=_whole(warning.get("error_category")),
                    severity=_whole(warning.get("error_severity")),
                )
            )
        else:
            found.append(DcgmError(text=str(warning)))
    return tuple(found)


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _whole(value: object) -> int | None:
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None
