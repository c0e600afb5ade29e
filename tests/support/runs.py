"""Real ``gpuops run`` processes for tests: started, watched through what they publish, ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.warm_python import warm_popen

JOBS = Path(__file__).parents[1] / "fixtures" / "jobs"
LIMIT_S = 100.0


def wait_until(condition, limit_s=LIMIT_S, what="the condition"):
    """Return the first true value of *condition*; fail with *what* after *limit_s*."""
    pause, end = threading.Event(), time.monotonic() + limit_s
    while time.monotonic() < end:
        if value := condition():
            return value
        pause.wait(0.02)
    raise AssertionError(f"{what} did not come true within {limit_s:g} s")


def is_alive(pid):
    """Say whether *pid* runs: a zombie that nobody has reaped yet does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def whole_lines(path):
    """Return the lines of *path* that are written to their end, of a file that may still grow."""
    return path.read_text().rpartition("\n")[0].splitlines()


class Run:
    """One agent with its own store, spool and run directory below *folder*."""

    def __init__(self, folder, *words, env=None, cwd=None, nproc=2, popen=warm_popen, **streams):
        self.folder = folder
        self.runs = folder / "runs"
        self.out, self.err = folder / "out", folder / "err"
        folder.mkdir(parents=True, exist_ok=True)
        flags = [f"--nproc-per-node={nproc}"] if nproc else []
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = popen(
                [sys.executable, "-m", "gpuops", "run", *flags, *map(str, words)],
                env=self._environment() | (env or {}),
                cwd=cwd,
                **{"stdout": out, "stderr": err, **streams},
            )

    def _environment(self):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUOPS_")}
        return {
            **kept,
            "OMP_NUM_THREADS": "1",
            "GPUOPS_STORE": f"sqlite:///{self.folder}/gpuops.db",
            "GPUOPS_SPOOL": str(self.folder / "spool"),
            "GPUOPS_STATE": str(self.folder / "state"),
            "GPUOPS_RUN_DIR": str(self.runs),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def directory(self):
        """Return the folder of the run, None before there is one."""
        return next(iter(sorted(self.runs.glob("*"))), None)

    def state(self, generation=0):
        """Return the published state once *generation* runs."""

        def read():
            if self.directory is None or not (self.directory / "state.json").exists():
                assert self.process.poll() is None, self.said()
                return None
            state = json.loads((self.directory / "state.json").read_text())
            return state if state["generation"] >= generation else None

        return wait_until(read, what=f"generation {generation} of {self.folder}")

    def said(self):
        """Return what the agent and its workers wrote to the console."""
        return self.out.read_text() + self.err.read_text()

    def wait_for_output(self, text):
        """Wait until *text* is on the console."""
        wait_until(lambda: text in self.said(), what=f"{text!r} on the console")

    def events(self, kind=None):
        """Return the events in the run's journal, oldest first."""
        lines = [
            json.loads(line)["event"]
            for path in sorted(self.directory.glob("journal/*"))
            for line in whole_lines(path)
        ]
        found = sorted(lines, key=lambda event: event["id"])
        return [event for event in found if kind in {None, event["kind"]}]

    def payloads(self, kind):
        """Return the payloads of the events of one kind."""
        return [event["payload"] for event in self.events(kind)]

    def incidents(self):
        """Return the newest snapshot of each incident."""
        newest = {}
        for incident in self.payloads("incident.recorded"):
            newest[incident["id"]] = max(
                newest.get(incident["id"], incident), incident, key=lambda i: i["rev"]
            )
        return list(newest.values())

    def kill_rank(self, rank, at_step, generation=0):
        """SIGKILL *rank* with the product's own injector."""
        code = warm_popen(
            [
                *(sys.executable, "-m", "gpuops.drill.processes", "--run-dir", str(self.runs)),
                *("--rank", str(rank), "--at-step", str(at_step)),
                *("--generation", str(generation), "--deadline", str(LIMIT_S)),
            ],
            stderr=subprocess.DEVNULL,
        ).wait(LIMIT_S + 20)
        assert code == 0, self.said()

    def signal(self, number=signal.SIGTERM):
        """Signal the agent."""
        self.process.send_signal(number)

    def finish(self, limit_s=LIMIT_S):
        """Return the agent's exit code."""
        return self.process.wait(limit_s)
