"""Processes that carry a variable in the environment that they were started with.

Whatever a worker starts inherits it, also what leaves its process group, its session and its
parent, as a badly written data service does; nobody else has it.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

_PASSES = 3  # what is found may be starting another one just then


def kill_env_tagged(name: str, value: str, root: Path = Path("/")) -> list[int]:
    """SIGKILL the processes of this user that carry ``name=value``; return which; waits for none.

    One that hides its environment, or has overwritten it, is not found.
    """
    mark = f"{name}={value}".encode()
    killed: list[int] = []
    for _ in range(_PASSES):
        found = [pid for pid in _own(root / "proc") if pid not in killed and _kill(pid, mark, root)]
        if not found:
            break
        killed += found
    return killed


def _own(proc: Path) -> list[int]:
    """Return the processes of this user, but for this one."""
    uid, mine, found = os.geteuid(), os.getpid(), []
    with suppress(OSError), os.scandir(proc) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid == uid:
                    found.append(int(entry.name))
    return [pid for pid in found if pid != mine]


def _kill(pid: int, mark: bytes, root: Path) -> bool:
    # The descriptor first: what is read below is then of the process that it stands for.
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        words = (root / f"proc/{pid}/environ").read_bytes().split(b"\0")
        if mark not in words:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(process)
    return True
