"""Where the last line of a failed run sends its reader: to what really holds the run."""

import subprocess
import sys

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def last_line(run):
    assert run.finish() == 1
    return run.err.read_text().splitlines()[-1]


def test_a_run_in_the_store_is_named_by_its_id(tmp_path):
    with Run(tmp_path, "--max-restarts=0", JOBS / "plain.py", "exit3", nproc=1) as run:
        assert last_line(run) == f"gpuops: see `gpuops report {run.directory.name[-8:]}`, " + str(
            run.directory
        )


@pytest.mark.parametrize(
    "flags", [("--spool=/dev/null/spool",), ("--store=sqlite:////dev/null/gpuops.db",)]
)
def test_a_run_that_is_not_in_the_store_is_named_by_its_directory(tmp_path, flags):
    with Run(tmp_path, "--max-restarts=0", *flags, JOBS / "plain.py", "exit3", nproc=1) as run:
        said = last_line(run)

    told = f"gpuops report --run-dir {run.directory}"
    assert said == f"gpuops: not in the store yet; see `{told}`"
    report = [sys.executable, "-m", *told.split()]
    shown = subprocess.run(report, check=True, capture_output=True, text=True, timeout=60)
    assert " failed without a restart in " in shown.stdout.splitlines()[0]
