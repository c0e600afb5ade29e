"""Software RAID out of mdstat."""

from hypothesis import given
from hypothesis import strategies as st

from gpuops.host.storage.nvme import Array, MdRaid, parse_mdstat, read_mdraid

MDSTAT = """Personalities : [raid1] [raid0] [raid6] [raid5] [raid4]
md127 : active raid0 nvme3n1[3] nvme2n1[2] nvme1n1[1] nvme0n1[0]
      14999582720 blocks super 1.2 512k chunks

md0 : active raid1 sdb1[1] sda1[0](F)
      976630464 blocks super 1.2 [2/1] [_U]
      [==>..................]  recovery = 12.6% (123456/976630464) finish=127.5min speed=33440K/sec
      bitmap: 1/8 pages [4KB], 65536KB chunk

md1 : active (auto-read-only) raid1 sdb2[1] sda2[0]
      1046528 blocks super 1.2 [2/2] [UU]
      \tresync=PENDING

md5 : inactive sdc1[0](S) sdd1[1](S)
      1953262592 blocks super 1.2

md9 : broken raid0 nvme5n1[1] nvme4n1[0]
      7501212320 blocks super 1.2 512k chunks

unused devices: <none>
"""


def test_arrays_of_every_state_are_read():
    assert parse_mdstat(MDSTAT).arrays == (
        Array(name="md127", state="active", level="raid0"),
        Array(
            name="md0",
            state="active",
            level="raid1",
            wanted=2,
            working=1,
            failed=("sda1",),
            work="recovery 12.6%",
        ),
        Array(name="md1", state="active", level="raid1", wanted=2, working=2),
        Array(name="md5", state="inactive"),
        Array(name="md9", state="broken", level="raid0"),
    )


def test_the_container_of_firmware_raid_is_no_array():
    text = """md126 : active raid1 nvme1n1[1] nvme0n1[0]
      937692160 blocks super external:/md127/0 [2/2] [UU]

md127 : inactive nvme1n1[1](S) nvme0n1[0](S)
      10402 blocks super external:imsm
"""

    assert parse_mdstat(text).arrays == (
        Array(name="md126", state="active", level="raid1", wanted=2, working=2),
    )


def test_a_kernel_without_the_driver_has_no_arrays(tmp_path):
    assert read_mdraid(tmp_path) == MdRaid()
    assert parse_mdstat("Personalities : \nunused devices: <none>\n") == MdRaid()


@given(st.text(alphabet="md019 :activeraid[]_U/\n", max_size=200))
def test_any_text_is_read_without_an_error(text):
    for array in parse_mdstat(text).arrays:
        assert array.name.startswith("md")
