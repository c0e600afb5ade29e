"""A worker dies with its agent: an orphan would go on training, and hold its GPU, unsupervised."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2); not named in Python's standard library


def die_with_parent(agent_pid: int | None) -> None:
    """Ask the kernel for SIGKILL at the parent's death; end now if the agent is dead already.

    The kernel forgets parents that died before the call (prctl(2)), hence the look afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if agent_pid is not None and os.getppid() != agent_pid and not _alive(agent_pid):
        os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
