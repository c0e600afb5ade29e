"""An incident for a person to read."""

from collections.abc import Mapping, Sequence
from itertools import islice

from gpuops.model import Entity, EntityKind, Evidence, Incident, IncidentState, Role
from gpuops.report.render.layout import (
    LABEL_WIDTH,
    WIDTH,
    date_time,
    labelled,
    one_line,
    quoted,
    short_id,
    table,
    time_of_day,
    truncate,
)
from gpuops.units import format_seconds

EVIDENCE_MAX = 12
LINES_MAX = 6
_PHASES = ("detect", "decide", "rendezvous", "init", "restore", "restart", "redo")


def incident_block(incident: Incident, *, indent: int = 2, full: bool = False) -> list[str]:
    """Return the lines of one incident: cause, culprits, cost, evidence, what to read next.

    Without *full* only the first `EVIDENCE_MAX` pieces of evidence are shown, and of each the
    last `LINES_MAX` log lines.
    """

    def row(label: str, text: str) -> str:
        return labelled(label, text, indent)

    lines = [
        f"incident {short_id(incident.id)}  {incident.failure_class.value}",
        row("cause", incident.title),
        row("known", f"{confidence_text(incident)}; {incident.culprit_how or 'not said how'}"),
        row("culprits", culprit_names(incident.culprits) or "none"),
        row("seen", _times(incident)),
        row("cost", _incident_cost(incident)),
        row("actions" if incident.run_id else "advice", _actions(incident)),
        row("state", state_text(incident)),
    ]
    recovery = [item for item in incident.evidence if item.role is Role.RECOVERY]
    lines += [row("went on" if n == 0 else "", item.text) for n, item in enumerate(recovery)]
    evidence = [item for item in incident.evidence if item.role is not Role.RECOVERY]
    lines += _evidence(evidence, indent, full=full)
    lines.append(row("runbook", f"gpuops runbook {incident.failure_class.value}"))
    return lines


def incident_list(incidents: Sequence[Incident]) -> str:
    """Return two lines an incident: what a script would sort by, and what happened."""
    rows = [
        (
            short_id(item.id),
            date_time(item.first_us),
            item.state.value,
            item.failure_class.value,
            f"run {short_id(item.run_id)}" if item.run_id else "no run",
            f"lost {format_seconds(item.lost_seconds)}" if item.lost_s else "cost not known",
        )
        for item in incidents
    ]
    table_lines = table(("id", "first seen", "state", "failure class", "", ""), rows).splitlines()
    titles = [f"{' ' * 10}{truncate(item.title, WIDTH - 10)}" for item in incidents]
    pairs = zip(table_lines[1:], titles, strict=True)
    return "\n".join([table_lines[0], *(line for pair in pairs for line in pair)])


def confidence_text(incident: Incident) -> str:
    """Return how well the cause is known and whose failure it is, in words."""
    return f"{incident.confidence.value.replace('_', ' ')}, side: {incident.side.value}"


def state_text(incident: Incident) -> str:
    """Return the state, with what resolved it."""
    if incident.resolution is None:
        return incident.state.value
    return (
        f"{incident.state.value}, resolved at {time_of_day(incident.resolved_us)}: "
        f"{incident.resolution}"
    )


def culprit_names(culprits: Sequence[Entity]) -> str:
    """Return ``"rank 1, node n041"``; many ranks are named as a range."""
    ranks = [item.id for item in culprits if item.kind is EntityKind.RANK]
    others = [str(item) for item in culprits if item.kind is not EntityKind.RANK]
    if len(ranks) > 4:
        named = [f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"]
    else:
        named = [f"rank {rank}" for rank in ranks]
    return ", ".join([*named, *others])


def cost_text(lost_s: Mapping[str, float]) -> str:
    """Return ``"12.3 s: detect 0.40 s, restart 5.10 s"``, or that it is not known."""
    if not lost_s:
        return "not known yet"
    names = [*(p for p in _PHASES if p in lost_s), *sorted(set(lost_s) - set(_PHASES))]
    parts = ", ".join(f"{name} {format_seconds(lost_s[name])}" for name in names)
    return f"{format_seconds(sum(lost_s.values()))}: {parts}"


def _incident_cost(incident: Incident) -> str:
    nothing = incident.state is IncidentState.CLOSED and not incident.lost_s
    return "nothing" if nothing else cost_text(incident.lost_s)


def _actions(incident: Incident) -> str:
    named = ", ".join(action.value for action in incident.actions)
    if incident.run_id is None and named:
        return f"{named}, says the runbook"
    return named or "none"


def _times(incident: Incident) -> str:
    delay_s = (incident.detected_us - incident.first_us) / 1e6
    return f"{date_time(incident.first_us)}, noticed {format_seconds(delay_s)} later"


def _evidence(items: Sequence[Evidence], indent: int, *, full: bool) -> list[str]:
    count = len(items) if full else EVIDENCE_MAX
    lines = []
    for index, item in enumerate(islice(items, count)):
        label = "evidence" if index == 0 else ""
        lines.append(labelled(label, f"{item.role.value}: {item.text}", indent))
        if item.role is Role.ROOT and item.path:
            # Not wrapped: a path is there to be copied.
            lines.append(f"{' ' * (indent + LABEL_WIDTH)}log {one_line(item.path)}")
        lines_shown = item.lines if full else item.lines[-LINES_MAX:]
        lines += quoted(lines_shown, indent + LABEL_WIDTH)
    if len(items) > count:
        more = f"{len(items) - count} more; gpuops incident show has them all"
        lines.append(labelled("", more, indent))
    return lines
