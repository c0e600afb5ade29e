"""PCI Express error counts out of a recorded tree."""

from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.host.pci.aer import AerBus, parse_aer, read_aer

CORRECTABLE = """RxErr 2
BadTLP 0
BadDLLP 5
Rollover 0
Timeout 0
NonFatalErr 0
CorrIntErr 0
HeaderOF 0
TOTAL_ERR_COR 7
"""
FATAL = """Undefined 0
DLP 0
SDES 0
TLP 0
TOTAL_ERR_FATAL 0
"""


def device(root, folder, vendor, kind):
    root.write(f"{folder}/vendor", f"{vendor}\n").write(f"{folder}/class", f"{kind}\n")
    root.write(f"{folder}/aer_dev_correctable", CORRECTABLE)
    return root.write(f"{folder}/aer_dev_fatal", FATAL)


def link(root, address, folder):
    there = root.path / "sys/bus/pci/devices"
    there.mkdir(parents=True, exist_ok=True)
    (there / address).symlink_to(root.path / folder)


def test_gpus_switches_and_adapters_are_read_with_the_ports_above_them(tmp_path):
    root, top = FakeRoot(tmp_path), "sys/devices/pci0000:15"
    device(root, f"{top}/0000:15:01.0", "0x8086", "0x060400")
    device(root, f"{top}/0000:15:01.0/0000:16:00.0", "0x10de", "0x030200")
    device(root, f"{top}/0000:15:02.0", "0x10de", "0x068000")
    device(root, f"{top}/0000:15:03.0", "0x15b3", "0x020700")
    device(root, f"{top}/0000:15:04.0", "0x8086", "0x010601")
    for address, folder in [
        ("0000:16:00.0", f"{top}/0000:15:01.0/0000:16:00.0"),
        ("0000:15:01.0", f"{top}/0000:15:01.0"),
        ("0000:15:02.0", f"{top}/0000:15:02.0"),
        ("0000:15:03.0", f"{top}/0000:15:03.0"),
        ("0000:15:04.0", f"{top}/0000:15:04.0"),
    ]:
        link(root, address, folder)
    bus = read_aer(root.path)

    assert [(item.address, item.what) for item in bus.devices] == [
        ("0000:15:01.0", "port"),
        ("0000:15:02.0", "NVSwitch"),
        ("0000:15:03.0", "NIC"),
        ("0000:16:00.0", "GPU"),
    ]
    assert bus.devices[3].totals == {"correctable": 7, "fatal": 0}
    assert bus.devices[3].kinds == {"RxErr": 2, "BadDLLP": 5}


def test_devices_that_do_not_report_are_watched_and_not_there(tmp_path):
    root = FakeRoot(tmp_path).gpu("0000:1b:00.0")

    assert read_aer(root.path) == AerBus((), watched=1)
    assert read_aer(tmp_path / "none") == AerBus()


def test_a_file_of_another_form_has_no_total():
    assert parse_aer("") == (None, {})
    assert parse_aer("nonsense\nTOTAL_ERR_COR x\n") == (None, {})


@given(st.text(max_size=200))
def test_any_text_is_read_without_an_error(text):
    total, counted = parse_aer(text)

    assert total is None or total >= 0
    assert all(count > 0 for count in counted.values())
