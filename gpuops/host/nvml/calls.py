"""The calls for one GPU, in groups: sequential within a group, groups in parallel.

Each result is stored as a field of `NvmlGpu`. The groups have about the same length, since the
longest determines the wait for a slow driver.
"""

from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

from gpuops.host.nvml.caller import NvmlCaller
from gpuops.host.nvml.facts import CORRUPTED_INFOROM, Fabric, GpuMemory, GpuProcess, RemappedRows
from gpuops.host.nvml.fields import fields
from gpuops.host.sysfs import sysfs_address

_INFOROM = "nvmlDeviceValidateInforom"
_PROCESSES = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}


def identity(gpu: NvmlCaller) -> None:
    """Read the identity of the GPU."""
    gpu.store("uuid", "nvmlDeviceGetUUID")
    gpu.store("address", "nvmlDeviceGetPciInfo", made=lambda info: sysfs_address(info.busId))
    gpu.store("name", "nvmlDeviceGetName")
    gpu.store("serial", "nvmlDeviceGetSerial")
    gpu.store("minor", "nvmlDeviceGetMinorNumber")
    gpu.store("vbios", "nvmlDeviceGetVbiosVersion")
    gpu.store("utilization_percent", "nvmlDeviceGetUtilizationRates", made=lambda rates: rates.gpu)


def modes(gpu: NvmlCaller) -> None:
    """Read the modes that an administrator sets, and the fabric."""
    gpu.store("modes.persistence", "nvmlDeviceGetPersistenceMode", made=bool)
    _pair(gpu, "modes.ecc", "nvmlDeviceGetEccMode")
    _pair(gpu, "modes.mig", "nvmlDeviceGetMigMode")
    gpu.store("modes.compute", "nvmlDeviceGetComputeMode")
    _fabric(gpu)
    _sram(gpu)


def health(gpu: NvmlCaller) -> None:
    """Read the state of the GPU's memory, and its processes."""
    gpu.store("remapped", "nvmlDeviceGetRemappedRows", made=_remapped)
    gpu.store("inforom_valid", _INFOROM, made=lambda _nothing: True)
    if any(error.call == _INFOROM and error.code == CORRUPTED_INFOROM for error in gpu.errors):
        gpu.found["inforom_valid"] = False
    _memory(gpu)
    _processes(gpu)


def temperatures(gpu: NvmlCaller) -> None:
    """Read temperatures and the limits of the device."""
    nvml = gpu.nvml
    gpu.store(
        "temperature.core_c",
        "nvmlDeviceGetTemperatureV",
        nvml.NVML_TEMPERATURE_GPU,
        instead=lambda: gpu.query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    )
    gpu.store("temperature.margin_c", "nvmlDeviceGetMarginTemperature")
    for place, limit in (
        ("temperature.slowdown_c", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ("temperature.shutdown_c", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        ("temperature.memory_max_c", nvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    ):
        gpu.store(place, "nvmlDeviceGetTemperatureThreshold", limit)


def power(gpu: NvmlCaller) -> None:
    """Read the power draw and its limits."""
    gpu.store("power.drawn_w", "nvmlDeviceGetPowerUsage", made=_watts)
    gpu.store("power.limit_w", "nvmlDeviceGetEnforcedPowerLimit", made=_watts)
    gpu.store("power.default_limit_w", "nvmlDeviceGetPowerManagementDefaultLimit", made=_watts)
    gpu.store(
        "power.max_limit_w",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        made=lambda limits: _watts(limits[1]),
    )


def clocks(gpu: NvmlCaller) -> None:
    """Read clocks and the reasons that limit them."""
    sm, memory = gpu.nvml.NVML_CLOCK_SM, gpu.nvml.NVML_CLOCK_MEM
    gpu.store("clocks.sm_mhz", "nvmlDeviceGetClockInfo", sm)
    gpu.store("clocks.sm_max_mhz", "nvmlDeviceGetMaxClockInfo", sm)
    gpu.store("clocks.sm_application_mhz", "nvmlDeviceGetApplicationsClock", sm)
    gpu.store("clocks.memory_mhz", "nvmlDeviceGetClockInfo", memory)
    gpu.store("clocks.memory_max_mhz", "nvmlDeviceGetMaxClockInfo", memory)
    gpu.store("clocks.memory_application_mhz", "nvmlDeviceGetApplicationsClock", memory)
    gpu.store(
        "clocks.reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        instead=lambda: gpu.query("nvmlDeviceGetCurrentClocksThrottleReasons"),
    )


def pcie(gpu: NvmlCaller) -> None:
    """Read the PCIe link."""
    gpu.store("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration")
    gpu.store("pcie.generation_max", "nvmlDeviceGetMaxPcieLinkGeneration")
    gpu.store("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth")
    gpu.store("pcie.width_max", "nvmlDeviceGetMaxPcieLinkWidth")


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
    answer = gpu.query(call)
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
    """Read with the newer structure, or the older if the driver does not know it."""
    call = "nvmlDeviceGetGpuFabricInfoV"
    older = gpu.nvml.c_nvmlGpuFabricInfoV_t()
    newer = getattr(gpu.nvml, "c_nvmlGpuFabricInfo_v3_t", type(older))()

    def query_older() -> Any:  # noqa: ANN401 a structure without types
        return gpu.query(call, byref(older), made=lambda _ret: older)

    info = gpu.query(call, byref(newer), made=lambda _ret: newer, instead=query_older)
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
    if gpu.query("nvmlDeviceGetSramEccErrorStatus", byref(status), made=lambda _ret: True):
        now = status.volatileUncParity + status.volatileUncSecDed
        ever = status.aggregateUncParity + status.aggregateUncSecDed
        gpu.found["ecc.sram_volatile_uncorrected"] = now
        gpu.found["ecc.sram_aggregate_uncorrected"] = ever
        gpu.found["ecc.sram_threshold_exceeded"] = bool(status.bThresholdExceeded)


def _memory(gpu: NvmlCaller) -> None:
    """Read memory in the form that separates the driver's own; older drivers have another."""
    call = "nvmlDeviceGetMemoryInfo"
    version = gpu.nvml.nvmlMemory_v2
    info = gpu.query(call, version, instead=lambda: gpu.query(call))
    if info is not None:
        gpu.found["memory"] = GpuMemory(
            total_bytes=info.total,
            used_bytes=info.used,
            reserved_bytes=getattr(info, "reserved", None),
        )


def _processes(gpu: NvmlCaller) -> None:
    """Read the processes with a context; nothing without the list of compute processes."""
    lists = {
        kind: gpu.query(call, instead=partial(gpu.query, f"{call}_v2"))
        for kind, call in _PROCESSES.items()
    }
    if lists["compute"] is None:
        return
    gpu.found["processes"] = tuple(
        GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory, kind=kind)
        for kind, found in lists.items()
        for process in found or ()
    )
