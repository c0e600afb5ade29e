"""What the shipped rules make of lines that kernels have written."""

import random
import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import CASE, said

from gpuops.checks import kernel_log
from gpuops.checks.kernel_log import KernelLog, judge, search
from gpuops.checks.protocol import NoParameters
from gpuops.host.kmsg import KernelRecord
from gpuops.resources import data_dir
from gpuops.rules import LINE_MAX, LogSource, load_rules

RULES = [
    rule for rule in load_rules([data_dir("checks") / "rules"]) if rule.source is LogSource.KERNEL
]

XID = "NVRM: Xid (PCI:0000:3b:00):"


def records(*lines):
    return [KernelRecord(n, 4, n * 1_000_000, line) for n, line in enumerate(lines)]


def findings(*lines):
    return judge(search(records(*lines), RULES), NoParameters(), CASE)


def test_an_ordinary_log_passes():
    found = findings("Linux version 6.1.0", "EXT4-fs (sda1): mounted filesystem", "eth0: link up")

    assert said(found) == [("n1", "pass", None)]
    assert found[0].message == "no known fault in 3 lines since boot"


@pytest.mark.parametrize(
    ("line", "rule", "status", "failure_class"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus.",
            "gpu_off_bus",
            "fail",
            "gpu_hw.fell_off_bus",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, Double bit error",
            "gpu_ecc_uncorrectable",
            "fail",
            "gpu_hw.ecc_uncorrectable",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=python, Contained: SM (0x1)",
            "gpu_ecc_contained",
            "warn",
            "gpu_hw.ecc_uncorrectable",
        ),
        (
            f"{XID} 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "gpu_recovery_wanted",
            "fail",
            "gpu_sw.driver",
        ),
        (
            "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB",
            "oom_in_cgroup",
            "warn",
            "host_mem.cgroup_oom",
        ),
        (
            "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB",
            "oom_of_node",
            "warn",
            "host_mem.kernel_oom",
        ),
        (
            "blk_update_request: I/O error, dev sdb, sector 12 op 0x0:(READ)",
            "disk_error",
            "warn",
            "host_hw.disk",
        ),
        ("nvme nvme3: I/O 128 QID 4 timeout, aborting", "nvme_silent", "warn", "host_hw.disk"),
        (
            "XFS (nvme1n1p1): Log I/O Error (0x2) detected. Shutting down filesystem.",
            "disk_read_only",
            "warn",
            "storage.read_only",
        ),
        (
            "EXT4-fs (sda2): Remounting filesystem read-only",
            "disk_read_only",
            "warn",
            "storage.read_only",
        ),
        (
            "INFO: task kworker/u64:3:912 blocked for more than 120 seconds.",
            "hung_task",
            "warn",
            "kernel.hung_task",
        ),
        (
            "pcieport 0000:16:02.0: AER: Uncorrectable (Fatal) error message received",
            "pcie_fatal",
            "warn",
            "host_hw.pcie",
        ),
        (
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0",
            "memory_uncorrected",
            "warn",
            "host_hw.dimm",
        ),
        (
            "mce: [Hardware Error]: Machine check events logged",
            "machine_check",
            "warn",
            "host_hw.dimm",
        ),
        (
            "BUG: unable to handle page fault for address: ffff",
            "kernel_fault",
            "warn",
            "kernel.fault",
        ),
        (
            "nfs: server filer not responding, timed out",
            "fileserver_silent",
            "warn",
            "storage.shared_fs",
        ),
    ],
)
def test_a_known_fault_has_its_rule(line, rule, status, failure_class):
    (finding,) = findings(line)

    assert (finding.status.word, finding.failure_class) == (status, failure_class)
    assert finding.message.startswith(rule)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=790, name=python, Graphics Exception: ESR",
        "NVRM: Xid (PCI:0000:3b:00): 31, pid=790, name=python, MMU Fault",
        "NVRM: Xid (PCI:0000:3b:00): 43, pid=790, name=python, Ch 00000008",
        "NVRM: Xid (PCI:0000:3b:00): 45, pid=790, name=python, Ch 00000008",
        f"{XID} 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
    ],
)
def test_what_applications_cause_convicts_no_node(line):
    assert said(findings(line)) == [("n1", "pass", None)]


def test_repeated_hits_are_one_finding_with_their_number_and_span():
    line = "NVRM: Xid (PCI:0000:3b:00): 95, pid=1, name=python, Uncontained"
    (finding,) = findings("boot", *[line] * 800)

    assert finding.value == 800
    assert "on 0000:3b:00, 800 times, first 1.00 s after boot, last 13 min 20 s" in finding.message


WANTED = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
GRANTED = "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
HOUR_US = 3_600_000_000


def test_what_the_driver_takes_back_is_forgotten_for_that_gpu_alone():
    other = XID.replace("3b", "86")

    assert said(findings(f"{XID} {WANTED}", f"{XID} {GRANTED}")) == [("n1", "pass", None)]
    (left,) = findings(f"{XID} {WANTED}", f"{other} {WANTED}", f"{XID} {GRANTED}")
    assert "on 0000:86:00" in left.message
    (again,) = findings(f"{XID} {GRANTED}", f"{XID} {WANTED}")
    assert again.status.word == "fail"


@pytest.mark.parametrize("words", ["OS Reboot", "PF FLR", "Drain and Reset", "Drain P2P"])
def test_every_wish_of_the_driver_fails_in_whatever_words(words):
    line = f"{XID} 154, GPU recovery action changed from 0x0 (None) to 0x2 ({words})"
    (finding,) = findings(line)

    assert finding.status.word == "fail"


def test_a_failure_of_hours_ago_warns_and_a_new_one_fails_again():
    line = f"{XID} 48, pid=1, name=python, Double bit error"
    old = search(records(line), RULES, 3 * HOUR_US)
    fresh = search([*records(line), KernelRecord(9, 4, 2 * HOUR_US, line)], RULES, 3 * HOUR_US)

    (finding,) = judge(old, NoParameters(), CASE)
    assert finding.status.word == "warn"
    assert "too long ago to judge what is now" in finding.message
    assert judge(fresh, NoParameters(), CASE)[0].status.word == "fail"


def test_two_devices_are_two_findings_and_the_worst_comes_first():
    found = findings(
        "nfs: server filer not responding",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:86:00): 79, pid=1, GPU has fallen off the bus.",
    )

    assert [finding.status.word for finding in found] == ["fail", "fail", "warn"]


def test_a_flood_of_subjects_is_bounded_and_told():
    found = findings(*[f"nfs: server filer{n} not responding" for n in range(200)])

    assert len(found) == kernel_log.SUBJECTS_MAX + 1
    assert any(finding.message.startswith("136 more hits") for finding in found)


def test_a_log_whose_start_was_overwritten_says_so():
    log = search([KernelRecord(77, 6, 1, "ordinary")], RULES)

    assert log == KernelLog(records=1, complete=False)
    assert "in what is left of the log" in judge(log, NoParameters(), CASE)[0].message


@given(st.lists(st.text(max_size=200), max_size=20))
def test_any_log_is_searched_without_an_error(lines):
    assert findings(*lines)


def test_every_rule_is_about_something_that_it_names():
    assert len(RULES) >= 12
    for rule in RULES:
        assert rule.reference
        (finding,) = findings(rule.example)
        assert finding.message.startswith(rule.id), rule.id


def test_no_pattern_takes_long_over_a_hostile_line():
    """A generous bound: backtracking without bound would take minutes."""
    noise = random.Random(7)
    started = time.process_time()
    for rule in RULES:
        literal = re.sub(r"[^\w :.()\[\]/-]", "", rule.example)
        for filler in ("a", " ", "(", literal, "".join(noise.choices(string.printable, k=50))):
            rule.matches((filler * (LINE_MAX // len(filler) + 1))[:LINE_MAX])

    assert time.process_time() - started < 5
