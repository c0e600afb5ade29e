"""End the workers that are left once one has failed, or when the run is cancelled.

torch waits a minute for such a process when it closes a generation, before 2.13 for ever; until
then no incident would record it. Its logs are followed no further.

torch sends SIGTERM and waits 30 s for each group. A worker that sits in a collective with a
dead peer does not answer SIGTERM if the script has a handler for it, so here the wait is short and
SIGKILL follows. Who was signalled, when and with what is kept: such an end is no failure.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Protocol

from torch.distributed.elastic.multiprocessing.api import PContext

from gpuops.agent.launch.preconditions import AGENT_PID
from gpuops.host.clock import Clock
from gpuops.host.process.inspect import KillOutcome, kill_env_tagged, kill_outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """One end: ``code`` as in `subprocess` (negative: a signal), None where torch was faster."""

    pid: int
    code: int | None
    seen_us: int
    seen_mono_ns: int


class ExitWatcher:
    """Watches the workers of one generation by local rank."""

    def __init__(self, pids: Mapping[int, int], clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[int, ObservedExit] = {}
        self._changed = threading.Condition()
        self._fds: dict[int, tuple[int, int]] = {}
        self.sees_all = True
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for local_rank, pid in pids.items():
            self._open(local_rank, pid)
        self._thread = threading.Thread(target=self._run, name="gpuops-exits", daemon=True)
        self._thread.start()

    def _open(self, local_rank: int, pid: int) -> None:
        try:
            self._fds[os.pidfd_open(pid)] = (local_rank, pid)
        except ProcessLookupError:
            self._note(local_rank, pid, None, self._clock.mono_ns(), self._clock.now_us())
        except OSError as exc:
            # Then only torch's own poll, ten times a second, dates this worker's end.
            self.sees_all = False
            log.warning("cannot watch worker %d (pid %d): %s", local_rank, pid, exc)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while self._fds:
            ready = poll.poll()
            # One poll, one time: the order of what it finds together is unknown.
            now = self._clock.mono_ns(), self._clock.now_us()
            for fd, _events in ready:
                if fd == self._wake_read:
                    return
                local_rank, pid = self._fds.pop(fd)
                self._note(local_rank, pid, fd, *now)
                poll.unregister(fd)
                os.close(fd)

    def _note(self, local_rank: int, pid: int, fd: int | None, mono_ns: int, now_us: int) -> None:
        code = None if fd is None else _status(fd)
        with self._changed:
            self._seen[local_rank] = ObservedExit(pid, code, now_us, mono_ns)
            self._changed.notify_all()

    def seen(self) -> dict[int, ObservedExit]:
        """Return the ends so far by local rank."""
        with self._changed:
            return dict(self._seen)

    def wait(self, enough: Callable[[Mapping[int, ObservedExit]], bool], timeout_s: float) -> bool:
        """Wait until *enough* says so of what was seen; say whether it did within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: enough(self._seen), timeout_s)

    def close(self) -> None:
        """End the thread and close what it held."""
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=1)
        if self._thread.is_alive():
            return
        for fd in (*self._fds, self._wake_read, self._wake_write):
            os.close(fd)
        self._fds.clear()


def _status(fd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def signal_name(code: int | None) -> str | None:
    """Return ``"SIGKILL"`` for -9, None where no signal ended the process."""
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def abandon_unkillable(context: PContext, local_ranks: Iterable[int]) -> None:
    """Close *context*, whose other workers have ended, without waiting for *local_ranks*."""
    handlers = getattr(context, "subprocess_handlers", {})
    for local_rank in local_ranks:
        handlers.pop(local_rank, None)
    context.close(SIGKILL)


KILL_WAIT_S = 5.0  # a process without a device in its way is gone milliseconds after SIGKILL
_PARENT_CHECK_S = 0.05
# What is to count as stuck has to be so at each of these polls, in the last part of that wait.
_STUCK_POLLS = 10
_STUCK_LOOK_S = 0.1


class ExitSource(Protocol):
    """Who sees the workers' ends, by local rank; see `ExitWatcher`."""

    def seen(self) -> Mapping[int, ObservedExit]: ...

    def wait(
        self, enough: Callable[[Mapping[int, ObservedExit]], bool], timeout_s: float
    ) -> bool: ...


@dataclass(frozen=True, slots=True)
class SentSignal:
    """The signals that one worker got from us, and when the first of them went out."""

    at_mono_ns: int
    signals: tuple[signal.Signals, ...]


@dataclass(slots=True)
class Teardown:
    """What was sent to whom, by local rank.

    ``stuck`` outlived SIGKILL (D state); ``exiting`` are those that the kernel still takes apart.
    """

    sent: dict[int, SentSignal] = field(default_factory=dict)
    stuck: tuple[int, ...] = ()
    exiting: tuple[int, ...] = ()


def end_workers(  # noqa: PLR0913  whom, with what, how long, and what is known of them
    pids: Mapping[int, int],
    watcher: ExitSource,
    clock: Clock,
    *,
    first: signal.Signals,
    grace_s: float,
    is_urgent: Callable[[], bool] = lambda: False,
    at_once: Collection[int] = (),
    poll: Callable[[int], KillOutcome] = kill_outcome,
) -> Teardown:
    """Signal every worker still there, kill those left after *grace_s*; bounded in time.

    The local ranks *at_once* are killed without a warning that they would not act on. *poll* says
    what is left of one, by its process id.
    """
    done = Teardown()
    _send(signal.SIGKILL, {k: v for k, v in pids.items() if k in at_once}, watcher, clock, done)
    _send(first, {k: v for k, v in pids.items() if k not in at_once}, watcher, clock, done)
    deadline_ns = clock.mono_ns() + round(grace_s * 1e9)
    while clock.mono_ns() < deadline_ns and not is_urgent():
        if watcher.wait(lambda seen: len(seen) == len(pids), _PARENT_CHECK_S):
            break
    _send(signal.SIGKILL, pids, watcher, clock, done)
    watcher.wait(lambda seen: len(seen) == len(pids), KILL_WAIT_S - _STUCK_POLLS * _STUCK_LOOK_S)
    done.stuck, done.exiting = _left(pids, watcher, poll)
    _end_children(pids)
    return done


def _left(
    pids: Mapping[int, int], watcher: ExitSource, poll: Callable[[int], KillOutcome]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who is stuck, and who is exiting."""
    left: dict[int, KillOutcome] = {}
    moves: set[int] = set()
    for _ in range(_STUCK_POLLS):
        gone = watcher.seen()
        left = {n: poll(pids[n]) for n in sorted(pids) if n not in gone}
        moves |= {n for n, found in left.items() if found is not KillOutcome.STUCK}
        if watcher.wait(lambda seen: len(seen) == len(pids), _STUCK_LOOK_S):
            return (), ()
    gone = watcher.seen()
    left = {
        n: found for n, found in left.items() if n not in gone and found is not KillOutcome.NOTHING
    }
    stuck = tuple(n for n in left if n not in moves)
    exiting = tuple(n for n in left if n in moves)
    for local_rank in stuck:
        log.warning("worker %d (pid %d) outlived SIGKILL", local_rank, pids[local_rank])
    for local_rank in exiting:
        pid = pids[local_rank]
        log.warning("worker %d (pid %d) has not given all memory back yet", local_rank, pid)
    return stuck, exiting


def _send(
    number: signal.Signals,
    pids: Mapping[int, int],
    watcher: ExitSource,
    clock: Clock,
    done: Teardown,
) -> None:
    gone = watcher.seen()
    for local_rank, pid in pids.items():
        if local_rank in gone or not _signal_group(pid, number):
            continue
        before = done.sent.get(local_rank)
        done.sent[local_rank] = (
            SentSignal(before.at_mono_ns, (*before.signals, number))
            if before
            else SentSignal(clock.mono_ns(), (number,))
        )


def kill_groups(pids: Iterable[int]) -> None:
    """SIGKILL the process groups that these children lead; from any thread, waits for nothing."""
    for pid in pids:
        _signal_group(pid, signal.SIGKILL)


def signal_process(pid: int, number: signal.Signals) -> bool:
    """Signal the child *pid* alone; say whether it was there to get it."""
    if not _is_ours(pid):
        return False
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _end_children(pids: Mapping[int, int]) -> None:
    """End what the workers started and left behind: it would hold ports and the device's memory.

    Also what has left their groups and sessions. That is for a generation that is ended; after
    success such a helper may have something to finish, and is left alone.
    """
    kill_groups(pids.values())
    left = kill_env_tagged(AGENT_PID, str(os.getpid()))
    if left:
        log.info("ended %d processes that workers had left behind", len(left))


def _signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal the process group that the worker *pid* leads; say whether it could be."""
    if not _is_ours(pid):
        return False
    try:
        if os.getpgid(pid) != pid:
            os.kill(pid, number)
        else:
            os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _is_ours(pid: int) -> bool:
    """Say whether *pid* is a child not yet reaped; any other may be somebody else's by now."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def was_ours(sent: SentSignal | None, signal_name: str | None, error_mono_ns: int | None) -> bool:
    """Say whether an end was teardown: after our signal, by a signal of ours or by its answer.

    Not ours are an exception noted before we sent anything, and a signal that we did not send.
    """
    if sent is None or (error_mono_ns is not None and error_mono_ns < sent.at_mono_ns):
        return False
    return signal_name is None or signal_name in {number.name for number in sent.signals}
