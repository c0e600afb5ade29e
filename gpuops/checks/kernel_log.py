"""What has the kernel complained about since boot? Rules are data, in ``checks/rules/*.toml``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.checks.protocol import Check, Look, Machine, NoParameters
from gpuops.host.kmsg import KernelRecord, parse_kmsg, read_kmsg
from gpuops.model import Entity, FailureClass, Finding, Status
from gpuops.rules import LINE_MAX, LogRule, LogSource, load_rules
from gpuops.units import format_seconds

SUBJECTS_MAX = 64
_LINE_SHOWN_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """All lines that one rule matched about one subject (the rule's group ``subject``)."""

    rule: str
    status: str
    failure_class: str
    reference: str
    subject: str | None
    count: int
    first_us: int
    last_us: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """What the rules found; times are µs since boot. ``complete``: the log's start is still there.

    ``more`` counts hits about further subjects than `SUBJECTS_MAX`, of which only a number is kept.
    """

    records: int
    complete: bool
    hits: tuple[Hits, ...] = ()
    more: int = 0


def search(records: Iterable[KernelRecord], rules: Sequence[LogRule]) -> KernelLog:
    """Return what *rules* find in *records*; repeated hits are counted, not repeated.

    The first rule that matches a line has it, as in `gpuops.rules.first_match`.
    """
    kernel = [rule for rule in rules if rule.source is LogSource.KERNEL]
    found: dict[tuple[str, str | None], Hits] = {}
    count = more = 0
    first: int | None = None
    for record in records:
        count += 1
        first = record.sequence if first is None else first
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
    return KernelLog(records=count, complete=first == 0, hits=tuple(found.values()), more=more)


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
    return search(parse_kmsg(read_kmsg(root)), load_rules(rule_dirs))


def judge(facts: KernelLog, _parameters: NoParameters, node: Entity) -> list[Finding]:
    """Return a finding for each rule and subject that was hit, the worst first, else one pass."""
    findings = [_finding(hits, node) for hits in facts.hits]
    if facts.more:
        findings.append(_too_many(facts.more, node))
    if findings:
        return sorted(findings, key=lambda finding: -finding.status)
    since = "since boot" if facts.complete else "in what is left of the log"
    return [
        Finding(
            check="kernel_log",
            entity=node,
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
