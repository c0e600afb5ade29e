"""Has this node, or a part of it, failed repeatedly in the last weeks?

A few nodes and parts fail far more often than the rest (the lemons of arXiv 2410.21680). Past
failures only warn.
"""

from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject
from gpuops.host.node_state import Strikes
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import iso_utc


@dataclass(frozen=True, slots=True)
class NoProbe:
    """Nothing is read from the machine: the node's state has the strikes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``count``: strikes of the last 28 days and since the last repair."""

    count: CheckLimit


def judge(facts: NoProbe, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding for each part with strikes since its last repair."""
    del facts
    open_strikes = [item for item in context.strikes if not _is_repaired(item, context)]
    if not open_strikes:
        why = "all were repaired since" if context.strikes else "the store reported none"
        message = f"no strikes against this node or its parts: {why}"
        return [Finding(check="strikes", entity=context.node, status=Status.SKIP, message=message)]
    return [_judged(item, parameters.count) for item in open_strikes]


def _is_repaired(strikes: Strikes, context: JudgeContext) -> bool:
    about = {(strikes.entity_kind, strikes.entity_id), (EntityKind.NODE.value, context.node.id)}
    return any(
        repair.t_us >= strikes.last_us
        for repair in context.repairs
        if (repair.entity_kind, repair.entity_id) in about
    )


def _judged(strikes: Strikes, limit: CheckLimit) -> Finding:
    noun = "strike" if strikes.count == 1 else "strikes"
    text = f"{strikes.count} {noun} ({strikes.why}), the last at {iso_utc(strikes.last_us)}"
    # The failure classes are in the incidents that the strikes are of.
    subject = Subject(
        "strikes",
        Entity(EntityKind(strikes.entity_kind), strikes.entity_id),
        FailureClass.UNRESOLVED,
        "strikes",
    )
    found = subject.below(limit, strikes.count, text)
    return found if found.status is Status.FAIL else replace(found, failure_class=None)


CHECK = Check(
    name="strikes",
    about="how often this node and its parts failed recently, by the store's history",
    probe=Probe(
        "strikes",
        NoProbe,
        lambda _machine, _budget_s: NoProbe(),
        sources=("the strikes that the store last reported to this node",),
    ),
    parameters=Parameters,
    judge=judge,
)
