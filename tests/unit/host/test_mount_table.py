"""What is mounted, and what fstab wants."""

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.storage.mounts import MountTable, read_mount_table, wanted_at_boot

FSTAB = """# <file system> <mount point> <type> <options>
/dev/sda1 / ext4 defaults 0 1
UUID=1 none swap sw 0 0
nfs:/home /home/ nfs rw,_netdev 0 0
nfs:/old /old nfs noauto,ro 0 0
nfs:/a\\040b /a\\040b nfs rw 0 0
broken
"""


def test_only_what_is_mounted_at_boot_is_wanted():
    assert wanted_at_boot(FSTAB) == ("/", "/home", "/a b")


def test_both_tables_are_read(tmp_path):
    root = FakeRoot(tmp_path).write("etc/fstab", FSTAB)

    assert read_mount_table(root.path) == MountTable(("/",), ("/", "/home", "/a b"))


def test_without_mountinfo_nothing_is_called_missing(tmp_path):
    with pytest.raises(ProbeError):
        read_mount_table(tmp_path)
