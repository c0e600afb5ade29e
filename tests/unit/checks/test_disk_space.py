"""The verdicts on space, inodes and writability of each mount."""

import pytest
from support.checks import CASE, limit, said
from support.gpus import shipped

from gpuops.checks.storage.disk_space import Parameters, judge
from gpuops.host.storage.mounts import Filesystems, Mount, MountAnswer, Space

LIMITS = Parameters(
    space_percent=limit(warn=15, fail=0), inodes_percent=limit(warn=10, fail=0), ignore=("/snap/*",)
)


def answer(
    point="/", *, space=80, inodes=80, fs="ext4", ro=False, turned=False, fstab=None, silent=None
):
    options = {"ro"} if ro else {"rw"}
    options |= {"ro", "rw"} if turned else set()
    room = None if silent else Space(100, space, 100, inodes)
    mount = Mount(point, fs, "/dev/sda1", frozenset(options), turned_read_only=turned)
    return MountAnswer(
        mount=mount, elapsed_s=0.001, space=room, silent=silent, writable_in_fstab=fstab
    )


def findings(*answers):
    return said(judge(Filesystems(answers), LIMITS, CASE))


def test_when_all_is_well_the_fullest_mount_speaks():
    assert findings(answer("/"), answer("/scratch", space=40)) == [("/scratch", "pass", None)]


@pytest.mark.parametrize(
    ("space", "inodes", "status"),
    [
        (14, 80, "warn"),
        (15, 80, "warn"),
        (0, 80, "fail"),
        (1, 80, "warn"),
        (80, 9, "warn"),
        (80, 10, "warn"),
        (80, 0, "fail"),
        (80, 1, "warn"),
    ],
)
def test_space_and_inodes_are_judged_apart(space, inodes, status):
    found = findings(answer("/"), answer("/tmp", space=space, inodes=inodes))

    assert found == [("/tmp", status, "storage.no_space")]


def test_the_space_of_a_file_server_never_fails_this_node():
    assert findings(answer("/home", space=0, fs="nfs4")) == [("/home", "warn", "storage.no_space")]


def test_a_file_system_in_memory_that_a_user_filled_never_fails_this_node():
    found = findings(answer("/dev/shm", space=0, inodes=0, fs="tmpfs"))

    assert found == [("/dev/shm", "warn", "storage.no_space")] * 2


@pytest.mark.parametrize("fs", ["fuse", "fuseblk", "fuse.x"])
def test_a_users_mount_that_claims_to_be_full_and_read_only_warns(fs):
    """The user's program answers statvfs(3), and names a disk as the source."""
    found = findings(answer("/home/u/m", space=0, fs=fs), answer("/b", turned=True, fs=fs))

    assert {status for _, status, _ in found} == {"warn"}


def test_a_file_system_that_the_kernel_stopped_writing_fails():
    assert findings(answer("/", turned=True)) == [("/", "fail", "storage.read_only")]


def test_a_read_only_mount_that_fstab_wants_writable_fails():
    assert findings(answer("/data", ro=True, fstab=True)) == [
        ("/data", "fail", "storage.read_only")
    ]


@pytest.mark.parametrize("fstab", [None, False])
def test_a_read_only_mount_that_is_meant_so_is_left_alone(fstab):
    found = findings(answer("/"), answer("/usr", ro=True, space=0, fstab=fstab))

    assert found == [("/", "pass", None)]


def test_a_medium_that_cannot_be_written_is_no_fault():
    found = findings(answer("/"), answer("/cd", fs="squashfs", turned=True, space=0))

    assert found == [("/", "pass", None)]


def test_ignored_and_silent_mounts_are_not_judged():
    found = findings(answer("/snap/core", space=0), answer("/home", silent="no answer"))

    assert found == [("n1", "skip", None)]


def test_a_file_system_without_inodes_is_judged_by_its_space_only():
    """For instance btrfs and some network file systems count no inodes."""
    item = answer("/")
    item = MountAnswer(mount=item.mount, elapsed_s=0, space=Space(100, 50, 0, 0))

    assert findings(item) == [("/", "pass", None)]


def test_just_above_the_limits_there_is_room():
    assert findings(answer("/tmp", space=16, inodes=80)) == [("/tmp", "pass", None)]
    assert findings(answer("/tmp", space=80, inodes=11)) == [("/tmp", "pass", None)]


@pytest.mark.parametrize("point", ["/run/user/1000", "/var/lib/kubelet/pods/a/volumes/b"])
def test_what_a_user_or_a_container_fills_is_not_the_nodes(point):
    parameters = shipped("disk_space", suite="prolog")["disk_space"]
    full = answer(point, space=0, fs="tmpfs")

    assert said(judge(Filesystems((full,)), parameters, CASE)) == [("n1", "skip", None)]


def test_before_a_start_a_full_mount_only_warns():
    """The job may not use it; one that it uses tells by itself."""
    parameters = shipped("disk_space", suite="preflight")["disk_space"]

    assert parameters.space_percent.fail is None
    assert parameters.inodes_percent.fail is None
