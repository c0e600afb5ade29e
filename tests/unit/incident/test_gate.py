"""What becomes of a node that fails, and whose drain is whose."""

import pytest
from support.checks import NODE

from gpuops.config import Mode
from gpuops.incident.gate import (
    NOT_ASKED,
    OWN_VERDICT,
    TAKES_NODE_OUT,
    Cause,
    Course,
    Permission,
    Step,
    cause_of,
    decide,
    may_resume,
    next_step,
    proves_healthy,
    replaceable,
)
from gpuops.incident.runbook import load_runbooks
from gpuops.model import ActionKind, FailureClass, Finding, Status, UnknownReason
from gpuops.resources import data_dir
from gpuops.slurm.nodes import NodeView

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
    return Cause(finding=finding(kind=kind, check=check), failure_class=kind, action=DRAINS[kind])


@pytest.mark.parametrize("status", [Status.PASS, Status.SKIP, Status.WARN, Status.UNKNOWN])
def test_only_a_failure_takes_a_node_out(status):
    assert cause_of([finding(status)], DRAINS) is None
    assert cause_of([finding()], DRAINS) == cause()


@pytest.mark.parametrize("action", ActionKind)
def test_a_failure_takes_the_node_out_where_its_runbook_says_so(action):
    found = cause_of([finding()], {LOST: action})

    assert (found is not None) == (action in TAKES_NODE_OUT)


def test_a_failure_class_without_a_runbook_takes_no_node_out():
    assert cause_of([finding()], {}) is None


def test_of_several_causes_the_hardwares_own_goes_first():
    counted = finding(kind=MISSING, check="gpu_count")

    assert cause_of([counted, finding()], DRAINS) == cause()
    assert cause_of([finding(), counted], DRAINS) == cause()


@pytest.mark.parametrize(
    ("value", "shown"), [(79, " 79"), (79.0, " 79"), (0.25, " 0.25"), ("off", " off"), (None, "")]
)
def test_a_reason_shows_the_value_as_a_person_would(value, shown):
    found = cause_of([finding(value=value)], DRAINS)

    assert found.reason(None) == f"gpuops: fail gpu_lost n1{shown} -> drain"


SILENT = Permission(None, "no answer")
GRANTED = Permission(granted=True, why="0 other nodes")
REFUSED = Permission(granted=False, why="3 nodes")


@pytest.mark.parametrize(
    ("found", "mode", "permission", "course"),
    [
        (None, Mode.ENFORCE, NOT_ASKED, Course.START),
        (None, Mode.OBSERVE, NOT_ASKED, Course.START),
        (cause(), Mode.OBSERVE, NOT_ASKED, Course.WOULD_DRAIN),
        (cause(), Mode.OBSERVE, GRANTED, Course.WOULD_DRAIN),
        (cause(), Mode.ENFORCE, GRANTED, Course.DRAIN),
        (cause(), Mode.ENFORCE, REFUSED, Course.FUSED),
        (cause(), Mode.ENFORCE, SILENT, Course.DRAIN),
        (cause(MISSING, "gpu_count"), Mode.ENFORCE, GRANTED, Course.DRAIN),
        (cause(MISSING, "gpu_count"), Mode.ENFORCE, REFUSED, Course.FUSED),
        (cause(MISSING, "gpu_count"), Mode.ENFORCE, SILENT, Course.NO_PERMIT),
        (cause(MISSING, "gpu_recovery_action"), Mode.ENFORCE, SILENT, Course.DRAIN),
    ],
)
def test_what_is_decided(found, mode, permission, course):
    decision = decide(found, mode, permission)

    assert decision.course is course
    assert decision.drains == (course is Course.DRAIN)


def test_a_node_that_is_drained_already_is_left_as_it_is():
    assert decide(cause(), Mode.ENFORCE, NOT_ASKED, "drained already").course is Course.LEFT
    assert decide(cause(), Mode.OBSERVE, NOT_ASKED, "drained already").course is Course.WOULD_DRAIN


def test_every_class_that_drains_without_a_permit_has_a_runbook_that_takes_the_node_out():
    runbooks = load_runbooks(data_dir("runbooks"))

    assert {kind for kind in OWN_VERDICT if runbooks[kind].action not in TAKES_NODE_OUT} == set()


OURS = "gpuops: fail gpu_lost n1 -> drain #1"


def view(reason=None, *states):
    return NodeView(name="n1", states=frozenset(states or {"IDLE"}), reason=reason)


@pytest.mark.parametrize(
    ("seen", "replaces", "was_set", "step"),
    [
        (view(), (), False, Step.SET),
        (view(), (), True, Step.LIFTED),
        (view(OURS, "IDLE", "DRAIN"), (), False, Step.DONE),
        (view(OURS, "IDLE", "DRAIN"), (), True, Step.DONE),
        (view("Prolog error", "IDLE", "DRAIN"), ("Prolog error",), False, Step.SET),
        (view("Prolog error", "IDLE", "DRAIN"), ("Prolog error",), True, Step.SET),
        (view("Prolog error", "IDLE", "DRAIN"), (), False, Step.YIELD),
        (view("Epilog error", "IDLE", "DRAIN"), ("Prolog error",), False, Step.YIELD),
        (view("ann: cable", "IDLE", "DRAIN"), ("Prolog error",), False, Step.YIELD),
        (view(f"{OURS}; ann keeps it", "IDLE", "DRAIN"), (), False, Step.YIELD),
        (view(OURS.replace("#1", "#0"), "IDLE", "DRAIN"), (), False, Step.YIELD),
        (view(None, "IDLE", "DRAIN"), (), False, Step.YIELD),
        (view("Not responding", "DOWN", "NOT_RESPONDING"), (), False, Step.WAIT),
        (view("ann: cable", "DOWN"), (), False, Step.YIELD),
    ],
)
def test_a_drain_of_ours_never_goes_over_somebody_elses(seen, replaces, was_set, step):
    assert next_step(seen, OURS, replaces=replaces, was_set=was_set) is step


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
    assert replaceable(hook, earlier, earlier_replaces) == words


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
