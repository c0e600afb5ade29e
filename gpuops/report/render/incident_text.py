"""An incident, and the decision that followed, as text and as JSON.

A decision's record was written by an agent of the run's user, so it is untrusted JSON: malformed
fields are omitted.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from gpuops.incident.decision import NodeReport, PastFailure, ReportKind
from gpuops.model import Entity, EntityKind, Evidence, Incident, IncidentState, Json, Role
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
from gpuops.store.queries.run_queries import DecisionRow, ExclusionRow
from gpuops.units import US_PER_S, format_seconds, iso_utc

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
        row("known", f"{confidence_text(incident)}; {incident.culprit_how or 'reason unknown'}"),
        row("culprits", culprit_names(incident.culprits) or "none"),
        row("seen", _times(incident)),
        row("cost", _incident_cost(incident)),
        row("actions" if incident.run_id else "advice", _actions(incident)),
        row("state", state_text(incident)),
    ]
    recovery = [item for item in incident.evidence if item.role is Role.RECOVERY]
    lines += [row("recovery" if n == 0 else "", item.text) for n, item in enumerate(recovery)]
    evidence = [item for item in incident.evidence if item.role is not Role.RECOVERY]
    lines += _evidence(evidence, indent, full=full)
    lines.append(row("runbook", f"gpuops runbook {incident.failure_class.value}"))
    return lines


def incident_list(incidents: Sequence[Incident], *, width: int | None = None) -> str:
    """Return two lines for each incident: sortable columns, and the title.

    In less than `WIDTH` columns, its run and its cost are before the title.
    """
    columns = min(width or WIDTH, WIDTH)
    is_narrow = columns < WIDTH
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
    head = ("id", "first seen", "state", "failure class", "", "")
    shown = [row[:4] if is_narrow else row for row in (head, *rows)]
    table_lines = table(shown[0], shown[1:], width=columns).splitlines()
    texts = [
        f"{run}, {cost}: {item.title}" if is_narrow else item.title
        for item, (*_, run, cost) in zip(incidents, rows, strict=True)
    ]
    titles = [f"{' ' * 10}{truncate(text, columns - 10)}" for text in texts]
    pairs = zip(table_lines[1:], titles, strict=True)
    return "\n".join([table_lines[0], *(line for pair in pairs for line in pair)])


def confidence_text(incident: Incident) -> str:
    """Return how well the cause is known and on which side it is, as text."""
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
        return f"{named} (runbook)"
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
            # Not wrapped, so that the path can be copied.
            lines.append(f"{' ' * (indent + LABEL_WIDTH)}log {one_line(item.path)}")
        lines_shown = item.lines if full else item.lines[-LINES_MAX:]
        lines += quoted(lines_shown, indent + LABEL_WIDTH)
    if len(items) > count:
        more = f"{len(items) - count} more; gpuops incident show lists all"
        lines.append(labelled("", more, indent))
    return lines


REPORTS_MAX = 16
_PARSE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
_VERDICT_TEXT = {
    "restart": "restart",
    "requeue": "stop and request a requeue",
    "fail": "stop: the budget is spent",
    "stop": "stop, do not requeue: it would fail again",
}


def decision_block(row: DecisionRow, *, indent: int = 2) -> list[str]:
    """Return the lines of a decision: the action, the agent, the rule, the reports."""

    def line(label: str, text: str) -> str:
        return labelled(label, text, indent)

    lines = [
        line(
            "decided",
            f"{_verdict_line(row)}, at {time_of_day(row.t_us)} by the agent on {row.node}",
        ),
        line("because", f"{row.reason} (rule {row.rule})"),
    ]
    lines += _numbered(line, "reports", _reports(row))
    excluded = [f"{node}: {why}" for node, why in sorted(_excluded(row.body).items())]
    lines += _listed(line, "excluded", excluded)
    lines += _listed(line, "suspect", _suspected(row))
    lines += _listed(line, "nodes", [_nodes(row.body)])
    lines += _listed(line, "budget", [_budget(row)])
    lines += _listed(line, "site", [f"{row.note} (the site's own decision)"] if row.note else [])
    # Not wrapped, so that the path can be copied.
    paths = log_paths(row)
    lines += [
        f"{' ' * indent}{'logs' if n == 0 else '':<{LABEL_WIDTH}}{one_line(p)}"
        for n, p in enumerate(paths)
    ]
    return lines


def decision_json(row: DecisionRow) -> Json:
    """Return a decision with its inputs; unknown values are null."""
    body = row.body
    return {
        "attempt": row.ordinal,
        "decided": iso_utc(row.t_us),
        "decided_by": row.node,
        "verdict": row.verdict,
        "rule": row.rule,
        "reason": row.reason,
        "exit_code": row.exit_code,
        "backoff_seconds": None if row.backoff_us is None else row.backoff_us / US_PER_S,
        "excluded": _excluded(body),
        "restarts_used": row.restarts_used,
        "restarts_max": row.restarts_max,
        "note": row.note,
        "reports": body.get("reports", []),
        "reports_total": body.get("reports_total"),
        "cluster": body.get("cluster"),
        "history": body.get("history", []),
        "log_paths": log_paths(row),
    }


def exclusion_json(row: ExclusionRow) -> Json:
    """Return an excluded node of the run."""
    return {
        "node": row.excluded,
        "since": iso_utc(row.t_us),
        "attempt": row.ordinal,
        "reason": row.reason,
        "told_by": row.told_by,
    }


def exclusion_lines(rows: Sequence[ExclusionRow]) -> list[str]:
    """Return a line for each excluded node."""
    lines = [
        f"{row.excluded} since {time_of_day(row.t_us)}"
        f"{'' if row.ordinal is None else f', after attempt {row.ordinal}'}: {row.reason}"
        for row in rows
    ]
    return [labelled("excluded" if n == 0 else "", text) for n, text in enumerate(lines)]


def log_paths(row: DecisionRow) -> list[str]:
    """Return the logs of the failure that was decided on, and of earlier ones like it."""
    decision = row.body.get("decision")
    failure = _parse_failure(decision.get("failure") if isinstance(decision, Mapping) else None)
    if failure is None:
        return []
    earlier = [_parse_failure(item) for item in _as_list(row.body.get("history"))]
    similar_paths = [
        past.log_path
        for past in earlier
        if past is not None
        and failure.signature is not None
        and past.signature == failure.signature
    ]
    paths = [path for path in (failure.log_path, *reversed(similar_paths)) if path]
    return list(dict.fromkeys(paths))


def _verdict_line(row: DecisionRow) -> str:
    text = _VERDICT_TEXT.get(row.verdict, row.verdict)
    if row.exit_code is not None:
        text += f" (exit code {row.exit_code})"
    if row.verdict == "restart" and row.backoff_us:
        text += f" after {format_seconds(row.backoff_us / US_PER_S)}"
    return text


def _reports(row: DecisionRow) -> Iterator[str]:
    items = _as_list(row.body.get("reports"))
    reports = [report for item in items if (report := _parse_report(item)) is not None]
    for report in reports[:REPORTS_MAX]:
        yield _report_line(report)
    total = row.body.get("reports_total")
    count = total if isinstance(total, int) else len(reports)
    if count > min(len(reports), REPORTS_MAX):
        yield f"and {count - min(len(reports), REPORTS_MAX)} more"


def _report_line(report: NodeReport) -> str:
    text = f"{report.node} reported {report.kind.value.replace('_', ' ')}"
    if report.kind in (ReportKind.STOPPED, ReportKind.DONE):
        return text
    roots = (end for end in report.ends if end.role is Role.ROOT)
    first = next(roots, next(iter(report.ends), None))
    detail = report.how if first is None or not first.summary else first.summary
    step = "" if report.last_step is None else f", at step {report.last_step}"
    blame = "; it blames the node" if report.blames_node else ""
    return f"{text} ({report.failure_class.value}{step}){f': {detail}' if detail else ''}{blame}"


def _nodes(body: Mapping[str, Any]) -> str:
    cluster = body.get("cluster")
    if not isinstance(cluster, Mapping):
        return ""
    members = [str(node) for node in _as_list(cluster.get("members"))]
    live = {str(node) for node in _as_list(cluster.get("live"))}
    gone = [node for node in members if node not in live]
    spare = [node for node in sorted(live) if node not in members]
    text = f"{len(members)} members, {len(live)} alive"
    text += f"; gone: {', '.join(gone[:8])}" if gone else ""
    return text + (f"; spare: {', '.join(spare[:8])}" if spare else "")


def _suspected(row: DecisionRow) -> list[str]:
    """Return the nodes that were suspected and are not excluded; for the others see `_excluded`."""
    cluster = row.body.get("cluster")
    if not isinstance(cluster, Mapping) or not isinstance(cluster.get("doubted"), Mapping):
        return []
    kept_nodes = set(map(str, _as_list(cluster.get("live")))) - _excluded(row.body).keys()
    suffix = "; it cannot be spared" if row.verdict == "restart" else ""
    return [
        f"{node}: {why}{suffix}"
        for node, why in cluster["doubted"].items()
        if str(node) in kept_nodes
    ]


def _budget(row: DecisionRow) -> str:
    if row.restarts_used is None or row.restarts_max is None:
        return ""
    budget = row.body.get("budget")
    window_s = budget.get("window_s") if isinstance(budget, Mapping) else None
    within = f" within {format_seconds(window_s)}" if isinstance(window_s, int | float) else ""
    left = max(row.restarts_max - row.restarts_used, 0)
    noun = "failure" if row.restarts_used == 1 else "failures"
    # The last of them may have ended the run without a restart.
    counted = f"{row.restarts_used} {noun} counted{within}"
    return f"{counted}, {row.restarts_max} restarts allowed, {left} left"


def _numbered(line: Any, label: str, texts: Iterator[str]) -> list[str]:  # noqa: ANN401 a function
    return _listed(line, label, [f"{n}. {text}" for n, text in enumerate(texts, start=1)])


def _listed(line: Any, label: str, texts: Sequence[str]) -> list[str]:  # noqa: ANN401 a function
    present = [text for text in texts if text]
    return [line(label if n == 0 else "", text) for n, text in enumerate(present)]


def _excluded(body: Mapping[str, Any]) -> dict[str, str]:
    decision = body.get("decision")
    exclude = decision.get("exclude") if isinstance(decision, Mapping) else None
    if not isinstance(exclude, Mapping):
        return {}
    return {str(node): str(why) for node, why in exclude.items()}


def _parse_report(item: object) -> NodeReport | None:
    try:
        return NodeReport.from_json(item) if isinstance(item, Mapping) else None
    except _PARSE_ERRORS:
        return None


def _parse_failure(item: object) -> PastFailure | None:
    try:
        return PastFailure.from_json(item) if isinstance(item, Mapping) else None
    except _PARSE_ERRORS:
        return None


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
