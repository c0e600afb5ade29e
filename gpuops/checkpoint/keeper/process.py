"""Start the keeper of a node, adopt one that is there, or end one that hangs.

Who is slow computes, or is busy in the kernel, and answers in the end. Who is stopped, or waits for
what never comes, uses no processor at all. Looks are counted, not seconds: a machine that was
suspended as a whole, with whoever looks, must not make a keeper look stuck.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
from gpuops.host.process.sidecar import start_sidecar
from gpuops.host.trust import why_not_ours

SAMPLE_S = 1.0
IDLE_SAMPLES = 6  # the first and the last are five seconds apart
SAMPLES_MAX = 20
KILL_S = 5.0
_STOPPED = "Tt"


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """``state`` of the main thread, and the processor time of all, as proc(5) has them."""

    state: str
    cpu_ticks: int


class KeeperHungError(KeeperError):
    """The keeper hung and was ended; says why it was taken to hang."""


def why_hung(samples: Sequence[ProcessSample]) -> str | None:
    """Return how a keeper hangs that answered in none of *samples*, None while it may be slow."""
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
    """Return how the process *pid* is, None where it is gone."""
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
    """Return what the keeper on *connection*, which was asked nothing yet, says to a hello.

    It takes some 20 seconds at most, 6 where it is idle.

    Raises:
        KeeperHungError: It does not answer and hangs; it has been ended, and is gone.
        KeeperGoneError: It has gone by itself.
        KeeperError: It hangs, and cannot be ended.
    """
    began_s, samples = clock_s(), list[ProcessSample]()
    pid = connection.pid
    try:
        process = os.pidfd_open(pid)
    except OSError as exc:
        # Of another namespace of processes, for example: it can be asked, but not looked at.
        raise KeeperError(f"the keeper with pid {pid} cannot be inspected: {exc.strerror}") from exc
    try:
        with suppress(KeeperTimeoutError):
            return connection.call_within(HelloReply, "hello", wait_s=SAMPLE_S, role="probe")
        while True:
            seen = sample(pid)
            if seen is not None:
                samples.append(seen)
            how = why_hung(samples)
            # That the line is still open means that `process` is the one that was asked.
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
            f"the keeper with pid {pid} hangs and outlives SIGKILL: it sits in the kernel, and no "
            "other one may begin before it is gone"
        )
    with suppress(ChildProcessError):  # mostly it is not ours
        os.waitpid(pid, os.WNOHANG)


READY_S = 30.0
_PROBE_S = 10.0
_RETRY_S = 0.05


@dataclass(slots=True)
class KeeperProcess:
    """A keeper. ``is_adopted``: it ran before, and is not our child.

    ``killed_why`` says how one before it hung that was ended, "" where there was none.
    """

    socket_path: Path
    pid: int
    is_adopted: bool
    killed_why: str = ""

    def is_running(self) -> bool:
        """Say whether it runs; our child is reaped where it does not."""
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
        """End it at once, with all that it holds."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if not self.is_adopted:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def start_or_adopt(
    folder: Path, *, lease_s: float = LEASE_S, node: str = "", ready_s: float = READY_S
) -> KeeperProcess:
    """Return the keeper in *folder*, which is made where it is not there, for this user only.

    One that runs there without an agent is taken over with all that it holds; one that hangs is
    ended, with all that it holds, which takes some 20 seconds at most. Else a new one is started,
    which lives for *lease_s* seconds after the last agent and rank.

    Raises:
        KeeperError: It has an agent that runs; the folder is not ours alone; Python cannot be
            started; or it did not begin within *ready_s*.
    """
    why = why_not_ours(folder, private=True)
    if why is not None:
        raise KeeperError(f"the keeper cannot use {folder}: {why}")
    path = keeper_socket_path(folder.absolute())
    end_s, hung = time.monotonic() + ready_s, ""
    while True:
        try:
            keeper = _adopt(path) or _start_new(path, lease_s, node, ready_s, end_s)
        except KeeperHungError as exc:
            end_s, hung = time.monotonic() + ready_s, str(exc)
            continue
        except KeeperError as exc:
            if not hung:
                raise
            raise KeeperError(f"{exc}. Before that, {hung}; it was ended") from exc
        if keeper is not None:
            keeper.killed_why = hung
            return keeper
        time.sleep(_RETRY_S)


def _adopt(path: Path) -> KeeperProcess | None:
    """Return the keeper that listens at *path*, None where none does; raises KeeperHungError."""
    try:
        connection = KeeperConnection(path, deadline_s=_PROBE_S)
    except KeeperGoneError:
        return None
    try:
        agent = probe_or_kill(connection).agent
        pid = connection.pid
    except KeeperGoneError:
        return None
    finally:
        connection.close()
    if agent is not None:
        raise KeeperError(
            f"the keeper at {path} (pid {pid}) serves the agent with pid {agent}, which runs: end "
            "that agent first, or use another folder"
        )
    return KeeperProcess(path, pid, is_adopted=True)


def _start_new(
    path: Path, lease_s: float, node: str, ready_s: float, end_s: float
) -> KeeperProcess | None:
    """Return a new keeper that listens at *path*, None where another one begins or ends just now.

    Raises:
        KeeperError: It did not begin before *end_s*, *ready_s* from the first try.
    """
    first_line, pid = _start(path.parent, lease_s, node, end_s)
    keeper = KeeperProcess(path, pid, is_adopted=False)
    if first_line == "ready":
        return keeper
    keeper.kill()
    if first_line.startswith("failed "):
        raise KeeperError(f"the keeper cannot begin: {first_line.removeprefix('failed ')}")
    if first_line == "taken" and time.monotonic() <= end_s:
        return None
    raise KeeperError(
        f"the keeper in {path.parent} did not begin within {ready_s:g} s; its log is there"
    )


def _start(folder: Path, lease_s: float, node: str, end_s: float) -> tuple[str, int]:
    """Start a keeper; return its first line, "" where there was none in time, and its pid."""
    # -P: never import from the directory in which the job happens to be.
    argv = [sys.executable, "-P", "-m", "gpuops.checkpoint.keeper.serve", "--folder", str(folder)]
    argv += ["--lease", f"{lease_s:g}"]
    argv += ["--node", node] if node else []
    try:
        process = start_sidecar(argv, environ())
    except OSError as exc:
        raise KeeperError(f"the keeper cannot be started: {exc.strerror}") from exc
    return process.first_line(end_s), process.pid
