"""The kernel's log, read once for all checks: hits of log rules, and NVIDIA's Xids."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gpuops.checks.core.check import JudgeContext, Probe, ProbeContext
from gpuops.checks.core.xid_catalogue import SxidKind, XidKind, load_sxids, load_xids
from gpuops.errors import ProbeError
from gpuops.host.gpu_names import GpuName, read_gpu_names
from gpuops.host.kmsg import KernelRecord, journal_records, kernel_records
from gpuops.host.node_state import KernelHit, KernelMemory
from gpuops.host.process.probe import STOP_S
from gpuops.host.procfs import read_text
from gpuops.host.xid import OffBusLines
from gpuops.host.xid_log import Burst, DriverLines, DriverLog
from gpuops.model import Entity, EntityKind, Status, UnknownReason
from gpuops.rules import KERNEL_LOG, LINE_MAX, LogRule, LogSource, load_rules, required_literals
from gpuops.units import format_seconds

SUBJECTS_MAX = 64
# Each rule has its own: a user chooses the names of processes, and must not crowd out other rules.
RULE_SUBJECTS_MAX = 16
LINE_SHOWN_MAX = 300
_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleHits:
    """All lines that one rule matched about one subject (the rule's group ``subject``).

    ``faded``: the last of them is older than the rule's ``within_s``.
    """

    rule: str
    status: str
    failure_class: str
    reference: str
    subject: str | None
    count: int
    first_us: int
    last_us: int
    line: str
    faded: bool = False
    hardware_reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogMatches:
    """What the rules found; times are µs since boot. ``complete``: the log's start is still there.

    ``more`` counts hits about subjects beyond `RULE_SUBJECTS_MAX` of a rule: they are only counted.
    """

    records: int
    complete: bool
    hits: tuple[RuleHits, ...] = ()
    more: int = 0


@dataclass(slots=True)
class _Tally:
    rule: LogRule
    count: int
    first_us: int
    last_us: int
    line: str


class RuleSearch:
    """Matches rules against records as they come; the first rule that matches a line counts.

    Rules for other logs, and those whose lines another check judges, are left out.
    """

    def __init__(self, rules: Sequence[LogRule]) -> None:
        kernel = [rule for rule in rules if rule.source is LogSource.KERNEL]
        self._rules = [rule for rule in kernel if rule.check == KERNEL_LOG]
        self._clearing = [
            (rule.id, rule.cleared_by, required_literals(rule.cleared_by))
            for rule in self._rules
            if rule.cleared_by is not None
        ]
        self._found: dict[tuple[str, str | None], _Tally] = {}
        self._cleared: dict[tuple[str, str | None], int] = {}
        self._first: int | None = None
        self._count = self._more = 0
        self.last_us = 0

    def add(self, batch: Sequence[KernelRecord]) -> None:
        """Match the rules against *batch*, which follows the batches before."""
        if not batch:
            return
        self._count += len(batch)
        if self._first is None:
            self._first = batch[0].sequence
        self.last_us = batch[-1].since_boot_us
        # This excludes most rules for a thousand lines at once.
        text = "\n".join(record.text for record in batch)
        rules = [rule for rule in self._rules if rule.may_match(text)]
        clearing = [
            (name, pattern)
            for name, pattern, literals in self._clearing
            if not literals or any(literal in text for literal in literals)
        ]
        if rules or clearing:
            for record in batch:
                self._clear(record, clearing)
                self._match(record, rules)

    def _match(self, record: KernelRecord, rules: Sequence[LogRule]) -> None:
        for rule in rules:
            match = rule.search(record.text)
            if match is not None:
                self._hit(rule, match.groupdict().get("subject"), record)
                return

    @property
    def complete(self) -> bool:
        """Return whether the log's start was still there."""
        return self._first == 0

    def recall(self, hits: Iterable[KernelHit]) -> None:
        """Add *hits* of earlier searches, whose lines may have left the log meanwhile."""
        rules = {rule.id: rule for rule in self._rules}
        for hit in hits:
            key = hit.rule, hit.subject
            cleared = [self._cleared.get(name, -1) for name in (key, (hit.rule, None))]
            if hit.rule not in rules or max(cleared) >= hit.last_us:
                continue
            tally = self._found.get(key)
            if tally is not None:
                tally.count = max(tally.count, hit.count)
                tally.first_us = min(tally.first_us, hit.first_us)
                tally.line = hit.line
            elif self._has_room(hit.rule):
                rule = rules[hit.rule]
                self._found[key] = _Tally(rule, hit.count, hit.first_us, hit.last_us, hit.line)

    def log(self, now_us: int | None = None) -> KernelLogMatches:
        """Return what was found as of *now_us*; None: as of the last record."""
        now_us = self.last_us if now_us is None else now_us
        hits = tuple(
            _hits(subject, tally, now_us) for (_rule, subject), tally in self._found.items()
        )
        return KernelLogMatches(
            records=self._count, complete=self.complete, hits=hits, more=self._more
        )

    def _hit(self, rule: LogRule, subject: str | None, record: KernelRecord) -> None:
        tally = self._found.get((rule.id, subject))
        when = record.since_boot_us
        if tally is not None:
            tally.count += 1
            tally.last_us = when
        elif self._has_room(rule.id):
            line = record.text[:LINE_SHOWN_MAX].replace("\n", " ")
            self._found[rule.id, subject] = _Tally(rule, 1, when, when, line)
        else:
            self._more += 1

    def _has_room(self, rule: str) -> bool:
        return sum(name == rule for name, _subject in self._found) < RULE_SUBJECTS_MAX

    def _clear(self, record: KernelRecord, clearing: Sequence[tuple[str, re.Pattern[str]]]) -> None:
        """Drop the hits that the line of *record* clears."""
        for name, pattern in clearing:
            match = pattern.match(record.text[:LINE_MAX])
            if match:
                subject = match.groupdict().get("subject")
                if len(self._cleared) < SUBJECTS_MAX or (name, subject) in self._cleared:
                    self._cleared[name, subject] = record.since_boot_us
                for key in [found for found in self._found if found[0] == name]:
                    if subject in (None, key[1]):
                        del self._found[key]


def batches(records: Iterable[KernelRecord]) -> Iterator[list[KernelRecord]]:
    """Yield *records* by the thousand."""
    left = iter(records)
    while batch := list(islice(left, _BATCH)):
        yield batch


def _hits(subject: str | None, tally: _Tally, now_us: int) -> RuleHits:
    rule = tally.rule
    faded = rule.within_s is not None and now_us - tally.last_us > rule.within_s * 1e6
    return RuleHits(
        rule=rule.id,
        status=(min(rule.status, Status.WARN) if faded else rule.status).word,
        failure_class=rule.failure_class.value,
        reference=rule.reference,
        subject=subject,
        count=tally.count,
        first_us=tally.first_us,
        last_us=tally.last_us,
        line=tally.line,
        faded=faded,
        hardware_reported=rule.hardware_reported,
    )


_MARGIN_S = 0.2
JOURNAL = "journald"
KMSG = "/dev/kmsg"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What the log contained. Times are µs since boot; ``now_us``: when it was read.

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
    search, lines, joiner = RuleSearch(rules), DriverLines(), OffBusLines()
    for batch in batches(map(joiner.join, records)):
        search.add(batch)
        for record in batch:
            lines.add(record)
    if not search.complete:
        search.recall(machine.kernel.hits)
        lines.recall(machine.kernel.driver)
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
        gpus=_gpu_names(machine, lines) if driver.xids else (),
        xids=tuple(known.get(code) or XidKind.unknown(code) for code in codes),
        sxids=tuple(known_switch.get(code) or SxidKind.unknown(code) for code in switch_codes),
    )


def _gpu_names(machine: ProbeContext, lines: DriverLines) -> tuple[GpuName, ...]:
    return read_gpu_names(machine.root, {**machine.kernel.uuids, **lines.uuids})


def _uptime_us(machine: ProbeContext) -> int | None:
    try:
        return round(float(read_text(machine.root / "proc/uptime").split()[0]) * 1e6)
    except (ProbeError, ValueError, IndexError):
        return None


BURSTS_MAX = 16


def memory_after(memory: KernelMemory, facts: KernelFacts, boot_id: str) -> KernelMemory:
    """Return what to remember of the log of the boot *boot_id* after *facts*.

    Of each code of a device the newest `BURSTS_MAX` bursts, none from before the driver's load.
    """
    memory, driver = memory.of_boot(boot_id), DriverLines()
    driver.recall(facts.driver)
    driver.recall(memory.driver)
    log = driver.log()
    return KernelMemory(
        boot_id=boot_id,
        hits=tuple(_remembered(hits) for hits in facts.log.hits),
        driver=replace(log, xids=_newest(log.xids, log), sxids=_newest(log.sxids, log)),
        uuids={**memory.uuids, **{gpu.address: gpu.uuid for gpu in facts.gpus if gpu.uuid}},
    )


def _remembered(hits: RuleHits) -> KernelHit:
    return KernelHit(
        rule=hits.rule,
        subject=hits.subject,
        count=hits.count,
        first_us=hits.first_us,
        last_us=hits.last_us,
        line=hits.line,
    )


def _newest(bursts: Iterable[Burst], log: DriverLog) -> tuple[Burst, ...]:
    kinds: dict[tuple[str, int, bool | None], list[Burst]] = {}
    for burst in bursts:
        if log.loaded_us is None or burst.last_us > log.loaded_us:
            kinds.setdefault((burst.address, burst.code, burst.fatal), []).append(burst)
    return tuple(burst for kind in kinds.values() for burst in kind[-BURSTS_MAX:])


def since(facts: KernelFacts, cut_us: int | None = None) -> str:
    """Return which part of the log is judged, as text; *cut_us*: see `repaired_us`."""
    if cut_us is not None:
        return f"since the repair {format_seconds(cut_us / 1e6)} after boot"
    if facts.source == JOURNAL:
        return "in journald's log of this boot"
    return "since boot" if facts.log.complete else "in the rest of the log"


def repaired_us(context: JudgeContext, entities: Collection[Entity] = ()) -> int | None:
    """Return when the node or one of *entities* was last repaired, in µs since this boot.

    None: not since this boot, or the time of the boot is unknown. Repairs are dated by the wall
    clock and boots to the second: the result is at most a second off unless the clock is set.
    """
    if not context.boot_us:
        return None
    names = {(entity.kind.value, entity.id) for entity in entities}
    times = [
        repair.t_us - context.boot_us
        for repair in context.repairs
        if repair.entity_kind == EntityKind.NODE or (repair.entity_kind, repair.entity_id) in names
    ]
    latest = max(times, default=-1)
    return latest if latest >= 0 else None


PROBE = Probe(
    "kernel_log",
    KernelFacts,
    _read,
    sources=(
        "/dev/kmsg; without permission, journalctl -k -b",
        "/proc/driver/nvidia/gpus/*/information",
    ),
)
