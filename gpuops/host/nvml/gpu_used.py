"""Tell how much GPU memory is held: ``python -m gpuops.host.nvml.gpu_used AGENT_PID SECONDS``.

A process of its own, because NVML can hang. It tells every so many seconds, and ends when its
standard input does. A line is ``{"held": {UUID: bytes}, "mono_ns": ...}``: what is used of each
GPU, without what belongs to a living process that is no worker of the agent (workers and their
children carry ``GPUOPS_AGENT_PID`` in their environment). A process that cannot be seen, as in a
container, or has no memory of its own left, as one that is ending, is not taken for another's.
"""

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_UNKNOWN, EXIT_USAGE
from gpuops.host.process.die_with_parent import die_with_parent

_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
# The library is not there, the driver is not loaded.
_ABSENT = (12, 9)


def main(arguments: list[str]) -> int:
    """Tell until the parent ends; return 3 where there is no NVML, 1 after an error of its."""
    try:
        agent_pid, every_s = int(arguments[0]), float(arguments[1])
    except (ValueError, IndexError):
        sys.stderr.write("python -m gpuops.host.nvml.gpu_used AGENT_PID SECONDS\n")
        return EXIT_USAGE
    die_with_parent()
    import pynvml

    try:
        pynvml.nvmlInit()
        while True:
            held = held_bytes(pynvml, lambda pid: is_anothers(pid, agent_pid))
            _write({"held": held, "mono_ns": time.monotonic_ns()})
            select.select([], [], [], every_s)
    except pynvml.NVMLError as exc:
        return EXIT_UNKNOWN if exc.value in _ABSENT else EXIT_FAIL


def held_bytes(nvml: Any, is_another: Callable[[int], bool]) -> dict[str, int]:  # noqa: ANN401
    """Return the bytes held of each GPU by UUID; those that do not tell, or are divided, are left.

    Raises:
        NVMLError: The GPUs cannot be counted.
    """
    found: dict[str, int] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if _is_divided(nvml, gpu):
                continue
            used = int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)
            others = _of_others(_processes(nvml, gpu), is_another)
            found[nvml.nvmlDeviceGetUUID(gpu)] = max(used - others, 0)
        except (nvml.NVMLError, ValueError):
            continue
    return found


def is_anothers(pid: int, agent_pid: int, root: Path = Path("/")) -> bool:
    """Say whether *pid* lives, and surely is no worker of *agent_pid*."""
    folder = root / f"proc/{pid}"
    try:
        if folder.stat().st_uid != os.geteuid():
            return True
        environment = (folder / "environ").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    entries = environment.split(b"\0")
    return bool(environment) and f"GPUOPS_AGENT_PID={agent_pid}".encode() not in entries


def _of_others(found: Iterable[tuple[int, int]], is_another: Callable[[int], bool]) -> int:
    by_pid = dict(found)
    return sum(used for pid, used in by_pid.items() if pid > 0 and is_another(pid))


def _processes(nvml: Any, gpu: Any) -> Iterable[tuple[int, int]]:  # noqa: ANN401 no types
    for call in _PROCESSES:
        try:
            for process in getattr(nvml, call)(gpu):
                yield int(process.pid), int(process.usedGpuMemory or 0)
        except nvml.NVMLError:
            continue


def _is_divided(nvml: Any, gpu: Any) -> bool:  # noqa: ANN401 no types
    try:
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
    except nvml.NVMLError:
        return False


def _write(body: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
