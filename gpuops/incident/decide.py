"""Decide what a run does after a failure: a pure function of reports, cluster, history and time.

The rules in order; the first that holds is the decision, and the record has its name:

=========================== ==================================================== ==================
rule                        holds when                                           verdict
=========================== ==================================================== ==================
scheduler.preempted         the scheduler reclaims the nodes                     requeue 85
checkpoint.dir_taken        another live job saves into the directory            stop 64
checkpoint.refused          a Checkpointer or callback refuses what it is given  stop 64
launcher.start_failed       the user's program cannot be executed, in the first  stop 64
                            attempt
checkpoint.poisoned         two failures within 5 steps of loading the same      restart without
                            checkpoint, which was not excluded before            the checkpoint
software.suspect_node       a software fault by the next rules, always on one    restart without
                            node, and there are enough others                    the node
software.same_step          the same signature at the same step twice, and no    stop 93
                            attempt, nor a checkpoint, got past it in between
software.before_first_step  the same signature before the first step twice       stop 93
software.step_unknown       the same signature three times, no step known        stop 93
node.unhealthy              one-node run, and evidence speaks against the node   requeue 86
nodes.exhausted             fewer nodes remain than ``nodes_min``, or than now   requeue 85
                            train and the user wants no fewer
launch.infrastructure       a port was taken, a start refused; five in a row     restart, uncounted
gate.failed                 a node failed its check before joining               start without,
                                                                                 uncounted
budget.spent                more counted failures than restarts are allowed      fail 1
node.excluded               evidence on a node itself speaks against it          restart without
node.lost                   a node is lost; it may return as a spare             restart
restart.benign              ended with a code by which a framework asks for it   restart
restart                     anything else, also unexplained failures             restart
=========================== ==================================================== ==================

A restart counts unless the rule says otherwise, and excludes suspected nodes that can be spared
(`gpuops.incident.suspicion`). Software faults need a signature (a root in user code, or the reason
of an abort, see `gpuops.incident.signature`) and no evidence against any node. A weak signature (an
exit code alone, the place of a hang) needs three: the place of a hang never spends a larger budget.
A suspect node costs one more attempt: with stable ranks a bug of one rank and a fault of one device
look alike, until the rank runs elsewhere.
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
from gpuops.incident.correlate import CausalRank, RootCause, find_root, limited_list
from gpuops.incident.decision import (
    CULPRITS_MAX,
    TEXT_CHARS_MAX,
    ClusterState,
    NodeReport,
    OnExhausted,
    PastFailure,
    ReportKind,
    RestartDecision,
    RunAction,
)
from gpuops.incident.repeats import RepeatedFault, find_bad_checkpoint, find_software_fault
from gpuops.incident.signature import normalize
from gpuops.incident.suspicion import suspects_to_exclude
from gpuops.model import FailureClass, Side

_EXIT_CODES = {RunAction.REQUEUE: EXIT_REQUEUE, RunAction.FAIL: EXIT_FAIL}
_EXIT_CODES[RunAction.STOP] = EXIT_DO_NOT_REQUEUE
_SUSPECT_REASON = "the same software fault occurred on this node only"


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionContext:
    """The input of the rules. ``nodes_at_fault`` are the nodes to exclude, with reasons."""

    root: RootCause
    failure: PastFailure
    nodes_at_fault: Mapping[str, str]
    cluster: ClusterState
    history: Sequence[PastFailure]
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuleResult:
    """The result of one rule of the table."""

    action: RunAction
    rule: str
    explanation: str
    is_counted: bool = True
    exclude: Mapping[str, str] = field(default_factory=dict)
    exclude_checkpoint: int | None = None
    exit_code: int | None = None


def decide(
    reports: Sequence[NodeReport],
    cluster: ClusterState,
    history: Sequence[PastFailure],
    now_s: float,
) -> RestartDecision:
    """Return what the run does next.

    Args:
        reports: Of all agents on the generation that ended; only ``arrival`` orders them.
        cluster: The nodes now.
        history: The earlier failures of this run, oldest first.
        now_s: Now, by the control store's clock.
    """
    root = find_root(reports)
    context = _DecisionContext(
        root=root,
        failure=_failure(root, reports, cluster, now_s),
        nodes_at_fault=_nodes_at_fault(reports, cluster),
        cluster=cluster,
        history=history,
        now_s=now_s,
    )
    result = (
        _preempted(context)
        or _usage_error(context)
        or _checkpoint_poisoned(context)
        or _software_fault(context)
        or _nodes_exhausted(context)
        or _uncounted_failure(context)
        or _budget_spent(context)
        or _restart(context)
    )
    return _build_decision(context, result)


def _failure(
    root: RootCause, reports: Sequence[NodeReport], cluster: ClusterState, now_s: float
) -> PastFailure:
    """Return the failure as the history keeps it, before the decision is known."""
    report, first = root.report, root.first
    is_benign = first is not None and first.exit_code in cluster.policy.benign_exit_codes
    is_program = root.causal_rank is CausalRank.ROOT and first is not None and not is_benign
    steps = [r.last_step for r in reports] + [end.step for r in reports for end in r.ends]
    saved = [r.checkpoint_step for r in reports if r.checkpoint_step is not None]
    uuids = sorted({end.gpu_uuid for _, end in root.ends if end.gpu_uuid is not None})
    return PastFailure(
        generation=cluster.generation,
        at_s=now_s,
        failure_class=report.failure_class if report else FailureClass.UNRESOLVED,
        side=report.side if report else Side.AMBIGUOUS,
        is_counted=True,
        signature=first.signature if is_program and first else _hang_signature(root, reports),
        step=root.step,
        has_stepped=any(r.has_stepped for r in reports),
        checkpoint_step=max(saved, default=None),
        nodes=root.nodes[:CULPRITS_MAX],
        gpu_uuids=tuple(uuids[:CULPRITS_MAX]),
        log_path=first.log_path if first else None,
        is_infrastructure=root.causal_rank is CausalRank.INFRASTRUCTURE,
        highest_step=max((step for step in steps if step is not None), default=None),
    )


def _hang_signature(root: RootCause, reports: Sequence[NodeReport]) -> str | None:
    """Return where the ranks stood in a hang of the program's own code; None for another hang.

    For one by the order of its collectives: which these were.
    """
    if root.report is None:
        return None
    if root.is_program_hang:
        return f"{root.report.failure_class.value}: {normalize(root.report.how)}"
    if root.report.failure_class is not FailureClass.HANG_NO_PROGRESS:
        return None
    ends = [end for report in reports if report.kind is ReportKind.HANG for end in report.ends]
    known = [end for _, end in root.ends] or sorted(ends, key=lambda end: end.rank)
    return next((end.signature for end in known if end.signature is not None), None)


def _nodes_at_fault(reports: Sequence[NodeReport], cluster: ClusterState) -> dict[str, str]:
    """Return the nodes with evidence against themselves; a lost node is not one."""
    known = {*cluster.members, *cluster.live} - set(cluster.excluded)
    blamed = (r for r in reports if r.blames_node or r.kind is ReportKind.GATE_FAILED)
    found = {}
    for report in sorted(blamed, key=lambda r: (r.node, r.arrival, r.kind.value)):
        if report.node in known and report.node not in found:
            how = f": {report.how}" if report.how else ""
            found[report.node] = f"{report.failure_class.value}{how}"[:TEXT_CHARS_MAX]
    return found


def _preempted(context: _DecisionContext) -> _RuleResult | None:
    if context.root.causal_rank is not CausalRank.PREEMPTED:
        return None
    why = "the scheduler reclaims the nodes: requeue"
    return _RuleResult(
        action=RunAction.REQUEUE, rule="scheduler.preempted", explanation=why, is_counted=False
    )


def _usage_error(context: _DecisionContext) -> _RuleResult | None:
    report = context.root.report
    if report is None or not report.is_usage_error:
        return None
    if report.failure_class is FailureClass.START_FAILED and context.history:
        return None  # an earlier attempt could be started: a disk or a mount may be gone
    return _RuleResult(
        action=RunAction.STOP,
        rule=context.failure.failure_class.value,
        explanation="no restart: it would fail for the same reason",
        is_counted=False,
        exit_code=EXIT_USAGE,
    )


def _checkpoint_poisoned(context: _DecisionContext) -> _RuleResult | None:
    if context.nodes_at_fault or context.root.causal_rank not in (
        CausalRank.ROOT,
        CausalRank.KILLED,
    ):
        return None
    step = find_bad_checkpoint(context.history, context.failure)
    if step is None or not _can_restart(context, context.nodes_at_fault):
        return None
    return _RuleResult(
        action=RunAction.RESTART,
        rule="checkpoint.poisoned",
        explanation=f"for the second time soon after the checkpoint of step {step}: excluded once",
        exclude_checkpoint=step,
    )


def _software_fault(context: _DecisionContext) -> _RuleResult | None:
    fault = (
        None if context.nodes_at_fault else find_software_fault(context.history, context.failure)
    )
    if fault is None:
        return None
    node = fault.only_node(context.failure)
    others = [name for name in budget.candidates(context.cluster) if name != node]
    if (
        node is not None
        and node in context.cluster.live
        and others
        and _can_restart(context, {node: ""})
    ):
        return _RuleResult(
            action=RunAction.RESTART,
            rule="software.suspect_node",
            explanation=f"the same {fault.when}, always on "
            f"{node}{_common_gpu(fault, context.failure)}: one more attempt without it "
            "before the program is called the cause",
            exclude={node: _SUSPECT_REASON},
        )
    times = len(fault.earlier) + 1
    logs = [past.log_path for past in (*fault.earlier, context.failure)]
    where = " and ".join(dict.fromkeys(path for path in logs[-2:] if path)) or "none"
    why = f"the same {times} times {fault.when}: it would fail again; logs: {where}"
    return _RuleResult(action=RunAction.STOP, rule=fault.rule, explanation=why)


def _common_gpu(fault: RepeatedFault, failure: PastFailure) -> str:
    common = set(failure.gpu_uuids)
    for past in fault.earlier:
        common &= set(past.gpu_uuids)
    return f", {min(common)}" if common else ""


def _can_restart(context: _DecisionContext, excluded: Mapping[str, str]) -> bool:
    """Return whether a restart without those nodes is possible and within the budget."""
    restarts = budget.restarts_left(context.history, context.cluster.policy, context.now_s)
    return restarts > 0 and _too_few(context.cluster, excluded) is None


def _too_few(cluster: ClusterState, excluded: Mapping[str, str]) -> str | None:
    """Return why the remaining nodes are too few, None if they are enough."""
    policy, n_nodes = cluster.policy, budget.trainable_nodes(cluster, excluded)
    n_candidates = len(budget.candidates(cluster, excluded))
    if n_nodes == 0:
        unit = f" in units of {policy.node_unit}" if policy.node_unit > 1 else ""
        return f"{n_candidates} nodes remain, at least {policy.nodes_min}{unit} are needed"
    if policy.on_exhausted is OnExhausted.REQUEUE and n_nodes < len(cluster.members):
        return f"{n_nodes} nodes could train, fewer than the {len(cluster.members)} before"
    return None


def _nodes_exhausted(context: _DecisionContext) -> _RuleResult | None:
    why = _too_few(context.cluster, context.nodes_at_fault)
    if why is None:
        return None
    one = context.cluster.policy.nodes_max == 1
    if (
        one
        and context.nodes_at_fault
        and not budget.candidates(context.cluster, context.nodes_at_fault)
    ):
        return _RuleResult(
            action=RunAction.REQUEUE,
            rule="node.unhealthy",
            explanation="this node is unhealthy: requeue elsewhere",
            exit_code=EXIT_NODE_UNHEALTHY,
        )
    return _RuleResult(
        action=RunAction.REQUEUE, rule="nodes.exhausted", explanation=f"{why}: requeue"
    )


def _uncounted_failure(context: _DecisionContext) -> _RuleResult | None:
    report = context.root.report
    if context.root.causal_rank is CausalRank.INFRASTRUCTURE:
        n_earlier = budget.consecutive_infrastructure_failures(context.history)
        if n_earlier < budget.INFRASTRUCTURE_FAILURES_MAX:
            why = "the launch failed, which is not counted: restart"
            rule = "launch.infrastructure"
            return _RuleResult(
                action=RunAction.RESTART, rule=rule, explanation=why, is_counted=False
            )
    if report is not None and report.kind is ReportKind.GATE_FAILED:
        why = (
            f"restart without {limited_list(sorted(context.nodes_at_fault))}"
            if context.nodes_at_fault
            else "restart"
        )
        return _RuleResult(
            action=RunAction.RESTART, rule="gate.failed", explanation=why, is_counted=False
        )
    return None


def _budget_spent(context: _DecisionContext) -> _RuleResult | None:
    policy = context.cluster.policy
    if budget.restarts_left(context.history, policy, context.now_s) > 0:
        return None
    window_s = policy.restarts_window_s
    span = "" if window_s is None else f" within {window_s:g} s"
    why = f"all {policy.restarts_max} restarts{span} are spent"
    if policy.restarts_max < 2:
        why = f"the only restart{span} is spent" if policy.restarts_max else "no restart is allowed"
    return _RuleResult(action=RunAction.FAIL, rule="budget.spent", explanation=why)


def _restart(context: _DecisionContext) -> _RuleResult:
    first = context.root.first
    if context.nodes_at_fault:
        rule, why = (
            "node.excluded",
            f"restart without {limited_list(sorted(context.nodes_at_fault))}",
        )
    elif context.root.causal_rank is CausalRank.NODE_LOST:
        rule, why = "node.lost", "restart with the remaining nodes"
    elif first is not None and first.exit_code in context.cluster.policy.benign_exit_codes:
        rule, why = "restart.benign", "the program requests a restart with that code"
    else:
        rule, why = "restart", "restart"
    return _RuleResult(action=RunAction.RESTART, rule=rule, explanation=why)


def _build_decision(context: _DecisionContext, result: _RuleResult) -> RestartDecision:
    run_long = replace(context.cluster.policy, restarts_window_s=None)
    n_earlier = budget.count_failures(context.history, run_long, context.now_s)
    failure = replace(
        context.failure,
        rule=result.rule,
        is_counted=result.is_counted,
        counted_total=n_earlier + result.is_counted,
        excluded_checkpoint=result.exclude_checkpoint,
    )
    restarts = result.action is RunAction.RESTART
    exclude = {**context.nodes_at_fault, **result.exclude}
    suspected = suspects_to_exclude(context.cluster, exclude) if restarts else {}
    also = f", and without the suspected {limited_list(sorted(suspected))}" if suspected else ""
    return RestartDecision(
        action=result.action,
        rule=result.rule,
        reason=f"{_describe_failure(context)}; {result.explanation}{also}",
        failure=failure,
        cause=_without_collectives(context.root.report),
        exclude={**exclude, **suspected},
        exclude_checkpoint=result.exclude_checkpoint,
        backoff_s=budget.backoff_s(context.history, failure) if restarts else 0.0,
        exit_code=result.exit_code or _EXIT_CODES.get(result.action),
    )


def _without_collectives(report: NodeReport | None) -> NodeReport | None:
    """Return *report* as every agent reads it with the record; the reports keep the collectives."""
    if report is None:
        return None
    return replace(report, ends=tuple(replace(end, collectives=None) for end in report.ends))


def _describe_failure(context: _DecisionContext) -> str:
    """Return the failure as text."""
    root, report, first = context.root, context.root.report, context.root.first
    if report is None:
        return "no agent reported anything"
    where = "" if root.is_shared else f" on {limited_list(root.nodes or (report.node,))}"
    if first is not None and first.summary and not root.is_program_hang:
        n_more = len(root.ends) - 1
        others = f" (with {n_more} more rank{'s' * (n_more != 1)})" if root.is_shared else ""
        who, what = f"rank {first.rank}", first.summary
        if what.startswith(f"{who} "):
            # The node is named before the exception's text, which would otherwise seem to name it.
            return f"{who}{where}{what.removeprefix(who)}{others}"
        return f"{what}{where}{others}"
    return f"{report.failure_class.value}{where}{f': {report.how}' if report.how else ''}"
