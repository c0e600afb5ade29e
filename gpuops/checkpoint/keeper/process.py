"""Start the keeper of a node, adopt a running one, or kill one that hangs.

A slow process computes or is busy in the kernel, and answers eventually. A process that is stopped
or deadlocked uses no processor time. Samples are counted, not seconds: after the suspension of the
whole machine, observer included, a keeper must not look stuck.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops import __version__
from gpuops.checkpoint.keeper.connection import (
    KeeperConnection,
    KeeperGoneError,
    KeeperTimeoutError,
    keeper_socket_path,
)
from gpuops.checkpoint.keeper.messages import HelloReply
from gpuops.checkpoint.keeper.serve import LEASE_S
from gpuops.checkpoint.types import KeeperError
from gpuops.config.resolve import environ
from gpuops.host.process.command import module_command
from gpuops.host.process.sidecar import start_sidecar
from gpuops.host.trust import why_not_ours

SAMPLE_S = 1.0
IDLE_SAMPLES = 6  # the first and the last are five seconds apart
SAMPLES_MAX = 20
KILL_S = 5.0
_STOPPED = "Tt"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """``state`` of the main thread, and the processor time of all threads, as in proc(5)."""

    state: str
    cpu_ticks: int


class KeeperEndedError(KeeperError):
    """The keeper was killed, and its states are lost; the message says why."""


class KeeperHungError(KeeperEndedError):
    """The keeper hung and was killed; the message says why it counted as hung."""


def why_hung(samples: Sequence[ProcessSample]) -> str | None:
    """Return how the keeper hangs, given *samples* without an answer; None: it may only be slow."""
    recent = samples[-IDLE_SAMPLES:]
    if len(recent) == IDLE_SAMPLES:
        if all(sample.state in _STOPPED for sample in recent):
            return "it was stopped by a signal"
        if (
            all(sample.state == "S" for sample in recent)
            and recent[0].cpu_ticks == recent[-1].cpu_ticks
        ):
            return "it waited for something and used no processor"
    if len(samples) >= SAMPLES_MAX:
        return f"it was in state {samples[-1].state}"
    return None


def sample_process(pid: int) -> ProcessSample | None:
    """Return a sample of the process *pid*, None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return ProcessSample(fields[0], int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def probe_or_kill(
    connection: KeeperConnection,
    sample: Callable[[int], ProcessSample | None] = sample_process,
    clock_s: Callable[[], float] = time.monotonic,
) -> HelloReply:
    """Return the keeper's reply to the first request on *connection*, a hello.

    It takes about 20 seconds at most, 6 where the keeper is idle.

    Raises:
        KeeperHungError: It hung, and has been killed.
        KeeperGoneError: It has ended by itself.
        KeeperError: It hangs, and cannot be killed.
    """
    began_s, samples = clock_s(), list[ProcessSample]()
    pid = connection.pid
    try:
        process = os.pidfd_open(pid)
    except OSError as exc:
        # It is in another pid namespace, for example: it answers requests, but cannot be inspected.
        raise KeeperError(f"the keeper with pid {pid} cannot be inspected: {exc.strerror}") from exc
    try:
        with suppress(KeeperTimeoutError):
            return connection.call_within(HelloReply, "hello", wait_s=SAMPLE_S, role="probe")
        while True:
            seen = sample(pid)
            if seen is not None:
                samples.append(seen)
            how = why_hung(samples)
            # The connection is still open, so `process` is the one that accepted it.
            with suppress(KeeperTimeoutError):
                found = connection.late_reply(HelloReply, "hello", 0.0 if how else SAMPLE_S)
                assert found is not None
                return found
            if how is not None:
                _kill(process, pid)
                why = (
                    f"its keeper (pid {pid}) did not answer for {clock_s() - began_s:.0f} s: {how}"
                )
                raise KeeperHungError(why)
    finally:
        os.close(process)


def _kill(process: int, pid: int) -> None:
    """Kill the process and wait until it is gone: two keepers must never serve one job.

    Raises:
        KeeperError: It outlives SIGKILL.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(KILL_S * 1000):
        raise KeeperError(
            f"the keeper with pid {pid} hangs and outlives SIGKILL: it is blocked in the kernel, "
            "and no other keeper may start before it is gone"
        )
    with suppress(ChildProcessError):  # usually it is not our child
        os.waitpid(pid, os.WNOHANG)


READY_S = 30.0
_PROBE_S = 10.0
_RETRY_S = 0.05


@dataclass(slots=True)
class KeeperProcess:
    """A keeper. ``is_adopted``: it was already running, and is not our child.

    ``killed_why``: how the keeper before it hung and was killed, "" where there was none.
    """

    socket_path: Path
    pid: int
    is_adopted: bool
    killed_why: str = ""

    def is_running(self) -> bool:
        """Return whether it runs; a child that has ended is reaped."""
        if self.is_adopted:
            try:
                os.kill(self.pid, 0)
            except OSError:
                return False
            return True
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            return False

    def kill(self) -> None:
        """Kill it; the states in its memory are lost."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if not self.is_adopted:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def start_or_adopt(
    folder: Path, *, lease_s: float = LEASE_S, node: str = "", ready_s: float = READY_S
) -> KeeperProcess:
    """Return the keeper of *folder*, which is created if missing, for this user only.

    A running keeper without an agent is adopted, with its states. One that hangs, which takes
    about 20 seconds at most to see, or is of another version of gpuops, whose states this one might
    misread, is killed, and its states are lost. Otherwise a new one is started, which
    ends *lease_s* seconds after the last agent and rank have disconnected.

    Raises:
        KeeperError: It serves a running agent; the folder is accessible to others; Python cannot be
            started; or it was not ready within *ready_s*.
    """
    why = why_not_ours(folder, private=True)
    if why is not None:
        raise KeeperError(f"the keeper cannot use {folder}: {why}")
    path = keeper_socket_path(folder.absolute())
    end_s, why_killed = time.monotonic() + ready_s, ""
    while True:
        try:
            keeper = _adopt(path) or _start_new(path, lease_s, node, ready_s, end_s)
        except KeeperEndedError as exc:
            end_s, why_killed = time.monotonic() + ready_s, str(exc)
            continue
        except KeeperError as exc:
            if not why_killed:
                raise
            raise KeeperError(f"{exc}. Before that, {why_killed}; it was killed") from exc
        if keeper is not None:
            keeper.killed_why = why_killed
            return keeper
        time.sleep(_RETRY_S)


def _adopt(path: Path) -> KeeperProcess | None:
    """Return the keeper that listens at *path*, None where none does; raises KeeperEndedError."""
    try:
        connection = KeeperConnection(path, deadline_s=_PROBE_S)
    except KeeperGoneError:
        return None
    try:
        found, pid = probe_or_kill(connection), connection.pid
        if found.agent is not None:
            raise KeeperError(
                f"the keeper at {path} (pid {pid}) serves the agent with pid {found.agent}, which "
                "runs: end that agent first, or use another folder"
            )
        if found.version != __version__:
            _kill_other_version(pid, found.version)
    except KeeperGoneError:
        return None
    finally:
        connection.close()
    return KeeperProcess(path, pid, is_adopted=True)


def _kill_other_version(pid: int, version: str) -> None:
    """Kill the keeper, to which a connection is open; raises KeeperError."""
    process = os.pidfd_open(pid)
    try:
        _kill(process, pid)
    finally:
        os.close(process)
    other = f"gpuops {version}" if version else "an older gpuops"
    raise KeeperEndedError(f"its keeper (pid {pid}) is of {other}, and this is {__version__}")


def _start_new(
    path: Path, lease_s: float, node: str, ready_s: float, end_s: float
) -> KeeperProcess | None:
    """Return a new keeper that listens at *path*, None where another one is starting or ending.

    Raises:
        KeeperError: It was not ready before *end_s*, *ready_s* after the first attempt.
    """
    first_line, pid = _start(path.parent, lease_s, node, end_s)
    keeper = KeeperProcess(path, pid, is_adopted=False)
    if first_line == "ready":
        return keeper
    keeper.kill()
    if first_line.startswith("failed "):
        raise KeeperError(f"the keeper cannot start: {first_line.removeprefix('failed ')}")
    if first_line == "taken" and time.monotonic() <= end_s:
        return None
    raise KeeperError(
        f"the keeper in {path.parent} did not start within {ready_s:g} s; its log is there"
    )


def _start(folder: Path, lease_s: float, node: str, end_s: float) -> tuple[str, int]:
    """Start a keeper; return its first line, "" after a timeout, and its pid."""
    argv = [*module_command("gpuops.checkpoint.keeper.serve"), "--folder", str(folder)]
    argv += ["--lease", f"{lease_s:g}"]
    argv += ["--node", node] if node else []
    try:
        process = start_sidecar(argv, environ())
    except OSError as exc:
        raise KeeperError(f"the keeper cannot be started: {exc.strerror}") from exc
    return process.first_line(end_s), process.pid
