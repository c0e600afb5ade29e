"""Judging on the leader what the monitors of all nodes publish, with each `FleetMonitor`.

The first suspicion of a node that does not end the generation goes into the control record, which
outlives this agent: the next restart excludes that node (`gpuops.incident.suspicion`).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpuops.agent.journal.session import RunSession
from gpuops.agent.monitors.api import FleetMonitor
from gpuops.control import transitions
from gpuops.control.client import ControlClient
from gpuops.control.leader import LeaderExtension
from gpuops.control.record import ENTRY_ERRORS, ControlRecord, Roster, RunPhase, unpack
from gpuops.control.store import ControlStoreError, Entry
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.incident.incidents.cluster import note_incident, suspect_incident
from gpuops.incident.suspicion import Suspicion, SuspicionLevel, reports_of, suspect_report
from gpuops.model import Confidence, Entity, Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# A call to a control store that does not answer may take seconds; the report can wait.
RETRY_S = 5.0
JUDGE_S = 5.0


class SuspectReporter:
    """Reports the first suspicion of a node in a run; later ones are only logged."""

    def __init__(
        self, control: ControlClient, clock: Clock, session: RunSession, warn: Callable[[str], None]
    ) -> None:
        self._control = control
        self._clock = clock
        self._session = session
        self._warn = warn
        self._retry_ns = 0
        self._noted: set[Entity] = set()

    def report_new(self, suspicions: Iterable[Suspicion]) -> None:
        """Write a suspicion of a node that is not suspected yet into the control record.

        A note that is sure enough to be `Confidence.PROBABLE` is an incident, once for each entity.
        """
        record, now_ns = self._control.record, self._clock.mono_ns()
        suspicions = tuple(suspicions)
        for note in (s for s in suspicions if _is_incident(s) and s.entity not in self._noted):
            self._noted.add(note.entity)
            self._note(note)
        suspects = (s for s in suspicions if s.level is SuspicionLevel.SUSPECT)
        suspect = next(
            (s for s in suspects if s.node is not None and s.node not in record.suspected), None
        )
        if suspect is None or now_ns < self._retry_ns:
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
            self._retry_ns = now_ns + round(RETRY_S * NS_PER_S)
            return
        if is_written:
            self._record(report)

    def _record(self, report: NodeReport) -> None:
        session, journal = self._session, self._session.journal
        self._warn(
            f"{report.node} is suspected: {report.how}; the next restart excludes it, if enough"
            " nodes remain"
        )
        run_id, now_us = session.identity.run_id, self._clock.now_us()
        incident = suspect_incident(report, run_id=run_id, now_us=now_us)
        session.safely("recording a suspicion", lambda: journal.suspected(report, incident))

    def _note(self, note: Suspicion) -> None:
        session, journal = self._session, self._session.journal
        self._warn(f"{note.why} (no node is suspected)")
        incident = note_incident(note, run_id=session.identity.run_id, now_us=self._clock.now_us())
        session.safely("recording a note", lambda: journal.noted(incident))


def _is_incident(suspicion: Suspicion) -> bool:
    is_note = suspicion.level is SuspicionLevel.NOTE and suspicion.node is None
    is_slow = suspicion.failure_class.category == "straggler"
    return is_note and is_slow and suspicion.confidence is Confidence.PROBABLE


class FleetJudge(LeaderExtension):
    """A leader's extension: it records the suspicions of *monitors*, or ends the generation.

    Called in the leader's control thread. An exception of a monitor goes to *safely* and affects
    neither the others nor the leader.
    """

    def __init__(
        self,
        client: ControlClient,
        monitors: Sequence[FleetMonitor],
        clock: Clock,
        suspects: SuspectReporter,
        safely: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._client = client
        self._monitors = tuple(monitors)
        self._clock = clock
        self._suspects = suspects
        self._safely = safely
        self._next_ns = 0

    def on_heartbeats(
        self,
        record: ControlRecord,
        roster: Roster,
        heartbeats: Mapping[str, Entry],  # noqa: ARG002 the protocol's
    ) -> None:
        """Judge what is published in the generation of *roster*, every `JUDGE_S`.

        Raises:
            ControlStoreError: The store cannot be read, or the result cannot be written.
        """
        now_ns = self._clock.mono_ns()
        if not self._monitors or record.phase is not RunPhase.RUN or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + round(JUDGE_S * NS_PER_S)
        published = _by_monitor(self._client.store.list(self._client.keys.published()), roster)
        suspicions: list[Suspicion] = []
        for monitor in self._monitors:
            self._safely(
                f"judging what {monitor.name} publishes",
                lambda each=monitor: suspicions.extend(  # type: ignore[misc]
                    each.judge(published.get(each.name, {}), now_ns / NS_PER_S)
                ),
            )
        self._end(record, suspicions)
        self._suspects.report_new(suspicions)

    def _end(self, record: ControlRecord, suspicions: Sequence[Suspicion]) -> None:
        me = self._client.me
        reports = reports_of(suspicions, here=me.node, generation=record.generation)
        for number, report in enumerate(reports):
            self._client.file_report(report, f"+fleet{number}")
        if reports:
            cause = reports[0]
            self._client.update_record(
                lambda now: transitions.collect(
                    now, record, trigger=cause.kind, reason=cause.how, by=me.node
                )
            )


def _by_monitor(entries: Mapping[str, Entry], roster: Roster) -> dict[str, dict[str, Json]]:
    """Return what is published in the generation of *roster*, by monitor and node."""
    nodes = {member.agent: member.node for member in roster.members}
    found: dict[str, dict[str, Json]] = {}
    for key, entry in entries.items():
        _prefix, monitor, agent = key.rsplit("/", 2)
        try:
            value = unpack(entry.value)
            if agent in nodes and value["generation"] == roster.generation:
                found.setdefault(monitor, {})[nodes[agent]] = dict(value["published"])
        except ENTRY_ERRORS:
            continue
    return found
