"""The optional interface of a training script to its agent.

Without ``gpuops run``, with ``GPUOPS_DISABLE=1``, in a forked child and where torch.compile traces
the caller, each of these does nothing. None of them raises, for whatever it is given.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from operator import index
from types import TracebackType
from typing import Self

from gpuops.wire.ring import STEP_UNKNOWN, AgentRequest, WorkerFlag, WorkerPhase
from gpuops.worker.heartbeat import Heartbeat

_STEP_MAX = 2**63 - 1
# The agent learns of a signal to this process within its next poll, and answers with a request
# to all ranks for the same step. Without an answer the signal itself counts.
UNANSWERED_NS = 3 * 10**9
_NAMES = {
    "eval": WorkerPhase.EVAL,
    "evaluate": WorkerPhase.EVAL,
    "evaluation": WorkerPhase.EVAL,
    "valid": WorkerPhase.EVAL,
    "validate": WorkerPhase.EVAL,
    "validation": WorkerPhase.EVAL,
    "test": WorkerPhase.EVAL,
    "checkpoint": WorkerPhase.CHECKPOINT,
    "save": WorkerPhase.CHECKPOINT,
    "restore": WorkerPhase.RESTORE,
    "resume": WorkerPhase.RESTORE,
    "load": WorkerPhase.RESTORE,
}


def progress(step: int, *, tokens: int = 0) -> None:
    """Report that *step* is done; it takes precedence over the optimizer's own step number.

    For loops without a torch optimizer, and where one optimizer step is not one step of the run.
    Anything but a whole number on the host is ignored: reading a device would wait for it.
    *tokens* is how many tokens this rank has processed in the step: it tells uneven sequences from
    slow hardware. Where it is no such number, a line says so once, and the step counts.
    """
    if _is_compiling() or _heart is None:
        return
    number = _on_host(step)
    if number is None or number < 0:
        return
    amount = _on_host(tokens)
    if amount is None or amount < 0:
        amount = 0
        _warn_of_tokens(tokens)
    try:
        _heart.progress(min(number, _STEP_MAX), amount)
    except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
        _disable()


def named(step: int) -> None:
    """Record *step* of a `gpuops.Checkpointer`; `progress` takes precedence."""
    if _heart is None or _is_compiling():
        return
    try:
        _heart.named(min(step, _STEP_MAX))
    except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
        _disable()


def restored(step: int) -> None:
    """Record that a `gpuops.Checkpointer` has loaded *step*."""
    if _heart is not None:
        _heart.restored(min(step, _STEP_MAX))


def phase(name: str) -> "PhaseScope":
    """Report that something other than steps begins: evaluation, saving, loading, anything long.

    ``with gpuops.phase("eval"):`` lasts for the block. A call without ``with`` lasts until the
    next step or phase. ``"eval"``, ``"checkpoint"`` and ``"restore"`` have a known meaning; each
    name has its own timeout, learned from this run.
    """
    scope = PhaseScope()
    if _is_compiling() or _heart is None:
        return scope
    try:
        text = str(name)
        scope.before = _heart.enter(_NAMES.get(text.lower(), WorkerPhase.OTHER), text)
    except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
        _disable()
    return scope


class PhaseScope:
    """The result of `phase`; the end of its ``with`` block is the end of the phase."""

    before: tuple[WorkerPhase, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.before is None or _heart is None:
            return
        phase, name = self.before
        try:
            # Before the first step, the next step is still the first one.
            _heart.enter(phase if name else WorkerPhase.RESUMED, name)
        except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
            _disable()


def should_stop() -> bool:
    """Return whether to save and leave the loop: the run is being preempted or drained.

    Ask once per step, at the same place of the loop on every rank. Where step numbers are known all
    ranks get the answer at the same step, so that none waits for another in a collective.
    """
    if _is_compiling() or _heart is None or not _heart.is_on:
        return False
    try:
        _heart.flag(WorkerFlag.STOP_POLLED)
        if not _is_asked(_heart):
            return False
        _heart.flag(WorkerFlag.STOP_RETURNED)
    except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
        return False
    return True


def _is_asked(heart: Heartbeat) -> bool:
    request, stop_step = heart.request()
    if request is AgentRequest.DRAIN:
        return _has_reached(stop_step, heart.step)
    return request is AgentRequest.TERMINATE or _is_unanswered(time.monotonic_ns())


def _has_reached(stop_step: int, step: int) -> bool:
    return STEP_UNKNOWN in {stop_step, step} or step >= stop_step


def must_save_at_stop() -> bool:
    """Return whether the run drains and its last step is done; for a `gpuops.Checkpointer`.

    The caller saves that state, the same on all ranks as with `should_stop`, and then calls
    `saved_at_stop`: until then the agent waits for a script that does not ask.
    """
    if _heart is None or not _heart.is_on or _is_compiling():
        return False
    _heart.flag(WorkerFlag.SAVES_AT_STOP)
    request, stop_step = _heart.request()
    return request is AgentRequest.DRAIN and _has_reached(stop_step, _heart.step)


def is_watched() -> bool:
    """Return whether an agent watches this process."""
    return _heart is not None and _heart.is_on


def saved_at_stop() -> None:
    """Tell the agent that this rank has nothing more to save."""
    if _heart is not None:
        _heart.flag(WorkerFlag.SAVED_AT_STOP)


_heart: Heartbeat | None = None
_has_failed = False
_has_warned = False
_signalled_ns: Callable[[], int | None] = lambda: None  # noqa: E731 until `connect`


def connect(heart: Heartbeat, signalled_ns: Callable[[], int | None]) -> None:
    """Have these functions use *heart*; *signalled_ns* returns when a signal came, if any."""
    global _heart, _signalled_ns
    _heart, _signalled_ns = heart, signalled_ns


def finish(phase: WorkerPhase) -> None:
    """Beat a last time: the program has ended."""
    global _has_failed  # noqa: PLW0603 there is one program in a process
    _has_failed = phase is WorkerPhase.RAISED
    if _heart is None:
        return
    with contextlib.suppress(Exception):
        _heart.enter(phase)
        if phase is WorkerPhase.FINISHED:
            _heart.flag(WorkerFlag.PROGRAM_ENDED)


def has_failed() -> bool:
    """Return whether the program has ended by an exception, or with an exit code other than 0."""
    return _has_failed


def _disable() -> None:
    if _heart is not None:
        _heart.stop()


def _on_host(step: object) -> int | None:
    """Return *step* as a number, None where it is not one or is on a device.

    NumPy's numbers have a device, too: the CPU.
    """
    try:
        if type(step) is not int and str(getattr(step, "device", "cpu")) != "cpu":
            return None
        return index(step)  # type: ignore[arg-type]  # that is the question
    except Exception:  # noqa: BLE001 boundary: the script's value may raise anything
        return None


def _warn_of_tokens(tokens: object) -> None:
    global _has_warned  # noqa: PLW0603 one line a process
    if _has_warned:
        return
    _has_warned = True
    given = "a negative number" if isinstance(tokens, int | float) and tokens < 0 else ""
    with contextlib.suppress(Exception):
        sys.stderr.write(
            f"gpuops: gpuops.progress(step, tokens={given or type(tokens).__name__}): tokens are "
            "ignored, steps are not; give a whole number from 0 on that is on the host\n"
        )


def _is_unanswered(now_ns: int) -> bool:
    came_ns = _signalled_ns()
    return came_ns is not None and now_ns - came_ns >= UNANSWERED_NS


def _is_compiling() -> bool:
    compiler = sys.modules.get("torch.compiler")
    return compiler is not None and compiler.is_compiling()
