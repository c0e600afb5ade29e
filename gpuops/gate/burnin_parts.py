"""What a burn-in tests on this node: its free GPUs, or its processors if it has no GPU; its disks.

Pure, apart from `local_disks`.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.burnin.plan import BurninTest, cpus_text, split_cpus
from gpuops.checks.core.check import JudgeContext, not_judged
from gpuops.checks.gpu.gpus import entity_of, not_found, selected
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu, NvmlStatus
from gpuops.host.storage.mounts import read_mounts, real_filesystems
from gpuops.host.trust import text_of
from gpuops.model import Entity, EntityKind, Finding, Status, UnknownReason

CHECK = "burnin/parts"
_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PartUnderTest:
    """One part: what its program calls it (``cuda:0``, ``cpu:0-7``), and its environment."""

    entity: Entity
    device: str
    visible_gpu: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments that name it."""
        return "--device", self.device, "--part", f"{self.entity.kind.value}:{self.entity.id}"

    def as_rank(self, number: int) -> "PartUnderTest":
        """Return it where all GPUs of a group are visible: NCCL's direct copies need that."""
        return self if self.visible_gpu is None else replace(self, device=f"cuda:{number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsUnderTest:
    """The parts of a node, what it is (``shape``), and findings about those left out.

    ``n_left_out``: how many GPUs are in use, not selected, or cannot be tested.
    """

    parts: tuple[PartUnderTest, ...]
    host: PartUnderTest
    disks: tuple[Path, ...]
    shape: str
    findings: tuple[Finding, ...] = ()
    n_left_out: int = 0

    def of(self, test: BurninTest) -> Sequence[PartUnderTest]:
        """Return the parts that *test* runs on, one program each."""
        return self.parts if test.on_parts else (self.host,)


def choose_parts(
    gpus: object, context: JudgeContext, cpus: Sequence[int], disks: tuple[Path, ...]
) -> PartsUnderTest:
    """Return the parts to test, given the facts of the GPUs (None: they could not be read).

    Processors are tested in place of GPUs only where the node surely has none.
    """
    node = context.node
    host = PartUnderTest(node, f"cpu:{cpus_text(cpus)}")
    groups = tuple(
        PartUnderTest(Entity(EntityKind.CPU, cpus_text(group)), f"cpu:{cpus_text(group)}")
        for group in split_cpus(cpus)
    )
    if not isinstance(gpus, Gpus) or (gpus.nvml.status is not NvmlStatus.OK and gpus.pci):
        why = gpus.nvml.error if isinstance(gpus, Gpus) else None
        text = f"no GPU was tested: {why or 'they could not be read'}; see gpu_driver"
        found = not_judged(CHECK, node, text, UnknownReason.MISSING_TOOL)
        return PartsUnderTest(parts=(), host=host, disks=disks, shape="", findings=(found,))
    if not gpus.nvml.gpus:
        shape = _cpu_shape(len(cpus))
        if context.gpus is None:
            return PartsUnderTest(parts=groups, host=host, disks=disks, shape=shape)
        text = f"no GPU was tested: this node has none, and --gpus {','.join(sorted(context.gpus))}"
        text += " selects some; without --gpus its processors are tested in their place"
        found = not_judged(CHECK, node, text, UnknownReason.NOT_SUPPORTED)
        return PartsUnderTest(parts=(), host=host, disks=disks, shape=shape, findings=(found,))
    parts, findings = [], not_found(CHECK, gpus, context)
    for gpu in selected(gpus, context):
        reason = _why_not(gpu)
        if reason is None and gpu.uuid:
            parts.append(PartUnderTest(entity_of(gpu, node), "cuda:0", gpu.uuid))
            continue
        findings.append(
            Finding(
                check=CHECK,
                entity=entity_of(gpu, node),
                status=Status.SKIP,
                message=f"GPU {gpu.index} is not tested: {reason or 'it has no UUID'}",
            )
        )
    if not parts:
        text = "no GPU was tested: none of those selected is free"
        findings.append(not_judged(CHECK, node, text, UnknownReason.NOT_SUPPORTED))
    return PartsUnderTest(
        parts=tuple(parts),
        host=host,
        disks=disks,
        shape=_gpu_shape(gpus.nvml.gpus),
        findings=tuple(findings),
        n_left_out=len(gpus.nvml.gpus) - len(parts),
    )


def _why_not(gpu: NvmlGpu) -> str | None:
    """Return why *gpu* cannot be tested now, None if it can."""
    if gpu.error or gpu.hung_call:
        return f"{gpu.error or 'no answer in ' + str(gpu.hung_call)}; see gpu_lost"
    if gpu.modes.mig:
        return "it is divided (MIG)"
    holders = [f"{item.pid} ({item.name or 'unknown'})" for item in gpu.processes or ()]
    return f"in use by process {', '.join(holders)}" if holders else None


def _gpu_shape(gpus: Iterable[NvmlGpu]) -> str:
    names = [gpu.name or "unknown" for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _cpu_shape(count: int) -> str:
    model = _MODEL.search(text_of(Path("/proc/cpuinfo")) or "")
    return f"{count} x {model[1] if model else 'unknown processor'}"


def local_disks(root: Path) -> tuple[Path, ...]:
    """Return a folder on each local disk: its mount point, where this user may write there."""
    return tuple(
        Path(mount.point)
        for mount in real_filesystems(read_mounts(root))
        if mount.source.startswith("/dev/")
        and not mount.is_network
        and "rw" in mount.options
        and Path(mount.point).is_dir()
        and os.access(mount.point, os.W_OK)
    )
