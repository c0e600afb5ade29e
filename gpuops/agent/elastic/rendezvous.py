"""torch's rendezvous interface over the control record: join a generation and get a rank.

Only the public `RendezvousHandler` is used. torch's dynamic rendezvous unpickles what it reads,
compares the wall clocks of hosts, waits 30 s for nodes that will not join and reassigns all ranks.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import ne
from typing import Protocol

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from gpuops.agent.elastic.workers import free_port
from gpuops.control.client import ControlClient
from gpuops.control.record import ControlRecord, Roster, RunPhase, pack
from gpuops.control.store import ControlStoreError
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.model import Json

log = logging.getLogger(__name__)
LOOK_S = 0.2


class RunOverError(Exception):
    """The run has ended on all nodes; ``record`` says how."""

    def __init__(self, record: ControlRecord) -> None:
        super().__init__(record.reason)
        self.record = record


class ExcludedError(Exception):
    """This node is excluded from the run."""


class ControlStoreLostError(Exception):
    """The control store has not answered for so long that this agent gives up."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Whether this node may join, and why not; what to report for a node and a generation."""

    passed: bool
    reason: str = ""
    to_report: Callable[[str, int], NodeReport] | None = None


class WaitHooks(Protocol):
    """What `ControlRendezvous` calls on the agent while it waits."""

    def gate(self) -> Preflight:
        """Return whether this node may join; takes at most the preflight check's deadline."""
        ...

    def excluded(self, reason: str) -> None:
        """Called while the run leaves this node out; raises `ExcludedError` unless it waits."""
        ...

    def waiting(self, record: ControlRecord) -> None:
        """Called several times a second during the wait; may raise to end it."""
        ...


@dataclass(frozen=True, slots=True)
class Assignment:
    """This node's place in a generation."""

    record: ControlRecord
    roster: Roster
    group_rank: int


class ControlRendezvous(RendezvousHandler):
    """Joins each generation for one agent; ``assignment`` is its place in the newest one.

    *join_payload* returns what is added to the entry of an agent that is ready.
    """

    def __init__(
        self,
        control: ControlClient,
        run_key: str,
        hooks: WaitHooks,
        *,
        join_payload: Callable[[], Json] = dict,
        pick_port: Callable[[], int] = free_port,
    ) -> None:
        self.assignment: Assignment | None = None
        self._hooks = hooks
        self._join_payload = join_payload
        self._control = control
        self._run_key = run_key
        self._pick_port = pick_port
        self._left = -1  # the last generation that this agent was in
        self._not_in_roster = -1  # the last one whose roster does not have it

    def get_backend(self) -> str:
        return "gpuops"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this agent's place in the next generation that it joins.

        Raises:
            RunOverError, ExcludedError, ControlStoreLostError: See there.
        """
        assignment = self.assignment = self._take()
        self._left = assignment.record.generation
        first = assignment.roster.members[0]
        # An empty store: ranks come from the roster, and the workers make their own store.
        return RendezvousInfo(
            HashStore(),
            assignment.group_rank,
            len(assignment.roster.members),
            RendezvousStoreInfo(first.address, first.master_port),
        )

    def _take(self) -> Assignment:
        declared = None
        while True:
            record = self._control.record
            if record.phase is RunPhase.STOP:
                raise RunOverError(record)
            if self._control.me.node in record.excluded:
                self._hooks.excluded(record.excluded[self._control.me.node])
                declared = None  # once it is readmitted, it is checked again
            elif record.generation > self._left:
                if record.phase is RunPhase.RENDEZVOUS:
                    if declared != record.generation and self._declare(record.generation):
                        declared = record.generation
                # The fence hit an agent without workers; new workers must not be ended by it.
                elif self._control.clear_fence() and (assignment := self._find(record)) is not None:
                    if record.phase is RunPhase.RUN:
                        return assignment
                    self._pass_up(record.generation)
            self._hooks.waiting(record)
            self._control.wait_until(partial(ne, record), LOOK_S)

    def _declare(self, generation: int) -> bool:
        """Write that this node is ready, or that it must be excluded."""
        gate = self._hooks.gate()
        me = replace(self._control.me, master_port=self._pick_port())
        try:
            if gate.passed:
                body = pack({**me.to_json(), **self._join_payload()})
                self._control.store.put(self._control.keys.ready(generation, me.agent), body)
            else:
                self._file_failed(gate)
                self._control.update_record(lambda now: _without(now, me.node, gate.reason))
                # Where the run ended for it meanwhile, its exit code still says 86.
                self._hooks.excluded(gate.reason)
        except ControlStoreError as exc:
            log.debug("the control store does not accept it: %s", exc)
            return False
        return True

    def _file_failed(self, gate: Preflight) -> None:
        """File the finding, for whoever decides whether the run can do without this node."""
        if gate.to_report is not None:
            generation = self._control.record.generation
            self._control.file_report(gate.to_report(self._control.me.node, generation))

    def _pass_up(self, generation: int) -> None:
        """Report that no workers were started in *generation*, which is over."""
        report = NodeReport(
            kind=ReportKind.STOPPED,
            node=self._control.me.node,
            generation=generation,
            how="its workers had not been started yet",
        )
        try:
            self._control.file_report(report)
            self._control.mark_settled(generation)
        except ControlStoreError as exc:
            log.debug("the control store does not accept it: %s", exc)
            return
        self._left = generation

    def _find(self, record: ControlRecord) -> Assignment | None:
        """Return our place in the record's generation; a roster without us is read once."""
        if record.generation == self._not_in_roster:
            return None
        try:
            roster = self._control.read_roster(record.generation)
        except (ControlStoreError, ValueError) as exc:
            log.debug("the roster cannot be read: %s", exc)
            return None
        rank = roster.group_rank(self._control.me.agent)
        if rank is None:
            self._not_in_roster = record.generation
            return None
        return Assignment(record, roster, rank)

    def is_closed(self) -> bool:
        return self._control.record.phase is RunPhase.STOP

    def set_closed(self) -> None:
        """Do nothing: a failure of one agent does not end the run of the others."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_key

    def shutdown(self) -> bool:
        return True


def _without(now: ControlRecord, node: str, reason: str) -> ControlRecord | None:
    if node in now.excluded or now.phase is RunPhase.STOP:
        return None
    return replace(now, excluded={**now.excluded, node: reason})
