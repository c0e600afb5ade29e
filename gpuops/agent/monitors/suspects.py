"""Writes the first suspicion against this node that ends nothing into the control record.

The record outlives this agent: the leader of the next restart leaves the node out
(`gpuops.incident.suspects`).
"""

import logging
from dataclasses import replace

from gpuops.agent.launch.services import Services
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.incident.decision import NodeReport
from gpuops.incident.incidents.cluster import suspect_incident
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# A call to a control store that does not answer may take seconds; the report can wait.
RETRY_S = 5.0


class SuspectReporter:
    """Reports the first suspicion against this node in a run; later ones are only logged."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._again_ns = 0

    def report_new(self) -> None:
        """Write a new suspicion against this node into the control record."""
        services, now_ns = self._services, self._services.clock.mono_ns()
        if services.node in services.control.record.suspected or now_ns < self._again_ns:
            return
        report = next(iter(services.suspects()), None)
        if report is None:
            return

        def change(now: ControlRecord) -> ControlRecord | None:
            if services.node in now.suspected or now.phase is RunPhase.STOP:
                return None
            return replace(now, suspected={**now.suspected, services.node: report.how})

        try:
            is_written = services.control.update_record(change)
        except ControlStoreError as exc:
            log.debug("the suspicion is not in the control record yet: %s", exc)
            self._again_ns = now_ns + round(RETRY_S * NS_PER_S)
            return
        if is_written:
            self._record(report)

    def _record(self, report: NodeReport) -> None:
        services, journal = self._services, self._services.session.journal
        follows = "a restart does without it, if it can be spared"
        services.say(f"{report.node} is doubted: {report.how}; {follows}")
        run_id, now_us = services.session.identity.run_id, services.clock.now_us()
        incident = suspect_incident(report, run_id=run_id, now_us=now_us)
        services.session.safely("recording a suspicion", lambda: journal.doubted(report, incident))
