"""What is found, compared with what a profile expects; units are checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from gpuops.checks.core.check import CheckLimit
from gpuops.checks.core.profile import NumberExpectation, WordsExpectation
from gpuops.errors import ConfigError
from gpuops.model import Entity, FailureClass, Finding, Status


@dataclass(frozen=True, slots=True)
class ValueBounds:
    """What a number can be at all, and how to say so."""

    unit: str
    low: float
    high: float
    whole: bool = True

    def check(self, value: object) -> float:
        """Return *value* where it is a number that can be meant.

        Raises:
            ValueError: No number, or one that looks like another unit.
        """
        number = _number(value, whole=self.whole)
        if number is None:
            wanted = "whole number" if self.whole else "number"
            raise ValueError(f"a {wanted} of {self.unit} is wanted, got {value!r}")
        if not self.low <= number <= self.high:
            raise ValueError(
                f"{number:g} looks like another unit: {self.unit} are wanted,"
                f" from {self.low:g} to {self.high:g}"
            )
        return number


def _number(value: object, *, whole: bool) -> float | None:
    kinds = int if whole else int | float
    return float(value) if isinstance(value, kinds) and not isinstance(value, bool) else None


# By the end of a limit's name, the first that fits; wider than anybody's opinion. More than 100 %
# of its life can be used of an NVMe drive (NVM Express Base Specification, "Percentage Used").
LIMITS: Mapping[str, ValueBounds] = MappingProxyType(
    {
        "used_percent": ValueBounds("percent", 0, 255, whole=False),
        "_percent": ValueBounds("percent", 0, 100, whole=False),
        "_s": ValueBounds("seconds", 0, 3600, whole=False),
        "_minutes": ValueBounds("minutes", 0, 100_000, whole=False),
        "_bytes": ValueBounds("bytes", 1e3, 1e15, whole=False),
        "_w": ValueBounds("watts", 0, 10_000, whole=False),
        "_c": ValueBounds("degrees Celsius", -100, 200, whole=False),
        "": ValueBounds("numbers", 0, 1e15, whole=False),
    }
)


def refuse_other_units(parameters: object, where: str) -> None:
    """Return quietly where each limit in *parameters* (a record) can be meant.

    Raises:
        ConfigError: One looks like another unit: it would fail every node, or none.
    """
    for name, limit in _limits(parameters):
        bounds = next(bounds for end, bounds in LIMITS.items() if name.endswith(end))
        for word, value in (("warn", limit.warn), ("fail", limit.fail)):
            try:
                if value is not None:
                    bounds.check(value)
            except ValueError as exc:
                raise ConfigError(f"{word} of {name} of {where}: {exc}") from exc


def _limits(parameters: object) -> Iterator[tuple[str, CheckLimit]]:
    for field in fields(parameters):  # type: ignore[arg-type]  # every record of parameters is one
        value = getattr(parameters, field.name)
        if isinstance(value, CheckLimit):
            yield field.name, value
        elif isinstance(value, Mapping):
            yield from (
                (field.name, item) for item in value.values() if isinstance(item, CheckLimit)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSubject:
    """What a finding is about: the check, the entity, and the unit of its number."""

    check: str
    entity: Entity
    failure_class: FailureClass
    unit: str | None = None


def in_gb(size: NumberExpectation | None) -> NumberExpectation | None:
    """Return an expectation in bytes as one in GB (1e9 bytes)."""
    return None if size is None else replace(size, value=size.value / 1e9)


def skipped(subject: ExpectedSubject, message: str, value: float | str | None = None) -> Finding:
    """Return the finding of a check that nobody told what to expect, or that has nothing to see."""
    return Finding(
        check=subject.check,
        entity=subject.entity,
        status=Status.SKIP,
        value=value,
        unit=None if value is None else subject.unit,
        message=message,
    )


def at_least(
    subject: ExpectedSubject, value: float, expected: NumberExpectation | None, message: str
) -> Finding:
    """Return a pass for *value* at or above *expected*, else a fail; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.FAIL if value < expected.value else Status.PASS
    return _held(subject, status, value, f">= {expected.value:g}", expected.source, message)


def exactly(
    subject: ExpectedSubject, value: float, expected: NumberExpectation | None, message: str
) -> Finding:
    """Return a fail for less than *expected* and a warning for more; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.PASS if value == expected.value else Status.WARN
    if value < expected.value:
        status = Status.FAIL
    return _held(subject, status, value, f"= {expected.value:g}", expected.source, message)


def one_of(
    subject: ExpectedSubject,
    value: str,
    expected: WordsExpectation | None,
    message: str,
    *,
    bad: Status,
) -> Finding:
    """Return a pass for a *value* among those *expected*, else *bad*; skip where none is told."""
    if expected is None:
        return skipped(subject, f"{message}; no profile tells what is expected", value)
    status = Status.PASS if value in expected.value else bad
    wanted = " or ".join(expected.value)
    return _held(subject, status, value, f"= {wanted}", expected.source, message)


def _held(
    subject: ExpectedSubject,
    status: Status,
    value: float | str,
    threshold: str,
    source: str,
    message: str,
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
