"""Are all NVLinks of each GPU up?"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checks.core.check import Check, JudgeContext, NoParameters
from gpuops.checks.gpu.gpus import (
    PROBE,
    GpuResult,
    GpuVerdict,
    NotReported,
    alone,
    counted,
    judge_each,
    majority,
    peers_of,
    span,
    unless_virtual,
)
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.model import FailureClass, Finding, Status

_NAME = "nvlink"
_CALLS = ("nvmlDeviceGetNvLinkState", "NVML_FI_DEV_NVLINK")


@dataclass(frozen=True, slots=True)
class _Links:
    up: int
    down: tuple[int, ...]
    unknown: int


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU with fewer NVLinks up than the profile or its peers have.

    Fewer than in the profile fails (in a virtual machine only if the profile is the site's own),
    fewer than most GPUs of the model here warns. The only GPU of a machine has no peer to link to,
    and one that is divided (MIG) does not use its links.
    """
    return judge_each(
        _NAME, facts, context, lambda gpu: _judge(gpu, facts, context), _summary, _CALLS
    )


def _links(gpu: NvmlGpu) -> _Links | None:
    if gpu.nvlinks is None:
        return None
    return _Links(
        up=sum(link.active is True for link in gpu.nvlinks),
        down=tuple(link.link for link in gpu.nvlinks if link.active is False),
        unknown=sum(link.active is None for link in gpu.nvlinks),
    )


def _judge(gpu: NvmlGpu, facts: Gpus, context: JudgeContext) -> GpuResult:
    links = _links(gpu)
    if links is None:
        return NotReported()
    if gpu.modes.mig:
        return NotReported("MIG is on, its NVLinks are not in use")
    if alone(facts):
        return NotReported(f"the only GPU here has no peer to link to ({links.up} up)")
    expected, status, source = _expected(gpu, facts, context)
    if not expected:
        return NotReported(
            "no NVLink is expected: no profile names any, most GPUs here have none up"
        )
    if links.up < expected <= links.up + links.unknown:
        return NotReported(f"{links.unknown} of its NVLinks gave no answer")
    missing = [] if links.up >= expected else [_down(links, expected, status, source)]
    return unless_virtual(missing, facts, context.profile.nvlink_count)


def _down(links: _Links, expected: int, status: Status, source: str) -> GpuVerdict:
    down = f" (down: {', '.join(map(str, links.down))})" if links.down else ""
    return GpuVerdict(
        status=status,
        message=f"{links.up} of {expected} NVLinks are up{down}",
        value=links.up,
        unit="links",
        threshold=f">= {expected}",
        source=source,
        failure_class=FailureClass.GPU_NVLINK,
    )


def _expected(gpu: NvmlGpu, facts: Gpus, context: JudgeContext) -> tuple[int | None, Status, str]:
    profile = context.profile
    if profile.nvlink_count is not None:
        source = f"profile {profile.name}: {profile.nvlink_count.source}"
        return int(profile.nvlink_count.value), Status.FAIL, source
    known = (_links(peer) for peer in peers_of(gpu, facts))
    usual = majority(links.up for links in known if links is not None)
    return usual, Status.WARN, "most GPUs of this model here"


def _summary(gpus: Sequence[NvmlGpu]) -> GpuVerdict:
    links = [_links(gpu) for gpu in gpus]
    up = [item.up for item in links if item is not None]
    return GpuVerdict(
        message=f"{span(up)} NVLinks up on each of {counted(gpus)}", value=min(up), unit="links"
    )


CHECK = Check(
    name=_NAME,
    about="as many NVLinks are up as the profile or the other GPUs say",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
