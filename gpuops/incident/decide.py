"""What becomes of a run after a failure: a pure function of reports, cluster, history and time.

The rows, in order; the first that holds is the decision, and its name is in the record of it:

=========================== ==================================================== ==================
rule                        holds when                                           verdict
=========================== ==================================================== ==================
scheduler.preempted         the scheduler wants the nodes back                   requeue 85
checkpoint.dir_taken        another job that lives saves into the directory      stop 64
checkpoint.poisoned         two failures within 5 steps of loading the same      restart without
                            checkpoint, which was not left out before            the checkpoint
software.suspect_node       a software fault by the next rows, always on one     restart without
                            node, and there are enough others                    the node
software.same_step          the same signature at the same step twice, no newer  stop 93
                            checkpoint, and nobody got past it in between
software.before_first_step  the same signature before the first step twice       stop 93
software.step_unknown       the same signature three times, no step known        stop 93
node.unhealthy              one-node run, and evidence speaks against the node   requeue 86
nodes.exhausted             fewer nodes left than ``nodes_min``, or than now     requeue 85
                            train and the user wants no fewer
launch.infrastructure       a port was taken, a start refused; five in a row     restart, uncounted
gate.failed                 a node did not pass its check before joining         restart without,
                                                                                 uncounted
budget.spent                more counted failures than restarts are allowed      fail 1
node.excluded               evidence on a node itself speaks against it          restart without
node.lost                   a node is gone; it may come back as a spare          restart
restart.benign              ended with a code by which a framework asks for it   restart
restart                     anything else, also what nobody understands          restart
=========================== ==================================================== ==================

A restart counts unless the row says otherwise, and does without nodes that are doubted, as far as
they can be spared (`gpuops.incident.doubts`). Software faults need a signature (a root in user
code, see `gpuops.incident.signature`) and no evidence against any node. A weak signature (an exit
code alone) needs three. A suspect node costs one attempt more: with stable ranks a bug of one rank
and a fault of one device look alike, until the rank sits elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuops.errors import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_FAIL,
    EXIT_NODE_UNHEALTHY,
    EXIT_REQUEUE,
    EXIT_USAGE,
)
from gpuops.incident import budget
from gpuops.incident.across import RootCause, Standing, find_root
from gpuops.incident.decision import (
    CULPRITS_MAX,
    TEXT_CHARS_MAX,
    Cluster,
    Decision,
    NodeReport,
    OnExhausted,
    PastFailure,
    ReportKind,
    Verdict,
)
from gpuops.incident.doubts import to_leave_out
from gpuops.incident.repeats import Repetition, bad_checkpoint, software_fault
from gpuops.model import FailureClass, Side

_EXIT_CODES = {Verdict.REQUEUE: EXIT_REQUEUE, Verdict.FAIL: EXIT_FAIL}
_EXIT_CODES[Verdict.STOP] = EXIT_DO_NOT_REQUEUE
_SUSPECT = "the same software fault fell on this node only"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Everything that the rows look at. ``bad`` are the nodes to leave out, with reasons."""

    root: RootCause
    failure: PastFailure
    bad: Mapping[str, str]
    cluster: Cluster
    history: Sequence[PastFailure]
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What one row of the table says."""

    verdict: Verdict
    rule: str
    why: str
    counted: bool = True
    exclude: Mapping[str, str] = field(default_factory=dict)
    exclude_checkpoint: int | None = None
    exit_code: int | None = None


def decide(
    reports: Sequence[NodeReport],
    cluster: Cluster,
    history: Sequence[PastFailure],
    now_s: float,
) -> Decision:
    """Return what becomes of the run.

    Args:
        reports: Of all agents on the generation that ended; only ``arrival`` orders them.
        cluster: Who there is now.
        history: The earlier failures of this run, oldest first.
        now_s: Now, by the board.
    """
    root = find_root(reports)
    case = _Case(
        root=root,
        failure=_failure(root, reports, cluster, now_s),
        bad=_to_exclude(reports, cluster),
        cluster=cluster,
        history=history,
        now_s=now_s,
    )
    row = (
        _preempted(case)
        or _taken(case)
        or _poisoned(case)
        or _software(case)
        or _exhausted(case)
        or _uncounted(case)
        or _spent(case)
        or _restart(case)
    )
    return _decision(case, row)


def _failure(
    root: RootCause, reports: Sequence[NodeReport], cluster: Cluster, now_s: float
) -> PastFailure:
    """Return the failure as the history keeps it, before it is known what follows."""
    report, first = root.report, root.first
    is_benign = first is not None and first.exit_code in cluster.terms.benign_exit_codes
    is_program = root.standing is Standing.ROOT and first is not None and not is_benign
    steps = [r.last_step for r in reports] + [end.step for r in reports for end in r.ends]
    saved = [r.checkpoint_step for r in reports if r.checkpoint_step is not None]
    uuids = sorted({end.gpu_uuid for _, end in root.ends if end.gpu_uuid is not None})
    return PastFailure(
        generation=cluster.generation,
        at_s=now_s,
        failure_class=report.failure_class if report else FailureClass.UNRESOLVED,
        side=report.side if report else Side.AMBIGUOUS,
        counted=True,
        signature=first.signature if is_program and first else None,
        step=root.step,
        has_stepped=any(r.has_stepped for r in reports),
        checkpoint_step=max(saved, default=None),
        nodes=root.nodes[:CULPRITS_MAX],
        gpu_uuids=tuple(uuids[:CULPRITS_MAX]),
        log_path=first.log_path if first else None,
        is_infrastructure=root.standing is Standing.INFRASTRUCTURE,
        highest_step=max((step for step in steps if step is not None), default=None),
    )


def _to_exclude(reports: Sequence[NodeReport], cluster: Cluster) -> dict[str, str]:
    """Return the nodes that evidence of their own speaks against; a lost node is not one."""
    known = {*cluster.members, *cluster.live} - set(cluster.excluded)
    blamed = (r for r in reports if r.blames_node or r.kind is ReportKind.GATE_FAILED)
    found = {}
    for report in sorted(blamed, key=lambda r: (r.node, r.arrival, r.kind.value)):
        if report.node in known and report.node not in found:
            how = f": {report.how}" if report.how else ""
            found[report.node] = f"{report.failure_class.value}{how}"[:TEXT_CHARS_MAX]
    return found


def _preempted(case: _Case) -> _Row | None:
    if case.root.standing is not Standing.PREEMPTED:
        return None
    why = "the scheduler wants the nodes back: requeue"
    return _Row(verdict=Verdict.REQUEUE, rule="scheduler.preempted", why=why, counted=False)


def _taken(case: _Case) -> _Row | None:
    if case.failure.failure_class is not FailureClass.CHECKPOINT_DIR_TAKEN:
        return None
    # What a rank raised is cut short before it says what to do.
    advice = "end that one, or give this one a directory of its own; " if case.root.ends else ""
    return _Row(
        verdict=Verdict.STOP,
        rule="checkpoint.dir_taken",
        why=f"{advice}not tried again, a restart would find it so as well",
        counted=False,
        exit_code=EXIT_USAGE,
    )


def _poisoned(case: _Case) -> _Row | None:
    if case.bad or case.root.standing not in (Standing.ROOT, Standing.KILLED):
        return None
    step = bad_checkpoint(case.history, case.failure)
    if step is None or not _goes_on(case, case.bad):
        return None
    return _Row(
        verdict=Verdict.RESTART,
        rule="checkpoint.poisoned",
        why=f"for the second time soon after the checkpoint of step {step}: left out once",
        exclude_checkpoint=step,
    )


def _software(case: _Case) -> _Row | None:
    fault = None if case.bad else software_fault(case.history, case.failure)
    if fault is None:
        return None
    node = fault.on_one_node(case.failure)
    others = [name for name in budget.candidates(case.cluster) if name != node]
    if node is not None and node in case.cluster.live and others and _goes_on(case, {node: ""}):
        return _Row(
            verdict=Verdict.RESTART,
            rule="software.suspect_node",
            why=f"the same {fault.when} only ever on {node}{_device(fault, case.failure)}: once"
            " more without it, before the program is called the cause",
            exclude={node: _SUSPECT},
        )
    times = len(fault.earlier) + 1
    logs = [past.log_path for past in (*fault.earlier, case.failure)]
    where = " and ".join(dict.fromkeys(path for path in logs[-2:] if path)) or "none"
    why = f"the same {times} times {fault.when}: it would fail again; logs: {where}"
    return _Row(verdict=Verdict.STOP, rule=fault.rule, why=why)


def _device(fault: Repetition, failure: PastFailure) -> str:
    common = set(failure.gpu_uuids)
    for past in fault.earlier:
        common &= set(past.gpu_uuids)
    return f", {min(common)}" if common else ""


def _goes_on(case: _Case, without: Mapping[str, str]) -> bool:
    """Say whether a restart without those nodes is possible and still within the budget."""
    left = budget.restarts_left(case.history, case.cluster.terms, case.now_s)
    return left > 0 and _too_few(case.cluster, without) is None


def _too_few(cluster: Cluster, without: Mapping[str, str]) -> str | None:
    """Return why the nodes that are left are too few, None where they are enough."""
    terms, n = cluster.terms, budget.seats(cluster, without)
    left = len(budget.candidates(cluster, without))
    if n == 0:
        unit = f" in units of {terms.node_unit}" if terms.node_unit > 1 else ""
        return f"{left} nodes are left, at least {terms.nodes_min}{unit} are needed"
    if terms.on_exhausted is OnExhausted.REQUEUE and n < len(cluster.members):
        return f"{n} nodes could train, fewer than the {len(cluster.members)} before"
    return None


def _exhausted(case: _Case) -> _Row | None:
    why = _too_few(case.cluster, case.bad)
    if why is None:
        return None
    one = case.cluster.terms.nodes_max == 1
    if one and case.bad and not budget.candidates(case.cluster, case.bad):
        return _Row(
            verdict=Verdict.REQUEUE,
            rule="node.unhealthy",
            why="this node is not fit to train: requeue elsewhere",
            exit_code=EXIT_NODE_UNHEALTHY,
        )
    return _Row(verdict=Verdict.REQUEUE, rule="nodes.exhausted", why=f"{why}: requeue")


def _uncounted(case: _Case) -> _Row | None:
    report = case.root.report
    if case.root.standing is Standing.INFRASTRUCTURE:
        before = budget.infrastructure_in_a_row(case.history)
        if before < budget.INFRASTRUCTURE_MAX:
            why = "the launch itself failed, which does not count: restart"
            rule = "launch.infrastructure"
            return _Row(verdict=Verdict.RESTART, rule=rule, why=why, counted=False)
    if report is not None and report.kind is ReportKind.GATE_FAILED:
        why = f"restart without {_few(case.bad)}" if case.bad else "restart"
        return _Row(verdict=Verdict.RESTART, rule="gate.failed", why=why, counted=False)
    return None


def _spent(case: _Case) -> _Row | None:
    terms = case.cluster.terms
    if budget.restarts_left(case.history, terms, case.now_s) > 0:
        return None
    window_s = terms.restarts_window_s
    span = "" if window_s is None else f" within {window_s:g} s"
    why = f"all {terms.restarts_max} restarts{span} are spent"
    if terms.restarts_max < 2:
        why = f"the only restart{span} is spent" if terms.restarts_max else "no restart is allowed"
    return _Row(verdict=Verdict.FAIL, rule="budget.spent", why=why)


def _restart(case: _Case) -> _Row:
    first = case.root.first
    if case.bad:
        rule, why = "node.excluded", f"restart without {_few(case.bad)}"
    elif case.root.standing is Standing.NODE_LOST:
        rule, why = "node.lost", "restart with those that are there"
    elif first is not None and first.exit_code in case.cluster.terms.benign_exit_codes:
        rule, why = "restart.benign", "the program asks for a restart with that code"
    else:
        rule, why = "restart", "restart"
    return _Row(verdict=Verdict.RESTART, rule=rule, why=why)


def _decision(case: _Case, row: _Row) -> Decision:
    run_long = replace(case.cluster.terms, restarts_window_s=None)
    before = budget.counted(case.history, run_long, case.now_s)
    failure = replace(
        case.failure,
        rule=row.rule,
        counted=row.counted,
        counted_total=before + row.counted,
        excluded_checkpoint=row.exclude_checkpoint,
    )
    restarts = row.verdict is Verdict.RESTART
    exclude = {**case.bad, **row.exclude}
    doubted = to_leave_out(case.cluster, exclude) if restarts else {}
    also = f", and without {_few(doubted)}, which was doubted" if doubted else ""
    return Decision(
        verdict=row.verdict,
        rule=row.rule,
        reason=f"{_what(case)}; {row.why}{also}",
        failure=failure,
        cause=case.root.report,
        exclude={**exclude, **doubted},
        exclude_checkpoint=row.exclude_checkpoint,
        backoff_s=budget.backoff_s(case.history, failure) if restarts else 0.0,
        exit_code=row.exit_code or _EXIT_CODES.get(row.verdict),
    )


def _what(case: _Case) -> str:
    """Return the failure in words."""
    report, first = case.root.report, case.root.first
    if report is None:
        return "no agent reported anything"
    where = "" if case.root.is_shared else f" on {_few(case.root.nodes or (report.node,))}"
    if first is not None and first.summary:
        others = f" (with {len(case.root.ends) - 1} more ranks)" if case.root.is_shared else ""
        who, what = f"rank {first.rank}", first.summary
        if what.startswith(f"{who} "):
            # The node stands before an exception's own text, which would seem to name it.
            return f"{who}{where}{what.removeprefix(who)}{others}"
        return f"{what}{where}{others}"
    return f"{report.failure_class.value}{where}{f': {report.how}' if report.how else ''}"


def _few(names: Sequence[str] | Mapping[str, str], most: int = 8) -> str:
    known = sorted(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more
