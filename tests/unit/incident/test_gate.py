"""What becomes of a node that fails, and whose drain is whose."""

import pytest
from support.checks import NODE

from gpuops.config.resolve import GateMode
from gpuops.gate.policy import (
    DRAINING_ACTIONS,
    DrainCause,
    DrainOutcome,
    DrainStep,
    FleetView,
    PermitReply,
    decide_drain,
    find_drain_causes,
    may_resume,
    next_drain_step,
    proves_healthy,
    replaceable_reasons,
    return_refusal,
)
from gpuops.host.node_state import FleetCount
from gpuops.model import ActionKind, FailureClass, Finding, ReturnCondition, Status, UnknownReason
from gpuops.slurm.scontrol import SlurmNode
from gpuops.store.fuse import FuseSettings

LOST, MISSING = FailureClass.GPU_FELL_OFF_BUS, FailureClass.GPU_MISSING
DRAINS = {LOST: ActionKind.DRAIN, MISSING: ActionKind.DRAIN}


def finding(status=Status.FAIL, kind=LOST, check="gpu_lost", value=None, **judged):
    return Finding(
        check=check,
        entity=NODE,
        status=status,
        message="of a test",
        value=value,
        failure_class=kind if status is Status.FAIL else None,
        unknown_reason=UnknownReason.TIMEOUT if status is Status.UNKNOWN else None,
        **judged,
    )


def cause(kind=LOST, check="gpu_lost", **judged):
    found = finding(kind=kind, check=check, **judged)
    return DrainCause(finding=found, failure_class=kind, action=DRAINS[kind])


@pytest.mark.parametrize("status", [Status.PASS, Status.SKIP, Status.WARN, Status.UNKNOWN])
def test_only_a_failure_takes_a_node_out(status):
    assert find_drain_causes([finding(status)], DRAINS) == []
    assert find_drain_causes([finding()], DRAINS) == [cause()]


@pytest.mark.parametrize("action", ActionKind)
def test_a_failure_takes_the_node_out_where_its_runbook_says_so(action):
    found = find_drain_causes([finding()], {LOST: action})

    assert bool(found) == (action in DRAINING_ACTIONS)


def test_a_failure_class_without_a_runbook_takes_no_node_out():
    assert find_drain_causes([finding()], {}) == []


def test_of_several_causes_the_hardwares_own_goes_first_and_a_check_has_one():
    by_limit = finding(kind=MISSING, check="gpu_count")
    again = finding(kind=MISSING, check="gpu_count", value=2)
    shared = finding(kind=MISSING, check="ib_ports", shared_cause=True)
    reported = finding(hardware_reported=True)

    found = find_drain_causes([by_limit, again, shared, reported], DRAINS)

    assert [item.finding for item in found] == [reported, shared, by_limit]


@pytest.mark.parametrize(
    ("value", "shown"), [(79, " 79"), (79.0, " 79"), (0.25, " 0.25"), ("off", " off"), (None, "")]
)
def test_a_reason_shows_the_value_as_a_person_would(value, shown):
    (found,) = find_drain_causes([finding(value=value)], DRAINS)

    assert found.reason(None) == f"gpuops: fail gpu_lost n1{shown} -> drain"


SILENT = PermitReply(None, "no answer")
GRANTED = PermitReply(granted=True, why="0 other nodes")
REFUSED = PermitReply(granted=False, why="4 nodes")
HARDWARE = {"hardware_reported": True}
SHARED = {"shared_cause": True}
NOW_US = 1_760_000_000_000_000
# What the health check last saved: the fleet's size and drains, and its age in seconds.
NONE, FEW, MANY, OLD = None, (100, 9, 0), (100, 10, 900), (100, 10, 901)


def fleet(saved=None, **settings):
    count = None
    if saved is not None:
        seen, drained, age_s = saved
        count = FleetCount(t_us=NOW_US - age_s * 1_000_000, seen=seen, drained=drained)
    return FleetView(settings=FuseSettings(**settings), count=count, now_us=NOW_US)


def decide(judged, reply, saved=None, mode=GateMode.ENFORCE, skip_reason=None):
    replies = [] if reply is None else [reply]
    return decide_drain([cause(**judged)], mode, replies, fleet(saved), skip_reason)[1]


@pytest.mark.parametrize(
    ("judged", "reply", "saved", "outcome"),
    [
        # The store answers, the fuse is closed or has room: drain.
        (HARDWARE, GRANTED, NONE, DrainOutcome.DRAIN),
        (SHARED, GRANTED, NONE, DrainOutcome.DRAIN),
        ({}, GRANTED, MANY, DrainOutcome.DRAIN),
        # The fuse is tripped.
        (HARDWARE, REFUSED, NONE, DrainOutcome.TRIPPED),
        (SHARED, REFUSED, NONE, DrainOutcome.TRIPPED),
        ({}, REFUSED, FEW, DrainOutcome.TRIPPED),
        # The store does not answer: what the hardware reported drains, up to the last fleet count.
        (HARDWARE, SILENT, NONE, DrainOutcome.DRAIN),
        (HARDWARE, SILENT, FEW, DrainOutcome.DRAIN),
        (HARDWARE, SILENT, MANY, DrainOutcome.NO_PERMIT),
        (HARDWARE, SILENT, OLD, DrainOutcome.DRAIN),
        (SHARED, SILENT, NONE, DrainOutcome.NO_PERMIT),
        (SHARED, SILENT, FEW, DrainOutcome.NO_PERMIT),
        (SHARED | HARDWARE, SILENT, NONE, DrainOutcome.NO_PERMIT),
        ({}, SILENT, NONE, DrainOutcome.NO_PERMIT),
        ({}, SILENT, FEW, DrainOutcome.NO_PERMIT),
    ],
)
def test_who_judged_a_failure_decides_what_the_fuse_may_stop(judged, reply, saved, outcome):
    decision = decide(judged, reply, saved)

    assert decision.outcome is outcome
    assert decision.drains == (outcome is DrainOutcome.DRAIN)


def test_a_setting_of_the_cap_holds_without_the_store_too():
    causes, silent = [cause(**HARDWARE)], [SILENT]

    def drains(max_drained):
        view = fleet((100, 9, 0), max_drained=max_drained)
        return decide_drain(causes, GateMode.ENFORCE, silent, view)[1].drains

    assert [drains(9), drains(10)] == [False, True]


def test_a_count_from_the_future_is_not_used():
    assert decide(HARDWARE, SILENT, (100, 10, -1)).drains


def test_the_cause_that_is_granted_is_the_one_that_the_node_is_drained_for():
    causes = [cause(**HARDWARE), cause(MISSING, "gpu_count")]

    found, decision = decide_drain(causes, GateMode.ENFORCE, [REFUSED, GRANTED], fleet())
    refused, tripped = decide_drain(causes, GateMode.ENFORCE, [REFUSED, REFUSED], fleet())

    assert (found, decision.outcome) == (causes[1], DrainOutcome.DRAIN)
    assert (refused, tripped.outcome) == (causes[0], DrainOutcome.TRIPPED)


def test_nothing_is_decided_about_a_node_without_a_cause():
    for mode in GateMode:
        found, decision = decide_drain([], mode, [], fleet())

        assert (found, decision.outcome) == (None, DrainOutcome.START)


@pytest.mark.parametrize("reply", [None, GRANTED])
def test_observe_only_says_what_would_be_drained(reply):
    decision = decide({}, reply, mode=GateMode.OBSERVE, skip_reason="drained already")

    assert decision.outcome is DrainOutcome.WOULD_DRAIN


def test_a_node_that_is_drained_already_is_left_as_it_is():
    assert decide({}, None, skip_reason="drained already").outcome is DrainOutcome.LEFT_ALONE


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


def test_after_a_sweep_nothing_has_to_fail_as_no_health_check_repeats_its_tests():
    assert proves_healthy([finding(Status.PASS)], "sweep")
    assert not proves_healthy([finding(Status.PASS), finding(Status.FAIL)], "sweep")


def test_another_checks_failure_keeps_a_node_out():
    findings = [finding(Status.PASS), finding(kind=MISSING, check="gpu_count")]

    assert not proves_healthy(findings, "gpu_lost")


@pytest.mark.parametrize(
    ("condition", "tested_us", "repaired_us", "returns"),
    [
        (ReturnCondition.CHECK, None, (), True),
        (ReturnCondition.DIAG, None, (), False),
        (ReturnCondition.DIAG, 99, (), False),  # before the drain
        (ReturnCondition.DIAG, 101, (), True),
        (ReturnCondition.BURNIN, 101, (), True),
        (ReturnCondition.BURNIN, 100, (), False),
        (ReturnCondition.PERSON, 101, (), False),
        (ReturnCondition.PERSON, None, (50, 101), True),
        (ReturnCondition.PERSON, None, (50, 99), False),  # of an earlier fault
        (ReturnCondition.DIAG, None, (99,), False),
    ],
)
def test_what_lets_a_node_return_came_after_its_drain(condition, tested_us, repaired_us, returns):
    refusal = return_refusal(condition, 100, tested_us, repaired_us)

    assert (refusal is None) == returns, refusal
