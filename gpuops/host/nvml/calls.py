"""What one GPU is asked: groups of calls. A group's calls come one after another, groups at once.

Each answer goes to its place in `NvmlGpu`. The groups are of about one length, since the longest
decides how long a slow driver makes a node wait.
"""

from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

from gpuops.host.nvml.caller import NvmlCaller
from gpuops.host.nvml.facts import (
    CORRUPTED_INFOROM,
    Fabric,
    GpuMemory,
    GpuProcess,
    RemappedRows,
)
from gpuops.host.nvml.fields import fields
from gpuops.host.sysfs import sysfs_address

_INFOROM = "nvmlDeviceValidateInforom"
_PROCESSES = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}


def identity(gpu: NvmlCaller) -> None:
    """Ask who this GPU is."""
    gpu.tell("uuid", "nvmlDeviceGetUUID")
    gpu.tell("address", "nvmlDeviceGetPciInfo", made=lambda info: sysfs_address(info.busId))
    gpu.tell("name", "nvmlDeviceGetName")
    gpu.tell("serial", "nvmlDeviceGetSerial")
    gpu.tell("minor", "nvmlDeviceGetMinorNumber")
    gpu.tell("vbios", "nvmlDeviceGetVbiosVersion")
    gpu.tell("utilization_percent", "nvmlDeviceGetUtilizationRates", made=lambda rates: rates.gpu)


def modes(gpu: NvmlCaller) -> None:
    """Ask for the modes that an administrator sets, and the fabric."""
    gpu.tell("modes.persistence", "nvmlDeviceGetPersistenceMode", made=bool)
    _pair(gpu, "modes.ecc", "nvmlDeviceGetEccMode")
    _pair(gpu, "modes.mig", "nvmlDeviceGetMigMode")
    gpu.tell("modes.compute", "nvmlDeviceGetComputeMode")
    _fabric(gpu)
    _sram(gpu)


def health(gpu: NvmlCaller) -> None:
    """Ask for what the GPU says of its memory, and who uses it."""
    gpu.tell("remapped", "nvmlDeviceGetRemappedRows", made=_remapped)
    gpu.tell("inforom_valid", _INFOROM, made=lambda _nothing: True)
    if any(error.call == _INFOROM and error.code == CORRUPTED_INFOROM for error in gpu.errors):
        gpu.found["inforom_valid"] = False
    _memory(gpu)
    _processes(gpu)


def temperatures(gpu: NvmlCaller) -> None:
    """Ask for temperatures and the limits that the device states."""
    nvml = gpu.nvml
    gpu.tell(
        "temperature.core_c",
        "nvmlDeviceGetTemperatureV",
        nvml.NVML_TEMPERATURE_GPU,
        instead=lambda: gpu.answer("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    )
    gpu.tell("temperature.margin_c", "nvmlDeviceGetMarginTemperature")
    for place, limit in (
        ("temperature.slowdown_c", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ("temperature.shutdown_c", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        ("temperature.memory_max_c", nvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    ):
        gpu.tell(place, "nvmlDeviceGetTemperatureThreshold", limit)


def power(gpu: NvmlCaller) -> None:
    """Ask for the power drawn and its limits."""
    gpu.tell("power.drawn_w", "nvmlDeviceGetPowerUsage", made=_watts)
    gpu.tell("power.limit_w", "nvmlDeviceGetEnforcedPowerLimit", made=_watts)
    gpu.tell("power.default_limit_w", "nvmlDeviceGetPowerManagementDefaultLimit", made=_watts)
    gpu.tell(
        "power.max_limit_w",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        made=lambda limits: _watts(limits[1]),
    )


def clocks(gpu: NvmlCaller) -> None:
    """Ask for clocks and why they are not higher."""
    sm, memory = gpu.nvml.NVML_CLOCK_SM, gpu.nvml.NVML_CLOCK_MEM
    gpu.tell("clocks.sm_mhz", "nvmlDeviceGetClockInfo", sm)
    gpu.tell("clocks.sm_max_mhz", "nvmlDeviceGetMaxClockInfo", sm)
    gpu.tell("clocks.sm_application_mhz", "nvmlDeviceGetApplicationsClock", sm)
    gpu.tell("clocks.memory_mhz", "nvmlDeviceGetClockInfo", memory)
    gpu.tell("clocks.memory_max_mhz", "nvmlDeviceGetMaxClockInfo", memory)
    gpu.tell("clocks.memory_application_mhz", "nvmlDeviceGetApplicationsClock", memory)
    gpu.tell(
        "clocks.reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        instead=lambda: gpu.answer("nvmlDeviceGetCurrentClocksThrottleReasons"),
    )


def pcie(gpu: NvmlCaller) -> None:
    """Ask for the PCIe link."""
    gpu.tell("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration")
    gpu.tell("pcie.generation_max", "nvmlDeviceGetMaxPcieLinkGeneration")
    gpu.tell("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth")
    gpu.tell("pcie.width_max", "nvmlDeviceGetMaxPcieLinkWidth")


GROUPS: tuple[Callable[[NvmlCaller], None], ...] = (
    identity,
    fields,
    modes,
    health,
    temperatures,
    power,
    clocks,
    pcie,
)


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000.0


def _pair(gpu: NvmlCaller, place: str, call: str) -> None:
    answer = gpu.answer(call)
    if answer is not None:
        gpu.found[place], gpu.found[f"{place}_pending"] = bool(answer[0]), bool(answer[1])


def _remapped(answer: Any) -> RemappedRows:  # noqa: ANN401 a tuple without types
    correctable, uncorrectable, pending, failure = answer
    return RemappedRows(
        correctable=correctable,
        uncorrectable=uncorrectable,
        pending=bool(pending),
        failure=bool(failure),
    )


def _fabric(gpu: NvmlCaller) -> None:
    """Ask with the newer structure, and where the driver does not know it with the older."""
    call = "nvmlDeviceGetGpuFabricInfoV"
    older = gpu.nvml.c_nvmlGpuFabricInfoV_t()
    newer = getattr(gpu.nvml, "c_nvmlGpuFabricInfo_v3_t", type(older))()

    def ask_older() -> Any:  # noqa: ANN401 a structure without types
        return gpu.answer(call, byref(older), made=lambda _ret: older)

    info = gpu.answer(call, byref(newer), made=lambda _ret: newer, instead=ask_older)
    if info is not None:
        gpu.found["fabric"] = Fabric(
            state=info.state,
            status=info.status,
            health_mask=info.healthMask,
            health_summary=getattr(info, "healthSummary", None),
            clique_id=info.cliqueId,
        )


def _sram(gpu: NvmlCaller) -> None:
    status = gpu.nvml.c_nvmlEccSramErrorStatus_v1_t()
    if gpu.answer("nvmlDeviceGetSramEccErrorStatus", byref(status), made=lambda _ret: True):
        now = status.volatileUncParity + status.volatileUncSecDed
        ever = status.aggregateUncParity + status.aggregateUncSecDed
        gpu.found["ecc.sram_volatile_uncorrected"] = now
        gpu.found["ecc.sram_aggregate_uncorrected"] = ever
        gpu.found["ecc.sram_threshold_exceeded"] = bool(status.bThresholdExceeded)


def _memory(gpu: NvmlCaller) -> None:
    """Ask for memory in the form that tells the driver's own apart; older drivers have another."""
    call = "nvmlDeviceGetMemoryInfo"
    version = gpu.nvml.nvmlMemory_v2
    info = gpu.answer(call, version, instead=lambda: gpu.answer(call))
    if info is not None:
        gpu.found["memory"] = GpuMemory(
            total_bytes=info.total,
            used_bytes=info.used,
            reserved_bytes=getattr(info, "reserved", None),
        )


def _processes(gpu: NvmlCaller) -> None:
    """Ask who has a context; without the list of compute processes nothing is told."""
    lists = {
        kind: gpu.answer(call, instead=partial(gpu.answer, f"{call}_v2"))
        for kind, call in _PROCESSES.items()
    }
    if lists["compute"] is None:
        return
    gpu.found["processes"] = tuple(
        GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory, kind=kind)
        for kind, found in lists.items()
        for process in found or ()
    )
