"""A child process that ends with its parent: its standard input closes then."""

import ctypes
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # prctl(2); not named in Python's standard library
_CHUNK = 4096


def die_with_parent(stdin_fd: int = 0) -> None:
    """End this process at the end of its standard input, or when the parent's thread ends.

    The kernel's signal is needed if another process also holds the parent's end of the pipe. A
    driver that crashes this process leaves no core file.
    """
    die_with_parent_thread()
    threading.Thread(target=_wait, args=(stdin_fd,), name="tether", daemon=True).start()


def die_with_parent_thread() -> None:
    """End this process when the thread that started it ends; it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def _wait(stdin_fd: int) -> NoReturn:
    try:
        while os.read(stdin_fd, _CHUNK):
            pass
    except OSError:
        pass
    # The main thread may be in a call that does not return; there is nothing to clean up.
    os._exit(0)


_FIRST_BYTES_MAX = 4000


@dataclass(slots=True)
class Sidecar:
    """A child process; ``write`` and ``read`` are our ends of its standard input and output."""

    pid: int
    write: int
    read: int

    def write_line(self, line: str) -> bool:
        """Write *line* to it; return False if it has ended."""
        try:
            os.write(self.write, line.encode() + b"\n")
        except OSError:
            return False
        return True

    def close_stdin(self) -> None:
        """Close its standard input."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def read_line(self) -> str:
        """Return its next line without the newline; it is incomplete if the process has ended."""
        text = bytearray()
        while byte := os.read(self.read, 1):
            if byte == b"\n":
                break
            text += byte
        return text.decode("utf-8", errors="replace")

    def first_line(self, end_s: float, message: bytes = b"") -> str:
        """Send *message*, close its standard input, and return the first line of its output.

        That is "" if it prints none until *end_s* (monotonic), or ends; ``failed WHY`` if the
        pipes to it fail.
        """
        try:
            if message:
                os.write(self.write, message)
            self.close_stdin()
            return self._first_line(end_s)
        except OSError as exc:
            return f"failed {exc.strerror}"
        finally:
            self.close_stdin()
            os.close(self.read)

    def _first_line(self, end_s: float) -> str:
        output = b""
        poll = select.poll()
        poll.register(self.read, select.POLLIN)
        while b"\n" not in output and len(output) < _FIRST_BYTES_MAX:
            left_s = max(end_s - time.monotonic(), 0.0)
            if not poll.poll(left_s * 1000):
                return ""
            chunk = os.read(self.read, _FIRST_BYTES_MAX)
            if not chunk:
                return ""
            output += chunk
        return output.partition(b"\n")[0].decode("utf-8", errors="replace")

    def wait(self) -> int | None:
        """Close its standard input, wait for its exit, return its code; None if it was reaped."""
        self.close_stdin()
        try:
            _pid, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return None
        finally:
            os.close(self.read)
        return os.waitstatus_to_exitcode(status)


def start_sidecar(argv: Sequence[str], env: Mapping[str, str]) -> Sidecar:
    """Start *argv* (an absolute path first) in its own session, without standard error.

    A signal to our terminal or our process group does not reach it.

    Raises:
        OSError: It cannot be started.
    """
    theirs_in, ours_out = os.pipe2(os.O_CLOEXEC)
    ours_in, theirs_out = os.pipe2(os.O_CLOEXEC)
    actions = [
        (os.POSIX_SPAWN_DUP2, theirs_in, 0),
        (os.POSIX_SPAWN_DUP2, theirs_out, 1),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    try:
        pid = os.posix_spawn(
            argv[0], list(argv), env, file_actions=actions, setsid=True, setsigdef=[signal.SIGPIPE]
        )
    except OSError:
        os.close(ours_out)
        os.close(ours_in)
        raise
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return Sidecar(pid, ours_out, ours_in)


def report_and_detach(line: str) -> None:
    """Print *line* for the parent, then detach standard input and output from it.

    `Sidecar.first_line` reads it. The parent may have ended, which is no error.
    """
    with suppress(OSError):
        print(line, flush=True)  # noqa: T201 our output
    with open(os.devnull, "r+b") as null:  # noqa: PTH123 needs a descriptor
        for fd in (0, 1):
            os.dup2(null.fileno(), fd)


if __name__ == "__main__":  # run a command that ends with the thread which started it
    die_with_parent_thread()
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 an argv, never a shell
