"""A user without any rights and without a home to write to, with nothing configured."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.runs import JOBS
from support.services import unavailable

NOBODY = 65534
ROOT = Path(__file__).parents[2]
LIMIT_S = 100


def become(*more):
    words = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *more)
    return [*words, "--bounding-set=-all" + (",+dac_read_search" if more else "")]


# An interpreter below root's home can be reached with the right to read only.
WAYS = (become(), become("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"))


@pytest.fixture
def user():
    """Return a function that runs gpuops as that user, and the folder for temporary files."""
    base = Path(tempfile.mkdtemp())
    home, temporary = base / "home", base / "tmp"
    home.mkdir()
    temporary.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    front = []
    if os.geteuid() == 0:
        base.chmod(0o755)
        os.chown(temporary, NOBODY, NOBODY)
        front = way_down(env)
    home.chmod(0o555)

    def gpuops(*words):
        return subprocess.run(
            [*front, sys.executable, "-m", "gpuops", *map(str, words)],
            env=env,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    yield gpuops, temporary
    shutil.rmtree(base)


# setpriv itself may still start what its user may not: what counts is who starts it from there.
STARTS_ITSELF = (
    "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-c', 'import click, gpuops, sqlalchemy'], check=True)"
)


def way_down(env):
    for words in WAYS if shutil.which("setpriv") else ():
        probe = [*words, sys.executable, "-c", STARTS_ITSELF]
        if subprocess.run(probe, env=env, check=False, capture_output=True).returncode == 0:
            return words
    unavailable("setpriv from root to a user who can read this interpreter")
    return []


@pytest.mark.torch
def test_a_run_trains_and_says_in_one_line_where_it_is_kept(user):
    gpuops, temporary = user

    done = gpuops("run", "--nproc-per-node=2", JOBS / "train.py", "--steps", "3")

    assert done.returncode == 0, done.stderr
    assert "rank 0 done" in done.stdout
    assert "rank 1 done" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "this run is kept in" in line]
    (parent,) = temporary.glob("gpuops-*")
    assert str(parent) in line
    assert parent.stat().st_mode & 0o777 == 0o700
    assert list(parent.glob("*/journal/*"))
    assert "Traceback" not in done.stderr


@pytest.mark.torch
def test_a_directory_that_this_user_may_not_write_is_refused_before_anything_starts(user):
    gpuops, temporary = user
    words = ("run", "--nproc-per-node=2", "--ckpt-dir=states", JOBS / "train.py", "--steps", "3")

    done = gpuops(*words)

    assert done.returncode == 64, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cannot persist" in line]
    assert "/home: Permission denied: another user owns it, or its mode forbids it" in line
    assert "rank 0" not in done.stdout
    assert not list(temporary.parent.rglob("states"))


def test_a_check_judges_the_node_and_says_once_that_it_is_not_recorded(user):
    gpuops, _temporary = user

    done = gpuops("check")

    assert done.returncode in {0, 1}, done.stderr
    assert "disk_space" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "cannot write the spool" in line


def test_a_report_without_any_run_is_one_line_and_a_usage_error(user):
    gpuops, _temporary = user

    done = gpuops("report")

    assert (done.returncode, done.stdout) == (64, "")
    (line,) = done.stderr.splitlines()
    assert "no run yet" in line


def test_a_user_repairs_no_node(user):
    gpuops, _temporary = user

    done = gpuops("repair", "n1", "--what", "a new GPU")

    assert done.returncode == 64
    assert "must be run by root" in done.stderr
