"""NVML through the real pynvml, over a libnvidia-ml in C that a scenario drives."""

import json
import os
import subprocess
import sys
import time

import pytest
from support import mock_nvml
from support.mock_nvml import UUIDS, addresses, shape
from support.runs import wait_until

from gpuops.agent.monitors.straggler.signs import throttled_gpus
from gpuops.host.nvml.calls import GROUPS
from gpuops.host.nvml.facts import UNREADABLE, NvmlSnapshot
from gpuops.host.records import from_json

pytestmark = pytest.mark.cc

SLACK_S = 20.0
# Of a snapshot that must hang: short, but longer than a busy machine needs for the other calls.
HANG_S = 4.0

ASK = """
import json, sys
from pathlib import Path
from gpuops.host.nvml.session import read_nvml
from gpuops.host.records import to_json
for line in sys.stdin:
    snapshot = read_nvml(float(line), Path(sys.argv[1]))
    print(json.dumps(to_json(snapshot)), flush=True)
"""


class Host:
    """A process that asks NVML again and again, over a scenario that changes between."""

    def __init__(self, mock, root):
        self.root = root
        self.env = mock.env("")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK, str(root)],
            env={**os.environ, **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, scenario, deadline_s=20.0):
        mock_nvml.change(self.env, scenario)
        self.process.stdin.write(f"{deadline_s}\n")
        self.process.stdin.flush()
        return from_json(NvmlSnapshot, json.loads(self.process.stdout.readline()), "the answer")


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


def hosted(mock, root):
    host = Host(mock, root)
    yield host.ask
    host.process.stdin.close()
    assert host.process.wait(timeout=20) == 0
    host.process.stdout.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def ask(mock, root):
    yield from hosted(mock, root)


@pytest.fixture(scope="module")
def ask_old(tmp_path_factory):
    old = mock_nvml.build(tmp_path_factory.mktemp("old"), old=True)
    yield from hosted(old, tmp_path_factory.mktemp("oldroot"))


def python(mock, scenario, code):
    """Return what *code* prints in a process of its own that meets *scenario*."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **mock.env(scenario)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        text=True,
    )
    return run.stdout


def without(gpu, *names):
    """Return all that *gpu* tells besides *names*, who it is, and why something is missing."""
    apart = {"index", "minor", "uuid", "serial", "address", "errors", "unsupported", *names}
    return {name: getattr(gpu, name) for name in gpu.__slots__ if name not in apart}


def test_every_gpu_is_listed_with_uuid_address_and_name(ask):
    snapshot = ask(mock_nvml.gpus(8))

    assert snapshot.status == "ok"
    assert snapshot.driver == "999.1"
    assert snapshot.nvml_version == "12.999.1"
    assert [gpu.uuid for gpu in snapshot.gpus] == list(UUIDS)
    assert [gpu.address for gpu in snapshot.gpus] == addresses(8)
    assert [gpu.minor for gpu in snapshot.gpus] == list(range(8))
    assert {gpu.name for gpu in snapshot.gpus} == {"Mock GPU 80GB"}
    assert {gpu.error for gpu in snapshot.gpus} == {None}
    assert (snapshot.hang, snapshot.state) == (None, None)


@pytest.mark.parametrize(
    ("name", "gpu_name", "links", "watts"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 18, 700),
        ("h200", "NVIDIA H200", 18, 700),
        ("a100", "NVIDIA A100-SXM4-80GB", 12, 400),
        ("b200", "NVIDIA B200", 18, 1000),
    ],
)
def test_a_healthy_machine_of_each_shape_is_told_whole(ask, name, gpu_name, links, watts):
    snapshot = ask(shape(name))

    assert len(snapshot.gpus) == 8
    for gpu in snapshot.gpus:
        assert (gpu.name, len(gpu.nvlinks), gpu.power.limit_w) == (gpu_name, links, watts)
        assert (gpu.errors, gpu.error, gpu.hung_call) == ((), None, None)
        assert {link.active for link in gpu.nvlinks} == {True}
        assert {link.recovery_errors for link in gpu.nvlinks} == {0}
        assert (gpu.recovery_action, gpu.inforom_valid, gpu.processes) == (0, True, ())


VALUES = {
    "driver": "1.2.3",
    "serial": "S1",
    "minor": 5,
    "vbios": "V1",
    "recovery_action": 4,
    "remapped_correctable": 11,
    "remapped_uncorrectable": 12,
    "remapped_pending": 1,
    "remapped_failure": 0,
    "has_page_retirement": 1,
    "retired_single_bit": 13,
    "retired_double_bit": 14,
    "retired_pending": 1,
    "ecc_volatile_corrected": 2**40,
    "ecc_volatile_uncorrected": 16,
    "ecc_aggregate_corrected": 17,
    "ecc_aggregate_uncorrected": 18,
    "sram_volatile_parity": 1,
    "sram_volatile_secded": 2,
    "sram_aggregate_parity": 10,
    "sram_aggregate_secded": 20,
    "sram_threshold_exceeded": 1,
    "temperature_c": 61,
    "memory_temperature_c": 62,
    "slowdown_c": 83,
    "shutdown_c": 84,
    "memory_max_c": 85,
    "margin_c": -3,
    "slowdown_tlimit_c": -2,
    "shutdown_tlimit_c": -9,
    "power_mw": 123456,
    "power_limit_mw": 650000,
    "default_power_limit_mw": 700000,
    "max_power_limit_mw": 710000,
    "sm_mhz": 101,
    "sm_max_mhz": 102,
    "memory_mhz": 103,
    "memory_max_mhz": 104,
    "sm_application_mhz": 105,
    "memory_application_mhz": 106,
    "clock_reasons": 0x48,
    "pcie_generation": 3,
    "pcie_generation_max": 5,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "pcie_replays": 21,
    "nvlink_count": 2,
    "nvlink_state:1": 0,
    "nvlink_crc:1": 31,
    "nvlink_replay:1": 32,
    "nvlink_recovery:1": 33,
    "fabric_state": 2,
    "fabric_status": 3,
    "fabric_health_mask": 0x55,
    "fabric_health_summary": 2,
    "fabric_clique": 9,
    "ecc": 0,
    "ecc_pending": 1,
    "mig": 1,
    "mig_pending": 0,
    "persistence": 0,
    "compute_mode": 3,
    "memory_bytes": 10**12,
    "reserved_bytes": 10**9,
    "used_bytes": 10**10,
    "utilization_percent": 97,
}


def test_every_value_has_its_place(ask):
    (gpu,) = ask(shape("h100", 1, per_gpu={0: VALUES}) + "\nprocess 0 4242 1000 mps").gpus

    told = {
        name: getattr(gpu, name)
        for name in ("serial", "minor", "vbios", "recovery_action", "utilization_percent")
    }
    assert told == {
        "serial": "S1",
        "minor": 5,
        "vbios": "V1",
        "recovery_action": 4,
        "utilization_percent": 97,
    }
    assert repr(gpu.remapped).endswith(
        "correctable=11, uncorrectable=12, pending=True, failure=False)"
    )
    assert repr(gpu.retired).endswith("single_bit=13, double_bit=14, pending=True)")
    assert values(gpu.ecc) == [2**40, 16, 17, 18, 3, 30, True]
    assert values(gpu.temperature) == [61, 62, 83, 84, 85, -3, -2, -9]
    assert values(gpu.power) == [123.456, 650, 700, 710]
    assert values(gpu.clocks) == [101, 102, 103, 104, 105, 106, 0x48, (0x48,) * 3]
    assert values(gpu.pcie) == [3, 5, 8, 16, 21]
    assert [values(link) for link in gpu.nvlinks] == [
        [0, True, 0, 0, 0, None, None, None],
        [1, False, 31, 32, 33, None, None, None],
    ]
    assert values(gpu.fabric) == [2, 3, 0x55, 2, 9]
    assert values(gpu.modes) == [False, True, True, False, False, 3]
    assert values(gpu.memory) == [10**12, 10**10, 10**9]
    assert [values(process) for process in gpu.processes] == [[4242, 1000, "mps", None]]


def values(record):
    return [getattr(record, name) for name in record.__slots__]


def test_links_before_hopper_and_after_it_are_counted_by_their_own_fields(ask):
    links = {"nvlink_state:11": 0, "nvlink_crc:3": 1, "nvlink_replay:7": 2, "nvlink_recovery:11": 3}
    a100 = ask(shape("a100", 1, per_gpu={0: links})).gpus[0].nvlinks
    b200 = ask(shape("b200", 1, per_gpu={0: {"nvlink_receive:17": 5, **links}})).gpus[0].nvlinks

    assert [values(a100[n]) for n in (3, 7, 11)] == [
        [3, True, 1, 0, 0, None, None, None],
        [7, True, 0, 2, 0, None, None, None],
        [11, False, 0, 0, 3, None, None, None],
    ]
    assert [values(b200[n]) for n in (3, 11, 17)] == [
        [3, True, None, None, 0, 0, 15e-255, 15e-255],
        [11, False, None, None, 3, 0, 15e-255, 15e-255],
        [17, True, None, None, 0, 5, 15e-255, 15e-255],
    ]


@pytest.mark.parametrize(
    ("packed", "rate", "why"),
    [
        (0xFFF, 15e-255, None),
        (0, 0.0, None),
        (0x20B, 2e-11, None),
        (0xB0D, 11e-13, None),
        (0x0FF, 0.0, None),
        ("-", None, None),
        (2**32 - 1, None, None),
        (0xFFFF, None, None),
        ("!999", None, "Unknown Error"),
        (0x1000, None, "4096 is not plausible: 0 to 4095 are"),
        (0x100, None, "1 errors per bit are not plausible"),
    ],
)
def test_a_bit_error_rate_is_four_bits_of_mantissa_over_eight_of_exponent(ask, packed, rate, why):
    (gpu,) = ask(shape("b200", 1, per_gpu={0: {"nvlink_effective_ber:3": packed}})).gpus
    name = "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"
    refused = [(error.call, error.text) for error in gpu.errors]

    assert (gpu.nvlinks[3].effective_ber, gpu.nvlinks[3].symbol_ber) == (rate, 15e-255)
    assert {link.effective_ber for link in gpu.nvlinks if link.link != 3} == {15e-255}
    assert refused == ([] if why is None else [(name, why)])
    assert (name in gpu.unsupported) == (rate is None and why is None)


def test_a_gpu_that_is_lost_when_asked_for_its_bit_error_rates_keeps_its_links(ask):
    """They are asked for in the fourth call: all fields, the links, their lanes, the rates."""
    lost, healthy = ask(shape("b200", 2) + "\nreturn 0@4 nvmlDeviceGetFieldValues 15").gpus

    assert lost.error_code == 15
    assert [link.active for link in lost.nvlinks] == [True] * 18
    assert {link.effective_ber for link in lost.nvlinks} == {None}
    assert {link.effective_ber for link in healthy.nvlinks} == {15e-255}


def test_a_board_without_nvlinks_has_none_and_one_that_does_not_tell_is_not_known(ask):
    gpus = ask(shape("h100", 2, per_gpu={0: {"nvlink_count": 0}, 1: {"nvlink_count": "-"}})).gpus

    assert [gpu.nvlinks for gpu in gpus] == [(), None]


def test_a_missing_recovery_action_is_not_read_as_a_healthy_one(ask):
    answers = {0: "-", 1: "!2", 2: "!999", 3: 0}
    told = {index: {"recovery_action": answer} for index, answer in answers.items()}
    gpus = ask(shape("h100", 4, per_gpu=told)).gpus
    field = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"

    assert [gpu.recovery_action for gpu in gpus] == [None, None, None, 0]
    assert [field in gpu.unsupported for gpu in gpus] == [True, True, False, False]
    assert [(error.call, error.code) for error in gpus[2].errors] == [(field, 999)]


def test_an_old_driver_tells_what_it_can_and_what_it_cannot(ask_old):
    snapshot = ask_old(shape("a100", 2, recovery_action="-"))
    gpu = snapshot.gpus[1]

    assert snapshot.status == "ok"
    assert (gpu.errors, gpu.fabric, gpu.recovery_action) == ((), None, None)
    assert {"nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetSramEccErrorStatus"} <= set(
        gpu.unsupported
    )
    assert (gpu.temperature.core_c, gpu.clocks.reasons) == (31, 1)
    assert gpu.memory.reserved_bytes is None
    assert gpu.memory.total_bytes == 85899345920


def test_an_old_driver_counts_its_own_memory_as_used(ask_old):
    scenario = shape("a100", 1, used_bytes=1000, reserved_bytes=500)
    (gpu,) = ask_old(scenario + "\nprocess 0 4242 900").gpus

    assert gpu.memory.used_bytes == 1500
    assert [process.pid for process in gpu.processes] == [4242]


def test_gpus_of_different_models_are_told_apart(ask):
    gpus = ask(shape("h100", 2, per_gpu={1: {"name": "NVIDIA H200"}})).gpus

    assert [gpu.name for gpu in gpus] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


def test_a_gpu_with_mig_on_is_told_as_such(ask):
    (gpu,) = ask(shape("h100", 1, mig=1, utilization_percent="-", nvlink_state="-")).gpus

    assert (gpu.modes.mig, gpu.utilization_percent, gpu.errors) == (True, None, ())
    assert {link.active for link in gpu.nvlinks} == {None}


def test_a_lost_gpu_keeps_its_error_and_the_others_are_listed(ask):
    gpus = ask(mock_nvml.gpus(4, broken={2: 15})).gpus

    assert [gpu.error_code for gpu in gpus] == [None, None, 15, None]
    assert gpus[2].error == "nvmlDeviceGetHandleByIndex: GPU is lost"
    assert gpus[2].uuid is None


@pytest.mark.parametrize("nth", [2, 5, 20])
def test_a_gpu_that_is_lost_on_the_way_is_not_asked_much_more(ask, nth):
    healthy = ask(shape("h100", 4))
    snapshot = ask(shape("h100", 4) + f"\nlost 2@{nth}")
    lost = snapshot.gpus[2]

    assert (lost.error_code, lost.hung_call) == (15, None)
    assert lost.error.endswith(": GPU is lost")
    assert len(lost.errors) <= len(GROUPS) + 1
    assert {error.code for error in lost.errors} == {15}
    for index in (0, 1, 3):
        assert snapshot.gpus[index] == healthy.gpus[index]


@pytest.mark.parametrize(
    ("scenario", "status", "code"),
    [
        ("init 12", "absent", 12),
        ("init 18", "error", 18),
        ("init 9", "error", 9),
        ("count 999", "error", 999),
    ],
    ids=["no library", "driver and library differ", "driver not loaded", "cannot count"],
)
def test_an_nvml_that_does_not_start_says_why(ask, scenario, status, code):
    snapshot = ask(scenario)

    assert (snapshot.status, snapshot.error_code) == (status, code)
    assert snapshot.gpus == ()


CODES = (*range(1, 31), 999, 12345)


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_every_code_of_a_start_that_failed_is_kept(ask, call):
    for code in CODES:
        snapshot = ask(f"return * {call} {code}")

        assert snapshot.status == ("absent" if code == 12 else "error")
        assert snapshot.error_code == code
        assert snapshot.error.startswith(f"{call}: ")


# What each call tells, in NvmlGpu.
CALLS = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetPciInfo": "address",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetSerial": "serial",
    "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetUtilizationRates": "utilization_percent",
    "nvmlDeviceGetFieldValues": "recovery_action",
    "nvmlDeviceGetPersistenceMode": "modes.persistence",
    "nvmlDeviceGetEccMode": "modes.ecc",
    "nvmlDeviceGetMigMode": "modes.mig",
    "nvmlDeviceGetComputeMode": "modes.compute",
    "nvmlDeviceGetGpuFabricInfoV": "fabric",
    "nvmlDeviceGetSramEccErrorStatus": "ecc.sram_threshold_exceeded",
    "nvmlDeviceGetRemappedRows": "remapped",
    "nvmlDeviceValidateInforom": "inforom_valid",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetComputeRunningProcesses": "processes",
    "nvmlDeviceGetTemperatureV": "temperature.core_c",
    "nvmlDeviceGetMarginTemperature": "temperature.margin_c",
    "nvmlDeviceGetTemperatureThreshold": "temperature.slowdown_c",
    "nvmlDeviceGetPowerUsage": "power.drawn_w",
    "nvmlDeviceGetEnforcedPowerLimit": "power.limit_w",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power.default_limit_w",
    "nvmlDeviceGetPowerManagementLimitConstraints": "power.max_limit_w",
    "nvmlDeviceGetClockInfo": "clocks.sm_mhz",
    "nvmlDeviceGetMaxClockInfo": "clocks.memory_max_mhz",
    "nvmlDeviceGetApplicationsClock": "clocks.sm_application_mhz",
    "nvmlDeviceGetCurrentClocksEventReasons": "clocks.reasons",
    "nvmlDeviceGetCurrPcieLinkGeneration": "pcie.generation",
    "nvmlDeviceGetMaxPcieLinkGeneration": "pcie.generation_max",
    "nvmlDeviceGetCurrPcieLinkWidth": "pcie.width",
    "nvmlDeviceGetMaxPcieLinkWidth": "pcie.width_max",
}
# Where the driver does not have the first, the second is asked.
OLDER = {
    "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetTemperatureV": "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons": "nvmlDeviceGetCurrentClocksThrottleReasons",
}
CALL_CODES = (3, 4, 10, 13, 14, 15, 16, 999)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_refused_leaves_its_place_empty_and_says_why(ask, call):
    """One code a GPU: each takes only what the call tells, and is kept as what it means."""
    refusals = [f"return {index} {call} {code}" for index, code in enumerate(CALL_CODES)]
    refusals += [f"return * {OLDER[call]} 3"] if call in OLDER else []
    snapshot = ask("\n".join([shape("h100"), *refusals]))

    assert snapshot.status == "ok"
    for gpu, code in zip(snapshot.gpus, CALL_CODES, strict=True):
        value = gpu
        for name in CALLS[call].split("."):
            value = getattr(value, name)
        corrupt = call == "nvmlDeviceValidateInforom" and code == 14
        assert value is (False if corrupt else None)
        failed = {error.code for error in gpu.errors}
        assert failed == (set() if code in {3, 13} else {code})
        named = {OLDER.get(call, call)} if code in {3, 13} else {call}
        if call != "nvmlDeviceGetFieldValues":
            where = set(gpu.unsupported) if code in {3, 13} else {e.call for e in gpu.errors}
            assert named & where
        assert gpu.error_code in ({code} if code == 15 else {code, None})


def test_all_that_other_calls_tell_is_there_though_one_is_refused(ask):
    healthy, refused = ask(shape("h100", 2) + "\nreturn 1 nvmlDeviceGetPowerUsage 999").gpus

    assert without(healthy, "power") == without(refused, "power")
    assert values(refused.power) == [None, 700, 700, 700]


# A program that obeys is ended as one that does not, only sooner.
MANNERS = pytest.mark.parametrize(
    "manner",
    [pytest.param("", marks=pytest.mark.soak), "deaf\n"],
    ids=["", "and ignores SIGTERM"],
)


@MANNERS
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
def test_an_nvml_that_takes_a_minute_to_start_is_left_in_time_and_named(ask, manner, call):
    started = time.monotonic()
    snapshot = ask(f"{manner}{shape('h100')}\ndelay * {call} 60000", HANG_S)

    assert time.monotonic() - started < HANG_S + SLACK_S
    assert (snapshot.status, snapshot.hung_call, snapshot.state) == ("timeout", call, "S")
    assert "gave no answer" in snapshot.error
    assert 0 < snapshot.hung_s <= HANG_S
    assert snapshot.gpus == ()


@MANNERS
@pytest.mark.parametrize(
    ("how", "state"),
    [("block 3 nvmlDeviceGetPowerUsage", "D"), ("delay 3 nvmlDeviceGetPowerUsage 60000", "S")],
    ids=["inside the kernel", "asleep"],
)
def test_a_gpu_that_hangs_costs_only_its_own_answer(ask, manner, how, state):
    healthy = ask(shape("h100"))
    started = time.monotonic()
    snapshot = ask(f"{manner}{shape('h100')}\n{how}", HANG_S)

    assert time.monotonic() - started < HANG_S + SLACK_S
    assert (snapshot.status, snapshot.hung_call) == ("ok", "nvmlDeviceGetPowerUsage")
    assert snapshot.state == state
    for gpu, well in zip(snapshot.gpus, healthy.gpus, strict=True):
        if gpu.index != 3:
            assert gpu == well
    hung = snapshot.gpus[3]
    assert (hung.hung_call, hung.error) == ("nvmlDeviceGetPowerUsage", None)
    assert 0 < hung.hung_s <= HANG_S
    assert without(hung, "power", "hung_call", "hung_s") == without(
        healthy.gpus[3], "power", "hung_call", "hung_s"
    )
    assert values(hung.power) == [None, None, None, None]


def test_gpus_that_all_hang_when_they_are_opened_are_an_nvml_without_an_answer(ask):
    snapshot = ask(f"{shape('h100')}\ndelay * nvmlDeviceGetHandleByIndex 60000", HANG_S)

    assert (snapshot.status, snapshot.hung_call) == ("timeout", "nvmlDeviceGetHandleByIndex")
    assert [gpu.hung_call for gpu in snapshot.gpus] == ["nvmlDeviceGetHandleByIndex"] * 8


def test_a_version_that_is_never_told_is_a_hang_of_no_gpu(ask):
    snapshot = ask(f"{shape('h100', 2)}\ndelay * nvmlSystemGetDriverVersion 60000", HANG_S)

    assert (snapshot.status, snapshot.hung_call) == ("ok", "nvmlSystemGetDriverVersion")
    assert [gpu.hung_call for gpu in snapshot.gpus] == [None, None]


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetPowerUsage"])
def test_an_nvml_that_crashes_takes_only_its_own_process(ask, call):
    snapshot = ask(f"{shape('h100')}\ncrash * {call}")

    assert (snapshot.status, snapshot.crash) == ("crash", "SIGSEGV")
    assert "SIGSEGV" in snapshot.error
    assert ask(shape("h100")).status == "ok"


@pytest.mark.parametrize("call", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUUID"])
def test_a_gpu_whose_calls_crash_is_found_by_asking_each_alone(ask, call):
    healthy = ask(shape("h100", 3)).gpus
    snapshot = ask(f"{shape('h100', 3)}\ncrash 1 {call}")

    assert (snapshot.status, snapshot.crash, snapshot.driver) == ("ok", "SIGSEGV", "550.163.01")
    assert (snapshot.gpus[0], snapshot.gpus[2]) == (healthy[0], healthy[2])
    bad = snapshot.gpus[1]
    known = None if call == "nvmlDeviceGetUUID" else UUIDS[1]
    assert (bad.index, bad.crash, bad.uuid) == (1, "SIGSEGV", known)


@pytest.mark.soak
def test_a_gpu_that_hangs_beside_one_that_crashes_is_told_from_it_in_time(ask):
    broken = "crash 1 nvmlDeviceGetPowerUsage\nblock 2 nvmlDeviceGetPowerUsage"
    started = time.monotonic()
    snapshot = ask(f"{shape('h100', 3)}\n{broken}", HANG_S)

    assert time.monotonic() - started < HANG_S + SLACK_S
    assert [gpu.crash for gpu in snapshot.gpus] == [None, "SIGSEGV", None]
    assert [gpu.hung_call for gpu in snapshot.gpus] == [None, None, "nvmlDeviceGetPowerUsage"]
    assert (snapshot.gpus[2].uuid, snapshot.state) == (UUIDS[2], "D")


@pytest.mark.parametrize("name", ["h100", "a100", "b200"])
def test_eight_gpus_at_100_ms_a_call_are_told_whole_in_under_three_seconds(ask, name):
    whole = ask(shape(name)).gpus

    def is_in_time():
        started = time.monotonic()
        snapshot = ask(f"{shape(name)}\ndelay * * 100")
        took_s = time.monotonic() - started
        assert snapshot.gpus == whole
        return took_s < 3

    # A busy machine makes one take longer, and not every one.
    wait_until(is_in_time, what="an answer in three seconds")


def test_processes_are_named_where_they_can_be_seen(ask, root):
    """A container sees no other processes, or NVML gives it pid 0 for them."""
    (root / "proc/4242").mkdir(parents=True)
    (root / "proc/4242/comm").write_text("python\n")
    lines = ["process 1 4242 1000", "process 1 4243 2000 graphics", "process 1 0 3000"]
    gpus = ask("\n".join([shape("h100", 2), *lines])).gpus

    assert gpus[0].processes == ()
    assert [values(process) for process in gpus[1].processes] == [
        [4242, 1000, "compute", "python"],
        [0, 3000, "compute", None],
        [4243, 2000, "graphics", None],
    ]


def test_a_machine_without_threads_to_give_is_asked_one_call_after_another(mock):
    """No stack of that size can be had, so no thread starts."""
    code = """
import threading
threading.stack_size(2**46)
from pathlib import Path
from gpuops.host.nvml.session import read_nvml
snapshot = read_nvml(20.0, Path("/without-threads"))
print(snapshot.status, len(snapshot.gpus), {gpu.power.limit_w for gpu in snapshot.gpus})
"""
    assert python(mock, shape("h100"), code) == "ok 8 {700.0}\n"


def test_a_machine_without_the_library_has_no_nvml(tmp_path):
    """Where a driver is installed, this asks it instead."""
    code = "from gpuops.host.nvml.session import read_nvml; print(read_nvml(20.0).status)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True
    )

    assert run.stdout in {"absent\n", "ok\n", "error\n"}


EVENTS = """
import ctypes, json, pynvml, sys
pynvml.nvmlInit()
events = pynvml.nvmlEventSetCreate()
for index in (0, 1):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
found = []
try:
    while True:
        event = pynvml.nvmlEventSetWait(events, 20)
        found.append((pynvml.nvmlDeviceGetUUID(event.device), event.eventData))
except pynvml.NVMLError_Timeout:
    print(json.dumps(found))
"""


def test_the_mock_tells_xids_as_events_of_the_gpus_that_are_registered(mock):
    told = python(mock, shape("h100", 3) + "\nxid 1 79\nxid 2 48\nxid 0 31", EVENTS)

    assert json.loads(told) == [[UUIDS[1], 79], [UUIDS[0], 31]]


CHANGES = """
import pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
read = lambda: pynvml.nvmlDeviceGetTemperature(gpu, 0)
print(read(), read(), read())
import os
path = os.environ["MOCK_NVML"]
open(path + ".new", "w").write(open(path).read() + "set 0 temperature_c 99\\n")
os.replace(path + ".new", path)
print(read())
"""


def test_the_mock_changes_at_the_nth_call_and_when_its_scenario_does(mock):
    scenario = shape("h100", 1, temperature_c=40) + "\nset 0@2 temperature_c 50"

    assert python(mock, scenario, CHANGES) == "40 50 50\n99\n"


def test_a_gpu_that_is_slowed_down_is_sampled_and_no_other(ask):
    slow = {0: {"clock_reasons": 0x40}, 1: {"clock_reasons": 0x4}, 2: {"clock_reasons": 0x88}}
    gpus = ask(shape("h100", 3, per_gpu=slow) + "\nset 0@2 clock_reasons 1").gpus

    assert [gpu.clocks.reasons for gpu in gpus] == [0x40, 0x4, 0x88]
    assert [gpu.clocks.samples for gpu in gpus] == [(0x40, 1, 1), (), (0x88,) * 3]


# What tells of nothing that can be counted or measured.
NO_NUMBERS = {
    *("driver", "serial", "vbios", "clock_reasons", "has_page_retirement"),
    "nvlink_count",
}


def numbers(record):
    """Return all numbers in *record*, of its parts too, but who it is."""
    if isinstance(record, tuple):
        return [number for item in record for number in numbers(item)]
    if not hasattr(record, "__slots__"):
        return [record] if isinstance(record, int | float) else []
    names = set(record.__slots__) - {"index", "minor", "link", "pid", "inforom_valid", "code"}
    return [number for name in names for number in numbers(getattr(record, name))]


def test_all_ones_in_any_member_are_no_number(ask):
    """-1 is NVML's value for "not available", in the width of the member."""
    keys = dict.fromkeys({key.partition(":")[0] for key in VALUES} - NO_NUMBERS, -1)
    # A temperature's margin may be -1.
    margins = dict.fromkeys(("margin_c", "slowdown_tlimit_c", "shutdown_tlimit_c"), "-")
    changed = {1: {**keys, **margins, "has_page_retirement": 1, "clock_reasons": "-"}}
    well, gpu = ask(shape("h100", 2, per_gpu=changed) + "\nprocess 1 4242 -1").gpus

    assert (well.errors, well.ecc.aggregate_uncorrected, well.pcie.width) == ((), 0, 16)
    assert (gpu.errors, gpu.error) == ((), None)
    assert numbers(gpu) == []
    assert (gpu.uuid, len(gpu.nvlinks), len(gpu.processes)) == (UUIDS[1], 18, 1)
    assert {link.active for link in gpu.nvlinks} == {None}
    assert (gpu.memory, gpu.retired, gpu.fabric) == (None, None, None)


# By key: a value that no board has, and the field that must not hold it.
GARBAGE = {
    "temperature_c": (1000, "temperature.core_c"),
    "memory_temperature_c": (40000, "temperature.memory_c"),
    "slowdown_c": (999, "temperature.slowdown_c"),
    "margin_c": (-5000, "temperature.margin_c"),
    "power_limit_mw": (3 * 10**9, "power.limit_w"),
    "pcie_width": (77, "pcie.width"),
    "ecc_volatile_uncorrected": (2**62, "ecc.volatile_uncorrected"),
    "sram_threshold_exceeded": (7, "ecc.sram_threshold_exceeded"),
    "remapped_pending": (2, "remapped.pending"),
    "persistence": (5, "modes.persistence"),
    "clock_reasons": (2**40, "clocks.reasons"),
    "fabric_status": (70000, "fabric.status"),
    "used_bytes": (2**52, "memory"),
    "nvlink_count": (10**9, "nvlinks"),
}


def field(gpu, path):
    for name in path.split("."):
        gpu = getattr(gpu, name)
    return gpu


def test_garbage_is_an_error_of_its_gpu_and_of_its_field_alone(ask):
    garbage = {key: value for key, (value, _) in GARBAGE.items()}
    well, gpu = ask(shape("h100", 2, per_gpu={1: garbage})).gpus

    assert well == ask(shape("h100", 1)).gpus[0]
    assert {path: field(gpu, path) for _, path in GARBAGE.values()} == {
        path: None for _, path in GARBAGE.values()
    }
    assert {error.code for error in gpu.errors} == {UNREADABLE}
    assert len(gpu.errors) == len(GARBAGE)
    assert "1000 °C is not plausible: 0 to 200 are" in {error.text for error in gpu.errors}
    assert (gpu.temperature.shutdown_c, gpu.power.default_limit_w) == (92, 700)


def test_what_a_virtual_gpu_does_not_have_is_zero_and_not_known(ask):
    (gpu,) = ask(shape("h100", 1, pcie_width=0, power_limit_mw=0, slowdown_c=0)).gpus

    assert (gpu.pcie.width, gpu.power.limit_w, gpu.temperature.slowdown_c) == (None, None, None)
    assert gpu.errors == ()


def test_texts_that_are_not_utf8_cost_only_themselves(ask):
    bad = {"uuid": "GPU-\udcff\udcfe", "bus_id": "\udcff", "name": "\udce9"}
    _, gpu = ask(shape("h100", 2, per_gpu={1: bad})).gpus

    assert (gpu.uuid, gpu.address, gpu.name) == (None, None, None)
    assert (gpu.serial, gpu.minor, gpu.power.limit_w) == ("1650123000001", 1, 700)
    assert {error.code for error in gpu.errors} == {UNREADABLE}


def test_a_number_of_gpus_that_cannot_be_is_an_nvml_that_does_not_start(ask):
    snapshot = ask(f"{shape('h100', 2)}\nset * count 100000")

    assert (snapshot.status, snapshot.gpus) == ("error", ())
    assert snapshot.error == ("nvmlDeviceGetCount: 100000 GPUs is not plausible: 0 to 1024 are")


def test_gpus_that_heat_slows_down_are_named_to_the_monitor_of_slow_ranks(mock):
    slow = {1: {"clock_reasons": 0x40}, 2: {"clock_reasons": 0x4}}
    env = {**os.environ, **mock.env(shape("h100", 3, per_gpu=slow))}

    assert throttled_gpus(env, 60.0) == {UUIDS[1]}
    assert throttled_gpus(os.environ, 60.0) == frozenset(), "there is no NVML"
