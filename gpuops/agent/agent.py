"""torch's elastic agent with eyes: it sees who died first, and keeps what there is to know of it.

torch's own loop stays in charge (`_invoke_run`): it restarts while the budget lasts, as torchrun
does. What is changed: failures are seen and dated by `ExitWatcher` before torch looks; the others
are ended by us with a short grace; signals to the agent are taken at safe points only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gpuops.agent.identity import Identity, agree
from gpuops.agent.logs import GenerationLogs, Placement
from gpuops.agent.records import AttemptFacts
from gpuops.agent.rings import RingReader
from gpuops.agent.session import Session
from gpuops.agent.signals import Cancellation
from gpuops.agent.workers import Worker, Workers
from gpuops.host.clock import Clock
from gpuops.model import WorkerExit

# After the first failure the others get this long to fail by themselves: what they raise is
# evidence, and an end of their own is not taken for our teardown.
COLLECT_S = 0.1
FAILURE_GRACE_S = 3.0
_OVER = frozenset({WorkerState.FAILED, WorkerState.UNHEALTHY, WorkerState.UNKNOWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the agent is given by `launch`."""

    clock: Clock
    node: str
    identity: Identity
    logs: GenerationLogs
    cancellation: Cancellation
    open_session: Callable[[Identity, bool], Session]
    say: Callable[[str], None]
    alone: bool
    agent_pid: int
    slurm_job_id: str | None
    slurm_restart_count: int
    failure_grace_s: float
    cancel_grace_s: float


class WorkerStartError(Exception):
    """The system refused to start a worker; the message says which program and why."""


class GpuopsAgent(LocalElasticAgent):
    """One node's agent; ``session`` is None until the first rendezvous."""

    def __init__(self, spec: WorkerSpec, parts: Parts, **torch_options: Any) -> None:  # noqa: ANN401
        super().__init__(spec=spec, logs_specs=parts.logs, **torch_options)
        self.session: Session | None = None
        self._parts = parts
        self._identity = parts.identity
        self._generation = -1
        self._workers: Workers | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._parts.cancellation.interruptible():
            super()._rendezvous(worker_group)
            # torch's own annotations know only the None that they are before the rendezvous.
            group_rank: Any = worker_group.group_rank
            store: Any = worker_group.store
            self._identity, self._generation = agree(
                store,
                group_rank=group_rank,
                alone=self._parts.alone,
                mine=self._identity,
                generation=self._generation + 1,
            )
        leads = group_rank == 0
        if self.session is None:
            self.session = self._parts.open_session(self._identity, leads)
        self.session.leads = leads

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        session = self._session()
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        rings = {rank: session.directory.ring(self._generation, rank) for rank in ranks.values()}
        session.safely(
            "making the ring directory",
            lambda: rings[ranks[0]].parent.mkdir(mode=0o700, exist_ok=True),
        )
        env = {
            local_rank: {
                "GPUOPS_AGENT_PID": str(self._parts.agent_pid),
                "GPUOPS_GENERATION": str(self._generation),
                "GPUOPS_RING": str(rings[rank]),
            }
            for local_rank, rank in ranks.items()
        }
        folder = self._log_folder()
        self._parts.logs.prepare(Placement(folder, ranks, env))
        start_us = self._parts.clock.now_us()
        try:
            pids: dict[int, int] = super()._start_workers(worker_group)
        except OSError as exc:
            raise WorkerStartError(f"cannot start the workers: {exc}") from exc
        self._parts.cancellation.install()
        if self._workers is not None:
            self._workers.close()
        self._workers = Workers(
            [
                Worker(
                    rank=rank,
                    local_rank=local_rank,
                    pid=pids[local_rank],
                    ring=RingReader(rings[rank]),
                    files=self._parts.logs.files[local_rank],
                )
                for local_rank, rank in ranks.items()
            ],
            self._parts.clock,
        )
        session.safely("recording the start", lambda: self._started(worker_group, start_us))
        return pids

    def _started(self, worker_group: WorkerGroup, start_us: int) -> None:
        facts = AttemptFacts(
            start_us=start_us,
            world_size=worker_group.workers[0].world_size,
            n_nodes=worker_group.group_world_size or 1,
            group_rank=worker_group.group_rank or 0,
            torch_run_id=worker_group.spec.rdzv_handler.get_run_id(),
            log_dir=str(self._log_folder()),
            slurm_job_id=self._parts.slurm_job_id,
            slurm_restart_count=self._parts.slurm_restart_count,
        )
        self._session().chronicle.attempt_started(self._generation, facts)
        self._session().kernel_log.mark()
        self._write_state("running")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._parts.cancellation.check()
        session, workers = self._session(), self._workers
        assert workers is not None
        session.safely("reading heartbeats", lambda: session.chronicle.beats(workers.beats()))
        if not workers.calls_for_a_look and not self._looks_for_d_state():
            return RunResult(state=WorkerState.HEALTHY)
        if workers.has_failed:
            self._wind_down(workers)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in _OVER:
            self._wind_down(workers)
            session.safely("recording the failure", lambda: self._failed(workers, result))
        elif result.state is WorkerState.SUCCEEDED:
            session.safely("recording the success", session.chronicle.attempt_completed)
        return result

    def _looks_for_d_state(self) -> bool:
        return float(getattr(self, "_uninterruptible_state_timeout", 0.0)) > 0

    def _wind_down(self, workers: Workers) -> None:
        """End the group after a failure, unless it was a cancellation that reached workers first.

        Raises:
            SignalException: See `Cancellation.check`.
        """
        if not workers.all_ended:
            workers.let_others_fail(COLLECT_S)
        self._parts.cancellation.check()
        workers.end(SIGTERM, self._parts.failure_grace_s, self._is_urgent)
        session = self._session()
        session.safely("reading heartbeats", lambda: session.chronicle.beats(workers.beats()))

    def _failed(self, workers: Workers, result: RunResult) -> None:
        session = self._session()
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        restarts = self._remaining_restarts > 0 and result.state is not WorkerState.UNKNOWN
        incident = session.chronicle.attempt_failed(
            self._exits(workers, codes),
            restarts=restarts,
            kernel_lines=session.kernel_log.since_mark(),
        )
        number = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
        budget = self._worker_group.spec.max_restarts
        what = f"restart {number} of {budget}" if restarts else "no restart is left"
        self._parts.say(f"attempt {self._generation} failed: {incident.title}; {what}")
        self._write_state("restarting" if restarts else "failed")

    def _exits(self, workers: Workers, codes: Mapping[int, int]) -> list[WorkerExit]:
        chronicle = self._session().chronicle
        return workers.exits(self._parts.node, chronicle.rank_progress, codes)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        workers = self._workers
        if workers is not None and not workers.all_ended:
            # Nobody failed here: nodes came or went, and torch restarts everyone.
            workers.end(SIGTERM, self._parts.failure_grace_s, self._is_urgent)
            session = self._session()
            session.safely("recording the restart", session.chronicle.attempt_interrupted)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: Signals = SIGTERM, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if self._workers is not None and not self._workers.all_ended:
            self._workers.end(death_sig, self._parts.cancel_grace_s, self._is_urgent)
        super()._shutdown(death_sig, *args, **kwargs)

    def _exit_barrier(self) -> None:
        with self._parts.cancellation.interruptible():
            super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch has no types here

    def cancelled(self, signal_name: str) -> None:
        """Record that a signal ended the run; the workers, if any, are gone by now."""
        session, workers = self._session(), self._workers
        if workers is not None:
            session.chronicle.beats(workers.beats())
        session.chronicle.cancelled(
            signal_name,
            [] if workers is None else self._exits(workers, {}),
            seen_mono_ns=self._parts.cancellation.seen_mono_ns,
            kernel_lines=session.kernel_log.since_mark(),
        )
        if workers is not None:
            self._write_state("cancelled")

    def has_workers(self) -> bool:
        """Say whether a worker may still run; from any thread."""
        return self._workers is not None and not self._workers.all_ended

    def close(self) -> None:
        """Let go of the last generation."""
        if self._workers is not None:
            self._workers.close()

    def _log_folder(self) -> Path:
        return self._parts.logs.directory(self._session().directory.generation(self._generation))

    def _is_urgent(self) -> bool:
        return self._parts.cancellation.is_urgent

    def _session(self) -> Session:
        assert self.session is not None, "a rendezvous comes first"
        return self.session

    def _write_state(self, phase: str) -> None:
        session, workers = self._session(), self._workers
        state = {
            "run_id": self._identity.run_id,
            "name": self._identity.folder,
            "node": self._parts.node,
            "generation": self._generation,
            "phase": phase,
            "agent_pid": self._parts.agent_pid,
            "pids": {} if workers is None else {str(r): p for r, p in workers.pids.items()},
            "ring_dir": str(session.directory.rings / f"generation-{self._generation}"),
        }
        session.write_state(state, group_rank=self._worker_group.group_rank or 0)
