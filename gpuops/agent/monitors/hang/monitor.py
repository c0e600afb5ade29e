"""Watches a node's workers for hangs: judges heartbeats, collects evidence, reports once.

Nothing here waits: a thread collects the evidence, and a poll only checks whether it is complete.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuops.agent.elastic.workers import Worker
from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.evidence import (
    EVIDENCE_S,
    LEAD_S,
    LONG_SAMPLES_S,
    SAMPLES_S,
    EvidenceCollector,
    EvidenceTarget,
    RankFacts,
    SystemEvidenceReader,
)
from gpuops.agent.monitors.hang.judge import NS, HangFinding, HangJudge
from gpuops.agent.monitors.hang.patience import VerdictHistory, signs_of_work
from gpuops.agent.monitors.hang.report import (
    HangCulprits,
    NodeHangView,
    blame,
    evidence_of,
    to_suspicion,
)
from gpuops.agent.monitors.hang.timeouts import STEP_FLOOR_S, limits_for
from gpuops.agent.monitors.rank_state import (
    RankDiagnosis,
    RankState,
    StoppedRanks,
    judge_ranks,
    state_of,
)
from gpuops.agent.monitors.recorder.reader import recorder_paths
from gpuops.detect.wait_graph import CollectiveHang, diagnose
from gpuops.host.clock import Clock
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Evidence, FailureClass
from gpuops.wire.ring import Beat, WorkerFlag

log = logging.getLogger(__name__)

# A node whose ranks only wait delays its report, so that the node with the cause reports first.
HOLD_S = 3.0
NAMED_MAX = 8
_GONE = frozenset({None, "Z", "X"})
# Classes for which only silence speaks; the kernel or the interpreter reports the others.
_BY_SILENCE = frozenset({FailureClass.HANG_NO_PROGRESS, FailureClass.HANG_COLLECTIVE})


@dataclass(slots=True)
class _OpenHang:
    """A possible hang; ``hang`` and ``since_ns`` None until a rank exceeds its limit.

    ``near`` is the hang that is expected, where the samples begin before that. ``collectives`` is
    the verdict on the first ``n_dumps`` dumps of its ranks.
    """

    collector: EvidenceCollector
    near: HangFinding | None = None
    hang: HangFinding | None = None
    since_ns: int | None = None
    done_ns: int | None = None
    collectives: CollectiveHang | None = None
    n_dumps: int = -1

    def judge_collectives(self, facts: Mapping[int, RankFacts]) -> CollectiveHang:
        """Return whom the ranks here wait for by their collectives."""
        dumps = [each.dump for each in facts.values() if each.dump is not None]
        if self.collectives is None or self.n_dumps != len(dumps):
            self.collectives, self.n_dumps = diagnose(dumps), len(dumps)
        return self.collectives


class HangMonitor(Monitor):
    """One for the whole run: the learned limits last across restarts.

    *timeout_s* is ``--hang-timeout``: None to learn, 0 for off.
    """

    name = "hang"

    def __init__(
        self,
        clock: Clock,
        timeout_s: float | None,
        env: Mapping[str, str],
        *,
        reader: SystemEvidenceReader | None = None,
        pause: Callable[[float], object] | None = None,
        state: Callable[[int], str | None] = state_of,
    ) -> None:
        self._clock = clock
        self._env = env
        self._is_on = timeout_s != 0
        self._is_learned = timeout_s is None
        self._judge = HangJudge(limits_for(timeout_s or None, env))
        self._reader = reader or SystemEvidenceReader(env.get("PATH"))
        self._pause = pause
        self._state_of = state
        self._stopped = StoppedRanks()
        self._verdicts = VerdictHistory()
        self._states: Mapping[int, str | None] = {}
        self._has_warned = False
        self._watched: MonitoredAttempt | None = None
        self._open_hang: _OpenHang | None = None
        self._found: Suspicion | None = None
        self._has_failed = False

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation whose workers have just been started."""
        self._watched, self._open_hang, self._found = watched, None, None
        self._has_failed = False
        self._stopped, self._states, self._has_warned = StoppedRanks(), {}, False
        if self._judge.steps_made:
            self._verdicts.got_further()
        self._judge.begin([worker.rank for worker in watched.workers], self._clock.mono_ns())

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats, by rank, that the agent has just read."""
        self._judge.feed(beats, self._clock.mono_ns())
        self._stopped.clear(rank for rank, new in beats.items() if new)

    def poll(self) -> tuple[Suspicion, ...]:
        """Return the hang, if any, once its evidence is complete or `EVIDENCE_S` have passed."""
        if self._is_on and self._watched is not None and not (self._found or self._has_failed):
            try:
                self._found = self._poll(self._watched, self._clock.mono_ns())
            except Exception:  # boundary: our bug must not end a run that trains
                log.exception("hang detection failed; it is off for this generation")
                self._has_failed = True
        return () if self._found is None else (self._found,)

    def evidence(self, deadline_ns: int) -> tuple[Evidence, ...]:
        """Return evidence on the workers here, collected now unless it has been before.

        From then on `poll` returns the hang as it looks here, whichever node noticed it first: what
        is reported of it does not depend on which machine is quicker.
        """
        watched, now_ns = self._watched, self._clock.mono_ns()
        if watched is None or not watched.workers:
            return ()
        open_hang = self._open_hang or self._start_collecting(watched, SAMPLES_S)
        collector = open_hang.collector
        collector.hurry()
        if open_hang.since_ns is not None:
            deadline_ns = min(deadline_ns, open_hang.since_ns + round(EVIDENCE_S * NS))
        collector.wait(max(0.0, (deadline_ns - now_ns) / NS))
        facts, now_ns = collector.facts, self._clock.mono_ns()
        diagnoses = judge_ranks(facts)
        hang, suspects = open_hang.hang, diagnoses
        if hang is None:
            hang = self._judge.present(now_ns)
            suspects = {rank: each for rank, each in diagnoses.items() if not each.is_moving}
        found, view = self._blame(open_hang, hang, suspects), self._view(watched, facts, now_ns)
        self._verdicts.add(hang)
        if self._is_on and self._found is None and not _any_exited(diagnoses):
            self._found = to_suspicion(view, hang, found, diagnoses)
        return evidence_of(view, facts, diagnoses, found.ranks)

    def close(self) -> None:
        """Forget the workers; a thread that still collects evidence ends by itself."""
        self._watched = self._open_hang = None

    @property
    def is_suspicious(self) -> bool:
        """Return whether a possible hang is being investigated; from any thread."""
        return self._open_hang is not None

    def busy_for_s(self) -> float:
        """Return for how long ranks of other nodes may have to wait for ours, beyond a step.

        The other agents pass it to `others_are_busy_for`. Also while the samples of a possible hang
        show work so far: others, whose ranks only wait, might conclude sooner. From any thread.
        """
        open_hang, busy_s = self._open_hang, self._judge.busy_for_s(self._clock.mono_ns())
        hang = None if open_hang is None else open_hang.hang or open_hang.near
        if open_hang is None or hang is None or not self._is_ours(hang):
            return busy_s
        diagnoses = judge_ranks(open_hang.collector.facts)
        blamed = self._blame(open_hang, hang, diagnoses).ranks
        work = signs_of_work(hang, blamed, diagnoses, self._judge.limits.factor)
        # Not where ranks have worked for too long: nodes would wait for each other for ever.
        return max(busy_s, EVIDENCE_S) if work is not None and work.is_seen else busy_s

    def others_are_busy_for(self, seconds: float) -> None:
        """Accept silence here for *seconds*: another node's agent reported that its ranks work."""
        if seconds > 0:
            until_ns = self._clock.mono_ns() + round(seconds * NS)
            # Nodes that passed it on would postpone each other's limits for ever.
            self._judge.excuse_until(until_ns, others_too=False)

    def _poll(self, watched: MonitoredAttempt, now_ns: int) -> Suspicion | None:
        hang = self._judge.judge(now_ns) or self._find_stopped(watched, now_ns)
        if hang is None and (near := self._near(now_ns)) is not None:
            self._open_hang = self._open_hang or self._start_collecting(watched, LONG_SAMPLES_S)
            self._open_hang.near = near
            return None
        if hang is None:
            if self._open_hang is not None and self._open_hang.hang is not None:
                log.info("a suspected hang has ended: the ranks make progress")
            if self._open_hang is not None:
                self._open_hang.collector.forget()
            self._open_hang = None
            if self._judge.is_beatless(now_ns):
                log.warning(
                    "hangs cannot be judged: no optimizer step of any rank was observed; call"
                    " gpuops.progress(step) in the script to report steps"
                )
            self._warn_of_lingering(watched, now_ns)
            return None
        is_new, open_hang = self._open_hang is None, self._open_hang
        if open_hang is None:
            samples_s = LONG_SAMPLES_S if self._is_ours(hang) else SAMPLES_S
            open_hang = self._open_hang = self._start_collecting(watched, samples_s)
        open_hang.hang = hang
        open_hang.since_ns = open_hang.since_ns or now_ns
        return None if is_new else self._conclude(watched, open_hang, hang, now_ns)

    def _near(self, now_ns: int) -> HangFinding | None:
        near = self._judge.judge(now_ns, LEAD_S)
        return near if near is not None and self._is_ours(near) else None

    def _is_ours(self, hang: HangFinding) -> bool:
        """Return whether the limit of *hang* is learned or a floor, not what the user set."""
        return self._is_learned or hang.limit_s > (self._judge.limits.asked_s or 0.0)

    def _find_stopped(self, watched: MonitoredAttempt, now_ns: int) -> HangFinding | None:
        """Return the hang of stopped workers, whatever phase they are in."""
        if self._stopped.is_due(now_ns):
            self._states = {w.rank: self._state_of(w.pid) for w in watched.workers}
            self._stopped.update(self._states, now_ns)
        limit_s = self._judge.limits.asked_s or STEP_FLOOR_S
        lasted_s = self._stopped.longer_than(limit_s, now_ns)
        return self._judge.stopped(lasted_s, limit_s, now_ns) if lasted_s else None

    def _warn_of_lingering(self, watched: MonitoredAttempt, now_ns: int) -> None:
        """Warn once of processes that remain after the end of their programs.

        They are not killed: one may be writing its last state.
        """
        late = () if self._has_warned else self._judge.long_finished(now_ns)
        alive = [
            w for w in watched.workers if w.rank in late and self._states.get(w.rank) not in _GONE
        ]
        if not alive:
            return
        self._has_warned = True
        silences_s = self._judge.silences_s(now_ns)
        log.warning(
            "%s: the program ended %.0f s ago, the process has not, and the run waits for it;"
            " a thread or an exit handler may hang, and `py-spy dump --pid %d` shows where",
            ", ".join(f"rank {w.rank} (pid {w.pid})" for w in alive[:NAMED_MAX]),
            min(silences_s[w.rank] for w in alive),
            alive[0].pid,
        )

    def _start_collecting(self, watched: MonitoredAttempt, samples_s: Sequence[float]) -> _OpenHang:
        targets = [_target(worker) for worker in watched.workers]
        collector = EvidenceCollector(
            targets, self._reader, self._env, samples_s, pause=self._pause, folder=watched.folder
        )
        collector.start()
        return _OpenHang(collector)

    def _conclude(
        self, watched: MonitoredAttempt, open_hang: _OpenHang, hang: HangFinding, now_ns: int
    ) -> Suspicion | None:
        since_ns = open_hang.since_ns or now_ns
        if not open_hang.collector.wait(0.0) and now_ns - since_ns < EVIDENCE_S * NS:
            return None
        open_hang.done_ns = open_hang.done_ns or now_ns
        facts = open_hang.collector.facts
        diagnoses = judge_ranks(facts)
        found = self._blame(open_hang, hang, diagnoses)
        if all(diagnosis.state is RankState.EXITED for diagnosis in diagnoses.values()):
            return None  # an exit, not a hang; the agent handles those
        if self._excuses(hang, found, diagnoses, now_ns):
            self._open_hang = None
            return None
        if not found.ranks and now_ns - open_hang.done_ns < HOLD_S * NS:
            return None
        hang = replace(hang, limit_s=self._limit_s(hang, found))
        return to_suspicion(self._view(watched, facts, now_ns), hang, found, diagnoses)

    def _limit_s(self, hang: HangFinding, found: HangCulprits) -> float:
        """Return the limit of *hang*, raised where the last verdict got the run no further."""
        may_raise = self._is_ours(hang) and found.failure_class in _BY_SILENCE
        return self._verdicts.limit_s(hang) if may_raise else hang.limit_s

    def _excuses(
        self,
        hang: HangFinding,
        found: HangCulprits,
        diagnoses: Mapping[int, RankDiagnosis],
        now_ns: int,
    ) -> bool:
        """Accept a silence beyond a limit of ours while a rank is found at work.

        It may be an evaluation that the script did not label. Accept it also where the run came no
        further after the last verdict, or all ranks do the same and nothing but silence speaks
        against them.
        """
        if not self._is_ours(hang):
            return False
        raised_s = self._limit_s(hang, found)
        if hang.silent_s < raised_s:
            self._judge.excuse_until(now_ns + round((raised_s - hang.silent_s) * NS))
            log.warning(
                "no progress for %.0f s, and a restart did not get the run further:"
                " the limit of this phase (%s) is raised from %.0f to %.0f s",
                *(hang.silent_s, hang.phase, hang.limit_s, raised_s),
            )
            return True
        work = signs_of_work(hang, found.ranks, diagnoses, self._judge.limits.factor)
        if work is None:
            return False
        # Ranks that only stand in one place may wait for those of another node, which then hang.
        until_ns = now_ns + round(work.again_s * NS)
        self._judge.excuse_until(until_ns, others_too=work.is_seen)
        log.warning(
            "no step for %.0f s (limit %.0f s), but rank %d %s; next check in %.0f s."
            ' Label long phases with `with gpuops.phase("eval"):`',
            *(hang.silent_s, hang.limit_s, work.rank, diagnoses[work.rank].how, work.again_s),
        )
        return True

    def _blame(
        self, open_hang: _OpenHang, hang: HangFinding, diagnoses: Mapping[int, RankDiagnosis]
    ) -> HangCulprits:
        collectives = open_hang.judge_collectives(open_hang.collector.facts)
        finished = [rank for rank in self._judge.finished if rank in diagnoses]
        running = {rank: v for rank, v in diagnoses.items() if rank not in finished}
        return blame(hang, running, finished, collectives)

    def _view(
        self, watched: MonitoredAttempt, facts: Mapping[int, RankFacts], now_ns: int
    ) -> NodeHangView:
        return NodeHangView(
            watched=watched,
            now_ns=now_ns,
            steps=self._judge.steps,
            silences_s=self._judge.silences_s(now_ns),
            dumps={rank: each.dump for rank, each in facts.items() if each.dump is not None},
        )


def _any_exited(diagnoses: Mapping[int, RankDiagnosis]) -> bool:
    return any(diagnosis.state is RankState.EXITED for diagnosis in diagnoses.values())


def _target(worker: Worker) -> EvidenceTarget:
    recorder, groups = recorder_paths(worker.ring.path, worker.rank)
    return EvidenceTarget(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        stacks=worker.files.stacks,
        dumps=WorkerFlag.HANDLES_SIGUSR2 in worker.ring.flags,
        recorder=recorder,
        groups=groups,
    )
