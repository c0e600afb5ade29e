"""Who undoes a fault, also when the injector is killed: ``python -m gpuops.drill.keeper S``.

It is told each undoing before the deed is done, and undoes all of them, the last one first, once
its standard input closes or *S* seconds are over. It is in a session of its own and ignores the
signals by which sessions and services are ended.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time

from gpuops.config import environ
from gpuops.drill.steps import SendSignal, Step, from_json, perform, to_json
from gpuops.drill.victims import has_ended
from gpuops.errors import DrillError
from gpuops.host.companion import Companion, start_companion

DROP = "drop"
_LINE_BYTES_MAX = 2**20


class Keeper:
    """Our end of a keeper.

    Raises:
        DrillError: None could be started; then nothing that needs undoing may be done.
    """

    def __init__(self, limit_s: float) -> None:
        argv = [sys.executable, "-m", "gpuops.drill.keeper", str(limit_s)]
        try:
            self._companion: Companion = start_companion(argv, environ())
        except OSError as exc:
            raise DrillError(f"cannot start the process that undoes it: {exc.strerror}") from exc
        if self._companion.hear() != "ready":
            self._companion.part()
            raise DrillError("the process that would undo it ended at once")
        self._undo: list[Step] = []

    def promise(self, undo: Step) -> None:
        """Have *undo* done at the end, whatever becomes of us.

        Raises:
            DrillError: The keeper is gone.
        """
        if not self._companion.say(json.dumps(to_json(undo))):
            raise DrillError("the process that would undo it is gone")
        self._undo.append(undo)

    def drop(self) -> None:
        """Take the last promise back: its deed was not done."""
        self._companion.say(DROP)
        self._undo.pop()

    def release(self) -> tuple[str, ...]:
        """Have everything undone now; return what could not be."""
        self._companion.hang_up()
        said = self._companion.hear()
        self._companion.part()
        try:
            return tuple(map(str, json.loads(said)))
        except (ValueError, TypeError):
            return undo_all(self._undo)  # somebody killed it


def undo_all(undo: list[Step]) -> tuple[str, ...]:
    """Do all of *undo*, the last one first; return what could not be done.

    What has ended meanwhile stands still no more.
    """
    problems = []
    for step in reversed(undo):
        try:
            perform(step)
        except DrillError as exc:
            if not (isinstance(step, SendSignal) and has_ended(step.victim)):
                problems.append(str(exc))
    return tuple(problems)


def main() -> int:
    """Listen, wait, undo; print the problems as a JSON list, exit 1 where there are any."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    end_s = time.monotonic() + float(sys.argv[1])
    os.write(1, b"ready\n")
    problems = undo_all(_listen(end_s))
    with contextlib.suppress(OSError):  # nobody may be there to read it
        os.write(1, json.dumps(problems).encode() + b"\n")
    return 1 if problems else 0


def _listen(end_s: float) -> list[Step]:
    undo: list[Step] = []
    text = b""
    while (left_s := end_s - time.monotonic()) > 0 and len(text) < _LINE_BYTES_MAX:
        ready, _, _ = select.select([0], [], [], left_s)
        if not ready:
            break
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        for line in lines:
            if line == DROP.encode():
                undo.pop()
            else:
                undo.append(from_json(json.loads(line)))
    return undo


if __name__ == "__main__":
    sys.exit(main())
