"""The verdicts on mounts that answer, err, or stay silent."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.core.profile import NO_PROFILE, TextExpectation
from gpuops.checks.storage.mount_alive import Parameters, judge
from gpuops.gate.policy import find_drain_causes
from gpuops.host.storage.mounts import Filesystems, Mount, MountAnswer, Space
from gpuops.incident.runbook import load_runbooks
from gpuops.resources import data_dir
from gpuops.store.fuse import CauseKind

ACTIONS = {kind: page.action for kind, page in load_runbooks(data_dir("runbooks")).items()}
LIMITS = Parameters(answer_s=limit(warn=2), ignore=("/ignored",))
SPACE = Space(1, 1, 1, 1)


def answer(point="/home", *, fs="nfs4", elapsed_s=0.01, **kwargs):
    mount = Mount(point, fs, "filer:/home", frozenset({"rw"}))
    return MountAnswer(mount=mount, elapsed_s=elapsed_s, **kwargs)


def findings(*answers, not_asked=0):
    return said(judge(Filesystems(answers, not_asked), LIMITS, CASE))


def test_when_all_answer_one_finding_says_so():
    assert findings(answer("/a", space=SPACE), answer("/b", space=SPACE)) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    ("elapsed_s", "found"),
    [
        (1.999, ("n1", "pass", None)),
        (2.0, ("/home", "warn", "storage.shared_fs")),
        (2.001, ("/home", "warn", "storage.shared_fs")),
    ],
)
def test_a_slow_answer_warns(elapsed_s, found):
    assert findings(answer(space=SPACE, elapsed_s=elapsed_s)) == [found]


@pytest.mark.parametrize("error", ["ESTALE", "EIO", "ENOTCONN", "ETIMEDOUT"])
def test_an_error_that_means_a_dead_server_fails(error):
    assert findings(answer(error=error)) == [("/home", "fail", "storage.shared_fs")]


REQUIRING = replace(
    CASE,
    profile=replace(NO_PROFILE, mounts=TextExpectation(value=("/scratch/",), source="us")),
)
DEAD = [
    {"error": "ENOTCONN"},
    {"silent": "gave no answer in 5.0 s (pid 7, state D)", "stuck": True},
    {"silent": "gave no answer in 5.0 s (pid 7)"},
]


def fuse(fs="fuse.sshfs", user=1000, **kwargs):
    found = answer("/scratch", fs=fs, **kwargs)
    options = frozenset({"rw", f"user_id={user}"})
    return replace(found, mount=replace(found.mount, options=options))


@pytest.mark.parametrize("fs", ["fuse.sshfs", "fuse", "fuseblk"])
@pytest.mark.parametrize("how", DEAD)
def test_a_users_mount_warns_at_most(fs, how):
    """Named by the user's program, in fstab too: only the profile says that a node needs it."""
    for mount in (fuse(fs, **how), fuse(fs, **how, writable_in_fstab=True)):
        (finding,) = judge(Filesystems((mount,)), LIMITS, CASE)

        assert (finding.entity.id, finding.status.word) == ("/scratch", "warn")
        assert not finding.shared_cause
        assert finding.unknown_reason is None


def test_a_fuse_mount_of_root_counts_if_fstab_names_it():
    dead = fuse(user=0, error="ENOTCONN")

    assert findings(dead)[0][1] == "warn"
    assert findings(replace(dead, writable_in_fstab=True))[0][1] == "fail"


@pytest.mark.parametrize(("fs", "user"), [("nfs4", 0), ("fuse.gcsfuse", 0), ("fuse.gcsfuse", 990)])
@pytest.mark.parametrize("how", DEAD[:2])
def test_a_dead_mount_that_the_profile_requires_drains_as_a_shared_cause(fs, user, how):
    (finding,) = judge(Filesystems((fuse(fs, user, **how),)), LIMITS, REQUIRING)
    (cause,) = find_drain_causes([finding], ACTIONS)

    assert said([finding]) == [("/scratch", "fail", "storage.required_mount")]
    assert cause.kind is CauseKind.SHARED


@pytest.mark.parametrize("how", DEAD[:2])
def test_a_dead_network_mount_that_no_profile_requires_drains_nothing(how):
    found = judge(Filesystems((answer("/home", **how),)), LIMITS, REQUIRING)

    assert said(found) == [("/home", "fail", "storage.shared_fs")]
    assert find_drain_causes(found, ACTIONS) == []


def test_a_dead_local_disk_is_the_disks_failure():
    assert findings(answer("/", fs="ext4", error="EIO")) == [("/", "fail", "host_hw.disk")]


@pytest.mark.parametrize("error", ["EACCES", "ENOENT"])
def test_an_error_about_us_convicts_nobody(error):
    assert findings(answer("/a", space=SPACE), answer(error=error)) == [("n1", "pass", None)]


def test_silence_inside_the_kernel_fails():
    found = findings(answer(silent="gave no answer in 5.0 s (pid 7, state D)", stuck=True))

    assert found == [("/home", "fail", "storage.shared_fs")]


def test_silence_for_want_of_time_is_unknown():
    (finding,) = judge(Filesystems((answer(silent="gave no answer"),)), LIMITS, CASE)

    assert (finding.status.word, finding.unknown_reason) == ("unknown", "timeout")


def test_an_ignored_mount_may_be_dead():
    assert findings(answer("/ignored", error="ESTALE")) == [("n1", "skip", None)]


def test_mounts_that_were_not_asked_are_told():
    assert findings(answer(space=SPACE), not_asked=3) == [("n1", "warn", None)]
