"""``gpuops slurm prolog`` and ``epilog`` over NVML's real structs, without a Slurm."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import addresses, shape
from support.patient import patient_install
from support.slurm import wait_until

from gpuops.gate.drain import read_diagnostic
from gpuops.host.process.abandoned import name_of

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk, pytest.mark.timeout(600)]

GPUS = 4
# As boards with AMD processors have it: NVML's order is not that of the device files.
MINORS = {index: {"minor": minor} for index, minor in enumerate((2, 3, 1, 0))}


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    return patient_install(tmp_path_factory.mktemp("install") / "patient")


@dataclass
class Hook:
    """A node that is well, and its hooks."""

    home: Path
    mock: object
    install: Path
    root: FakeRoot = None
    env: dict = field(default_factory=dict)

    def __post_init__(self):
        self.root = FakeRoot(self.home / "root")
        for address in addresses(GPUS):
            self.root.gpu(address)
        self.env = {
            "GPUOPS_ROOT": str(self.root.path),
            "GPUOPS_STATE": str(self.home / "state"),
            "GPUOPS_SPOOL": str(self.home / "spool"),
            "GPUOPS_STORE": f"sqlite:///{self.home}/store.db",
            "GPUOPS_MODE": "enforce",
            # Busy cores: no limit of time is what is tried here.
            "GPUOPS_PERMIT_DEADLINE_S": "60",
            "PYTHONPATH": str(self.install),
            "SLURM_JOB_ID": "17",
        }

    def env_of(self, scenario, **env):
        return {**self.env, **self.mock.env(scenario), **env}

    def words(self, name):
        return ["slurm", name, "--verdict", str(self.home / "verdicts" / "v")]

    def run(self, name, scenario, **env):
        """Return what `gpuops slurm NAME` came to where NVML answers by *scenario*."""
        return gpuops(*self.words(name), env=self.env_of(scenario, **env), cwd=self.home)

    def recorded(self, check):
        """Return the findings of *check* in the one run that is recorded."""
        ((payload,),) = wait_until(self._runs, "the run is not recorded")
        return [item for item in json.loads(payload)["findings"] if item["check"] == check]

    def _runs(self):
        """Return the rows of the runs; one may be recorded after its hook has ended."""
        gpuops("db", "flush", "--quiet", env=self.env)
        if not (self.home / "store.db").exists():
            return []
        with sqlite3.connect(f"file:{self.home}/store.db?mode=ro", uri=True) as connection:
            query = "SELECT payload FROM events WHERE kind = 'check.ran'"
            return connection.execute(query).fetchall()


def names():
    """Return the names of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found.add(path.read_bytes())
    return found


@pytest.fixture
def hook(tmp_path, mock, install):
    return Hook(tmp_path, mock, install)


@pytest.fixture
def again(tmp_path, mock, install):
    """Return a function that calls another with new hooks, until that returns something true.

    On a busy machine NVML, or a second look at it, may give no answer within the time of a hook;
    not every one does.
    """

    def call(look):
        told = []

        def is_told():
            told.append(look(Hook(tmp_path / f"{len(told)}", mock, install)))
            return told[-1]

        return wait_until(is_told, lambda: told)

    return call


@pytest.mark.parametrize(
    ("minors", "numbers", "code"),
    [
        ({}, "0", 1),
        ({}, "1-3", 0),
        (MINORS, "0-3", 1),
        (MINORS, "0", 0),
        (MINORS, "2", 0),
    ],
    ids=str,
)
def test_a_process_refuses_a_job_only_where_slurm_surely_named_its_gpu(
    again, minors, numbers, code
):
    def is_as_told(hook):
        busy = shape("h100", GPUS, per_gpu=minors) + "\nprocess 0 4242 2000000000"
        done = hook.run("prolog", busy, SLURM_JOB_GPUS=numbers)
        is_refused = "processes are still on it" in done.stderr
        assert not is_refused or code == 1
        return (done.returncode, is_refused) == (code, code == 1)

    again(is_as_told)


BUSY = shape("h100", GPUS) + "\nprocess 0 4242 2000000000"


def said_of_processes(done):
    return [line for line in done.stderr.splitlines() if line.startswith("fail gpu_processes")]


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_process_that_stays_is_named_with_its_job_after_a_second_look(again, name):
    def told_of_it(hook):
        hook.root.write("proc/4242/cgroup", "0::/system.slice/slurmstepd.scope/job_16/step_0\n")
        done = hook.run(name, BUSY, SLURM_JOB_GPUS="0-3")
        return said_of_processes(done) if done.returncode == 1 else []

    (told,) = again(told_of_it)
    assert told.endswith(
        "4242 (name not visible), again in a second check 1.5 s later; 4242 is of job 16"
    )


def second_look(hook, name):
    """Return what *hook* tells of a process that exits before a second look, and how bad it is."""
    env = hook.env_of(f"{BUSY}\ndelay_ms 10", SLURM_JOB_GPUS="0-3")
    look = name_of(f"probe gpus {hook.root.path}").encode() + b"\n"
    with subprocess.Popen(
        [sys.executable, "-m", "gpuops", *hook.words(name)],
        env={**os.environ, **env},
        cwd=hook.home,
    ) as running:
        wait_until(lambda: look in names(), "NVML is not asked")
        wait_until(lambda: look not in names(), "NVML gives no answer")
        mock_nvml.change(env, shape("h100", GPUS))

    assert running.returncode == 0
    (finding,) = hook.recorded("gpu_processes")
    return finding["status"], finding["message"]


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_process_that_exits_meanwhile_refuses_nothing(again, name):
    def is_told(hook):
        status, message = second_look(hook, name)
        return status == "warn" and message.endswith("; not in a second check 1.5 s later")

    assert again(is_told)


@pytest.mark.parametrize(("status", "code", "passed"), [("Pass", 0, True), ("Fail", 1, False)])
def test_a_diagnostic_that_passes_is_kept_for_the_return_of_the_node(hook, status, code, passed):
    site = hook.home / "site" / "suites"
    site.mkdir(parents=True)
    # The shipped one runs all checks, also of what this machine lacks.
    (site / "diag.toml").write_text(
        'about = "short"\ninherits = "full"\ndeadline_s = 60\nrun = ["dcgm_diag"]\n'
    )
    result = {"entity_group": "GPU", "entity_id": 0, "status": status}
    category = {"category": "Hardware", "tests": [{"name": "memory", "results": [result]}]}
    told = json.dumps({"DCGM Diagnostic": {"test_categories": [category]}})
    hook.root.write("usr/bin/dcgmi", f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    (hook.root.path / "usr/bin/dcgmi").chmod(0o755)

    ran = gpuops(
        "slurm", "diag", env=hook.env_of(shape("h100", GPUS), GPUOPS_SITE_DIR=str(site.parent))
    )

    assert ran.returncode == code, ran.stderr
    kept = read_diagnostic(hook.home / "state", uid=os.getuid())
    assert (kept.passed_us is not None) == passed
    assert wait_until(hook._runs, "the diagnostic is not recorded")


def test_a_crash_of_nvml_in_a_prolog_is_decided_by_the_follow_up(hook):
    crash = shape("h100", GPUS) + "\ncrash 1 nvmlDeviceGetPowerUsage"
    assert hook.run("prolog", crash, SLURM_JOB_GPUS="0-3").returncode == 0

    def verdicts():
        runs = [json.loads(payload)["findings"] for (payload,) in hook._runs()]
        found = [x["status"] for run in runs for x in run if x["check"] == "gpu_driver"]
        return len(found) > 1 and found

    assert wait_until(verdicts, "the follow-up records nothing") == ["warn", "fail"]
