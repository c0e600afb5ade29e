"""Which action does the driver request for a GPU before it can be used again?"""

from collections.abc import Sequence

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import PROBE, GpuResult, GpuVerdict, NotReported, counted, judge_each
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "gpu_recovery_action"
_NONE = 0

_OF_DOMAIN = 5
# nvml.h, nvmlDeviceGpuRecoveryAction_t; Xid 154 reports the same.
_ACTIONS = {
    1: ("reset this GPU", FailureClass.GPU_DRIVER),
    2: ("reboot the node", FailureClass.GPU_DRIVER),
    3: ("drain it of peer-to-peer traffic", FailureClass.GPU_NVLINK),
    4: ("drain it, then reset it", FailureClass.GPU_DRIVER),
    _OF_DOMAIN: ("recover the IMEX domain", FailureClass.GPU_FABRIC),
    6: ("reset its bus", FailureClass.HOST_PCIE),
    7: ("reboot the system", FailureClass.GPU_DRIVER),
}


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU for which the driver requests an action.

    Any action for the GPU or the node fails. One for the NVLink domain of several nodes (IMEX) only
    warns, since every GPU of the domain reports it; so does one that this table does not list,
    since its meaning in a newer driver is unknown. A driver before R570 reports none, which does
    not mean that the GPU is well.
    """
    return judge_each(
        _NAME, facts, context, _judge, _summary, ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",)
    )


def _judge(gpu: NvmlGpu) -> GpuResult:
    action = gpu.recovery_action
    if action is None:
        return NotReported(
            "" if gpu.hung_call or gpu.error else "the driver reports no recovery action"
        )
    if action == _NONE:
        return ()
    text, failure_class = _ACTIONS.get(
        action, ("an action that gpuops does not know", FailureClass.GPU_DRIVER)
    )
    return GpuVerdict(
        status=Status.FAIL if action in _ACTIONS and action != _OF_DOMAIN else Status.WARN,
        message=f"the driver requests: {text}",
        value=action,
        unit="recovery action",
        threshold="= 0 (none)",
        failure_class=failure_class,
        hardware_reported=True,
    )


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    return GpuVerdict(
        message=f"the driver requests no action for {counted(gpus)}",
        value=_NONE,
        unit="recovery action",
        threshold="= 0 (none)",
    )


CHECK = Check(
    name=_NAME,
    about="the driver requests no reset, reboot or drain of a GPU",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
