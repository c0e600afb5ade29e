"""Who reads what agents say beside their own matters, and adds a word where seats are given out.

The leader reads all heartbeats anyway; what else a run wants to agree on costs the board nothing
more that way. The words are mappings that the control plane does not understand.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from gpuops.control.board import BoardError, Entry
from gpuops.control.record import ControlRecord, Phase, Roster
from gpuops.control.sight import Sight
from gpuops.model import Json

log = logging.getLogger(__name__)

ROSTER_BYTES_MAX = 2**20  # with notes; without them it has as many bytes as there are agents


class Witness(Protocol):
    """Called by the leader, in its control thread; what it raises delays its own matters only."""

    def seated(
        self,
        record: ControlRecord,
        roster: Roster,
        before: Roster | None,
        ready: Mapping[str, Entry],
    ) -> Json:
        """Return the notes of *roster*, which is about to be written.

        *ready* has the entries of all who are ready, by agent; *before* is the roster before.
        """
        ...

    def look(self, record: ControlRecord, roster: Roster, beats: Mapping[str, Entry]) -> None:
        """Take in the newest *beats*, by agent, while the workers of *roster* run or drain."""
        ...


class NoWitness:
    """A run that has nothing else to agree on."""

    def seated(
        self,
        record: ControlRecord,  # noqa: ARG002 the protocol's
        roster: Roster,  # noqa: ARG002
        before: Roster | None,  # noqa: ARG002
        ready: Mapping[str, Entry],  # noqa: ARG002
    ) -> Json:
        """Return no notes."""
        return {}

    def look(self, record: ControlRecord, roster: Roster, beats: Mapping[str, Entry]) -> None:
        """Do nothing."""


class Aside:
    """The leader's side of it. ``witness`` may be set once the agent is put together."""

    def __init__(self, sight: Sight) -> None:
        self.witness: Witness = NoWitness()
        self._sight = sight
        self._has_failed = False

    def look(self, record: ControlRecord) -> None:
        """Let the witness hear the heartbeats of those who train."""
        sight, roster = self._sight, self._sight.roster
        is_on = record.phase in {Phase.RUN, Phase.DRAIN}
        if is_on and roster is not None and roster.generation == record.generation:
            self._witnessed(lambda: self.witness.look(record, roster, sight.beats))

    def noted(self, record: ControlRecord, roster: Roster) -> Roster:
        """Return *roster* with what the witness has to say to those who are seated."""
        sight, found = self._sight, roster

        def note() -> None:
            nonlocal found
            noted = replace(
                roster, notes=self.witness.seated(record, roster, sight.roster, sight.declared)
            )
            if len(noted.to_bytes()) <= ROSTER_BYTES_MAX:
                found = noted

        self._witnessed(note)
        return found

    def _witnessed(self, act: Callable[[], None]) -> None:
        """Do *act*; what fails there must not keep nodes from being seated, or replaced."""
        try:
            act()
        except BoardError as exc:
            log.debug("the board does not take the witness' word: %s", exc)
        except Exception:  # boundary: see above
            if not self._has_failed:
                log.exception("what is agreed on beside the seats is not looked after")
            self._has_failed = True
