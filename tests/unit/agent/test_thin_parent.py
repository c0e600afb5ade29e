"""The small process that starts a killed agent again, with shells in the place of agents."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import is_alive, wait_until

from gpuops.agent.elastic.supervisor import MARK, is_wanted

# Every start writes its process id on a line of its own; each USR1 it hears, a line in `heard`.
AGENT = """
import os, signal, sys, threading
from gpuops.agent.elastic.supervisor import end_with_parent
end_with_parent(os.environ)
folder = sys.argv[1]
def hear(number, frame):
    with open(folder + "/heard", "a") as file: file.write(f"{number}\\n")
for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, hear)
with open(folder + "/pids", "a") as file:
    file.write(f"{os.getpid()} {os.environ['GPUOPS_PARENT_PID']}\\n")
while not os.path.exists(folder + "/end"): threading.Event().wait(0.05)
sys.exit(int(open(folder + "/end").read()))
"""
PARENT = """
import os, sys
from gpuops.agent.elastic import supervisor
sys.exit(supervisor.watch(sys.argv[1:], dict(os.environ), lambda text: print(text, flush=True)))
"""
TASK = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


class Watched:
    """A parent with its agent, in a group of their own as a task of Slurm is."""

    def __init__(self, folder):
        self.folder = folder
        agent = folder / "agent.py"
        agent.write_text(AGENT)
        argv = [sys.executable, "-c", PARENT, sys.executable, str(agent), str(folder)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        self.process = subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def lines(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def agents(self, count):
        """Return the process ids of all starts, once there are *count* of them."""
        wait_until(lambda: len(self.lines("pids")) >= count, what=f"{count} starts")
        return [int(line.split()[0]) for line in self.lines("pids")]

    def end(self, code):
        partial = self.folder / "partial"
        partial.write_text(str(code))
        partial.replace(self.folder / "end")

    def finish(self):
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def watched(tmp_path):
    found = Watched(tmp_path)
    yield found
    if found.process.poll() is None:
        os.killpg(found.process.pid, signal.SIGKILL)
        found.process.wait()
    found.process.stdout.close()


def test_only_a_task_of_srun_has_a_parent_and_the_child_has_no_other():
    assert is_wanted(TASK, 78, 77)
    assert is_wanted({}, 1, 0)
    assert not is_wanted({MARK: "1"}, 7, 1)
    assert not is_wanted(TASK | {MARK: "77"}, 78, 77)
    assert is_wanted(TASK | {MARK: "76"}, 78, 77)  # left over from a run around this one
    for name in TASK:
        assert not is_wanted({key: TASK[key] for key in TASK if key != name}, 78, 77)


@pytest.mark.parametrize("code", [0, 85, 93])
def test_its_exit_code_is_the_agents(watched, code):
    (agent,) = watched.agents(1)
    assert watched.lines("pids") == [f"{agent} {watched.process.pid}"]
    watched.end(code)

    assert watched.finish() == (code, "")


def test_a_killed_agent_starts_again_but_not_for_ever(watched):
    for count in (1, 2, 3, 4):
        os.kill(watched.agents(count)[-1], signal.SIGKILL)

    code, said = watched.finish()
    assert code == 137
    assert len(watched.lines("pids")) == 4
    assert "it starts again (3 of 3 in an hour)" in said
    assert "it stays" in said


def test_another_signals_end_is_the_end(watched):
    os.kill(watched.agents(1)[0], signal.SIGABRT)

    assert watched.finish() == (128 + signal.SIGABRT, "")


def test_a_signal_for_the_parent_alone_reaches_the_agent(watched):
    watched.agents(1)
    watched.process.send_signal(signal.SIGUSR1)

    wait_until(lambda: watched.lines("heard") == [str(int(signal.SIGUSR1))], what="the signal")
    watched.end(0)
    assert watched.finish()[0] == 0


def test_a_signal_for_the_whole_group_reaches_the_agent_once(watched):
    watched.agents(1)
    os.killpg(watched.process.pid, signal.SIGUSR1)
    wait_until(lambda: watched.lines("heard"), what="the signal")
    # SIGTERM to the parent alone is passed on after the first one has been dealt with.
    watched.process.send_signal(signal.SIGTERM)
    wait_until(lambda: str(int(signal.SIGTERM)) in watched.lines("heard"), what="the second")

    assert watched.lines("heard") == [str(int(n)) for n in (signal.SIGUSR1, signal.SIGTERM)]
    watched.end(85)
    assert watched.finish()[0] == 85


def test_an_agent_that_was_told_to_end_is_not_started_again(watched):
    (agent,) = watched.agents(1)
    watched.process.send_signal(signal.SIGTERM)
    wait_until(lambda: watched.lines("heard"), what="the signal")
    os.kill(agent, signal.SIGKILL)

    assert watched.finish() == (137, "")


def test_agent_and_listener_end_with_a_parent_that_is_killed(watched):
    watched.agents(1)
    children = Path(f"/proc/{watched.process.pid}/task/{watched.process.pid}/children")
    started = [int(word) for word in children.read_text().split()]
    assert len(started) == 2
    os.kill(watched.process.pid, signal.SIGKILL)
    watched.process.wait()

    wait_until(lambda: not any(map(is_alive, started)), what="the end of the children")


def test_the_parent_imports_no_torch():
    code = "import sys, gpuops.cli.run; print(sorted({'torch', 'sqlalchemy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
