"""A failure that may pass by itself counts when it was seen twice; others count at once."""

from dataclasses import dataclass, replace

import pytest

from gpuops.checks.core.check import Check, NoParameters, Probe
from gpuops.checks.core.suite import PlannedCheck
from gpuops.errors import ProbeError
from gpuops.gate.node_state import READ_S
from gpuops.gate.session import (
    AGAIN_AFTER_S,
    LEAST_S,
    CheckRequest,
    check_node,
    make_plan,
    recheck_failures,
)
from gpuops.host.clock import SystemClock
from gpuops.model import FailureClass, Finding, Status, UnknownReason

ENOUGH_S = AGAIN_AFTER_S + READ_S + LEAST_S


@dataclass(frozen=True)
class Said:
    """What the GPU says."""

    text: str


def read(machine, _budget_s):
    path = machine.root / "gpu"
    if not path.exists():
        raise ProbeError("no answer", UnknownReason.TIMEOUT)
    return Said(path.read_text())


def judge(facts, _parameters, case):
    found = Finding(check="a", entity=case.node, status=Status.PASS, message=facts.text)
    if facts.text == "free":
        return [found]
    return [replace(found, status=Status.FAIL, failure_class=FailureClass.HOST_LEFTOVERS)]


class Node:
    """A node with one check; what its GPU says is a file."""

    def __init__(self, home, *, passing):
        self.file, self.paused = home / "gpu", []
        self.says("busy")
        check = Check(
            name="a",
            about="",
            probe=Probe("a", Said, read),
            parameters=NoParameters,
            judge=judge,
            transient=passing,
        )
        plan = make_plan(
            CheckRequest(suite="prolog", node="n1", root=home, state_dir=home / "state", uid=0)
        )
        planned = (PlannedCheck(check, NoParameters(), 5.0),)
        self.plan = replace(plan, suite=replace(plan.suite, planned=planned))

    def says(self, text):
        self.file.write_text(text)

    def checked(self, *, then=lambda: None, left_s=ENOUGH_S + 60):
        """Return the finding, of which *then* is what happens between the two checks."""

        def pause(seconds):
            self.paused.append(seconds)
            then()

        ran = check_node(self.plan, SystemClock())
        found = recheck_failures(self.plan, ran, left_s, pause, SystemClock()).findings
        (finding,) = [item for item in found if item.check == "a"]
        return finding.status.word, finding.message


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, passing=True)


def test_what_is_seen_twice_fails(node):
    told = "busy, again in a second check 1.5 s later"

    assert node.checked() == ("fail", told)
    assert node.paused == [AGAIN_AFTER_S]


def test_what_passes_meanwhile_only_warns_and_both_checks_are_reported(node):
    told = "busy; not in a second check 1.5 s later"

    assert node.checked(then=lambda: node.says("free")) == ("warn", told)


def test_where_the_second_check_gives_no_answer_the_first_alone_refuses_nothing(node):
    told = "busy; in a second check 1.5 s later, without an answer"

    assert node.checked(then=node.file.unlink) == ("warn", told)


def test_a_second_check_is_started_where_it_has_just_enough_time(node):
    node.checked(left_s=ENOUGH_S + 0.01)
    assert node.paused == [AGAIN_AFTER_S]


def test_where_no_time_is_left_the_first_alone_refuses_nothing(node):
    told = "busy; no time was left for a second check"

    assert node.checked(left_s=ENOUGH_S - 0.01) == ("warn", told)
    assert node.paused == []


def test_what_passes_or_never_passes_by_itself_is_probed_once(node, tmp_path):
    node.says("free")

    assert node.checked() == ("pass", "free")
    assert node.paused == []

    lasting = Node(tmp_path, passing=False)

    assert lasting.checked() == ("fail", "busy")
    assert lasting.paused == []


def test_a_lasting_failure_beside_one_that_passes_still_refuses(node):
    (passing,) = node.plan.suite.planned

    def judge_lasting(facts, parameters, case):
        return [replace(item, check="b") for item in judge(facts, parameters, case)]

    check = replace(passing.check, name="b", transient=False, judge=judge_lasting)
    lasting = replace(passing, check=check)
    suite = replace(node.plan.suite, planned=(passing, lasting))
    plan = replace(node.plan, suite=suite)
    ran = check_node(plan, SystemClock())

    def pause(_seconds):
        node.says("free")

    found = recheck_failures(plan, ran, ENOUGH_S + 0.01, pause, SystemClock()).findings

    # A busy disk may cost the state file, with a note of its own.
    by_check = {item.check: item.status.word for item in found if item.check != "node_state"}
    assert by_check == {"a": "warn", "b": "fail"}
