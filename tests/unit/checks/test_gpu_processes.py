"""The verdicts on left-over processes and memory."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.gpus import gpu, node, part, shipped

from gpuops.checks.gpu.gpu_processes import Parameters, judge
from gpuops.host.nvml.facts import GpuMemory, GpuProcess

MIB = 2**20
LIMITS = Parameters(
    processes=limit(fail=1),
    used_bytes=limit(warn=15 * MIB + 1),
    used_percent=limit(fail=30),
    ignore=("Xorg", "nvidia-cuda-*"),
)
IDLE = replace(LIMITS, idle=True)
HANDED_OUT = replace(CASE, gpus=frozenset({"0"}))
TRAIN = GpuProcess(pid=4711, name="/usr/bin/python3")


def findings(parameters, case=CASE, **changes):
    return judge(node(gpu(0, **changes)), parameters, case)


def used(count, total=1000 * MIB, reserved=MIB):
    return GpuMemory(total_bytes=total, used_bytes=count, reserved_bytes=reserved)


def test_a_free_gpu_passes():
    assert said(findings(IDLE, HANDED_OUT)) == [("n1", "pass", None)]


def test_a_process_on_a_gpu_that_is_handed_out_fails():
    (finding,) = findings(IDLE, HANDED_OUT, processes=(TRAIN,))

    assert said([finding]) == [("GPU-0", "fail", "host_sw.leftovers")]
    assert finding.message == "GPU 0: processes are still on it: 4711 (/usr/bin/python3)"


def test_a_process_that_may_belong_to_another_job_only_warns():
    assert said(findings(IDLE, CASE, processes=(TRAIN,)))[0][1] == "warn"


def test_a_process_only_warns_where_the_number_of_its_gpu_may_mean_another():
    swapped = node(gpu(0, minor=1, processes=(TRAIN,)), gpu(1, minor=0))
    some, all_ = (
        replace(CASE, gpus=frozenset(names)) for names in (["slurm:0"], ["slurm:0", "slurm:1"])
    )

    assert said(judge(swapped, IDLE, some)) == [("GPU-0", "warn", "host_sw.leftovers")]
    assert said(judge(swapped, IDLE, all_)) == [("GPU-0", "fail", "host_sw.leftovers")]


def test_where_gpus_may_be_in_use_a_process_is_no_fault():
    busy = {"processes": (TRAIN,), "memory": used(900 * MIB)}

    assert said(findings(LIMITS, HANDED_OUT, **busy)) == [("n1", "pass", None)]


def test_processes_that_may_stay_are_ignored_by_name():
    stay = (
        GpuProcess(pid=1, name="/usr/lib/xorg/Xorg", kind="graphics"),
        GpuProcess(pid=2, name="nvidia-cuda-mps-server"),
    )

    assert said(findings(IDLE, HANDED_OUT, processes=stay)) == [("n1", "pass", None)]


def test_the_shipped_names_are_known_as_the_kernel_cuts_them():
    idle = shipped("gpu_processes", suite="prolog")["gpu_processes"]
    stay = (
        GpuProcess(pid=1, name="nvidia-cuda-mps"),
        GpuProcess(pid=2, name="nv-hostengine"),
        GpuProcess(pid=3, name="Xorg"),
    )

    assert said(findings(idle, HANDED_OUT, processes=stay)) == [("n1", "pass", None)]


def test_the_parts_of_a_divided_gpu_may_be_other_jobs():
    divided = part(gpu(0), "modes", mig=True).modes
    found = findings(IDLE, HANDED_OUT, modes=divided, processes=(TRAIN,), memory=used(900 * MIB))

    assert said(found) == [("n1", "skip", None)]
    assert "MIG is on" in found[0].message


def test_a_process_whose_name_is_hidden_is_still_there():
    (finding,) = findings(IDLE, HANDED_OUT, processes=(GpuProcess(pid=9),) * 5)

    assert finding.value == 5
    assert finding.message.endswith("and 2 more")
    assert "9 (name not visible)" in finding.message


@pytest.mark.parametrize(
    ("count", "status"),
    [
        (0, "pass"),
        (15 * MIB, "pass"),
        (15 * MIB + 1, "warn"),
        (300 * MIB - 1, "warn"),
        (300 * MIB, "fail"),
        (301 * MIB, "fail"),
    ],
)
def test_memory_that_no_process_owns_is_judged(count, status):
    (verdict,) = said(findings(IDLE, HANDED_OUT, memory=used(count)))

    assert verdict[1] == status
    assert verdict[2] == (None if status == "pass" else "gpu_mem.leaked_memory")


def test_memory_may_be_anothers_where_a_container_hides_processes():
    assert [item[1] for item in said(findings(LIMITS, CASE, memory=used(900 * MIB)))] == ["warn"]
    assert [item[1] for item in said(findings(IDLE, CASE, memory=used(900 * MIB)))] == ["warn"]


def test_memory_is_not_judged_where_the_drivers_own_part_is_in_it():
    assert said(findings(IDLE, HANDED_OUT, memory=used(900 * MIB, reserved=None))) == [
        ("n1", "pass", None)
    ]


def test_processes_that_are_not_told_are_said():
    (finding,) = findings(IDLE, HANDED_OUT, processes=None)
    assert finding.message.endswith("1 do not report their processes")

    assert said(findings(IDLE, HANDED_OUT, processes=None, memory=used(900 * MIB)))[0][1] == "fail"
    assert said(findings(IDLE, HANDED_OUT, processes=None, memory=None)) == [("n1", "skip", None)]
