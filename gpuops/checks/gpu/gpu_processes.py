"""Is a GPU free that a job is about to get: no process, no memory left behind?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    counted,
    judge_each,
    surely_selected,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import GpuMemory, GpuProcess, NvmlGpu
from gpuops.host.procfs import is_named
from gpuops.model import FailureClass, Finding, Status
from gpuops.units import format_bytes

_NAME = "gpu_processes"
_CALLS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetMemoryInfo",
)
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """When a GPU is not free.

    ``idle``: this suite runs when the GPUs must be idle (prolog, epilog); elsewhere a process is
    not a fault. ``used_bytes``, ``used_percent``: memory in use that no process owns.
    ``ignore``: patterns of the names of processes that may stay.
    """

    processes: CheckLimit
    used_bytes: CheckLimit
    used_percent: CheckLimit
    idle: bool = False
    ignore: tuple[str, ...] = ()


def judge(facts: Gpus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with left-over processes, or memory that no process owns.

    It fails only for GPUs that are surely not in use by another job (`surely_selected`): others of
    this node may be, as may the other parts of a GPU that is divided (MIG). A container may hide
    the processes that own the memory.
    """
    surely = parameters.idle and surely_selected(facts, context)
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, parameters, surely=surely), _summary, _CALLS
    )


def _judge(gpu: NvmlGpu, parameters: Parameters, *, surely: bool) -> GpuResult:
    if gpu.processes is None and gpu.memory is None:
        return NotReported()
    if gpu.modes.mig:
        return NotReported("MIG is on: each of its parts may be another job's")
    names = [(item, (item.name or "").rpartition("/")[2]) for item in gpu.processes or ()]
    left = [item for item, name in names if not is_named(name, parameters.ignore)]
    verdicts = _left(left, parameters.processes, surely=surely) if parameters.idle else []
    owned = bool(gpu.processes) or (gpu.processes is None and not parameters.idle)
    if gpu.memory is None or owned:
        return verdicts
    return [*verdicts, *_leaked(gpu.memory, parameters, surely=surely)]


def _left(left: Sequence[GpuProcess], limit: CheckLimit, *, surely: bool) -> list[GpuVerdict]:
    status = limit.ceiling(len(left))
    if status is Status.PASS:
        return []
    shown = [f"{item.pid} ({item.name or 'name not visible'})" for item in left[:_SHOWN]]
    more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
    return [
        GpuVerdict(
            status=status if surely else Status.WARN,
            message=f"processes are still on it: {', '.join(shown)}{more}",
            value=len(left),
            unit="processes",
            threshold=limit.text("<", "processes"),
            source=limit.source,
            failure_class=FailureClass.HOST_LEFTOVERS,
        )
    ]


def _leaked(memory: GpuMemory, parameters: Parameters, *, surely: bool) -> list[GpuVerdict]:
    # Unless the driver's own part is reported separately, `used` includes hundreds of MB of it.
    if memory.reserved_bytes is None:
        return []
    percent = 100 * memory.used_bytes / memory.total_bytes if memory.total_bytes else 0.0
    measured = (
        (parameters.used_percent, percent, round(percent, 1), "%"),
        (parameters.used_bytes, memory.used_bytes, memory.used_bytes, "bytes"),
    )
    limit, value, shown, unit = max(measured, key=lambda item: item[0].ceiling(item[1]))
    status = limit.ceiling(value)
    if status is Status.PASS:
        return []
    return [
        GpuVerdict(
            status=status if surely else Status.WARN,
            message=f"{format_bytes(memory.used_bytes)} of its memory in use, by no process that "
            "is visible here",
            value=shown,
            unit=unit,
            threshold=limit.text("<", unit),
            source=limit.source,
            failure_class=FailureClass.GPU_LEAKED_MEMORY,
        )
    ]


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    unknown = sum(gpu.processes is None for gpu in gpus)
    count = sum(len(gpu.processes or ()) for gpu in gpus)
    used = max((gpu.memory.used_bytes for gpu in gpus if gpu.memory is not None), default=None)
    text = f"{count} processes on {counted(gpus)}"
    text += f", at most {format_bytes(used)} in use" if used is not None else ""
    text += f"; {unknown} do not report their processes" if unknown else ""
    return GpuVerdict(message=text, value=count, unit="processes")


CHECK = Check(
    name=_NAME,
    about="no process and no memory left behind on a GPU that must be idle",
    probe=PROBE,
    parameters=Parameters,
    judge=judge,
    transient=True,
)
