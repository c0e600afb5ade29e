"""Watches one generation on one node, ten times a second, from its first beat to its end.

What ends it may come from here (a worker, a monitor, a signal), from the others (the record), or
from neither (the control store is out of reach, and this node fences itself).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from signal import Signals

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from gpuops.agent.checkpoint.api import awaited
from gpuops.agent.elastic.attempt import Attempt
from gpuops.agent.elastic.drain import Draining
from gpuops.agent.elastic.finish import AttemptFinish, EndTrigger, has_moved_on
from gpuops.agent.elastic.rendezvous import ControlStoreLostError, RunOverError
from gpuops.agent.launch.plan import LOOK_S_MAX
from gpuops.agent.launch.services import Services
from gpuops.agent.monitors.fleet import SuspectReporter
from gpuops.control.membership import request_drain
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.incident.decision import ReportKind
from gpuops.wire.ring import Beat, WorkerFlag
from gpuops.wire.ring import WorkerPhase as RankPhase

_STEPPING = RankPhase.STEPPING


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchHooks:
    """What the loop asks of torch's agent.

    ``reap`` waits where a worker has failed and another one cannot be ended; ``leave`` lets go of
    such, by local rank, and closes the generation.
    """

    interval_s: float
    reap: Callable[[], RunResult]
    leave: Callable[[Collection[int]], None]
    checks_d_state: bool


class AttemptRunner:
    """Runs one attempt from the start of its workers to what is decided after their end.

    *waiting* is called while others are waited for, and may raise to end the wait; *write_state*
    writes the state of this agent into the run's folder.
    """

    def __init__(
        self,
        services: Services,
        attempt: Attempt,
        torch: TorchHooks,
        *,
        waiting: Callable[[ControlRecord], None],
        write_state: Callable[[str], None],
    ) -> None:
        self._services = services
        self._session = services.session
        self._attempt = attempt
        self._workers = attempt.workers
        self._torch = torch
        self._waiting = waiting
        self._write_state = write_state
        self._finish = AttemptFinish(services, attempt, waiting)
        self._suspects = SuspectReporter(
            services.control, services.clock, services.session, services.say
        )
        self._draining: Draining | None = None
        self._has_stepped = False
        self._result: RunResult | None = None

    def run(self) -> RunResult | None:
        """Watch a generation to its end; return torch's result if that was the run's, too.

        Raises:
            RunOverError, ControlStoreLostError: See there.
            SignalException: See `Cancellation.check`.
        """
        control, interval_s = self._services.control, min(self._torch.interval_s, LOOK_S_MAX)
        while True:
            control.wait_until(lambda now: has_moved_on(now, self._attempt.generation), interval_s)
            self._services.cancellation.check()
            self._services.current.loop_ns = self._services.clock.mono_ns()
            self._read_heartbeats()
            record = control.record
            if control.is_fenced or control.reset_error is not None:
                self._after_fence()
                return None
            if has_moved_on(record, self._attempt.generation):
                self.end(None)
                return None
            if record.phase is RunPhase.DRAIN:
                if self._has_drained(record):
                    self.end(None)
                    return None
                continue
            self._ask_for_drain()
            if self._workers.needs_exit_check or self._torch.checks_d_state:
                result = self._check_exits()
                if result is not None:
                    return self._done(result)
                if self._result is not None or self._workers.has_failed:
                    self.end(ReportKind.WORKERS_FAILED)
                    return None
            self._services.monitors.publish(self._attempt.generation)
            suspicions = self._services.monitors.poll()
            reports = self._finish.reports_of(suspicions)
            if reports:
                self.end(reports)
                return None
            self._session.safely(
                "reporting a suspect", partial(self._suspects.report_new, suspicions)
            )

    def _check_exits(self) -> RunResult | None:
        """Return torch's result once all workers here are done; note one that says otherwise."""
        if self._workers.has_failed:
            return None
        result: RunResult = self._torch.reap()
        if result.state is WorkerState.SUCCEEDED:
            return result
        self._result = None if result.state is WorkerState.HEALTHY else result
        return None

    def _done(self, result: RunResult) -> RunResult | None:
        """Report that all is done here and wait for the others; None if the run continues."""
        self._session.safely("recording the success", self._session.journal.attempt_completed)
        ending, checkpoints = self._finish, self._services.checkpoints
        # Before the others may learn that all is done: the last save needs all of them.
        save_s = self._services.plan.checkpoints.last_save_s
        control = self._services.control
        awaited(lambda: checkpoints.settle(save_s), lambda: self._waiting(control.record))
        ending.file_done()
        record = ending.wait_for_the_others()
        if record.phase is RunPhase.STOP and record.exit_code == 0:
            self._write_state("ended")
            return result
        # Others failed, or the run drains: they wait for no more from here than is filed.
        record = ending.await_decision()
        if record.phase is RunPhase.STOP:
            raise RunOverError(record)
        return None

    def end(self, trigger: EndTrigger) -> None:
        """End this generation here, report it, and wait for what is decided.

        Raises:
            RunOverError: The run ends with it.
        """
        ending = self._finish
        ending.announce(trigger)
        ending.collect_evidence(trigger)
        trigger = ending.reconsider(trigger)
        self._services.preflight.begin()
        ending.wind_down()
        self._read_heartbeats()
        self._services.checkpoints.poll()  # the newest safe step is a part of the report
        codes = self._codes()
        self._result = None
        journal = self._session.journal
        self._session.safely("keeping the time", lambda: journal.mark("stopped"))
        was_asked = self._draining is None or not self._draining.ended_unasked()
        ending.report(trigger, codes, was_asked=was_asked)
        record = ending.await_decision()
        self._write_state("restarting" if record.phase is not RunPhase.STOP else "ended")
        if record.phase is RunPhase.STOP:
            raise RunOverError(record)

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of the workers that torch reaped before us, by global rank."""
        if not self._workers.all:
            return {}  # they were never started: torch knows of none
        if self._workers.left:
            self._leave()
            return {}
        result = self._result or self._torch.reap()
        return {rank: failure.exitcode for rank, failure in result.failures.items()}

    def _leave(self) -> None:
        left = self._workers.left
        self._session.safely("leaving workers behind", lambda: self._torch.leave(left))

    def _after_fence(self) -> None:
        """End what the fence has killed, then wait for a place in the run again.

        Raises:
            ControlStoreLostError: There is nothing to come back to.
            RunOverError: The run has ended without this node, or because of it.
        """
        silent_s = self._services.control.since_heartbeat_s
        ending = self._finish
        self._workers.kill()
        ending.wind_down()
        if self._workers.left:
            self._leave()
        else:
            self._torch.reap()
        if self._services.control.reset_error is not None:
            self._read_heartbeats()
            raise ControlStoreLostError(str(self._services.control.reset_error))
        ending.fenced(silent_s)
        self._services.current.fences += 1
        self._services.say(
            f"cut off from the control store for {silent_s:.0f} s: the workers were ended"
        )
        self._write_state("fenced")
        while not self._services.control.clear_fence():
            self._waiting(self._services.control.record)
            self._services.control.wait_until(lambda _now: False, 0.2)
        journal = self._session.journal
        self._session.safely("recording the return", lambda: journal.rejoined(silent_s))
        if not has_moved_on(self._services.control.record, self._attempt.generation):
            ending.announce(ReportKind.NODE_LOST)
        ending.report_fence(silent_s)
        record = ending.await_decision()
        if record.phase is RunPhase.STOP:
            raise RunOverError(record)

    def _has_drained(self, record: ControlRecord) -> bool:
        if self._draining is None:
            name = record.drain_signal or "SIGTERM"
            grace_s = self._services.drain_grace_s(name)
            self._finish.drain_within(grace_s)
            self._draining = Draining(
                Signals[name],
                self._workers,
                self._services.clock,
                grace_s=grace_s,
                stop_step=record.drain_step,
                reach_s=self._services.step_tracker.seconds_to(record.drain_step),
            )
        return self._draining.is_over()

    def _ask_for_drain(self) -> None:
        """Turn a notice of preemption, to us or to a worker, into a drain of the whole run."""
        number = self._services.cancellation.drain
        if number is None and self._has_signalled_worker():
            number = Signals.SIGUSR1
        if number is None:
            return
        if request_drain(
            self._services.control, number.name, self._services.step_tracker.common_step()
        ):
            grace_s, journal = self._services.drain_grace_s(number.name), self._session.journal
            self._session.safely(
                "recording the notice", lambda: journal.drain_requested(number.name, grace_s)
            )

    def _has_signalled_worker(self) -> bool:
        return any(worker.ring.flags & WorkerFlag.SIGNALLED for worker in self._workers.all)

    def _read_heartbeats(self) -> None:
        beats = self._workers.beats()
        self._session.safely("reading heartbeats", lambda: self._feed(beats))

    def _feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        if not self._has_stepped and any(b.phase is _STEPPING for bs in beats.values() for b in bs):
            # What the ranks have resumed from belongs to the incident that this step ends.
            self._has_stepped = True
            self._services.checkpoints.poll()
        self._session.journal.beats(beats)
        self._services.step_tracker.feed(beats)
        self._services.monitors.feed(beats)
