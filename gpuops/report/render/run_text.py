"""A run's report and its status as text: 100 columns, the summary in the first three lines."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuops.hostlist import compress
from gpuops.model import Incident
from gpuops.report.advice import advice
from gpuops.report.render.incident_text import (
    confidence_text,
    cost_text,
    exclusion_lines,
    incident_block,
)
from gpuops.report.render.layout import (
    WIDTH,
    count_noun,
    date_time,
    labelled,
    one_line,
    short_id,
    table,
    time_of_day,
    truncate,
)
from gpuops.report.run_view import CheckpointView, RunNodeView, RunView
from gpuops.report.time_breakdown import LOST_PHASES, AgentLiveness, RunBreakdown, TimePhase
from gpuops.store.queries.run_queries import AttemptRow
from gpuops.units import format_seconds, format_step
from gpuops.wire.ring import StepSource

INCIDENTS_MAX = 10
NODES_CHARS = 16


def report_text(breakdown: RunBreakdown) -> str:
    """Return the complete report."""
    blocks = [
        [
            headline(breakdown),
            labelled("cost", cost_line(breakdown)),
            labelled("blame", blame(breakdown)),
        ],
        _header(breakdown),
        ["attempts", *_indented(_attempts(breakdown))],
        exclusion_lines(breakdown.exclusions),
        *([*incident_block(item)] for item in breakdown.incidents[:INCIDENTS_MAX]),
        _omitted_incidents(breakdown.incidents),
        ["time", *_indented(_time(breakdown))],
        [labelled("advice" if i == 0 else "", text) for i, text in enumerate(advice(breakdown))],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def headline(breakdown: RunBreakdown) -> str:
    """Return what happened, in one line."""
    run = breakdown.run
    if breakdown.is_live:
        return truncate(f"run {run.name} ({short_id(run.id)}): {live_status(breakdown)}", WIDTH)
    restarts = max(len(breakdown.attempts) - 1, 0)
    times = f"after {count_noun(restarts, 'restart')}" if restarts else "without a restart"
    outcome = run.outcome or "ended"
    nodes = sorted({node for attempt in breakdown.attempts for node in attempt.row.nodes})
    where = f"on {', '.join(nodes[:3])}{' …' if len(nodes) > 3 else ''}" if nodes else ""
    text = (
        f"run {run.name} ({short_id(run.id)}) {outcome} {times} in "
        f"{format_seconds(breakdown.wall_s)}"
    )
    return truncate(f"{text} {where}".rstrip(), WIDTH)


def live_status(breakdown: RunBreakdown) -> str:
    """Return the state of a run without an end on record, as far as known here."""
    last_event = date_time(breakdown.end_us)
    if breakdown.agent is AgentLiveness.GONE:
        return f"the agent is gone (killed?), last event at {last_event}"
    if breakdown.agent is AgentLiveness.RUNNING:
        return f"still running; last event at {last_event}"
    return f"no end on record; last event at {last_event}"


def cost_line(breakdown: RunBreakdown) -> str:
    """Return what the failures cost, and the share of productive time."""
    seconds = breakdown.lost
    parts = ", ".join(
        f"{p.value} {format_seconds(seconds[p])}" for p in LOST_PHASES if seconds[p] > 0
    )
    if parts:
        lost = f"{format_seconds(breakdown.lost_s)} lost to failures ({parts})"
    elif breakdown.has_failed:
        lost = "the cost of the failure is not known"
    else:
        lost = "nothing lost so far on record" if breakdown.is_live else "nothing lost"
    return f"{lost}; ETTR {ettr_text(breakdown)}"


def ettr_text(breakdown: RunBreakdown) -> str:
    """Return the ratio with two decimals, as a range where some time is unknown."""
    low, high = breakdown.ettr_alloc, breakdown.ettr_alloc_max
    if low is None or high is None:
        return "unknown (no time passed)"
    if high - low < 0.005:
        return f"{low:.2f}"
    unknown = format_seconds(breakdown.seconds[TimePhase.UNKNOWN])
    return f"between {low:.2f} and {high:.2f} ({unknown} unknown)"


def blame(breakdown: RunBreakdown) -> str:
    """Return the culprits; a repeated failure is listed once."""
    if not breakdown.incidents:
        if breakdown.is_live or breakdown.has_failed:
            return "not known: no incident on record"
        return "nobody: no failure"
    counts = Counter(map(_blame_text, breakdown.incidents))
    parts = [text if n == 1 else f"{n} times: {text}" for text, n in counts.most_common(3)]
    if len(counts) > 3:
        parts.append(f"and {len(counts) - 3} more")
    return "; ".join(parts)


def _blame_text(incident: Incident) -> str:
    if incident.failure_class.is_request:
        return f"nobody: {incident.title}"
    nobody = "" if incident.culprits else "nobody found: "
    return f"{nobody}{incident.title} ({incident.failure_class.value}, {confidence_text(incident)})"


def _header(breakdown: RunBreakdown) -> list[str]:
    run = breakdown.run
    worlds = sorted({a.row.world_size for a in breakdown.attempts if a.row.world_size is not None})
    nodes = sorted({node for a in breakdown.attempts for node in a.row.nodes})
    jobs = sorted({str(a.row.slurm_job_id) for a in breakdown.attempts if a.row.slurm_job_id})
    ended = date_time(run.ended_us) if run.ended_us is not None else "an unknown end"
    facts = [
        ("run", f"{run.name}  id {run.id}"),
        ("command", " ".join(run.command)),
        ("who", f"{run.user} on cluster {run.cluster}{f', Slurm job {jobs[0]}' if jobs else ''}"),
        ("where", f"{', '.join(nodes) or 'unknown node'}; {_world_sizes(worlds)}"),
        ("when", f"{date_time(run.created_us)} to {ended}"),
        ("ended", f"{run.outcome or 'no end on record'}{_exit_text(breakdown)}"),
        ("with", f"torch {run.torch_version or 'unknown'}; at most {_restarts(run.max_restarts)}"),
        ("files", run.run_dir),
        (
            "ETTR",
            (
                f"{ettr_text(breakdown)} = productive / wall time from launch to end, over all "
                "attempts; queue time is excluded (ETTR_alloc, after arXiv 2410.21680)"
            ),
        ),
    ]
    return [labelled(label, text) for label, text in facts]


def _world_sizes(worlds: Sequence[int]) -> str:
    if len(worlds) == 1:
        return count_noun(worlds[0], "rank")
    return f"{' then '.join(map(str, worlds))} ranks" if worlds else "number of ranks unknown"


def _restarts(limit: int | None) -> str:
    return "an unknown number of restarts" if limit is None else count_noun(limit, "restart")


def _exit_text(breakdown: RunBreakdown) -> str:
    run = breakdown.run
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    return f"{code}{f' ({run.reason})' if run.reason else ''}"


def _attempts(breakdown: RunBreakdown) -> str:
    names = {node for item in breakdown.attempts for node in item.row.nodes}
    shows_nodes = len(names) > 1
    rows = []
    for item in breakdown.attempts:
        row = item.row
        cells = (
            str(row.ordinal),
            row.outcome or ("running" if breakdown.agent is AgentLiveness.RUNNING else "no end"),
            time_of_day(row.start_us),
            _duration(row.start_us, row.end_us),
            steps_text(row),
            "?" if item.redone_steps is None else str(item.redone_steps or "-"),
        )
        nodes = (_nodes(row.nodes),) if shows_nodes else ()
        ended = how_ended(breakdown, row.ordinal, row.outcome, row.exit_code)
        rows.append((*cells, *nodes, ended))
    head = ["#", "outcome", "start", "duration", "steps", "redone", "how it ended"]
    if shows_nodes:
        head.insert(-1, "nodes")
    return table(head, rows, right=(0, 3, 5), width=WIDTH - 2) if rows else "none on record"


def _nodes(nodes: Sequence[str]) -> str:
    """Return nodes as Slurm writes them (``n[1-3]``), else their number."""
    text = compress(nodes) if nodes else "-"
    return text if len(text) <= NODES_CHARS else count_noun(len(nodes), "node")


def _duration(start_us: int | None, end_us: int | None) -> str:
    return "-" if start_us is None or end_us is None else format_seconds((end_us - start_us) / 1e6)


_COUNTED = StepSource.COUNTED.name.lower()


def steps_text(row: AttemptRow) -> str:
    """Return ``"1 to 57"``, or the count or the heartbeats if step numbers are unknown."""
    if row.steps_first is not None and row.steps_last is not None:
        return f"{row.steps_first} to {row.steps_last}"
    if row.beats and row.step_source == _COUNTED:
        return f"{row.beats} counted"
    return f"unknown ({row.beats} beats)" if row.beats else "none seen"


def how_ended(
    breakdown: RunBreakdown, ordinal: int, outcome: str | None, exit_code: int | None
) -> str:
    """Return how an attempt ended: its incident's title, else its outcome."""
    for incident in breakdown.incidents:
        if incident.attempt == ordinal:
            return incident.title
    if outcome == "completed":
        return "every rank finished"
    if outcome is None:
        return "-"
    return "no incident on record" + ("" if exit_code is None else f", exit code {exit_code}")


def _omitted_incidents(incidents: Sequence[Incident]) -> list[str]:
    rest = incidents[INCIDENTS_MAX:]
    if not rest:
        return []
    lost = sum(item.lost_seconds for item in rest)
    return [f"and {len(rest)} more incidents, {cost_text({'together': lost})}: gpuops incident ls"]


def _time(breakdown: RunBreakdown) -> str:
    wall_s, lost = breakdown.wall_s, breakdown.lost
    shown = [
        (phase, seconds)
        for phase, seconds in breakdown.seconds.items()
        if seconds > 0 or phase not in _OPTIONAL_PHASES
    ]
    rows = [
        (p.value, f"{s:.2f}", _percent(s, wall_s), _lost_text(lost.get(p, 0.0)), _PHASE_MEANING[p])
        for p, s in shown
    ]
    lost_s = _lost_text(breakdown.lost_s)
    rows.append(("wall", f"{wall_s:.2f}", _percent(wall_s, wall_s), lost_s, "launch to end"))
    head = ("phase", "seconds", "%", "lost", "what it is")
    return table(head, rows, right=(1, 2, 3), width=WIDTH - 2)


def _percent(seconds: float, wall_s: float) -> str:
    return f"{100 * seconds / wall_s:.1f}" if wall_s > 0 else "-"


def _lost_text(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds > 0 else "-"


# Phases of a recovery are not shown for a run that never failed.
_OPTIONAL_PHASES = frozenset(
    {
        TimePhase.DECIDE,
        TimePhase.RENDEZVOUS,
        TimePhase.RESTORE,
        TimePhase.RESTART,
        TimePhase.UNKNOWN,
    }
)
_PHASE_MEANING = {
    TimePhase.INIT: "start of the workers to their first step, or failure",
    TimePhase.PRODUCTIVE: "steps made for the first time",
    TimePhase.DETECT: "last progress before a failure to the first notice of it",
    TimePhase.DECIDE: "stopping the workers, gathering reports, deciding",
    TimePhase.RENDEZVOUS: "preflight check, back-off, rendezvous, until new workers start",
    TimePhase.RESTORE: "reading the checkpoint",
    TimePhase.RESTART: "from a failure to the next first step, not split further",
    TimePhase.REDO: "steps made again, up to the highest step of earlier attempts",
    TimePhase.OTHER: "after the last step: saving, teardown, exit of the launcher",
    TimePhase.UNKNOWN: "unknown: steps, their numbers or the end were not recorded",
}


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


NODES_MAX = 40
LABEL_WIDTH = 12
# An agent sends a heartbeat every second; `gpuops.control` suspects it after six.
SUSPECT_S = 6.0


def status_view(
    view: RunView, *, rate: float | None = None, silent_s: dict[str, float] | None = None
) -> RenderableType:
    """Return *view* for the terminal.

    Args:
        view: The state of the run.
        rate: Steps a second since the last poll, None if unknown.
        silent_s: For each node the seconds since its agent's heartbeat last changed.
    """
    parts: list[RenderableType] = [_labelled(_head(view))]
    if view.step is not None or rate is not None or view.step_s is not None:
        parts.append(_progress(view, rate))
    if view.checkpoint is not None and (line := _checkpoint(view.checkpoint)):
        parts.append(_labelled([line]))
    if view.nodes and view.is_over and view.source == "file":
        parts.append(_labelled([f"nodes       {one_line(', '.join(n.node for n in view.nodes))}"]))
    elif view.nodes:
        parts.append(_node_lines(view.nodes, silent_s or {}))
    if tail := _tail(view):
        parts.append(_labelled(tail))
    return Group(*parts)


def _labelled(lines: Sequence[str]) -> Table:
    """Return *lines* after their labels of `LABEL_WIDTH` characters, long ones wrapped."""
    table = Table.grid()
    table.add_column(width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(Text(line[:LABEL_WIDTH].rstrip()), Text(line[LABEL_WIDTH:]))
    return table


def _head(view: RunView) -> list[str]:
    generation = "?" if view.generation is None else str(view.generation)
    since = "" if view.phase_s is None else f" for {format_seconds(view.phase_s)}"
    if since and view.is_over and view.source in ("file", "store"):
        since = f" {format_seconds(view.phase_s or 0.0)} ago"
    code = "" if view.exit_code is None else f", exit code {view.exit_code}"
    lines = [
        f"run         {truncate(view.name, 80)} ({short_id(one_line(view.run_id))})",
        f"phase       {one_line(view.phase)}{since}, generation {generation}{code}",
    ]
    if view.reason:
        lines.append(f"why         {one_line(view.reason)}")
    return lines


def _progress(view: RunView, rate: float | None) -> RenderableType:
    """Return the step and its rate; the total number of steps is unknown."""
    rate_text = "" if rate is None else f", {rate:.2f} steps/s"
    step_text = "" if view.step_s is None else f", {format_step(view.step_s)} a step"
    row = Table.grid(padding=(0, 1))
    is_moving = rate is not None and rate > 0
    row.add_row(
        Text(f"steps       {'?' if view.step is None else view.step}{rate_text}{step_text}"),
        ProgressBar(total=None, pulse=is_moving, width=24) if is_moving else Text(""),
    )
    return row


def _checkpoint(checkpoint: CheckpointView) -> str:
    """Return where the job would resume from; "" if its script saves nothing."""
    parts = []
    if checkpoint.step is not None:
        age = "" if checkpoint.age_s is None else f", {format_seconds(checkpoint.age_s)} ago"
        where = (
            f" in memory{_copies(checkpoint)}"
            if checkpoint.tier == "memory"
            else f" {one_line(checkpoint.tier)}"
        )
        parts.append(f"step {checkpoint.step}{where if checkpoint.tier else ''}{age}")
    if checkpoint.persisted_step is not None:
        parts.append(f"step {checkpoint.persisted_step} persisted")
    if checkpoint.verified_step is not None:
        parts.append(f"step {checkpoint.verified_step} verified")
    if checkpoint.skipped:
        parts.append(f"{checkpoint.skipped} skipped")
    if checkpoint.keeper == "gone":
        parts.append("its keeper is gone: nothing is saved until another one has started")
    return f"checkpoint  {'; '.join(parts)}" if parts else ""


def _copies(checkpoint: CheckpointView) -> str:
    if not checkpoint.copies:
        return ""
    return f" ({checkpoint.copies} {'copy' if checkpoint.copies == 1 else 'copies'})"


def _node_lines(nodes: Sequence[RunNodeView], silent_s: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    has_slowdown = any(node.slowdown is not None for node in nodes)
    last = ("agent", "own time") if has_slowdown else ("agent",)
    for name in ("node", "node rank", "ranks", "step", "heartbeat", *last):
        table.add_column(name, justify="left", no_wrap=True)
    for node in nodes[:NODES_MAX]:
        table.add_row(
            Text(truncate(node.node, 40)),
            "-" if node.group_rank is None else str(node.group_rank),
            _ranks(node),
            _step_text(node),
            "-" if node.silent_s is None else f"{format_seconds(node.silent_s)} ago",
            _agent_text(silent_s.get(node.node)),
            *(["-" if node.slowdown is None else f"{node.slowdown:.2f}x"] if has_slowdown else ()),
        )
    if len(nodes) > NODES_MAX:
        table.add_row(f"and {len(nodes) - NODES_MAX} more", "", "", "", "", "")
    return table


def _step_text(node: RunNodeView) -> str:
    if node.step is None and node.steps_counted is not None:
        return f"{node.steps_counted} counted"
    return "-" if node.step is None else str(node.step)


def _ranks(node: RunNodeView) -> str:
    if node.ranks is None:
        return "-"
    if node.first_rank is None or node.ranks == 0:
        return str(node.ranks)
    last = node.first_rank + node.ranks - 1
    return str(last) if node.ranks == 1 else f"{node.first_rank}-{last}"


def _agent_text(silent_s: float | None) -> str:
    if silent_s is None:
        return ""
    return "ok" if silent_s < SUSPECT_S else f"silent for {format_seconds(silent_s)}"


def _tail(view: RunView) -> list[str]:
    lines = []
    if view.spares:
        lines.append(f"spare       {one_line(', '.join(view.spares))}")
    for number, (node, why) in enumerate(sorted(view.excluded.items())):
        lines.append(
            f"{'excluded' if number == 0 else '':<{LABEL_WIDTH}}{one_line(node)}: {one_line(why)}"
        )
    for number, (node, why) in enumerate(view.suspected.items()):
        suspect_text = (
            f"{one_line(node)}: {one_line(why)}; a restart excludes it, if it can be spared"
        )
        lines.append(f"{'suspect' if number == 0 else '':<{LABEL_WIDTH}}{suspect_text}")
    if view.restarts_used is not None:
        most = "" if view.restarts_max is None else f" of {view.restarts_max}"
        lines.append(f"restarts    {view.restarts_used}{most}")
    if view.decision is not None:
        decision = view.decision
        verdict, rule = one_line(str(decision.get("verdict"))), one_line(str(decision.get("rule")))
        why = one_line(str(decision.get("reason")))
        by_rule = "" if rule == verdict else f" ({rule})"
        because = "" if why == one_line(view.reason) else f": {why}"
        lines.append(f"decided     {verdict}{by_rule}{because}")
    lines += [f"note        {one_line(note)}" for note in view.notes]
    return lines
