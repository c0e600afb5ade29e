"""Many agents on one machine, each a real ``gpuops run`` with one worker without torch."""

import contextlib
import time

from gpuops.control.record import RECORD_KEY, ControlKeys, ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.control.tcp.store import TcpControlStore
from support.cluster_run import TOKEN, ClusterRun
from support.hosts import Loopbacks
from support.ports import free_port

RUN_ID = "crowd"
LONG = {"JOB_STEPS": "100000", "JOB_PAUSE_S": "0.5", "OMP_NUM_THREADS": "1"}


class Watcher:
    """Looks at the run's board from outside, as one more client."""

    def __init__(self, endpoint):
        host, _, port = endpoint.rpartition(":")
        self.board = TcpControlStore(host, int(port), run_key=RUN_ID, token=TOKEN)

    def record(self):
        """Return the record of the run, None where there is none yet."""
        with contextlib.suppress(ControlStoreError, ValueError):
            return ControlRecord.from_bytes(self.board.get(RECORD_KEY).value)
        return None

    def ready(self):
        """Return how many agents would take a seat in the first generation."""
        record = self.record()
        if record is None:
            return 0
        return len(self.board.list(ControlKeys(run_id=record.run_id).ready(0)))


def gather(n_agents, folder, limit_s):
    """Start a run of *n_agents*; return the times of its rendezvous, in seconds.

    ``seated_s`` is from the moment that the last agent said that it is ready to the moment that the
    last one had its seat; ``working_s`` to the first step of the last worker.
    """
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    with (
        Loopbacks(n_agents, folder) as hosts,
        ClusterRun(
            hosts,
            folder,
            "--health-gate=off",
            script="fake_steps.py",
            endpoint=endpoint,
            run_id=RUN_ID,
            env=LONG,
        ) as run,
    ):
        began_s = time.time()
        run.start()
        watcher = Watcher(endpoint)
        with contextlib.closing(watcher.board):
            last_s = _last_ready_s(run, watcher, n_agents, limit_s)
            run.wait(lambda: _runs(watcher), "the rendezvous", limit_s)
            run.wait(lambda: _steppers(run) == n_agents, "the last worker's step", limit_s)
        stepped_s = max(_first_step_s(run))
        # A worker that forks may have made a step before its start is in the journal.
        run.wait(lambda: len(run.events("attempt.started")) == n_agents, "all events", limit_s)
        seated_s = [event["payload"]["seated_us"] / 1e6 for event in run.events("attempt.started")]
        run.enough()
        codes = run.finish(limit_s=limit_s)
        assert set(codes.values()) == {0}, run.said()
        return {
            "agents": n_agents,
            "last_ready_s": round(last_s - began_s, 2),
            "seated_s": round(max(seated_s) - last_s, 2),
            "working_s": round(stepped_s - last_s, 2),
        }


def _last_ready_s(run, watcher, n_agents, limit_s):
    seen = {}

    def look():
        seen.setdefault(watcher.ready(), time.time())
        return max(seen) >= n_agents or _runs(watcher)

    run.wait(look, "all agents", limit_s)
    return seen[max(seen)]


def _runs(watcher):
    record = watcher.record()
    return record is not None and record.phase is RunPhase.RUN


def _steppers(run):
    return len({line.rank for line in run.lines() if line.what == "step"})


def _first_step_s(run):
    """Return when each rank made its first step, as wall time."""
    offset_s = time.time() - time.monotonic()
    first = {}
    for line in run.lines():
        if line.what == "step":
            first.setdefault(line.rank, line.mono_ns / 1e9 + offset_s)
    return first.values()
