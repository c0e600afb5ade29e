"""``gpuops slurm prolog`` and ``epilog`` over NVML's real structs, without a Slurm."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import addresses, shape

pytestmark = pytest.mark.cc

GPUS = 4
# As boards with AMD processors have it: NVML's order is not that of the device files.
MINORS = {index: {"minor": minor} for index, minor in enumerate((2, 3, 1, 0))}


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


@dataclass
class Hook:
    """A node that is well, and its hooks."""

    home: Path
    mock: object
    env: dict = field(default_factory=dict)

    def __post_init__(self):
        root = FakeRoot(self.home / "root")
        for address in addresses(GPUS):
            root.gpu(address)
        self.env = {
            "GPUOPS_ROOT": str(root.path),
            "GPUOPS_STATE": str(self.home / "state"),
            "GPUOPS_SPOOL": str(self.home / "spool"),
            "GPUOPS_STORE": f"sqlite:///{self.home}/store.db",
            "GPUOPS_MODE": "enforce",
            "SLURM_JOB_ID": "17",
        }

    def run(self, name, scenario, **env):
        """Return what `gpuops slurm NAME` came to where NVML answers by *scenario*."""
        env = {**self.env, **self.mock.env(scenario), **env}
        verdict = self.home / "verdicts" / "v"
        return gpuops("slurm", name, "--verdict", str(verdict), env=env)


@pytest.fixture
def hook(tmp_path, mock):
    return Hook(tmp_path, mock)


@pytest.mark.parametrize(
    ("minors", "numbers", "code"),
    [
        ({}, "0", 1),
        ({}, "1-3", 0),
        (MINORS, "0-3", 1),
        (MINORS, "0", 0),
        (MINORS, "2", 0),
    ],
    ids=str,
)
def test_a_process_refuses_a_job_only_where_slurm_surely_named_its_gpu(hook, minors, numbers, code):
    busy = shape("h100", GPUS, per_gpu=minors) + "\nprocess 0 4242 2000000000"
    done = hook.run("prolog", busy, SLURM_JOB_GPUS=numbers)

    assert (done.returncode, "processes are still on it" in done.stderr) == (code, code == 1)
