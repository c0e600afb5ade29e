"""Inject a fault, hold it for its time, undo it."""

import signal
from collections.abc import Callable
from contextlib import ExitStack

from gpuops.drill.fault import Fault, InjectionResult, Pulse
from gpuops.drill.find import send
from gpuops.drill.steps import SendSignal, perform
from gpuops.drill.undo import UndoProcess
from gpuops.errors import DrillError
from gpuops.host.clock import Clock

# The undo process acts by itself this much later if the injector is stopped or stuck.
UNDO_MARGIN_S = 5.0
Wait = Callable[[float], object]


def inject(fault: Fault, clock: Clock, wait: Wait) -> InjectionResult:
    """Inject *fault*; return once its time is over and it is undone.

    A step that fails is listed in the result and the others are done anyway: a process may have
    ended meanwhile. Steps are undone however this call ends; if this process is killed, by the
    undo process.

    Args:
        fault: The plan.
        clock: For its monotonic time.
        wait: Waits for a number of seconds.

    Raises:
        DrillError: Every step failed; nothing was changed.
    """
    with ExitStack() as cleanup:
        undo_process = _start_undo_process(fault)
        failed: list[str] = []
        not_undone: list[str] = []
        if undo_process is not None:
            cleanup.callback(lambda: not_undone.extend(undo_process.run_undo()))
        _perform_steps(fault, undo_process, cleanup, failed)
        if failed and len(failed) == sum(change.do is not None for change in fault.changes):
            raise DrillError(f"nothing was done: {failed[0]}")
        end_ns = clock.mono_ns() + round((fault.for_s or 0.0) * 1e9)
        if fault.pulse is not None:
            _pulse(fault.pulse, end_ns, clock, wait)
        elif fault.for_s is not None:
            _hold(end_ns, clock, wait)
    return InjectionResult(tuple(failed), tuple(not_undone))


def _start_undo_process(fault: Fault) -> UndoProcess | None:
    if fault.pulse is None and all(change.undo is None for change in fault.changes):
        return None
    assert fault.for_s is not None, "a fault that is undone has a duration"
    undo_process = UndoProcess(fault.for_s + UNDO_MARGIN_S)
    if fault.pulse is not None:
        for victim in fault.pulse.victims:
            undo_process.register_undo(SendSignal(victim, "SIGCONT"))
    return undo_process


def _perform_steps(
    fault: Fault, undo_process: UndoProcess | None, cleanup: ExitStack, failed: list[str]
) -> None:
    for change in fault.changes:
        if undo_process is not None and change.undo is not None:
            undo_process.register_undo(change.undo)
        try:
            release = None if change.do is None else perform(change.do)
        except DrillError as exc:
            failed.append(str(exc))
            if undo_process is not None and change.undo is not None:
                undo_process.unregister_last()
            continue
        if release is not None:
            cleanup.callback(release)


def _hold(end_ns: int, clock: Clock, wait: Wait) -> None:
    while (left_ns := end_ns - clock.mono_ns()) > 0:
        wait(left_ns / 1e9)


def _pulse(pulse: Pulse, end_ns: int, clock: Clock, wait: Wait) -> None:
    running = pulse.victims
    while clock.mono_ns() < end_ns and running:
        running = tuple(victim for victim in running if send(victim, signal.SIGSTOP))
        _hold(min(clock.mono_ns() + round(pulse.stopped_s * 1e9), end_ns), clock, wait)
        for victim in running:
            send(victim, signal.SIGCONT)
        _hold(min(clock.mono_ns() + round(pulse.running_s * 1e9), end_ns), clock, wait)
