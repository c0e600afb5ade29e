"""Real two-rank gloo jobs of which one rank stops making progress: found, named, told apart."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from support.monitors import evidence_of, report_of
from support.runs import is_alive, wait_until

import gpuops.worker.shim
from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.elastic.workers import RingReader, Worker
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.evidence import (
    LONG_SAMPLES_S,
    EvidenceCollector,
    EvidenceTarget,
    RankFacts,
    SystemEvidenceReader,
)
from gpuops.agent.monitors.hang.monitor import HangMonitor
from gpuops.host.clock import SystemClock
from gpuops.model import Entity, EntityKind, FailureClass, Role

SHIM = gpuops.worker.shim.__file__
TOOLS = str(Path(sys.executable).parent)
JOB = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist

def lost():
    how = sys.argv[1]
    if how == "sleep":
        time.sleep(600)
    elif how == "lock":
        from torch.utils.file_baton import FileBaton
        open("lock", "w").close()
        FileBaton("lock").wait()
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        # Locked twice; unlike a sleep no signal ends that.
        mutex = ctypes.create_string_buffer(64)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    elif how == "kernel":
        # The parent waits in state D until its vforked child has opened the other end.
        os.mkfifo("never")
        action = (os.POSIX_SPAWN_OPEN, 0, "never", os.O_RDONLY, 0)
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[action])
    elif how == "deadlock":
        threading.Thread(target=upload, daemon=True).start()
        dist.all_reduce(torch.ones(1), group=others)

def upload():
    with open("/dev/null", "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))
            time.sleep(0.02)

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
others = dist.new_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10**9):
    if rank == 1 and step == 8:
        lost()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


class Job:
    """Two workers under the shim, and a sentry as the agent uses it."""

    def __init__(self, folder, how, reader=None, timeout_s=3.0, clock=None):
        (folder / "job.py").write_text(JOB)
        self.processes = [self._start(folder, rank, how) for rank in (0, 1)]
        self.sentry = HangMonitor(clock or SystemClock(), timeout_s, {"PATH": TOOLS}, reader=reader)
        self.workers = [
            Worker(
                rank=rank,
                local_rank=rank,
                pid=process.pid,
                ring=RingReader(folder / f"ring{rank}"),
                files=RankFiles(stacks=folder / f"stacks{rank}"),
            )
            for rank, process in enumerate(self.processes)
        ]
        watched = MonitoredAttempt(generation=0, node="n1", workers=self.workers, folder=folder)
        self.sentry.begin(watched)

    def _start(self, folder, rank, how):
        return subprocess.Popen(
            [sys.executable, SHIM, "job.py", how],
            cwd=folder,
            env={
                "PATH": "/usr/bin:/bin",
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "GPUOPS_GENERATION": "0",
                "GPUOPS_RING": str(folder / f"ring{rank}"),
                "GPUOPS_STACKS": str(folder / f"stacks{rank}"),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sentry.close()
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(30)
        for worker in self.workers:
            worker.ring.close()

    def feed(self):
        """Hand the new heartbeats on, and return them."""
        beats = {worker.rank: worker.ring.poll() for worker in self.workers}
        self.sentry.feed(beats)
        return [beat for found in beats.values() for beat in found]

    def report(self):
        """Feed and look until there is a report."""

        def look():
            self.feed()
            return report_of(self.sentry)

        return wait_until(look, limit_s=90, what="a report")


def collects():
    return any(thread.name == "gpuops-evidence" for thread in threading.enumerate())


class FastClock(SystemClock):
    """Goes on by a second more at each poll."""

    ahead_ns = 0

    def mono_ns(self):
        return super().mono_ns() + self.ahead_ns


needs_pyspy = pytest.mark.skipif(not shutil.which("py-spy", path=TOOLS), reason="no py-spy")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "failure_class", "says", "blames"),
    [
        ("sleep", FailureClass.HANG_NO_PROGRESS, "is in lost (", False),
        pytest.param(
            *("lock", FailureClass.HANG_NO_PROGRESS, "a lock of torch's JIT builds", False),
            marks=pytest.mark.soak,
        ),
        ("stop", FailureClass.HANG_STOPPED, "is stopped by a signal (state T)", False),
        pytest.param(
            *("gil", FailureClass.HANG_GIL_HELD, "its main thread holds the interpreter", False),
            marks=needs_pyspy,
        ),
        ("kernel", FailureClass.HANG_D_STATE, "waits inside the kernel", True),
    ],
)
def test_the_rank_that_holds_the_other_up_is_named_and_its_state_told(
    tmp_path, how, failure_class, says, blames
):
    with Job(tmp_path, how) as job:
        report = job.report()
        evidence = evidence_of(job.sentry, SystemClock(), 5.0)

    node = (Entity(EntityKind.NODE, "n1"),) if blames else ()
    assert report.culprits == (Entity(EntityKind.RANK, "1"), *node), report.how
    assert (report.failure_class, report.blames_node) == (failure_class, blames)
    assert report.how.startswith("rank 1 (last step 8): ")
    assert says in report.how
    first, second = report.ends
    assert (first.role, second.role) == (Role.SYMPTOM, Role.ROOT)
    assert first.failure_class is FailureClass.HANG_COLLECTIVE, evidence
    assert any("backward" in line or "all_reduce" in line for line in evidence[1].lines)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["sleep", "gil"])
def test_without_pyspy_the_workers_own_dumps_name_the_rank_and_claim_no_more(tmp_path, how):
    reader = SystemEvidenceReader("", next_to=tmp_path)
    with Job(tmp_path, how, reader) as job:
        report = job.report()
        evidence = evidence_of(job.sentry, SystemClock(), 5.0)

    assert report.culprits == (Entity(EntityKind.RANK, "1"),)
    assert report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert "lost (" in evidence[0].lines[0]
    assert evidence[0].path == str(tmp_path / "stacks1")


@pytest.mark.torch
def test_a_thread_that_uploads_excuses_no_deadlock(tmp_path):
    """Rank 1 is in a collective that rank 0 never joins, and each would wait for the other."""
    clock = FastClock()
    with Job(tmp_path, "deadlock", timeout_s=None, clock=clock) as job:
        wait_until(
            lambda: [beat.step for beat in job.feed() if beat.step == 8], what="the last step"
        )
        begun_ns, report = clock.mono_ns(), None
        while report is None:
            assert clock.mono_ns() - begun_ns < 700e9, "an hour, as for who works"
            job.feed()
            if not collects():
                clock.ahead_ns += 10**9
            report = report_of(job.sentry)
            time.sleep(0.01)

    assert report.failure_class is FailureClass.HANG_COLLECTIVE, report.how
    assert report.culprits == ()


def test_who_does_not_say_that_sigusr2_is_for_stacks_is_left_alone(tmp_path):
    # It would die of it.
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        reader = SystemEvidenceReader("")
        target = EvidenceTarget(
            rank=0, local_rank=0, pid=sleeper.pid, stacks=tmp_path / "s", dumps=True
        )
        collector = EvidenceCollector([target], reader, {})
        collector.start()
        assert collector.wait(30)
        lived = is_alive(sleeper.pid)
        sleeper.kill()

    assert lived
    assert isinstance(collector.facts[0], RankFacts)
    assert not collects()


# Dumps one stack, and records that the main thread was elsewhere five times in a hundred.
SPIES = """#!/bin/sh
[ $1 = dump ] && exit 1
while [ $1 != --output ]; do shift; done
printf 'thread (%d);main (/t.py:1) 190\\nthread (%d): MainThread;main (/t.py:2) 10\\n' $4 $4 > $2
printf 'thread (1): pump;turn (/t.py:9) 700\\n' >> $2
"""


def test_stacks_are_recorded_between_the_samples(tmp_path, monkeypatch):
    spies = tmp_path / "py-spy"
    spies.write_text(SPIES)
    spies.chmod(0o755)
    reader = SystemEvidenceReader(str(tmp_path))
    target = EvidenceTarget(rank=0, local_rank=0, pid=os.getpid())
    collector = EvidenceCollector([target], reader, {}, LONG_SAMPLES_S, pause=lambda _s: None)
    collector.start()
    assert collector.wait(60)

    assert collector.facts[0].elsewhere == pytest.approx(0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert reader.record([target]) is None


ANSWERS = """
import faulthandler, os, signal, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
faulthandler.register(signal.SIGUSR2, open(sys.argv[1], "a"))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_dump_that_is_there_before_the_asker_runs_again_counts(tmp_path):
    # On one processor the worker is often let in as soon as it gets the signal.
    processors = os.sched_getaffinity(0)
    one = min(processors)
    stacks = tmp_path / "stacks"
    command = [sys.executable, "-c", ANSWERS, str(stacks), str(one)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout.readline() == b"ready\n"
        target = EvidenceTarget(rank=0, local_rank=0, pid=child.pid, stacks=stacks, dumps=True)
        os.sched_setaffinity(0, {one})
        try:
            dumps = [
                SystemEvidenceReader("", next_to=tmp_path).dump([target], 30.0) for _ in range(20)
            ]
        finally:
            os.sched_setaffinity(0, processors)
            child.kill()

    assert [sorted(dump) for dump in dumps] == [[0]] * 20


def test_a_process_that_is_no_child_of_ours_is_never_signalled(tmp_path):
    target = EvidenceTarget(
        rank=0, local_rank=0, pid=os.getppid(), stacks=tmp_path / "s", dumps=True
    )

    assert SystemEvidenceReader("").dump([target], 0.1) == {}
