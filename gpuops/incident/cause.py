"""Which of several failures on one host is the cause, and which ranks are to blame.

The earliest failure by the host's monotonic clock is the cause; workers that the agent ended are
teardown; symptoms (a peer is gone, a collective timed out) are never the cause while a root
exists (arXiv 2410.21680 §4 and the practice of torchelastic's "first observed failure").
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpuops.incident import exception
from gpuops.incident.classify import ClassifiedExit, classify, ending_signal
from gpuops.incident.kernel import KernelMatch, find_node_fault, node_remarks
from gpuops.model import Confidence, FailureClass, Role, Side, WorkerExit
from gpuops.rules import LogRule

# From this share of ranks with the same exception on, it is the program's fault, not a machine's.
SAME_EXCEPTION_SHARE = 0.9
# A death by signal is dated by the agent's poll, up to one interval (0.1 to 1 s) too late; an
# exception is dated by the worker itself. Within this span their order is not known.
POLL_SLACK_NS = 1_000_000_000
# Two workers killed together are dated by their agent's thread, which wakes within about 1 ms, but
# only once the kernel has torn the process down: that takes milliseconds, longer the more memory it
# held. No rank dies of another's signal, so a wide span costs nothing.
SIMULTANEOUS_NS = 50_000_000
_EXPLAINED = frozenset({"host_mem", "launcher", "storage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCause:
    """The cause of one attempt's failures on one host.

    ``blamed`` are the exits whose ranks are culprits; ``blames_node``: the node is one as well.
    ``first`` is the exit that dates the failure, None if nothing failed here.
    """

    failure_class: FailureClass
    side: Side
    confidence: Confidence
    how: str
    authority: int
    first: ClassifiedExit | None
    blamed: tuple[ClassifiedExit, ...] = ()
    blames_node: bool = False
    kernel: KernelMatch | None = None
    suspects: tuple[ClassifiedExit, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgedExits:
    """The ends of one node's workers, classified once: report and incident derive from them.

    ``exits`` are sorted, the likely causes first; ``remarks`` are lines of the kernel log that show
    trouble with the node.
    """

    exits: tuple[ClassifiedExit, ...]
    cause: HostCause
    remarks: tuple[str, ...]

    @property
    def workers(self) -> tuple[WorkerExit, ...]:
        """Return the ends as they were observed, by rank."""
        return tuple(sorted((item.worker for item in self.exits), key=lambda one: one.rank))


def judge_exits(
    exits: Sequence[WorkerExit],
    rules: Sequence[LogRule],
    kernel_lines: Sequence[str] = (),
    own_gpus: Collection[str] = (),
) -> JudgedExits:
    """Return what *exits* of one generation on one node say; their order does not matter.

    Args:
        exits: Every worker of the generation on this node.
        rules: Log rules (worker and kernel).
        kernel_lines: The kernel log around the end; empty if it may not be read.
        own_gpus: The PCI addresses of the job's GPUs, as far as known.
    """
    found = sorted((classify(one, rules, kernel_lines) for one in exits), key=lambda v: v.sort_key)
    return JudgedExits(
        tuple(found),
        find_cause(found, find_node_fault(kernel_lines, rules, own_gpus)),
        node_remarks(kernel_lines, rules),
    )


def find_cause(exits: Sequence[ClassifiedExit], node_fault: KernelMatch | None) -> HostCause:
    """Return the cause of *exits*, in any order.

    Args:
        exits: One for each worker of the attempt on this host.
        node_fault: The fault of the node itself in the kernel log, if any.
    """
    roots = sorted((v for v in exits if v.role is Role.ROOT), key=lambda v: v.sort_key)
    symptoms = sorted((v for v in exits if v.role is Role.SYMPTOM), key=lambda v: v.sort_key)
    if roots:
        return _with_kernel(_from_roots(roots, exits), node_fault)
    if symptoms:
        early = _find_early_exits(exits, symptoms)
        if early and node_fault is None:
            return _early_exit(early, symptoms)
        return _with_kernel(_symptoms_cause(symptoms, exits), node_fault)
    # If the workers were only stopped, a line in the node's log may be of another job.
    return _with_kernel(_no_cause(), node_fault if node_fault and node_fault.is_job_gpu else None)


def _from_roots(roots: Sequence[ClassifiedExit], exits: Sequence[ClassifiedExit]) -> HostCause:
    first = _earliest(roots)
    matching = _exits_with_same_exception(first, exits)
    if len(matching) >= 2 and len(matching) >= SAME_EXCEPTION_SHARE * len(exits):
        return _shared_cause(first, matching, len(exits))
    together = _ended_together(first, roots)
    if len(together) >= 2:
        return _killed_together(together)
    (first,) = together
    rest = [root for root in roots if root is not first]
    how = "the only worker that failed by itself"
    if rest:
        gap_s = (min(root.failed_ns for root in rest) - first.failed_ns) / 1e9
        how = f"the first of {len(roots)} failures on this host, {max(gap_s, 0):.2f} s ahead"
        if gap_s < 0:
            how = "it was killed; the exception of another rank in the same second follows from it"
    return HostCause(
        failure_class=first.failure_class,
        side=first.side,
        confidence=first.confidence,
        how=how + _who_differs(first),
        authority=2,
        first=first,
        blamed=(first,),
        blames_node=True,
    )


def _who_differs(first: ClassifiedExit) -> str:
    """Return what is known of the ranks at fault where one ended that noticed a mismatch."""
    if first.failure_class is not FailureClass.COLLECTIVE_MISMATCH:
        return ""
    return "; it noticed that collectives differ: it, or a rank that sent to it, called another one"


def _earliest(roots: Sequence[ClassifiedExit]) -> ClassifiedExit:
    first = roots[0]
    if first.worker.error_mono_ns is None or first.is_specific:
        return first
    killed = (
        root
        for root in roots
        if ending_signal(root.worker) == "SIGKILL"
        and root.worker.exception_type is None
        and root.failed_ns - first.failed_ns <= POLL_SLACK_NS
    )
    return next(killed, first)


def _ended_together(first: ClassifiedExit, roots: Sequence[ClassifiedExit]) -> list[ClassifiedExit]:
    """Return the workers that the signal of *first* ended at the same time, as far as known.

    If a record explains some of these ends, only those are returned.
    """
    signal = ending_signal(first.worker)
    if signal is None or first.worker.exception_type is not None:
        return [first]
    together = [
        root
        for root in roots
        if ending_signal(root.worker) == signal
        and root.worker.exception_type is None
        and abs(root.failed_ns - first.failed_ns) <= SIMULTANEOUS_NS
    ]
    known = [root for root in together if root.is_specific] or together
    return [root for root in known if root.failure_class is known[0].failure_class]


def _killed_together(together: Sequence[ClassifiedExit]) -> HostCause:
    first = together[0]
    times = [root.failed_ns for root in together]
    span_s = max((max(times) - min(times)) / 1e9, 0.01)
    many = "both" if len(together) == 2 else f"all {len(together)}"
    return HostCause(
        failure_class=first.failure_class,
        side=first.side,
        confidence=first.confidence,
        how=f"{many} within {span_s:.2f} s: their order is unknown{_who_differs(first)}",
        authority=2,
        first=first,
        blamed=tuple(sorted(together, key=lambda v: v.worker.rank)),
        blames_node=True,
    )


def _exits_with_same_exception(
    first: ClassifiedExit, exits: Sequence[ClassifiedExit]
) -> list[ClassifiedExit]:
    """Return every worker that raised the exception of *first*, also those ended meanwhile."""
    signature = exception.signature(first.worker)
    if signature is None or first.side is Side.INFRA:
        return []
    return [v for v in exits if exception.signature(v.worker) == signature]


def _shared_cause(
    first: ClassifiedExit, matching: Sequence[ClassifiedExit], world: int
) -> HostCause:
    blamed = sorted((v for v in matching if v.role is Role.ROOT), key=lambda v: v.worker.rank)
    return HostCause(
        failure_class=first.failure_class,
        side=Side.USER,
        confidence=Confidence.CONFIRMED,
        how=f"{len(matching)} of {world} ranks raised the same exception: it is the program's",
        authority=2,
        first=first,
        blamed=tuple(blamed),
    )


def _find_early_exits(
    exits: Sequence[ClassifiedExit], symptoms: Sequence[ClassifiedExit]
) -> list[ClassifiedExit]:
    """Return the workers that had exited with code 0 when others lost their peer."""
    done = [v for v in exits if v.role is Role.NOISE]
    limit = symptoms[0].failed_ns + POLL_SLACK_NS
    return sorted(
        (v for v in done if _done_ns(v) <= limit), key=lambda v: (_done_ns(v), v.sort_key)
    )


def _done_ns(classified: ClassifiedExit) -> int:
    """Return when it finished; on a busy host its process may end only seconds later."""
    return classified.worker.finished_mono_ns or classified.failed_ns


def _early_exit(early: Sequence[ClassifiedExit], symptoms: Sequence[ClassifiedExit]) -> HostCause:
    return HostCause(
        failure_class=FailureClass.USER_EARLY_EXIT,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        how=f"it finished while others still needed it ({len(symptoms)} lost their peer)",
        authority=2,
        first=early[0],
        blamed=tuple(early),
    )


def _symptoms_cause(
    symptoms: Sequence[ClassifiedExit], exits: Sequence[ClassifiedExit]
) -> HostCause:
    first = symptoms[0]
    return HostCause(
        failure_class=first.failure_class,
        side=Side.AMBIGUOUS,
        confidence=Confidence.SYMPTOM_ONLY,
        how="no rank on this host failed first: the cause is elsewhere or left no trace",
        authority=1,
        first=first,
        suspects=tuple(_suspects(symptoms, exits)),
    )


def _suspects(
    symptoms: Sequence[ClassifiedExit], exits: Sequence[ClassifiedExit]
) -> list[ClassifiedExit]:
    """Return the ranks to examine first: silent ones, and the ones behind the others.

    The rank that all wait for is the one without a symptom of its own, or the one whose last step
    is below the others'.
    """
    steps = [v.worker.last_step for v in exits if v.worker.last_step is not None]
    newest_step = max(steps, default=None)
    silent = [v for v in exits if v.role is Role.TEARDOWN]
    behind = [
        v
        for v in symptoms
        if newest_step is not None
        and v.worker.last_step is not None
        and v.worker.last_step < newest_step
    ]
    return sorted(silent + behind, key=lambda v: (v.worker.last_step or 0, v.worker.rank))


def _no_cause() -> HostCause:
    return HostCause(
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        confidence=Confidence.UNKNOWN,
        how="no worker on this host failed by itself",
        authority=0,
        first=None,
    )


def _with_kernel(cause: HostCause, node_fault: KernelMatch | None) -> HostCause:
    """Return *cause*, or *node_fault* as the better-known cause.

    A kernel line about the node replaces an uncertain cause, but not one that the program itself,
    an OOM record or a full disk explains.
    """
    if node_fault is None:
        return cause
    same = node_fault.failure_class is cause.failure_class
    if not same and (cause.side not in (Side.AMBIGUOUS, Side.INFRA) or _is_explained(cause)):
        return cause
    return HostCause(
        failure_class=node_fault.failure_class,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED if same else Confidence.PROBABLE,
        how="the kernel log of this node, around the failure",
        authority=2,
        first=cause.first,
        blamed=cause.blamed,
        blames_node=True,
        kernel=node_fault,
    )


def _is_explained(cause: HostCause) -> bool:
    specific = cause.first is not None and cause.first.is_specific
    return specific and cause.failure_class.category in _EXPLAINED
