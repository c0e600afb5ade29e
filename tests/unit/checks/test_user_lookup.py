"""Whether the job's user and those of the profile are known, and what a dead directory does."""

import threading
from dataclasses import replace

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.profile import NO_PROFILE, TextExpectation
from gpuops.checks.host.user_lookup import CHECK, Parameters, inputs, judge
from gpuops.errors import ProbeError
from gpuops.gate.policy import find_drain_causes
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.users import UserLookup, Users, read_users
from gpuops.incident.runbook import load_runbooks
from gpuops.resources import data_dir
from gpuops.store.fuse import CauseKind

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LIMITS = Parameters(answer_s=limit(warn=2))
NAMED = replace(NO_PROFILE, users=TextExpectation(value=("canary",), source="us"))
REQUIRING = replace(CASE, profile=NAMED)
NONE_LEFT = AbandonedProbes()


def findings(*lookups, case=REQUIRING):
    return judge(Users(lookups), LIMITS, case)


def named(**more):
    return UserLookup(**{"asked": "canary", "elapsed_s": 0.01, **more})


def of_job(**more):
    return UserLookup(**{"asked": "20001", "of_job": True, "elapsed_s": 0.01, **more})


@pytest.mark.parametrize(
    ("lookup", "verdict"),
    [
        (named(uid=5000), ("pass", None)),
        (named(uid=5000, elapsed_s=2.0), ("warn", "host_sw.service")),
        (named(), ("fail", "host_sw.service")),
        (named(silent="gave no answer in 4.4 s"), ("fail", "host_sw.service")),
        (of_job(uid=20001), ("pass", None)),
        (of_job(uid=20001, elapsed_s=2.5), ("warn", "host_sw.service")),
        (of_job(), ("warn", "host_sw.service")),
        (of_job(silent="gave no answer in 4.4 s"), ("unknown", None)),
        (named(uid=0), ("skip", None)),
        (named(uid=65534), ("skip", None)),
    ],
)
def test_only_a_user_whom_the_profile_names_fails(lookup, verdict):
    assert said(findings(lookup)) == [("n1", *verdict)]


def test_a_dead_directory_is_a_cause_that_nodes_share():
    found = findings(named(silent="gave no answer in 4.4 s"))
    actions = {kind: page.action for kind, page in load_runbooks(data_dir("runbooks")).items()}

    assert [item.shared_cause for item in found] == [True]
    (cause,) = find_drain_causes(found, actions)
    assert cause.kind is CauseKind.SHARED


def test_what_is_well_hides_nothing_and_is_said_once():
    assert said(findings(of_job(uid=20001), named(uid=5000, elapsed_s=0.5))) == [
        ("n1", "pass", None)
    ]
    assert said(findings(of_job(uid=20001), named())) == [("n1", "fail", "host_sw.service")]


def test_without_a_job_and_a_named_user_there_is_nothing_to_ask():
    assert said(findings(case=CASE)) == [("n1", "skip", None)]
    assert inputs(LIMITS, NO_PROFILE) == ()
    assert inputs(LIMITS, NAMED) == ("canary",)


def test_users_are_found_by_the_uid_of_the_job_and_by_name(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0::/:/bin/sh\nann:x:20001:9::/:/bin/sh\ngarbage\ncanary:x:5000:9::/:/bin/sh\n"
    )
    facts = read_users(tmp_path, 30, ("canary", "nobody_here"), 20001, left=NONE_LEFT)

    assert [(item.asked, item.of_job, item.uid) for item in facts.lookups] == [
        ("20001", True, 20001),
        ("canary", False, 5000),
        ("nobody_here", False, None),
    ]
    machine = ProbeContext(root=tmp_path, inputs=("canary",), job_uid=30000)
    assert [item.uid for item in CHECK.probe.read(machine, 30).lookups] == [None, 5000]


@pytest.mark.parametrize("uid", [None, 0, 999, 65534])
def test_a_job_of_the_system_is_not_asked_about(tmp_path, uid):
    assert read_users(tmp_path, 5, (), uid, left=NONE_LEFT) == Users()


def test_a_directory_that_never_answers_costs_the_deadline_and_hides_no_other_answer(tmp_path):
    def lookup(user):
        return threading.Event().wait() if user == 20001 else 5000

    facts = read_users(tmp_path, 3.0, ("canary",), 20001, lookup=lookup, left=NONE_LEFT)

    silent, answered = facts.lookups
    assert silent.silent.startswith("gave no answer in")
    assert (silent.uid, answered.uid, answered.silent) == (None, 5000, None)


def test_a_lookup_that_crashes_says_nothing_of_the_node(tmp_path):
    def lookup(_user):
        raise OSError("EIO")

    with pytest.raises(ProbeError, match="EIO") as caught:
        read_users(tmp_path, 5, ("canary",), None, lookup=lookup, left=NONE_LEFT)
    assert caught.value.reason == "crash"
