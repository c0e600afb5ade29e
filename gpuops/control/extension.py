"""Extensions of the leader: they read all heartbeats and add metadata to each new roster.

The leader reads all heartbeats anyway, so what else a run agrees on costs the control store no
further call. The metadata are mappings that the control plane does not interpret.
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

ROSTER_BYTES_MAX = 2**20  # with metadata


class LeaderExtension:
    """Called by the leader in its control thread; an error in it affects the extension only."""

    def roster_metadata(
        self,
        record: ControlRecord,  # noqa: ARG002 an interface
        roster: Roster,  # noqa: ARG002
        previous: Roster | None,  # noqa: ARG002
        ready: Mapping[str, Entry],  # noqa: ARG002
    ) -> Json:
        """Return the metadata of *roster*, which is about to be written.

        *ready* has the entries of all ready agents, by agent; *previous* is the roster before.
        """
        return {}

    def on_heartbeats(
        self, record: ControlRecord, roster: Roster, heartbeats: Mapping[str, Entry]
    ) -> None:
        """Process the newest *heartbeats*, by agent, while the workers of *roster* run or drain."""


class ExtensionRunner:
    """Calls the leader's extensions; a failure there keeps no node out of a roster."""

    def __init__(
        self, membership: MembershipView, extensions: Iterable[LeaderExtension] = ()
    ) -> None:
        self._extensions = tuple(extensions)
        self._membership = membership
        self._has_failed = False

    def pass_heartbeats(self, record: ControlRecord) -> None:
        """Pass the heartbeats of the agents that train to the extensions."""
        membership, roster = self._membership, self._membership.roster
        is_on = record.phase in {RunPhase.RUN, RunPhase.DRAIN}
        if is_on and roster is not None and roster.generation == record.generation:
            for each in self._extensions:
                self._run_safely(partial(each.on_heartbeats, record, roster, membership.heartbeats))

    def with_metadata(self, record: ControlRecord, roster: Roster) -> Roster:
        """Return *roster* with the metadata of all extensions."""
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
        """Call *call*; its failure must not keep nodes from joining or being replaced."""
        try:
            call()
        except ControlStoreError as exc:
            log.debug("the control store refuses what a leader extension writes: %s", exc)
        except Exception:  # boundary: see above
            if not self._has_failed:
                log.exception("a leader extension failed; membership is not affected")
            self._has_failed = True
