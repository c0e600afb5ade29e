"""Each check says whether the hardware itself reported a failure, and whether nodes share it."""

from dataclasses import replace

import pytest
from support import kernel_log as log
from support.checks import CASE, limit
from support.gpus import gpu, node
from support.gpus import part as changed

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, TextExpectation
from gpuops.checks.fabric import nvswitch_sxid
from gpuops.checks.gpu import (
    gpu_ecc,
    gpu_inforom,
    gpu_lost,
    gpu_recovery_action,
    gpu_row_remap,
    gpu_xid,
)
from gpuops.checks.gpu.gpu_count import Parameters as CountParameters
from gpuops.checks.gpu.gpu_count import judge as gpu_count
from gpuops.checks.host import edac, memory_size
from gpuops.checks.nic import ib_pkeys, ib_ports, interfaces
from gpuops.checks.storage import mount_alive, mount_state
from gpuops.host.infiniband import PkeyTable, PkeyTables, Port, RdmaPorts
from gpuops.host.memory_modules import Edac, MemoryController
from gpuops.host.net.interfaces import Interface, Interfaces
from gpuops.host.nvml.facts import GPU_IS_LOST, RemappedRows
from gpuops.host.procfs import Memory
from gpuops.host.storage.mounts import Filesystems, Mount, MountAnswer, MountTable
from gpuops.model import Status
from gpuops.rules import KERNEL_LOG, LogSource

HARDWARE, SHARED, LIMIT = (True, False), (False, True), (False, False)
FIRST = limit(fail=1)


def rows(*, failure=False, fail=1):
    remapped = RemappedRows(correctable=0, uncorrectable=0, pending=False, failure=failure)
    parameters = gpu_row_remap.Parameters(
        failed=limit(fail=fail), pending=limit(fail=1), uncorrectable=limit(warn=513)
    )
    return gpu_row_remap.judge(node(gpu(0, remapped=remapped)), parameters, CASE)


def ecc(*, volatile=FIRST, **errors):
    parameters = gpu_ecc.Parameters(volatile=volatile, sram_aggregate=limit(fail=5))
    # The driver requests an action: it has not contained them, and they fail.
    return gpu_ecc.judge(
        node(changed(gpu(0, recovery_action=1), "ecc", **errors)), parameters, CASE
    )


def memory(profile_bytes):
    profile = replace(
        NO_PROFILE, memory_bytes_min=NumberExpectation(value=profile_bytes, source="order 7")
    )
    return memory_size.judge(Memory(10**9, 10**9), NoParameters(), replace(CASE, profile=profile))


def dimms(limit_):
    controller = MemoryController(name="mc0", corrected=0, uncorrected=3, dimms={})
    parameters = edac.Parameters(uncorrected=limit_, corrected_per_day=limit(warn=50))
    return edac.judge(Edac((controller,)), parameters, CASE)


def ports(count, state="ACTIVE"):
    profile = replace(NO_PROFILE, nic_count=NumberExpectation(value=count, source="order 7"))
    port = Port(device="mlx5_0", number=1, guid="g0", state=state, rate_gbs=50.0)
    parameters = ib_ports.Parameters(downs_per_day=limit(warn=1))
    case = replace(CASE, profile=profile)
    return ib_ports.judge(RdmaPorts((port,)), parameters, case)


def partition(key):
    profile = replace(NO_PROFILE, ib_pkeys=TextExpectation(value=(key,), source="order 7"))
    table = PkeyTable(device="mlx5_0", number=1, guid="g0", is_active=True, is_complete=True)
    return ib_pkeys.judge(PkeyTables((table,)), NoParameters(), replace(CASE, profile=profile))


def interface(name):
    profile = replace(NO_PROFILE, interfaces=TextExpectation(value=("ens0",), source="order 7"))
    facts = Interfaces((Interface(name=name, is_physical=True, carrier=False),))
    parameters = interfaces.Parameters(downs_per_day=limit(warn=1))
    return interfaces.judge(facts, parameters, replace(CASE, profile=profile))


def mount(filesystem):
    answer = MountAnswer(
        mount=Mount("/data", filesystem, "x", frozenset({"rw"})), elapsed_s=0.1, error="EIO"
    )
    parameters = mount_alive.Parameters(answer_s=limit(warn=2))
    return mount_alive.judge(Filesystems((answer,), 0), parameters, CASE)


def missing_mount():
    profile = replace(NO_PROFILE, mounts=TextExpectation(value=("/data",), source="us"))
    facts = MountTable(mounted=(), in_fstab=())
    return mount_state.judge(facts, mount_state.Parameters(), replace(CASE, profile=profile))


@pytest.mark.parametrize(
    ("found", "judged"),
    [
        pytest.param(rows(failure=True), HARDWARE, id="the driver's flag"),
        pytest.param(rows(fail=0), LIMIT, id="a wrong limit of a flag that is not set"),
        pytest.param(ecc(sram_threshold_exceeded=True), HARDWARE, id="the driver's ECC flag"),
        pytest.param(ecc(volatile_uncorrected=2), HARDWARE, id="the first uncorrected error"),
        pytest.param(ecc(volatile_uncorrected=0, volatile=limit(fail=0)), LIMIT, id="none of them"),
        pytest.param(ecc(sram_aggregate_uncorrected=5), LIMIT, id="a count with a limit"),
        pytest.param(
            gpu_lost.judge(
                node(replace(gpu(0), error="lost", error_code=GPU_IS_LOST)), NoParameters(), CASE
            ),
            HARDWARE,
            id="a lost GPU",
        ),
        pytest.param(
            gpu_recovery_action.judge(node(gpu(0, recovery_action=1)), NoParameters(), CASE),
            HARDWARE,
            id="an action that the driver requests",
        ),
        pytest.param(
            gpu_inforom.judge(node(gpu(0, inforom_valid=False)), NoParameters(), CASE),
            HARDWARE,
            id="a corrupt InfoROM",
        ),
        pytest.param(
            gpu_count(node(gpu(0)), CountParameters(expected=8), CASE), LIMIT, id="a number of GPUs"
        ),
        pytest.param(memory(2 * 10**9), LIMIT, id="memory of a profile"),
        pytest.param(dimms(FIRST), HARDWARE, id="the first uncorrected error of a DIMM"),
        pytest.param(dimms(limit(fail=2)), LIMIT, id="several of them"),
        pytest.param(ports(1, state="DOWN"), SHARED, id="a port without link"),
        pytest.param(ports(2), LIMIT, id="an adapter that is not there"),
        pytest.param(partition("0x8001"), SHARED, id="a partition that is missing"),
        pytest.param(interface("ens0"), SHARED, id="an interface without link"),
        pytest.param(interface("ens7"), LIMIT, id="an interface that is not there"),
        pytest.param(mount("nfs4"), SHARED, id="a dead file server"),
        pytest.param(mount("ext4"), LIMIT, id="a dead local disk"),
        pytest.param(missing_mount(), SHARED, id="a mount that is missing"),
    ],
)
def test_who_judged(found, judged):
    failures = [finding for finding in found if finding.status is Status.FAIL]

    assert failures
    for finding in failures:
        assert (finding.hardware_reported, finding.shared_cause) == judged
        assert finding.to_json()["hardware_reported"] is judged[0]


def test_nothing_but_a_failure_is_reported_by_hardware_or_shared():
    for finding in [*rows(), *ecc(volatile_uncorrected=0), *ports(1)]:
        assert (finding.status, finding.hardware_reported, finding.shared_cause) == (
            Status.PASS,
            False,
            False,
        )


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (nvswitch_sxid, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 a fault"),
        (gpu_xid, "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=python, fallen off the bus"),
    ],
)
def test_a_line_of_the_driver_that_fails_is_its_own_report(tmp_path, check, line):
    (found,) = check.judge(log.facts(tmp_path, line), check.Parameters(), CASE)

    assert (found.status, found.hardware_reported) == (Status.FAIL, True)


def test_each_shipped_rule_that_fails_a_node_says_that_the_kernel_reports_a_fault():
    failing = {
        rule.id
        for rule in log.RULES
        if rule.source is LogSource.KERNEL and rule.check == KERNEL_LOG
        if rule.status is Status.FAIL and not rule.hardware_reported
    }

    assert failing == set()
