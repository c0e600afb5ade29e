"""A suite runs to its end whatever its probes and judges do, and no bug of ours fails the node."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import pytest
from support.checks import CASE
from support.runs import wait_until

from gpuops.checks.core.check import Check, NoParameters, Probe, ProbeContext
from gpuops.checks.core.probes import ProfileChooser
from gpuops.checks.core.profile import Profile
from gpuops.checks.core.runner import RunContext, run_suite
from gpuops.checks.core.suite import PlannedCheck, Suite
from gpuops.errors import ProbeError
from gpuops.host.clock import SystemClock
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.process.probe import STOP_S
from gpuops.model import FailureClass, Finding, Status, UnknownReason

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SHIPPED_POLICY = {
    UnknownReason.NO_PERMISSION: Status.WARN,
    UnknownReason.MISSING_TOOL: Status.WARN,
    UnknownReason.CRASH: Status.WARN,
    UnknownReason.NOT_SUPPORTED: Status.SKIP,
}


@dataclass(frozen=True)
class Number:
    """The facts of these tests."""

    n: int


def verdict(status):
    def judge(facts, _parameters, case):
        failed = FailureClass.UNRESOLVED if status is Status.FAIL else None
        text = f"saw {facts.n}"
        return [
            Finding(check="x", entity=case.node, status=status, message=text, failure_class=failed)
        ]

    return judge


def broken_judge(_facts, _parameters, _case):
    return {}["a bug"]


def planned(
    name,
    read=lambda _machine, _budget_s: Number(7),
    judge=None,
    timeout_s=20.0,
    locks=(),
    inputs=lambda _parameters, _profile: (),
):
    probe = Probe(f"look of {name}", Number, read, locks=frozenset(locks))
    check = Check(name, "a test", probe, NoParameters, judge or verdict(Status.PASS), inputs=inputs)
    return PlannedCheck(check, NoParameters(), timeout_s)


def run(*checks, deadline_s=20.0, policy=SHIPPED_POLICY, **terms):
    suite = Suite(
        name="test",
        about="",
        deadline_s=deadline_s,
        unknown=MappingProxyType(policy),
        planned=checks,
        path=Path("test.toml"),
    )
    return run_suite(
        suite, ProbeContext(), RunContext(CASE, **terms), SystemClock(), left=AbandonedProbes()
    )


def raising(error):
    def read(_machine, _budget_s):
        raise error

    return read


def test_facts_travel_from_the_probe_to_the_judge():
    ran = run(planned("a"))

    assert [finding.message for finding in ran.findings] == ["saw 7"]
    assert (ran.verdict, ran.late, ran.failures) == (Status.PASS, (), ())
    assert ran.start_us <= ran.end_us


def test_findings_stand_in_the_order_of_the_suite_and_are_told_as_they_come(tmp_path):
    def slow(_machine, _budget_s):
        wait_until((tmp_path / "told").exists)
        return Number(1)

    def tell(findings):
        told.extend(findings)
        (tmp_path / "told").touch()

    told = []
    ran = run(planned("slow", slow), planned("quick"), on_finding=tell)

    assert [finding.message for finding in ran.findings] == ["saw 1", "saw 7"]
    assert [finding.message for finding in told] == ["saw 7", "saw 1"]


def test_a_suite_without_checks_passes():
    assert run().verdict is Status.PASS


def test_the_verdict_is_the_worst_finding():
    ran = run(planned("a", judge=verdict(Status.FAIL)), planned("b", judge=verdict(Status.WARN)))

    assert ran.verdict is Status.FAIL


def test_checks_that_share_a_probe_share_one_child():
    probe = Probe("shared", Number, lambda _machine, _budget_s: Number(os.getpid()))
    checks = [
        PlannedCheck(Check(n, "", probe, NoParameters, verdict(Status.PASS)), NoParameters(), 20.0)
        for n in ("a", "b")
    ]
    first, second = run(*checks).findings

    assert first.message == second.message


def test_late_checks_are_named_and_the_others_still_count():
    started = time.monotonic()
    ran = run(
        planned("late", lambda _machine, _budget_s: time.sleep(60), timeout_s=0.3),
        planned("fine"),
    )

    assert ran.late == ("late",)
    late, fine = ran.findings
    assert (late.status, late.unknown_reason) == (Status.UNKNOWN, UnknownReason.TIMEOUT)
    assert fine.status is Status.PASS
    assert ran.verdict is Status.UNKNOWN
    assert time.monotonic() - started < 5


def test_the_deadline_of_the_suite_ends_them_all():
    def deaf(_machine, _budget_s):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    started = time.monotonic()
    ran = run(*[planned(f"deaf {n}", deaf) for n in range(4)], deadline_s=0.3)

    assert len(ran.late) == 4
    assert time.monotonic() - started < 0.3 + STOP_S + 4


def test_a_probe_knows_how_long_it_has():
    (finding,) = run(
        planned("a", lambda _machine, budget_s: Number(100 * round(budget_s / 100)), timeout_s=900),
        deadline_s=400,
    ).findings

    assert finding.message == "saw 400"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("no_permission", Status.WARN),
        ("missing_tool", Status.WARN),
        ("not_supported", Status.SKIP),
        ("timeout", Status.UNKNOWN),
    ],
)
def test_what_cannot_be_probed_becomes_what_the_suite_says(reason, status):
    (finding,) = run(planned("a", raising(ProbeError("may not", reason)))).findings

    assert (finding.status, finding.unknown_reason, finding.message) == (status, reason, "may not")


def test_a_reason_without_a_policy_stays_unknown():
    ran = run(planned("a", raising(ProbeError("may not", "no_permission"))), policy={})

    assert ran.verdict is Status.UNKNOWN


def test_a_probe_that_raises_is_our_failure_and_warns():
    ran = run(planned("a", raising(KeyError("a bug"))), planned("b"))

    assert [finding.status for finding in ran.findings] == [Status.WARN, Status.PASS]
    (failure,) = ran.failures
    assert failure.what == "probe of check a"
    assert "raising" not in failure.error
    assert "KeyError" in failure.traceback


def test_a_probe_that_dies_is_our_failure_and_warns():
    ran = run(planned("a", lambda _m, _b: os.kill(os.getpid(), signal.SIGSEGV)))

    (finding,) = ran.findings
    assert (finding.status, finding.unknown_reason) == (Status.WARN, UnknownReason.CRASH)
    assert "SIGSEGV" in ran.failures[0].error


def test_a_probe_that_returns_other_facts_is_our_failure_and_warns():
    ran = run(planned("a", lambda _machine, _budget_s: 3))

    assert ran.findings[0].unknown_reason is UnknownReason.CRASH
    assert ran.failures


def test_a_judge_that_raises_is_our_failure_and_warns():
    ran = run(planned("a", judge=broken_judge), planned("b"))

    assert [finding.status for finding in ran.findings] == [Status.WARN, Status.PASS]
    assert ran.findings[0].message.startswith("a bug in gpuops, not a fault of the node: KeyError")
    assert ran.failures[0].what == "judge of check a"
    assert "broken_judge" in ran.failures[0].traceback


def test_the_json_of_a_run_has_its_frozen_keys():
    ran = run(planned("a"))

    assert list(ran.to_json()) == ["node", "suite", "verdict", "start", "end", "late", "findings"]


def spans(ran):
    """Return the start and the end of each probe, from what `timed` wrote into its message."""
    return [tuple(float(word) for word in item.message.split()) for item in ran.findings]


@dataclass(frozen=True)
class Span:
    """When a probe started and ended."""

    start_s: float
    end_s: float


def timed(name, locks, pause_s=0.05):
    def read(_machine, _budget_s):
        start_s = time.monotonic()
        time.sleep(pause_s)
        return Span(start_s, time.monotonic())

    def judge(facts, _parameters, case):
        text = f"{facts.start_s} {facts.end_s}"
        return [Finding(check=name, entity=case.node, status=Status.PASS, message=text)]

    probe = Probe(f"look of {name}", Span, read, locks=frozenset(locks))
    return PlannedCheck(Check(name, "", probe, NoParameters, judge), NoParameters(), 20.0)


def test_probes_that_share_a_lock_run_one_after_another():
    ran = run(timed("a", {"disk"}), timed("b", {"disk", "bus"}), timed("c", {"bus"}))
    (_, a_end), (b_start, b_end), (c_start, c_end) = spans(ran)

    assert a_end <= b_start
    assert b_end <= c_start or c_end <= b_start


def test_probes_of_different_locks_run_together(tmp_path):
    """Each waits for the two others."""

    def meet(_machine, _budget_s):
        (tmp_path / str(os.getpid())).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
        return Number(3)

    ran = run(
        planned("a", meet, locks={"disk"}), planned("b", meet, locks={"bus"}), planned("c", meet)
    )

    assert (ran.verdict, ran.late) == (Status.PASS, ())


def test_a_check_whose_lock_never_became_free_is_late_and_says_so():
    def sleep(_machine, _budget_s):
        time.sleep(60)

    ran = run(
        planned("holder", sleep, locks={"disk"}),
        planned("waiting", locks={"disk"}),
        planned("free"),
        deadline_s=2.0,
    )

    _, waiting, free = ran.findings
    assert ran.late == ("holder", "waiting")
    assert waiting.unknown_reason is UnknownReason.TIMEOUT
    assert waiting.message == "not run: it waited for disk until the 2 s were over"
    assert free.status is Status.PASS


def test_a_lock_is_free_again_when_its_holder_was_given_up():
    def sleep(_machine, _budget_s):
        time.sleep(60)

    ran = run(
        planned("holder", sleep, timeout_s=0.2, locks={"disk"}),
        planned("waiting", locks={"disk"}),
    )

    assert ran.late == ("holder",)
    assert ran.findings[1].status is Status.PASS


BIG = Profile(name="big")


def chooser(probe, first=None):
    first = first or Profile(name="first")
    return ProfileChooser(first, f"look of {probe}", lambda result: first if result.error else BIG)


def names_the_profile(facts, _parameters, case):
    text = f"{case.profile.name}: {facts.n}"
    return [Finding(check="x", entity=case.node, status=Status.PASS, message=text)]


def counts_what_is_asked(machine, _budget_s):
    return Number(len(machine.inputs))


def test_nothing_is_judged_before_the_profile_is_chosen():
    def slow(_machine, _budget_s):
        time.sleep(0.3)
        return Number(1)

    told = []
    ran = run(
        planned("quick", judge=names_the_profile),
        planned("gpus", slow, judge=names_the_profile),
        chooser=chooser("gpus"),
        on_finding=told.extend,
    )

    assert [finding.message for finding in told] == ["big: 1", "big: 7"]
    assert ran.profile == "big"


def test_a_probe_that_cannot_choose_leaves_the_first_profile():
    ran = run(
        planned("a", judge=names_the_profile),
        planned("gpus", raising(ProbeError("hung", "timeout"))),
        chooser=chooser("gpus"),
    )

    assert ran.findings[0].message == "first: 7"
    assert ran.profile == "first"


def test_a_suite_without_the_choosing_probe_keeps_the_first_profile():
    ran = run(planned("a", judge=names_the_profile), chooser=chooser("gpus"))

    assert ran.findings[0].message == "first: 7"


@pytest.mark.parametrize("pause_s", [0.0, 0.5], ids=["already result", "still looking"])
def test_what_the_chosen_profile_asks_for_is_probed_again(pause_s):
    def services(machine, _budget_s):
        time.sleep(pause_s)
        return counts_what_is_asked(machine, _budget_s)

    def gpus(_machine, _budget_s):
        time.sleep(0.25)
        return Number(1)

    def asks(_parameters, profile):
        return ("x",) if profile == BIG else ()

    ran = run(
        planned("services", services, judge=names_the_profile, inputs=asks),
        planned("gpus", gpus),
        chooser=chooser("gpus"),
    )

    assert ran.findings[0].message == "big: 1"


def test_what_both_profiles_ask_for_is_probed_once(tmp_path):
    def services(machine, _budget_s):
        (tmp_path / str(os.getpid())).touch()
        return counts_what_is_asked(machine, _budget_s)

    def gpus(_machine, _budget_s):
        time.sleep(0.2)
        return Number(1)

    run(
        planned("services", services, inputs=lambda _p, _profile: ("a", "b")),
        planned("gpus", gpus),
        chooser=chooser("gpus"),
    )

    assert len(list(tmp_path.iterdir())) == 1


def test_the_last_word_on_findings_is_the_callers():
    def silence(findings):
        return [replace(item, status=Status.SKIP) for item in findings]

    told = []
    ran = run(
        planned("a", judge=verdict(Status.FAIL)), apply_silences=silence, on_finding=told.extend
    )

    assert (ran.verdict, told[0].status) == (Status.SKIP, Status.SKIP)


def test_the_facts_of_each_probe_stay_with_the_run():
    ran = run(planned("a"), planned("b", raising(ProbeError("may not", "no_permission"))))

    assert ran.facts == {"look of a": Number(7)}
