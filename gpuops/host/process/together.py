"""Run several programs at the same time, and take their lines as they come.

For programs that may hang in a driver: each has a deadline, after which its process group gets
SIGTERM, then SIGKILL, and is then abandoned and recorded (`gpuops.host.process.probe`). Each ends
with this process if it calls `gpuops.host.process.sidecar.die_with_parent`: it has a pipe as its
standard input. The caller must have a single thread.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.process.probe import ProbeChild, ProbeEnd, ProbeOutcome, signal_group

LINE_BYTES_MAX = 256 * 1024
# A program that prints without end is read on and kept no further.
OUTPUT_BYTES_MAX = 16 * 2**20
ERRORS_BYTES_MAX = 64 * 1024
KILLED_S = 0.5
_CHUNK = 65536
_CHUNKS_A_TURN = 64
_PAUSE_S = 0.05

OnLine = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelCommand:
    """A program (an absolute path first) with its environment and its deadline.

    ``question`` names it on record if it has to be abandoned.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    deadline_s: float
    question: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelEnd:
    """How a program ended. ``problem`` is None for exit code 0, else text for people.

    ``late``: it did not end in time. ``dropped``: bytes of output that were not kept.
    """

    problem: str | None = None
    late: bool = False
    dropped: int = 0


@dataclass(slots=True)
class _Running:
    """One program; its lines go to ``on_line`` once they are complete."""

    child: ProbeChild
    stdin: int
    output: int
    errors: int
    on_line: Callable[[bytes], None]
    last_words: bytearray = field(default_factory=bytearray)
    dropped: int = 0
    is_open: bool = True
    _line: bytearray = field(default_factory=bytearray)
    _kept: int = 0

    def drain(self) -> None:
        """Read what is there, without blocking."""
        for _ in range(_CHUNKS_A_TURN):
            chunk = _read(self.output)
            if not chunk:
                self.is_open = chunk is None
                break
            self._take(chunk)
        for _ in range(_CHUNKS_A_TURN):
            chunk = _read(self.errors)
            if not chunk:
                break
            self.last_words = (self.last_words + chunk)[-ERRORS_BYTES_MAX:]

    def _take(self, chunk: bytes) -> None:
        room = max(OUTPUT_BYTES_MAX - self._kept, 0)
        self.dropped += max(len(chunk) - room, 0)
        self._kept += min(len(chunk), room)
        self._line += chunk[:room]
        *lines, rest = self._line.split(b"\n")
        for line in lines:
            self.on_line(bytes(line[:LINE_BYTES_MAX]))
        if len(rest) > LINE_BYTES_MAX:
            self.on_line(bytes(rest[:LINE_BYTES_MAX]))
            rest = bytearray()
        self._line = rest

    def finish(self) -> None:
        """Take what was printed last, also half a line, and close the pipes."""
        with suppress(OSError):
            self.drain()
        if self._line:
            self.on_line(bytes(self._line))
        for fd in (self.stdin, self.output, self.errors):
            os.close(fd)


def run_together(
    commands: Sequence[ParallelCommand],
    on_line: OnLine,
    left: AbandonedProbes,
    on_turn: Callable[[], None] = lambda: None,
) -> list[ParallelEnd]:
    """Run *commands* at the same time; return how each ended, in their order.

    *on_line* gets the number of the command and its line, *on_turn* is called many times a second.
    A program that an earlier run abandoned inside the kernel, on record in *left*, is not started
    again. Whatever ends this call ends the programs too.
    """
    ends: dict[int, ParallelEnd] = {}
    running: dict[int, _Running] = {}
    try:
        for number, command in enumerate(commands):
            earlier = left.find(command.question)
            if earlier is not None and earlier.state == "D":
                text = f"is stuck inside the kernel since an earlier run (pid {earlier.pid})"
                ends[number] = ParallelEnd(problem=text, late=True)
                continue
            try:
                running[number] = _start(command, _tagged(on_line, number), left)
            except OSError as exc:
                ends[number] = ParallelEnd(problem=f"cannot start: {exc.strerror}")
        while running:
            for number in tuple(running):
                outcome = _advance(running[number])
                if outcome is not None:
                    program = running.pop(number)
                    program.finish()
                    ends[number] = _end(outcome, program)
            on_turn()
            _wait(running.values())
    finally:
        _kill(list(running.values()))
    return [ends[number] for number in range(len(commands))]


def _tagged(on_line: OnLine, number: int) -> Callable[[bytes], None]:
    return lambda line: on_line(number, line)


def _start(
    command: ParallelCommand, on_line: Callable[[bytes], None], left: AbandonedProbes
) -> _Running:
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
    (their_in, our_in), (our_out, their_out), (our_errors, their_errors) = pipes
    started_s = time.monotonic()
    try:
        pid = os.posix_spawn(
            command.argv[0],
            list(command.argv),
            dict(command.env),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, their_in, 0),
                (os.POSIX_SPAWN_DUP2, their_out, 1),
                (os.POSIX_SPAWN_DUP2, their_errors, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        )
    except OSError:
        for fd in (our_in, our_out, our_errors):
            os.close(fd)
        raise
    finally:
        for fd in (their_in, their_out, their_errors):
            os.close(fd)
    os.set_blocking(our_out, False)
    os.set_blocking(our_errors, False)
    null = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
    child = ProbeChild(
        pid, command.deadline_s, started_s, *null, question=command.question, records=left
    )
    return _Running(child, our_in, our_out, our_errors, on_line)


def _read(fd: int) -> bytes | None:
    """Return what is there: b"" at the end, None if nothing is there yet."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def _advance(program: _Running) -> ProbeOutcome | None:
    program.drain()
    return program.child.advance(time.monotonic())


def _wait(running: Iterable[_Running]) -> None:
    poller = select.poll()
    for program in running:
        if program.is_open:
            poller.register(program.output, select.POLLIN)
    poller.poll(_PAUSE_S * 1000)


def _end(outcome: ProbeOutcome, program: _Running) -> ParallelEnd:
    late = outcome.ending is not ProbeEnd.ENDED
    if not late and outcome.exit_code == 0:
        return ParallelEnd(dropped=program.dropped)
    lines = program.last_words.decode("utf-8", errors="replace").split("\n")
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = outcome.describe() + (f": {words}" if words else "")
    return ParallelEnd(problem=text, late=late, dropped=program.dropped)


def _kill(running: Sequence[_Running]) -> None:
    """Kill what still runs, and wait for it no longer than `KILLED_S`."""
    for program in running:
        program.child.leave()
        signal_group(program.child.pid, signal.SIGKILL)
    ends_s = time.monotonic() + KILLED_S
    for program in running:
        while program.child.advance(0.0) is None and time.monotonic() < ends_s:
            time.sleep(_PAUSE_S / 10)
        for fd in (program.stdin, program.output, program.errors):
            os.close(fd)
