"""What the shipped rules make of lines that kernels have written."""

import random
import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_log as log
from support.checks import CASE, NODE, said
from support.kernel_log import records

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.kernel_rules import (
    KMSG,
    RULE_SUBJECTS_MAX,
    KernelFacts,
    KernelLogMatches,
    RuleSearch,
    batches,
)
from gpuops.checks.core.xid_catalogue import XidClass, load_xids
from gpuops.checks.host.kernel_log import judge
from gpuops.host.kmsg import KernelRecord
from gpuops.host.node_state import Repair
from gpuops.model import Role, Status
from gpuops.rules import KERNEL_LOG, LINE_MAX, LogSource, first_match, load_rules

RULES = [rule for rule in log.RULES if rule.source is LogSource.KERNEL]
JUDGED = [rule for rule in RULES if rule.check == KERNEL_LOG]
HOUR_US = 3_600_000_000


def search(records, rules, now_us=None):
    searched = RuleSearch(rules)
    for batch in batches(records):
        searched.add(batch)
    return searched.log(now_us)


def judged(found, case=CASE):
    return judge(KernelFacts(source=KMSG, now_us=0, log=found), NoParameters(), case)


def findings(*lines):
    return judged(search(records(*lines), RULES))


def test_an_ordinary_log_passes():
    found = findings("Linux version 6.1.0", "EXT4-fs (sda1): mounted filesystem", "eth0: link up")

    assert said(found) == [("n1", "pass", None)]
    assert found[0].message == "no known fault in 3 lines since boot"


@pytest.mark.parametrize(
    ("line", "rule", "status", "failure_class"),
    [
        (
            "Memory cgroup out of memory: Killed process 77 (python) total-vm:1kB",
            "oom_in_cgroup",
            "pass",
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
            "nvidia 0000:3b:00.0: AER: can't recover (no error_detected callback)",
            "pcie_fatal",
            "warn",
            "host_hw.pcie",
        ),
        (
            "pcieport 0000:00:1d.0: AER: device recovery failed",
            "pcie_fatal",
            "warn",
            "host_hw.pcie",
        ),
        (
            "pcieport 0000:16:02.0: AER: Multiple Uncorrected (Non-Fatal) error received: id=0010",
            "pcie_fatal",
            "warn",
            "host_hw.pcie",
        ),
        (
            "nvidia 0000:05:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=",
            "pcie_fatal",
            "warn",
            "host_hw.pcie",
        ),
        ("{1}[Hardware Error]: event severity: fatal", "firmware_error", "warn", "host_hw.dimm"),
        ("[Hardware Error]: event severity: fatal", "firmware_error", "warn", "host_hw.dimm"),
        (
            "Out of memory: Kill process 77 (python) score 900 or sacrifice child",
            "oom_of_node",
            "warn",
            "host_mem.kernel_oom",
        ),
        (
            "Out of memory: Killed process 77, UID 1000, (python) total-vm:1kB",
            "oom_of_node",
            "warn",
            "host_mem.kernel_oom",
        ),
        (
            "LustreError: 167-0: fs-MDT0000-mdc-ff: This client was evicted by fs-MDT0000; in",
            "fileserver_silent",
            "warn",
            "storage.shared_fs",
        ),
        (
            "Lustre: fs-OST0001-osc-ff: Connection to fs-OST0001 (at 10.0.0.1@o2ib) was lost; in",
            "fileserver_silent",
            "warn",
            "storage.shared_fs",
        ),
        (
            "BTRFS info (device sda1: state EA): forced readonly",
            "disk_read_only",
            "warn",
            "storage.read_only",
        ),
        (
            "BTRFS info (device sda1 state EA): forced readonly",
            "disk_read_only",
            "warn",
            "storage.read_only",
        ),
        (
            "XFS (dm-0): Corruption of in-memory data detected.  Shutting down filesystem",
            "disk_read_only",
            "warn",
            "storage.read_only",
        ),
        ("Oops: 0002 [#1] SMP", "kernel_fault", "warn", "kernel.fault"),
        (
            "NMI watchdog: Watchdog detected hard LOCKUP on cpu 3",
            "kernel_fault",
            "warn",
            "kernel.fault",
        ),
        (
            "rcu: INFO: rcu_sched self-detected stall on CPU",
            "kernel_fault",
            "warn",
            "kernel.fault",
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
            "host_hw.cpu",
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
        (
            "md/raid10:md0: Disk failure on sdc1, disabling device.",
            "raid_member_failed",
            "warn",
            "host_hw.disk",
        ),
        (
            "pcieport 0000:16:02.0: pciehp: Slot(5-1): Card not present",
            "pcie_link_down",
            "warn",
            "host_hw.pcie",
        ),
        (
            (
                "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 1): "
                "Detected insufficient power on the PCIe slot (27W)."
            ),
            "nic_power",
            "warn",
            "host_hw.pcie",
        ),
        (
            (
                "mlx5_core 0000:5c:00.1: Port module event[error]: module 1, Cable error, "
                "High Temperature"
            ),
            "nic_module",
            "warn",
            "network.link_errors",
        ),
        (
            "mlx5_core 0000:5c:00.0: poll_health:813:(pid 0): Fatal error 3 detected",
            "nic_health",
            "warn",
            "network.port_down",
        ),
        (
            "python[7]: segfault at 0 ip 00007f sp 00007f error 4 in libcuda.so.550.54.15[7f+1]",
            "segfault_in_gpu_library",
            "pass",
            "crash.segfault",
        ),
        (
            "nvme nvme0: I/O tag 320 (c140) opcode 0x1 (I/O Cmd) QID 5 timeout, aborting",
            "nvme_silent",
            "warn",
            "host_hw.disk",
        ),
        ("Kernel panic - not syncing: Fatal exception", "kernel_fault", "warn", "kernel.fault"),
        (
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)",
            "gpu_not_initialised",
            "warn",
            "gpu_sw.driver",
        ),
    ],
)
def test_a_known_fault_has_its_rule(line, rule, status, failure_class):
    (finding,) = findings(line)

    assert (finding.status.word, finding.failure_class) == (status, failure_class)
    assert finding.message.startswith(rule)


XIDS = [rule.example for rule in RULES if rule.check != KERNEL_LOG]


@pytest.mark.parametrize("line", XIDS)
def test_what_another_check_judges_is_not_reported_twice(line):
    assert said(findings(line)) == [("n1", "pass", None)]


def test_repeated_hits_are_one_finding_with_their_number_and_span():
    line = "nfs: server filer not responding, still trying"
    (finding,) = findings("boot", *[line] * 800)

    assert finding.value == 800
    assert "on filer, 800 times, first 1.00 s after boot, last 13 min 20 s" in finding.message


DOWN, UP = "mlx5_core 0000:5c:00.0 ib0: Link down", "mlx5_core 0000:5c:00.0 ib0: Link up"


def test_what_a_later_line_takes_back_is_forgotten_for_that_device_alone():
    other = DOWN.replace("ib0", "ib1")

    assert findings(DOWN, UP)[0].message.startswith("no known fault")
    (left,) = findings(DOWN, other, UP)
    assert "on ib1" in left.message
    (again,) = findings(UP, DOWN)
    assert "on ib0" in again.message


FAILING = """
[[rule]]
id = "fan"
pattern = 'fan (?P<subject>.) stopped'
failure_class = "host_hw.pcie"
source = "kernel"
side = "infra"
status = "fail"
within_s = 7200
reference = "a test"
example = "fan 3 stopped"
"""


@pytest.fixture
def failing(tmp_path):
    (tmp_path / "site.toml").write_text(FAILING)
    return load_rules([tmp_path])


@pytest.mark.parametrize(("age_us", "status"), [(2 * HOUR_US, "fail"), (2 * HOUR_US + 1, "warn")])
def test_a_failure_of_hours_ago_only_warns(failing, age_us, status):
    (finding,) = judged(search(records("fan 3 stopped"), failing, age_us))

    assert finding.status.word == status
    assert ("too long ago to count as a present fault" in finding.message) == (status == "warn")


def test_a_new_line_makes_an_old_failure_fail_again(failing):
    fresh = [*records("fan 3 stopped"), KernelRecord(9, 4, 2 * HOUR_US, "fan 3 stopped")]

    assert judged(search(fresh, failing, 3 * HOUR_US))[0].status.word == "fail"


@pytest.mark.parametrize(("after_s", "status"), [(1, "pass"), (0, "pass"), (-1, "fail")])
def test_a_repair_of_the_node_ends_what_was_before_it(failing, after_s, status):
    """The line is at 1 s after a boot at 1000 s; the repair *after_s* later."""
    found = search(records("boot", "fan 3 stopped"), failing)
    repair = Repair(entity_kind="node", entity_id="n1", t_us=1_001_000_000, by="ann", what="fan")
    at = Repair(**{**_fields(repair), "t_us": repair.t_us + after_s * 1_000_000})
    case = JudgeContext(node=NODE, repairs=(at,), boot_us=1_000_000_000)

    assert judged(found, case)[0].status.word == status


def _fields(repair):
    return {name: getattr(repair, name) for name in ("entity_kind", "entity_id", "by", "what")}


def test_two_devices_are_two_findings_and_the_worst_comes_first():
    found = findings(
        "mlx5_core 0000:5c:00.0 ib0: Link down",
        "nfs: server filer not responding",
        "nfs: server other not responding",
    )

    assert [finding.status.word for finding in found] == ["warn", "warn", "pass"]


def test_a_flood_of_subjects_is_bounded_and_told():
    found = findings(*[f"nfs: server filer{n} not responding" for n in range(200)])

    assert len(found) == RULE_SUBJECTS_MAX + 1
    assert any(finding.message.startswith("184 more hits") for finding in found)


def test_a_flood_about_one_rules_subjects_hides_no_other_rule():
    """A user chooses the names of processes that are killed for memory."""
    floods = [f"nfs: server filer{n} not responding" for n in range(200)]

    found = findings(*floods, "mlx5_core 0000:5c:00.0 ib0: Link down")

    assert any("0000:5c:00.0" in finding.message for finding in found)


def test_a_log_whose_start_was_overwritten_says_so():
    found = search([KernelRecord(77, 6, 1, "ordinary")], RULES)

    assert found == KernelLogMatches(records=1, complete=False)
    assert "in the rest of the log" in judged(found)[0].message


@given(st.lists(st.text(max_size=200), max_size=20))
def test_any_log_is_searched_without_an_error(lines):
    assert findings(*lines)


def test_every_rule_is_about_something_that_it_names():
    assert len(JUDGED) >= 24
    for rule in JUDGED:
        assert rule.reference
        (finding,) = findings(rule.example)
        assert finding.message.startswith(rule.id), rule.id


@pytest.mark.parametrize("kind", load_xids(log.XID_DIRS).values(), ids=lambda kind: kind.code)
def test_the_rules_for_one_attempt_say_of_an_xid_what_the_catalogue_says(kind):
    """`gpu_application` names only the codes that are worth a line beside a failure."""
    line = f"NVRM: Xid (PCI:0000:3b:00): {kind.code}, pid=1, name=python, Ch 00000001"
    rule = first_match(RULES, line, LogSource.KERNEL)

    if kind.xid_class is XidClass.HARDWARE:
        assert (rule.status, rule.role) == (Status.FAIL, Role.ROOT)
        assert rule.failure_class is kind.failure_class
    else:
        assert rule is None or rule.status is not Status.FAIL
        assert rule is None or rule.failure_class is kind.failure_class


def test_a_storm_of_any_kind_is_searched_in_time():
    """A generous bound for 170,000 lines, half of which a rule matches."""
    storm = records(
        *["nfs: server filer not responding, still trying", "audit: type=1400 apparmor"] * 85_000
    )
    started = time.process_time()
    (finding,) = judged(search(storm, RULES))

    assert finding.value == 85_000
    assert time.process_time() - started < 2


def test_no_pattern_takes_long_over_a_hostile_line():
    """A generous bound: backtracking without bound would take minutes."""
    noise = random.Random(7)
    started = time.process_time()
    for rule in RULES:
        literal = re.sub(r"[^\w :.()\[\]/-]", "", rule.example)
        for filler in ("a", " ", "(", literal, "".join(noise.choices(string.printable, k=50))):
            rule.matches((filler * (LINE_MAX // len(filler) + 1))[:LINE_MAX])

    assert time.process_time() - started < 5


def test_a_line_is_found_wherever_it_stands_among_thousands():
    """Rules are narrowed for a thousand lines at once; none may be lost at the seams."""
    for place in (0, 1, 998, 999, 1000, 1001, 2499):
        lines = ["audit: type=1400"] * 2500
        lines[place] = "nfs: server filer not responding"

        assert findings(*lines)[0].message.startswith("fileserver_silent"), place
