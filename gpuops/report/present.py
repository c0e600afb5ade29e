"""A run's account for a person to read: 100 columns, the answer in the first three lines."""

from collections import Counter
from collections.abc import Sequence

from gpuops.hostlist import compress
from gpuops.model import Incident
from gpuops.report.account import LOST, Agent, Phase, RunAccount
from gpuops.report.advice import advice
from gpuops.report.decision_text import exclusion_lines
from gpuops.report.incident_text import certainty, cost, incident_block
from gpuops.report.text import WIDTH, clock, count, cut, labelled, moment, short, table
from gpuops.units import format_seconds

INCIDENTS_MAX = 10
NODES_CHARS = 16


def report_text(account: RunAccount) -> str:
    """Return the whole report."""
    blocks = [
        [
            headline(account),
            labelled("cost", cost_line(account)),
            labelled("blame", blame(account)),
        ],
        _header(account),
        ["attempts", *_indented(_attempts(account))],
        exclusion_lines(account.exclusions),
        *([*incident_block(item)] for item in account.incidents[:INCIDENTS_MAX]),
        _more(account.incidents),
        ["time", *_indented(_time(account))],
        [labelled("advice" if i == 0 else "", text) for i, text in enumerate(advice(account))],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def headline(account: RunAccount) -> str:
    """Return what happened, in one line."""
    run = account.run
    if account.is_live:
        return cut(f"run {run.name} ({short(run.id)}): {standing(account)}", WIDTH)
    restarts = max(len(account.attempts) - 1, 0)
    times = f"after {count(restarts, 'restart')}" if restarts else "without a restart"
    outcome = run.outcome or "ended"
    nodes = sorted({node for attempt in account.attempts for node in attempt.row.nodes})
    where = f"on {', '.join(nodes[:3])}{' …' if len(nodes) > 3 else ''}" if nodes else ""
    text = f"run {run.name} ({short(run.id)}) {outcome} {times} in {format_seconds(account.wall_s)}"
    return cut(f"{text} {where}".rstrip(), WIDTH)


def standing(account: RunAccount) -> str:
    """Return how a run without an end on record stands, as far as can be told from here."""
    heard = moment(account.end_us)
    if account.agent is Agent.GONE:
        return f"the agent is gone (killed?), last heard of at {heard}"
    if account.agent is Agent.RUNNING:
        return f"still running; last event at {heard}"
    return f"no end on record; last event at {heard}"


def cost_line(account: RunAccount) -> str:
    """Return what the failures cost, and the share of productive time."""
    seconds = account.lost
    parts = ", ".join(f"{p.value} {format_seconds(seconds[p])}" for p in LOST if seconds[p] > 0)
    if parts:
        lost = f"{format_seconds(account.lost_s)} lost to failures ({parts})"
    elif account.has_failed:
        lost = "what the failure cost is not known"
    else:
        lost = "nothing lost as far as is on record" if account.is_live else "nothing lost"
    return f"{lost}; ETTR {ettr(account)}"


def ettr(account: RunAccount) -> str:
    """Return the ratio with two decimals, as a range where some time is unknown."""
    low, high = account.ettr_alloc, account.ettr_alloc_max
    if low is None or high is None:
        return "unknown (no time passed)"
    if high - low < 0.005:
        return f"{low:.2f}"
    unknown = format_seconds(account.seconds[Phase.UNKNOWN])
    return f"between {low:.2f} and {high:.2f} ({unknown} unknown)"


def blame(account: RunAccount) -> str:
    """Return who was to blame; the same failure over and over is told once."""
    if not account.incidents:
        if account.is_live or account.has_failed:
            return "not known: no incident on record"
        return "nobody: nothing failed"
    told = Counter(map(_blamed, account.incidents))
    parts = [text if n == 1 else f"{n} times: {text}" for text, n in told.most_common(3)]
    if len(told) > 3:
        parts.append(f"and {len(told) - 3} more")
    return "; ".join(parts)


def _blamed(incident: Incident) -> str:
    if incident.failure_class.is_request:
        return f"nobody: {incident.title}"
    nobody = "" if incident.culprits else "nobody found: "
    return f"{nobody}{incident.title} ({incident.failure_class.value}, {certainty(incident)})"


def _header(account: RunAccount) -> list[str]:
    run = account.run
    worlds = sorted({a.row.world_size for a in account.attempts if a.row.world_size is not None})
    nodes = sorted({node for a in account.attempts for node in a.row.nodes})
    jobs = sorted({str(a.row.slurm_job_id) for a in account.attempts if a.row.slurm_job_id})
    ended = moment(run.ended_us) if run.ended_us is not None else "an end that is not on record"
    facts = [
        ("run", f"{run.name}  id {run.id}"),
        ("command", " ".join(run.command)),
        ("who", f"{run.user} on cluster {run.cluster}{f', Slurm job {jobs[0]}' if jobs else ''}"),
        ("where", f"{', '.join(nodes) or 'unknown node'}; {_world(worlds)}"),
        ("when", f"{moment(run.created_us)} to {ended}"),
        ("ended", f"{run.outcome or 'no end on record'}{_exit(account)}"),
        ("with", f"torch {run.torch_version or 'unknown'}; at most {_restarts(run.max_restarts)}"),
        ("files", run.run_dir),
        (
            "ETTR",
            (
                f"{ettr(account)} = productive / wall time from launch to end, over all attempts;"
                " time in a queue is not in it (ETTR_alloc, after arXiv 2410.21680)"
            ),
        ),
    ]
    return [labelled(label, text) for label, text in facts]


def _world(worlds: Sequence[int]) -> str:
    return f"{' then '.join(map(str, worlds))} ranks" if worlds else "number of ranks unknown"


def _restarts(limit: int | None) -> str:
    return "an unknown number of restarts" if limit is None else count(limit, "restart")


def _exit(account: RunAccount) -> str:
    run = account.run
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    return f"{code}{f' ({run.reason})' if run.reason else ''}"


def _attempts(account: RunAccount) -> str:
    names = {node for item in account.attempts for node in item.row.nodes}
    shows_nodes = len(names) > 1
    rows = []
    for item in account.attempts:
        row = item.row
        cells = (
            str(row.ordinal),
            row.outcome or ("running" if account.agent is Agent.RUNNING else "no end"),
            clock(row.start_us),
            _duration(row.start_us, row.end_us),
            steps(row.steps_first, row.steps_last, row.beats),
            "?" if item.redone_steps is None else str(item.redone_steps or "-"),
        )
        nodes = (_nodes(row.nodes),) if shows_nodes else ()
        ended = how_ended(account, row.ordinal, row.outcome, row.exit_code)
        rows.append((*cells, *nodes, ended))
    head = ["#", "outcome", "start", "duration", "steps", "redone", "how it ended"]
    if shows_nodes:
        head.insert(-1, "nodes")
    return table(head, rows, right=(0, 3, 5), width=WIDTH - 2) if rows else "none on record"


def _nodes(nodes: Sequence[str]) -> str:
    """Return nodes as Slurm writes them (``n[1-3]``), else their number."""
    text = compress(nodes) if nodes else "-"
    return text if len(text) <= NODES_CHARS else count(len(nodes), "node")


def _duration(start_us: int | None, end_us: int | None) -> str:
    return "-" if start_us is None or end_us is None else format_seconds((end_us - start_us) / 1e6)


def steps(first: int | None, last: int | None, beats: int | None) -> str:
    """Return ``"1 to 57"``, or the heartbeats where step numbers are unknown."""
    if first is not None and last is not None:
        return f"{first} to {last}"
    return f"unknown ({beats} beats)" if beats else "none seen"


def how_ended(account: RunAccount, ordinal: int, outcome: str | None, exit_code: int | None) -> str:
    """Return how an attempt ended: its incident's title, else its outcome in words."""
    for incident in account.incidents:
        if incident.attempt == ordinal:
            return incident.title
    if outcome == "completed":
        return "every rank finished"
    if outcome is None:
        return "-"
    return "no incident on record" + ("" if exit_code is None else f", exit code {exit_code}")


def _more(incidents: Sequence[Incident]) -> list[str]:
    rest = incidents[INCIDENTS_MAX:]
    if not rest:
        return []
    lost = sum(item.lost_seconds for item in rest)
    return [f"and {len(rest)} more incidents, {cost({'together': lost})}: gpuops incident ls"]


def _time(account: RunAccount) -> str:
    wall_s, lost = account.wall_s, account.lost
    shown = [
        (phase, seconds)
        for phase, seconds in account.seconds.items()
        if seconds > 0 or phase not in _ONLY_WHERE_THERE
    ]
    rows = [
        (p.value, f"{s:.2f}", _percent(s, wall_s), _lost(lost.get(p, 0.0)), _MEANING[p])
        for p, s in shown
    ]
    lost_s = _lost(account.lost_s)
    rows.append(("wall", f"{wall_s:.2f}", _percent(wall_s, wall_s), lost_s, "launch to end"))
    head = ("phase", "seconds", "%", "lost", "what it is")
    return table(head, rows, right=(1, 2, 3), width=WIDTH - 2)


def _percent(seconds: float, wall_s: float) -> str:
    return f"{100 * seconds / wall_s:.1f}" if wall_s > 0 else "-"


def _lost(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds > 0 else "-"


# A run that never failed is told without the phases of a recovery.
_ONLY_WHERE_THERE = frozenset(
    {Phase.DECIDE, Phase.RENDEZVOUS, Phase.RESTORE, Phase.RESTART, Phase.UNKNOWN}
)
_MEANING = {
    Phase.INIT: "start of the workers to their first step",
    Phase.PRODUCTIVE: "steps made for the first time",
    Phase.DETECT: "last progress before a failure to the first notice of it",
    Phase.DECIDE: "stopping the workers, gathering reports, deciding",
    Phase.RENDEZVOUS: "health gate, back-off, seats, until new workers start",
    Phase.RESTORE: "reading the checkpoint",
    Phase.RESTART: "from a failure to the next first step, not told apart",
    Phase.REDO: "steps made again, up to the highest step of earlier attempts",
    Phase.OTHER: "after the last step: saving, teardown, the launcher's own end",
    Phase.UNKNOWN: "cannot be told: steps, their numbers or the end were not seen",
}


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
