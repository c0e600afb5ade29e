"""Who causes a hang, and what a node reports of it: a suspicion, and evidence to read; pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpuops.agent.elastic.workers import Worker
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.evidence import RankFacts
from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.rank_state import RankDiagnosis, RankState
from gpuops.incident.decision import RankEnd, ReportKind
from gpuops.incident.evidence import format_ranks
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.log import printable
from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Role, Side
from gpuops.scrub import scrub, scrub_lines

# Which state names its ranks before any other, and what it is then.
_PLAIN = (
    (
        RankState.D_STATE,
        FailureClass.HANG_D_STATE,
        Side.INFRA,
        Confidence.CONFIRMED,
    ),
    (
        RankState.STOPPED,
        FailureClass.HANG_STOPPED,
        Side.EXTERNAL,
        Confidence.CONFIRMED,
    ),
    (
        RankState.GIL_HELD,
        FailureClass.HANG_GIL_HELD,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
    ),
    (
        RankState.EXITED,
        FailureClass.USER_EARLY_EXIT,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
    ),
)
FRAMES_SHOWN = 20
LINE_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCulprits:
    """What was found; no ``ranks`` where nobody here can be named."""

    ranks: tuple[int, ...]
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    why: str


def class_of(state: RankState) -> FailureClass:
    """Return the class of one rank's part in a hang."""
    plain = {known: failure_class for known, failure_class, _, _ in _PLAIN}
    if state.waits_for_others:
        return FailureClass.HANG_COLLECTIVE
    return plain.get(state, FailureClass.HANG_NO_PROGRESS)


def blame(
    hang: HangFinding,
    verdicts: Mapping[int, RankDiagnosis],
    finished: Sequence[int] = (),
) -> HangCulprits:
    """Return who is to blame for *hang*.

    In this order: what the kernel says, a witness, steps and silence, places in code; ranks that
    had *finished* where the others still wait for somebody.
    """
    for state, failure_class, side, confidence in _PLAIN:
        ranks = tuple(sorted(r for r, verdict in verdicts.items() if verdict.state is state))
        if ranks:
            return HangCulprits(
                ranks=ranks,
                failure_class=failure_class,
                side=side,
                confidence=confidence,
                why=verdicts[ranks[0]].how,
            )
    return _by_progress(hang, verdicts) or _by_absence(finished)


def _by_progress(hang: HangFinding, verdicts: Mapping[int, RankDiagnosis]) -> HangCulprits | None:
    """Blame who is behind; else who is somewhere else than in a collective."""
    elsewhere = sorted(r for r, v in verdicts.items() if v.state is RankState.IN_USER_CODE)
    behind = [rank for rank in hang.lagging if rank in verdicts]
    # One that waits in a collective is behind because another never came to it.
    named = [rank for rank in behind if rank in elsewhere] or elsewhere or behind
    if not named:
        return None
    return HangCulprits(
        ranks=tuple(named),
        failure_class=FailureClass.HANG_NO_PROGRESS,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE,
        why=verdicts[named[0]].how,
    )


def _by_absence(finished: Sequence[int]) -> HangCulprits:
    if finished:
        return HangCulprits(
            ranks=tuple(sorted(finished)),
            failure_class=FailureClass.USER_EARLY_EXIT,
            side=Side.AMBIGUOUS,
            confidence=Confidence.PROBABLE,
            why="had come to the end of its program",
        )
    return HangCulprits(
        ranks=(),
        failure_class=FailureClass.HANG_COLLECTIVE,
        side=Side.AMBIGUOUS,
        confidence=Confidence.SYMPTOM_ONLY,
        why="all wait for other ranks, and none of them is behind",
    )


def sentence(hang: HangFinding, found: HangCulprits) -> str:
    """Return one sentence: who, where they stand, for how long and against which limit."""
    ranks = found.ranks or tuple(sorted(hang.steps))
    step = next((hang.steps[r] for r in ranks if hang.steps.get(r) is not None), hang.step)
    where = "no step known" if step is None else f"last step {step}"
    silent_s = next((hang.silences_s[r] for r in ranks if r in hang.silences_s), hang.silent_s)
    who = f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
    if not found.ranks and len(ranks) > 1:
        who = f"none of the ranks {format_ranks(ranks)} is behind"
    return (
        f"{who} ({where}): {found.why}; silent for {silent_s:.0f} s,"
        f" the limit for this phase ({hang.phase}) is {hang.limit_s:.0f} s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHangView:
    """The generation on this node, and how far its ranks have come."""

    watched: MonitoredAttempt
    steps: Mapping[int, int | None]
    silences_s: Mapping[int, float]


def to_suspicion(
    view: NodeHangView,
    hang: HangFinding,
    found: HangCulprits,
    verdicts: Mapping[int, RankDiagnosis],
) -> Suspicion:
    """Return *hang* as what ends the generation; *found* says who is to blame."""
    node = view.watched.node
    entity, *also = [_rank(rank) for rank in found.ranks] or [Entity(EntityKind.NODE, node)]
    return Suspicion(
        entity=entity,
        also=tuple(also),
        failure_class=found.failure_class,
        confidence=found.confidence,
        level=SuspicionLevel.END,
        source="hang",
        why=_clean(sentence(hang, found)),
        value=round(hang.silent_s, 1),
        threshold=f"{hang.limit_s:.0f} s ({hang.phase})",
        node=node if found.failure_class is FailureClass.HANG_D_STATE else None,
        side=found.side,
        kind=ReportKind.HANG,
        ends=tuple(
            _end(view, worker, verdicts[worker.rank], found)
            for worker in sorted(view.watched.workers, key=lambda w: w.rank)
            if worker.rank in verdicts
        ),
    )


def _end(
    view: NodeHangView, worker: Worker, verdict: RankDiagnosis, found: HangCulprits
) -> RankEnd:
    is_blamed = worker.rank in found.ranks
    log_path = worker.files.stacks or worker.files.stderr
    silence_s = view.silences_s.get(worker.rank)
    silent = "" if silence_s is None else f"made no progress for {silence_s:.0f} s, "
    return RankEnd(
        rank=worker.rank,
        local_rank=worker.local_rank,
        role=Role.ROOT if is_blamed else Role.SYMPTOM,
        failure_class=found.failure_class if is_blamed else class_of(verdict.state),
        side=found.side if is_blamed else Side.AMBIGUOUS,
        step=view.steps.get(worker.rank),
        summary=_clean(f"rank {worker.rank} {silent if is_blamed else ''}{verdict.how}"),
        log_path=None if log_path is None else str(log_path),
    )


def evidence_of(
    view: NodeHangView,
    facts: Mapping[int, RankFacts],
    verdicts: Mapping[int, RankDiagnosis],
    blamed: Collection[int],
) -> tuple[Evidence, ...]:
    """Return what each rank was seen to do, those that are *blamed* first."""
    order = sorted(verdicts, key=lambda rank: (rank not in blamed, rank))
    return tuple(_of_rank(view, facts[rank], verdicts[rank], rank in blamed) for rank in order)


def _of_rank(
    view: NodeHangView, facts: RankFacts, verdict: RankDiagnosis, is_blamed: bool
) -> Evidence:
    rank, step = facts.target.rank, view.steps.get(facts.target.rank)
    where = "no step known" if step is None else f"last step {step}"
    silent = f", silent for {view.silences_s[rank]:.0f} s" if rank in view.silences_s else ""
    text = f"rank {rank} (pid {facts.target.pid}; {where}{silent}) {verdict.how}"
    if facts.recorder_path is not None:
        text += f"; torch's flight recorder left {facts.recorder_path}"
    lines = [str(frame) for frame in verdict.frames[:FRAMES_SHOWN]]
    lines += [f"kernel: {line}" for line in verdict.kernel_stack[:FRAMES_SHOWN]]
    has_file = verdict.state is not RankState.EXITED and any(s.dumped for s in facts.samples)
    return Evidence(
        role=Role.ROOT if is_blamed else Role.SYMPTOM,
        text=_clean(text),
        entity=_rank(rank),
        lines=tuple(line[:LINE_CHARS] for line in scrub_lines([printable(x) for x in lines])),
        path=str(facts.target.stacks) if has_file else None,
    )


def _rank(rank: int) -> Entity:
    return Entity(EntityKind.RANK, str(rank))


def _clean(text: str) -> str:
    return scrub(printable(text))
