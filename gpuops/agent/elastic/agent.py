"""torch's elastic agent, which follows the control record of its run.

torch starts, tees and reaps the workers, as under torchrun. The record decides when to start, stop
and give up: this loop reads its workers and the record ten times a second, reports what happened
here to the control store, and carries out what was decided.
"""

from collections.abc import Callable, Collection, Sequence
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

from gpuops.agent.elastic.attempt import Attempt
from gpuops.agent.elastic.attempt_loop import AttemptRunner, TorchHooks
from gpuops.agent.elastic.logs import RankLogFiles
from gpuops.agent.elastic.rendezvous import (
    Assignment,
    ControlRendezvous,
)
from gpuops.agent.elastic.teardown import abandon_unkillable
from gpuops.agent.elastic.workers import RingReader, Worker, Workers
from gpuops.agent.journal.payloads import AttemptFacts
from gpuops.agent.launch.services import Services
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.recorder.reader import recorder_env
from gpuops.agent.status.published import PublishedSnapshot, state_of
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.host.process.executable import REMEDIES, describe_refusal
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.incident.kernel import job_lines
from gpuops.model import Confidence, FailureClass, Side, WorkerExit
from gpuops.scrub import scrub


class WorkerStartError(Exception):
    """No worker can be started; the message says why. *side*: USER where the user can change it."""

    def __init__(
        self,
        why: str,
        side: Side,
        failure_class: FailureClass = FailureClass.START_FAILED,
    ) -> None:
        super().__init__(why)
        self.side = side
        self.failure_class = failure_class


class GpuopsAgent(LocalElasticAgent):
    """One node's agent; *waiting* is called while it waits, see `WaitHooks`."""

    def __init__(
        self,
        spec: WorkerSpec,
        services: Services,
        snapshot: PublishedSnapshot,
        waiting: Callable[[ControlRecord], None],
        **torch_options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(spec=spec, logs_specs=services.logs, **torch_options)
        self._services = services
        self._session = services.session
        self._snapshot = snapshot
        self._waiting = waiting
        self._has_reported_the_wait = False

    def _invoke_run(self, role: str = "default_role") -> RunResult:  # noqa: ARG002 torch's signature
        while True:
            try:
                self._initialize_workers(self._worker_group)
            except WorkerStartError as exc:
                reason = self._not_started(exc)
                self._attempt_loop().end((reason,))
                continue
            ended = self._attempt_loop().run()
            if ended is not None:
                return ended

    def _attempt_loop(self) -> AttemptRunner:
        attempt = self._services.current.attempt
        assert attempt is not None
        torch = TorchHooks(
            interval_s=self._worker_group.spec.monitor_interval,
            reap=lambda: super(GpuopsAgent, self)._monitor_workers(self._worker_group),
            leave=self._leave,
            checks_d_state=getattr(self, "_uninterruptible_state_timeout", 0.0) > 0,
        )
        return AttemptRunner(
            self._services, attempt, torch, waiting=self._waiting, write_state=self.write_state
        )

    @property
    def _assignment(self) -> Assignment:
        rendezvous = self._worker_group.spec.rdzv_handler
        assert isinstance(rendezvous, ControlRendezvous)
        assert rendezvous.assignment is not None
        return rendezvous.assignment

    def _begin(self, workers: Sequence[Worker], folder: Path) -> Attempt:
        attempt = Attempt(
            assignment=self._assignment,
            workers=Workers(workers, self._services.clock),
            folder=folder,
        )
        self._services.current.attempt = attempt
        return attempt

    def _not_started(self, error: WorkerStartError) -> NodeReport:
        self.close()
        attempt = self._begin([], self._log_folder())
        return NodeReport(
            kind=ReportKind.START_FAILED,
            node=self._services.node,
            generation=attempt.generation,
            failure_class=error.failure_class,
            side=error.side,
            confidence=Confidence.CONFIRMED,
            how=scrub(str(error)),
            is_infrastructure=error.side is not Side.USER,
        )

    def _refuse_a_taken_directory(self) -> None:
        """Check, once, that no other job uses the checkpoint directory; wait for one that ends.

        Raises:
            WorkerStartError: One does, and does not end.
        """
        if self._services.current.attempt is not None:
            return
        why = self._services.checkpoints.refusal(self._wait_for_the_directory)
        if why is not None:
            raise WorkerStartError(why, Side.USER, FailureClass.CHECKPOINT_DIR_TAKEN)

    def _wait_for_the_directory(self, seconds: float) -> None:
        if not self._has_reported_the_wait:
            self._has_reported_the_wait = True
            self._services.say("another job uses the checkpoint directory; waiting for it to end")
        self._waiting(self._services.control.record)
        self._services.control.wait_until(lambda now: now.phase is RunPhase.STOP, seconds)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._services.preflight.begin()
        with self._services.cancellation.interruptible():
            # torch counts restarts down from the budget and gives workers the difference.
            super()._rendezvous(worker_group)
        generation = self._assignment.record.generation
        self._remaining_restarts = worker_group.spec.max_restarts - generation
        self._mark("seated")

    def _assign_worker_ranks(
        self,
        store: Any,  # noqa: ANN401, ARG002 torch's signature
        group_rank: int,
        group_world_size: int,  # noqa: ARG002
        spec: WorkerSpec,
    ) -> list[TorchWorker]:
        """Return this node's workers with the ranks that follow from the roster."""
        roster = self._assignment.roster
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
        session, record = self._session, self._assignment.record
        generation, excluded = record.generation, record.excluded_checkpoint
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        rings = {rank: session.directory.ring(generation, rank) for rank in ranks.values()}
        session.safely(
            "making the ring directory",
            lambda: rings[ranks[0]].parent.mkdir(mode=0o700, exist_ok=True),
        )
        folder = self._log_folder()
        checkpoints = self._services.checkpoints
        n_nodes = worker_group.group_world_size or 1
        checkpoints.begin(generation, n_nodes, excluded, self._assignment.roster)
        self._refuse_a_taken_directory()
        env = {
            local_rank: {
                **self._services.worker_env(folder),
                **checkpoints.env(),
                **_env_of(excluded),
                "GPUOPS_AGENT_PID": str(self._services.agent_pid),
                "GPUOPS_GENERATION": str(generation),
                "GPUOPS_RING": str(rings[rank]),
                **recorder_env(rings[rank], rank),
            }
            for local_rank, rank in ranks.items()
        }
        session.safely("checking the GPUs", self._services.preflight.started)
        self._services.logs.prepare(RankLogFiles(folder, ranks, env))
        start_us = self._services.clock.now_us()
        try:
            pids: dict[int, int] = super()._start_workers(worker_group)
        except OSError as exc:
            raise _start_error(worker_group.spec.entrypoint, exc) from exc
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
        attempt = self._begin(workers, folder)
        self._services.step_tracker.begin()
        session.safely(
            "recording the start", lambda: self._started(worker_group, attempt, start_us)
        )
        # By now every reader of rings has opened this generation's.
        session.safely(
            "giving rings back", lambda: session.directory.remove_rings_before(generation)
        )
        self._services.monitors.begin(self._monitored(attempt))
        return pids

    def _monitored(self, attempt: Attempt) -> MonitoredAttempt:
        return MonitoredAttempt(
            generation=attempt.generation,
            node=self._services.node,
            workers=attempt.workers.all,
            folder=attempt.folder,
            world_size=attempt.assignment.roster.world_size,
        )

    def _started(self, worker_group: WorkerGroup, attempt: Attempt, start_us: int) -> None:
        facts = AttemptFacts(
            start_us=start_us,
            world_size=attempt.assignment.roster.world_size,
            n_nodes=len(attempt.assignment.roster.members),
            group_rank=attempt.assignment.group_rank,
            torch_run_id=worker_group.spec.rdzv_handler.get_run_id(),
            log_dir=str(attempt.folder),
            slurm_job_id=self._services.slurm_job_id,
            slurm_restart_count=self._services.slurm_restart_count,
        )
        self._session.journal.attempt_started(attempt.generation, facts)
        self._mark("started")
        self._session.kernel_log.mark()
        self.write_state("running")

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._shutdown(SIGTERM)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: Signals = SIGTERM, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        attempt = self._services.current.attempt
        if attempt is not None and not attempt.workers.all_ended:
            workers = attempt.workers
            if not workers.left:  # a second attempt would not end them either
                workers.end(death_sig, self._services.cancel_grace_s, self._is_urgent)
            self._leave(workers.left)
        super()._shutdown(death_sig, *args, **kwargs)

    def _leave(self, local_ranks: Collection[int]) -> None:
        if local_ranks and self._pcontext is not None:
            abandon_unkillable(self._pcontext, local_ranks)

    def cancelled(self, signal_name: str) -> None:
        """Record that a signal ended the run, after its workers have ended."""
        session, attempt = self._session, self._services.current.attempt
        exits: list[WorkerExit] = []
        if attempt is not None:
            workers = attempt.workers
            session.journal.beats(workers.beats())
            exits = workers.exits(self._services.node, session.journal.rank_progress, {})
        session.journal.cancelled(
            signal_name,
            exits,
            seen_mono_ns=self._services.cancellation.seen_mono_ns,
            kernel_lines=job_lines(session.kernel_log.since_mark(), self._services.job_xids(None)),
        )
        if attempt is not None:
            self.write_state("cancelled")

    def close(self) -> None:
        """Close the last generation's workers."""
        if (attempt := self._services.current.attempt) is not None:
            attempt.workers.close()

    def _log_folder(self) -> Path:
        generation = self._assignment.record.generation
        return self._services.logs.directory(self._session.directory.generation(generation))

    def _is_urgent(self) -> bool:
        return self._services.cancellation.is_urgent

    def _mark(self, phase: str) -> None:
        self._session.safely("keeping the time", lambda: self._session.journal.mark(phase))

    def write_state(self, phase: str) -> None:
        """Replace ``state.json``."""
        state = state_of(self._services, self._snapshot, phase)
        self._session.write_state(state, group_rank=self._worker_group.group_rank or 0)


def _start_error(program: object, error: OSError) -> WorkerStartError:
    """Return why no worker runs: *program* cannot be executed, or the system had no room for it."""
    if error.filename == program and error.errno in REMEDIES:
        return WorkerStartError(describe_refusal(error.filename, error), Side.USER)
    return WorkerStartError(f"cannot start the workers: {error}", Side.AMBIGUOUS)


def _env_of(excluded_step: int | None) -> dict[str, str]:
    """Return the variable that names the step whose checkpoint must not be loaded."""
    return {} if excluded_step is None else {"GPUOPS_EXCLUDED_CHECKPOINT": str(excluded_step)}
