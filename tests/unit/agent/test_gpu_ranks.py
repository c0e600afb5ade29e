"""Which GPUs are the job's, and which rank trains on which."""

import pytest

from gpuops.agent.monitors.gpu import job_gpus, rank_gpus
from gpuops.host.gpu_names import GpuName

GPUS = tuple(
    GpuName(index=n, address=f"0000:{n:02x}:00.0", uuid=f"GPU-{n}{n}aa-bb", minor=n)
    for n in range(8)
)


def mine(env, gpus=GPUS, **options):
    return [gpu.index for gpu in job_gpus(env, gpus, **options)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("4,5", [4, 5]),
        ("5, 4", [5, 4]),
        ("GPU-33aa-bb,GPU-0", [3, 0]),
        ("gpu-33AA-BB", [3]),
        ("", []),
        ("2,9,3", [2]),
        ("NoDevFiles", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("MIG-8a1b", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("1,1", [1]),
        ("GPU-", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_cuda_names_them_in_its_order(visible, expected):
    assert mine({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_a_name_they_are_all_the_jobs():
    assert mine({}) == list(range(8))


def test_slurm_counts_the_node_and_cuda_what_the_cgroup_shows():
    env = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "4,5"}
    assert mine(env, GPUS[4:6]) == [4, 5]
    assert mine({"SLURM_JOB_GPUS": "4,5"}, GPUS[4:6]) == [4, 5]
    assert mine(env, whole_node=True) == [4, 5]
    assert mine({"SLURM_JOB_GPUS": "0-2,7"}) == [0, 1, 2, 7]
    assert mine({"SLURM_STEP_GPUS": "6", "SLURM_JOB_GPUS": "6,7"}) == [6]


@pytest.mark.parametrize("text", ["x", "1-", "-3", "1;2", "99999999999", "0-99999", "\u0663"])
def test_numbers_of_slurm_that_are_none_mean_all(text):
    assert mine({"SLURM_JOB_GPUS": text}) == list(range(8))


def test_a_rank_has_the_gpu_of_its_number():
    env = {"CUDA_VISIBLE_DEVICES": "3,2"}

    assert rank_gpus(env, [0, 1, 2], GPUS) == {0: "GPU-33aa-bb", 1: "GPU-22aa-bb"}
    assert rank_gpus(env, [], GPUS) == {}
    assert rank_gpus({}, [0], ()) == {}
    assert rank_gpus({}, [0], [GpuName(index=0, address="0000:01:00.0")]) == {}
