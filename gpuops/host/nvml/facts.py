"""NVML's data on the GPUs, as plain values: the contract between the reader and the judges.

None means that a value was not read or not returned; never that the GPU is healthy. A call that
this device does not support is listed in ``unsupported``, other failed ones in ``errors``.

``python -m gpuops.host.nvml.facts AGENT_PID SECONDS`` prints the memory that an agent's GPUs hold.
"""

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_UNKNOWN, EXIT_USAGE
from gpuops.host.process.sidecar import die_with_parent

_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
# The library is missing, the driver is not loaded.
_ABSENT = (12, 9)
# "Not available", or garbage.
_NO_BYTES = 2**50


def main(arguments: list[str]) -> int:
    """Print the held memory until the parent ends; return 3 without NVML, 1 after an NVML error."""
    try:
        agent_pid, every_s = int(arguments[0]), float(arguments[1])
    except (ValueError, IndexError):
        sys.stderr.write("python -m gpuops.host.nvml.facts AGENT_PID SECONDS\n")
        return EXIT_USAGE
    die_with_parent()
    import pynvml

    try:
        pynvml.nvmlInit()
        while True:
            held = held_bytes(pynvml, lambda pid: is_foreign_process(pid, agent_pid))
            _write({"held": held, "mono_ns": time.monotonic_ns()})
            select.select([], [], [], every_s)
    except pynvml.NVMLError as exc:
        return EXIT_UNKNOWN if exc.value in _ABSENT else EXIT_FAIL


def held_bytes(nvml: Any, is_another: Callable[[int], bool]) -> dict[str, int]:  # noqa: ANN401
    """Return the bytes held of each GPU by UUID, without GPUs in MIG mode or with errors.

    Raises:
        NVMLError: The GPUs cannot be counted.
    """
    found: dict[str, int] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if _is_divided(nvml, gpu):
                continue
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
            used = int(memory.used)
            if not used <= memory.total < _NO_BYTES:
                continue
            others = _of_others(_processes(nvml, gpu), is_another)
            found[nvml.nvmlDeviceGetUUID(gpu)] = max(used - others, 0)
        except (nvml.NVMLError, ValueError):
            continue
    return found


def is_foreign_process(pid: int, agent_pid: int, root: Path = Path("/")) -> bool:
    """Return whether *pid* runs, and certainly is no worker of *agent_pid*."""
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
        return bool(nvml.nvmlDeviceGetMigMode(gpu)[0] == 1)
    except nvml.NVMLError:
        return False


def _write(body: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


NOT_SUPPORTED = 3
NO_PERMISSION = 4
CORRUPTED_INFOROM = 14
GPU_IS_LOST = 15
RESET_REQUIRED = 16
OPERATING_SYSTEM = 17
# The codes that a process in a container, or without root, gets from a healthy driver.
NO_ACCESS = (NO_PERMISSION, OPERATING_SYSTEM)

# Below this a call is only slow, or this run had little time left for it: healthy ones return
# within a tenth of it, and one that hangs gets the rest of the time.
HANG_S = 1.0
UNREADABLE = -1
SAMPLES = 3
SAMPLE_EVERY_S = 0.25
# nvml.h, nvmlClocksEventReasons: slowed by the hardware, by heat, by the power brake. One of them
# in the first sample asks for the others.
SAMPLED_REASONS = 0x8 | 0x20 | 0x40 | 0x80
OPEN_CALL = "nvmlDeviceGetHandleByIndex"


class NvmlStatus(StrEnum):
    """The overall result of reading NVML."""

    OK = "ok"
    ABSENT = "absent"
    ERROR = "error"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class CallError:
    """A call (or field) of NVML that failed: its name, NVML's code and text.

    The code is `UNREADABLE` if NVML's answer could not be decoded.
    """

    call: str
    code: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemappedRows:
    """`nvmlDeviceGetRemappedRows` (Ampere and later)."""

    correctable: int | None = None
    uncorrectable: int | None = None
    pending: bool | None = None
    failure: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredPages:
    """`nvmlDeviceGetRetiredPages` and its pending status (Volta and earlier)."""

    single_bit: int
    double_bit: int
    pending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EccErrors:
    """ECC errors. Volatile counts begin at the driver's load or the GPU's reset; aggregate last.

    ``sram_threshold_exceeded`` is the driver's own flag (`nvmlDeviceGetSramEccErrorStatus`).
    """

    volatile_corrected: int | None = None
    volatile_uncorrected: int | None = None
    aggregate_corrected: int | None = None
    aggregate_uncorrected: int | None = None
    sram_volatile_uncorrected: int | None = None
    sram_aggregate_uncorrected: int | None = None
    sram_threshold_exceeded: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperatures:
    """Degrees Celsius, and the limits that the device itself reports.

    From Ada on the device reports its limits as distances instead: ``margin_c`` is how far the core
    is below its own limit now, and at a margin of ``slowdown_margin_c`` it slows down, at
    ``shutdown_margin_c`` it shuts down (fields ``NVML_FI_DEV_TEMPERATURE_*_TLIMIT``, below zero).
    """

    core_c: float | None = None
    memory_c: float | None = None
    slowdown_c: float | None = None
    shutdown_c: float | None = None
    memory_max_c: float | None = None
    margin_c: float | None = None
    slowdown_margin_c: float | None = None
    shutdown_margin_c: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Watts: current draw, the limit in force, the default limit, the maximum limit."""

    drawn_w: float | None = None
    limit_w: float | None = None
    default_limit_w: float | None = None
    max_limit_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """MHz. ``reasons`` is the bit mask of `nvmlDeviceGetCurrentClocksEventReasons`.

    ``samples``: that mask several times, `SAMPLE_EVERY_S` apart, the first one first; read only of
    a GPU that is slowed down, and while there is time.
    """

    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    memory_max_mhz: int | None = None
    sm_application_mhz: int | None = None
    memory_application_mhz: int | None = None
    reasons: int | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieLink:
    """The link of the GPU. ``generation`` falls at idle; ``width`` does not."""

    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    replays: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink: up or not, and its counters since the driver's load. None: not reported.

    Blackwell counts ``receive_errors`` and recoveries, and no CRC errors or replays. It also
    reports bit error rates, as errors per bit: ``effective_ber`` after forward error correction,
    ``symbol_ber`` after all correction.
    """

    link: int
    active: bool | None = None
    crc_errors: int | None = None
    replay_errors: int | None = None
    recovery_errors: int | None = None
    receive_errors: int | None = None
    effective_ber: float | None = None
    symbol_ber: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """`nvmlDeviceGetGpuFabricInfoV`: state 0..3, status (an NVML code), health mask and summary."""

    state: int
    status: int | None = None
    health_mask: int | None = None
    health_summary: int | None = None
    clique_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """The modes an administrator sets. ``compute`` is NVML's number (0: default, shared)."""

    ecc: bool | None = None
    ecc_pending: bool | None = None
    mig: bool | None = None
    mig_pending: bool | None = None
    persistence: bool | None = None
    compute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes. ``reserved`` is the driver's own and not included in ``used``."""

    total_bytes: int
    used_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has a context on the GPU; the name comes from /proc where it is visible."""

    pid: int
    used_bytes: int | None = None
    kind: str = "compute"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    """One GPU as NVML lists it.

    ``error``, ``error_code``: that it is lost, else of opening it, else of the first failed call
    about its identity. ``address`` is in sysfs' format. ``hung_call``: the call that had not
    returned at the deadline, ``hung_s`` seconds after it was made; the results of earlier and
    parallel calls are included. ``crash``: the signal by which calls about this GPU alone ended
    their process.
    """

    index: int
    minor: int | None = None
    uuid: str | None = None
    serial: str | None = None
    address: str | None = None
    name: str | None = None
    vbios: str | None = None
    error: str | None = None
    error_code: int | None = None
    errors: tuple[CallError, ...] = ()
    unsupported: tuple[str, ...] = ()
    hung_call: str | None = None
    hung_s: float | None = None
    crash: str | None = None
    recovery_action: int | None = None
    remapped: RemappedRows | None = None
    retired: RetiredPages | None = None
    ecc: EccErrors = EccErrors()
    inforom_valid: bool | None = None
    temperature: Temperatures = Temperatures()
    power: Power = Power()
    clocks: Clocks = Clocks()
    pcie: PcieLink = PcieLink()
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    modes: Modes = Modes()
    memory: GpuMemory | None = None
    processes: tuple[GpuProcess, ...] | None = None
    utilization_percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlSnapshot:
    """All data from NVML.

    ``hung_call``: a call that had not returned at the deadline, ``hung_s`` seconds after it was
    made, if the child could still report it; ``state``: of the thread that made it (proc(5)), else
    of the child. The status is ``timeout`` only if no GPU answered. ``crash``: the signal that a
    call of NVML ended its process by, when all GPUs were asked at once.
    """

    status: NvmlStatus
    driver: str | None = None
    nvml_version: str | None = None
    gpus: tuple[NvmlGpu, ...] = ()
    error: str | None = None
    error_code: int | None = None
    state: str | None = None
    hung_call: str | None = None
    hung_s: float | None = None
    crash: str | None = None

    @property
    def hang(self) -> str | None:
        """Return the call that did not return, ``"NVML"`` if it is unknown."""
        return self.hung_call or ("NVML" if self.status is NvmlStatus.TIMEOUT else None)
