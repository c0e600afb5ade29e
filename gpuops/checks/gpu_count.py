"""Are all GPUs there, as NVML counts them?"""

from dataclasses import dataclass, replace

from gpuops.checks.protocol import Case, Check, Look
from gpuops.host.gpu_facts import GPU_IS_LOST, NO_PERMISSION, RESET_REQUIRED, NvmlGpu, NvmlStatus
from gpuops.host.gpus import Gpus, read_gpus
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason

LOOK = Look("gpus", Gpus, lambda machine, budget_s: read_gpus(machine.root, budget_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``expected`` GPUs and who said so; None: as many as the PCI bus shows.

    Only an expectation that a person wrote down can fail a node. One inferred from the bus warns:
    inside a container or a job's cgroup NVML rightly shows fewer.
    """

    expected: int | None = None
    source: str = "suite"


def judge(facts: Gpus, parameters: Parameters, case: Case) -> list[Finding]:
    """Return one finding about the count and one for each GPU that NVML cannot open."""
    if facts.nvml.status is NvmlStatus.OK:
        broken = [_broken(gpu, case.node) for gpu in facts.nvml.gpus if gpu.error is not None]
        return [_counted(facts, parameters, case.node), *broken]
    if facts.nvml.status is NvmlStatus.ABSENT:
        return [_absent(facts, parameters, case.node)]
    return [_unanswered(facts, parameters, case.node)]


def _counted(facts: Gpus, parameters: Parameters, node: Entity) -> Finding:
    count = sum(gpu.uuid is not None for gpu in facts.nvml.gpus)
    driver = f", driver {facts.nvml.driver}" if facts.nvml.driver else ""
    names = sorted({gpu.name for gpu in facts.nvml.gpus if gpu.name})
    text = f"{count} GPUs" + (f" ({', '.join(names)})" if names else "") + driver
    if parameters.expected is None and not facts.pci:
        # No view of the bus (a container): what NVML lists is all that there is to expect.
        return _all_there(text, count, count, parameters, node) if count else _none(node)
    wanted = len(facts.pci) if parameters.expected is None else parameters.expected
    if count == wanted:
        return _all_there(text, count, wanted, parameters, node)
    if count > wanted:
        more = _all_there(f"{text}: more than expected", count, wanted, parameters, node)
        return replace(more, status=Status.WARN)
    return _missing(f"{text}: {wanted - count} missing", count, wanted, parameters, node)


def _absent(facts: Gpus, parameters: Parameters, node: Entity) -> Finding:
    on_bus, expected = len(facts.pci), parameters.expected
    if on_bus:
        text = f"{on_bus} GPUs on the PCI bus, but libnvidia-ml.so.1 is not installed"
        if expected:
            missing = _missing(text, 0, expected, parameters, node)
            return replace(missing, failure_class=FailureClass.GPU_DRIVER)
        if expected is None:
            return _finding(node, Status.UNKNOWN, text, UnknownReason.MISSING_TOOL)
    if expected:
        text = "no GPU on the PCI bus and no NVIDIA driver library"
        return _missing(text, 0, expected, parameters, node)
    if expected is None:
        return _none(node)
    return _all_there("no GPU in use, as expected", 0, 0, parameters, node)


def _none(node: Entity) -> Finding:
    return _finding(node, Status.SKIP, "no GPU, and none expected")


def _all_there(
    message: str, count: int, wanted: int, parameters: Parameters, node: Entity
) -> Finding:
    return Finding(
        check="gpu_count",
        entity=node,
        status=Status.PASS,
        value=count,
        unit="GPUs",
        threshold=f"= {wanted}",
        source="PCI bus" if parameters.expected is None else parameters.source,
        message=message,
    )


def _missing(
    message: str, count: int, wanted: int, parameters: Parameters, node: Entity
) -> Finding:
    return replace(
        _all_there(message, count, wanted, parameters, node),
        status=Status.WARN if parameters.expected is None else Status.FAIL,
        failure_class=FailureClass.GPU_MISSING,
    )


def _unanswered(facts: Gpus, parameters: Parameters, node: Entity) -> Finding:
    nvml, text = facts.nvml, facts.nvml.error or "NVML gave no answer"
    if nvml.status is NvmlStatus.TIMEOUT:
        return _finding(node, Status.UNKNOWN, text, UnknownReason.TIMEOUT)
    if nvml.status is NvmlStatus.CRASH:
        return _finding(node, Status.UNKNOWN, text, UnknownReason.CRASH)
    if nvml.error_code == NO_PERMISSION:
        return _finding(node, Status.UNKNOWN, text, UnknownReason.NO_PERMISSION)
    status = Status.FAIL if parameters.expected else Status.WARN
    return Finding(
        check="gpu_count",
        entity=node,
        status=status,
        threshold="NVML answers",
        source="nvml",
        message=f"{text} (code {nvml.error_code}); {len(facts.pci)} GPUs on the PCI bus",
        failure_class=FailureClass.GPU_DRIVER,
    )


def _broken(gpu: NvmlGpu, node: Entity) -> Finding:
    """A lost GPU and one that waits for a reset are the driver's own verdict; others warn."""
    lost, reset = gpu.error_code == GPU_IS_LOST, gpu.error_code == RESET_REQUIRED
    return Finding(
        check="gpu_count",
        entity=Entity(EntityKind.GPU, gpu.uuid) if gpu.uuid else node,
        status=Status.FAIL if lost or reset else Status.WARN,
        value=gpu.error_code,
        unit="NVML code",
        threshold="NVML opens each GPU",
        source="nvml",
        message=f"GPU {gpu.index}: {gpu.error}",
        failure_class=FailureClass.GPU_FELL_OFF_BUS if lost else FailureClass.GPU_DRIVER,
    )


def _finding(
    node: Entity, status: Status, message: str, reason: UnknownReason | None = None
) -> Finding:
    return Finding(
        check="gpu_count", entity=node, status=status, message=message, unknown_reason=reason
    )


CHECK = Check(
    name="gpu_count",
    about="as many GPUs as expected, each opened through NVML",
    look=LOOK,
    parameters=Parameters,
    judge=judge,
)
