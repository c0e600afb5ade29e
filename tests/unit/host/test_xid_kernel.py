"""Following the kernel's log: from its end on, whatever is in it."""

import pytest
from support.kernel_log import gpu_information, write_kmsg

from gpuops.errors import ProbeError
from gpuops.host.clock import FakeClock
from gpuops.host.gpu_names import GpuName
from gpuops.host.xid_watch import XidLog, XidReporter, parse_message
from gpuops.model import UnknownReason

OLD = "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>"
BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
UUID = "GPU-00000001-aaaa-bbbb-cccc-000000000001"


class Stand:
    """A log that a test writes, and what was told of it."""

    def __init__(self, root):
        self.root = root
        gpu_information(root, "0000:3b:00.0", UUID, 0)
        write_kmsg(root, [(1, OLD)])
        self.lines = []
        self.log = XidLog(root, XidReporter(self.lines.append, FakeClock()), FakeClock())
        self.steps = self.log.steps()

    def write(self, text):
        with (self.root / "dev/kmsg").open("a") as file:
            file.write(text)

    def said(self, steps=1):
        for _ in range(steps):
            next(self.steps)
        return [parse_message(line.encode()).xid for line in self.lines]


@pytest.fixture
def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.log.close()


def test_only_what_comes_from_now_on_is_told(stand):
    stand.write(f"4,7,100,-;{BUS}\n SUBSYSTEM=pci\n6,8,101,-;usb 1-1: new device\n")
    (xid,) = stand.said()

    assert (xid.code, xid.address, xid.uuid, xid.index) == (79, "0000:3b:00.0", UUID, 0)
    assert xid.line == BUS


def test_a_line_that_comes_in_two_parts_is_one(stand):
    stand.write(f"4,7,100,-;{BUS[:20]}")
    assert stand.said() == []
    stand.write(f"{BUS[20:]}\n")
    assert [xid.code for xid in stand.said()] == [79]


def test_a_program_that_writes_into_the_log_is_not_believed(stand):
    stand.write(f"12,7,100,-;{BUS}\n")

    assert stand.said() == []


def test_a_process_and_severity_and_wishes_are_told(stand):
    stand.write("4,7,100,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 1\n")
    stand.write("4,8,101,-;NVRM: Xid (PCI:0000:3b:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 3\n")
    stand.write(
        "4,9,102,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None)"
        " to 0x1 (GPU Reset Required)\n"
    )
    page, link, wish = stand.said()

    assert (page.process, link.fatal, wish.recovery) == (4711, False, "GPU Reset Required")


def test_a_gpu_off_the_bus_is_told_in_three_records_too(stand):
    stand.write("3,7,100,-;NVRM: The NVIDIA GPU 0000:3b:00.0\n")
    assert stand.said() == []
    stand.write("3,8,100,-;NVRM: (PCI ID: 10de:2330) installed in this system has\n")
    stand.write("3,9,100,-;NVRM: fallen off the bus and is not responding to commands.\n")
    (xid,) = stand.said()

    assert (xid.code, xid.uuid) == (79, UUID)


def test_a_storm_of_170000_lines_hides_no_other(stand):
    storm = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 1"
    stand.write("".join(f"4,{n},100,-;{storm}\n" for n in range(170_000)))
    stand.write(f"4,170001,100,-;{BUS}\n")
    size = (stand.root / "dev/kmsg").stat().st_size

    assert [xid.code for xid in stand.said(size // 16384 + 1)] == [31, 79]


def test_rubbish_without_an_end_takes_little_memory(stand):
    stand.write("x" * 10_000_000)
    stand.write(f"\n4,7,100,-;{BUS}\n")

    assert [xid.code for xid in stand.said(620)] == [79]


def test_a_machine_without_a_gpu_has_nothing_to_follow(tmp_path):
    write_kmsg(tmp_path, [(1, OLD)])
    with pytest.raises(ProbeError) as failed:
        XidLog(tmp_path, XidReporter(print, FakeClock()), FakeClock())

    assert failed.value.reason == UnknownReason.MISSING_TOOL


def test_a_machine_without_a_log_says_so(tmp_path):
    gpu_information(tmp_path, "0000:3b:00.0", UUID)
    with pytest.raises(ProbeError) as failed:
        XidLog(tmp_path, XidReporter(print, FakeClock()), FakeClock())

    assert failed.value.reason == UnknownReason.NOT_SUPPORTED


def test_it_says_which_gpus_there_are(tmp_path):
    lines = []
    gpu_information(tmp_path, "0000:3b:00.0", UUID, 2)
    write_kmsg(tmp_path, [])
    log = XidLog(tmp_path, XidReporter(lines.append, FakeClock()), FakeClock())
    log.start()
    log.close()

    expected = GpuName(index=0, address="0000:3b:00.0", uuid=UUID, minor=2)
    assert parse_message(lines[0].encode()).gpus == (expected,)
