"""A process at our side that hears when we end: by its standard input, which closes then."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Companion:
    """A started process; ``write`` and ``read`` are our ends of its standard input and output."""

    pid: int
    write: int
    read: int

    def say(self, line: str) -> bool:
        """Write *line* to it; say whether it was there to be written to."""
        try:
            os.write(self.write, line.encode() + b"\n")
        except OSError:
            return False
        return True

    def hang_up(self) -> None:
        """Close its standard input: from now on it is on its own."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def hear(self) -> str:
        """Return its next line, without the newline; what there is of it where it ended."""
        text = bytearray()
        while byte := os.read(self.read, 1):
            if byte == b"\n":
                break
            text += byte
        return text.decode("utf-8", errors="replace")

    def part(self) -> int | None:
        """Hang up, wait for its end, return its exit code; None where somebody else reaped it."""
        self.hang_up()
        try:
            _pid, status = os.waitpid(self.pid, 0)
        except ChildProcessError:
            return None
        finally:
            os.close(self.read)
        return os.waitstatus_to_exitcode(status)


def start_companion(argv: Sequence[str], env: Mapping[str, str]) -> Companion:
    """Start *argv* (an absolute path first) in a session of its own, its errors going nowhere.

    A signal to our terminal or our process group does not reach it.

    Raises:
        OSError: It could not be started.
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
            argv[0],
            list(argv),
            env,
            file_actions=actions,
            setsid=True,
            setsigdef=[signal.SIGPIPE],
        )
    except OSError:
        os.close(ours_out)
        os.close(ours_in)
        raise
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    return Companion(pid, ours_out, ours_in)
