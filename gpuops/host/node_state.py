"""The state of a node between two checks, in one small file below the state folder.

It holds what judges need without a query of the store: earlier counters, driver calls that gave no
answer, acknowledged repairs, what the kernel's log held.
"""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.xid_log import DriverLog
from gpuops.model import Incident


def node_name(env: Mapping[str, str]) -> str:
    """Return Slurm's name of this node, else the short host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0] or "localhost"


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's id of this boot, or ``"unknown"``."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "unknown"


def since_boot_s(root: Path = Path("/")) -> float:
    """Return the seconds since boot, including sleep, by CLOCK_BOOTTIME.

    Under a fake root they are those of its ``proc/uptime``, if it has one.
    """
    if root != Path("/"):
        try:
            return float((root / "proc/uptime").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            pass
    return time.clock_gettime(time.CLOCK_BOOTTIME)


WINDOW_S = 86400.0
_RATE_SPAN_MIN_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """Counters by name, as read at one time of one boot."""

    boot_id: str
    since_boot_s: float
    t_us: int
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootMoment:
    """A time of one boot; ``boot_id`` is "" if it is unknown."""

    boot_id: str
    since_boot_s: float
    t_us: int

    def age_s(self, sample: CounterSample) -> float:
        """Return the seconds since *sample*: by the boot's clock if it is of the same boot."""
        if sample.boot_id == self.boot_id:
            return self.since_boot_s - sample.since_boot_s
        return (self.t_us - sample.t_us) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverHang:
    """A call into the GPU driver that gave no answer. ``state``: of the process that made it."""

    boot_id: str
    t_us: int
    call: str
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCrash:
    """A call of NVML that ended its process; ``signal``: its name, as ``SIGSEGV``."""

    boot_id: str
    t_us: int
    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """An acknowledged repair: earlier failures no longer count against its entity.

    ``entity_kind`` ``node`` clears the node and everything in it.
    """

    entity_kind: str
    entity_id: str
    t_us: int
    by: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strikes:
    """How often an entity failed recently, by the last answer of the store."""

    entity_kind: str
    entity_id: str
    count: int
    last_us: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIncident:
    """An incident of this node as last recorded, and the checks that find it."""

    incident: Incident
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCount:
    """What the store last reported about the fleet: nodes seen in a day, and those drained."""

    t_us: int
    seen: int
    drained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The last check run of a suite that was recorded with its findings; later runs extend it.

    ``runs``: how many had this result. ``not_passed``: the statuses of what did not pass, by check
    and entity. ``failures``: what of gpuops failed. ``sampled_us``, ``parts_us``: when values and
    parts were last recorded.
    """

    id: str
    boot_id: str
    start_us: int
    runs: int
    status: str
    profile: str
    mode: str | None = None
    not_passed: Mapping[str, str] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()
    failures: frozenset[str] = frozenset()
    sampled_us: int = 0
    parts_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHit:
    """The lines that the log rule ``rule`` matched about ``subject``; times are µs since boot."""

    rule: str
    subject: str | None
    count: int
    first_us: int
    last_us: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """What checks saw in the kernel's log of the boot ``boot_id``.

    The log overwrites its oldest lines, and any user can fill it. ``uuids``: of GPUs with Xids, by
    PCI address.
    """

    boot_id: str = ""
    hits: tuple[KernelHit, ...] = ()
    driver: DriverLog = field(default_factory=DriverLog)
    uuids: Mapping[str, str] = field(default_factory=dict)

    def of_boot(self, boot_id: str) -> "KernelMemory":
        """Return what is remembered of the boot *boot_id*: nothing of another one."""
        return self if boot_id and boot_id == self.boot_id else KernelMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The file's content. ``hangs`` and ``crashes``: since NVML last answered, oldest first.

    ``samples``: oldest first, about an hour apart. ``jobs``: the sample at each running job's
    prolog, by job id. ``persistence``: of the GPUs, when NVML last answered. ``repairs`` and
    ``strikes``: the last answer of the store. ``incidents``: the open ones of this node, by
    `gpuops.incident.incidents.node.incident_key`. ``profile``: the name of the profile that the
    GPUs last matched. ``fleet``: the store's last answer about the fleet. ``recorded``: by suite
    and caller. ``judged_us``: the start of the newest run whose effect ``incidents`` have.
    ``decided``: the last recorded decision to leave the node as it is. ``kernel``: see
    `KernelMemory`.
    """

    samples: tuple[CounterSample, ...] = ()
    jobs: Mapping[str, CounterSample] = field(default_factory=dict)
    hangs: tuple[DriverHang, ...] = ()
    crashes: tuple[DriverCrash, ...] = ()
    persistence: bool | None = None
    repairs: tuple[Repair, ...] = ()
    strikes: tuple[Strikes, ...] = ()
    incidents: Mapping[str, OpenIncident] = field(default_factory=dict)
    profile: str | None = None
    fleet: FleetCount | None = None
    recorded: Mapping[str, RecordedRun] = field(default_factory=dict)
    judged_us: int = 0
    decided: str | None = None
    kernel: KernelMemory = field(default_factory=KernelMemory)


@dataclass(frozen=True, slots=True)
class CounterGrowth:
    """By how much a counter grew, over how many seconds.

    ``reset``: it had decreased, so it was reset, and ``grown`` counts from zero.
    """

    grown: float
    elapsed_s: float
    reset: bool = False

    @property
    def per_hour(self) -> float:
        """Return the rate over at least an hour: one event in ten seconds is not 360 an hour."""
        return self.grown * 3600.0 / max(self.elapsed_s, _RATE_SPAN_MIN_S)

    @property
    def per_day(self) -> float:
        """Return the rate over at least an hour, in events a day."""
        return self.grown * 86400.0 / max(self.elapsed_s, _RATE_SPAN_MIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Earlier values of this node's counters, relative to one moment."""

    boot_id: str = ""
    since_boot_s: float = 0.0
    t_us: int = 0
    samples: tuple[CounterSample, ...] = ()

    def since(self, name: str, value: float, *, window_s: float = WINDOW_S) -> CounterGrowth | None:
        """Return how *name* grew to *value* since the oldest sample of this boot in the window.

        For counters that a boot resets. If there is only an older sample (the prolog of a job of
        several days), since that. None: this boot has no earlier sample of it.
        """
        found = self._of_this_boot(name)
        if not found:
            return None
        age_s, before = next((item for item in found if item[0] <= window_s), found[-1])
        return _growth(before, value, age_s)

    def lately(self, name: str, value: float) -> CounterGrowth | None:
        """Return the same since the newest sample that is an hour old, else since the oldest.

        For rates per hour: an hour full of errors would be averaged out over a day.
        """
        found = self._of_this_boot(name)
        if not found:
            return None
        hour = (item for item in reversed(found) if item[0] >= _RATE_SPAN_MIN_S)
        age_s, before = next(hour, found[0])
        return _growth(before, value, age_s)

    def _of_this_boot(self, name: str) -> list[tuple[float, float]]:
        """Return age and value of each sample of *name* in this boot, the oldest first."""
        return [
            (age_s, sample.values[name])
            for sample in self.samples
            if sample.boot_id == self.boot_id
            and name in sample.values
            and (age_s := self.since_boot_s - sample.since_boot_s) >= 0
        ]

    def lasting(
        self, name: str, value: float, *, window_s: float = WINDOW_S
    ) -> CounterGrowth | None:
        """Return the same for a counter that survives reboots, by the wall clock."""
        for sample in self.samples:
            age_s = (self.t_us - sample.t_us) / 1e6
            if name in sample.values and 0 <= age_s <= window_s:
                return _growth(sample.values[name], value, age_s)
        return None


def _growth(before: float, now: float, elapsed_s: float) -> CounterGrowth:
    if now < before:
        return CounterGrowth(now, elapsed_s, reset=True)
    return CounterGrowth(now - before, elapsed_s)
