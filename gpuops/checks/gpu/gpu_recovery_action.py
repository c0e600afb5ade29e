"""What the driver says must be done to a GPU before it can work on."""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuVerdict, NotReported, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_recovery_action"
_NONE = 0

# nvml.h, nvmlDeviceGpuRecoveryAction_t; Xid 154 tells of the same.
_ACTIONS = {
    1: ("reset this GPU", FailureClass.GPU_DRIVER),
    2: ("reboot the node", FailureClass.GPU_DRIVER),
    3: ("drain it of peer-to-peer traffic", FailureClass.GPU_NVLINK),
    4: ("drain it, then reset it", FailureClass.GPU_DRIVER),
    5: ("recover the IMEX domain", FailureClass.GPU_FABRIC),
    6: ("reset its bus", FailureClass.HOST_PCIE),
    7: ("reboot the system", FailureClass.GPU_DRIVER),
}


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU that wants something done to it.

    The driver itself decides: any action fails. One that this table does not know only warns, as
    nobody can say what a newer driver means by it. A driver before R570 tells none, which is not
    health.
    """
    return judge_each(_NAME, facts, context, _one, _well, ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",))


def _one(gpu: NvmlGpu) -> Sequence[GpuVerdict] | NotReported:
    action = gpu.recovery_action
    if action is None:
        return NotReported(
            "" if gpu.hung_call or gpu.error else "the driver tells no recovery action"
        )
    if action == _NONE:
        return ()
    text, failure_class = _ACTIONS.get(
        action, ("an action that gpuops does not know", FailureClass.GPU_DRIVER)
    )
    return [
        GpuVerdict(
            status=Status.FAIL if action in _ACTIONS else Status.WARN,
            message=f"the driver asks: {text}",
            value=action,
            unit="recovery action",
            threshold="= 0 (none)",
            failure_class=failure_class,
        )
    ]


def _well(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(
        message=f"the driver asks for nothing to be done to {counted(gpus)}",
        value=_NONE,
        unit="recovery action",
        threshold="= 0 (none)",
    )


CHECK = Check(
    name=_NAME,
    about="the driver asks for no reset, reboot or drain of a GPU",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
