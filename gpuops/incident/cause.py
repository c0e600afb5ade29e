"""Which of several failures on one host is the cause, and who is to blame for it.

The earliest failure by the host's monotonic clock is the cause; what was ended by the agent is
teardown; symptoms (a peer is gone, a collective timed out) are never the cause while a root
exists (arXiv 2410.21680 §4 and the practice of torchelastic's "first observed failure").
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.incident import exception
from gpuops.incident.classify import Verdict, ending_signal
from gpuops.incident.kernel import KernelHit
from gpuops.model import Confidence, FailureClass, Role, Side

# Share of ranks with the same exception from which on it is the program's, not one machine's.
SAME_EXCEPTION_SHARE = 0.9
# A death by signal is dated by when the agent looked, up to one poll (0.1 to 1 s) too late;
# an exception is dated by the worker itself. Within this span their order is not known.
POLL_SLACK_NS = 1_000_000_000
# Two that one hand ends with the same signal are dated by their agent's thread, which wakes within
# about 1 ms, but only once the kernel has taken the process apart: that takes milliseconds, longer
# the more memory it held. No rank dies of another's signal, so nothing is lost by a wide span.
TOGETHER_NS = 50_000_000
_EXPLAINED = frozenset({"host_mem", "launcher", "storage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The judgement over one attempt's failures on one host.

    ``blamed`` are the exits whose ranks are culprits; ``blames_node`` says whether the node is one
    as well. ``first`` is the exit that dates the failure, None when nothing failed here.
    """

    failure_class: FailureClass
    side: Side
    confidence: Confidence
    how: str
    authority: int
    first: Verdict | None
    blamed: tuple[Verdict, ...] = ()
    blames_node: bool = False
    kernel: KernelHit | None = None
    suspects: tuple[Verdict, ...] = ()


def find_cause(verdicts: Sequence[Verdict], trouble: KernelHit | None) -> Cause:
    """Return the cause that *verdicts* (one for each exit, any order) add up to.

    Args:
        verdicts: One for each worker of the attempt on this host.
        trouble: What the kernel log says about the node itself, if anything.
    """
    roots = sorted((v for v in verdicts if v.role is Role.ROOT), key=lambda v: v.order)
    symptoms = sorted((v for v in verdicts if v.role is Role.SYMPTOM), key=lambda v: v.order)
    if roots:
        return _with_kernel(_from_roots(roots, verdicts), trouble)
    if symptoms:
        early = _left_early(verdicts, symptoms)
        if early and trouble is None:
            return _early_exit(early, symptoms)
        return _with_kernel(_only_symptoms(symptoms, verdicts), trouble)
    # What stands in the log of a node whose workers were only stopped may be anybody's.
    return _with_kernel(_nothing_seen(), trouble if trouble and trouble.is_ours else None)


def _from_roots(roots: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Cause:
    first = _earliest(roots)
    sharers = _sharers(first, verdicts)
    if len(sharers) >= 2 and len(sharers) >= SAME_EXCEPTION_SHARE * len(verdicts):
        return _shared(first, sharers, len(verdicts))
    alike = _ended_together(first, roots)
    if len(alike) >= 2:
        return _killed_together(alike)
    (first,) = alike
    rest = [root for root in roots if root is not first]
    how = "the only worker that failed by itself"
    if rest:
        gap_s = (min(root.failed_ns for root in rest) - first.failed_ns) / 1e9
        how = f"the first of {len(roots)} failures on this host, {max(gap_s, 0):.2f} s ahead"
        if gap_s < 0:
            how = "it was killed; what another rank raised in the same second follows from it"
    return Cause(
        failure_class=first.failure_class,
        side=first.side,
        confidence=first.confidence,
        how=how,
        authority=2,
        first=first,
        blamed=(first,),
        blames_node=True,
    )


def _earliest(roots: Sequence[Verdict]) -> Verdict:
    first = roots[0]
    if first.worker.error_mono_ns is None or first.specific:
        return first
    killed = (
        root
        for root in roots
        if ending_signal(root.worker) == "SIGKILL"
        and root.worker.exception_type is None
        and root.failed_ns - first.failed_ns <= POLL_SLACK_NS
    )
    return next(killed, first)


def _ended_together(first: Verdict, roots: Sequence[Verdict]) -> list[Verdict]:
    """Return the workers that the signal of *first* ended at its time, as far as can be told.

    Where a record explains some of these ends, only those are returned.
    """
    signal = ending_signal(first.worker)
    if signal is None or first.worker.exception_type is not None:
        return [first]
    alike = [
        root
        for root in roots
        if ending_signal(root.worker) == signal
        and root.worker.exception_type is None
        and abs(root.failed_ns - first.failed_ns) <= TOGETHER_NS
    ]
    known = [root for root in alike if root.specific] or alike
    return [root for root in known if root.failure_class is known[0].failure_class]


def _killed_together(alike: Sequence[Verdict]) -> Cause:
    first = alike[0]
    times = [root.failed_ns for root in alike]
    span_s = max((max(times) - min(times)) / 1e9, 0.01)
    many = "both" if len(alike) == 2 else f"all {len(alike)}"
    return Cause(
        failure_class=first.failure_class,
        side=first.side,
        confidence=first.confidence,
        how=f"{many} within {span_s:.2f} s: their order is not known",
        authority=2,
        first=first,
        blamed=tuple(sorted(alike, key=lambda v: v.worker.rank)),
        blames_node=True,
    )


def _sharers(first: Verdict, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return every worker that raised what *first* raised, also those ended while they did."""
    wanted = exception.signature(first.worker)
    if wanted is None or first.side is Side.INFRA:
        return []
    return [v for v in verdicts if exception.signature(v.worker) == wanted]


def _shared(first: Verdict, sharers: Sequence[Verdict], world: int) -> Cause:
    blamed = sorted((v for v in sharers if v.role is Role.ROOT), key=lambda v: v.worker.rank)
    return Cause(
        failure_class=first.failure_class,
        side=Side.USER,
        confidence=Confidence.CONFIRMED,
        how=f"{len(sharers)} of {world} ranks raised the same exception: it is the program's",
        authority=2,
        first=first,
        blamed=tuple(blamed),
    )


def _left_early(verdicts: Sequence[Verdict], symptoms: Sequence[Verdict]) -> list[Verdict]:
    """Return the workers that had finished with exit code 0 when others lost their peer."""
    done = [v for v in verdicts if v.role is Role.NOISE]
    limit = symptoms[0].failed_ns + POLL_SLACK_NS
    return sorted((v for v in done if _done_ns(v) <= limit), key=lambda v: (_done_ns(v), v.order))


def _done_ns(verdict: Verdict) -> int:
    """Return when it was done; on a busy host its process may be gone seconds later only."""
    return verdict.worker.finished_mono_ns or verdict.failed_ns


def _early_exit(early: Sequence[Verdict], symptoms: Sequence[Verdict]) -> Cause:
    return Cause(
        failure_class=FailureClass.USER_EARLY_EXIT,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        how=f"it was done while others still needed it ({len(symptoms)} lost their peer)",
        authority=2,
        first=early[0],
        blamed=tuple(early),
    )


def _only_symptoms(symptoms: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Cause:
    first = symptoms[0]
    return Cause(
        failure_class=first.failure_class,
        side=Side.AMBIGUOUS,
        confidence=Confidence.SYMPTOM_ONLY,
        how="nobody on this host failed first: the cause is elsewhere or left no trace",
        authority=1,
        first=first,
        suspects=tuple(_suspects(symptoms, verdicts)),
    )


def _suspects(symptoms: Sequence[Verdict], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the ranks to look at first: silent ones, and the ones that were behind the others.

    The rank that everybody waits for is the one without a symptom of its own, or the one whose
    last step is below the others'.
    """
    steps = [v.worker.last_step for v in verdicts if v.worker.last_step is not None]
    ahead = max(steps, default=None)
    silent = [v for v in verdicts if v.role is Role.TEARDOWN]
    behind = [
        v
        for v in symptoms
        if ahead is not None and v.worker.last_step is not None and v.worker.last_step < ahead
    ]
    return sorted(silent + behind, key=lambda v: (v.worker.last_step or 0, v.worker.rank))


def _nothing_seen() -> Cause:
    return Cause(
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        confidence=Confidence.UNKNOWN,
        how="no worker on this host failed by itself",
        authority=0,
        first=None,
    )


def _with_kernel(cause: Cause, trouble: KernelHit | None) -> Cause:
    """Return *cause*, or the kernel's better account of it.

    A kernel line about the node replaces a cause that nobody is sure of; it does not touch one
    that the program itself, an OOM record or a full disk explains.
    """
    if trouble is None:
        return cause
    same = trouble.failure_class is cause.failure_class
    if not same and (cause.side not in (Side.AMBIGUOUS, Side.INFRA) or _explained(cause)):
        return cause
    return Cause(
        failure_class=trouble.failure_class,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED if same else Confidence.PROBABLE,
        how="the kernel log of this node, around the failure",
        authority=2,
        first=cause.first,
        blamed=cause.blamed,
        blames_node=True,
        kernel=trouble,
    )


def _explained(cause: Cause) -> bool:
    specific = cause.first is not None and cause.first.specific
    return specific and cause.failure_class.category in _EXPLAINED
