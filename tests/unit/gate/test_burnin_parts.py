"""Which parts of a node a burn-in tests, and why others are left out."""

from dataclasses import replace

import pytest

from gpuops.checks.core.check import JudgeContext
from gpuops.gate.burnin_parts import PartsUnderTest, choose_parts
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import GpuProcess, Modes, NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.model import Entity, EntityKind, Status

NODE = Entity(EntityKind.NODE, "n1")
FREE = NvmlGpu(index=0, uuid="GPU-0", name="H100", processes=())
OTHER = replace(FREE, index=1, uuid="GPU-1")


def chosen(*gpus: NvmlGpu, selected: str | None = None) -> PartsUnderTest:
    status = NvmlStatus.OK if gpus else NvmlStatus.ABSENT
    facts = Gpus(pci=(), nvml=NvmlSnapshot(status=status, gpus=gpus))
    only = None if selected is None else frozenset({selected})
    return choose_parts(facts, JudgeContext(node=NODE, gpus=only), (0, 1), ())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (replace(OTHER, processes=(GpuProcess(pid=7, name="python"),)), "by process 7 (python)"),
        (replace(OTHER, modes=Modes(mig=True)), "it is divided (MIG)"),
        (replace(OTHER, error="GPU is lost"), "GPU is lost; see gpu_lost"),
        (replace(OTHER, hung_call="nvmlInit"), "no answer in nvmlInit; see gpu_lost"),
    ],
    ids=["in use", "MIG", "vanished", "hangs"],
)
def test_a_gpu_that_cannot_be_tested_is_skipped_with_its_reason(changed: NvmlGpu, why: str) -> None:
    parts = chosen(FREE, changed)
    assert [part.visible_gpu for part in parts.parts] == ["GPU-0"]
    assert parts.n_left_out == 1
    (found,) = parts.findings
    assert (found.entity.id, found.status) == ("GPU-1", Status.SKIP)
    assert why in found.message


def test_a_gpu_that_is_not_selected_is_left_out() -> None:
    assert chosen(FREE, OTHER, selected="GPU-0").n_left_out == 1
    assert chosen(FREE, OTHER).n_left_out == 0


def test_gpus_that_a_node_without_any_is_asked_for_are_one_row() -> None:
    parts = chosen(selected="0")
    assert parts.parts == ()
    (found,) = parts.findings
    assert found.status is Status.UNKNOWN
    assert "this node has none, and --gpus 0 selects some" in found.message
    assert len(chosen().parts) == 2  # its processors
