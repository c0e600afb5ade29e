"""The files that an admin copies: they parse, and the prolog always lets the job start."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.services import unavailable

from gpuops.checks.suites import load_suite
from gpuops.gate.remember import RECORD_S
from gpuops.gate.state_file import READ_S
from gpuops.host.probe import STOP_S
from gpuops.resources import data_dir

SLURM = Path(__file__).parents[2] / "slurm"
SCRIPTS = sorted(path for path in SLURM.iterdir() if path.suffix in {".sh", ".sbatch"})


def prolog_with(tmp_path, body):
    """Return the shipped prolog, calling a program that does *body* in place of gpuops."""
    program = tmp_path / "gpuops"
    if body is not None:
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    text = (SLURM / "prolog.sh").read_text().replace("/opt/gpuops/bin/gpuops", str(program))
    script = tmp_path / "prolog.sh"
    script.write_text(text.replace("LIMIT_S=8", "LIMIT_S=1"))
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    "body",
    [
        None,
        "exit 0",
        "exit 1",
        "exit 3",
        "exit 64",
        "exit 70",
        "kill -9 $$",
        "trap '' TERM; exec sleep 60",
    ],
    ids=str,
)
def test_the_prolog_lets_the_job_start_whatever_happens(tmp_path, body):
    ended = subprocess.run(
        ["/usr/bin/env", "-i", str(prolog_with(tmp_path, body))],
        check=False,
        capture_output=True,
        timeout=30,
    )

    assert (ended.returncode, ended.stdout) == (0, b"")


def test_the_check_ends_by_itself_before_the_prolog_would_kill_it():
    starting_s = 0.4  # python and its imports; see tests/benchmarks/bench_check_startup.py
    suite = load_suite("prolog", [data_dir("checks") / "suites"])
    granted = re.search(r"^LIMIT_S=(\d+)$", (SLURM / "prolog.sh").read_text(), re.MULTILINE)

    # The state file is written while the run is recorded.
    worst_s = starting_s + READ_S + suite.deadline_s + STOP_S + RECORD_S + STOP_S
    assert worst_s < float(granted[1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        unavailable("shellcheck is not installed")

    shown = subprocess.run(["shellcheck", str(script)], check=False, capture_output=True, text=True)

    assert (shown.returncode, shown.stdout) == (0, "")
