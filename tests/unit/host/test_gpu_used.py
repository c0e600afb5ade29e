"""How much of a GPU's memory is held, and what of it is another's."""

import os
from types import SimpleNamespace

import pynvml
import pytest

from gpuops.host.nvml.facts import held_bytes, is_foreign_process, main

GIB = 2**30


class Nvml:
    """Two GPUs; *refused* are calls that NVML does not answer."""

    NVMLError = pynvml.NVMLError

    def __init__(self, used=(), processes=(), refused=(), mig=False, total=0):
        self.used, self.processes, self.refused, self.mig = used, processes, refused, mig
        self.total = total

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.used)

    def __getattr__(self, name):
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
            "nvmlDeviceGetMigMode": lambda _index: (int(self.mig), 0),
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(
                used=self.used[index], total=max(80 * GIB, self.total)
            ),
            "nvmlDeviceGetComputeRunningProcesses": self._processes,
            "nvmlDeviceGetGraphicsRunningProcesses": lambda _index: [],
        }

        def call(argument):
            if name in self.refused:
                raise pynvml.NVMLError(3)
            return answers[name](argument)

        return call

    def _processes(self, index):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=used)
            for gpu, pid, used in self.processes
            if gpu == index
        ]


def test_what_another_holds_is_not_counted():
    nvml = Nvml([10 * GIB, 5 * GIB], [(0, 7, 4 * GIB), (0, 8, 6 * GIB), (1, 9, None)])

    assert held_bytes(nvml, lambda pid: pid == 8) == {"GPU-0": 4 * GIB, "GPU-1": 5 * GIB}


@pytest.mark.parametrize("total", [80 * GIB, 2**64 - 1])
def test_memory_that_is_not_available_is_not_held(total):
    assert held_bytes(Nvml([2**64 - 1, GIB], total=total), lambda _pid: False) == (
        {"GPU-1": GIB} if total == 80 * GIB else {}
    )


def test_a_process_that_a_container_does_not_see_is_not_taken_for_anothers():
    assert held_bytes(Nvml([GIB], [(0, 0, GIB)]), lambda _pid: True) == {"GPU-0": GIB}


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"]
)
def test_a_gpu_that_does_not_tell_is_left_out(call):
    assert held_bytes(Nvml([GIB], refused=[call]), lambda _pid: False) == {}


def test_a_driver_that_tells_no_processes_or_modes_tells_its_memory():
    refused = ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMigMode"]

    assert held_bytes(Nvml([GIB], refused=refused), lambda _pid: True) == {"GPU-0": GIB}


def test_a_gpu_that_is_divided_is_left_out():
    assert held_bytes(Nvml([GIB], mig=True), lambda _pid: False) == {}


def process(root, pid, environment):
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (b"A=1\0GPUOPS_AGENT_PID=42\0B=2\0", False),
        (b"A=1\0GPUOPS_AGENT_PID=421\0", True),
        (b"A=1\0", True),
        (b"", False),
    ],
    ids=["our-worker", "another-agents", "no-agents", "ending"],
)
def test_a_worker_of_ours_carries_our_mark(tmp_path, environment, expected):
    process(tmp_path, 7, environment)

    assert is_foreign_process(7, 42, tmp_path) is expected


def test_a_process_that_is_gone_is_nobody(tmp_path):
    assert not is_foreign_process(7, 42, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_process_is_anothers(tmp_path):
    process(tmp_path, 7, b"GPUOPS_AGENT_PID=42\0")
    os.chown(tmp_path / "proc/7", 12345, 12345)

    assert is_foreign_process(7, 42, tmp_path)


@pytest.mark.parametrize("arguments", [[], ["x", "2"], ["1"]])
def test_a_wrong_command_line_is_said(arguments, capsys):
    assert main(arguments) == 64
    assert "AGENT_PID" in capsys.readouterr().err
