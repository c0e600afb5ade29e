"""What a check is: a look that gives facts, a judge that holds them against parameters.

Checks that name the same `Look` share one child and its facts. A judge reads no clock, no file
and no environment, so a verdict can be repeated from recorded facts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, Profile, WordsExpectation
from gpuops.errors import ConfigError
from gpuops.host.node_state import Counters, DriverHang, Repair, Strikes
from gpuops.model import Entity, FailureClass, Finding, Status

F = TypeVar("F")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """Where looks look: the root of the file system, the folders of log rules and of Xids.

    ``asked``: what the checks of this look want to know about (`Check.asks`). ``node``: its name;
    ``site_checks``: the folder of the site's executables.
    """

    root: Path = Path("/")
    rule_dirs: tuple[Path, ...] = ()
    asked: tuple[str, ...] = ()
    node: str = ""
    site_checks: Path | None = None
    xid_dirs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """What a judge knows besides the facts and its limits.

    ``gpus``: the GPUs that are asked about, each by UUID, index, PCI address or Slurm's number
    (`gpuops.checks.gpu.gpus.selected`); None: all.
    ``hangs``: calls into the GPU driver that gave no answer, of this boot, since it last answered.
    ``persistence``: of the GPUs, when NVML last answered. ``repairs``: of this node, as
    acknowledged; ``strikes``: of this node and its parts. ``boot_us``: when this node booted, by
    the wall clock.
    """

    node: Entity
    profile: Profile = NO_PROFILE
    counters: Counters = field(default_factory=Counters)
    gpus: frozenset[str] | None = None
    hangs: tuple[DriverHang, ...] = ()
    persistence: bool | None = None
    repairs: tuple[Repair, ...] = ()
    strikes: tuple[Strikes, ...] = ()
    boot_us: int = 0


@dataclass(frozen=True, slots=True)
class Probe(Generic[F]):
    """A reader of facts; it runs in its own child.

    ``read`` gets the machine and the seconds it has; it raises ProbeError where the machine cannot
    be read. ``facts`` is the dataclass that it returns. ``locks`` names what it must have for
    itself: looks that share one run one after another. ``sources`` are the files, calls and
    commands that it reads, for people.
    """

    name: str
    facts: type[F]
    read: Callable[[ProbeContext, float], F]
    locks: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()


def _no_counters(_facts: object) -> Mapping[str, float]:
    return {}


def _asks_nothing(_parameters: object, _profile: Profile) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Check(Generic[F, P]):
    """One check. ``parameters`` is the dataclass that a suite's table becomes.

    ``passing``: what it fails for may pass by itself within a second; a hook looks twice.
    ``counters`` returns the values that the next run's judge will want to compare with, by name;
    ``asks`` what the look must be told: names of units, paths. The names of counters are
    ``CHECK:ENTITY:COUNTER``.
    """

    name: str
    about: str
    look: Probe[F]
    parameters: type[P]
    judge: Callable[[F, P, JudgeContext], list[Finding]]
    counters: Callable[[F], Mapping[str, float]] = _no_counters
    asks: Callable[[P, Profile], tuple[str, ...]] = _asks_nothing
    passing: bool = False


AnyCheck = Check[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimit:
    """Where a number starts to warn or to fail, and where those limits are from.

    Values at the limit are beyond it. A limit that is not given is not applied: a number that is
    only somebody's opinion should warn.
    """

    source: str
    warn: float | None = None
    fail: float | None = None

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ConfigError("a limit must name the source of its numbers")
        if self.warn is None and self.fail is None:
            raise ConfigError(f"the limit from {self.source!r} has neither warn nor fail")

    def floor(self, value: float) -> Status:
        """Return the verdict on *value* where more is better."""
        return self._verdict(lambda limit: value <= limit)

    def ceiling(self, value: float) -> Status:
        """Return the verdict on *value* where less is better."""
        return self._verdict(lambda limit: value >= limit)

    def _verdict(self, beyond: Callable[[float], bool]) -> Status:
        if self.fail is not None and beyond(self.fail):
            return Status.FAIL
        if self.warn is not None and beyond(self.warn):
            return Status.WARN
        return Status.PASS

    def text(self, sign: str, unit: str = "") -> str:
        """Return what is wanted, ``"> 5 % (fail: 0 %)"`` for *sign* ``">"`` and *unit* ``"%"``."""
        unit = f" {unit}" if unit else ""
        if self.warn is None:
            return f"{sign} {self.fail:g}{unit}"
        fail = "" if self.fail is None else f" (fail: {self.fail:g}{unit})"
        return f"{sign} {self.warn:g}{unit}{fail}"


@dataclass(frozen=True, slots=True)
class NoParameters:
    """Of a check that a suite cannot tune."""


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
    for each in fields(parameters):  # type: ignore[arg-type]  # every record of parameters is one
        value = getattr(parameters, each.name)
        if isinstance(value, CheckLimit):
            yield each.name, value
        elif isinstance(value, Mapping):
            yield from (
                (each.name, item) for item in value.values() if isinstance(item, CheckLimit)
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
