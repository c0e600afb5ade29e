"""What speaks against this node and ends nothing: put into the control record, once.

There it is remembered, whatever becomes of this agent, so that the restart that happens anyway can
do without the node, whoever decides then (`gpuops.incident.suspects`).
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

# A board that does not answer may take seconds to say so, and what is to be told can wait.
RETRY_S = 5.0


class SuspectReporter:
    """The first doubt of this node in a run; what comes after it is in the log."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._again_ns = 0

    def report_new(self) -> None:
        """Tell the run what speaks against this node, where that is new."""
        parts, now_ns = self._services, self._services.clock.mono_ns()
        if parts.node in parts.control.record.suspected or now_ns < self._again_ns:
            return
        report = next(iter(parts.suspects()), None)
        if report is None:
            return

        def change(now: ControlRecord) -> ControlRecord | None:
            if parts.node in now.suspected or now.phase is RunPhase.STOP:
                return None
            return replace(now, suspected={**now.suspected, parts.node: report.how})

        try:
            is_told = parts.control.update_record(change)
        except ControlStoreError as exc:
            log.debug("the doubt is not on the board yet: %s", exc)
            self._again_ns = now_ns + round(RETRY_S * NS_PER_S)
            return
        if is_told:
            self._record(report)

    def _record(self, report: NodeReport) -> None:
        parts, chronicle = self._services, self._services.session.journal
        follows = "a restart does without it, if it can be spared"
        parts.say(f"{report.node} is doubted: {report.how}; {follows}")
        run_id, now_us = parts.session.identity.run_id, parts.clock.now_us()
        incident = suspect_incident(report, run_id=run_id, now_us=now_us)
        parts.session.safely("recording a doubt", lambda: chronicle.doubted(report, incident))
