"""A command on each of several hosts, over ssh."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuops.errors import UsageError

_SSH_END_S = 15.0


@dataclass(slots=True)
class RemoteCommands:
    """The ssh processes, by host; `close` ends those that are left."""

    processes: Mapping[str, subprocess.Popen[bytes]]
    errors: dict[str, str] = field(default_factory=dict)

    def failures(self) -> Mapping[str, str]:
        """Return which hosts' processes have ended by now, with which code, and what they said."""
        for host, process in self.processes.items():
            if host not in self.errors and process.poll() is not None:
                self.errors[host] = _last_line(process)
        return self.errors

    def close(self) -> None:
        """Wait shortly for their end, then kill them; `failures` must not be called any more."""
        end_s = time.monotonic() + _SSH_END_S
        for process in self.processes.values():
            try:
                process.wait(max(end_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in filter(None, (process.stdin, process.stderr)):
                with suppress(OSError):  # what it did not read
                    stream.close()


def start_remote(
    ssh: Sequence[str],
    hosts: Sequence[str],
    words: Callable[[str], Sequence[str]],
    secret: str,
    env: Mapping[str, str],
) -> RemoteCommands:
    """Start a command on each of *hosts*: ``SSH HOST WORDS``, with a line of *secret* on its input.

    Raises:
        UsageError: The ssh command cannot be started.
    """
    started: dict[str, subprocess.Popen[bytes]] = {}
    for host in hosts:
        try:
            process = subprocess.Popen(
                [*ssh, host, *words(host)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(env),
                start_new_session=True,
            )
        except KeyboardInterrupt:
            RemoteCommands(started).close()
            raise
        except OSError as exc:
            RemoteCommands(started).close()
            raise UsageError(
                f"--ssh: cannot start {ssh[0]}: {os.strerror(exc.errno or 0)}"
            ) from exc
        assert process.stdin is not None
        try:
            process.stdin.write(secret.encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it has ended; its exit code says why
            pass
        started[host] = process
    return RemoteCommands(started)


def _last_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)  # a connection that ssh shares keeps it open
    text = (process.stderr.read(65_536) or b"").decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ending = f"exited with code {process.returncode}"
    return f"{ending}: {lines[-1][:200]}" if lines else ending
