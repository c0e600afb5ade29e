"""What slurmd's hooks are told, as slurmd 22.05 tells it, and as nobody should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.slurm.env import HookJob, job_of

# Of a real epilog on slurmd 22.05; the status is that of wait(2), 86 << 8.
EPILOG = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_GPUS": "0,2-3",
    "SLURM_JOB_EXIT_CODE": "22016",
    "SLURM_JOB_DERIVED_EC": "0",
}


def test_an_epilog_is_told_the_job_its_gpus_and_how_it_ended():
    job = job_of(EPILOG)

    assert job == HookJob(
        id="17", gpus=frozenset({"slurm:0", "slurm:2", "slurm:3"}), exit_codes=(86, 0)
    )
    assert job.failed


@pytest.mark.parametrize(
    ("env", "failed"),
    [
        ({}, False),
        ({"SLURM_JOB_EXIT_CODE": "0"}, False),
        ({"SLURM_JOB_EXIT_CODE": "256"}, True),
        ({"SLURM_JOB_EXIT_CODE": "9"}, True),
        ({"SLURM_JOB_EXIT_CODE": "0", "SLURM_JOB_DERIVED_EC": "22016"}, True),
        ({"SLURM_JOB_EXIT_CODE": "86"}, True),
    ],
    ids=str,
)
def test_how_a_job_ended_is_read_from_the_status_of_wait(env, failed):
    job = job_of(env)

    assert job.failed is failed


def test_a_job_that_was_killed_has_128_and_its_signal():
    assert job_of({"SLURM_JOB_EXIT_CODE": "9"}).exit_codes == (137,)


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "0-99999", "1;2", "(null)", "٣"])
def test_gpus_that_cannot_be_read_are_none_told_so_that_all_are_meant(text):
    assert job_of({"SLURM_JOB_GPUS": text}).gpus is None


@given(st.dictionaries(st.sampled_from(sorted(EPILOG)), st.text(max_size=20)))
def test_no_environment_breaks_a_hook(env):
    job = job_of(env)

    assert job.id is None or job.id.isdecimal()
    assert all(0 <= code < 256 for code in job.exit_codes)


@given(st.sets(st.integers(0, 127), min_size=1))
def test_a_list_of_numbers_is_read_as_it_is_written(numbers):
    text = ",".join(str(number) for number in sorted(numbers))

    assert job_of({"SLURM_JOB_GPUS": text}).gpus == {f"slurm:{number}" for number in numbers}
