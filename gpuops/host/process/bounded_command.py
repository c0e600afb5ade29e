"""Run one command to its end or to its deadline, from a process with threads; nothing is left.

What it prints goes to memory files: a pipe that a stray child holds open has no end.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from gpuops.host.process.inspect import descendants

OUTPUT_BYTES_MAX = 8 * 2**20
_POLL_S = 0.02
_KILLED_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended. ``exit_code`` None: it did not end in time; negative for a signal."""

    exit_code: int | None
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0


def run_bounded(
    argv: Sequence[str], env: Mapping[str, str], deadline_s: float, is_over: Callable[[], bool]
) -> CommandEnd | None:
    """Return how *argv* ended, None where *is_over* said so first; at most *deadline_s* later.

    A command that cannot be started ends with 127, as in a shell. From any thread.
    """
    with _memory_file("output") as output, _memory_file("errors") as errors:
        started_s = time.monotonic()
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=dict(env),
                start_new_session=True,
            )
        except (OSError, ValueError) as exc:
            return CommandEnd(exit_code=127, errors=str(exc).encode())
        ends_s = started_s + deadline_s
        while (code := process.poll()) is None and time.monotonic() < ends_s and not is_over():
            time.sleep(_POLL_S)
        if code is None:
            _end(process)
        if is_over():
            return None
        return CommandEnd(
            exit_code=code,
            output=_content(output),
            errors=_content(errors),
            seconds=time.monotonic() - started_s,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill *process* and all that it has started, whatever sessions they are in."""
    with suppress(OSError):
        # Stopped, it starts nothing more while its children are counted.
        process.send_signal(signal.SIGSTOP)
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _memory_file(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b", buffering=0)


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(OUTPUT_BYTES_MAX)
