"""Records of the kernel's log, as dev-kmsg documents them, and whatever else a file may hold."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.kmsg import RECORD_MAX, KernelRecord, kernel_records, parse_kmsg
from gpuops.host.process import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

printable = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="\\"))


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2**63), st.integers(0, 2**50), printable))
)
def test_records_are_read_back(records):
    text = "".join(f"{level},{seq},{t},-;{line}\n" for level, seq, t, line in records)

    assert list(parse_kmsg(text)) == [
        KernelRecord(seq, level, t, line) for level, seq, t, line in records
    ]


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    for record in parse_kmsg(text):
        assert 0 <= record.level <= 7


def test_the_lines_about_a_record_are_no_records():
    text = (
        "6,339,5140900,-;NET: Registered\n SUBSYSTEM=net\n DEVICE=+net:eth0\n6,340,5690716,c;up\n"
    )

    assert [record.text for record in parse_kmsg(text)] == ["NET: Registered", "up"]


def test_what_a_program_wrote_into_the_log_is_not_the_kernels():
    """Priority 12 is facility 1 (user), level 4."""
    text = "12,1,10,-;NVRM: Xid (PCI:0000:3b:00): 79, forged\n4,2,11,-;real\n"

    assert [record.text for record in parse_kmsg(text)] == ["real"]


def test_further_fields_of_a_later_kernel_are_passed_over():
    (record,) = parse_kmsg("3,7,99,-,caller=T1;text; with, separators\n")

    assert (record.level, record.text) == (3, "text; with, separators")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"caf\xc3\xa9", "café"),
        (r"line\x0aend", "line\nend"),
        (r"\xff", "ÿ"),
        (r"\x5cx41", r"\x41"),
    ],
)
def test_escaped_bytes_are_undone_once(written, read):
    (record,) = parse_kmsg(f"6,1,1,-;{written}\n")

    assert record.text == read


def test_a_log_that_may_not_be_read_is_a_lack_of_permission(tmp_path):
    FakeRoot(tmp_path).path.joinpath("dev/kmsg").chmod(0)

    def look():
        if os.geteuid() == 0:
            os.setuid(65534)
        return list(kernel_records(tmp_path))

    with pytest.raises(ProbeError, match="root or CAP_SYSLOG may") as caught:
        probe.answer(probe.run(probe.start_call(look, deadline_s=20)))

    assert caught.value.reason == "no_permission"


def test_a_machine_without_a_log_does_not_support_it(tmp_path):
    with pytest.raises(ProbeError, match=r"cannot open .*dev/kmsg") as caught:
        list(kernel_records(tmp_path))

    assert caught.value.reason == "not_supported"


@given(st.lists(printable, max_size=40), st.integers(1, 400))
def test_a_log_is_read_whole_however_it_lies_in_blocks(tmp_path_factory, lines, repeat):
    """One block is 256 KiB, so that the longest of these logs takes many."""
    root = tmp_path_factory.mktemp("root")
    FakeRoot(root).kmsg(*lines * repeat)

    assert [record.text for record in kernel_records(root)] == lines * repeat


def test_a_hostile_log_is_read_in_bounded_pieces(tmp_path):
    """A line without end, bytes that are no text, and what follows them."""
    root = FakeRoot(tmp_path)
    endless = b"4,1,1,-;" + b"A" * (40 * RECORD_MAX) + b"\n"
    root.write("dev/kmsg", endless + bytes(range(256)) * 64 + b"\n4,3,3,-;after\n")
    read = list(kernel_records(tmp_path))

    assert read[-1] == KernelRecord(3, 4, 3, "after")
    assert all(len(record.text) <= 2**18 + RECORD_MAX for record in read)
