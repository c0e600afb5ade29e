"""A spool that takes nothing costs one line, never the training."""

from contextlib import suppress

import pytest
from support.runs import JOBS, Run
from support.small_disk import small_disk

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
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
    """A file system without a byte left."""
    with small_disk(tmp_path / "full", "64k") as place:
        with (place / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"\0" * 4096)
        yield place


def test_a_spool_on_a_full_file_system(tmp_path, full):
    env = {"GPUOPS_SPOOL": str(full / "spool")}
    with Run(tmp_path / "run", TRAIN, env=env, nproc=1) as run:
        assert_trained_with_one_line(run, "No space left on device")
