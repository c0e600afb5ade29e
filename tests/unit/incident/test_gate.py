"""What becomes of a node that fails, and whose drain is whose."""

import pytest
from support.checks import NODE

from gpuops.config.resolve import GateMode
from gpuops.gate.policy import (
    DRAINING_ACTIONS,
    HARDWARE_REPORTED,
    NOT_ASKED,
    DrainCause,
    DrainOutcome,
    DrainStep,
    PermitReply,
    decide_drain,
    find_drain_cause,
    may_resume,
    next_drain_step,
    proves_healthy,
    replaceable_reasons,
)
from gpuops.incident.runbook import load_runbooks
from gpuops.model import ActionKind, FailureClass, Finding, Status, UnknownReason
from gpuops.resources import data_dir
from gpuops.slurm.scontrol import SlurmNode

LOST, MISSING = FailureClass.GPU_FELL_OFF_BUS, FailureClass.GPU_MISSING
DRAINS = {LOST: ActionKind.DRAIN, MISSING: ActionKind.DRAIN}


def finding(status=Status.FAIL, kind=LOST, check="gpu_lost", value=None):
    return Finding(
        check=check,
        entity=NODE,
        status=status,
        message="of a test",
        value=value,
        failure_class=kind if status is Status.FAIL else None,
        unknown_reason=UnknownReason.TIMEOUT if status is Status.UNKNOWN else None,
    )


def cause(kind=LOST, check="gpu_lost"):
    return DrainCause(
        finding=finding(kind=kind, check=check), failure_class=kind, action=DRAINS[kind]
    )


@pytest.mark.parametrize("status", [Status.PASS, Status.SKIP, Status.WARN, Status.UNKNOWN])
def test_only_a_failure_takes_a_node_out(status):
    assert find_drain_cause([finding(status)], DRAINS) is None
    assert find_drain_cause([finding()], DRAINS) == cause()


@pytest.mark.parametrize("action", ActionKind)
def test_a_failure_takes_the_node_out_where_its_runbook_says_so(action):
    found = find_drain_cause([finding()], {LOST: action})

    assert (found is not None) == (action in DRAINING_ACTIONS)


def test_a_failure_class_without_a_runbook_takes_no_node_out():
    assert find_drain_cause([finding()], {}) is None


def test_of_several_causes_the_hardwares_own_goes_first():
    counted = finding(kind=MISSING, check="gpu_count")

    assert find_drain_cause([counted, finding()], DRAINS) == cause()
    assert find_drain_cause([finding(), counted], DRAINS) == cause()


@pytest.mark.parametrize(
    ("value", "shown"), [(79, " 79"), (79.0, " 79"), (0.25, " 0.25"), ("off", " off"), (None, "")]
)
def test_a_reason_shows_the_value_as_a_person_would(value, shown):
    found = find_drain_cause([finding(value=value)], DRAINS)

    assert found.reason(None) == f"gpuops: fail gpu_lost n1{shown} -> drain"


SILENT = PermitReply(None, "no answer")
GRANTED = PermitReply(granted=True, why="0 other nodes")
REFUSED = PermitReply(granted=False, why="3 nodes")


@pytest.mark.parametrize(
    ("found", "mode", "permission", "course"),
    [
        (None, GateMode.ENFORCE, NOT_ASKED, DrainOutcome.START),
        (None, GateMode.OBSERVE, NOT_ASKED, DrainOutcome.START),
        (cause(), GateMode.OBSERVE, NOT_ASKED, DrainOutcome.WOULD_DRAIN),
        (cause(), GateMode.OBSERVE, GRANTED, DrainOutcome.WOULD_DRAIN),
        (cause(), GateMode.ENFORCE, GRANTED, DrainOutcome.DRAIN),
        (cause(), GateMode.ENFORCE, REFUSED, DrainOutcome.TRIPPED),
        (cause(), GateMode.ENFORCE, SILENT, DrainOutcome.DRAIN),
        (cause(MISSING, "gpu_count"), GateMode.ENFORCE, GRANTED, DrainOutcome.DRAIN),
        (cause(MISSING, "gpu_count"), GateMode.ENFORCE, REFUSED, DrainOutcome.TRIPPED),
        (cause(MISSING, "gpu_count"), GateMode.ENFORCE, SILENT, DrainOutcome.NO_PERMIT),
        (cause(MISSING, "gpu_recovery_action"), GateMode.ENFORCE, SILENT, DrainOutcome.DRAIN),
    ],
)
def test_what_is_decided(found, mode, permission, course):
    decision = decide_drain(found, mode, permission)

    assert decision.outcome is course
    assert decision.drains == (course is DrainOutcome.DRAIN)


def test_a_node_that_is_drained_already_is_left_as_it_is():
    assert (
        decide_drain(cause(), GateMode.ENFORCE, NOT_ASKED, "drained already").outcome
        is DrainOutcome.LEFT_ALONE
    )
    assert (
        decide_drain(cause(), GateMode.OBSERVE, NOT_ASKED, "drained already").outcome
        is DrainOutcome.WOULD_DRAIN
    )


def test_every_class_that_drains_without_a_permit_has_a_runbook_that_takes_the_node_out():
    runbooks = load_runbooks(data_dir("runbooks"))

    assert {
        kind for kind in HARDWARE_REPORTED if runbooks[kind].action not in DRAINING_ACTIONS
    } == set()


OURS = "gpuops: fail gpu_lost n1 -> drain #1"


def view(reason=None, *states):
    return SlurmNode(name="n1", states=frozenset(states or {"IDLE"}), reason=reason)


@pytest.mark.parametrize(
    ("seen", "replaces", "was_set", "step"),
    [
        (view(), (), False, DrainStep.SET),
        (view(), (), True, DrainStep.LIFTED),
        (view(OURS, "IDLE", "DRAIN"), (), False, DrainStep.DONE),
        (view(OURS, "IDLE", "DRAIN"), (), True, DrainStep.DONE),
        (view("Prolog error", "IDLE", "DRAIN"), ("Prolog error",), False, DrainStep.SET),
        (view("Prolog error", "IDLE", "DRAIN"), ("Prolog error",), True, DrainStep.SET),
        (view("Prolog error", "IDLE", "DRAIN"), (), False, DrainStep.YIELD),
        (view("Epilog error", "IDLE", "DRAIN"), ("Prolog error",), False, DrainStep.YIELD),
        (view("ann: cable", "IDLE", "DRAIN"), ("Prolog error",), False, DrainStep.YIELD),
        (view(f"{OURS}; ann keeps it", "IDLE", "DRAIN"), (), False, DrainStep.YIELD),
        (view(OURS.replace("#1", "#0"), "IDLE", "DRAIN"), (), False, DrainStep.YIELD),
        (view(None, "IDLE", "DRAIN"), (), False, DrainStep.YIELD),
        (view("Not responding", "DOWN", "NOT_RESPONDING"), (), False, DrainStep.WAIT),
        (view("ann: cable", "DOWN"), (), False, DrainStep.YIELD),
    ],
)
def test_a_drain_of_ours_never_goes_over_somebody_elses(seen, replaces, was_set, step):
    assert next_drain_step(seen, OURS, replaces=replaces, was_set=was_set) is step


@pytest.mark.parametrize(
    ("hook", "earlier", "earlier_replaces", "words"),
    [
        ("prolog", None, (), ["Prolog error"]),
        ("epilog", None, (), ["Epilog error"]),
        ("health", None, (), []),
        ("epilog", OURS, ("Prolog error",), ["Epilog error", "Prolog error", OURS]),
        ("health", OURS, ("gpuops: fail older",), [OURS]),
    ],
)
def test_what_a_drain_may_take_the_place_of(hook, earlier, earlier_replaces, words):
    assert replaceable_reasons(hook, earlier, earlier_replaces) == words


@pytest.mark.parametrize(
    ("seen", "ours"),
    [
        (view(OURS, "IDLE", "DRAIN"), True),
        (view(f"{OURS} ", "IDLE", "DRAIN"), False),
        (view("ann: cable", "IDLE", "DRAIN"), False),
        (view("Prolog error", "IDLE", "DRAIN"), False),
        (view(OURS, "DOWN", "DRAIN"), False),
        (view(OURS, "IDLE"), False),
    ],
)
def test_only_the_very_reason_that_we_recorded_is_ours_to_take_back(seen, ours):
    assert may_resume(seen, OURS) == ours


def test_a_reason_that_is_not_of_our_form_is_never_taken_back():
    assert not may_resume(view("ann: cable", "IDLE", "DRAIN"), "ann: cable")


@pytest.mark.parametrize(
    ("statuses", "healthy"),
    [
        ([Status.PASS], True),
        ([Status.PASS, Status.WARN], True),
        ([Status.PASS, Status.SKIP], True),
        ([], False),
        ([Status.SKIP], False),
        ([Status.WARN], False),
        ([Status.UNKNOWN], False),
        ([Status.PASS, Status.UNKNOWN], False),
        ([Status.FAIL], False),
    ],
)
def test_a_node_is_proven_healthy_by_the_check_that_drained_it(statuses, healthy):
    findings = [finding(status) for status in statuses]

    assert proves_healthy(findings, "gpu_lost") == healthy


def test_another_checks_failure_keeps_a_node_out():
    findings = [finding(Status.PASS), finding(kind=MISSING, check="gpu_count")]

    assert not proves_healthy(findings, "gpu_lost")
