"""What a check is: a look that gives facts, a judge that holds them against parameters.

Checks that name the same `Look` share one child and its facts. A judge reads no clock, no file
and no environment, so a verdict can be repeated from recorded facts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpuops.checks.core.profile import NO_PROFILE, Profile
from gpuops.errors import ConfigError
from gpuops.host.node_state import Counters, DriverHang, Repair, Strikes
from gpuops.model import Entity, Finding, Status

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
