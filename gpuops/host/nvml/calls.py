"""The calls for one GPU, in groups: sequential within a group, groups in parallel.

Each result is stored as a field of `NvmlGpu`. The groups have about the same length, since the
longest determines the wait for a slow driver.
"""

import re
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import partial
from typing import Any

from gpuops.host.nvml.caller import NvmlCaller
from gpuops.host.nvml.facts import (
    CORRUPTED_INFOROM,
    SAMPLE_EVERY_S,
    SAMPLED_REASONS,
    SAMPLES,
    Fabric,
    GpuMemory,
    GpuProcess,
)
from gpuops.host.nvml.fields import fields
from gpuops.host.nvml.plausible import BOUNDS, BYTES, COUNT, Bounds
from gpuops.host.sysfs import sysfs_address

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_REMAPPED = tuple(
    f"remapped.{name}" for name in ("correctable", "uncorrectable", "pending", "failure")
)
# With less time another sample could look like a call that hangs.
_SAMPLE_LEAST_S = 0.5
_INFOROM = "nvmlDeviceValidateInforom"
_PROCESSES = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}


def identity(gpu: NvmlCaller) -> None:
    """Read the identity of the GPU."""
    gpu.store("uuid", "nvmlDeviceGetUUID")
    gpu.store("address", "nvmlDeviceGetPciInfo", made=_address)
    gpu.store("name", "nvmlDeviceGetName")
    gpu.store("serial", "nvmlDeviceGetSerial")
    gpu.store("minor", "nvmlDeviceGetMinorNumber")
    gpu.store("vbios", "nvmlDeviceGetVbiosVersion")
    gpu.store("utilization_percent", "nvmlDeviceGetUtilizationRates", made=lambda rates: rates.gpu)


def modes(gpu: NvmlCaller) -> None:
    """Read the modes that an administrator sets, and the fabric."""
    gpu.store("modes.persistence", "nvmlDeviceGetPersistenceMode")
    _pair(gpu, "modes.ecc", "nvmlDeviceGetEccMode")
    _pair(gpu, "modes.mig", "nvmlDeviceGetMigMode")
    gpu.store("modes.compute", "nvmlDeviceGetComputeMode")
    _fabric(gpu)
    _sram(gpu)


def health(gpu: NvmlCaller) -> None:
    """Read the state of the GPU's memory, and its processes."""
    _members(gpu, "nvmlDeviceGetRemappedRows", _REMAPPED)
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
    constraints = "nvmlDeviceGetPowerManagementLimitConstraints"
    most = gpu.known(constraints, gpu.query(constraints, made=lambda limits: limits[1]), None)
    if most is not None:
        gpu.keep("power.max_limit_w", constraints, _watts(most))


def clocks(gpu: NvmlCaller) -> None:
    """Read clocks and the reasons that limit them."""
    sm, memory = gpu.nvml.NVML_CLOCK_SM, gpu.nvml.NVML_CLOCK_MEM
    gpu.store("clocks.sm_mhz", "nvmlDeviceGetClockInfo", sm)
    gpu.store("clocks.sm_max_mhz", "nvmlDeviceGetMaxClockInfo", sm)
    gpu.store("clocks.sm_application_mhz", "nvmlDeviceGetApplicationsClock", sm)
    gpu.store("clocks.memory_mhz", "nvmlDeviceGetClockInfo", memory)
    gpu.store("clocks.memory_max_mhz", "nvmlDeviceGetMaxClockInfo", memory)
    gpu.store("clocks.memory_application_mhz", "nvmlDeviceGetApplicationsClock", memory)
    reasons = _reasons(gpu)
    if reasons is not None:
        gpu.found["clocks.reasons"] = reasons
        if reasons & SAMPLED_REASONS:
            _sample_reasons(gpu, reasons)


def _reasons(gpu: NvmlCaller) -> int | None:
    call = "nvmlDeviceGetCurrentClocksEventReasons"
    older = "nvmlDeviceGetCurrentClocksThrottleReasons"
    mask: int | None = gpu.query(call, instead=lambda: gpu.query(older))
    known: int | None = gpu.known(call, mask, BOUNDS["clocks.reasons"])
    return known


def _sample_reasons(gpu: NvmlCaller, first: int) -> None:
    """Store *first* and the reasons after it: a bit may be set only while the clocks change."""
    samples = [first]
    while len(samples) < SAMPLES and gpu.left_s() > _SAMPLE_LEAST_S:
        gpu.pause(SAMPLE_EVERY_S)
        reasons = _reasons(gpu)
        if reasons is None:
            break
        samples.append(reasons)
    gpu.found["clocks.samples"] = tuple(samples)


def pcie(gpu: NvmlCaller) -> None:
    """Read the PCIe link."""
    gpu.store("pcie.generation", "nvmlDeviceGetCurrPcieLinkGeneration")
    gpu.store("pcie.generation_max", "nvmlDeviceGetMaxPcieLinkGeneration")
    gpu.store("pcie.width", "nvmlDeviceGetCurrPcieLinkWidth")
    gpu.store("pcie.width_max", "nvmlDeviceGetMaxPcieLinkWidth")


Groups = tuple[Callable[[NvmlCaller], None], ...]
GROUPS: Groups = (
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


def _address(info: Any) -> str:  # noqa: ANN401 a structure without types
    address = sysfs_address(info.busId)
    if _ADDRESS.fullmatch(address) is None:
        raise ValueError(f"{address!r} is no PCI address")
    return address


def _pair(gpu: NvmlCaller, place: str, call: str) -> None:
    _members(gpu, call, (place, f"{place}_pending"))


def _members(gpu: NvmlCaller, call: str, places: Sequence[str]) -> None:
    """Store the members of the tuple that *call* returns as *places*."""
    answer = gpu.query(call)
    for place, value in zip(places, answer or (), strict=False):
        gpu.keep(place, call, value)


def _fabric(gpu: NvmlCaller) -> None:
    """Read with the newer structure, or the older if the driver does not know it."""
    call = "nvmlDeviceGetGpuFabricInfoV"
    older = gpu.nvml.c_nvmlGpuFabricInfoV_t()
    newer = getattr(gpu.nvml, "c_nvmlGpuFabricInfo_v3_t", type(older))()

    def query_older() -> Any:  # noqa: ANN401 a structure without types
        return gpu.query(call, byref(older), made=lambda _ret: older)

    info = gpu.query(call, byref(newer), made=lambda _ret: newer, instead=query_older)
    if info is not None:
        state = gpu.known(call, info.state, BOUNDS["fabric.state"])
        summary, most = getattr(info, "healthSummary", None), BOUNDS["fabric.health_summary"]
        if state is not None:
            gpu.found["fabric"] = Fabric(
                state=state,
                status=gpu.known(call, info.status, BOUNDS["fabric.status"]),
                health_mask=gpu.known(call, info.healthMask, None),
                health_summary=gpu.known(call, summary, most),
                clique_id=gpu.known(call, info.cliqueId, None),
            )


def _sram(gpu: NvmlCaller) -> None:
    status = gpu.nvml.c_nvmlEccSramErrorStatus_v1_t()
    call = "nvmlDeviceGetSramEccErrorStatus"
    if gpu.query(call, byref(status), made=lambda _ret: True):
        for since in ("volatile", "aggregate"):
            members = (getattr(status, f"{since}Unc{kind}") for kind in ("Parity", "SecDed"))
            counts = [gpu.known(call, count, COUNT) for count in members]
            if any(count is not None for count in counts):
                gpu.found[f"ecc.sram_{since}_uncorrected"] = sum(filter(None, counts))
        gpu.keep("ecc.sram_threshold_exceeded", call, status.bThresholdExceeded)


def _memory(gpu: NvmlCaller) -> None:
    """Read memory in the form that separates the driver's own; older drivers have another."""
    call = "nvmlDeviceGetMemoryInfo"
    version = gpu.nvml.nvmlMemory_v2
    info = gpu.query(call, version, instead=lambda: gpu.query(call))
    total = None if info is None else gpu.known(call, info.total, BOUNDS["memory.total_bytes"])
    if total is None:
        return
    within = Bounds(0, total, "bytes")
    used = gpu.known(call, info.used, within)
    reserved = gpu.known(call, getattr(info, "reserved", None), within)
    if used is not None:
        gpu.found["memory"] = GpuMemory(total_bytes=total, used_bytes=used, reserved_bytes=reserved)


def _processes(gpu: NvmlCaller) -> None:
    """Read the processes with a context; nothing without the list of compute processes."""
    lists = {
        kind: gpu.query(call, instead=partial(gpu.query, f"{call}_v2"))
        for kind, call in _PROCESSES.items()
    }
    if lists["compute"] is None:
        return
    gpu.found["processes"] = tuple(
        GpuProcess(
            pid=process.pid,
            used_bytes=gpu.known(_PROCESSES[kind], process.usedGpuMemory, BYTES),
            kind=kind,
        )
        for kind, found in lists.items()
        for process in found or ()
    )
