"""How a sweep ends that is interrupted or killed: real processes, with planted pair tests."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.runs import wait_until

NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
# The first test of a pair passes, all others stay until they are ended.
SITE = """
import os, sys, time
words = sys.orig_argv
if "gpuops.worker.burnin.pair" in words:
    done = os.path.dirname(__file__) + "/started/"
    os.makedirs(done, exist_ok=True)
    open(done + str(os.getpid()), "w").close()
    if len(os.listdir(done)) > 2:
        time.sleep(600)
    print('{"busbw_gbs": 1.0}', flush=True)
    os._exit(0)
"""
SSH = """#!/bin/sh
host=$1; shift
exec env SLURMD_NODENAME=$host GPUOPS_STATE={folder}/state-$host "$@"
"""


class Site:
    """Three nodes that are this machine; all that they start has *folder* in its environment."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        (folder / "ssh").write_text(SSH.format(folder=folder))
        (folder / "ssh").chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUOPS_", "SLURM"))}
        self.env = {
            **kept,
            "PYTHONPATH": str(folder / "site"),
            "GPUOPS_STATE": str(folder / "state"),
            "GPUOPS_SPOOL": str(folder / "spool"),
            "GPUOPS_STORE": "sqlite:////dev/null/gpuops.db",
            "GPUOPS_TOKEN": "0123456789abcdef",
        }

    def start(self, *words, **env):
        """Return the process of a sweep with *words*."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuops", "sweep", "--no-check", "--json", *words],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start_ssh(self):
        names, remote = ",".join(NODES), f"{sys.executable} -m gpuops"
        return self.start("--hosts", names, "--ssh", str(self.folder / "ssh"), "--remote", remote)

    def start_step(self):
        """Return the processes of a step of srun; the first one leads."""
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
        step["SLURM_STEP_NODELIST"] = ",".join(NODES)
        return [
            self.start(
                **step,
                SLURM_PROCID=str(rank),
                SLURMD_NODENAME=node,
                GPUOPS_STATE=str(self.folder / f"state-{node}"),
            )
            for rank, node in enumerate(NODES)
        ]

    def started(self):
        """Return the pids of the pair tests."""
        folder = self.folder / "site" / "started"
        return [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []

    def processes(self):
        """Return what runs for this site."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PYTHONPATH") == self.env["PYTHONPATH"]:
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def spooled(self):
        """Return the events in the spool."""
        files = [path for path in (self.folder / "spool").rglob("*") if path.is_file()]
        return "".join(path.read_text(errors="replace") for path in files)


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    for process in made.processes():
        process.kill()


@pytest.mark.parametrize(
    ("number", "code", "is_step"), [(signal.SIGTERM, 143, False), (signal.SIGINT, 130, True)]
)
def test_an_interrupted_sweep_records_what_was_done_and_leaves_nothing(site, number, code, is_step):
    leader, *others = site.start_step() if is_step else [site.start_ssh()]
    wait_until(lambda: len(site.started()) == 4, 120)
    leader.send_signal(number)
    out, err = leader.communicate(timeout=120)

    assert leader.returncode == code, err
    assert f"gpuops: spooled in {site.folder}/spool, the store has it after" in err
    body = json.loads(out)
    assert [test["outcome"] for test in body["tests"]] == ["pass"]
    assert body["verdicts"] == []
    assert "interrupted: 1 tests of pairs were done, and nobody is judged" in out
    assert site.spooled().count('"sweep.tested"') == 1
    assert site.spooled().count('"sweep.ended"') == 1
    for other in others:
        _, err = other.communicate(timeout=120)
        assert other.returncode == 75, err
        assert "the sweep was not finished: it was interrupted on the node that leads it" in err
    wait_until(lambda: not site.processes(), 120)


@pytest.mark.soak  # the others and the server wait for it: 40 s in which nothing else happens
def test_a_coordinator_that_is_killed_ends_all_others_with_75_and_says_where_the_record_is(site):
    leader, *others = site.start_step()
    wait_until(lambda: len(site.started()) == 4, 120)
    leader.kill()
    leader.communicate(timeout=30)
    for pid in site.started():
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
    for other in others:
        _, err = other.communicate(timeout=200)
        assert other.returncode == 75, err
        assert "the node that leads it records what was tested, unless its gpuops was killed" in err
    assert "sweep.ended" not in site.spooled()
    wait_until(lambda: not site.processes(), 120)
