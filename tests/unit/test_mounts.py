"""mountinfo(5) lines, without touching a mount."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.host.storage.mounts import Mount, mount_of, parse_mountinfo, read_mounts

TEXT = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:45 / /home rw,nosuid - nfs4 filer:/export/home rw,vers=4.2
31 22 0:46 / /mnt/two\\040words ro - lustre mgs@tcp:/fs rw
32 22 0:47 / /home/ann/fast rw master:3 propagate_from:2 - xfs /dev/nvme0n1 rw,attr2
33 22 0:48 / /gcs rw - fuse.gcsfuse bucket rw
"""


def test_a_line_with_optional_fields_and_escapes_is_read():
    mounts = {mount.point: mount for mount in parse_mountinfo(TEXT)}

    assert mounts["/mnt/two words"].filesystem == "lustre"
    assert "ro" in mounts["/mnt/two words"].options
    assert mounts["/home/ann/fast"].source == "/dev/nvme0n1"


@pytest.mark.parametrize(
    ("path", "filesystem", "is_network"),
    [
        ("/home/ann/run/x", "nfs4", True),
        ("/home/ann/fast/db", "xfs", False),
        ("/homestead", "ext4", False),
        ("/gcs/a", "fuse.gcsfuse", True),
        ("/", "ext4", False),
    ],
)
def test_a_path_lies_on_its_deepest_mount(path, filesystem, is_network):
    mount = mount_of(Path(path), parse_mountinfo(TEXT))

    assert mount is not None
    assert (mount.filesystem, mount.is_network) == (filesystem, is_network)


def test_the_later_of_two_mounts_on_one_point_counts():
    over = [Mount("/x", "ext4", "a", frozenset()), Mount("/x", "nfs", "b", frozenset())]

    assert mount_of(Path("/x/y"), over) is over[1]


@given(st.text())
def test_no_text_breaks_the_parser(text):
    parse_mountinfo(text)


def test_this_machine_has_a_root_mount():
    assert mount_of(Path("/"), read_mounts()) is not None


def test_a_root_without_proc_has_no_mounts(tmp_path):
    assert read_mounts(tmp_path) == []
