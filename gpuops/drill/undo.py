"""The process that undoes a fault, even if the injector dies: ``python -m gpuops.drill.undo S``.

It receives each undo step before the step itself is performed, and performs all of them, the last
one first, once its standard input closes or *S* seconds are over. It runs in its own session and
ignores the signals that end sessions and services.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from gpuops.config.resolve import environ
from gpuops.drill.fault import Fault, InjectionResult
from gpuops.drill.find import has_ended
from gpuops.drill.steps import SendSignal, Step, from_json, perform, to_json
from gpuops.errors import DrillError
from gpuops.host.clock import Clock
from gpuops.host.process.command import module_command
from gpuops.host.process.sidecar import Sidecar, start_sidecar
from gpuops.model import Event, Json, Severity
from gpuops.store.events import new_event

INJECTED_KIND = "drill.injected"
ENDED_KIND = "drill.ended"


def fault_to_json(fault: Fault) -> Json:
    """Return *fault* as events and the command report it."""
    return {
        "scenario": fault.scenario,
        "breaks": fault.breaks,
        "undone": fault.undone,
        "entities": [entity.to_json() for entity in fault.entities],
        "for_s": fault.for_s,
        "run": fault.run_id,
        "attempt": fault.generation,
        "seed": fault.seed,
    }


def injected_event(
    fault: Fault, *, node: str, uid: int, clock: Clock, randomness: Callable[[int], bytes]
) -> Event:
    """Return the event that user *uid* is about to inject *fault*."""
    return _event(
        INJECTED_KIND, fault, node, clock, randomness, {**fault_to_json(fault), "uid": uid}
    )


def ended_event(
    fault: Fault,
    result: InjectionResult,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
) -> Event:
    """Return the event that reports the result of *fault*."""
    payload = {
        "scenario": fault.scenario,
        "failed": list(result.failed),
        "not_undone": list(result.not_undone),
    }
    return _event(ENDED_KIND, fault, node, clock, randomness, payload)


def _event(
    kind: str,
    fault: Fault,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
    payload: Json,
) -> Event:
    return new_event(
        kind,
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.WARNING,
        run_id=fault.run_id,
        attempt=fault.generation,
        payload=payload,
    )


UNREGISTER = "drop"
_LINE_BYTES_MAX = 2**20


class UndoProcess:
    """The injector's connection to an undo process.

    Raises:
        DrillError: It did not start; then no step that needs undoing may be performed.
    """

    def __init__(self, limit_s: float) -> None:
        argv = module_command("gpuops.drill.undo", str(limit_s))
        try:
            self._sidecar: Sidecar = start_sidecar(argv, environ())
        except OSError as exc:
            raise DrillError(f"cannot start the undo process: {exc.strerror}") from exc
        if self._sidecar.read_line() != "ready":
            self._sidecar.wait()
            raise DrillError("the undo process ended at once")
        self._undo: list[Step] = []

    def register_undo(self, undo: Step) -> None:
        """Have *undo* performed at the end, even if this process is killed.

        Raises:
            DrillError: The undo process has ended.
        """
        if not self._sidecar.write_line(json.dumps(to_json(undo))):
            raise DrillError("the undo process has ended")
        self._undo.append(undo)

    def unregister_last(self) -> None:
        """Remove the last undo step: its step was not performed."""
        self._sidecar.write_line(UNREGISTER)
        self._undo.pop()

    def run_undo(self) -> tuple[str, ...]:
        """Undo everything now; return the errors."""
        self._sidecar.close_stdin()
        reply = self._sidecar.read_line()
        self._sidecar.wait()
        try:
            return tuple(map(str, json.loads(reply)))
        except (ValueError, TypeError):
            return undo_all(self._undo)  # it was killed


def undo_all(undo: list[Step]) -> tuple[str, ...]:
    """Perform all of *undo*, the last one first; return the errors.

    A stopped process that has ended meanwhile needs no undo.
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
    """Read the steps, wait, undo; print the errors as a JSON list, exit 1 if there are any."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    end_s = time.monotonic() + float(sys.argv[1])
    os.write(1, b"ready\n")
    problems = undo_all(_read_steps(end_s))
    with contextlib.suppress(OSError):  # the reader may have ended
        os.write(1, json.dumps(problems).encode() + b"\n")
    return 1 if problems else 0


def _read_steps(end_s: float) -> list[Step]:
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
            if line == UNREGISTER.encode():
                undo.pop()
            else:
                undo.append(from_json(json.loads(line)))
    return undo


if __name__ == "__main__":
    sys.exit(main())
