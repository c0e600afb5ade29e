"""A node and its history as text."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from textwrap import wrap

from gpuops.host.node_state import Repair
from gpuops.model import Incident, Json
from gpuops.report.render.layout import date_time, one_line, short_id, table, truncate
from gpuops.store.queries.burnin_queries import BurninRow, NodeSweep
from gpuops.store.queries.node_queries import (
    FINDING_DAYS,
    STRIKE_DAYS,
    ComponentRow,
    FailedAttemptRow,
    FindingRow,
    NodeHistory,
    NodeRow,
    StateRow,
    Strike,
    count_strikes,
)

_INDENT = 2
_SECTION_WIDTH = 98


def node_list(nodes: Sequence[NodeRow]) -> str:
    """Return one line a node."""
    rows = [
        (
            item.name,
            item.state or "-",
            item.verdict or "-",
            str(item.open_incidents),
            date_time(item.last_seen_us),
            item.cluster,
        )
        for item in nodes
    ]
    head = ("node", "last state", "last check", "open", "last seen", "cluster")
    return table(head, rows, right=(3,))


def history_text(history: NodeHistory, burnin: BurninRow | None, sweep: NodeSweep | None) -> str:
    """Return the node's history: findings and incidents, active tests, actions, then its parts.

    *burnin* and *sweep*: its last ones.
    """
    parts = [
        _heading(history.node),
        _section(f"findings of the last {FINDING_DAYS} days", map(_finding, history.findings)),
        _section("incidents", map(_incident, history.incidents)),
        _section("last burn-in", _burnin(burnin) if burnin else ()),
        _section("last sweep", _sweep(history.node.name, sweep) if sweep else ()),
        _section(
            f"strikes of the last {STRIKE_DAYS} days, not repaired", _strikes(history.strikes)
        ),
        _section("drains, resumes, repairs and burn-ins", map(_state, history.states)),
        _section("repairs", map(_repair, history.repairs)),
        _section("parts", map(_component, history.components)),
        _section(
            "boots",
            (_boot(item.boot_us, item.boot_id, item.kernel, item.driver) for item in history.boots),
        ),
        _section("attempts that failed with this node in them", map(_failed, history.failed)),
    ]
    return "\n".join(line for part in parts for line in part)


def _heading(node: NodeRow) -> list[str]:
    done = f"last state: {node.state}" if node.state else "never drained by gpuops"
    check = f"last check: {node.verdict}" if node.verdict else "never checked"
    times = f"seen from {date_time(node.first_seen_us)} to {date_time(node.last_seen_us)}"
    return [one_line(f"node {node.name} of cluster {node.cluster}: {done}; {check}"), times]


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"{' ' * _INDENT}{truncate(line, _SECTION_WIDTH)}" for line in lines]
    return ["", title, *(found or [f"{' ' * _INDENT}none"])]


def _finding(item: FindingRow) -> str:
    times = f" ({item.count} times)" if item.count > 1 else ""
    by = f" [user {item.uid}]" if item.uid else ""
    about = f"{item.check}, {item.entity_kind} {item.entity_id}{times}{by}"
    return f"{date_time(item.last_us)}  {item.status:<7}  {about}: {item.message}"


def _incident(item: Incident) -> str:
    how = f"; {item.resolution}" if item.resolution else ""
    return (
        f"{date_time(item.first_us)}  {item.state.value:<9}  {short_id(item.id)}  {item.title}{how}"
    )


def _burnin(found: BurninRow) -> Iterable[str]:
    n_passed = sum(item.status == "pass" for item in found.measurements)
    count = f"{n_passed} of {len(found.measurements)} measurements passed"
    yield f"{date_time(found.t_us)}  {found.status:<7}  {count}"
    yield from chain.from_iterable(map(_active_finding, found.findings))


def _sweep(node: str, found: NodeSweep) -> Iterable[str]:
    rates = [test.value for test in found.tests if test.outcome == "pass" and test.value]
    typical = f", {statistics.median(rates):.4g} {found.tests[0].unit} (median)" if rates else ""
    count = f"{len(rates)} of {len(found.tests)} tests passed{typical}"
    yield f"{date_time(found.t_us)}  sweep {found.sweep_id}: {count}"
    yield from chain.from_iterable(map(_active_finding, found.findings))
    for test in found.tests:
        if test.outcome != "pass":
            partner = test.node_b if test.node_a == node else test.node_a
            rate = f", {test.value:.4g} {test.unit}" if test.value is not None else ""
            yield f"{test.outcome} with {partner}{rate}"


def _active_finding(item: Json) -> list[str]:
    """Return the lines of a finding, with the limit it was held against and that limit's source."""
    about = f"{item['check']}, {item['entity']['kind']} {item['entity']['id']}"
    limit = [f"{name}: {item[name]}" for name in ("threshold", "source") if item.get(name)]
    end = f" ({'; '.join(limit)})" if limit else ""
    text = f"{item['status']:<7}  {about}: {item['message']}{end}"
    return wrap(text, _SECTION_WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)


def _strikes(strikes: Sequence[Strike]) -> Iterable[str]:
    for item in count_strikes(strikes):
        yield (
            f"{date_time(item.last_us)}  {item.count}  {item.entity_kind} {item.entity_id}: "
            f"{item.why}"
        )


def _state(item: StateRow) -> str:
    job = f", job {item.job_id}" if item.job_id else ""
    return f"{date_time(item.t_us)}  {item.state:<10}  by {item.actor}{job}: {item.reason}"


def _repair(item: Repair) -> str:
    return f"{date_time(item.t_us)}  {item.entity_kind} {item.entity_id}, by {item.by}: {item.what}"


def _component(item: ComponentRow) -> str:
    return (
        f"{item.kind} {item.component_id}: from {date_time(item.first_seen_us)} "
        f"to {date_time(item.last_seen_us)}"
    )


def _boot(boot_us: int | None, boot_id: str, kernel: str | None, driver: str | None) -> str:
    known = [f"kernel {kernel}" if kernel else "", f"driver {driver}" if driver else ""]
    return f"{date_time(boot_us)}  {boot_id}  {', '.join(filter(None, known))}".rstrip()


def _failed(item: FailedAttemptRow) -> str:
    job = f", job {item.slurm_job_id}" if item.slurm_job_id else ""
    code = "" if item.exit_code is None else f", exit code {item.exit_code}"
    return (
        f"{date_time(item.end_us)}  run {short_id(item.run_id)}, attempt {item.ordinal}{job}{code}"
    )
