"""Lines of NVIDIA's driver taken apart, and many of them put together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_log import records

from gpuops.host.kmsg import KernelRecord
from gpuops.host.xid import OffBusLines, Sxid, Xid, parse_sxid, parse_xid, pci_address
from gpuops.host.xid_log import KINDS_MAX, MINUTES_MAX, DriverLines, Recovery

MINUTE_US = 60_000_000


OFF_BUS = (
    "NVRM: The NVIDIA GPU 0000:91:00.0",
    "NVRM: (PCI ID: 10de:2330) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, "
                "GPU has fallen off the bus."
            ),
            Xid(address="0000:3b:00.0", code=79, name="<unknown>"),
        ),
        (
            "NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off the bus.",
            Xid(address="0000:3b:00.0", code=79),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 45, pid=4711, name=pt_main_thread, Ch 00000010",
            Xid(address="0000:01:00.0", code=45, pid=4711, name="pt_main_thread"),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00): 13, pid='4711', name=a b,c, Graphics Exception",
            Xid(address="0000:01:00.0", code=13, pid=4711, name="a b,c"),
        ),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=8, name=python, Contained: SM (0x1)",
            Xid(address="0000:01:00.0", code=94, pid=8, name="python"),
        ),
        (
            "NVRM: Xid (0000:03:00): 31, Ch 00000010, engmask 00000081, intr 10000000",
            Xid(address="0000:03:00.0", code=31),
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226)",
            Xid(address="0018:01:00.0", code=149, fatal=False, link=3),
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_CTRL, Fatal, Link 05 (0x00000003 0x80000000)",
            Xid(address="0018:01:00.0", code=145, fatal=True, link=5),
        ),
        (
            (
                "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed from 0x0 (None) "
                "to 0x2 (Node Reboot Required)"
            ),
            Xid(address="0000:0a:00.0", code=154, recovery="Node Reboot Required"),
        ),
        (
            (
                "NVRM: Xid (PCI:0000:0a:00): 154, pid='<unknown>', name=<unknown>, GPU recovery "
                "action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
            ),
            Xid(address="0000:0a:00.0", code=154, name="<unknown>", recovery="None"),
        ),
        (
            "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed from 0x0 to 0x2",
            Xid(address="0000:0a:00.0", code=154, recovery="Node Reboot Required"),
        ),
        (
            "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed from 0x2 to 0x0",
            Xid(address="0000:0a:00.0", code=154, recovery="None"),
        ),
        (
            "NVRM: Xid (PCI:0000:0a:00): 154, GPU recovery action changed from 0x0 to 0x1f",
            Xid(address="0000:0a:00.0", code=154, recovery="action 0x1f"),
        ),
        (
            "NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.",
            Xid(address="0000:91:00.0", code=79),
        ),
        (
            "NVRM: GPU at PCI:0000:91:00: GPU has fallen off the bus.",
            Xid(address="0000:91:00.0", code=79),
        ),
        ("\n".join(OFF_BUS), Xid(address="0000:91:00.0", code=79)),
        (
            (
                "NVRM: The NVIDIA GPU 0000:91:00.0 (PCI ID: 10de:1e07) installed in this\n"
                "NVRM: system has fallen off the bus and is not responding to commands."
            ),
            Xid(address="0000:91:00.0", code=79),
        ),
    ],
)
def test_every_form_of_an_xid_is_taken_apart(line, parts):
    assert parse_xid(line) == parts


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU at PCI:0000:3b:00: GPU-1c7a5e38-0c43-1d5b-6ab1-4f3a2b1c0d9e",
        "NVRM: Xid (PCI:0000:3b:00): , pid=1",
        "INFO: task NVRM: Xid (PCI:0000:3b:00): 79, blocked for more than 120 seconds",
        "traps: NVRM: Xid (PCI:0000:3b:00): 79, trap invalid opcode",
        "NVRM: The NVIDIA GPU 0000:91:00.0 (PCI ID: 10de:1eb8)\nNVRM: is not supported",
        OFF_BUS[0],
        OFF_BUS[2],
        "",
    ],
)
def test_a_line_that_only_looks_like_an_xid_is_none(line):
    """A program chooses its own name, and the kernel writes it behind words of its own."""
    assert parse_xid(line) is None


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            Sxid(address="0000:c1:00.0", code=20034, fatal=True, link=30),
        ),
        (
            (
                "nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 12028, Non-fatal, Link 32 egress "
                "non-posted PRIV error (First)"
            ),
            Sxid(address="0000:06:00.0", code=12028, fatal=False, link=32),
        ),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10004, Non-fatal, Host_thermal_event_start",
            Sxid(address="0000:c4:00.0", code=10004, fatal=False),
        ),
        ("nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10002, Severity 5 Engine instance 00", None),
        ("nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 10002, Data {0x00000000, 0x0}", None),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal", None),
    ],
)
def test_every_form_of_an_sxid_is_taken_apart(line, parts):
    assert parse_sxid(line) == parts


names = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=15)


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFF),
    st.integers(0, 31),
    st.integers(0, 999),
    st.integers(0, 2**22),
    names,
)
def test_an_xid_is_read_back_whatever_a_program_calls_itself(domain, bus, device, code, pid, name):
    where = f"{domain:04x}:{bus:02x}:{device:02x}"
    found = parse_xid(f"NVRM: Xid (PCI:{where}): {code}, pid={pid}, name={name}, Ch 00000001")

    assert (found.address, found.code, found.pid) == (f"{where}.0", code, pid)


@given(st.text(max_size=300))
def test_any_text_behind_an_xid_is_read_without_an_error(text):
    for code in (79, 149, 154):
        assert parse_xid(f"NVRM: Xid (PCI:0000:3b:00): {code}, {text}").code == code
    parse_sxid(f"nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 1, Fatal, {text}")
    parse_xid(text)
    parse_sxid(text)


@pytest.mark.parametrize("text", ["0000:3b:00", "00000000:3B:00.0", "0000:3b:00.0"])
def test_one_gpu_has_one_address(text):
    assert pci_address(text) == "0000:3b:00.0"


def collected(*entries):
    lines = DriverLines()
    for number, (when_us, text) in enumerate(entries):
        lines.add(KernelRecord(number, 4, when_us, text))
    return lines.log()


def line(code, gpu="3b", tail="pid=1, name=python, Ch 00000001"):
    return f"NVRM: Xid (PCI:0000:{gpu}:00): {code}, {tail}"


def test_lines_of_one_minute_are_one_burst_and_the_next_minute_another():
    log = collected(
        (MINUTE_US, line(45)),
        (2 * MINUTE_US - 1, line(45)),
        (2 * MINUTE_US, line(45)),
    )

    assert [(burst.minute, burst.count) for burst in log.xids] == [(1, 2), (2, 1)]
    assert (log.xids[0].first_us, log.xids[0].last_us) == (MINUTE_US, 2 * MINUTE_US - 1)


def test_a_line_that_comes_late_over_the_edge_of_its_minute_is_counted_there():
    log = collected(
        (2 * MINUTE_US - 1, line(45)), (2 * MINUTE_US, line(45)), (2 * MINUTE_US - 2, line(45))
    )

    assert [(burst.minute, burst.count) for burst in log.xids] == [(1, 2), (2, 1)]


def test_gpus_codes_and_severities_are_kept_apart():
    log = collected(
        (1, line(45)),
        (2, line(45, gpu="86")),
        (3, line(13)),
        (4, line(149, tail="NETIR_LINK_EVT Fatal XC0 i0 Link 05 (0x0)")),
        (5, line(149, tail="NETIR_LINK_EVT Nonfatal XC0 i0 Link 05 (0x0)")),
    )

    assert [(burst.address[5:7], burst.code, burst.fatal) for burst in log.xids] == [
        ("3b", 45, None),
        ("86", 45, None),
        ("3b", 13, None),
        ("3b", 149, True),
        ("3b", 149, False),
    ]


def test_the_newest_recovery_action_of_each_gpu_is_kept():
    def changed(words):
        return line(154, tail=f"GPU recovery action changed from 0x0 (None) to 0x1 ({words})")

    log = collected((1, changed("GPU Reset Required")), (2, changed("Drain P2P")))

    assert log.recovery == (Recovery(address="0000:3b:00.0", action="Drain P2P", since_boot_us=2),)


def test_the_drivers_loading_is_dated_and_a_uuid_beside_an_xid_is_kept():
    lines = DriverLines()
    texts = (
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM: GPU at PCI:0000:65:00: GPU-5a2a8e5c-0c43-1d5b-6ab1-4f3a2b1c0d9e",
    )
    for record in records(*texts, start_us=7):
        assert not lines.add(record)

    assert lines.log().loaded_us == 7
    assert lines.uuids == {"0000:65:00.0": "GPU-5a2a8e5c-0c43-1d5b-6ab1-4f3a2b1c0d9e"}


def test_lines_of_a_gpu_off_the_bus_are_joined_where_each_is_a_record():
    lines = OffBusLines()
    texts = (OFF_BUS[0], OFF_BUS[1], "eth0: up", OFF_BUS[2], OFF_BUS[2])
    joined = [lines.join(record).text for record in records(*texts)]

    assert [parse_xid(text) and parse_xid(text).address for text in joined] == [
        *[None] * 3,
        "0000:91:00.0",
        None,
    ]


@pytest.mark.parametrize(("gap_us", "loaded_us"), [(MINUTE_US, 6), (MINUTE_US + 1, None)])
def test_a_gpu_that_was_off_the_bus_at_a_load_is_not_older_than_it(gap_us, loaded_us):
    """The driver logs that it was loaded after it has looked for its GPUs."""
    loaded = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15"
    log = collected((7, "\n".join(OFF_BUS)), (7 + gap_us, loaded))

    assert log.loaded_us == (7 + gap_us if loaded_us is None else loaded_us)
    assert "\n" not in log.xids[0].line


@given(st.lists(st.integers(0, 300), max_size=400))
def test_no_line_is_lost_however_many_minutes_there_are(minutes):
    entries = [(minute * MINUTE_US, line(45)) for minute in sorted(minutes)]
    log = collected(*entries)

    assert sum(burst.count for burst in log.xids) == len(minutes)
    assert len(log.xids) <= MINUTES_MAX
    if entries:
        assert min(burst.first_us for burst in log.xids) == entries[0][0]
        assert max(burst.last_us for burst in log.xids) == entries[-1][0]


def test_of_many_minutes_the_oldest_are_joined_into_one():
    log = collected(*[(n * MINUTE_US, line(45)) for n in range(MINUTES_MAX + 36)])

    assert [burst.count for burst in log.xids] == [37] + [1] * (MINUTES_MAX - 1)
    assert (log.xids[0].first_us, log.xids[0].last_us) == (0, 36 * MINUTE_US)


def test_a_flood_of_codes_is_bounded_and_counted():
    entries = [(n, line(1000 + n)) for n in range(KINDS_MAX + 5)]

    log = collected(*entries, (9, line(1000)))

    assert len(log.xids) == KINDS_MAX
    assert log.more == 5


GPU_LINE = "NVRM: The NVIDIA GPU 0000:91:00.0 (PCI ID: 10de:2330)"


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (OFF_BUS, 79),
        (
            (
                GPU_LINE,
                "NVRM: installed in this system has fallen off the bus and is not responding",
            ),
            79,
        ),
        (
            (
                f"{GPU_LINE} installed in this system",
                "     has fallen off the bus and is not responding",
            ),
            79,
        ),
        (  # another message of the driver's came between: it is of another GPU
            (
                f"{GPU_LINE} installed in this system is not supported",
                "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
                "NVRM: fallen off the bus and is not responding to commands.",
            ),
            None,
        ),
    ],
)
def test_the_lines_of_one_message_are_joined(texts, code):
    lines = OffBusLines()
    joined = [
        lines.join(KernelRecord(sequence=n, level=3, since_boot_us=n, text=text))
        for n, text in enumerate(texts)
    ]

    found = parse_xid(joined[-1].text)

    assert (found and found.code) == code
