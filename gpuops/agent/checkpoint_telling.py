"""The part of a run's history about its checkpoints: what was kept, lost and resumed from."""

from gpuops.agent import records
from gpuops.agent.badput import Restoring
from gpuops.agent.case_book import CaseBook
from gpuops.agent.telling import Emit, Telling, in_turn, of_incident
from gpuops.host.clock import Clock
from gpuops.incident.lifecycle import closed
from gpuops.incident.replicas import DifferingReplicas, incident_from_replicas
from gpuops.model import Entity, EntityKind, Evidence, Incident, Json, Role, Severity
from gpuops.units import NS_PER_S


class CheckpointTelling(Telling):
    """Records what the keeper of this node told, and what of it an incident has to say."""

    _book: CaseBook
    _restoring: Restoring
    _clock: Clock
    _run_id: str

    def __init__(self, emit: Emit, node: str) -> None:
        super().__init__(emit, node)
        self._last_save: tuple[Evidence, ...] = ()
        self._differing: dict[str, Incident] = {}  # by the ranks that must be equal

    @in_turn
    def checkpoint(self, kind: str, payload: Json, severity: Severity = Severity.INFO) -> None:
        """Record one event of the kind ``checkpoint.*``."""
        self._emit(kind, payload, severity=severity)

    @in_turn
    def resumed(self, words: str, longest_s: float) -> None:
        """Note from which state the ranks here go on, *words*; the slowest took *longest_s*."""
        self._restoring.told(longest_s)
        evidence = Evidence(role=Role.RECOVERY, text=words, entity=self._here)
        incident = self._book.resumed(evidence, round(longest_s * NS_PER_S))
        if incident is not None:
            self._emit_event(of_incident(incident))

    @in_turn
    def saved_last(self, facts: records.LastSave) -> None:
        """Record what became of the last save before an end; the incident of that end says it."""
        severity = Severity.INFO if facts.fitted else Severity.WARNING
        self._emit("checkpoint.flushed", records.last_save(facts), severity=severity)
        self._last_save = (Evidence(role=Role.RECOVERY, text=facts.words(), entity=self._here),)

    @in_turn
    def replicas_differ(self, found: DifferingReplicas) -> None:
        """Record that ranks differ where they must be equal; their run of it ends with alike."""
        incident = incident_from_replicas(
            found,
            run_id=self._run_id,
            node=self._node,
            at_us=self._clock.now_us(),
        )
        self._differing[found.ranks] = incident
        self._emit_event(of_incident(incident, Severity.ERROR))

    @in_turn
    def replicas_alike(self, ranks: str, step: int) -> None:
        """Record that *ranks* are equal again since *step*."""
        incident = self._differing.pop(ranks, None)
        if incident is not None:
            why = f"ranks {ranks} are equal again at step {step}"
            at_us = self._clock.now_us()
            self._emit_event(of_incident(closed(incident, at_us=at_us, lost_s={}, resolution=why)))

    @property
    def _here(self) -> Entity:
        return Entity(EntityKind.NODE, self._node)
