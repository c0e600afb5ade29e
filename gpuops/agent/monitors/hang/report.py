"""Which ranks cause a hang, and the node's report: a suspicion and evidence; pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpuops.agent.elastic.workers import Worker
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.evidence import RankFacts
from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.rank_state import RankDiagnosis, RankState
from gpuops.detect.last_calls import last_calls, pending_calls
from gpuops.detect.recorder_dump import RankDump
from gpuops.detect.wait_graph import CollectiveHang, HangKind
from gpuops.incident.decision import RankEnd, ReportKind
from gpuops.incident.evidence import format_ranks
from gpuops.incident.incidents.hang import ranks_at_fault, side_of
from gpuops.incident.signature import hang_signature, waiting_place
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.log import printable
from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Role, Side
from gpuops.scrub import scrub, scrub_lines
from gpuops.units import NS_PER_S

# States whose ranks are to blame regardless of their steps, in the order of precedence.
_DECISIVE = (
    (RankState.D_STATE, FailureClass.HANG_D_STATE, Side.INFRA, Confidence.CONFIRMED),
    (RankState.STOPPED, FailureClass.HANG_STOPPED, Side.EXTERNAL, Confidence.CONFIRMED),
    (RankState.GIL_HELD, FailureClass.HANG_GIL_HELD, Side.AMBIGUOUS, Confidence.PROBABLE),
    (RankState.EXITED, FailureClass.USER_EARLY_EXIT, Side.AMBIGUOUS, Confidence.PROBABLE),
)
_NOTHING_PENDING = CollectiveHang(kind=HangKind.NOTHING, why="no dump is there")
FRAMES_SHOWN = 20
# What most ranks do is known only with those of other nodes: the leader judges it.
_BY_MOST = {HangKind.DEADLOCK, HangKind.MISMATCH}
_PENDING_SHOWN = 2
LINE_CHARS = 400


@dataclass(frozen=True, slots=True)
class HangCulprits:
    """The ranks that cause a hang, and its class; no ``ranks`` where none here is to blame."""

    ranks: tuple[int, ...]
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    why: str
    what: str = ""  # each of them does, where its stack does not say it


def class_of(state: RankState) -> FailureClass:
    """Return the class of one rank's part in a hang."""
    if state.waits_for_others:
        return FailureClass.HANG_COLLECTIVE
    classes = {known: failure_class for known, failure_class, _, _ in _DECISIVE}
    return classes.get(state, FailureClass.HANG_NO_PROGRESS)


def blame(
    hang: HangFinding,
    diagnoses: Mapping[int, RankDiagnosis],
    finished: Sequence[int] = (),
    collectives: CollectiveHang = _NOTHING_PENDING,
) -> HangCulprits:
    """Return the ranks to blame for *hang*.

    In the order of precedence: process states, the interpreter lock, the *collectives* of the ranks
    here, steps and silence, positions in code; ranks that have *finished* where the others still
    wait.
    """
    for state, failure_class, side, confidence in _DECISIVE:
        ranks = tuple(sorted(r for r, diagnosis in diagnoses.items() if diagnosis.state is state))
        if ranks:
            how = diagnoses[ranks[0]].how
            return HangCulprits(ranks, failure_class, side, confidence, how)
    return (
        _by_collectives(collectives, diagnoses)
        or _by_progress(hang, diagnoses, all_called=collectives.kind is HangKind.ALL_IN)
        or _by_absence(finished)
    )


def _by_collectives(
    collectives: CollectiveHang, diagnoses: Mapping[int, RankDiagnosis]
) -> HangCulprits | None:
    waiting = [rank for rank, diagnosis in diagnoses.items() if diagnosis.state.waits_for_others]
    fault = ranks_at_fault(collectives, waiting)
    if collectives.kind in _BY_MOST and not diagnoses.keys() >= set(collectives.without_dump):
        return None
    named = () if fault is None else tuple(sorted(fault.ranks & diagnoses.keys()))
    if fault is None or not named:
        return None
    side, how = side_of(fault.failure_class), fault.how
    if not fault.what:
        how = f"{diagnoses[named[0]].how}: {how}"
    return HangCulprits(named, fault.failure_class, side, Confidence.PROBABLE, how, fault.what)


def _by_progress(
    hang: HangFinding, diagnoses: Mapping[int, RankDiagnosis], *, all_called: bool
) -> HangCulprits | None:
    """Blame the ranks that are behind; else those that are not in a collective.

    *all_called*: all ranks here called what is pending, so that none is behind by waiting there.
    Nobody where no rank has made a step and none waits for another: each stands in its own start.
    """
    elsewhere = _in_state(diagnoses, RankState.IN_USER_CODE)
    elsewhere = elsewhere or _in_state(diagnoses, RankState.WAITS_FOR_LOCK)
    if _all_in_own_start(hang, diagnoses):
        how = next((diagnoses[rank].how for rank in elsewhere), "none could be inspected")
        how = f"none has made a step or waits for another, each is in its own start (one {how})"
        failure_class = FailureClass.HANG_NO_PROGRESS
        return HangCulprits((), failure_class, Side.AMBIGUOUS, Confidence.SYMPTOM_ONLY, how)
    behind = [
        rank
        for rank in hang.lagging
        if rank in diagnoses and not (all_called and diagnoses[rank].state.waits_for_others)
    ]
    # A rank that waits in a collective is behind because another rank never joined it.
    named = [rank for rank in behind if rank in elsewhere] or elsewhere or behind
    if not named:
        return None
    ranks, how = tuple(named), diagnoses[named[0]].how
    failure_class = FailureClass.HANG_NO_PROGRESS
    return HangCulprits(ranks, failure_class, Side.AMBIGUOUS, Confidence.PROBABLE, how)


def _in_state(diagnoses: Mapping[int, RankDiagnosis], state: RankState) -> list[int]:
    return sorted(rank for rank, diagnosis in diagnoses.items() if diagnosis.state is state)


def _all_in_own_start(hang: HangFinding, diagnoses: Mapping[int, RankDiagnosis]) -> bool:
    if hang.steps_made:
        return False
    return bool(diagnoses) and not any(v.state.waits_for_others for v in diagnoses.values())


def _by_absence(finished: Sequence[int]) -> HangCulprits:
    if finished:
        ranks, how = tuple(sorted(finished)), "had finished its program"
        failure_class = FailureClass.USER_EARLY_EXIT
        return HangCulprits(ranks, failure_class, Side.AMBIGUOUS, Confidence.PROBABLE, how)
    how = "all wait for other ranks, and none is behind"
    failure_class = FailureClass.HANG_COLLECTIVE
    return HangCulprits((), failure_class, Side.AMBIGUOUS, Confidence.SYMPTOM_ONLY, how)


def sentence(hang: HangFinding, found: HangCulprits) -> str:
    """Return one sentence: the ranks, their step and activity, the silence and its limit."""
    ranks = found.ranks or tuple(sorted(hang.steps))
    step = next((hang.steps[r] for r in ranks if hang.steps.get(r) is not None), hang.step)
    where = "no step known" if step is None else f"last step {step}"
    silent_s = next((hang.silences_s[r] for r in ranks if r in hang.silences_s), hang.silent_s)
    who = f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
    if not found.ranks and len(ranks) > 1 and hang.steps_made:
        who = f"none of the ranks {format_ranks(ranks)} is behind"
    return (
        f"{who} ({where}): {found.why}; silent for {silent_s:.0f} s,"
        f" the limit for this phase ({hang.phase}) is {hang.limit_s:.0f} s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHangView:
    """The generation on this node, with the steps and silences of its ranks."""

    watched: MonitoredAttempt
    now_ns: int
    steps: Mapping[int, int | None]
    silences_s: Mapping[int, float]
    dumps: Mapping[int, RankDump]


def to_suspicion(
    view: NodeHangView,
    hang: HangFinding,
    found: HangCulprits,
    diagnoses: Mapping[int, RankDiagnosis],
) -> Suspicion:
    """Return *hang* as a suspicion that ends the generation; *found* are the ranks to blame."""
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
        since_ns=view.now_ns - round(hang.silent_s * NS_PER_S),
        ends=tuple(
            _end(view, worker, diagnoses[worker.rank], found)
            for worker in sorted(view.watched.workers, key=lambda w: w.rank)
            if worker.rank in diagnoses
        ),
    )


def _end(
    view: NodeHangView, worker: Worker, diagnosis: RankDiagnosis, found: HangCulprits
) -> RankEnd:
    is_blamed = worker.rank in found.ranks
    log_path = worker.files.stacks or worker.files.stderr
    silence_s = view.silences_s.get(worker.rank)
    silent = "" if silence_s is None else f"made no progress for {silence_s:.0f} s, "
    does = found.what if is_blamed and found.what else diagnosis.how
    dump = view.dumps.get(worker.rank)
    return RankEnd(
        rank=worker.rank,
        local_rank=worker.local_rank,
        role=Role.ROOT if is_blamed else Role.SYMPTOM,
        failure_class=found.failure_class if is_blamed else class_of(diagnosis.state),
        side=found.side if is_blamed else Side.AMBIGUOUS,
        signature=_signature(diagnosis),
        step=view.steps.get(worker.rank),
        summary=_clean(f"rank {worker.rank} {silent if is_blamed else ''}{does}"),
        log_path=None if log_path is None else str(log_path),
        place=_place(diagnosis),
        collectives=None if dump is None else last_calls(dump),
    )


def _place(diagnosis: RankDiagnosis) -> str | None:
    if not diagnosis.state.waits_for_others:
        return None
    place = waiting_place((frame.file, str(frame)) for frame in diagnosis.frames)
    return None if place is None else _clean(place)


def _signature(diagnosis: RankDiagnosis) -> str | None:
    """Return where a rank stands in the program's own code; None where it waits for others."""
    if diagnosis.state is not RankState.IN_USER_CODE:
        return None
    return hang_signature((frame.file, frame.function) for frame in diagnosis.frames)


def evidence_of(
    view: NodeHangView,
    facts: Mapping[int, RankFacts],
    diagnoses: Mapping[int, RankDiagnosis],
    blamed: Collection[int],
) -> tuple[Evidence, ...]:
    """Return one item of evidence for each rank, those that are *blamed* first."""
    order = sorted(diagnoses, key=lambda rank: (rank not in blamed, rank))
    return tuple(_of_rank(view, facts[rank], diagnoses[rank], rank in blamed) for rank in order)


def _of_rank(
    view: NodeHangView, facts: RankFacts, diagnosis: RankDiagnosis, is_blamed: bool
) -> Evidence:
    rank, step = facts.target.rank, view.steps.get(facts.target.rank)
    where = "no step known" if step is None else f"last step {step}"
    silent = f", silent for {view.silences_s[rank]:.0f} s" if rank in view.silences_s else ""
    text = f"rank {rank} (pid {facts.target.pid}; {where}{silent}) {diagnosis.how}"
    calls = () if facts.dump is None else pending_calls(facts.dump)
    for call in calls[:_PENDING_SHOWN]:
        text += f"; pending is {call}, call {call.number} of group {call.group}"
    if facts.recorder_path is not None:
        text += f"; torch's flight recorder left {facts.recorder_path}"
    if facts.recorder_kept is not None:
        text += f"; its flight recorder is in {facts.recorder_kept}"
    lines = [str(frame) for frame in diagnosis.frames[:FRAMES_SHOWN]]
    lines += [f"kernel: {line}" for line in diagnosis.kernel_stack[:FRAMES_SHOWN]]
    has_file = diagnosis.state is not RankState.EXITED and any(s.dumped for s in facts.samples)
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
