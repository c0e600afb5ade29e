"""gpuops' own failures as incidents: one for each node, part that failed and day (UTC).

They are nobody else's fault and over when they are told of: gpuops goes on without.
"""

from gpuops.model import (
    Confidence,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
)
from gpuops.store.columns import derived_id
from gpuops.store.facts.envelope import Envelope, Fact
from gpuops.store.facts.incident import INCIDENTS, account_key, incident_row
from gpuops.store.fields import WORD_MAX

DAY_US = 86_400_000_000
_LINES_MAX = 30
_LINE_CHARS_MAX = 400


def tool_failed(envelope: Envelope) -> list[Fact]:
    """Return the incident that a ``tool.failed`` belongs to, as its earliest event tells it."""
    event, payload = envelope.event, envelope.event.payload
    # Whatever an own failure looks like, refusing it would hide it.
    what = str(payload.get("what") or "gpuops")[:WORD_MAX]
    error = str(payload.get("error") or "no error was told")[:_LINE_CHARS_MAX]
    trace = str(payload.get("traceback") or "").splitlines()[-_LINES_MAX:]
    where = f"on {event.node}" + (f" in run {event.run_id}" if event.run_id else "")
    incident = Incident(
        id=derived_id("tool", envelope.cluster, event.node, what, event.t_us // DAY_US),
        failure_class=FailureClass.TOOL,
        side=Side.TOOL,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title=f"gpuops itself failed {where}: {what}",
        first_us=event.t_us,
        detected_us=event.t_us,
        evidence=(
            Evidence(
                role=Role.ROOT,
                text=error,
                lines=tuple(line[:_LINE_CHARS_MAX] for line in trace),
            ),
        ),
        resolved_us=event.t_us,
        resolution="gpuops went on without it; no node and no job is blamed for it",
    )
    key = account_key(envelope, envelope.earliest_key)
    return [(INCIDENTS, incident_row(incident, incident.to_json(), envelope.cluster_id, key))]
