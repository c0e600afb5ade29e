"""What is there, held against what a profile expects."""

from dataclasses import dataclass, replace

from gpuops.checks.profile import Number, Words
from gpuops.model import Entity, FailureClass, Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a finding is about: the check, the entity, and the unit of its number."""

    check: str
    entity: Entity
    failure_class: FailureClass
    unit: str | None = None


def in_gb(size: Number | None) -> Number | None:
    """Return an expectation in bytes as one in GB (1e9 bytes)."""
    return None if size is None else replace(size, value=size.value / 1e9)


def skipped(subject: Subject, message: str, value: float | str | None = None) -> Finding:
    """Return the finding of a check that nobody told what to expect, or that has nothing to see."""
    return Finding(
        check=subject.check,
        entity=subject.entity,
        status=Status.SKIP,
        value=value,
        unit=None if value is None else subject.unit,
        message=message,
    )


def at_least(subject: Subject, value: float, expected: Number | None, message: str) -> Finding:
    """Return a pass for *value* at or above *expected*, else a fail; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.FAIL if value < expected.value else Status.PASS
    return _held(subject, status, value, f">= {expected.value:g}", expected.source, message)


def exactly(subject: Subject, value: float, expected: Number | None, message: str) -> Finding:
    """Return a fail for less than *expected* and a warning for more; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.PASS if value == expected.value else Status.WARN
    if value < expected.value:
        status = Status.FAIL
    return _held(subject, status, value, f"= {expected.value:g}", expected.source, message)


def one_of(
    subject: Subject, value: str, expected: Words | None, message: str, *, bad: Status
) -> Finding:
    """Return a pass for a *value* among those *expected*, else *bad*; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.PASS if value in expected.value else bad
    wanted = " or ".join(expected.value)
    return _held(subject, status, value, f"= {wanted}", expected.source, message)


def _held(
    subject: Subject, status: Status, value: float | str, threshold: str, source: str, message: str
) -> Finding:
    return Finding(
        check=subject.check,
        entity=subject.entity,
        status=status,
        value=value,
        unit=subject.unit,
        threshold=threshold,
        source=source,
        message=message,
        failure_class=None if status is Status.PASS else subject.failure_class,
    )
