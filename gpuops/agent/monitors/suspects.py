"""Writes the first suspicion against each node that ends nothing into the control record.

The record outlives this agent: the leader of the next restart leaves the node out
(`gpuops.incident.suspicion`).
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuops.agent.journal.session import RunSession
from gpuops.control.client import ControlClient
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.incident.incidents.cluster import suspect_incident
from gpuops.incident.suspicion import Suspicion, SuspicionLevel, suspect_report
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# A call to a control store that does not answer may take seconds; the report can wait.
RETRY_S = 5.0


class SuspectReporter:
    """Reports the first suspicion against a node in a run; later ones are only logged."""

    def __init__(
        self, control: ControlClient, clock: Clock, session: RunSession, say: Callable[[str], None]
    ) -> None:
        self._control = control
        self._clock = clock
        self._session = session
        self._say = say
        self._again_ns = 0

    def report_new(self, suspicions: Iterable[Suspicion]) -> None:
        """Write a suspicion against a node that is not suspected yet into the control record."""
        record, now_ns = self._control.record, self._clock.mono_ns()
        suspects = (s for s in suspicions if s.level is SuspicionLevel.SUSPECT)
        suspect = next(
            (s for s in suspects if s.node is not None and s.node not in record.suspected), None
        )
        if suspect is None or now_ns < self._again_ns:
            return
        report = suspect_report(suspect, record.generation)

        def change(now: ControlRecord) -> ControlRecord | None:
            if report.node in now.suspected or now.phase is RunPhase.STOP:
                return None
            return replace(now, suspected={**now.suspected, report.node: report.how})

        try:
            is_written = self._control.update_record(change)
        except ControlStoreError as exc:
            log.debug("the suspicion is not in the control record yet: %s", exc)
            self._again_ns = now_ns + round(RETRY_S * NS_PER_S)
            return
        if is_written:
            self._record(report)

    def _record(self, report: NodeReport) -> None:
        session, journal = self._session, self._session.journal
        follows = "a restart does without it, if it can be spared"
        self._say(f"{report.node} is suspected: {report.how}; {follows}")
        run_id, now_us = session.identity.run_id, self._clock.now_us()
        incident = suspect_incident(report, run_id=run_id, now_us=now_us)
        session.safely("recording a suspicion", lambda: journal.doubted(report, incident))
