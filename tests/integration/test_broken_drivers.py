"""``gpuops check`` over NVIDIA drivers that are broken, each in its own way."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import UUIDS, addresses, shape

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk]

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0-7"}


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


@dataclass
class Node:
    """A node of eight GPUs on its bus, and `gpuops check` on it."""

    home: Path
    mock: object

    def __post_init__(self):
        root = FakeRoot(self.home / "root")
        for address in addresses(8):
            root.gpu(address)

    def check(self, scenario, *args, only="gpu_*", **env):
        """Return the exit code and the findings that are neither pass nor skip."""
        done = gpuops(
            "check", "--suite", "prolog", "--only", only, "--json", *args,
            env={
                "GPUOPS_ROOT": str(self.home / "root"),
                "GPUOPS_STATE": str(self.home / "state"),
                "GPUOPS_SPOOL": str(self.home / "spool"),
                "GPUOPS_STORE": f"sqlite:///{self.home}/store.db",
                "SLURMD_NODENAME": "n1",
                **self.mock.env(scenario),
                **env,
            },
        )  # fmt: skip
        findings = json.loads(done.stdout)["findings"]
        return done.returncode, [x for x in findings if x["status"] not in {"pass", "skip"}]


@pytest.fixture
def node(tmp_path, mock):
    return Node(tmp_path, mock)


def told(findings):
    return [(item["check"], item["status"], item["entity"]["id"]) for item in findings]


@pytest.mark.parametrize(
    ("args", "env", "source"),
    [
        (("--gpus-expected", "8"), {}, "flag"),
        ((), {"GPUOPS_GPUS_EXPECTED": "8"}, "environment GPUOPS_GPUS_EXPECTED"),
        (("--trigger", "prolog"), SLURM, "the selected GPUs (--gpus, SLURM_JOB_GPUS)"),
    ],
    ids=["flag", "environment", "Slurm"],
)
def test_a_driver_that_is_not_loaded_fails_where_gpus_are_expected(node, args, env, source):
    code, findings = node.check("init 9", *args, only="gpu_driver", **env)

    assert (code, told(findings)) == (1, [("gpu_driver", "fail", "n1")])
    assert findings[0]["message"].endswith(
        "the kernel module nvidia is not loaded; 8 GPUs on the PCI bus;"
        f" expected: 8 GPUs ({source})"
    )


def test_healthy_gpus_that_a_job_was_given_pass(node):
    assert node.check(shape("h100"), "--trigger", "prolog", **SLURM) == (0, [])


def test_gpus_that_a_job_was_given_and_that_do_not_open_fail(node):
    closed = shape("h100", broken=dict.fromkeys(range(8), 999))
    code, findings = node.check(closed, "--trigger", "prolog", only="gpu_count", **SLURM)

    assert (code, findings[-1]["status"]) == (1, "fail")
    assert "NVML cannot open GPUs 0, 1, 2, 3, 4, 5, 6, 7, which the job" in findings[-1]["message"]


# Members of structures, numbers and fields that are "not available": all bits set.
KEYS = (
    *("sram_aggregate_parity", "sram_volatile_secded", "sram_threshold_exceeded"),
    *("remapped_pending", "remapped_failure", "remapped_uncorrectable", "fabric_health_mask"),
    *("memory_bytes", "used_bytes", "pcie_width", "temperature_c", "memory_temperature_c"),
    *("power_limit_mw", "max_power_limit_mw", "ecc", "mig", "persistence", "nvlink_state"),
    *("sm_max_mhz", "ecc_volatile_uncorrected", "recovery_action", "utilization_percent"),
)
ODD = {
    1: dict.fromkeys(KEYS, -1),
    2: {"temperature_c": 1000, "pcie_width": 77, "ecc_volatile_uncorrected": 2**62},
    3: {"uuid": "GPU-\udcff\udcfe"},
    4: {"pcie_width": 0, "memory_bytes": 0, "power_limit_mw": 0},
}


def test_odd_numbers_of_some_gpus_fail_no_node_and_warn_about_those_that_gave_garbage(node):
    odd = shape("h100", per_gpu=ODD)
    code, findings = node.check(odd, "--gpus-expected", "8", "--only", "nvlink*")

    assert code == 0
    assert told(findings) == [
        ("gpu_lost", "warn", UUIDS[2]),
        ("gpu_lost", "warn", f"PCI:{addresses(8)[3]}"),
    ]
    assert "1000 °C is not plausible" in findings[0]["message"]


def test_a_gpu_that_crashes_nvml_warns_once_and_then_fails_until_it_answers(node):
    broken = f"{shape('h100')}\ncrash 3 nvmlDeviceGetPowerUsage"
    checks = [node.check(scenario) for scenario in (broken, broken, shape("h100"), broken)]
    driver = [[item for item in found if item["check"] == "gpu_driver"] for _, found in checks]

    assert [code for code, _ in checks] == [0, 1, 0, 0]
    assert [told(found) for found in driver] == [
        [("gpu_driver", "warn", UUIDS[3])],
        [("gpu_driver", "fail", UUIDS[3])],
        [],
        [("gpu_driver", "warn", UUIDS[3])],
    ]
    assert {item["check"] for item in checks[1][1] if item["status"] == "fail"} == {"gpu_driver"}


@pytest.mark.parametrize(("later", "code", "status"), [(0x40, 1, "fail"), (0x1, 0, "warn")])
def test_heat_fails_a_gpu_if_it_slows_it_down_for_longer_than_a_moment(node, later, code, status):
    hot = shape("h100", per_gpu={5: {"clock_reasons": 0x40}}) + f"\nset 5@2 clock_reasons {later}"

    found, findings = node.check(hot)

    assert (found, told(findings)) == (code, [("gpu_throttle", status, UUIDS[5])])
