"""Writes each decision on the run to the journal, once.

The agent that made it does so wherever it is: a spare that leads because all others are gone has no
workers to wait for.
"""

from gpuops.agent.journal.run_journal import RunJournal
from gpuops.control.record import ControlRecord
from gpuops.control.step import DecisionRecord
from gpuops.incident.decision import RestartDecision


class DecisionLog:
    """The decisions on this run."""

    def __init__(self, journal: RunJournal) -> None:
        self._journal = journal
        self._proposed: dict[tuple[int, float], DecisionRecord] = {}
        self._recorded: tuple[int, float] | None = None

    def propose(self, decided: DecisionRecord) -> None:
        """Keep what this agent's own decision rests on; `record` writes it once it is valid.

        From any thread. One that loses against another leader's hides no earlier one.
        """
        self._proposed[_key(decided.decision)] = decided

    def record(self, record: ControlRecord, generation: int | None) -> None:
        """Write the decision in *record* if it is ours, or is on *generation*, which ran here."""
        decision = record.decision
        if decision is None or _key(decision) == self._recorded:
            return
        ours = self._proposed.get(_key(decision))
        if ours is not None:
            self._journal.decided(
                ours.decision,
                ours.reports,
                ours.cluster,
                by_us=True,
                note=ours.note,
                history=ours.history,
            )
        elif decision.failure.generation == generation:
            by = record.decided_by
            self._journal.decided(decision, (), None, by_us=False, decided_by=by)
        else:
            return
        self._recorded = _key(decision)


def _key(decision: RestartDecision) -> tuple[int, float]:
    """Return what no two decisions share, not even two on one generation by two leaders."""
    return decision.failure.generation, decision.failure.at_s
