"""A run of sleeping processes, for injectors to break: an agent, workers, a helper, a store."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from gpuops.drill.fault import DrillTarget
from gpuops.drill.find import inspect_process
from gpuops.host.procfs import process
from support.hosts import _session
from support.runs import JOBS, is_alive, wait_until


class DummyRun:
    """One dummy agent of node *node* in the folder of a run; see ``dummy_agent.py``."""

    def __init__(self, parent, *, node="n0", n_workers=2, name="20260101T000000Z-a-00000001"):
        self.folder, self.node = Path(parent) / "runs" / name, node
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(JOBS / "dummy_agent.py"), str(self.folder), node]
        self.process = subprocess.Popen([*words, str(n_workers)], start_new_session=True)
        self.path = self.folder / f"state-{node}.json"
        wait_until(self.path.exists, what="the state file")
        self.state = json.loads(self.path.read_text())
        self.agent = self.process.pid
        self.workers = [self.state["pids"][str(rank)] for rank in range(n_workers)]
        self.board = self.state["board"]
        self.helper = wait_until(self._helper, what="the worker's helper")

    def _helper(self):
        known = {self.agent, self.board, *self.workers}
        others = [pid for pid in _session(self.agent) if pid not in known]
        return next((pid for pid in others if inspect_process(pid).parent == self.workers[0]), None)

    @property
    def everyone(self):
        """Return every process of it."""
        return [self.agent, *self.workers, self.helper, self.board]

    def publish(self, **changes):
        """Replace the state file."""
        self.state |= changes
        self.path.write_text(json.dumps(self.state))

    def end(self):
        """End all of it."""
        for pid in {*self.everyone, *_session(self.agent)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def scene(*runs, **options):
    """Return what *runs* publish, to be broken by this user."""
    from gpuops.drill.find import read_states

    states = [state for run in runs[:1] for state in read_states(run.folder)]
    return DrillTarget(states=states, uid=os.geteuid(), **options)


def stopped(pid):
    """Say whether *pid* stands still."""
    found = process(pid)
    return found is not None and found.state == "T"


def goes_on(pid):
    """Say whether *pid* lives and does not stand still."""
    return is_alive(pid) and not stopped(pid)
