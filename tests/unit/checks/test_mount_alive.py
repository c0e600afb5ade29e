"""The verdicts on mounts that answer, err, or stay silent."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.core.profile import NO_PROFILE, TextExpectation
from gpuops.checks.storage.mount_alive import Parameters, judge
from gpuops.host.storage.mounts import Filesystems, Mount, MountAnswer, Space

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


def test_a_dead_fuse_mount_may_be_a_users_own_unless_it_is_expected():
    dead = answer("/scratch", fs="fuse.sshfs", error="ENOTCONN")
    profile = replace(NO_PROFILE, mounts=TextExpectation(value=("/scratch",), source="us"))
    (profiled,) = judge(Filesystems((dead,)), LIMITS, replace(CASE, profile=profile))

    assert findings(dead) == [("/scratch", "warn", "storage.shared_fs")]
    assert findings(replace(dead, writable_in_fstab=True))[0][1] == "fail"
    assert profiled.status.word == "fail"


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
