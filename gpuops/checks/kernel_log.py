"""What has the kernel complained about since boot? Rules are data, in ``checks/rules/*.toml``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.protocol import Case, Check, Look, Machine, NoParameters
from gpuops.errors import ProbeError
from gpuops.host.kmsg import KernelRecord, parse_kmsg, read_kmsg
from gpuops.host.procfs import read_text
from gpuops.model import Entity, FailureClass, Finding, Status
from gpuops.rules import LINE_MAX, LogRule, LogSource, load_rules
from gpuops.units import format_seconds

SUBJECTS_MAX = 64
_LINE_SHOWN_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """What the rules found; times are µs since boot. ``complete``: the log's start is still there.

    ``more`` counts hits about further subjects than `SUBJECTS_MAX`, of which only a number is kept.
    """

    records: int
    complete: bool
    hits: tuple[Hits, ...] = ()
    more: int = 0


def search(
    records: Iterable[KernelRecord], rules: Sequence[LogRule], now_us: int | None = None
) -> KernelLog:
    """Return what *rules* find in *records*; repeated hits are counted, not repeated.

    The first rule that matches a line has it, as in `gpuops.rules.first_match`. *now_us* is the
    time since boot; the last record's where it is None.
    """
    kernel = [rule for rule in rules if rule.source is LogSource.KERNEL]
    found: dict[tuple[str, str | None], Hits] = {}
    count = more = 0
    first: int | None = None
    last_us = 0
    for record in records:
        count += 1
        first = record.sequence if first is None else first
        last_us = record.since_boot_us
        _clear(found, record, kernel)
        hits = _hits(record, kernel)
        if hits is None:
            continue
        key = hits.rule, hits.subject
        if key in found:
            before = found[key]
            found[key] = replace(before, count=before.count + 1, last_us=hits.last_us)
        elif len(found) < SUBJECTS_MAX:
            found[key] = hits
        else:
            more += 1
    ages = {rule.id: rule.within_s for rule in kernel}
    now_us = last_us if now_us is None else now_us
    kept = tuple(_aged(hits, ages[hits.rule], now_us) for hits in found.values())
    return KernelLog(records=count, complete=first == 0, hits=kept, more=more)


def _clear(
    found: dict[tuple[str, str | None], Hits], record: KernelRecord, rules: Sequence[LogRule]
) -> None:
    """Take out of *found* what the line of *record* takes back."""
    for rule in rules:
        match = rule.cleared_by and rule.cleared_by.search(record.text[:LINE_MAX])
        if match:
            subject = match.groupdict().get("subject")
            for key in [(name, about) for name, about in found if name == rule.id]:
                if subject in (None, key[1]):
                    del found[key]


def _aged(hits: Hits, within_s: float | None, now_us: int) -> Hits:
    if within_s is None or now_us - hits.last_us <= within_s * 1e6:
        return hits
    status = min(Status.parse(hits.status), Status.WARN)
    return replace(hits, status=status.word, faded=True)


def _hits(record: KernelRecord, rules: Sequence[LogRule]) -> Hits | None:
    line = record.text[:LINE_MAX]
    for rule in rules:
        match = rule.pattern.search(line)
        if match is not None:
            return Hits(
                rule=rule.id,
                status=rule.status.word,
                failure_class=rule.failure_class.value,
                reference=rule.reference,
                subject=match.groupdict().get("subject"),
                count=1,
                first_us=record.since_boot_us,
                last_us=record.since_boot_us,
                line=line[:_LINE_SHOWN_MAX],
            )
    return None


def read_kernel_log(root: Path, rule_dirs: Iterable[Path]) -> KernelLog:
    """Return what the rules in *rule_dirs* find in this machine's log.

    Raises:
        ProbeError: The log may not be read or there is none.
        ConfigError: A rule is malformed.
    """
    return search(parse_kmsg(read_kmsg(root)), load_rules(rule_dirs), _uptime_us(root))


def _uptime_us(root: Path) -> int | None:
    try:
        return round(float(read_text(root / "proc/uptime").split()[0]) * 1e6)
    except (ProbeError, ValueError, IndexError):
        return None


def judge(facts: KernelLog, _parameters: NoParameters, case: Case) -> list[Finding]:
    """Return a finding for each rule and subject that was hit, the worst first, else one pass."""
    findings = [_finding(hits, case.node) for hits in facts.hits]
    if facts.more:
        findings.append(_too_many(facts.more, case.node))
    if findings:
        return sorted(findings, key=lambda finding: -finding.status)
    since = "since boot" if facts.complete else "in what is left of the log"
    return [
        Finding(
            check="kernel_log",
            entity=case.node,
            status=Status.PASS,
            value=0,
            unit="hits",
            threshold="= 0",
            source="checks/rules",
            message=f"no known fault in {facts.records} lines {since}",
        )
    ]


def _finding(hits: Hits, node: Entity) -> Finding:
    when = f"{format_seconds(hits.first_us / 1e6)} after boot"
    if hits.count > 1:
        when = f"{hits.count} times, first {when}, last {format_seconds(hits.last_us / 1e6)}"
    if hits.faded:
        when += ", too long ago to judge what is now"
    about = f" on {hits.subject}" if hits.subject else ""
    return Finding(
        check="kernel_log",
        entity=node,
        status=Status.parse(hits.status),
        value=hits.count,
        unit="hits",
        threshold="= 0",
        source=hits.reference,
        message=f"{hits.rule}{about}, {when}: {hits.line}",
        failure_class=FailureClass(hits.failure_class),
    )


def _too_many(more: int, node: Entity) -> Finding:
    return Finding(
        check="kernel_log",
        entity=node,
        status=Status.WARN,
        value=more,
        unit="hits",
        message=f"{more} more hits about further subjects than the {SUBJECTS_MAX} shown",
    )


def _read(machine: Machine, _budget_s: float) -> KernelLog:
    return read_kernel_log(machine.root, machine.rule_dirs)


CHECK = Check(
    name="kernel_log",
    about="known faults in the kernel's log since boot",
    look=Look("kernel_log", KernelLog, _read),
    parameters=NoParameters,
    judge=judge,
)
