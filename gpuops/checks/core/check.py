"""What a check is: a probe that reads facts, and a judge that compares them with parameters.

Checks with the same `Probe` share one child process and its facts. A judge reads no clock, no file
and no environment, so that recorded facts give the same findings again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, Profile, TextExpectation
from gpuops.errors import ConfigError
from gpuops.host.node_state import (
    Counters,
    DriverCrash,
    DriverHang,
    KernelMemory,
    Repair,
    Strikes,
)
from gpuops.model import Entity, FailureClass, Finding, Status, UnknownReason

F = TypeVar("F")
P = TypeVar("P")

NOT_IN_PROFILE = "the profile does not say what is expected"


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """What a probe reads: the root of the file system, the folders of log rules and of Xids.

    ``inputs``: what the checks of this probe need to know about (`Check.inputs`). ``node``: its
    name; ``site_checks``: the folder of the site's executables. ``kernel``: what earlier checks of
    this boot saw in the kernel's log. ``job_uid``: the user of the job that a hook runs for.
    """

    root: Path = Path("/")
    rule_dirs: tuple[Path, ...] = ()
    inputs: tuple[str, ...] = ()
    node: str = ""
    site_checks: Path | None = None
    xid_dirs: tuple[Path, ...] = ()
    kernel: KernelMemory = field(default_factory=KernelMemory)
    job_uid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeContext:
    """What a judge knows besides the facts and its limits.

    ``gpus``: the GPUs to judge, each by UUID, index, PCI address or Slurm's number
    (`gpuops.checks.gpu.gpus.selected`); None: all. ``gpus_expected``: how many the node must have,
    by flag, environment, configuration or suite; None: none of them says.
    ``hangs``: calls into the GPU driver that got no answer in this boot, since it last answered;
    ``crashes``: those that ended their process.
    ``persistence``: the GPUs' persistence mode when NVML last answered. ``repairs``: acknowledged
    repairs of this node; ``strikes``: those of this node and its parts. ``boot_us``: when this
    node booted, by the wall clock.
    """

    node: Entity
    profile: Profile = NO_PROFILE
    counters: Counters = field(default_factory=Counters)
    gpus: frozenset[str] | None = None
    gpus_expected: NumberExpectation | None = None
    hangs: tuple[DriverHang, ...] = ()
    crashes: tuple[DriverCrash, ...] = ()
    persistence: bool | None = None
    repairs: tuple[Repair, ...] = ()
    strikes: tuple[Strikes, ...] = ()
    boot_us: int = 0


@dataclass(frozen=True, slots=True)
class Probe(Generic[F]):
    """A reader of facts; it runs in its own child process.

    ``read`` gets the machine and its budget in seconds; it raises ProbeError if the machine cannot
    be read. ``facts`` is the dataclass that it returns. ``locks`` names what it needs exclusively:
    probes that share a lock run one after another. ``sources`` are the files, calls and commands
    that it reads, for people.
    """

    name: str
    facts: type[F]
    read: Callable[[ProbeContext, float], F]
    locks: frozenset[str] = frozenset()
    sources: tuple[str, ...] = ()


def _no_counters(_facts: object) -> Mapping[str, float]:
    return {}


def _no_inputs(_parameters: object, _profile: Profile) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Check(Generic[F, P]):
    """One check. ``parameters`` is the dataclass that a suite's table becomes.

    ``transient``: its failures may go away within a second, so that a hook checks twice.
    ``counters`` returns the values that the next run's judge compares with, by name
    (``CHECK:ENTITY:COUNTER``); ``inputs`` what the probe needs: names of units, paths.
    """

    name: str
    about: str
    probe: Probe[F]
    parameters: type[P]
    judge: Callable[[F, P, JudgeContext], list[Finding]]
    counters: Callable[[F], Mapping[str, float]] = _no_counters
    inputs: Callable[[P, Profile], tuple[str, ...]] = _no_inputs
    transient: bool = False


AnyCheck = Check[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimit:
    """From which number on a check warns or fails, and the source of these limits.

    Limits are inclusive. A limit that is not given is not applied; limits without a measured
    source should only warn.
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
        """Return the status of *value* where more is better."""
        return self._status(lambda limit: value <= limit)

    def ceiling(self, value: float) -> Status:
        """Return the status of *value* where less is better."""
        return self._status(lambda limit: value >= limit)

    def _status(self, beyond: Callable[[float], bool]) -> Status:
        if self.fail is not None and beyond(self.fail):
            return Status.FAIL
        if self.warn is not None and beyond(self.warn):
            return Status.WARN
        return Status.PASS

    def text(self, sign: str, unit: str = "") -> str:
        """Return the limits as ``"> 5 % (fail: 0 %)"`` for *sign* ``">"`` and *unit* ``"%"``."""
        unit = f" {unit}" if unit else ""
        if self.warn is None:
            return f"{sign} {self.fail:g}{unit}"
        fail = "" if self.fail is None else f" (fail: {self.fail:g}{unit})"
        return f"{sign} {self.warn:g}{unit}{fail}"


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a check that a suite cannot tune."""


@dataclass(frozen=True, slots=True)
class ValueBounds:
    """The plausible range of a number, and its unit for messages."""

    unit: str
    low: float
    high: float
    whole: bool = True

    def check(self, value: object) -> float:
        """Return *value* if it is a number in this range.

        Raises:
            ValueError: Not a number, or one that looks like another unit.
        """
        kinds = int if self.whole else int | float
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = "whole number" if self.whole else "number"
            text = f"a {expected} of {self.unit} is expected, got {value!r}"
            raise ValueError(text)  # noqa: TRY004 one error kind
        if not self.low <= value <= self.high:
            raise ValueError(
                f"{float(value):g} looks like another unit: {self.unit} are expected,"
                f" from {self.low:g} to {self.high:g}"
            )
        return float(value)


# By the end of a limit's name; the first match counts. The ranges are wider than any sensible
# limit. An NVMe drive can report more than 100 % of its life as used (NVM Express Base
# Specification, "Percentage Used").
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


def check_units(parameters: object, where: str) -> None:
    """Check that each limit in *parameters* (a dataclass) is in a plausible range.

    Raises:
        ConfigError: One looks like another unit: it would fail every node, or none.
    """
    for name, limit in _limits(parameters):
        bounds = next(bounds for end, bounds in LIMITS.items() if name.endswith(end))
        for key, value in (("warn", limit.warn), ("fail", limit.fail)):
            try:
                if value is not None:
                    bounds.check(value)
            except ValueError as exc:
                raise ConfigError(f"{key} of {name} of {where}: {exc}") from exc


def _limits(parameters: object) -> Iterator[tuple[str, CheckLimit]]:
    for each in fields(parameters):  # type: ignore[arg-type]  # parameters are a dataclass
        value = getattr(parameters, each.name)
        if isinstance(value, CheckLimit):
            yield each.name, value
        elif isinstance(value, Mapping):
            yield from (
                (each.name, item) for item in value.values() if isinstance(item, CheckLimit)
            )


@dataclass(frozen=True, slots=True)
class Subject:
    """What a finding is about: the check, the entity, and the unit of its number.

    ``hardware_reported`` and ``shared_cause``: see `Finding`.
    """

    check: str
    entity: Entity
    failure_class: FailureClass
    unit: str | None = None
    hardware_reported: bool = False
    shared_cause: bool = False

    def compared(
        self,
        status: Status,
        value: float | str | None,
        threshold: str,
        source: str,
        message: str,
        unknown: UnknownReason | None = None,
    ) -> Finding:
        """Return the finding about *value*, which was compared with *threshold*."""
        return Finding(
            check=self.check,
            entity=self.entity,
            status=status,
            value=value,
            unit=self.unit,
            threshold=threshold,
            source=source,
            message=message,
            failure_class=None if status is Status.PASS else self.failure_class,
            unknown_reason=unknown,
            hardware_reported=self.hardware_reported and status is Status.FAIL,
            shared_cause=self.shared_cause and status is Status.FAIL,
        )

    def below(
        self,
        limit: CheckLimit,
        value: float,
        message: str,
        *,
        digits: int | None = None,
        unit: str = "",
    ) -> Finding:
        """Return the finding about *value*, which should be below *limit*.

        *digits*: how many decimals of the value to show; *unit*: that of the threshold's text.
        """
        shown = value if digits is None else round(value, digits)
        text = limit.text("<", unit)
        return self.compared(limit.ceiling(value), shown, text, limit.source, message)


def not_judged(check: str, entity: Entity, message: str, reason: UnknownReason) -> Finding:
    """Return the finding of a check that could not be judged, for *reason*."""
    return Finding(
        check=check, entity=entity, status=Status.UNKNOWN, message=message, unknown_reason=reason
    )


def in_gb(size: NumberExpectation | None) -> NumberExpectation | None:
    """Return an expectation in bytes as one in GB (1e9 bytes)."""
    return None if size is None else replace(size, value=size.value / 1e9)


def skipped(subject: Subject, message: str, value: float | str | None = None) -> Finding:
    """Return the finding of a check that has no expectation, or nothing to read."""
    return Finding(
        check=subject.check,
        entity=subject.entity,
        status=Status.SKIP,
        value=value,
        unit=None if value is None else subject.unit,
        message=message,
    )


def at_least(
    subject: Subject, value: float, expected: NumberExpectation | None, message: str
) -> Finding:
    """Return a pass for *value* at or above *expected*, else a fail; skip if there is none."""
    if expected is None:
        return skipped(subject, f"{message}; {NOT_IN_PROFILE}", value)
    status = Status.FAIL if value < expected.value else Status.PASS
    return subject.compared(status, value, f">= {expected.value:g}", expected.source, message)


def exactly(
    subject: Subject, value: float, expected: NumberExpectation | None, message: str
) -> Finding:
    """Return a fail for less than *expected* and a warning for more; skip if there is none."""
    if expected is None:
        return skipped(subject, f"{message}; {NOT_IN_PROFILE}", value)
    status = Status.PASS if value == expected.value else Status.WARN
    if value < expected.value:
        status = Status.FAIL
    return subject.compared(status, value, f"= {expected.value:g}", expected.source, message)


def one_of(
    subject: Subject, value: str, expected: TextExpectation | None, message: str, *, bad: Status
) -> Finding:
    """Return a pass for a *value* among those *expected*, else *bad*; skip if there are none."""
    if expected is None:
        return skipped(subject, f"{message}; {NOT_IN_PROFILE}", value)
    status = Status.PASS if value in expected.value else bad
    threshold = f"= {' or '.join(expected.value)}"
    return subject.compared(status, value, threshold, expected.source, message)
