"""What an agent does while it waits for other agents: it checks signals, the store and its node."""

from signal import Signals

from gpuops.agent.checkpoint.api import awaited
from gpuops.agent.elastic.drain import drain_from_afar
from gpuops.agent.elastic.rendezvous import (
    ControlStoreLostError,
    ExcludedError,
    Preflight,
    RunOverError,
)
from gpuops.agent.launch.services import Services
from gpuops.control.membership import stop_without_workers
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.errors import EXIT_REQUEUE
from gpuops.incident.incidents.cluster import preflight_incident


class AgentWait:
    """Implements `WaitHooks` for one agent."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._session = services.session
        self._excluded = ""  # why the run leaves this node out, as the user was told

    def gate(self) -> Preflight:
        """Return whether this node may join; see `WaitHooks`.

        Raises:
            RunOverError: The run ends before the check does.
        """
        found = self._services.preflight.result(self._wait_for_the_check)
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

    def _wait_for_the_check(self, seconds: float) -> None:
        self.waiting(self._services.control.record)
        if self._services.control.wait_until(lambda now: now.phase is RunPhase.STOP, seconds):
            raise RunOverError(self._services.control.record)

    def excluded(self, reason: str) -> None:
        """Wait, under srun, until the run ends or takes this node back; see `WaitHooks`.

        A task that ends early would make srun end the others.

        Raises:
            ExcludedError: This agent ends at once.
        """
        services = self._services
        if not services.plan.parks:
            raise ExcludedError(reason)
        if self._excluded == reason:
            return
        self._excluded = reason
        now_us = services.clock.now_us()
        self._session.safely(
            "recording the exclusion", lambda: self._session.journal.excluded(reason, now_us)
        )
        services.say(
            f"node {services.node} is left out of this run: {reason}; once it is repaired, "
            f"`gpuops run readmit {services.node}` takes it back"
        )

    def waiting(self, record: ControlRecord) -> None:
        """Check signals and the control store; see `WaitHooks`.

        Raises:
            SignalException: See `Cancellation.check`.
            ControlStoreLostError: There has been no answer for too long.
            RunOverError: The run is drained before its workers start.
        """
        services, control = self._services, self._services.control
        services.current.loop_ns = services.clock.mono_ns()
        self._session.safely(
            "recording a decision", lambda: services.decisions.record(record, None)
        )
        services.cancellation.check()
        if control.reset_error is not None:
            raise ControlStoreLostError(str(control.reset_error))
        lost_s = services.plan.store_lost_s
        if control.unreachable_s > lost_s:
            raise ControlStoreLostError(
                f"the control store of this run has not answered for {lost_s:g} s"
            )
        number = services.cancellation.drain
        if number is None:
            return
        if record.phase is RunPhase.RUN:
            attempt = services.current.attempt
            was_there = attempt is not None and record.generation == attempt.generation
            step = services.step_tracker.common_step() if was_there else None
            drain_from_afar(control, number.name, was_there=was_there, stop_step=step)
        elif record.phase in {RunPhase.RENDEZVOUS, RunPhase.COLLECT}:
            stopped = stop_without_workers(control, number.name, EXIT_REQUEUE)
            if stopped is not None:
                self._drained_before(number, stopped)
                raise RunOverError(stopped)

    def _drained_before(self, number: Signals, stopped: ControlRecord) -> None:
        """Record the end of a run that had no workers when this node was asked to stop."""
        checkpoints, grace_s = self._services.checkpoints, self._services.drain_grace_s(number.name)
        awaited(lambda: checkpoints.flush(grace_s), self._services.cancellation.check)
        if (stopped.drain_signal, stopped.decided_by) == (number.name, self._services.node):
            journal = self._session.journal
            self._session.safely(
                "recording the drain", lambda: journal.drained(number.name, [], EXIT_REQUEUE)
            )
