"""Which known faults did the kernel log since boot? Rules are data, in ``checks/rules/*.toml``.

`gpu_xid` and `nvswitch_sxid` judge Xids and SXids.
"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.core.kernel_rules import (
    PROBE,
    RULE_SUBJECTS_MAX,
    KernelFacts,
    RuleHits,
    repaired_us,
    since,
)
from gpuops.model import Entity, FailureClass, Finding, Status
from gpuops.units import format_seconds


def judge(facts: KernelFacts, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each rule and subject with hits, the worst first, else one pass.

    Hits before an acknowledged repair of the node do not count.
    """
    cut_us = repaired_us(context)
    hits = [hits for hits in facts.log.hits if cut_us is None or hits.last_us > cut_us]
    findings = [_finding(item, context.node) for item in hits]
    if facts.log.more:
        findings.append(_too_many(facts.log.more, context.node))
    if findings:
        return sorted(findings, key=lambda finding: -finding.status)
    return [
        Finding(
            check="kernel_log",
            entity=context.node,
            status=Status.PASS,
            value=0,
            unit="hits",
            threshold="= 0",
            source="checks/rules",
            message=f"no known fault in {facts.log.records} lines {since(facts, cut_us)}",
        )
    ]


def _finding(hits: RuleHits, node: Entity) -> Finding:
    when = f"{format_seconds(hits.first_us / 1e6)} after boot"
    if hits.count > 1:
        when = f"{hits.count} times, first {when}, last {format_seconds(hits.last_us / 1e6)}"
    if hits.faded:
        when += ", too long ago to count as a present fault"
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
        hardware_reported=hits.hardware_reported and hits.status == Status.FAIL.word,
    )


def _too_many(more: int, node: Entity) -> Finding:
    return Finding(
        check="kernel_log",
        entity=node,
        status=Status.WARN,
        value=more,
        unit="hits",
        message=f"{more} more hits, about more than {RULE_SUBJECTS_MAX} subjects of a rule",
    )


CHECK = Check(
    name="kernel_log",
    about="known faults in the kernel's log since boot",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
