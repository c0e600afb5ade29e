"""Why a run went on, stopped or left a node out: a decision for a person to read, and for programs.

What is on record of it was written by an agent of the run's user, so it is read as one reads a
stranger's JSON: what is not as it should be is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuops.incident.decision import NodeReport, PastFailure, ReportKind
from gpuops.model import Json, Role
from gpuops.report.render.layout import LABEL_WIDTH, labelled, one_line, time_of_day
from gpuops.store.queries.run_queries import DecisionRow, ExclusionRow
from gpuops.units import US_PER_S, format_seconds, iso_utc

REPORTS_MAX = 16
_PARSE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
_VERDICT_TEXT = {
    "restart": "restart",
    "requeue": "stop, and ask to be queued again",
    "fail": "stop: nothing is left to try",
    "stop": "stop for good: it would fail again",
}


def decision_block(row: DecisionRow, *, indent: int = 2) -> list[str]:
    """Return the lines that say what was decided, by whom, by which rule and on which reports."""

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
    left_out = [f"{node}: {why}" for node, why in sorted(_excluded(row.body).items())]
    lines += _listed(line, "left out", left_out)
    lines += _listed(line, "doubted", _suspected(row))
    lines += _listed(line, "nodes", [_nodes(row.body)])
    lines += _listed(line, "budget", [_budget(row)])
    lines += _listed(line, "site", [f"{row.note} (the site's own decision)"] if row.note else [])
    # Not wrapped: a path is there to be copied.
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
    """Return a node that the run goes on without."""
    return {
        "node": row.excluded,
        "since": iso_utc(row.t_us),
        "attempt": row.ordinal,
        "reason": row.reason,
        "told_by": row.told_by,
    }


def exclusion_lines(rows: Sequence[ExclusionRow]) -> list[str]:
    """Return a line for each node that the run goes on without."""
    lines = [
        f"{row.excluded} since {time_of_day(row.t_us)}"
        f"{'' if row.ordinal is None else f', after attempt {row.ordinal}'}: {row.reason}"
        for row in rows
    ]
    return [labelled("left out" if n == 0 else "", text) for n, text in enumerate(lines)]


def log_paths(row: DecisionRow) -> list[str]:
    """Return the logs of the failure that was decided on, and of those before that were like it."""
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
    text = f"{report.node} said {report.kind.value.replace('_', ' ')}"
    if report.kind in (ReportKind.STOPPED, ReportKind.DONE):
        return text
    roots = (end for end in report.ends if end.role is Role.ROOT)
    first = next(roots, next(iter(report.ends), None))
    detail = report.how if first is None or not first.summary else first.summary
    step = "" if report.last_step is None else f", at step {report.last_step}"
    blame = "; it speaks against the node" if report.blames_node else ""
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
    """Return the nodes that were doubted and are not left out; of the others `_excluded` tells."""
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
    # The last of them may have had no restart: the run ended with it.
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
