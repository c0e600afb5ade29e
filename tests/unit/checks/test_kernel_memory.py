"""What a check saw in the kernel's log stays known after others have filled the log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_log as log
from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters, ProbeContext
from gpuops.checks.core.kernel_rules import BURSTS_MAX, KMSG, gather, memory_after
from gpuops.checks.core.runner import CheckRun
from gpuops.checks.fabric import nvswitch_sxid
from gpuops.checks.gpu import gpu_xid
from gpuops.checks.host import kernel_log
from gpuops.gate.node_state import StateUpdate, state_after
from gpuops.host.kmsg import KernelRecord
from gpuops.host.node_state import BootMoment, KernelMemory, NodeState, Repair
from gpuops.host.records import from_json, to_json

BOOT = "boot-1"
UUID = "GPU-1c7a5e38-0c43-1d5b-6ab1-4f3a2b1c0d9e"
NAMED = f"NVRM: GPU at PCI:0000:3b:00: {UUID}"
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
WISH = "NVRM: Xid (PCI:0000:86:00): 154, GPU recovery action changed from 0x0 to 0x2"
NO_WISH = "NVRM: Xid (PCI:0000:86:00): 154, GPU recovery action changed from 0x2 to 0x0"
SXID = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
NFS = "nfs: server filer not responding, still trying"
DOWN = "mlx5_core 0000:5c:00.0 ib0: Link down"
UP = "mlx5_core 0000:5c:00.0 ib0: Link up"
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15"
HOUR_US = 3_600_000_000


class Stand:
    """A node that is checked again and again; only the last lines of its log are left."""

    def __init__(self, root):
        self.root = root
        self.state = NodeState()
        self.written = 0

    def check(self, *lines, boot=BOOT, kept_from=None, case=CASE):
        """Return what is said of a log with *lines* new; earlier ones were overwritten."""
        first = self.written
        self.written += len(lines)
        machine = ProbeContext(
            self.root, xid_dirs=log.XID_DIRS, kernel=self.state.kernel.of_boot(boot)
        )
        records = [
            KernelRecord(first + n, 4, (first + n) * log.SECOND_US, line)
            for n, line in enumerate(lines)
        ]
        facts = gather(KMSG, records, log.RULES, machine)
        run = CheckRun(
            suite="s", node="n1", start_us=0, end_us=0, findings=(), facts={"kernel_log": facts}
        )
        moment = BootMoment(boot_id=boot, since_boot_s=self.written, t_us=1)
        self.state = state_after(self.state, run, moment=moment, purpose=StateUpdate())
        self.state = from_json(NodeState, to_json(self.state), "a test")
        found = [
            *gpu_xid.judge(facts, gpu_xid.Parameters(), case),
            *nvswitch_sxid.judge(facts, nvswitch_sxid.Parameters(), case),
            *kernel_log.judge(facts, NoParameters(), case),
        ]
        return [item for item in said(found) if item[1] != "pass"]


FLOOD = ["tmpfs: mounted"] * 50
SEEN = [
    (UUID, "fail", "gpu_hw.fell_off_bus"),
    ("PCI:0000:86:00.0", "fail", "gpu_sw.driver"),
    ("PCI:0000:c1:00.0", "fail", "gpu_hw.nvswitch"),
    ("n1", "warn", "storage.shared_fs"),
]


@pytest.fixture
def stand(tmp_path):
    return Stand(tmp_path)


def test_a_flooded_log_takes_back_nothing(stand):
    assert stand.check("boot", NAMED, XID_79, WISH, SXID, NFS) == SEEN
    for _ in range(3):
        assert stand.check(*FLOOD) == SEEN


def test_another_boot_begins_anew(stand):
    stand.check("boot", XID_79)

    assert stand.check(*FLOOD, boot="boot-2") == []
    assert stand.check(*FLOOD) == [], "and the boot before is over"


def test_a_repair_ends_what_is_remembered_too(stand):
    stand.check("boot", XID_79, NFS)
    repair = Repair(entity_kind="node", entity_id="n1", t_us=HOUR_US, by="ann", what="GPU")
    case = JudgeContext(node=NODE, repairs=(repair,), boot_us=1)

    assert stand.check(*FLOOD, case=case) == []


@pytest.mark.parametrize("line", [NO_WISH, LOADED])
def test_what_ends_a_line_ends_it_where_the_line_is_gone_too(stand, line):
    stand.check("boot", WISH)

    assert stand.check(line) == []
    assert stand.check(*FLOOD) == []


def test_a_link_that_came_up_again_is_not_remembered_as_down(stand):
    stand.check("boot", DOWN)
    stand.check(UP)

    assert stand.state.kernel.hits == ()


def test_a_log_that_is_there_from_its_start_on_needs_no_memory(tmp_path):
    memory = Stand(tmp_path)
    memory.check("boot", XID_79)
    machine = ProbeContext(tmp_path, xid_dirs=log.XID_DIRS, kernel=memory.state.kernel)

    assert gather(KMSG, log.records("boot"), log.RULES, machine).driver.xids == ()


def test_lines_that_are_still_there_are_counted_once(stand, tmp_path):
    stand.check("boot", XID_79, XID_79, NFS)
    machine = ProbeContext(tmp_path, xid_dirs=log.XID_DIRS, kernel=stand.state.kernel)
    left = [KernelRecord(2, 4, 2 * log.SECOND_US, XID_79), KernelRecord(3, 4, 3_000_000, NFS)]
    facts = gather(KMSG, left, log.RULES, machine)

    assert [(burst.count, burst.first_us) for burst in facts.driver.xids] == [(2, log.SECOND_US)]
    assert [(hits.count, hits.first_us) for hits in facts.log.hits] == [(1, 3_000_000)]


@given(st.lists(st.integers(0, 400), max_size=300))
def test_the_memory_is_bounded_and_keeps_the_newest(tmp_path_factory, minutes):
    root = tmp_path_factory.mktemp("root")
    records = [
        KernelRecord(7 + n, 4, minute * 60_000_000, XID_79)
        for n, minute in enumerate(sorted(minutes))
    ]
    facts = gather(KMSG, records, log.RULES, ProbeContext(root, xid_dirs=log.XID_DIRS))
    bursts = memory_after(KernelMemory(), facts, BOOT).driver.xids

    assert [burst.minute for burst in bursts] == sorted(set(minutes))[-BURSTS_MAX:]
