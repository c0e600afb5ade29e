"""A keeper that does not answer: is it slow, or does it hang? One that hangs is ended.

Who is slow computes, or is busy in the kernel, and answers in the end. Who is stopped, or waits for
what never comes, uses no processor at all. Looks are counted, not seconds: a machine that was
suspended as a whole, with whoever looks, must not make a keeper look stuck.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint.keeper_line import KeeperLine, KeeperSilentError
from gpuops.checkpoint.messages import Fields
from gpuops.checkpoint.states import KeeperError

LOOK_S = 1.0
IDLE_LOOKS = 6  # the first and the last are five seconds apart
LOOKS_MAX = 20
GONE_S = 5.0
_STOPPED = "Tt"


@dataclass(frozen=True, slots=True)
class Look:
    """``state`` of the main thread, and the processor time of all, as proc(5) has them."""

    state: str
    cpu_ticks: int


class HungError(KeeperError):
    """The keeper hung and was ended; says why it was taken to hang."""


def why_hung(looks: Sequence[Look]) -> str | None:
    """Return how a keeper hangs that answered in none of *looks*, None while it may be slow."""
    last = looks[-IDLE_LOOKS:]
    if len(last) == IDLE_LOOKS:
        if all(look.state in _STOPPED for look in last):
            return "it was stopped by a signal"
        if all(look.state == "S" for look in last) and last[0].cpu_ticks == last[-1].cpu_ticks:
            return "it waited for something and used no processor"
    if len(looks) >= LOOKS_MAX:
        return f"it was in state {looks[-1].state}"
    return None


def look_at(pid: int) -> Look | None:
    """Return how the process *pid* is, None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return Look(fields[0], int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def answer_or_end(
    line: KeeperLine,
    look: Callable[[int], Look | None] = look_at,
    clock_s: Callable[[], float] = time.monotonic,
) -> Fields:
    """Return what the keeper on *line*, which was asked nothing yet, says to a hello.

    It takes some 20 seconds at most, 6 where it is idle.

    Raises:
        HungError: It does not answer and hangs; it has been ended, and is gone.
        KeeperGoneError: It has gone by itself.
        KeeperError: It hangs, and cannot be ended.
    """
    began_s, looks = clock_s(), list[Look]()
    pid = line.pid
    try:
        process = os.pidfd_open(pid)
    except OSError as exc:
        # Of another namespace of processes, for example: it can be asked, but not looked at.
        raise KeeperError(f"the keeper with pid {pid} cannot be looked at: {exc.strerror}") from exc
    try:
        with suppress(KeeperSilentError):
            return line.ask_soon("hello", wait_s=LOOK_S, role="probe")
        while True:
            seen = look(pid)
            if seen is not None:
                looks.append(seen)
            how = why_hung(looks)
            # That the line is still open means that `process` is the one that was asked.
            with suppress(KeeperSilentError):
                found = line.owed(0.0 if how else LOOK_S)
                assert found is not None
                return found[1]
            if how is not None:
                _end(process, pid)
                why = (
                    f"its keeper (pid {pid}) did not answer for {clock_s() - began_s:.0f} s: {how}"
                )
                raise HungError(why)
    finally:
        os.close(process)


def _end(process: int, pid: int) -> None:
    """Kill the process and wait until it is gone: two keepers must never serve one job.

    Raises:
        KeeperError: It outlives SIGKILL.
    """
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(GONE_S * 1000):
        raise KeeperError(
            f"the keeper with pid {pid} hangs and outlives SIGKILL: it sits in the kernel, and no "
            "other one may begin before it is gone"
        )
    with suppress(ChildProcessError):  # mostly it is not ours
        os.waitpid(pid, os.WNOHANG)
