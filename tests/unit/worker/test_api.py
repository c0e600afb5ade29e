"""What a script says to its agent and asks it, in processes that really run under the shim."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import wait_until

import gpuops.worker.shim
from gpuops.agent.elastic.workers import RingReader
from gpuops.wire.ring import STEP_UNKNOWN, AgentRequest, StepSource, WorkerFlag, WorkerPhase

END_S = 280  # importing torch and its compiler, on a busy machine
pytestmark = pytest.mark.timeout(300)

SHIM = gpuops.worker.shim.__file__
WAIT = """
import sys, time, gpuops
def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)
"""


class Worker:
    """A script under the shim, with a ring as its agent would read it."""

    def __init__(self, tmp_path, body, command=(sys.executable, SHIM, "job.py"), **env):
        (tmp_path / "job.py").write_text(WAIT + body)
        self.reader = RingReader(tmp_path / "ring")
        self.process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={
                "PATH": "/usr/bin:/bin",
                "RANK": "0",
                "GPUOPS_GENERATION": "0",
                "GPUOPS_RING": str(tmp_path / "ring"),
                "GPUOPS_STACKS": str(tmp_path / "stacks.txt"),
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.reader.close()

    def end(self):
        """Return the exit code and what was said."""
        said, _ = self.process.communicate(timeout=END_S)
        return self.process.returncode, said

    def beats(self, count):
        """Return the next beats, at least *count*."""
        found = []

        def enough():
            found.extend(self.reader.poll())
            return len(found) >= count

        wait_until(enough, what=f"{count} beats")
        return found


def told(beats):
    return [(b.phase, b.step, b.name) for b in beats]


def test_phases_and_steps_are_told_in_order(tmp_path):
    body = """
with gpuops.phase("restore"):
    pass
gpuops.progress(7)
with gpuops.phase("eval"):
    with gpuops.phase("save"):
        pass
gpuops.phase("upload")
gpuops.progress(8)
"""
    with Worker(tmp_path, body) as worker:
        assert worker.end() == (0, "")
        beats = worker.reader.poll()

    assert told(beats) == [
        (WorkerPhase.RESTORE, STEP_UNKNOWN, "restore"),
        (WorkerPhase.RESUMED, STEP_UNKNOWN, ""),
        (WorkerPhase.STEPPING, 7, ""),
        (WorkerPhase.EVAL, 7, "eval"),
        (WorkerPhase.CHECKPOINT, 7, "save"),
        (WorkerPhase.EVAL, 7, "eval"),
        (WorkerPhase.RESUMED, 7, ""),
        (WorkerPhase.OTHER, 7, "upload"),
        (WorkerPhase.STEPPING, 8, ""),
        (WorkerPhase.FINISHED, 8, ""),
    ]
    assert beats[2].source is StepSource.REPORTED


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        ("raise SystemExit", WorkerPhase.FINISHED),
        ("raise SystemExit(3)", WorkerPhase.RAISED),
        ("raise ValueError", WorkerPhase.RAISED),
    ],
)
def test_the_last_beat_says_how_the_program_came_to_its_end(tmp_path, body, phase):
    with Worker(tmp_path, body) as worker:
        worker.end()
        assert told(worker.reader.poll()) == [(phase, STEP_UNKNOWN, "")]


ODD = """
class Odd:
    device = "cuda:0"
    def __index__(self): raise AssertionError("a device was read")
    def __str__(self): raise ValueError("no name")
for step in (None, "x", -1, 1.5, Odd(), object()):
    assert gpuops.progress(step, tokens=step) is None
gpuops.progress(2**80)
with gpuops.phase("x" * 300): pass
with gpuops.phase("\u00e9" * 300): pass
with gpuops.phase("\\n"): pass
with gpuops.phase(Odd()): pass
gpuops.progress(True)
assert gpuops.should_stop() is False
"""


@pytest.mark.parametrize("disabled", ["1", "0"])
def test_nothing_raises_whatever_it_is_given(tmp_path, disabled):
    with Worker(tmp_path, ODD, GPUOPS_DISABLE=disabled) as worker:
        assert worker.end() == (0, "")
        beats = worker.reader.poll()

    if disabled == "0":
        assert (beats[0].phase, beats[0].step) == (WorkerPhase.STEPPING, 2**63 - 1)
        assert [b.name for b in beats[1::2]][:3] == ["x" * 16, "\u00e9" * 8, "?"]


def test_tokens_of_a_step_are_told_and_what_is_no_number_of_them_is_named_once(tmp_path):
    body = """
class Device:
    device = "cuda:0"
    def __index__(self): raise AssertionError("a device was read")
gpuops.progress(1, tokens=4096)
for tokens in (-1, 1.5, "many", None, Device()):
    gpuops.progress(2, tokens=tokens)
gpuops.progress(2, tokens=100)
gpuops.progress(3, tokens=2**80)
gpuops.progress(4)
"""
    with Worker(tmp_path, body) as worker:
        code, said = worker.end()
        beats = worker.reader.poll()

    assert code == 0
    assert said == (
        "gpuops: gpuops.progress(step, tokens=a negative number): tokens are ignored, steps are "
        "not; give a whole number from 0 on that is on the host\n"
    )
    steps = [(b.step, b.tokens) for b in beats if b.phase is WorkerPhase.STEPPING]
    # What is reported of a step again is of the next one: each beat is written once.
    assert steps == [(1, 4096), *[(2, 0)] * 6, (3, 2**64 - 1), (4, 0)]


def test_without_an_agent_they_do_nothing_and_cost_no_import_before_they_are_used(tmp_path):
    code = (
        "import sys, gpuops\n"
        "assert not [m for m in sys.modules if m.startswith('gpuops.')]\n"
        "gpuops.progress(1); gpuops.phase('eval')\n"
        "with gpuops.phase('eval'): print(gpuops.should_stop())\n"
        "try: gpuops.nothing\nexcept AttributeError as e: print(e)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout == "False\nmodule 'gpuops' has no attribute 'nothing'\nFalse\n", done.stderr


def test_a_forked_child_and_threads(tmp_path):
    body = """
import os, signal, threading
gpuops.progress(1)
pid = os.fork()
if pid == 0:
    gpuops.progress(99)
    with gpuops.phase("eval"): pass
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os._exit(0 if default and not gpuops.should_stop() else 1)
assert os.waitpid(pid, 0)[1] == 0
def work(base):
    for n in range(200):
        gpuops.progress(base + n)
threads = [threading.Thread(target=work, args=(1000 * k,)) for k in (1, 2, 3)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    with Worker(tmp_path, body) as worker:
        assert worker.end() == (0, "")
        beats = worker.reader.poll()

    assert [b.seq for b in beats] == list(range(1, 603))
    assert len({b.step for b in beats}) == 601
    assert 99 not in {b.step for b in beats}


def test_a_script_in_a_shell_wrapper_beats_if_it_is_started_with_the_shim(tmp_path):
    root = str(Path(SHIM).parents[2])
    inner = f"PYTHONPATH={root} {sys.executable} -m gpuops.worker.shim job.py; exit $?"
    command = (sys.executable, SHIM, "--exec", "/bin/sh", "-c", inner)
    with Worker(tmp_path, "gpuops.progress(7)\nsys.exit(3)\n", command) as worker:
        assert worker.end() == (3, "")
        beats = worker.reader.poll()

    assert [(b.step, b.phase) for b in beats] == [
        (7, WorkerPhase.STEPPING),
        (7, WorkerPhase.RAISED),
    ]


STOPPING = """
gpuops.progress(1)
for step in range(2, 10**9):
    if gpuops.should_stop():
        break
    gpuops.progress(step)
    time.sleep(0.01)
print("left at", step)
"""


def test_a_drain_is_obeyed_and_the_script_has_asked(tmp_path):
    with Worker(tmp_path, STOPPING) as worker:
        worker.beats(3)
        assert WorkerFlag.STOP_POLLED in worker.reader.flags
        assert WorkerFlag.STOP_RETURNED not in worker.reader.flags
        assert worker.reader.request(AgentRequest.DRAIN)
        code, said = worker.end()
        flags = worker.reader.flags

    assert code == 0
    assert said.startswith("left at")
    assert WorkerFlag.STOP_RETURNED | WorkerFlag.PROGRAM_ENDED in flags


def test_a_drain_at_a_step_is_obeyed_at_that_step(tmp_path):
    with Worker(tmp_path, STOPPING) as worker:
        seen = worker.beats(3)[-1].step
        worker.reader.request(AgentRequest.DRAIN, stop_step=seen + 300)
        code, said = worker.end()
        last = worker.reader.poll()[-1]

    assert (code, said) == (0, f"left at {seen + 301}\n")
    assert (last.phase, last.step) == (WorkerPhase.FINISHED, seen + 300)


def test_a_request_made_before_there_is_a_ring_reaches_the_worker(tmp_path):
    reader = RingReader(tmp_path / "ring")
    assert not reader.request(AgentRequest.DRAIN)
    with Worker(tmp_path, STOPPING) as worker:
        wait_until(reader.poll, what="a beat")
        assert worker.end() == (0, worker.end()[1])
    reader.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_worker_itself_is_told_to_the_agent_and_counts_in_the_end(tmp_path, number):
    with Worker(tmp_path, STOPPING) as worker:
        worker.beats(3)
        assert WorkerFlag.HANDLES_SIGTERM | WorkerFlag.HANDLES_SIGUSR1 in worker.reader.flags
        worker.process.send_signal(number)
        wait_until(lambda: WorkerFlag.SIGNALLED in worker.reader.flags, what="the flag")
        code, said = worker.end()

    assert code == 0
    assert said.startswith("left at")


def test_the_agents_answer_to_a_signal_goes_before_the_signal(tmp_path):
    with Worker(tmp_path, STOPPING) as worker:
        worker.beats(3)
        worker.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: WorkerFlag.SIGNALLED in worker.reader.flags, what="the flag")
        stop = worker.beats(1)[-1].step + 500  # five seconds: longer than without an answer
        worker.reader.request(AgentRequest.DRAIN, stop_step=stop)

        assert worker.end() == (0, f"left at {stop + 1}\n")


def test_sigterm_ends_a_worker_whose_group_is_being_ended(tmp_path):
    with Worker(tmp_path, STOPPING) as worker:
        worker.beats(3)
        worker.reader.request(AgentRequest.DRAIN, stop_step=10**12)
        worker.process.send_signal(signal.SIGTERM)
        worker.beats(20)  # it goes on: the agent has spoken
        worker.reader.request(AgentRequest.TERMINATE)
        worker.process.send_signal(signal.SIGTERM)
        # It may see the request before the signal.
        assert worker.end()[0] in {-signal.SIGTERM, 0}


OWN = """
import signal
{early}
gpuops.progress(0)
{late}
for step in range(1, 10**9):
    gpuops.progress(step)
    time.sleep(0.001)
"""
TAKE = "signal.signal(signal.SIGTERM, lambda *_: sys.exit('my own'))"


@pytest.mark.parametrize(
    ("early", "late"), [(TAKE, ""), ("", TAKE)], ids=["before the first step", "later"]
)
def test_a_scripts_own_handler_wins_and_the_agent_is_told(tmp_path, early, late):
    with Worker(tmp_path, OWN.format(early=early, late=late)) as worker:
        worker.beats(40)
        assert WorkerFlag.HANDLES_SIGTERM not in worker.reader.flags
        assert WorkerFlag.HANDLES_SIGUSR1 in worker.reader.flags
        worker.process.send_signal(signal.SIGTERM)

        assert worker.end() == (1, "my own\n")


def test_a_script_that_never_beat_is_not_said_to_have_no_handler(tmp_path):
    body = f"import signal\n{TAKE}\nprint('up', flush=True)\ntime.sleep(60)"
    with Worker(tmp_path, body) as worker:
        assert worker.process.stdout.readline() == "up\n"
        worker.reader.poll()

        assert worker.reader.flags == WorkerFlag.HANDLES_SIGUSR2


def test_a_child_that_the_script_starts_can_be_ended_with_sigterm(tmp_path):
    body = """
import multiprocessing, signal, subprocess
if __name__ == "__main__":
    for way in ("fork", "spawn"):
        child = multiprocessing.get_context(way).Process(target=time.sleep, args=(60,))
        child.start(); child.terminate(); child.join(30)
        print(child.exitcode)
    child = subprocess.Popen(["sleep", "60"]); child.terminate(); print(child.wait(30))
"""
    with Worker(tmp_path, body) as worker:
        assert worker.end() == (0, "-15\n-15\n-15\n")


def test_without_a_ring_no_handler_is_installed(tmp_path):
    body = "import signal\nprint(signal.getsignal(15) is signal.SIG_DFL, signal.getsignal(10) is 0)"
    with Worker(tmp_path, body.replace("is 0", "== 0"), GPUOPS_RING="") as worker:
        assert worker.end() == (0, "True True\n")


def test_sigusr2_writes_the_stacks_to_their_own_file(tmp_path):
    with Worker(tmp_path, "gpuops.progress(1)\ndef lost():\n    time.sleep(60)\nlost()") as worker:
        worker.beats(1)
        assert WorkerFlag.HANDLES_SIGUSR2 in worker.reader.flags
        worker.process.send_signal(signal.SIGUSR2)
        stacks = tmp_path / "stacks.txt"
        wait_until(lambda: "in <module>" in stacks.read_text(), what="a dump")

    assert "in lost" in stacks.read_text()
    assert stacks.stat().st_mode & 0o777 == 0o600


@pytest.mark.torch
def test_a_compiled_step_may_hold_all_of_it(tmp_path):
    body = """
import torch
@torch.compile(backend="eager", fullgraph=True)
def step(x):
    gpuops.progress(3, tokens=5)
    with gpuops.phase("eval"):
        x = x + 1
    return x * 2 if gpuops.should_stop() else x
print(step(torch.ones(1)).item())
"""
    with Worker(tmp_path, body) as worker:
        assert worker.end() == (0, "2.0\n")


@pytest.mark.parametrize(
    ("end", "code", "has_failed"),
    [("pass", 0, False), ("sys.exit(0)", 0, False), ("sys.exit(3)", 3, True), ("1 / 0", 1, True)],
)
def test_at_its_exit_a_program_knows_whether_it_has_failed(tmp_path, end, code, has_failed):
    body = f"""
import atexit
from gpuops.worker import api
atexit.register(lambda: print(api.has_failed()))
{end}
"""
    with Worker(tmp_path, body) as worker:
        returned, said = worker.end()

    assert (returned, said.splitlines()[-1]) == (code, str(has_failed))


@pytest.mark.torch
def test_a_reported_step_goes_before_the_optimizers(tmp_path):
    body = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
batches = iter(torch.utils.data.DataLoader(torch.ones(2, 2)))
def step():
    model(next(batches)).sum().backward(); optimizer.step()
step(); gpuops.progress(500); step(); gpuops.progress(501)
"""
    with Worker(tmp_path, body) as worker:
        assert worker.end() == (0, "")
        beats = [b for b in worker.reader.poll() if b.phase is WorkerPhase.STEPPING]

    assert [(b.step, b.source.name) for b in beats] == [
        (1, "OPTIMIZER_STATE"),
        (500, "REPORTED"),
        (500, "REPORTED"),
        (501, "REPORTED"),
    ]
    assert [b.optimizer_calls for b in beats] == [1, 1, 2, 2]
    # The first optimizer step of both has its times; the report has them where it has the step.
    assert [b.data_us > 0 and b.optimizer_us > 0 for b in beats] == [True, False, False, True]
