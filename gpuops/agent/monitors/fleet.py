"""What the leader does with what monitors publish on all nodes: each `FleetMonitor` judges it."""

from collections.abc import Callable, Mapping, Sequence

from gpuops.agent.monitors.api import FleetMonitor
from gpuops.agent.monitors.suspects import SuspectReporter
from gpuops.control import step
from gpuops.control.client import ControlClient
from gpuops.control.extension import LeaderExtension
from gpuops.control.record import ENTRY_ERRORS, ControlRecord, Roster, RunPhase, unpack
from gpuops.control.store import Entry
from gpuops.host.clock import Clock
from gpuops.incident.suspicion import Suspicion, reports_of
from gpuops.model import Json
from gpuops.units import NS_PER_S

JUDGE_S = 5.0


class FleetJudge(LeaderExtension):
    """A leader's extension: what *monitors* suspect, it writes down or ends the generation for.

    Called in the leader's control thread. What a monitor raises goes to *safely* and stops neither
    the others nor the leader.
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
            ControlStoreError: It cannot be read, or what follows cannot be written.
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
                lambda now: step.collect(
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
