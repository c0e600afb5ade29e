"""What the kernel's log tells, read once for every check that asks it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gpuops.checks.core.check import JudgeContext, Probe, ProbeContext
from gpuops.checks.core.kernel_rules import KernelLogMatches, RuleSearch, batches
from gpuops.checks.core.xid_catalogue import SxidKind, XidKind, load_sxids, load_xids
from gpuops.errors import ProbeError
from gpuops.host.gpu_names import GpuName, read_gpu_names
from gpuops.host.kmsg import KernelRecord, journal_records, kernel_records
from gpuops.host.process.probe import STOP_S
from gpuops.host.procfs import read_text
from gpuops.host.xid import DriverLines, DriverLog
from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.rules import LogRule, load_rules
from gpuops.units import format_seconds

_MARGIN_S = 0.2
JOURNAL = "journald"
KMSG = "/dev/kmsg"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What the log held. Times are µs since boot; ``now_us``: when it was read.

    ``source``: `KMSG` or `JOURNAL`. ``xids`` and ``sxids``: what the codes in ``driver`` mean.
    """

    source: str
    now_us: int
    log: KernelLogMatches
    driver: DriverLog = field(default_factory=DriverLog)
    gpus: tuple[GpuName, ...] = ()
    xids: tuple[XidKind, ...] = ()
    sxids: tuple[SxidKind, ...] = ()


def _read(machine: ProbeContext, budget_s: float) -> KernelFacts:
    rules = load_rules(machine.rule_dirs)
    try:
        return gather(KMSG, kernel_records(machine.root), rules, machine)
    except ProbeError as refused:
        if refused.reason != UnknownReason.NO_PERMISSION:
            raise
        try:
            records = journal_records(machine.root, max(budget_s - STOP_S - _MARGIN_S, 0.1))
        except ProbeError as exc:
            raise ProbeError(f"{refused}; {exc}", UnknownReason.NO_PERMISSION) from exc
        return gather(JOURNAL, records, rules, machine)


def gather(
    source: str, records: Iterable[KernelRecord], rules: Sequence[LogRule], machine: ProbeContext
) -> KernelFacts:
    """Return the facts in *records* (from *source*, the oldest first).

    Raises:
        ProbeError: *records* cannot be read.
        ConfigError: The catalogue of Xids is malformed.
    """
    search, lines = RuleSearch(rules), DriverLines()
    for batch in batches(records):
        search.add(batch)
        for record in batch:
            lines.add(record)
    driver = lines.log()
    known, known_switch = load_xids(machine.xid_dirs), load_sxids(machine.xid_dirs)
    codes = sorted({burst.code for burst in driver.xids})
    switch_codes = sorted({burst.code for burst in driver.sxids})
    now_us = _uptime_us(machine)
    return KernelFacts(
        source=source,
        now_us=search.last_us if now_us is None else now_us,
        log=search.log(now_us),
        driver=driver,
        gpus=read_gpu_names(machine.root, lines.uuids) if driver.xids else (),
        xids=tuple(known.get(code) or XidKind.unknown(code) for code in codes),
        sxids=tuple(known_switch.get(code) or SxidKind.unknown(code) for code in switch_codes),
    )


def _uptime_us(machine: ProbeContext) -> int | None:
    try:
        return round(float(read_text(machine.root / "proc/uptime").split()[0]) * 1e6)
    except (ProbeError, ValueError, IndexError):
        return None


def since(facts: KernelFacts, cut_us: int | None = None) -> str:
    """Return in words what part of the log is judged; *cut_us*: see `repaired_us`."""
    if cut_us is not None:
        return f"since the repair {format_seconds(cut_us / 1e6)} after boot"
    if facts.source == JOURNAL:
        return "in what journald shows of this boot"
    return "since boot" if facts.log.complete else "in what is left of the log"


def repaired_us(case: JudgeContext, entities: Collection[Entity] = ()) -> int | None:
    """Return when the node or one of *entities* was last repaired, in µs since this boot.

    None: not since this boot, or nobody can say when that was. Repairs are dated by the wall clock
    and boots to the second, so the answer is a second off at most while nobody sets the clock.
    """
    if not case.boot_us:
        return None
    names = {(entity.kind.value, entity.id) for entity in entities}
    times = [
        repair.t_us - case.boot_us
        for repair in case.repairs
        if repair.entity_kind == EntityKind.NODE or (repair.entity_kind, repair.entity_id) in names
    ]
    latest = max(times, default=-1)
    return latest if latest >= 0 else None


LOOK = Probe(
    "kernel_log",
    KernelFacts,
    _read,
    sources=(
        "/dev/kmsg; without the right to, journalctl -k -b",
        "/proc/driver/nvidia/gpus/*/information",
    ),
)
