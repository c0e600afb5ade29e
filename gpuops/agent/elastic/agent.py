"""torch's elastic agent, which follows the control record of its run.

torch starts, tees and reaps the workers, as under torchrun. The record decides when to start, stop
and give up: this loop reads its workers and the record ten times a second, reports what happened
here to the control store, and carries out what was decided.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
)
from torch.distributed.elastic.agent.server.api import Worker as TorchWorker
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gpuops.agent.checkpoint.keeper_restarts import awaited
from gpuops.agent.elastic.attempt import AttemptRunner, TorchHooks
from gpuops.agent.elastic.drain import drain_from_afar
from gpuops.agent.elastic.logs import RankLogFiles
from gpuops.agent.elastic.rendezvous import (
    Assignment,
    ControlRendezvous,
    ControlStoreLostError,
    Preflight,
    RunOverError,
)
from gpuops.agent.elastic.teardown import abandon_unkillable
from gpuops.agent.elastic.workers import RingReader, Worker, Workers
from gpuops.agent.journal.payloads import AttemptFacts
from gpuops.agent.launch.services import Services
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.status.published import PublishedSnapshot, progress_of, state_of
from gpuops.control.membership import stop_without_workers
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.errors import EXIT_REQUEUE
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.incident.incidents.cluster import preflight_incident
from gpuops.incident.kernel import job_lines
from gpuops.model import Confidence, FailureClass, Json, Side, WorkerExit
from gpuops.scrub import scrub


class WorkerStartError(Exception):
    """The system refused to start a worker; the message says which program and why."""


class TakenDirectoryError(WorkerStartError):
    """Another job uses this checkpoint directory; the message names the job and the directory."""


class GpuopsAgent(LocalElasticAgent):
    """One node's agent; ``generation`` is the last one that had workers here."""

    def __init__(
        self,
        spec: WorkerSpec,
        services: Services,
        board: Mapping[str, str | int],
        **torch_options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(spec=spec, logs_specs=services.logs, **torch_options)
        self.generation = -1
        self.snapshot = PublishedSnapshot(services, board)
        self._services = services
        self._session = services.session
        self._workers: Workers | None = None
        self._assignment: Assignment | None = None
        self._is_told_of_the_wait = False
        seats = spec.rdzv_handler
        assert isinstance(seats, ControlRendezvous)
        seats.hooks = self
        services.control.on_fence = self._fence
        services.control.running_generation = self._training
        services.control.heartbeat_payload = self._progress

    def _invoke_run(self, role: str = "default_role") -> RunResult:  # noqa: ARG002 torch's signature
        while True:
            try:
                self._initialize_workers(self._worker_group)
            except WorkerStartError as exc:
                reason = self._not_started(exc)
                self._attempt().end((reason,))
                continue
            ended = self._attempt().run()
            if ended is not None:
                return ended

    def _attempt(self) -> AttemptRunner:
        assert self._assignment is not None
        assert self._workers is not None
        torch = TorchHooks(
            interval_s=self._worker_group.spec.monitor_interval,
            reap=lambda: super(GpuopsAgent, self)._monitor_workers(self._worker_group),
            leave=self._leave,
            looks_for_d_state=getattr(self, "_uninterruptible_state_timeout", 0.0) > 0,
        )
        return AttemptRunner(
            self._services, self._assignment, self._workers, torch, self, self.snapshot
        )

    def _not_started(self, error: WorkerStartError) -> NodeReport:
        self.close()
        self._workers = Workers([], self._services.clock)
        is_taken = isinstance(error, TakenDirectoryError)
        return NodeReport(
            kind=ReportKind.START_FAILED,
            node=self._services.node,
            generation=self.generation,
            failure_class=FailureClass.CHECKPOINT_DIR_TAKEN
            if is_taken
            else FailureClass.START_FAILED,
            side=Side.USER if is_taken else Side.AMBIGUOUS,
            confidence=Confidence.CONFIRMED,
            how=scrub(str(error)),
            is_infrastructure=not is_taken,
        )

    def _refuse_a_taken_directory(self) -> None:
        """Check, once, that no other job uses the checkpoint directory; wait for one that ends.

        Raises:
            TakenDirectoryError: One does, and does not end.
        """
        if self._workers is not None:
            return
        why = self._services.checkpoints.refusal(self._wait_for_the_directory)
        if why is not None:
            raise TakenDirectoryError(why)

    def _wait_for_the_directory(self, seconds: float) -> None:
        if not self._is_told_of_the_wait:
            self._is_told_of_the_wait = True
            self._services.say("another job has the directory of the checkpoints; is it leaving?")
        self.waiting(self._services.control.record)
        self._services.control.wait_until(lambda now: now.phase is RunPhase.STOP, seconds)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._services.preflight.begin()
        seats = worker_group.spec.rdzv_handler
        assert isinstance(seats, ControlRendezvous)
        with self._services.cancellation.interruptible():
            # torch counts restarts down from the budget and gives workers the difference.
            super()._rendezvous(worker_group)
        assert seats.assignment is not None
        self._assignment = seats.assignment
        self.generation = self._assignment.record.generation
        self._remaining_restarts = worker_group.spec.max_restarts - self.generation
        self._mark("seated")

    def _assign_worker_ranks(
        self,
        store: Any,  # noqa: ANN401, ARG002 torch's signature
        group_rank: int,
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[TorchWorker]:
        """Return this node's workers with the ranks that follow from the roster."""
        seats = spec.rdzv_handler
        assert isinstance(seats, ControlRendezvous)
        assert seats.assignment is not None
        roster = seats.assignment.roster
        first, world_size = roster.first_rank(group_rank), roster.world_size
        return [
            TorchWorker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        session = self._session
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        rings = {rank: session.directory.ring(self.generation, rank) for rank in ranks.values()}
        session.safely(
            "making the ring directory",
            lambda: rings[ranks[0]].parent.mkdir(mode=0o700, exist_ok=True),
        )
        folder = self._log_folder()
        checkpoints, excluded = self._services.checkpoints, self._left_out()
        assert self._assignment is not None
        n_nodes = worker_group.group_world_size or 1
        checkpoints.begin(self.generation, n_nodes, excluded, self._assignment.roster)
        self._refuse_a_taken_directory()
        env = {
            local_rank: {
                **self._services.worker_env(folder),
                **checkpoints.env(),
                **_env_of(excluded),
                "GPUOPS_AGENT_PID": str(self._services.agent_pid),
                "GPUOPS_GENERATION": str(self.generation),
                "GPUOPS_RING": str(rings[rank]),
            }
            for local_rank, rank in ranks.items()
        }
        session.safely("looking at the GPUs", self._services.preflight.started)
        self._services.logs.prepare(RankLogFiles(folder, ranks, env))
        start_us = self._services.clock.now_us()
        try:
            pids: dict[int, int] = super()._start_workers(worker_group)
        except OSError as exc:
            raise WorkerStartError(f"cannot start the workers: {exc}") from exc
        self._services.cancellation.install()
        self.close()
        workers = [
            Worker(
                rank=rank,
                local_rank=local_rank,
                pid=pids[local_rank],
                ring=RingReader(rings[rank]),
                files=self._services.logs.files[local_rank],
            )
            for local_rank, rank in ranks.items()
        ]
        self._workers = self.snapshot.workers = Workers(workers, self._services.clock)
        self.snapshot.generation = self.generation
        self.snapshot.group_rank = worker_group.group_rank
        self.snapshot.world_size = worker_group.workers[0].world_size
        self._services.step_tracker.begin()
        session.safely("recording the start", lambda: self._started(worker_group, start_us))
        # By now every reader of rings has opened this generation's.
        session.safely(
            "giving rings back", lambda: session.directory.remove_rings_before(self.generation)
        )
        watched = MonitoredAttempt(
            generation=self.generation, node=self._services.node, workers=workers, folder=folder
        )
        self._services.monitors.begin(watched)
        return pids

    def _left_out(self) -> int | None:
        """Return the step of the checkpoint that must not be loaded, None where any may be."""
        assert self._assignment is not None
        return self._assignment.record.excluded_checkpoint

    def _started(self, worker_group: WorkerGroup, start_us: int) -> None:
        facts = AttemptFacts(
            start_us=start_us,
            world_size=worker_group.workers[0].world_size,
            n_nodes=worker_group.group_world_size or 1,
            group_rank=worker_group.group_rank or 0,
            torch_run_id=worker_group.spec.rdzv_handler.get_run_id(),
            log_dir=str(self._log_folder()),
            slurm_job_id=self._services.slurm_job_id,
            slurm_restart_count=self._services.slurm_restart_count,
        )
        self._session.journal.attempt_started(self.generation, facts)
        self._mark("started")
        self._session.kernel_log.mark()
        self.write_state("running")

    def gate(self) -> Preflight:
        """Return whether this node may join; see `WaitHooks`."""
        found = self._services.preflight.result(self._wait_at_the_gate)
        if found.to_report is not None and not found.passed:
            session = self._session
            report = found.to_report(self._services.node, self._services.control.record.generation)
            incident = preflight_incident(
                report, run_id=session.identity.run_id, now_us=self._services.clock.now_us()
            )
            session.safely(
                "recording a check", lambda: session.journal.gate_failed(report, incident)
            )
        return found

    def _wait_at_the_gate(self, seconds: float) -> None:
        self.waiting(self._services.control.record)
        if self._services.control.wait_until(lambda now: now.phase is RunPhase.STOP, seconds):
            raise RunOverError(self._services.control.record)

    def waiting(self, record: ControlRecord) -> None:
        """Check signals and the control store while this agent waits; see `WaitHooks`.

        Raises:
            SignalException: See `Cancellation.check`.
            ControlStoreLostError: There has been no answer for too long.
            RunOverError: The run is drained before its workers start.
        """
        self.snapshot.main_ns = self._services.clock.mono_ns()
        self._session.safely(
            "recording a decision", lambda: self._services.decisions.record(record, None)
        )
        self._services.cancellation.check()
        if self._services.control.reset_error is not None:
            raise ControlStoreLostError(str(self._services.control.reset_error))
        lost_s = self._services.plan.store_lost_s
        if self._services.control.unreachable_s > lost_s:
            raise ControlStoreLostError(f"the board of this run has not answered for {lost_s:g} s")
        number = self._services.cancellation.drain
        if number is None:
            return
        if record.phase is RunPhase.RUN:
            was_there = self._workers is not None and record.generation == self.generation
            step = self._services.step_tracker.common_step() if was_there else None
            drain_from_afar(
                self._services.control, number.name, was_there=was_there, stop_step=step
            )
        elif record.phase in {RunPhase.RENDEZVOUS, RunPhase.COLLECT}:
            stopped = stop_without_workers(self._services.control, number.name, EXIT_REQUEUE)
            if stopped is not None:
                self._drained_before(number, stopped)
                raise RunOverError(stopped)

    def _drained_before(self, number: Signals, stopped: ControlRecord) -> None:
        """Record the end of a run that had no workers when this node was asked to stop."""
        checkpoints, grace_s = self._services.checkpoints, self._services.drain_grace_s(number.name)
        awaited(lambda: checkpoints.flush(grace_s), self._services.cancellation.check)
        if (stopped.drain_signal, stopped.decided_by) == (number.name, self._services.node):
            chronicle = self._session.journal
            self._session.safely(
                "recording the drain", lambda: chronicle.drained(number.name, [], EXIT_REQUEUE)
            )

    def _training(self) -> int | None:
        return self.generation if self.has_workers() else None

    def _fence(self, _silent_s: float) -> None:
        if self._workers is not None:
            self._workers.kill()

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._shutdown(SIGTERM)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: Signals = SIGTERM, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        workers = self._workers
        if workers is not None and not workers.all_ended:
            if not workers.left:  # a second attempt would not end them either
                workers.end(death_sig, self._services.cancel_grace_s, self._is_urgent)
            self._leave(workers.left)
        super()._shutdown(death_sig, *args, **kwargs)

    def _leave(self, local_ranks: Collection[int]) -> None:
        if local_ranks and self._pcontext is not None:
            abandon_unkillable(self._pcontext, local_ranks)

    def cancelled(self, signal_name: str) -> None:
        """Record that a signal ended the run, after its workers have ended."""
        session, workers = self._session, self._workers
        exits: list[WorkerExit] = []
        if workers is not None:
            session.journal.beats(workers.beats())
            exits = workers.exits(self._services.node, session.journal.rank_progress, {})
        session.journal.cancelled(
            signal_name,
            exits,
            seen_mono_ns=self._services.cancellation.seen_mono_ns,
            kernel_lines=job_lines(session.kernel_log.since_mark(), self._services.job_xids(None)),
        )
        if workers is not None:
            self.write_state("cancelled")

    def has_workers(self) -> bool:
        """Say whether a worker may still run; from any thread."""
        return self._workers is not None and not self._workers.all_ended

    def close(self) -> None:
        """Close the last generation's workers."""
        if self._workers is not None:
            self._workers.close()

    def _log_folder(self) -> Path:
        return self._services.logs.directory(self._session.directory.generation(self.generation))

    def _is_urgent(self) -> bool:
        return self._services.cancellation.is_urgent

    def _mark(self, phase: str) -> None:
        self._session.safely("keeping the time", lambda: self._session.journal.mark(phase))

    def _progress(self) -> Json:
        return progress_of(self._services, self.generation, self._workers)

    def write_state(self, phase: str) -> None:
        """Replace ``state.json``."""
        state = state_of(self._services, self.snapshot, phase)
        self._session.write_state(state, group_rank=self._worker_group.group_rank or 0)


def _env_of(excluded_step: int | None) -> dict[str, str]:
    """Return the variable that names the step whose checkpoint must not be loaded."""
    return {} if excluded_step is None else {"GPUOPS_EXCLUDED_CHECKPOINT": str(excluded_step)}
