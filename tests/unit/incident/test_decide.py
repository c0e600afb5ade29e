"""The decision table: every row, its limits, and what must hold for any input."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decisions import cluster, decision, failure, rank_end, report, stopped
from support.draws import draws

from gpuops.incident import decide as module
from gpuops.incident.budget import INFRASTRUCTURE_FAILURES_MAX, history_after, trainable_nodes
from gpuops.incident.decide import decide
from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    OnExhausted,
    PastFailure,
    RankEnd,
    ReportKind,
    RestartDecision,
    RestartPolicy,
    RunAction,
)
from gpuops.incident.repeats import checkpoint_to_exclude
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side

KEY_ERROR = "KeyError at data.py:88 in collate: 'labels'"
RESTART, STOP, FAIL, REQUEUE = RunAction.RESTART, RunAction.STOP, RunAction.FAIL, RunAction.REQUEUE


def raised(node="n1", rank=1, step=57, signature=KEY_ERROR, generation=0, **changes):
    """Return the report of a node whose *rank* raised a KeyError at *step*; None: before any."""
    end = rank_end(
        rank,
        failure_class=FailureClass.USER_EXCEPTION,
        side=Side.USER,
        signal=None,
        exit_code=1,
        signature=signature,
        step=step,
        gpu_uuid=changes.pop("gpu_uuid", None),
        summary=f"rank {rank} raised KeyError: 'labels'",
        log_path=f"/runs/demo/generation-{generation}/rank{rank}.log",
    )
    fields = {
        "failure_class": FailureClass.USER_EXCEPTION,
        "side": Side.USER,
        "ends": (end,),
        "last_step": step,
        "has_stepped": step is not None,
    }
    return report(node, generation=generation, **{**fields, **changes})


def of_class(failure_class, node="n1", step=57, **changes):
    """Return the report of a node with a root of *failure_class*."""
    end = rank_end(1, failure_class=failure_class, signal=None, step=step)
    fields = {"failure_class": failure_class, "ends": (end,), "last_step": step}
    return report(node, **{"has_stepped": step is not None, **fields, **changes})


def lost(node="n2"):
    return report(node, ReportKind.NODE_LOST, failure_class=FailureClass.NODE_LOST, side=Side.INFRA)


def xid(node="n2", **changes):
    fields = {
        "failure_class": FailureClass.GPU_FELL_OFF_BUS,
        "side": Side.INFRA,
        "blames_node": True,
        "how": "Xid 79",
    }
    return report(node, ReportKind.GPU_FAULT, **{**fields, **changes})


def story(*rounds, on=None, every_s=100.0):
    """Return the decisions of a run whose generations end with *rounds* of reports."""
    history, decisions = (), []
    for generation, reports in enumerate(rounds):
        told = [reports] if isinstance(reports, NodeReport) else reports
        here = replace(on or cluster("n1"), generation=generation)
        decision = decide(told, here, history, generation * every_s)
        history = history_after(decision, history)
        decisions.append(decision)
    return decisions


def last(*rounds, **changes):
    return story(*rounds, **changes)[-1]


def wide(n, **terms):
    """Return a cluster of *n* nodes that needs one."""
    return cluster(*(f"n{i}" for i in range(1, n + 1)), terms=RestartPolicy(nodes_max=n, **terms))


# ---- crashes ---------------------------------------------------------------------------------


def test_a_killed_rank_is_a_restart_of_all():
    decision = last([report("n1"), stopped("n2")], on=wide(2))

    assert (decision.action, decision.rule) == (RESTART, "restart")
    assert decision.exclude == {}
    assert decision.exit_code is None
    assert decision.backoff_s == 0
    assert decision.failure.is_counted
    assert decision.failure.nodes == ("n1",)
    assert decision.cause.node == "n1"
    assert "SIGKILL" in decision.reason


def test_a_first_exception_is_a_restart():
    assert last(raised()).rule == "restart"


TAKEN, REFUSED = FailureClass.CHECKPOINT_DIR_TAKEN, FailureClass.CHECKPOINT_REFUSED
USAGE = {TAKEN, REFUSED}


@pytest.mark.parametrize("failure_class", sorted({*FailureClass} - USAGE), ids=lambda c: c.value)
def test_only_the_program_s_own_exception_ever_stops_a_run(failure_class):
    same = of_class(failure_class)
    verdicts = [d.action for d in story(*[same] * 6, on=wide(1, restarts_max=99))]

    assert STOP not in verdicts


NOT_EXECUTABLE = report(
    "n1",
    ReportKind.START_FAILED,
    failure_class=FailureClass.START_FAILED,
    side=Side.USER,
    how="cannot execute /opt/python: Exec format error; install it for this machine",
)


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        (NOT_EXECUTABLE, "launcher.start_failed"),
        (of_class(FailureClass.START_FAILED, side=Side.USER, step=None), "launcher.start_failed"),
        (
            report("n1", ReportKind.START_FAILED, failure_class=TAKEN, how="another job has it"),
            "checkpoint.dir_taken",
        ),
        (of_class(TAKEN, step=None), "checkpoint.dir_taken"),
        (of_class(REFUSED, step=None), "checkpoint.refused"),
    ],
    ids=["python", "program", "taken at launch", "taken for a worker", "refused"],
)
def test_a_usage_error_ends_the_run_at_once(told, rule):
    decision = last([told, stopped("n2")], on=wide(2))

    assert (decision.action, decision.rule, decision.exit_code) == (STOP, rule, 64)
    assert not decision.failure.is_counted


def test_a_python_that_an_earlier_attempt_could_execute_is_tried_again():
    decision = last(raised(), NOT_EXECUTABLE)

    assert (decision.action, decision.rule) == (RESTART, "launch.infrastructure")


def test_no_report_at_all_is_a_restart_that_counts():
    decision = last([])

    assert decision.action is RESTART
    assert decision.failure.failure_class is FailureClass.UNRESOLVED
    assert decision.failure.is_counted


# ---- software faults -------------------------------------------------------------------------


def test_the_same_exception_at_the_same_step_twice_stops_the_run():
    decision = last(raised(), raised(generation=1))

    assert (decision.action, decision.rule) == (STOP, "software.same_step")
    assert decision.exit_code == 93
    assert "raised KeyError" in decision.reason
    assert "/runs/demo/generation-0/rank1.log" in decision.reason
    assert "/runs/demo/generation-1/rank1.log" in decision.reason


def test_another_failure_in_between_does_not_hide_it():
    assert last(raised(), report("n1", last_step=50), raised()).action is STOP


@pytest.mark.parametrize(
    "second",
    [
        raised(step=58),
        raised(signature="KeyError at data.py:89 in collate: 'labels'"),
        raised(signature=None),
        raised(checkpoint_step=57),
        of_class(FailureClass.CUDA_ERROR),
        raised(step=None),
    ],
)
def test_what_is_not_the_same_again_is_a_restart(second):
    assert last(raised(), second).action is RESTART


def test_a_newer_checkpoint_in_between_is_progress_where_it_lies_beyond_the_failure():
    assert last(raised(checkpoint_step=30), raised(checkpoint_step=60)).action is RESTART
    assert last(raised(checkpoint_step=60), raised(checkpoint_step=60)).action is STOP
    # Saved after the restart, before the failure came again: as any Checkpointer does.
    assert last(raised(checkpoint_step=30), raised(checkpoint_step=40)).action is STOP
    assert last(raised(), raised(checkpoint_step=40)).action is STOP


def test_where_the_step_is_unknown_any_newer_checkpoint_is_progress():
    steps = [
        {"step": None, "has_stepped": True, "checkpoint_step": saved} for saved in (30, 40, 50)
    ]

    assert last(*(raised(**each) for each in steps)).action is RESTART
    assert last(*(raised(**steps[0]) for _ in steps)).action is STOP


def test_a_step_that_was_passed_in_between_is_not_deterministic():
    passed = report("n1", last_step=90, has_stepped=True)

    assert last(raised(), passed, raised()).action is RESTART


def test_a_failure_before_the_first_step_twice_stops_the_run():
    decision = last(raised(step=None), raised(step=None))

    assert (decision.action, decision.rule) == (STOP, "software.before_first_step")


def test_a_start_that_has_worked_in_between_does_not():
    worked = report("n1", has_stepped=True, last_step=5)

    assert last(raised(step=None), worked, raised(step=None)).action is RESTART


def test_with_an_unknown_step_it_takes_three():
    again = raised(step=None, has_stepped=True)
    decisions = story(again, again, again)

    assert [d.action for d in decisions] == [RESTART, RESTART, STOP]
    assert decisions[-1].rule == "software.step_unknown"


def test_an_exit_code_alone_takes_three():
    weak = raised(step=None, signature="exit 3: config # is not valid")

    assert [d.action for d in story(weak, weak, weak)] == [RESTART, RESTART, STOP]


def test_the_budget_need_not_be_spent_first():
    assert [d.action for d in story(raised(), raised(), on=wide(1, restarts_max=5))] == [
        RESTART,
        STOP,
    ]


def test_evidence_against_a_node_keeps_the_run_going():
    decision = last(raised(), [raised(), xid("n2")], on=wide(3))

    assert decision.action is RESTART
    assert set(decision.exclude) == {"n2"}


def test_the_same_on_nearly_all_ranks_of_all_nodes_stops_at_once():
    both = [raised("n1", 0), raised("n2", 1)]
    decision = last(both, both, on=wide(2))

    assert decision.action is STOP
    assert decision.cause.confidence is Confidence.CONFIRMED
    assert "'labels' (with 1 more rank); the same 2 times" in decision.reason


def test_the_same_on_one_node_only_gets_one_attempt_elsewhere():
    here = [raised("n2", gpu_uuid="GPU-b"), stopped("n1", ends=(rank_end(0, role=Role.TEARDOWN),))]
    decisions = story(here, here, on=wide(3))

    assert [d.action for d in decisions] == [RESTART, RESTART]
    assert decisions[-1].rule == "software.suspect_node"
    assert set(decisions[-1].exclude) == {"n2"}
    assert "GPU-b" in decisions[-1].reason


def test_and_then_stops_if_it_comes_again_elsewhere():
    def at(node):
        return [raised(node), stopped("n1", ends=(rank_end(0, role=Role.TEARDOWN),))]

    decision = last(at("n2"), at("n2"), at("n3"), on=wide(3))

    assert (decision.action, decision.rule) == (STOP, "software.same_step")
    assert "3 times" in decision.reason


@pytest.mark.parametrize(
    "on",
    [
        cluster("n1"),
        cluster("n1", "n2", terms=RestartPolicy(nodes_min=2, nodes_max=2)),
        cluster("n1", "n2", terms=RestartPolicy(nodes_max=2, on_exhausted=OnExhausted.REQUEUE)),
        cluster(
            "n1", "n2", "n3", terms=RestartPolicy(nodes_min=2, nodes_max=3), excluded={"n2": "x"}
        ),
    ],
)
def test_without_enough_other_nodes_it_stops_at_once(on):
    here = [raised("n1"), stopped("n2", ends=(rank_end(0, role=Role.TEARDOWN),))]

    assert last(here, here, on=on).action is STOP


def test_a_spare_makes_an_attempt_elsewhere_possible():
    terms = RestartPolicy(nodes_min=2, nodes_max=2)
    on = ClusterState(policy=terms, generation=0, members=("n1", "n2"), live=("n1", "n2", "n3"))
    here = [raised("n1"), stopped("n2", ends=(rank_end(0, role=Role.TEARDOWN),))]

    assert last(here, here, on=on).rule == "software.suspect_node"


def test_a_failure_that_has_moved_between_nodes_is_the_program_s():
    def at(node):
        return [raised(node), stopped("n3", ends=(rank_end(0, role=Role.TEARDOWN),))]

    assert last(at("n1"), at("n2"), on=wide(3)).action is STOP


# ---- benign exit codes -----------------------------------------------------------------------


def test_a_benign_exit_code_is_a_restart_that_counts_and_never_a_software_fault():
    ends = (replace(raised().ends[0], exit_code=17, signature="exit 17: rerun"),)
    again = raised(ends=ends)
    terms = RestartPolicy(benign_exit_codes=frozenset({16, 17}), restarts_max=3)
    decisions = story(*[again] * 5, on=cluster("n1", terms=terms))

    assert [d.action for d in decisions] == [RESTART, RESTART, RESTART, FAIL, FAIL]
    assert decisions[0].rule == "restart.benign"
    assert decisions[0].failure.signature is None


# ---- nodes -----------------------------------------------------------------------------------


def test_a_sick_gpu_is_a_restart_without_its_node():
    decision = last([report("n1"), xid("n2")], on=wide(3))

    assert (decision.action, decision.rule) == (RESTART, "node.excluded")
    assert decision.exclude == {"n2": "gpu_hw.fell_off_bus: Xid 79"}
    assert decision.cause.node == "n2"


def test_every_blamed_node_is_left_out_at_once():
    assert set(last([xid("n1"), xid("n3")], on=wide(3)).exclude) == {"n1", "n3"}


def test_a_worker_in_state_d_is_a_restart_without_its_node():
    stuck = rank_end(1, failure_class=FailureClass.HANG_D_STATE, signal=None)
    d_state = report(
        "n2",
        ReportKind.HANG,
        failure_class=FailureClass.HANG_D_STATE,
        blames_node=True,
        ends=(stuck,),
    )

    assert set(last([d_state], on=wide(2)).exclude) == {"n2"}


@pytest.mark.parametrize(
    "failure_class",
    [
        FailureClass.HANG_COLLECTIVE,
        FailureClass.HANG_STOPPED,
        FailureClass.HANG_GIL_HELD,
        FailureClass.HANG_NO_PROGRESS,
    ],
)
def test_another_hang_is_a_restart_with_its_node(failure_class):
    end = rank_end(1, failure_class=failure_class, signal=None)
    decision = last(report("n2", ReportKind.HANG, failure_class=failure_class, ends=(end,)))

    assert (decision.action, decision.exclude) == (RESTART, {})
    assert decision.failure.is_counted


def hung(node="n1", step=None, signature="hang at train.py in load", role=Role.SYMPTOM, **changes):
    """Return the report of a node whose ranks stand still, nobody named unless *role* says so."""
    what = FailureClass.HANG_NO_PROGRESS
    ends = tuple(
        rank_end(rank, failure_class=what, role=role, signal=None, signature=signature, step=step)
        for rank in (0, 1)
    )
    fields = {"failure_class": what, "ends": ends, "has_stepped": step is not None}
    return report(node, ReportKind.HANG, **{**fields, "last_step": step, **changes})


@pytest.mark.parametrize(
    ("step", "rule"), [(None, "software.before_first_step"), (57, "software.same_step")]
)
@pytest.mark.parametrize("role", [Role.SYMPTOM, Role.ROOT])
def test_the_same_place_without_progress_never_spends_the_whole_budget(step, rule, role):
    decisions = story(*[hung(step=step, role=role)] * 3)

    assert [made.action for made in decisions] == [RESTART, RESTART, STOP]
    assert decisions[-1].rule == rule
    assert decisions[-1].exit_code == 93


@pytest.mark.parametrize(
    "other",
    [
        hung(signature="hang at train.py in skip"),
        hung(signature=None),
        hung(step=60),
        hung(failure_class=FailureClass.HANG_STOPPED),
    ],
    ids=["another place", "no place", "made steps", "stopped"],
)
def test_a_hang_elsewhere_or_after_progress_is_another_one(other):
    rules = [made.rule for made in story(hung(), other, hung(), on=wide(1, restarts_max=9))]

    assert rules == ["restart"] * 3


def test_a_place_without_progress_on_one_node_only_is_tried_without_it():
    rounds = [[hung("n1", 57, role=Role.ROOT), stopped("n2")]] * 3

    assert last(*rounds, on=wide(2)).rule == "software.suspect_node"


def test_an_application_s_xid_is_a_restart_with_its_node():
    fault = xid("n2", failure_class=FailureClass.GPU_ILLEGAL_ACCESS, blames_node=False)

    assert last([fault], on=wide(2)).exclude == {}


def test_a_lost_node_is_not_excluded_because_it_may_come_back():
    on = ClusterState(
        policy=RestartPolicy(nodes_max=3),
        generation=0,
        members=("n1", "n2", "n3"),
        live=("n1", "n3"),
    )
    decision = last([lost("n2"), stopped("n1"), stopped("n3")], on=on)

    assert (decision.action, decision.rule) == (RESTART, "node.lost")
    assert decision.exclude == {}
    assert decision.failure.is_counted
    assert decision.failure.nodes == ("n2",)


def test_a_node_that_fails_its_gate_is_left_out_and_does_not_count():
    gate = report("n2", ReportKind.GATE_FAILED, failure_class=FailureClass.GPU_ROW_REMAP)
    decisions = story(*[[gate]] * 6, on=wide(3, restarts_max=1))

    assert {(d.action, d.rule) for d in decisions} == {(RESTART, "gate.failed")}
    assert set(decisions[0].exclude) == {"n2"}
    assert not decisions[0].failure.is_counted


def test_a_node_that_is_already_left_out_is_not_named_again():
    on = cluster("n1", "n2", excluded={"n2": "before"})

    assert last([xid("n2")], on=on).exclude == {}


def test_a_stranger_is_never_excluded():
    assert last([xid("nobody")], on=wide(2)).exclude == {}


# ---- too few nodes ---------------------------------------------------------------------------


def test_too_few_nodes_are_a_requeue():
    on = ClusterState(
        policy=RestartPolicy(nodes_min=2, nodes_max=2),
        generation=0,
        members=("n1", "n2"),
        live=("n1",),
    )
    decision = last([lost("n2"), stopped("n1")], on=on)

    assert (decision.action, decision.rule, decision.exit_code) == (REQUEUE, "nodes.exhausted", 85)
    assert "1 nodes remain, at least 2" in decision.reason


def test_a_spare_fills_the_hole():
    on = ClusterState(
        policy=RestartPolicy(nodes_min=2, nodes_max=2),
        generation=0,
        members=("n1", "n2"),
        live=("n1", "n2", "n3"),
    )

    assert last([xid("n2")], on=on).action is RESTART


@pytest.mark.parametrize(
    ("live", "unit", "minimum", "wanted"),
    [
        (4, 1, 1, 4),
        (3, 2, 2, 2),
        (5, 2, 2, 4),
        (1, 2, 2, 0),
        (9, 1, 1, 8),
        (9, 4, 4, 8),
        (3, 1, 4, 0),
        (0, 1, 1, 0),
    ],
)
def test_seats_are_the_largest_multiple_of_the_unit(live, unit, minimum, wanted):
    on = ClusterState(
        policy=RestartPolicy(nodes_min=minimum, nodes_max=8, node_unit=unit),
        generation=0,
        members=(),
        live=tuple(f"n{i}" for i in range(live)),
    )

    assert trainable_nodes(on) == wanted
    assert trainable_nodes(replace(on, live=on.live * 2)) == wanted


def test_with_requeue_a_run_never_shrinks():
    terms = RestartPolicy(nodes_min=1, nodes_max=3, on_exhausted=OnExhausted.REQUEUE)
    on = cluster("n1", "n2", "n3", terms=terms)

    assert last([xid("n2")], on=on).rule == "nodes.exhausted"
    assert last([report("n1")], on=on).action is RESTART


def test_a_one_node_run_on_a_sick_node_is_requeued_as_unhealthy():
    decision = last(xid("n1"))

    assert (decision.action, decision.rule, decision.exit_code) == (REQUEUE, "node.unhealthy", 86)
    assert set(decision.exclude) == {"n1"}


def test_several_nodes_that_are_all_sick_are_a_plain_requeue():
    assert last([xid("n1"), xid("n2")], on=wide(2)).exit_code == 85


# ---- what does not count ---------------------------------------------------------------------


def test_a_preemption_is_a_requeue_and_does_not_count():
    notice = stopped("n1", failure_class=FailureClass.PREEMPTED, side=Side.SCHEDULER)
    decision = last([notice, raised("n2")], on=wide(2))

    assert (decision.action, decision.exit_code) == (REQUEUE, 85)
    assert not decision.failure.is_counted


def test_a_taken_port_does_not_count_but_not_for_ever():
    taken = of_class(FailureClass.PORT_TAKEN, step=None, is_infrastructure=True)
    decisions = story(*[taken] * (INFRASTRUCTURE_FAILURES_MAX + 3), on=wide(1, restarts_max=2))

    assert [d.rule for d in decisions] == (
        ["launch.infrastructure"] * INFRASTRUCTURE_FAILURES_MAX
        + ["restart", "restart", "budget.spent"]
    )
    assert not any(d.failure.is_counted for d in decisions[:INFRASTRUCTURE_FAILURES_MAX])


def test_a_refused_start_is_infrastructure_too():
    refused = report("n1", ReportKind.START_FAILED, failure_class=FailureClass.START_FAILED)

    assert last([refused, stopped("n2")], on=wide(2)).rule == "launch.infrastructure"


# ---- the budget ------------------------------------------------------------------------------


def test_a_spent_budget_fails_the_run():
    decisions = story(*[report("n1")] * 4)

    assert [d.action for d in decisions] == [RESTART, RESTART, RESTART, FAIL]
    assert (decisions[-1].rule, decisions[-1].exit_code) == ("budget.spent", 1)


def test_no_restarts_at_all():
    assert last(report("n1"), on=wide(1, restarts_max=0)).action is FAIL


def test_a_window_forgets():
    on = wide(1, restarts_max=1, restarts_window_s=150.0)

    assert [d.action for d in story(*[report("n1")] * 3, on=on, every_s=200)] == [RESTART] * 3
    assert [d.action for d in story(*[report("n1")] * 2, on=on, every_s=100)] == [RESTART, FAIL]


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        (
            of_class(FailureClass.PORT_TAKEN, step=None, is_infrastructure=True),
            "launch.infrastructure",
        ),
        (report("n2", ReportKind.GATE_FAILED), "gate.failed"),
    ],
)
def test_what_does_not_count_restarts_also_with_the_budget_spent(told, rule):
    on = wide(2, restarts_max=0)

    decision = last([told, stopped("n1")], on=on)

    assert (decision.action, decision.rule) == (RESTART, rule)
    assert not decision.failure.is_counted


def test_a_budget_beyond_what_the_record_holds_is_kept():
    decisions = story(*[report("n1")] * 60, on=wide(1, restarts_max=50))

    assert [d.action for d in decisions[:51]] == [RESTART] * 50 + [FAIL]


def test_node_losses_count():
    on = wide(3, restarts_max=1)

    assert [d.action for d in story([lost("n2")], [lost("n3")], on=on)] == [RESTART, FAIL]


# ---- back-off --------------------------------------------------------------------------------


def test_back_off_doubles_without_progress_up_to_its_limit():
    on = wide(1, restarts_max=99)

    assert [d.backoff_s for d in story(*[report("n1")] * 8, on=on)] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_progress_resets_the_back_off():
    on = wide(1, restarts_max=99)
    steps = [10, 10, 10, 20, 20, 15]
    rounds = [report("n1", ends=(rank_end(step=s),), last_step=s, has_stepped=True) for s in steps]

    assert [d.backoff_s for d in story(*rounds, on=on)] == [0, 1, 2, 0, 1, 2]


def test_an_hour_of_unnumbered_steps_is_progress():
    rounds = [report("n1", ends=(rank_end(step=None),), has_stepped=True)] * 3

    assert [d.backoff_s for d in story(*rounds, every_s=3600)] == [0, 0, 0]
    assert [d.backoff_s for d in story(*rounds, every_s=60)] == [0, 1, 2]


# ---- a poisoned checkpoint -------------------------------------------------------------------


def test_a_checkpoint_after_which_the_run_fails_twice_is_left_out_once():
    bad = raised(step=103, checkpoint_step=100)
    decisions = story(bad, bad, bad)

    assert [d.rule for d in decisions] == ["restart", "checkpoint.poisoned", "software.same_step"]
    assert decisions[1].action is RESTART
    assert decisions[1].exclude_checkpoint == 100


def test_also_for_a_crash_and_before_the_first_step():
    crash = of_class(FailureClass.SEGFAULT, step=None, checkpoint_step=100)
    other = of_class(FailureClass.STORAGE_IO_ERROR, step=None, checkpoint_step=100)
    decisions = story(crash, other, crash)

    assert [d.exclude_checkpoint for d in decisions] == [None, 100, None]
    assert decisions[2].action is RESTART


@pytest.mark.parametrize(
    ("saved", "highest", "after"),
    [
        (90, 95, 100),
        (90, 180, 100),  # past it, but nothing was saved since
        (100, 104, 100),  # saved anew, and fails as soon as the one that was left out
        (None, None, 100),
        (100, None, 100),  # where steps are not known, what is known as saved may be the old one
        (100, 106, None),
        (200, 250, None),
    ],
)
def test_it_is_left_out_until_the_run_has_got_past_it_and_saved_anew(saved, highest, after):
    failed = decision(failure=failure(checkpoint_step=saved, highest_step=highest))

    assert checkpoint_to_exclude(100, failed) == after
    assert checkpoint_to_exclude(None, failed) is None
    assert checkpoint_to_exclude(100, replace(failed, exclude_checkpoint=90)) == 90


@pytest.mark.parametrize(
    "second",
    [
        of_class(FailureClass.SEGFAULT, step=106, checkpoint_step=100),
        of_class(FailureClass.SEGFAULT, step=103, checkpoint_step=102),
        of_class(FailureClass.SEGFAULT, step=103),
        of_class(FailureClass.CUDA_OOM, step=103, checkpoint_step=100),
        of_class(FailureClass.SIGKILL_PROBABLE, step=103, checkpoint_step=100),
        xid("n1", checkpoint_step=100, last_step=103),
        lost("n1"),
    ],
)
def test_what_does_not_speak_against_the_checkpoint(second):
    first = of_class(FailureClass.SEGFAULT, step=103, checkpoint_step=100)

    assert last(first, second, on=wide(3)).exclude_checkpoint is None


def test_a_checkpoint_from_which_the_run_went_on_is_good():
    near = of_class(FailureClass.SEGFAULT, step=103, checkpoint_step=100)
    far = of_class(FailureClass.SIGKILL_PROBABLE, step=150, checkpoint_step=100)

    assert last(near, far, near).exclude_checkpoint is None


def test_with_the_budget_spent_no_checkpoint_is_left_out():
    near = of_class(FailureClass.SEGFAULT, step=103, checkpoint_step=100)

    assert last(near, near, on=wide(1, restarts_max=1)).action is FAIL


# ---- what holds for any input ----------------------------------------------------------------

NODES = [f"n{i}" for i in range(6)]
steps = st.none() | st.integers(0, 120)
ends = st.builds(
    RankEnd,
    rank=st.integers(0, 40),
    local_rank=st.integers(0, 7),
    role=st.sampled_from(Role),
    failure_class=st.sampled_from(FailureClass),
    side=st.sampled_from(Side),
    signature=st.sampled_from([None, KEY_ERROR, "exit 3: no"]),
    exit_code=st.sampled_from([None, 0, 1, 17]),
    step=steps,
    gpu_uuid=st.sampled_from([None, "GPU-a", "GPU-b"]),
    summary=st.text(max_size=700),
    log_path=st.sampled_from([None, "/runs/a.log"]),
)


def reports_of(names):
    return st.tuples(
        *(
            st.builds(
                NodeReport,
                kind=st.sampled_from(ReportKind),
                node=st.just(name),
                generation=st.just(3),
                failure_class=st.sampled_from(FailureClass),
                side=st.sampled_from(Side),
                confidence=st.sampled_from(Confidence),
                how=st.text(max_size=50),
                culprits=st.just((Entity(EntityKind.RANK, "1"),)),
                blames_node=st.booleans(),
                has_stepped=st.booleans(),
                last_step=steps,
                checkpoint_step=steps,
                ends=st.lists(ends, max_size=3).map(tuple),
                is_infrastructure=st.booleans(),
                arrival=st.integers(0, 3),
            )
            for name in names
        )
    )


some_reports = st.lists(st.sampled_from([*NODES, "stranger"]), unique=True, max_size=5).flatmap(
    reports_of
)
pasts = st.builds(
    PastFailure,
    generation=st.integers(0, 5),
    at_s=st.floats(0, 1000),
    failure_class=st.sampled_from(FailureClass),
    side=st.sampled_from(Side),
    is_counted=st.booleans(),
    signature=st.sampled_from([None, KEY_ERROR, "exit 3: no"]),
    step=steps,
    has_stepped=st.booleans(),
    checkpoint_step=steps,
    nodes=st.lists(st.sampled_from(NODES), unique=True, max_size=2).map(tuple),
    gpu_uuids=st.just(()),
    log_path=st.sampled_from([None, "/runs/b.log"]),
    rule=st.just("restart"),
    is_infrastructure=st.booleans(),
    highest_step=steps,
    excluded_checkpoint=steps,
)
terms_s = st.builds(
    RestartPolicy,
    nodes_min=st.integers(1, 4),
    nodes_max=st.integers(1, 6),
    node_unit=st.integers(1, 3),
    restarts_max=st.integers(0, 5),
    restarts_window_s=st.none() | st.floats(1, 1000),
    on_exhausted=st.sampled_from(OnExhausted),
    benign_exit_codes=st.just(frozenset({17})),
)
clusters = st.builds(
    ClusterState,
    policy=terms_s,
    generation=st.just(3),
    members=st.lists(st.sampled_from(NODES), unique=True).map(tuple),
    live=st.lists(st.sampled_from(NODES), unique=True).map(tuple),
    excluded=st.dictionaries(st.sampled_from(NODES), st.just("before"), max_size=2),
    suspected=st.dictionaries(st.sampled_from([*NODES, "stranger"]), st.just("slow"), max_size=4),
)
histories = st.lists(pasts, max_size=6).map(tuple)


@settings(max_examples=draws(100))
@given(some_reports, clusters, histories, st.integers(0, 100))
def test_the_order_of_reports_changes_nothing(reports, on, history, seed):
    mixed = list(reports)
    random.Random(seed).shuffle(mixed)

    assert decide(mixed, on, history, 1000) == decide(reports, on, history, 1000)


@settings(max_examples=draws(250))
@given(some_reports, clusters, histories)
def test_what_holds_for_every_decision(reports, on, history):
    decision = decide(reports, on, history, 1000)

    assert set(decision.exclude) <= {*on.members, *on.live} - set(on.excluded)
    undoubted = decide(reports, replace(on, suspected={}), history, 1000)
    assert (decision.action, decision.rule, decision.failure) == (
        *(undoubted.action, undoubted.rule, undoubted.failure),
    )
    spared = set(decision.exclude) - set(undoubted.exclude)
    assert spared <= set(on.suspected)
    assert trainable_nodes(on, decision.exclude) >= trainable_nodes(on, undoubted.exclude) - len(
        spared
    )
    if decision.action is RESTART:
        assert trainable_nodes(on, decision.exclude) >= on.policy.nodes_min
        assert decision.exit_code is None
    else:
        assert decision.exit_code in {1, 64, 85, 86, 93}
        assert decision.backoff_s == 0
    assert 0 <= decision.backoff_s <= 30
    is_usage_error = decision.rule in {*USAGE, "launcher.start_failed"}
    assert (decision.exit_code == 64) is is_usage_error
    if decision.action is STOP and not is_usage_error:
        earlier = [past for past in history if past.signature == decision.failure.signature]
        assert decision.failure.signature is not None
        assert earlier
        assert not decision.exclude
        assert decision.exit_code == 93
    if decision.exclude_checkpoint is not None:
        assert all(p.excluded_checkpoint != decision.exclude_checkpoint for p in history)
    assert f"\n{decision.rule} " in module.__doc__
    assert decision.failure.rule == decision.rule


@settings(max_examples=draws(60))
@given(some_reports, clusters, histories)
def test_a_decision_and_all_it_was_made_of_survive_their_json_forms(reports, on, history):
    decision = decide(reports, on, history, 1000)

    for item in (*reports, *history, on, on.policy):
        again = type(item).from_json(item.to_json())
        assert type(item).from_json(again.to_json()) == again
    assert RestartDecision.from_json(decision.to_json()).to_json() == decision.to_json()
    assert ClusterState.from_json(on.to_json()) == on


def test_the_node_of_a_failure_stands_before_what_the_program_said():
    assert last(raised("n1")).reason.startswith("rank 1 on n1 raised KeyError: 'labels'; ")


@pytest.mark.parametrize(
    ("most", "said"),
    [(0, "no restart is allowed"), (1, "the only restart is spent"), (2, "all 2 restarts are")],
)
def test_a_spent_budget_is_told_in_whole_words(most, said):
    decision = last(
        *[report("n1")] * (most + 1), on=cluster("n1", terms=RestartPolicy(restarts_max=most))
    )

    assert decision.rule == "budget.spent"
    assert said in decision.reason
