"""Under Slurm the agent is the child of a small process that starts it again when it was killed.

slurmstepd ends a step's processes on a node when the task there ends, so an agent that the kernel's
memory killer took could not come back. This parent imports no torch and holds nothing. So it is for
process 1 of a container, which ends with it; there the parent also reaps the orphans.

Signals: what slurmstepd signals depends on ProctrackType. With ``cgroup`` it is the task alone,
this parent (SignalChildrenProcesses in cgroup.conf); with ``linuxproc`` and ``pgid`` every process
of the step, the agent among them, and passing the signal on would be a second one, which an agent
obeys at once. So an idle listener, a fork of this process, says whether others were signalled too.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

MARK = "GPUOPS_PARENT_PID"
RESTARTS_MAX, WINDOW_S = 3, 3600.0
PASSED_ON = frozenset(
    (
        *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2),
    )
)
# After these a killed agent stays dead: Slurm's SIGKILL follows its SIGTERM.
_ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_OTHERS_S = 0.3  # slurmstepd signals one process after the other
_PARENT_CHECK_S = 1.0

_PR_SET_PDEATHSIG = 1  # prctl(2); not named in Python's standard library

Say = Callable[[str], None]


def is_wanted(env: Mapping[str, str], pid: int, parent_pid: int) -> bool:
    """Say whether process *pid* should become the parent: a task of `srun`, or a container's first.

    The agent that the parent has started should not.
    """
    is_task = all(env.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"))
    return (is_task or pid == 1) and env.get(MARK) != str(parent_pid)


def end_with_parent(env: Mapping[str, str]) -> None:
    """Have the kernel kill this process when its thin parent ends, if it has one.

    With ``proctrack/linuxproc`` an orphan is no longer of Slurm's step, and would train on.
    """
    parent = env.get(MARK)
    if parent is None or parent != str(os.getppid()):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if parent != str(os.getppid()):
        os._exit(128 + signal.SIGKILL)  # it ended before the kernel was asked


def watch(argv: Sequence[str], env: Mapping[str, str], say: Say) -> int:
    """Run *argv* until it ends otherwise than by SIGKILL; return its exit code (128 + a signal).

    It is started again at most `RESTARTS_MAX` times in `WINDOW_S`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    listener = _Listener()
    try:
        return _watch(argv, {**env, MARK: str(os.getpid())}, listener, say)
    finally:
        listener.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(argv: Sequence[str], env: Mapping[str, str], listener: "_Listener", say: Say) -> int:
    killed_s: deque[float] = deque()
    while True:
        status, is_ending = _one_agent(_spawn(argv, env), listener)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL or is_ending:
            return 128 + number
        now_s = time.monotonic()
        while killed_s and now_s - killed_s[0] > WINDOW_S:
            killed_s.popleft()
        if len(killed_s) >= RESTARTS_MAX:
            say(f"the agent was killed again, {RESTARTS_MAX} times before within an hour: it stays")
            return 128 + number
        killed_s.append(now_s)
        say(f"the agent was killed; it starts again ({len(killed_s)} of {RESTARTS_MAX} in an hour)")


def _spawn(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Start *argv* with no signal blocked."""
    return os.posix_spawn(argv[0], list(argv), dict(env), setsigmask=())


def _one_agent(pid: int, listener: "_Listener") -> tuple[int, bool]:
    """Wait for the end of *pid*, passing signals on; return its status, and if we ended it."""
    is_ending = False
    while True:
        found = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        number = signal.Signals(found.si_signo)
        if number is signal.SIGCHLD:
            ended, status = os.waitpid(-1, os.WNOHANG)
            while ended not in {0, pid}:  # an orphan
                ended, status = os.waitpid(-1, os.WNOHANG)
            if ended:
                return status, is_ending
            continue
        is_ending = is_ending or number in _ENDING
        if not listener.has_seen(number):
            os.kill(pid, number)  # not reaped yet: the process is there, or a zombie


class _Listener:
    """A process in the same step and group that takes every signal and reports which."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._read)
                _listen(write, parent)
            finally:
                os._exit(0)
        os.close(write)
        os.set_blocking(self._read, False)

    def has_seen(self, number: signal.Signals) -> bool:
        """Say whether *number* has come to the listener as well, or comes in a moment."""
        end_s = time.monotonic() + _OTHERS_S
        while (left_s := end_s - time.monotonic()) > 0:
            if not select.select([self._read], [], [], left_s)[0]:
                return False
            numbers = os.read(self._read, 64)
            if number in numbers:
                return True
            if not numbers:  # the listener was killed
                return False
        return False

    def close(self) -> None:
        """End the listener."""
        os.close(self._read)
        with suppress(ProcessLookupError, ChildProcessError):  # killed, and reaped as an orphan
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _listen(pipe: int, parent: int) -> None:
    """Write the number of each signal into *pipe*, for as long as *parent* lives."""
    while os.getppid() == parent:
        found = signal.sigtimedwait(PASSED_ON, _PARENT_CHECK_S)
        if found is not None:
            os.write(pipe, bytes([found.si_signo]))


def command_line() -> list[str]:
    """Return the command that starts this very program once more."""
    return [sys.executable, *sys.orig_argv[1:]]
