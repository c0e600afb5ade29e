"""The injector does what it says: this rank, at this step of this generation, and only that."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from support.runs import is_alive, wait_until

from gpuops.drill.find import identify, read_states, send
from gpuops.drill.processes import StepTrigger, main
from gpuops.wire.ring import (
    RING_BYTES,
    STEP_UNKNOWN,
    Beat,
    RingHeader,
    StepSource,
    WorkerPhase,
    write_beat,
    write_header,
)


class FakeRun:
    """A run directory with a sleeping process for its one rank."""

    def __init__(self, parent, *, name="20260101T000000Z-a-00000001", generation=0):
        self.folder = parent / name
        self.rings = parent / f"rings-{name}"
        self.folder.mkdir(parents=True)
        self.rings.mkdir()
        self.generation = generation
        self.lock = (self.folder / "lock").open("w")  # by which its agent, this process, is known
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.ring = bytearray(RING_BYTES)
        write_header(self.ring, RingHeader(3, generation, self.process.pid, 1))

    def publish(self, *, step=None, seq=1, phase="running", pid=None):
        if step is not None:
            beat = Beat(seq, step, 1, WorkerPhase.STEPPING, StepSource.OPTIMIZER_STATE, seq)
            write_beat(self.ring, beat)
        (self.rings / "rank3.ring").write_bytes(self.ring)
        state = {
            "run_id": "r1",
            "node": "n0",
            "agent_pid": os.getpid(),
            "generation": self.generation,
            "phase": phase,
            "pids": {"3": pid or self.process.pid},
            "ring_dir": str(self.rings),
        }
        (self.folder / "state.json").write_text(json.dumps(state))
        return self

    def end(self):
        self.process.kill()
        self.process.wait()
        self.lock.close()


@pytest.fixture
def runs(tmp_path):
    made = []

    def make(**options):
        made.append(FakeRun(tmp_path / "runs", **options))
        return made[-1]

    make.parent = tmp_path / "runs"
    yield make
    for run in made:
        run.end()


def inject(directory, step, deadline=5, generation=0):
    words = ["--run-dir", str(directory), "--rank", "3", "--at-step", str(step)]
    return main([*words, "--generation", str(generation), "--deadline", str(deadline)])


def test_a_rank_at_its_step_is_killed(runs, capsys):
    run = runs().publish(step=7)

    assert inject(run.folder, 7) == 0
    assert run.process.wait(60) == -9
    assert "sent SIGKILL to rank 3" in capsys.readouterr().err


def test_below_the_step_nothing_happens_before_the_deadline(runs, capsys):
    run = runs().publish(step=6)

    assert inject(run.folder, 7, deadline=0.2) == 1
    assert is_alive(run.process.pid)
    assert "was not at step 7" in capsys.readouterr().err


def test_it_waits_for_the_run_and_for_the_step(runs):
    started = threading.Event()
    codes = []

    def wait_and_kill():
        started.set()
        codes.append(inject(runs.parent, 5, deadline=20))

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    started.wait()
    run = runs().publish(step=1)
    end = time.monotonic() + 20
    for number in range(2, 6):
        run.publish(step=number, seq=number)
    thread.join(max(0.0, end - time.monotonic()))

    assert codes == [0]
    assert run.process.wait(60) == -9


def test_where_steps_are_unknown_beats_count(runs):
    run = runs()
    for seq in range(1, 5):
        run.publish(step=STEP_UNKNOWN, seq=seq)

    assert inject(run.folder, 5, deadline=0.2) == 1
    assert inject(run.folder, 4) == 0


@pytest.mark.parametrize("wrong", [{"generation": 1}, {"phase": "restarting"}])
def test_another_generation_or_phase_is_left_alone(runs, wrong):
    run = runs().publish(step=9, phase=wrong.get("phase", "running"))

    assert inject(run.folder, 5, deadline=0.2, generation=wrong.get("generation", 0)) == 1
    assert is_alive(run.process.pid)


def test_a_ring_of_another_process_kills_no_stranger(runs):
    stranger = runs(name="20250101T000000Z-b-00000002")
    run = runs().publish(step=9, pid=stranger.process.pid)

    assert inject(run.folder, 5, deadline=0.2) == 1
    assert is_alive(stranger.process.pid)
    assert is_alive(run.process.pid)


def test_a_run_that_names_any_process_as_its_rank_kills_none(runs, capsys):
    """The exploit: root ends the ranks of a folder whose files a user has written."""
    run = runs()
    code = (
        "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    )
    between = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    stranger = int(between.stdout.readline())
    write_header(run.ring, RingHeader(3, 0, stranger, 1))
    run.publish(step=9, pid=stranger)

    assert inject(run.folder, 5, deadline=0.3) == 1
    assert (
        "is not rank 3: the agent did not start it; nothing was touched" in capsys.readouterr().err
    )
    assert is_alive(stranger)
    os.kill(stranger, signal.SIGKILL)
    between.communicate()


def test_a_run_without_an_agent_of_ours_is_left_alone(runs, capsys):
    run = runs()
    run.lock.close()
    run.publish(step=9)

    assert inject(run.folder, 5, deadline=0.3) == 1
    assert "it has no file of this run open; nothing was touched" in capsys.readouterr().err
    assert is_alive(run.process.pid)


def test_a_pid_that_was_used_again_is_not_killed(runs):
    run = runs()
    seen = identify(run.process.pid)

    assert not send(replace(seen, start_ticks=seen.start_ticks + 1), signal.SIGKILL)
    assert is_alive(run.process.pid)
    assert send(seen, signal.SIGKILL)
    wait_until(lambda: not is_alive(run.process.pid))


def test_of_several_runs_the_newest_counts(runs):
    runs(name="20250101T000000Z-old-00000001").publish(step=1)
    newest = runs(name="20260101T000000Z-new-00000002").publish(step=2)

    (state,) = read_states(runs.parent)
    assert state.ring_dir == newest.rings


def test_arguments_that_make_no_sense_end_with_64(capsys):
    assert main(["--rank", "x"]) == 64
    assert "invalid int value" in capsys.readouterr().err
    assert StepTrigger(rank=0, at_step=1).generation == 0
