"""Classify one worker's exit: the failure class, the confidence, and the source of both.

Sources in order of authority: the kernel's record about the process, the process' own exception,
the signal that ended it, and last the content of its log.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuops.incident import exception, kernel
from gpuops.model import Confidence, FailureClass, Role, Side, WorkerExit
from gpuops.rules import LogRule, LogSource, first_match

ANY_CATEGORY = frozenset({"*"})
TAIL_LINES_MAX = 60
_PIDS_IN_MESSAGE = re.compile(r"\(pid(?:\(s\))? ([\d, ]{1,80})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedExit:
    """The part of one exit in the failure of its attempt.

    ``lines`` are those that decided it; ``basis`` is text on how the class is known, or why it
    is no failure. ``is_specific``: a rule or the kernel named the class, not just the way the
    process ended.
    """

    worker: WorkerExit
    role: Role
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    basis: str
    lines: tuple[str, ...] = ()
    kernel_lines: tuple[str, ...] = ()
    is_specific: bool = False

    @property
    def failed_ns(self) -> int:
        """Return when it failed by the host's monotonic clock, or when that was noticed."""
        return self.worker.error_mono_ns or self.worker.seen_mono_ns

    @property
    def sort_key(self) -> tuple[int, bool, int, int]:
        """Return a total order of failures on one host: by time, then rank, then process.

        Of two that were seen in one poll the one ended by a signal comes first: a worker can exit
        because another was killed, but is not killed because another exited.
        """
        worker = self.worker
        return self.failed_ns, worker.signal is None, worker.rank, worker.pid


@dataclass(frozen=True, slots=True)
class _SignalMeaning:
    """What death by a signal means, and which categories of log rule may refine it."""

    failure_class: FailureClass
    side: Side
    confidence: Confidence
    basis: str
    refined_by: frozenset[str] = frozenset()


_CRASH = _SignalMeaning(
    FailureClass.SEGFAULT,
    Side.AMBIGUOUS,
    Confidence.CONFIRMED,
    "known by its wait status: the process made an invalid access",
    frozenset({"gpu_hw", "storage"}),
)
_TERMINATED = _SignalMeaning(
    FailureClass.CANCELLED,
    Side.SCHEDULER,
    Confidence.PROBABLE,
    "known by its wait status: a process other than its agent asked it to end",
)
_SIGNALS = {
    "SIGKILL": _SignalMeaning(
        FailureClass.SIGKILL_PROBABLE,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
        "known by its wait status alone: the sender of the signal is not recorded",
        frozenset({"host_mem"}),
    ),
    "SIGABRT": _SignalMeaning(
        FailureClass.ABORT,
        Side.AMBIGUOUS,
        Confidence.CONFIRMED,
        "known by its wait status: the process aborted itself",
        ANY_CATEGORY,
    ),
    "SIGSEGV": _CRASH,
    "SIGBUS": _CRASH,
    "SIGILL": _CRASH,
    "SIGFPE": _CRASH,
    "SIGTERM": _TERMINATED,
    "SIGINT": _TERMINATED,
    "SIGHUP": _TERMINATED,
}
_OTHER_SIGNAL = _SignalMeaning(
    FailureClass.UNRESOLVED,
    Side.AMBIGUOUS,
    Confidence.UNKNOWN,
    "known by its wait status: a signal that says nothing about the cause",
    ANY_CATEGORY,
)
# A shell between the agent and Python turns the signal n into the exit code 128 + n.
_SHELL_CODES = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL"}
_SHELL_CODES |= {139: "SIGSEGV", 143: "SIGTERM"}


def classify(
    worker: WorkerExit, rules: Sequence[LogRule], kernel_lines: Sequence[str] = ()
) -> ClassifiedExit:
    """Return what the end of *worker* means.

    Args:
        worker: How it ended.
        rules: Log rules; those of other sources than the worker's log are ignored.
        kernel_lines: The node's kernel log around the failure, if it could be read.
    """
    if worker.completed:
        return _not_a_failure(worker, Role.NOISE, "it finished")
    if worker.terminated:
        return _not_a_failure(
            worker, Role.TEARDOWN, "its agent ended it after another worker had failed"
        )
    process_lines = kernel.lines_with_pids(kernel_lines, _pids(worker))
    return (
        _by_oom(worker, kernel_lines)
        or _by_exception(worker, rules, process_lines)
        or _by_signal(worker, rules, process_lines)
        or _by_log(worker, rules)
        or _unexplained(worker)
    )


def ending_signal(worker: WorkerExit) -> str | None:
    """Return the signal that ended *worker*, also where a shell hid it in the exit code."""
    return worker.signal or _SHELL_CODES.get(worker.exit_code or 0)


def _not_a_failure(worker: WorkerExit, role: Role, basis: str) -> ClassifiedExit:
    return ClassifiedExit(
        worker=worker,
        role=role,
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        confidence=Confidence.UNKNOWN,
        basis=basis,
    )


def _pids(worker: WorkerExit) -> set[int]:
    matches = _PIDS_IN_MESSAGE.findall(worker.exception_message or "")
    return {worker.pid} | {int(pid) for text in matches for pid in text.split(",") if pid.strip()}


def _by_oom(worker: WorkerExit, kernel_lines: Sequence[str]) -> ClassifiedExit | None:
    record = kernel.oom_record(kernel_lines, _pids(worker))
    if record is None:
        return None
    in_cgroup = record.failure_class is FailureClass.CGROUP_OOM
    return ClassifiedExit(
        worker=worker,
        role=Role.ROOT,
        failure_class=record.failure_class,
        side=Side.USER if in_cgroup else Side.AMBIGUOUS,
        confidence=Confidence.CONFIRMED,
        basis="known by the kernel's own record of the OOM kill",
        lines=(record.line,),
        kernel_lines=(record.line,),
        is_specific=True,
    )


def _by_exception(
    worker: WorkerExit, rules: Sequence[LogRule], process_lines: tuple[str, ...]
) -> ClassifiedExit | None:
    lines = exception.exception_lines(worker)
    if not lines:
        return None
    hit = _best_match(rules, lines)
    if hit is not None:
        rule, line = hit
        return _by_rule(
            worker, rule, line, Confidence.CONFIRMED, "the exception it raised", process_lines
        )
    where = exception.user_frame(worker)
    basis = f"the exception it raised{f' at {where}' if where else ''}"
    return _program_failure(worker, basis, (lines[0],), process_lines)


def _by_signal(
    worker: WorkerExit, rules: Sequence[LogRule], process_lines: tuple[str, ...]
) -> ClassifiedExit | None:
    name = ending_signal(worker)
    if name is None:
        return None
    meaning = _SIGNALS.get(name, _OTHER_SIGNAL)
    is_abort = meaning.failure_class is FailureClass.ABORT
    reason = exception.abort_reason(_tail(worker)) if is_abort else None
    lines = [*([] if reason is None else [reason]), *_tail(worker)]
    hit = _best_match(rules, lines, meaning.refined_by)
    if hit is not None:
        rule, line = hit
        return _by_rule(
            worker, rule, line, Confidence.PROBABLE, f"its log, and {name}", process_lines
        )
    return ClassifiedExit(
        worker=worker,
        role=Role.ROOT,
        failure_class=meaning.failure_class,
        side=meaning.side,
        confidence=meaning.confidence,
        basis=meaning.basis if reason is None else f"{meaning.basis}; its log has the reason",
        lines=() if reason is None else (reason,),
        kernel_lines=process_lines,
    )


def _by_log(worker: WorkerExit, rules: Sequence[LogRule]) -> ClassifiedExit | None:
    tail = _tail(worker)
    hit = _best_match(rules, tail)
    if hit is not None:
        rule, line = hit
        return _by_rule(worker, rule, line, Confidence.PROBABLE, "its log")
    printed = exception.printed_exception(tail)
    if printed is None:
        return None
    return _program_failure(worker, "the traceback in its log", (printed,))


def _unexplained(worker: WorkerExit) -> ClassifiedExit:
    last_line = _last_stderr_line(worker)
    left = (
        "it left no exception, but a last line"
        if last_line
        else "it left no exception and no other information"
    )
    return _program_failure(worker, f"its exit code {worker.exit_code}: {left}", last_line)


def _program_failure(
    worker: WorkerExit, basis: str, lines: tuple[str, ...], process_lines: tuple[str, ...] = ()
) -> ClassifiedExit:
    """Return that, as far as known, the program itself failed."""
    return ClassifiedExit(
        worker=worker,
        role=Role.ROOT,
        failure_class=FailureClass.USER_EXCEPTION,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        basis=f"known by {basis}",
        lines=lines,
        kernel_lines=process_lines,
    )


def _last_stderr_line(worker: WorkerExit) -> tuple[str, ...]:
    """Return the last line of its standard error: `sys.exit` prints its argument there."""
    if worker.log_path is None or "stderr" not in PurePosixPath(worker.log_path).name:
        return ()
    return tuple(line for line in worker.log_tail[-1:] if line.strip())


def _by_rule(
    worker: WorkerExit,
    rule: LogRule,
    line: str,
    confidence: Confidence,
    basis: str,
    process_lines: tuple[str, ...] = (),
) -> ClassifiedExit:
    is_symptom = rule.role is Role.SYMPTOM
    return ClassifiedExit(
        worker=worker,
        role=Role.SYMPTOM if is_symptom else Role.ROOT,
        failure_class=rule.failure_class,
        side=rule.side,
        confidence=Confidence.SYMPTOM_ONLY if is_symptom else confidence,
        basis=f"known by {basis} (rule {rule.id})",
        lines=(line,),
        kernel_lines=process_lines,
        is_specific=True,
    )


def _tail(worker: WorkerExit) -> list[str]:
    return list(worker.log_tail[-TAIL_LINES_MAX:])


def _best_match(
    rules: Sequence[LogRule], lines: Sequence[str], categories: frozenset[str] = ANY_CATEGORY
) -> tuple[LogRule, str] | None:
    """Return the first line that matches a root cause, else the first that is a symptom."""
    if not categories:
        return None
    symptom: tuple[LogRule, str] | None = None
    for line in exception.drop_frames(lines):
        rule = first_match(rules, line, LogSource.WORKER)
        if rule is None or not (
            categories is ANY_CATEGORY or rule.failure_class.category in categories
        ):
            continue
        if rule.role in (Role.ROOT, Role.CONFIRMATION):
            return rule, line
        if rule.role is Role.SYMPTOM and symptom is None:
            symptom = rule, line
    return symptom
