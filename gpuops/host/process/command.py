"""Run other programs: find them below a root, run them with bounds, or start them detached.

A program may print without end, ignore SIGTERM, fork, or hang inside the kernel. So it gets its own
session, its output is read as it comes and dropped beyond a bound, and its pipes are not waited
for: a grandchild may hold them open forever.
"""

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProbes
from gpuops.host.process.inspect import descendants
from gpuops.model import UnknownReason

OUTPUT_BYTES_MAX = 8 * 2**20
# Far more than a program prints that comes to its end.
_ENDLESS_BYTES = 64 * 2**20
_POLL_S = 0.02
_KILLED_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended. ``exit_code`` None: it did not end in time; negative for a signal."""

    exit_code: int | None
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs *module* of gpuops; nothing is imported from its folder.

    Without ``-P``, Python imports from the working directory first: whoever may write there would
    run code as whoever calls gpuops.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def run_bounded(
    argv: Sequence[str],
    env: Mapping[str, str],
    deadline_s: float,
    is_over: Callable[[], bool],
    *,
    pass_fds: Sequence[int] = (),
    own_session: bool = True,
) -> CommandEnd | None:
    """Return how *argv* ended within *deadline_s*, None if *is_over* returned True first.

    A command that cannot be started ends with 127, as in a shell; one that prints without
    end is killed. It inherits *pass_fds*. Without *own_session* whoever
    ends the group of this process ends it too. Call it from any thread.
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
                start_new_session=own_session,
                pass_fds=pass_fds,
            )
        except (OSError, ValueError) as exc:
            return CommandEnd(exit_code=127, errors=str(exc).encode())
        ends_s = started_s + deadline_s
        while (code := process.poll()) is None and time.monotonic() < ends_s and not is_over():
            if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > _ENDLESS_BYTES:
                _end(process)  # both are in memory
                code = -signal.SIGKILL
                break
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
    """Kill *process* and all its descendants, whatever sessions they are in."""
    with suppress(OSError):
        # While stopped it cannot start further children.
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


DIRECTORIES = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
BYTES_MAX = 2**20
_PATH = ":".join(f"/{directory}" for directory in DIRECTORIES)
# Not the caller's environment: a job's LD_PRELOAD or LANG must not reach a program of root.
_ENVIRONMENT = MappingProxyType({"PATH": _PATH, "LC_ALL": "C", "HOME": "/"})
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CHUNK = 65536
_CHUNKS_A_TURN = 64
_PAUSE_MIN_S = 0.001
_PAUSE_MAX_S = 0.1
_ORPHAN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """The output and exit of a program.

    ``exit_code`` is negative for a signal and None if it did not end in time. ``cut``: the output
    was truncated. ``stuck``: it was inside the kernel at its deadline.
    ``ending`` is for messages: ``exited with code 3``.
    """

    exit_code: int | None
    output: str
    errors: str
    elapsed_s: float
    ending: str
    timed_out: bool = False
    cut: bool = False
    stuck: bool = False

    def first_line(self, length_max: int = 200) -> str:
        """Return the first non-empty line of the errors or else of the output."""
        lines = (line.strip() for text in (self.errors, self.output) for line in text.split("\n"))
        return next((line[:length_max] for line in lines if line), "")


def find(root: Path, name: str) -> Path | None:
    """Return the executable *name* below *root*, None if there is none.

    A *name* with a slash is a path from the root; others are searched in `DIRECTORIES`, never in
    the caller's ``PATH``.
    """
    places = [name] if "/" in name else [f"{directory}/{name}" for directory in DIRECTORIES]
    for place in places:
        path = root / place.lstrip("/")
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


@dataclass(slots=True)
class _Stream:
    """The reading end of a pipe; keeps *room* bytes and drops the rest."""

    fd: int
    room: int
    kept: bytearray = field(default_factory=bytearray)
    cut: bool = False
    open: bool = True

    def drain(self) -> None:
        """Read what is available, without blocking, at most `_CHUNKS_A_TURN` chunks."""
        for _ in range(_CHUNKS_A_TURN):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            if not chunk:
                self.open = False
                return
            self.cut = self.cut or len(chunk) > self.room - len(self.kept)
            self.kept += chunk[: max(self.room - len(self.kept), 0)]

    def text(self) -> str:
        """Return what was kept; invalid UTF-8 is replaced."""
        return self.kept.decode("utf-8", errors="replace")


def ask(
    argv: Sequence[str | Path],
    timeout_s: float,
    *,
    bytes_max: int = BYTES_MAX,
    stdin: str = "",
    env: Mapping[str, str] = _NOTHING,
    left: AbandonedProbes | None = None,
) -> CommandAnswer:
    """Run *argv* (an absolute path first) for at most *timeout_s*; return its output and exit.

    Takes at most `gpuops.host.process.probe.STOP_S` longer. *bytes_max* bytes are kept of each
    stream. It is not started while an earlier one with the same arguments, on record in *left*
    (`gpuops.host.process.abandoned`), is inside the kernel: each would stay until the next boot.
    The program runs in ``/`` with *env* and a fixed ``PATH``. The caller must have a single thread.

    Raises:
        ProbeError: It cannot be started (``missing_tool``, ``no_permission``), or this machine has
            no processes or files left (``crash``).
    """
    words = [os.fspath(word) for word in argv]
    records, question = left or AbandonedProbes(), "\0".join(["command", *words])
    earlier = records.find(question)
    if earlier is not None and earlier.state == "D":
        text = f"is stuck inside the kernel since an earlier run (pid {earlier.pid})"
        return CommandAnswer(
            exit_code=None,
            output="",
            errors="",
            elapsed_s=0.0,
            ending=text,
            timed_out=True,
            stuck=True,
        )
    with _files(stdin) as (source, output, errors, trouble):
        started_s = time.monotonic()
        pid = _fork(words)
        if pid == 0:
            ends = source, output[1], errors[1], trouble[1]
            _exec_child(words, ends, {**_ENVIRONMENT, **env}, timeout_s)
        for end in (output[1], errors[1], trouble[1]):
            os.close(end)
        null = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
        child = probe.ProbeChild(
            pid, timeout_s, started_s, *null, question=question, records=records
        )
        streams = _Stream(output[0], bytes_max), _Stream(errors[0], bytes_max)
        outcome = _followed(child, streams)
        _check_started(trouble[0], words[0])
    return CommandAnswer(
        exit_code=outcome.exit_code if outcome.ending is probe.ProbeEnd.ENDED else None,
        output=streams[0].text(),
        errors=streams[1].text(),
        elapsed_s=outcome.elapsed_s,
        ending=outcome.describe(),
        timed_out=outcome.ending is not probe.ProbeEnd.ENDED,
        cut=any(stream.cut for stream in streams),
        stuck=outcome.stuck,
    )


Pipe = tuple[int, int]


@contextmanager
def _files(stdin: str) -> Iterator[tuple[int, Pipe, Pipe, Pipe]]:
    """Yield standard input and three pipes whose reading ends do not block."""
    fds: list[int] = []
    try:
        fds.append(os.memfd_create("input"))
        os.write(fds[0], stdin.encode())
        os.lseek(fds[0], 0, os.SEEK_SET)
        for _ in range(3):
            fds += os.pipe2(os.O_CLOEXEC)
            os.set_blocking(fds[-2], False)
    except OSError as exc:
        for fd in fds:
            os.close(fd)
        raise ProbeError(f"cannot make a pipe: {exc.strerror}", UnknownReason.CRASH) from exc
    try:
        yield fds[0], (fds[1], fds[2]), (fds[3], fds[4]), (fds[5], fds[6])
    finally:
        for fd in (fds[0], fds[1], fds[3], fds[5]):
            os.close(fd)


def _fork(words: Sequence[str]) -> int:
    try:
        return probe.fork()
    except OSError as exc:
        text = f"cannot start {words[0]}: {exc.strerror}"
        raise ProbeError(text, UnknownReason.CRASH) from exc


def _exec_child(
    words: Sequence[str], ends: tuple[int, int, int, int], env: Mapping[str, str], timeout_s: float
) -> NoReturn:
    """Execute the program in this forked child; the last of *ends* gets the errno on failure."""
    try:
        os.setsid()
        os.chdir("/")
        for number in (
            signal.SIGPIPE,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGALRM,
            signal.SIGCHLD,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # The timer survives exec: if the parent dies first, the program still ends soon after.
        signal.setitimer(signal.ITIMER_REAL, max(timeout_s, 0.0) + probe.STOP_S + _ORPHAN_S)
        for target, end in enumerate(ends[:3]):
            os.dup2(end, target)
        os.execve(words[0], list(words), dict(env))  # noqa: S606 an argv, never a shell
    except (OSError, ValueError) as exc:
        os.write(ends[3], str(getattr(exc, "errno", errno.EINVAL)).encode())
    finally:
        os._exit(127)


def _followed(child: probe.ProbeChild, streams: tuple[_Stream, _Stream]) -> probe.ProbeOutcome:
    while True:
        for stream in streams:
            stream.drain()
        outcome = child.advance(time.monotonic())
        if outcome is not None:
            break
        age_s = time.monotonic() - child.started_s
        _wait(streams, min(max(age_s / 20, _PAUSE_MIN_S), _PAUSE_MAX_S))
    for stream in streams:
        stream.drain()
    return outcome


def _wait(streams: tuple[_Stream, _Stream], pause_s: float) -> None:
    poller = select.poll()
    for stream in streams:
        if stream.open:
            poller.register(stream.fd, select.POLLIN)
    poller.poll(pause_s * 1000)


def _check_started(trouble: int, program: str) -> None:
    try:
        data = os.read(trouble, 16)
    except BlockingIOError:
        return
    if data:
        number = int(data)
        reason = {
            errno.ENOENT: UnknownReason.MISSING_TOOL,
            errno.EACCES: UnknownReason.NO_PERMISSION,
        }.get(number, UnknownReason.CRASH)
        raise ProbeError(f"cannot start {program}: {os.strerror(number)}", reason)


def spawn_detached(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Start *argv* (an absolute path first) in its own session without our files; return its pid.

    It is not waited for: it becomes a zombie until the caller reaps it or ends.

    Raises:
        OSError: It cannot be started.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    return os.posix_spawn(
        argv[0], list(argv), env, file_actions=actions, setsid=True, setsigmask=()
    )
