"""Has this node, or a part of it, failed again and again of late?

Few nodes and parts fail far more often than the rest (the lemons of arXiv 2410.21680). Their past
is a sign and no verdict, so it warns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe
from gpuops.host.node_state import Repair, Strikes
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import iso_utc


@dataclass(frozen=True, slots=True)
class NoProbe:
    """What the machine is asked: strikes are of the past, and the node's state has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``count``: strikes of the last 28 days and since the last repair."""

    count: CheckLimit


def judge(facts: NoProbe, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return one finding for each part with strikes that no repair answered."""
    del facts
    standing = [item for item in context.strikes if not _is_repaired(item, context)]
    if not standing:
        why = "all were repaired since" if context.strikes else "the store told of none"
        message = f"no strikes against this node or its parts: {why}"
        return [Finding(check="strikes", entity=context.node, status=Status.SKIP, message=message)]
    return [_judged(item, parameters.count) for item in standing]


def _is_repaired(strikes: Strikes, context: JudgeContext) -> bool:
    return any(repair.t_us >= strikes.last_us for repair in _repairs_of(strikes, context))


def _repairs_of(strikes: Strikes, context: JudgeContext) -> Iterable[Repair]:
    about = {
        (strikes.entity_kind, strikes.entity_id),
        (EntityKind.NODE.value, context.node.id),
    }
    return (item for item in context.repairs if (item.entity_kind, item.entity_id) in about)


def _judged(strikes: Strikes, limit: CheckLimit) -> Finding:
    status = limit.ceiling(strikes.count)
    noun = "strike" if strikes.count == 1 else "strikes"
    return Finding(
        check="strikes",
        entity=Entity(EntityKind(strikes.entity_kind), strikes.entity_id),
        status=status,
        value=strikes.count,
        unit="strikes",
        threshold=limit.text("<"),
        source=limit.source,
        message=f"{strikes.count} {noun} ({strikes.why}), the last at {iso_utc(strikes.last_us)}",
        # How often it failed; what the failure was, each of its incidents says.
        failure_class=FailureClass.UNRESOLVED if status is Status.FAIL else None,
    )


CHECK = Check(
    name="strikes",
    about="how often this node and its parts failed of late, by the store's history",
    probe=Probe(
        "strikes",
        NoProbe,
        lambda _machine, _budget_s: NoProbe(),
        sources=("the strikes that the store last told this node",),
    ),
    parameters=Parameters,
    judge=judge,
)
