"""Watches a node's workers for hangs: judges heartbeats, collects evidence, reports once.

Nothing here waits: a thread collects the evidence, and a poll only checks whether it is complete.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuops.agent.elastic.workers import Worker
from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.evidence import (
    EVIDENCE_S,
    LONG_SAMPLES_S,
    SAMPLES_S,
    EvidenceCollector,
    EvidenceTarget,
    SystemEvidenceReader,
)
from gpuops.agent.monitors.hang.judge import NS, HangFinding, HangJudge
from gpuops.agent.monitors.hang.report import (
    HangCulprits,
    NodeHangView,
    blame,
    evidence_of,
    to_suspicion,
)
from gpuops.agent.monitors.hang.timeouts import PHASE_FLOOR_S, STEP_FLOOR_S, limits_for
from gpuops.agent.monitors.rank_state import (
    RankDiagnosis,
    RankState,
    StoppedRanks,
    judge_rank,
    state_of,
)
from gpuops.host.clock import Clock
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Evidence
from gpuops.wire.ring import Beat, WorkerFlag

log = logging.getLogger(__name__)

# A node whose ranks only wait delays its report, so that the node with the cause reports first.
HOLD_S = 3.0
NAMED_MAX = 8
_GONE = frozenset({None, "Z", "X"})
# Ranks found at work are judged again after as long as they have been silent, and at least this.
RECHECK_S = 30.0


@dataclass(slots=True)
class _OpenHang:
    hang: HangFinding
    since_ns: int
    collector: EvidenceCollector
    done_ns: int | None = None


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
        pause: Callable[[float], object] = time.sleep,
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
        """Return evidence on the workers here, collected now unless it has been before."""
        watched, open_hang = self._watched, self._open_hang
        if watched is None:
            return ()
        if open_hang is not None:
            collector = open_hang.collector
        else:
            collector = self._collector(watched, SAMPLES_S)
            collector.start()
        collector.wait(max(0.0, (deadline_ns - self._clock.mono_ns()) / NS))
        diagnoses = _diagnoses(collector)
        blamed = self._blame(open_hang, diagnoses).ranks if open_hang is not None else ()
        view = self._view(watched, self._clock.mono_ns())
        return evidence_of(view, collector.facts, diagnoses, blamed)

    def close(self) -> None:
        """Forget the workers; a thread that still collects evidence ends by itself."""
        self._watched = self._open_hang = None

    @property
    def is_suspicious(self) -> bool:
        """Return whether a possible hang is being investigated; from any thread."""
        return self._open_hang is not None

    def busy_for_s(self) -> float:
        """Return for how long ranks of other nodes may have to wait for ours, beyond a step.

        The other agents pass it to `others_are_busy_for`.
        """
        return self._judge.busy_for_s(self._clock.mono_ns())

    def others_are_busy_for(self, seconds: float) -> None:
        """Accept silence here for *seconds*: another node's agent reported that its ranks work."""
        if seconds > 0:
            self._judge.excuse_until(self._clock.mono_ns() + round(seconds * NS))

    def _poll(self, watched: MonitoredAttempt, now_ns: int) -> Suspicion | None:
        hang = self._judge.judge(now_ns) or self._find_stopped(watched, now_ns)
        if hang is None:
            if self._open_hang is not None:
                log.info("a suspected hang has ended: the ranks make progress")
                self._open_hang = None
            if self._judge.is_beatless(now_ns):
                log.warning(
                    "hangs cannot be judged: no optimizer step of any rank was observed; call"
                    " gpuops.progress(step) in the script to report steps"
                )
            self._warn_of_lingering(watched, now_ns)
            return None
        if self._open_hang is None:
            self._suspect(watched, hang, now_ns)
            return None
        self._open_hang.hang = hang
        return self._conclude(watched, self._open_hang, now_ns)

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

    def _suspect(self, watched: MonitoredAttempt, hang: HangFinding, now_ns: int) -> None:
        collector = self._collector(watched, LONG_SAMPLES_S if self._is_learned else SAMPLES_S)
        self._open_hang = _OpenHang(hang, now_ns, collector)
        collector.start()

    def _collector(
        self, watched: MonitoredAttempt, samples_s: Sequence[float]
    ) -> EvidenceCollector:
        targets = [_target(worker) for worker in watched.workers]
        return EvidenceCollector(targets, self._reader, self._env, samples_s, pause=self._pause)

    def _conclude(
        self, watched: MonitoredAttempt, open_hang: _OpenHang, now_ns: int
    ) -> Suspicion | None:
        if not open_hang.collector.is_done and now_ns - open_hang.since_ns < EVIDENCE_S * NS:
            return None
        open_hang.done_ns = open_hang.done_ns or now_ns
        diagnoses = _diagnoses(open_hang.collector)
        found = self._blame(open_hang, diagnoses)
        if all(diagnosis.state is RankState.EXITED for diagnosis in diagnoses.values()):
            return None  # an exit, not a hang; the agent handles those
        if self._excuses(open_hang.hang, found, diagnoses, now_ns):
            self._open_hang = None
            return None
        if not found.ranks and now_ns - open_hang.done_ns < HOLD_S * NS:
            return None
        return to_suspicion(self._view(watched, now_ns), open_hang.hang, found, diagnoses)

    def _excuses(
        self,
        hang: HangFinding,
        found: HangCulprits,
        diagnoses: Mapping[int, RankDiagnosis],
        now_ns: int,
    ) -> bool:
        """Accept a silence beyond a learned limit while a rank is found at work.

        It may be an evaluation that the script did not label. Valid up to the limit of a phase.
        """
        at_work = [rank for rank, diagnosis in diagnoses.items() if diagnosis.is_moving]
        cap_s = self._judge.limits.factor * PHASE_FLOOR_S
        if not self._is_learned or not at_work or hang.silent_s >= cap_s:
            return False
        if any(not diagnoses[rank].is_moving for rank in found.ranks):
            return False
        again_s = min(max(hang.silent_s, RECHECK_S), cap_s - hang.silent_s)
        self._judge.excuse_until(now_ns + round(again_s * NS))
        log.warning(
            "no step for %.0f s (limit %.0f s), but rank %d %s; next check in %.0f s."
            ' Label long phases with `with gpuops.phase("eval"):`',
            *(hang.silent_s, hang.limit_s, at_work[0], diagnoses[at_work[0]].how, again_s),
        )
        return True

    def _blame(self, open_hang: _OpenHang, diagnoses: Mapping[int, RankDiagnosis]) -> HangCulprits:
        finished = [rank for rank in self._judge.finished if rank in diagnoses]
        running = {rank: v for rank, v in diagnoses.items() if rank not in finished}
        return blame(open_hang.hang, running, finished)

    def _view(self, watched: MonitoredAttempt, now_ns: int) -> NodeHangView:
        return NodeHangView(
            watched=watched, steps=self._judge.steps, silences_s=self._judge.silences_s(now_ns)
        )


def _diagnoses(collector: EvidenceCollector) -> dict[int, RankDiagnosis]:
    return {rank: judge_rank(facts) for rank, facts in collector.facts.items()}


def _target(worker: Worker) -> EvidenceTarget:
    return EvidenceTarget(
        rank=worker.rank,
        local_rank=worker.local_rank,
        pid=worker.pid,
        stacks=worker.files.stacks,
        dumps=WorkerFlag.HANDLES_SIGUSR2 in worker.ring.flags,
    )
