"""Who reads what agents say beside their own matters, and adds a word where seats are given out.

The leader reads all heartbeats anyway; what else a run wants to agree on costs the board nothing
more that way. The words are mappings that the control plane does not understand.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from gpuops.control.membership import MembershipView
from gpuops.control.record import ControlRecord, Roster, RunPhase
from gpuops.control.store import ControlStoreError, Entry
from gpuops.model import Json

log = logging.getLogger(__name__)

ROSTER_BYTES_MAX = 2**20  # with notes; without them it has as many bytes as there are agents


class LeaderExtension:
    """Called by the leader, in its control thread; what it raises delays its own matters only."""

    def roster_metadata(
        self,
        record: ControlRecord,  # noqa: ARG002 an interface
        roster: Roster,  # noqa: ARG002
        previous: Roster | None,  # noqa: ARG002
        ready: Mapping[str, Entry],  # noqa: ARG002
    ) -> Json:
        """Return the notes of *roster*, which is about to be written.

        *ready* has the entries of all who are ready, by agent; *previous* is the roster before.
        """
        return {}

    def on_heartbeats(
        self, record: ControlRecord, roster: Roster, heartbeats: Mapping[str, Entry]
    ) -> None:
        """Take in the newest *heartbeats*, by agent, while the workers of *roster* run or drain."""


class ExtensionRunner:
    """Calls the leader's extensions; a failure there keeps no node out of a roster."""

    def __init__(
        self, membership: MembershipView, extensions: Iterable[LeaderExtension] = ()
    ) -> None:
        self._extensions = tuple(extensions)
        self._membership = membership
        self._has_failed = False

    def pass_heartbeats(self, record: ControlRecord) -> None:
        """Let the extensions hear the heartbeats of those who train."""
        membership, roster = self._membership, self._membership.roster
        is_on = record.phase in {RunPhase.RUN, RunPhase.DRAIN}
        if is_on and roster is not None and roster.generation == record.generation:
            for each in self._extensions:
                self._run_safely(partial(each.on_heartbeats, record, roster, membership.heartbeats))

    def with_metadata(self, record: ControlRecord, roster: Roster) -> Roster:
        """Return *roster* with what the extensions have to say to those who are seated."""
        membership, found = self._membership, roster

        def note(extension: LeaderExtension) -> None:
            nonlocal found
            notes = extension.roster_metadata(
                record, roster, membership.roster, membership.ready_entries
            )
            noted = replace(found, metadata={**found.metadata, **notes})
            if len(noted.to_bytes()) <= ROSTER_BYTES_MAX:
                found = noted

        for each in self._extensions:
            self._run_safely(partial(note, each))
        return found

    def _run_safely(self, call: Callable[[], None]) -> None:
        """Do *call*; what fails there must not keep nodes from being seated, or replaced."""
        try:
            call()
        except ControlStoreError as exc:
            log.debug("the board does not take the witness' word: %s", exc)
        except Exception:  # boundary: see above
            if not self._has_failed:
                log.exception("what is agreed on beside the seats is not looked after")
            self._has_failed = True
