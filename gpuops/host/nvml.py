"""What NVML says of the GPUs, asked in a child: a sick driver blocks, and can crash its caller."""

from collections.abc import Callable
from typing import Any

from gpuops.errors import ConfigError, ProbeError
from gpuops.host import probe
from gpuops.host.abandoned import abandoned
from gpuops.host.gpu_facts import NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.records import from_json, to_json
from gpuops.host.sysfs import sysfs_address


def read_nvml(deadline_s: float) -> NvmlSnapshot:
    """Return what NVML says within *deadline_s*; never raises and never hangs."""
    try:
        child = probe.start_call(
            lambda: to_json(snapshot_here()),
            deadline_s=deadline_s,
            question="nvml",
            left=abandoned(),
        )
    except ProbeError as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")
    outcome = probe.run(child)
    if outcome.ending is not probe.Ending.ENDED:
        return NvmlSnapshot(
            status=NvmlStatus.TIMEOUT, error=f"NVML {outcome.describe()}", state=outcome.state
        )
    try:
        return from_json(NvmlSnapshot, probe.answer(outcome), "the NVML snapshot")
    except (ProbeError, ConfigError, ValueError) as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")


def snapshot_here() -> NvmlSnapshot:
    """Return what NVML says to this very process; may hang, so call `read_nvml` instead."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        absent = exc.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        status = NvmlStatus.ABSENT if absent else NvmlStatus.ERROR
        return NvmlSnapshot(status=status, error=f"nvmlInit: {exc}", error_code=exc.value)
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as exc:
        return NvmlSnapshot(
            status=NvmlStatus.ERROR, error=f"nvmlDeviceGetCount: {exc}", error_code=exc.value
        )
    return NvmlSnapshot(
        status=NvmlStatus.OK,
        driver=_driver(pynvml),
        gpus=tuple(_gpu(pynvml, index) for index in range(count)),
    )


def _driver(pynvml: Any) -> str | None:  # noqa: ANN401 a module without types
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _gpu(pynvml: Any, index: int) -> NvmlGpu:  # noqa: ANN401 a module without types
    found: dict[str, str] = {}
    error: tuple[str, int] | None = None

    def ask(key: str, call: str, read: Callable[[], str]) -> None:
        nonlocal error
        try:
            found[key] = read()
        except pynvml.NVMLError as exc:
            error = error or (f"{call}: {exc}", exc.value)

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as exc:
        return NvmlGpu(
            index=index, error=f"nvmlDeviceGetHandleByIndex: {exc}", error_code=exc.value
        )
    ask("uuid", "nvmlDeviceGetUUID", lambda: pynvml.nvmlDeviceGetUUID(handle))
    ask("address", "nvmlDeviceGetPciInfo", lambda: _address(pynvml.nvmlDeviceGetPciInfo(handle)))
    ask("name", "nvmlDeviceGetName", lambda: pynvml.nvmlDeviceGetName(handle))
    return NvmlGpu(
        index=index,
        uuid=found.get("uuid"),
        address=found.get("address"),
        name=found.get("name"),
        error=error and error[0],
        error_code=error and error[1],
    )


def _address(info: Any) -> str:  # noqa: ANN401 a structure without types
    bus_id = info.busId
    return sysfs_address(bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id)
