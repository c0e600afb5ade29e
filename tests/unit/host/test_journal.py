"""The kernel's log as journald tells it, for those who may not read the kernel's own."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_log as log
from support.checks import CASE, said
from support.fake_root import FakeRoot

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.kernel_rules import JOURNAL, KernelFacts
from gpuops.checks.gpu.gpu_xid import CHECK, Parameters
from gpuops.errors import ProbeError
from gpuops.host.kmsg import KernelRecord, journal_records, parse_journal
from gpuops.host.process import probe
from gpuops.host.records import from_json, to_json

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
NOBODY = 65534


def entry(message, since_boot_us, *, facility="0", priority="4"):
    fields = {
        "MESSAGE": message,
        "PRIORITY": priority,
        "SYSLOG_FACILITY": facility,
        "_SOURCE_MONOTONIC_TIMESTAMP": str(since_boot_us),
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def journalctl(root, *newest_first, code=0, errors=""):
    """Install a journalctl that says what it is told, as the real one does with ``-r``."""
    FakeRoot(root).write("said.json", "".join(f"{line}\n" for line in newest_first))
    program = root / "usr/bin/journalctl"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ncat {root}/said.json\necho '{errors}' >&2\nexit {code}\n")
    program.chmod(0o755)


def test_the_kernels_records_come_oldest_first_with_their_time(tmp_path):
    journalctl(tmp_path, entry("second", 2000), entry("first", 1000, priority="6"))

    assert journal_records(tmp_path, 10) == [
        KernelRecord(1, 6, 1000, "first"),
        KernelRecord(2, 4, 2000, "second"),
    ]


def test_a_message_that_is_no_text_is_a_list_of_bytes():
    (record,) = parse_journal(entry(list("café\x07".encode()), 1))

    assert record.text == "café\x07"


@pytest.mark.parametrize(
    "line",
    [
        entry(XID, 1, facility="1"),
        entry(XID, 1, facility=None),
        entry(XID, 1, priority="9"),
        entry(XID, "soon"),
        entry(None, 1),
        entry([256], 1),
        entry({"a": 1}, 1),
        '{"MESSAGE": ',
        "[1, 2]",
        "null",
        "[" * 60_000,
    ],
)
def test_what_is_no_record_of_the_kernel_is_left_out(line):
    assert list(parse_journal(f"{line}\n{entry('real', 5)}\n")) == [KernelRecord(0, 4, 5, "real")]


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    list(parse_journal(text))


def test_without_journalctl_nothing_is_told(tmp_path):
    with pytest.raises(ProbeError, match="no journalctl") as caught:
        journal_records(tmp_path, 10)

    assert caught.value.reason == "missing_tool"


def test_a_journal_that_shows_this_user_nothing_is_a_lack_of_permission(tmp_path):
    journalctl(tmp_path, code=1, errors="No journal files were opened")

    with pytest.raises(ProbeError, match="No journal files were opened") as caught:
        journal_records(tmp_path, 10)
    assert caught.value.reason == "no_permission"


def as_nobody(root):
    """Return the facts that a user without rights gets of *root*, or the ProbeError."""

    def look():
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        return to_json(CHECK.probe.read(ProbeContext(root, xid_dirs=log.XID_DIRS), 20))

    said_ = probe.answer(probe.run(probe.start_call(look, deadline_s=30)))
    return from_json(KernelFacts, said_, "a test")


@pytest.fixture
def public():
    """A root that everybody may enter; pytest's own folders are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_who_may_not_read_the_kernels_log_is_told_by_journald(public):
    journalctl(public, entry(XID, 5_000_000))
    (public / "dev/kmsg").chmod(0)

    facts = as_nobody(public)

    assert facts.source == JOURNAL
    (finding,) = CHECK.judge(facts, Parameters(), CASE)
    assert said([finding]) == [("PCI:0000:3b:00.0", "fail", "gpu_hw.fell_off_bus")]


def test_who_may_read_neither_cannot_judge(public):
    FakeRoot(public)
    (public / "dev/kmsg").chmod(0)

    with pytest.raises(ProbeError, match=r"may not read .*; there is no journalctl") as caught:
        as_nobody(public)
    assert caught.value.reason == "no_permission"
