"""Mounts that must be there."""

from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import Profile, TextExpectation
from gpuops.checks.storage.mount_state import Parameters, judge
from gpuops.host.storage.mounts import MountTable

WITH = JudgeContext(
    node=NODE,
    profile=Profile(name="p", mounts=TextExpectation(value=("/scratch/", "/home"), source="site")),
)


def test_what_the_profile_expects_and_is_not_there_fails():
    (finding,) = judge(MountTable(("/", "/home")), Parameters(), WITH)

    assert said([finding]) == [("/scratch", "fail", "storage.required_mount")]
    assert finding.source == "site"


def test_what_the_suite_expects_fails_too():
    parameters = Parameters(expected=("/data",), source="ops")
    (finding,) = judge(MountTable(("/",)), parameters, CASE)

    assert (finding.status.word, finding.source) == ("fail", "ops")


def test_what_only_fstab_names_warns_once_unless_it_is_ignored():
    facts = MountTable(("/", "/home"), in_fstab=("/", "/scratch", "/boot/efi", "/archive"))
    findings = judge(facts, Parameters(ignore=("/boot/*",)), WITH)

    assert [item[1:] for item in said(findings)] == [
        ("fail", "storage.required_mount"),
        ("warn", "storage.shared_fs"),
    ]
    assert [finding.entity.id for finding in findings] == ["/scratch", "/archive"]


def test_all_there_passes_and_none_expected_is_skipped():
    facts = MountTable(("/", "/home", "/scratch"), in_fstab=("/",))
    (finding,) = judge(facts, Parameters(), WITH)

    assert (finding.status.word, finding.message) == ("pass", "all 3 expected mounts are present")
    assert said(judge(MountTable(("/",)), Parameters(), CASE)) == [("n1", "skip", None)]
