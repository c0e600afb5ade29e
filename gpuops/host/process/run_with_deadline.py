"""Run a program with input and a deadline from a process with threads.

It is started with ``posix_spawn``, because a fork of a process with threads may deadlock. It gets
its own session, and its process group is killed at the end, even if it ended in time.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BYTES_MAX = 2**18
# After SIGKILL a process ends at once, unless it is inside the kernel: then it is abandoned.
REAP_S = 1.0
_CHUNK = 65536
_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """Its output. ``exit_code`` is negative for a signal, None if it did not end in time."""

    exit_code: int | None
    output: bytes
    errors: bytes
    cut: bool = False


def run_with_deadline(
    argv: Sequence[str], question: bytes, env: Mapping[str, str], *, deadline_s: float
) -> ProgramAnswer:
    """Return the output of *argv* (an absolute path first) with *question* on its standard input.

    At most `BYTES_MAX` of each stream are kept. Takes at most `REAP_S` longer.

    Raises:
        OSError: It cannot be started.
    """
    with contextlib.ExitStack() as stack:
        source = _owned(stack, os.memfd_create("question"))
        _write_all(source, question)
        os.lseek(source, 0, os.SEEK_SET)
        pipes = [_pipe(stack) for _ in range(2)]
        pid = _spawned(argv, env, (source, pipes[0][1], pipes[1][1]))
        try:
            watch = _owned(stack, os.pidfd_open(pid))
            streams = [_Kept(read) for read, _ in pipes]
            _follow(watch, streams, time.monotonic() + deadline_s)
        finally:
            code = _ended(pid)
        for stream in streams:
            stream.drain()
    return ProgramAnswer(
        exit_code=code,
        output=bytes(streams[0].kept),
        errors=bytes(streams[1].kept),
        cut=any(stream.cut for stream in streams),
    )


def _owned(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    return _owned(stack, read), _owned(stack, write)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _spawned(argv: Sequence[str], env: Mapping[str, str], ends: tuple[int, int, int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, end, target) for target, end in enumerate(ends)]
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(env),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1),
    )


class _Kept:
    """The reading end of a pipe: `BYTES_MAX` are kept, the rest is dropped."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.kept = bytearray()
        self.cut = False

    def drain(self) -> bool:
        """Read what is available without blocking; return False at its end."""
        for _ in range(16):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                return False
            room = BYTES_MAX - len(self.kept)
            self.cut = self.cut or len(chunk) > room
            self.kept += chunk[: max(room, 0)]
        return True


def _follow(watch: int, streams: Sequence[_Kept], until_s: float) -> None:
    """Read until the process ends, whoever may still hold its pipes, or its time is over."""
    poller = select.poll()
    for fd in (watch, *(stream.fd for stream in streams)):
        poller.register(fd, select.POLLIN)
    while (left_s := until_s - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(left_s * 1000)}
        for stream in streams:
            if stream.fd in ready and not stream.drain():
                poller.unregister(stream.fd)
        if watch in ready:
            return


def _ended(pid: int) -> int | None:
    """Kill what is left of the process group; return the exit code if it ended by itself."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    until_s = time.monotonic() + REAP_S
    while True:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped == pid:
            return os.waitstatus_to_exitcode(status) if ended else None
        if time.monotonic() > until_s:
            return None
        time.sleep(_POLL_S)
