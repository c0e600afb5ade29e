"""Which GPUs and which job a command line means."""

import math
from pathlib import Path

import pytest

from gpuops.cli.check.request import (
    RECORDING_BYTES_MAX,
    build_request,
    for_recording,
    parse_gpus,
    read_recording,
)
from gpuops.config.resolve import resolve
from gpuops.errors import UsageError

UUID = "GPU-0a1b2c3d-aaaa-bbbb-cccc-0123456789ab"


def test_all_are_all_and_so_is_auto_outside_a_hook():
    slurm = {"SLURM_JOB_GPUS": "0,1"}

    assert parse_gpus("all", "prolog", slurm) is None
    assert parse_gpus("auto", "manual", slurm) is None


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "0,2"}, {"slurm:0", "slurm:2"}),
        ({"SLURM_JOB_GPUS": "2-3", "CUDA_VISIBLE_DEVICES": "7"}, {"slurm:2", "slurm:3"}),
        ({"CUDA_VISIBLE_DEVICES": f"1,{UUID}"}, {"1", UUID}),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_JOB_GPUS": "gibberish"}, None),
        ({}, None),
    ],
)
def test_a_hook_judges_its_jobs_gpus_and_all_where_it_cannot_tell(hook, env, gpus):
    assert parse_gpus("auto", hook, env) == (None if gpus is None else frozenset(gpus))


def test_gpus_are_named_by_index_uuid_or_address():
    assert parse_gpus(f"0, {UUID},0000:1b:00.0", "manual", {}) == {"0", UUID, "0000:1b:00.0"}


@pytest.mark.parametrize("text", ["", "0,,1", "-1", "GPU-", "first", "0;1", "12345"])
def test_what_is_no_gpu_is_refused(text):
    with pytest.raises(UsageError, match="is not a GPU"):
        parse_gpus(text, "manual", {})


def settings(env=None, **flags):
    return resolve(flags, env or {}, is_root=True)


def test_a_hook_tells_its_job_and_a_flag_goes_before_it():
    env = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "20001"}

    assert build_request(settings(), env, trigger="epilog").job_id == "12"
    assert build_request(settings(), env, trigger="epilog", job_id="13").job_id == "13"
    assert build_request(settings(), env).job_id is None
    assert build_request(settings(), env, trigger="prolog").job_uid == 20001
    assert build_request(settings(), env).job_uid is None


@pytest.mark.parametrize("job_id", ["", "12.0", "twelve", "-1", "٣"])
def test_a_job_is_a_number(job_id):
    with pytest.raises(UsageError, match="the id of a Slurm job is a number"):
        build_request(settings(), {}, job_id=job_id)


def test_a_deadline_is_a_number():
    with pytest.raises(UsageError, match="a number of seconds is expected"):
        build_request(settings(), {}, deadline_s=math.nan)


def test_a_recording_without_an_end_is_not_read_to_it():
    with pytest.raises(UsageError, match=f"more than {RECORDING_BYTES_MAX} bytes"):
        read_recording(Path("/dev/zero"))


def test_a_fake_root_has_a_state_of_its_own(tmp_path):
    fake = {"GPUOPS_ROOT": str(tmp_path)}
    named = {**fake, "GPUOPS_STATE": "/state"}

    assert str(build_request(settings(), {}).state_dir) == "/var/lib/gpuops"
    assert build_request(settings(fake), {}).state_dir == tmp_path / "var/lib/gpuops"
    assert str(build_request(settings(named), {}).state_dir) == "/state"


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        ({}, {}, (4, "recording")),
        ({}, {"GPUOPS_GPUS_EXPECTED": "2"}, (4, "recording")),
        ({"check.gpus_expected": 2}, {}, (2, "flag")),
    ],
)
def test_a_recording_is_judged_by_its_own_nodes_configuration(flags, env, expected):
    from gpuops.checks.core.recording import Recording
    from gpuops.host.node_state import BootMoment

    moment = BootMoment(boot_id="b", since_boot_s=1.0, t_us=1)
    made = Recording(node="n7", moment=moment, results={}, profile="p", gpus_expected=4)
    here = resolve(flags, {**env, "GPUOPS_PROFILE": "mine"}, is_root=True)
    request = for_recording(build_request(here, {"SLURMD_NODENAME": "here"}), made)

    assert (request.node, request.profile) == ("n7", "p")
    assert (request.gpus_expected, request.gpus_expected_origin) == expected
