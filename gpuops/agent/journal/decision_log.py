"""Decisions as they come to this agent's ears, each recorded once.

One that it made itself has to be recorded by it, wherever it was when it made it: a spare that
leads because all others are gone has no workers whose end it could be waiting at.
"""

from gpuops.agent.journal.run_journal import RunJournal
from gpuops.control.leader import DecisionRecord, Leader
from gpuops.control.record import ControlRecord
from gpuops.incident.decision import RestartDecision


class DecisionLog:
    """What was decided on this run, told to *chronicle*."""

    def __init__(self, leader: Leader, chronicle: RunJournal) -> None:
        self._leader = leader
        self._chronicle = chronicle
        self._heard: tuple[int, float] | None = None

    def hear(self, record: ControlRecord, generation: int | None) -> None:
        """Record the decision in *record* if it was ours, or is on *generation*, which ran here."""
        decision = record.decision
        if decision is None or _key(decision) == self._heard:
            return
        ours = self._ours(decision)
        if ours is not None:
            self._chronicle.decided(
                ours.decision,
                ours.reports,
                ours.cluster,
                by_us=True,
                note=ours.note,
                history=ours.history,
            )
        elif decision.failure.generation == generation:
            by = record.decided_by
            self._chronicle.decided(decision, (), None, by_us=False, decided_by=by)
        else:
            return
        self._heard = _key(decision)

    def _ours(self, decision: RestartDecision) -> DecisionRecord | None:
        """Return what *decision* rests on; None where another agent's became the record."""
        ours = self._leader.last_decision
        return ours if ours is not None and _key(ours.decision) == _key(decision) else None


def _key(decision: RestartDecision) -> tuple[int, float]:
    """Return what no two decisions share, not even two on one generation by two leaders."""
    return decision.failure.generation, decision.failure.at_s
