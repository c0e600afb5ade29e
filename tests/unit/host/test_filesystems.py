"""Which mounts are asked, and what their silence, their errors and their answers become."""

import errno
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.host.storage.mounts import (
    USERS_ASKED_MAX,
    Mount,
    MountSelection,
    parse_fstab,
    parse_mountinfo,
    read_filesystems,
    real_filesystems,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ROOT = "25 1 8:1 / / rw - ext4 /dev/sda1 rw"
HOME = "30 25 0:50 / /home rw - nfs4 filer:/home rw"


def points(*lines):
    return [mount.point for mount in real_filesystems(parse_mountinfo("\n".join(lines)))]


def test_real_file_systems_are_asked_and_pseudo_ones_are_not():
    assert points(
        ROOT,
        HOME,
        "31 25 0:4 / /proc rw - proc proc rw",
        "32 25 0:31 / /net rw - autofs /etc/auto.net rw",
        "33 25 0:33 / /dev/shm rw - tmpfs tmpfs rw",
        "34 25 0:34 / /mnt/s3 rw - fuse.s3fs s3fs rw",
    ) == ["/", "/home", "/mnt/s3", "/dev/shm"]


def test_a_file_system_that_is_mounted_twice_is_asked_once():
    assert points(ROOT, "40 25 8:1 /etc/hosts /a/b/hosts rw - ext4 /dev/sda1 rw") == ["/"]


def test_of_several_mounts_on_one_point_the_visible_one_is_asked():
    (mount,) = real_filesystems(parse_mountinfo(f"{ROOT}\n26 1 8:2 / / rw - xfs /dev/sdb1 rw"))

    assert mount.source == "/dev/sdb1"


@pytest.mark.parametrize(
    ("line", "turned"),
    [
        ("25 1 8:1 / / rw,relatime - ext4 /dev/sda1 ro,errors=remount-ro", True),
        ("25 1 8:1 / / ro,relatime - ext4 /dev/sda1 ro", False),
        ("25 1 8:1 / /b ro,bind - ext4 /dev/sda1 rw", False),
    ],
    ids=["after an error", "mounted so", "a read-only bind mount"],
)
def test_only_the_kernel_turns_a_writable_mount_read_only(line, turned):
    (mount,) = parse_mountinfo(line)

    assert mount.turned_read_only is turned


def test_fstab_says_which_mounts_should_be_writable():
    text = """# /dev/x /no ext4 defaults
/dev/a / ext4 defaults 0 1
/dev/b /my\\040disk xfs ro,noatime
"""

    assert parse_fstab(text) == {"/": True, "/my disk": False}


@given(st.text())
def test_any_text_is_an_fstab(text):
    assert all(isinstance(key, str) for key in parse_fstab(text))


def test_a_mount_that_hangs_does_not_delay_the_others(tmp_path):
    """The file system on /home never answers; the one on / does."""
    FakeRoot(tmp_path).mounts(ROOT, HOME)

    def statvfs(path):
        if path.endswith("/home"):
            time.sleep(60)
        return os.statvfs(tmp_path)

    started = time.monotonic()
    root, home = read_filesystems(tmp_path, 3.0, statvfs=statvfs).answers

    assert root.space.total_bytes > 0
    assert root.silent is None
    assert home.space is None
    assert "gave no answer" in home.silent
    assert home.stuck is False
    assert time.monotonic() - started < 10


def test_an_error_keeps_its_name(tmp_path):
    FakeRoot(tmp_path).mounts(HOME)

    def statvfs(_path):
        raise OSError(errno.ESTALE, "Stale file handle")

    (answer,) = read_filesystems(tmp_path, 5.0, statvfs=statvfs).answers

    assert answer.error == "ESTALE"


def test_fstab_is_held_against_the_mount(tmp_path):
    FakeRoot(tmp_path).mounts(ROOT).write("etc/fstab", "/dev/sda1 / ext4 defaults 0 1\n")

    (answer,) = read_filesystems(tmp_path, 5.0).answers

    assert answer.writable_in_fstab is True
    assert answer.mount == Mount("/", "ext4", "/dev/sda1", frozenset({"rw"}), device="8:1")


def asked(tmp_path, lines, *selections):
    """Return which of the mounts in *lines* were asked, and how many more there are."""
    FakeRoot(tmp_path).mounts(*lines)
    found = read_filesystems(tmp_path, 30.0, selections, statvfs=lambda _path: os.statvfs("/"))
    return [item.mount.point for item in found.answers], found.not_asked


def test_a_mount_that_every_check_ignores_is_never_asked(tmp_path):
    """Hundreds of them, one process each, would cost the verdict."""
    tmpfs = [f"{n} 25 0:{n} / /run/user/{n} rw - tmpfs tmpfs rw" for n in range(100, 900)]
    one = MountSelection.parse(MountSelection(ignore=("/run/*",)).text())
    other = MountSelection(ignore=("/run/user/*", "/home"))

    assert asked(tmp_path, [ROOT, HOME, *tmpfs], one, other) == (["/", "/home"], 0)


def test_users_mounts_are_asked_last_and_a_few_only(tmp_path):
    fuse = "- fuse.x /dev/sda1 rw,user_id=1000"
    users = [f"{n} 25 0:{n} / /a/{n} rw {fuse}" for n in range(100, 900)]
    disks = [f"{n} 25 9:{n} / /long/name/{n} rw - ext4 /dev/md{n} rw" for n in range(20)]
    points, not_asked = asked(tmp_path, [ROOT, *users, *disks])

    assert {"/", *(f"/long/name/{n}" for n in range(20))} <= set(points)
    assert len(points) == 21 + USERS_ASKED_MAX
    assert not_asked == 800 - USERS_ASKED_MAX


def test_a_mount_that_the_profile_requires_is_asked_though_a_user_could_have_made_it(tmp_path):
    fuse = "- fuse.x x rw,user_id=990"
    users = [f"{n} 25 0:{n} / /a/{n} rw {fuse}" for n in range(100, 200)]
    points, _ = asked(
        tmp_path,
        [*users, f"900 25 0:900 / /zz rw {fuse}"],
        MountSelection(required=("/zz",)),
    )

    assert "/zz" in points
    assert len(points) == 1 + USERS_ASKED_MAX
