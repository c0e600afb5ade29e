"""How a run stands, for a terminal: text that hostile names and reasons cannot leave."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuops.report.render.layout import one_line, short_id, truncate
from gpuops.report.run_view import CheckpointView, RunNodeView, RunView
from gpuops.units import format_seconds

NODES_MAX = 40
LABEL_WIDTH = 12
# An agent beats once a second; `gpuops.control` counts it as suspect after six.
SUSPECT_S = 6.0


def status_view(
    view: RunView, *, rate: float | None = None, silent_s: dict[str, float] | None = None
) -> RenderableType:
    """Return the picture of *view*.

    Args:
        view: How the run stands.
        rate: Steps a second since the last look, None where that is not known.
        silent_s: For each node the seconds for which its agent's heartbeat has not moved.
    """
    parts: list[RenderableType] = [_labelled(_head(view))]
    if view.step is not None or rate is not None:
        parts.append(_progress(view, rate))
    if view.checkpoint is not None and (line := _checkpoint(view.checkpoint)):
        parts.append(_labelled([line]))
    if view.nodes:
        parts.append(_nodes(view.nodes, silent_s or {}))
    if tail := _tail(view):
        parts.append(_labelled(tail))
    return Group(*parts)


def _labelled(lines: Sequence[str]) -> Table:
    """Return *lines*, which begin with a label of `LABEL` characters: long ones go on behind it."""
    table = Table.grid()
    table.add_column(width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(Text(line[:LABEL_WIDTH].rstrip()), Text(line[LABEL_WIDTH:]))
    return table


def _head(view: RunView) -> list[str]:
    generation = "?" if view.generation is None else str(view.generation)
    since = "" if view.phase_s is None else f" for {format_seconds(view.phase_s)}"
    code = "" if view.exit_code is None else f", exit code {view.exit_code}"
    lines = [
        f"run         {truncate(view.name, 80)} ({short_id(one_line(view.run_id))})",
        f"phase       {one_line(view.phase)}{since}, generation {generation}{code}",
    ]
    if view.reason:
        lines.append(f"why         {one_line(view.reason)}")
    return lines


def _progress(view: RunView, rate: float | None) -> RenderableType:
    """Return the step and its rate; how many steps there will be, nobody says."""
    rate_text = "" if rate is None else f", {rate:.2f} steps/s"
    row = Table.grid(padding=(0, 1))
    is_moving = rate is not None and rate > 0
    row.add_row(
        Text(f"steps       {'?' if view.step is None else view.step}{rate_text}"),
        ProgressBar(total=None, pulse=is_moving, width=24) if is_moving else Text(""),
    )
    return row


def _checkpoint(checkpoint: CheckpointView) -> str:
    """Return where the job would resume from; nothing where its script saves nothing."""
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
    if checkpoint.skipped:
        parts.append(f"{checkpoint.skipped} skipped")
    if checkpoint.keeper == "gone":
        parts.append("its keeper is gone: nothing is saved until another one has begun")
    return f"checkpoint  {'; '.join(parts)}" if parts else ""


def _copies(checkpoint: CheckpointView) -> str:
    if not checkpoint.copies:
        return ""
    return f" ({checkpoint.copies} {'copy' if checkpoint.copies == 1 else 'copies'})"


def _nodes(nodes: Sequence[RunNodeView], silent_s: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("node", "node rank", "ranks", "step", "last beat", "agent"):
        table.add_column(name, justify="left", no_wrap=True)
    for node in nodes[:NODES_MAX]:
        table.add_row(
            Text(truncate(node.node, 40)),
            "-" if node.group_rank is None else str(node.group_rank),
            _ranks(node),
            "-" if node.step is None else str(node.step),
            "-" if node.silent_s is None else f"{format_seconds(node.silent_s)} ago",
            _agent_text(silent_s.get(node.node)),
        )
    if len(nodes) > NODES_MAX:
        table.add_row(f"and {len(nodes) - NODES_MAX} more", "", "", "", "", "")
    return table


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
            f"{'left out' if number == 0 else '':<{LABEL_WIDTH}}{one_line(node)}: {one_line(why)}"
        )
    for number, (node, why) in enumerate(view.suspected.items()):
        suspect_text = (
            f"{one_line(node)}: {one_line(why)}; a restart does without it, if it can be spared"
        )
        lines.append(f"{'doubted' if number == 0 else '':<{LABEL_WIDTH}}{suspect_text}")
    if view.restarts_used is not None:
        most = "" if view.restarts_max is None else f" of {view.restarts_max}"
        lines.append(f"restarts    {view.restarts_used}{most}")
    if view.decision is not None:
        decision = view.decision
        verdict, rule = one_line(str(decision.get("verdict"))), one_line(str(decision.get("rule")))
        why = one_line(str(decision.get("reason")))
        lines.append(
            f"decided     {verdict} ({rule}){'' if why == one_line(view.reason) else f': {why}'}"
        )
    lines += [f"note        {one_line(note)}" for note in view.notes]
    return lines
