"""Run a function that may hang in a child process, with a bounded wait.

A call into a driver or a dead mount can block inside the kernel, where not even SIGKILL ends it.
So each such call is made by a child with its own session and a deadline: SIGTERM, a short grace,
SIGKILL of its process group, a short grace, and then the child is abandoned and reported as hung.
The next run finds it by its record (`gpuops.host.process.abandoned`) and, while it is inside the
kernel, reports it again, so that at most one remains per question.

Fork without exec: a fresh interpreter and its imports cost 10 ms for each of a node's dozens of
mounts, a fork 1 ms. It is safe because `gpuops check` has a single thread; a process with threads
(the agent) runs `gpuops check` as a command instead. Memory files: a pipe held by an abandoned
child never reaches its end, and a temporary file needs a disk, which may be what hangs.
"""

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, NoReturn

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import AbandonedProbes, AbandonedProcess, name_of
from gpuops.host.process.inspect import ThreadState, descendants, process_state
from gpuops.model import UnknownReason

TERM_GRACE_S = 0.2
KILL_GRACE_S = 0.3
STOP_S = TERM_GRACE_S + KILL_GRACE_S
# How long a child takes to end on SIGTERM.
_SIGTERM_S = 0.05
_ORPHAN_S = 1.0
OUTPUT_MAX = 8 * 2**20
_NO_RECORDS = AbandonedProbes()
_POLL_MIN_S = 0.0005
_POLL_MAX_S = 0.01

Signaller = Callable[[int, int], None]


class ProbeEnd(StrEnum):
    """How a child ended."""

    ENDED = "ended"
    TIMEOUT = "timeout"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """The result of a child.

    ``exit_code`` is negative for a signal and None if unknown. ``state`` is the letter of proc(5)
    at the deadline or, if it could not be killed, after it (``D``: any of its threads is inside the
    kernel) and ``wchan`` the kernel function it waited in; both None for a child that ended in
    time. ``output`` is what it had
    written, which can be a complete answer even if the child did not end.
    """

    ending: ProbeEnd
    pid: int
    elapsed_s: float
    exit_code: int | None = None
    output: bytes = b""
    errors: bytes = b""
    state: str | None = None
    wchan: str | None = None

    @property
    def stuck(self) -> bool:
        """Return whether it was inside the kernel; another state only means a busy machine."""
        return self.ending is not ProbeEnd.ENDED and self.state == "D"

    def describe(self) -> str:
        """Return ``"gave no answer in 2.0 s (pid 71, state D in rpc_wait_bit_killable)"``."""
        if self.ending is ProbeEnd.ENDED:
            return _ending(self.exit_code)
        where = f", state {self.state}" if self.state else ""
        where += f" in {self.wchan}" if self.wchan else ""
        still = "" if self.ending is ProbeEnd.TIMEOUT else ", and could not be killed"
        return f"gave no answer in {self.elapsed_s:.1f} s (pid {self.pid}{where}){still}"


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"exited with code {code}"


class _Stage(Enum):
    RUNNING = auto()
    ASKED = auto()
    KILLED = auto()


def signal_group(pid: int, number: int) -> None:
    """Send signal *number* to the process group of *pid*, if it still exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        # The group changed its user (setuid); try its leader alone.
        _signal_one(pid, number)


def _signal_one(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


@dataclass(slots=True)
class ProbeChild:
    """One running child; `watch` advances it until its `ProbeOutcome`."""

    pid: int
    deadline_s: float
    started_s: float
    output_fd: int
    errors_fd: int
    signaller: Signaller = signal_group
    question: str | None = None
    records: AbandonedProbes = _NO_RECORDS
    _recorded: bool = False
    _stage: _Stage = _Stage.RUNNING
    _acted_s: float = 0.0
    _seen: ThreadState | None = None
    _ended: int | None = field(default=None)
    _still: ProbeOutcome | None = None

    def advance(self, now_s: float) -> ProbeOutcome | None:
        """Take the step due at *now_s* (monotonic); return the outcome once there is one."""
        if self._still is not None:
            return self._still
        if self._has_ended():
            on_time = self._stage is _Stage.RUNNING
            return self._outcome(ProbeEnd.ENDED if on_time else ProbeEnd.TIMEOUT, now_s)
        match self._stage:
            case _Stage.RUNNING if now_s >= self.started_s + self.deadline_s:
                self._seen = process_state(self.pid)
                self._send(signal.SIGTERM, _Stage.ASKED, now_s)
            case _Stage.ASKED if now_s >= self._acted_s + TERM_GRACE_S:
                self.leave()
                self._send(signal.SIGKILL, _Stage.KILLED, now_s)
            case _Stage.KILLED if now_s >= self._acted_s + KILL_GRACE_S:
                now = process_state(self.pid)
                if now is not None and (now.state == "D" or self._seen is None):
                    self._seen = now
                return self._outcome(ProbeEnd.HUNG, now_s)
        return None

    def leave(self) -> None:
        """Record it for later runs: it may outlive this one."""
        if self.question is not None and not self._recorded:
            self.records.record(self.question, self.pid)
            self._recorded = True

    def _send(self, number: int, stage: _Stage, now_s: float) -> None:
        self.signaller(self.pid, number)
        self._stage, self._acted_s = stage, now_s

    def _has_ended(self) -> bool:
        try:
            # Checked before it is reaped: until then its group id cannot be reused.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self.signaller(self.pid, signal.SIGKILL)
            self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            # This process ignores SIGCHLD by inheritance, so the kernel discarded the exit code.
            self._ended = None
        if self.question is not None and self._recorded:
            self.records.forget(self.question, self.pid)
        return True

    def _outcome(self, ending: ProbeEnd, now_s: float) -> ProbeOutcome:
        output, errors = _take(self.output_fd), _take(self.errors_fd)
        return ProbeOutcome(
            ending=ending,
            pid=self.pid,
            elapsed_s=now_s - self.started_s,
            exit_code=self._ended,
            output=output,
            errors=errors,
            state=None if self._seen is None else self._seen.state,
            wchan=None if self._seen is None else self._seen.wchan,
        )


def _take(fd: int) -> bytes:
    with os.fdopen(fd, "rb", buffering=0) as file:
        file.seek(0)
        return file.read(OUTPUT_MAX) or b""


def _memory_files() -> tuple[int, int]:
    output = -1
    try:
        output = os.memfd_create("output")
        return output, os.memfd_create("errors")
    except OSError as exc:
        if output >= 0:
            os.close(output)
        raise ProbeError(f"cannot make a memory file: {exc.strerror}", UnknownReason.CRASH) from exc


def start_call(
    function: Callable[[], Any],
    *,
    deadline_s: float,
    question: str | None = None,
    left: AbandonedProbes = _NO_RECORDS,
    signaller: Signaller = signal_group,
) -> ProbeChild:
    """Start *function* in a forked child; what it returns must be serialisable to JSON.

    The child is named after its *question*, for people. If an earlier one for it is on record in
    *left* (`gpuops.host.process.abandoned`), past its deadline and inside the kernel, it is
    reported as still hung and no other is started. The caller must have a single thread. Read the
    result with `answer`.

    Raises:
        ProbeError: This machine has no processes or files left (``crash``).
    """
    name = None if question is None else name_of(question)
    earlier = None if question is None else left.find(question)
    if (
        earlier is not None
        and earlier.state == "D"
        and earlier.age_s > deadline_s + STOP_S + _ORPHAN_S
    ):
        return _still_hung(earlier)
    output, errors = _memory_files()
    started_s = time.monotonic()
    try:
        pid = fork()
    except OSError as exc:
        os.close(output)
        os.close(errors)
        raise ProbeError(f"cannot fork: {exc.strerror}", UnknownReason.CRASH) from exc
    if pid == 0:
        _run_child(function, output, errors, deadline_s, name)
    return ProbeChild(pid, deadline_s, started_s, output, errors, signaller, question, left)


def fork() -> int:
    """Fork as `os.fork` does, with SIGINT and SIGTERM held back meanwhile.

    Python prints and ignores what is raised in the callbacks around a fork, of which logging has
    some: a Ctrl-C that came there was lost.

    Raises:
        OSError: This machine has no processes left.
    """
    with held_signals():
        return os.fork()


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _still_hung(earlier: AbandonedProcess) -> ProbeChild:
    outcome = ProbeOutcome(
        ending=ProbeEnd.HUNG,
        pid=earlier.pid,
        elapsed_s=earlier.age_s,
        state=earlier.state,
        wchan=earlier.wchan,
    )
    return ProbeChild(earlier.pid, 0.0, 0.0, -1, -1, _still=outcome)


def watch(
    children: Iterable[ProbeChild], more: Callable[[], Iterable[ProbeChild]] = tuple
) -> Iterator[tuple[ProbeChild, ProbeOutcome]]:
    """Yield each child with its outcome as they end, at most `STOP_S` after the last deadline.

    *more* is called after each outcome for further children to watch. Ctrl-C ends all children and
    their commands.
    """
    waiting = list(children)
    try:
        yield from _watch(waiting, more)
    except KeyboardInterrupt:
        for child in waiting:
            for pid in (*descendants(child.pid), child.pid):
                _signal_one(pid, signal.SIGKILL)
        raise


def _watch(
    waiting: list[ProbeChild], more: Callable[[], Iterable[ProbeChild]]
) -> Iterator[tuple[ProbeChild, ProbeOutcome]]:
    pause_s = _POLL_MIN_S
    while waiting:
        done = []
        for child in waiting:
            outcome = child.advance(time.monotonic())
            if outcome is not None:
                done.append((child, outcome))
        waiting[:] = [child for child in waiting if all(child is not item[0] for item in done)]
        for item in done:
            yield item
            waiting.extend(more())
        if waiting and not done:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _POLL_MAX_S)


def within(child: ProbeChild, seconds: float) -> ProbeOutcome | None:
    """Return the outcome of *child* within *seconds*, else None; it continues on its own."""
    until_s = time.monotonic() + seconds
    while (outcome := child.advance(time.monotonic())) is None and time.monotonic() < until_s:
        time.sleep(_POLL_MIN_S)
    if outcome is None:
        child.leave()
    return outcome


def run(child: ProbeChild) -> ProbeOutcome:
    """Return the outcome of one child."""
    ((_, outcome),) = watch([child])
    return outcome


def answer(outcome: ProbeOutcome) -> Any:  # noqa: ANN401 JSON of whatever the function returned
    """Return what the function of `start_call` returned.

    Raises:
        ProbeError: The function's own; ``timeout`` if it did not return in time; ``crash`` if it
            raised or its process died, with the traceback as a note.
    """
    if outcome.ending is not ProbeEnd.ENDED:
        raise ProbeError(outcome.describe(), UnknownReason.TIMEOUT)
    return read_answer(outcome)


def read_answer(outcome: ProbeOutcome) -> Any:  # noqa: ANN401 as above
    """Return what the function of `start_call` returned, even from a process that did not end.

    A function can return while another thread of its process is inside the kernel; the process then
    has to be killed or abandoned.

    Raises:
        ProbeError: See `answer`.
    """
    try:
        body = json.loads(outcome.output)
    except ValueError:
        if outcome.ending is not ProbeEnd.ENDED:
            raise ProbeError(outcome.describe(), UnknownReason.TIMEOUT) from None
        raise ProbeError(
            f"its process {outcome.describe()} without an answer", UnknownReason.CRASH
        ) from None
    if "value" in body:
        return body["value"]
    error = ProbeError(body["error"], UnknownReason(body["reason"]))
    if body.get("traceback"):
        error.add_note(body["traceback"])
    raise error


def ask(
    function: Callable[[], Any],
    deadline_s: float,
    *,
    question: str,
    left: AbandonedProbes,
) -> Any:  # noqa: ANN401 JSON of whatever the function returned
    """Return what *function* returns in a child; the arguments are those of `start_call`.

    The caller must have a single thread.

    Raises:
        ProbeError: As of `start_call` and `answer`.
    """
    return answer_of(start_call(function, deadline_s=deadline_s, question=question, left=left))


def answer_of(child: ProbeChild) -> Any:  # noqa: ANN401 JSON of whatever its function returned
    """Return the answer of *child*; an unkillable one takes no longer than others.

    Raises:
        ProbeError: As of `answer`.
    """
    ends_s = child.started_s + child.deadline_s + _SIGTERM_S
    outcome = within(child, max(ends_s - time.monotonic(), _SIGTERM_S))
    if outcome is None:
        raise ProbeError(f"gave no answer in {child.deadline_s:g} s", UnknownReason.TIMEOUT)
    return answer(outcome)


def _run_child(
    function: Callable[[], Any], output: int, errors: int, deadline_s: float, name: str | None
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        if name is not None:
            Path("/proc/self/comm").write_text(name, encoding="ascii")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        # A core file of a driver crash must not fill the disk of the job's folder.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # If the parent dies first, the child still ends soon after its own deadline.
        signal.setitimer(signal.ITIMER_REAL, max(deadline_s, 0.0) + STOP_S + _ORPHAN_S)
        _close_other_files(output, errors)
        os.write(output, json.dumps(_call(function)).encode())
        code = 0
    finally:
        os._exit(code)


def _close_other_files(output: int, errors: int) -> None:
    """Close every other file: an abandoned child must not hold its caller's pipes open."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(errors, 2)
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > 2 and fd != output:
            try:
                os.close(fd)
            except OSError:
                continue


def _call(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except ProbeError as exc:
        return {"error": str(exc), "reason": exc.reason}
    except Exception as exc:  # noqa: BLE001 boundary: any failure of a probe is its answer
        return {
            "error": f"{type(exc).__name__}: {exc}",
            "reason": UnknownReason.CRASH,
            "traceback": traceback.format_exc(),
        }
