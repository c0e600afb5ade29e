"""A spool that takes nothing costs one line, never the training."""

import os
import subprocess

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
TRAIN = JOBS / "train.py"


def warnings_of(run):
    return [
        line
        for line in run.err.read_text().splitlines()
        if line.startswith("gpuops: ") and "spool" in line
    ]


def assert_trained_with_one_line(run, said):
    assert run.finish() == 0, run.said()
    assert "rank 0 done" in run.said()
    (line,) = warnings_of(run)
    assert said in line
    assert "Traceback" not in run.err.read_text()
    assert run.payloads("run.ended")[0]["outcome"] == "completed"


def test_a_spool_that_cannot_be_made(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("no directory")
    env = {"GPUOPS_SPOOL": str(in_the_way / "spool")}
    with Run(tmp_path / "run", TRAIN, env=env, nproc=1) as run:
        assert_trained_with_one_line(run, "cannot write the spool")


@pytest.fixture
def full(tmp_path):
    """A file system without a byte left; only root can mount one."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system to fill: {done.stderr.strip()} (uid {os.geteuid()})")
    with (place / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"\0" * 4096)
        except OSError:
            pass
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_spool_on_a_full_file_system(tmp_path, full):
    env = {"GPUOPS_SPOOL": str(full / "spool")}
    with Run(tmp_path / "run", TRAIN, env=env, nproc=1) as run:
        assert_trained_with_one_line(run, "No space left on device")
