"""One worker's end: which failure class it is, how well that is known, and by what.

The order is that of authority: what the kernel recorded about the process, what the process said
itself (its exception), how it ended (the signal), and last what its log happens to hold.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuops.incident import exception, kernel
from gpuops.model import Confidence, FailureClass, Role, Side, WorkerExit
from gpuops.rules import LogRule, LogSource, first_match

ANY = frozenset({"*"})
TAIL_LINES_MAX = 60
_PID_TOLD = re.compile(r"\(pid(?:\(s\))? ([\d, ]{1,80})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one exit is to the failure of its attempt.

    ``lines`` are those that decided it; ``by`` says in words how the class is known, or why it is
    no failure. ``specific`` means that a rule or the kernel named the class, not just the way the
    process ended.
    """

    worker: WorkerExit
    role: Role
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    by: str
    lines: tuple[str, ...] = ()
    kernel_lines: tuple[str, ...] = ()
    specific: bool = False

    @property
    def failed_ns(self) -> int:
        """Return when it failed on the host's monotonic clock, or when that was noticed."""
        return self.worker.error_mono_ns or self.worker.seen_mono_ns

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Return a total order of failures on one host: by time, then rank, then process.

        Of two that were seen in one look the one ended by a signal comes first: a worker can exit
        because another was killed, but is not killed because another exited.
        """
        worker = self.worker
        return self.failed_ns, worker.signal is None, worker.rank, worker.pid


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an end by a signal means, and which categories of log rule may know better."""

    failure_class: FailureClass
    side: Side
    confidence: Confidence
    by: str
    heeds: frozenset[str] = frozenset()


_CRASH = _Meaning(
    FailureClass.SEGFAULT,
    Side.AMBIGUOUS,
    Confidence.CONFIRMED,
    "known by its wait status: the process made an invalid access",
    frozenset({"gpu_hw", "storage"}),
)
_ASKED_TO_END = _Meaning(
    FailureClass.CANCELLED,
    Side.SCHEDULER,
    Confidence.PROBABLE,
    "known by its wait status: somebody other than its agent asked it to end",
)
_SIGNALS = {
    "SIGKILL": _Meaning(
        FailureClass.SIGKILL_PROBABLE,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
        "known by its wait status alone: no record says who sent the signal",
        frozenset({"host_mem"}),
    ),
    "SIGABRT": _Meaning(
        FailureClass.ABORT,
        Side.AMBIGUOUS,
        Confidence.CONFIRMED,
        "known by its wait status: the process aborted itself",
        ANY,
    ),
    "SIGSEGV": _CRASH,
    "SIGBUS": _CRASH,
    "SIGILL": _CRASH,
    "SIGFPE": _CRASH,
    "SIGTERM": _ASKED_TO_END,
    "SIGINT": _ASKED_TO_END,
    "SIGHUP": _ASKED_TO_END,
}
_OTHER_SIGNAL = _Meaning(
    FailureClass.UNRESOLVED,
    Side.AMBIGUOUS,
    Confidence.UNKNOWN,
    "known by its wait status: a signal that says nothing about the cause",
    ANY,
)
# A shell between the agent and Python turns the signal n into the exit code 128 + n.
_SHELL_CODES = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 137: "SIGKILL"}
_SHELL_CODES |= {139: "SIGSEGV", 143: "SIGTERM"}


def classify(
    worker: WorkerExit, rules: Sequence[LogRule], kernel_lines: Sequence[str] = ()
) -> Verdict:
    """Return what the end of *worker* means.

    Args:
        worker: How it ended.
        rules: Log rules; those of other sources than the worker's log are left aside.
        kernel_lines: The node's kernel log around the failure, if it could be read.
    """
    if worker.was_done:
        return _plain(worker, Role.NOISE, "it was done")
    if worker.terminated:
        return _plain(worker, Role.TEARDOWN, "its agent ended it after another worker had failed")
    about = kernel.lines_about(kernel_lines, _pids(worker))
    return (
        _by_oom(worker, about)
        or _by_exception(worker, rules, about)
        or _by_signal(worker, rules, about)
        or _by_log(worker, rules)
        or _unexplained(worker)
    )


def ending_signal(worker: WorkerExit) -> str | None:
    """Return the signal that ended *worker*, also where a shell hid it in the exit code."""
    return worker.signal or _SHELL_CODES.get(worker.exit_code or 0)


def _plain(worker: WorkerExit, role: Role, by: str) -> Verdict:
    return Verdict(
        worker=worker,
        role=role,
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        confidence=Confidence.UNKNOWN,
        by=by,
    )


def _pids(worker: WorkerExit) -> set[int]:
    told = _PID_TOLD.findall(worker.exception_message or "")
    return {worker.pid} | {int(pid) for text in told for pid in text.split(",") if pid.strip()}


def _by_oom(worker: WorkerExit, about: Sequence[str]) -> Verdict | None:
    record = kernel.oom_record(about, _pids(worker))
    if record is None:
        return None
    in_cgroup = record.failure_class is FailureClass.CGROUP_OOM
    return Verdict(
        worker=worker,
        role=Role.ROOT,
        failure_class=record.failure_class,
        side=Side.USER if in_cgroup else Side.AMBIGUOUS,
        confidence=Confidence.CONFIRMED,
        by="known by the kernel's own record of the OOM kill",
        lines=(record.line,),
        kernel_lines=(record.line,),
        specific=True,
    )


def _by_exception(
    worker: WorkerExit, rules: Sequence[LogRule], about: tuple[str, ...]
) -> Verdict | None:
    lines = exception.said(worker)
    if not lines:
        return None
    hit = _best_hit(rules, lines)
    if hit is not None:
        rule, line = hit
        return _ruled(worker, rule, line, Confidence.CONFIRMED, "the exception it raised", about)
    where = exception.place(worker)
    by = f"the exception it raised{f' at {where}' if where else ''}"
    return _by_program(worker, by, (lines[0],), about)


def _by_signal(
    worker: WorkerExit, rules: Sequence[LogRule], about: tuple[str, ...]
) -> Verdict | None:
    name = ending_signal(worker)
    if name is None:
        return None
    meaning = _SIGNALS.get(name, _OTHER_SIGNAL)
    hit = _best_hit(rules, _tail(worker), meaning.heeds)
    if hit is not None:
        rule, line = hit
        return _ruled(worker, rule, line, Confidence.PROBABLE, f"its log, and {name}", about)
    return Verdict(
        worker=worker,
        role=Role.ROOT,
        failure_class=meaning.failure_class,
        side=meaning.side,
        confidence=meaning.confidence,
        by=meaning.by,
        kernel_lines=about,
    )


def _by_log(worker: WorkerExit, rules: Sequence[LogRule]) -> Verdict | None:
    tail = _tail(worker)
    hit = _best_hit(rules, tail)
    if hit is not None:
        rule, line = hit
        return _ruled(worker, rule, line, Confidence.PROBABLE, "its log")
    printed = exception.printed_exception(tail)
    if printed is None:
        return None
    return _by_program(worker, "the traceback in its log", (printed,))


def _unexplained(worker: WorkerExit) -> Verdict:
    words = _last_words(worker)
    left = (
        "no exception was left, but a last line" if words else "no exception and no hint was left"
    )
    return _by_program(worker, f"its exit code {worker.exit_code}: {left}", words)


def _by_program(
    worker: WorkerExit, by: str, lines: tuple[str, ...], about: tuple[str, ...] = ()
) -> Verdict:
    """Return the verdict that the program itself failed, for all that is known."""
    return Verdict(
        worker=worker,
        role=Role.ROOT,
        failure_class=FailureClass.USER_EXCEPTION,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        by=f"known by {by}",
        lines=lines,
        kernel_lines=about,
    )


def _last_words(worker: WorkerExit) -> tuple[str, ...]:
    """Return the last line of its standard error: where `sys.exit` puts what it is given."""
    if worker.log_path is None or "stderr" not in PurePosixPath(worker.log_path).name:
        return ()
    return tuple(line for line in worker.log_tail[-1:] if line.strip())


def _ruled(
    worker: WorkerExit,
    rule: LogRule,
    line: str,
    confidence: Confidence,
    by: str,
    about: tuple[str, ...] = (),
) -> Verdict:
    is_symptom = rule.role is Role.SYMPTOM
    return Verdict(
        worker=worker,
        role=Role.SYMPTOM if is_symptom else Role.ROOT,
        failure_class=rule.failure_class,
        side=rule.side,
        confidence=Confidence.SYMPTOM_ONLY if is_symptom else confidence,
        by=f"known by {by} (rule {rule.id})",
        lines=(line,),
        kernel_lines=about,
        specific=True,
    )


def _tail(worker: WorkerExit) -> list[str]:
    return list(worker.log_tail[-TAIL_LINES_MAX:])


def _best_hit(
    rules: Sequence[LogRule], lines: Sequence[str], heeds: frozenset[str] = ANY
) -> tuple[LogRule, str] | None:
    """Return the first line that names a root, else the first that is a symptom."""
    if not heeds:
        return None
    symptom: tuple[LogRule, str] | None = None
    for line in exception.speaking(lines):
        rule = first_match(rules, line, LogSource.WORKER)
        if rule is None or not (heeds is ANY or rule.failure_class.category in heeds):
            continue
        if rule.role in (Role.ROOT, Role.CONFIRMATION):
            return rule, line
        if rule.role is Role.SYMPTOM and symptom is None:
            symptom = rule, line
    return symptom
