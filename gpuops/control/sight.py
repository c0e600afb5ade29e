"""What one agent sees of all: who there is, who beats, who sits where, what they report."""

import logging
from dataclasses import replace

from gpuops.control.board import Board, Entry
from gpuops.control.keys import Keys
from gpuops.control.liveness import Life, Liveness
from gpuops.control.record import (
    BAD_ENTRY,
    SLOW,
    ControlRecord,
    Member,
    Phase,
    Roster,
    unpack,
)
from gpuops.incident.decision import NodeReport
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# Beyond so many in line, an agent does not follow the heartbeats of all: what the board has to
# answer for each agent must not grow with their number.
DEPUTIES = 8


class Sight:
    """As read at the last `look`.

    ``roster`` is the newest one that was read, ``saved`` the newest checkpoint that any agent told
    of. ``beats`` has the heartbeats, and ``declared`` who was ready for the generation that was
    asked for last, by agent.
    """

    def __init__(self, board: Board, keys: Keys, life: Liveness) -> None:
        self.roster: Roster | None = None
        self.saved: int | None = None
        self.beats: dict[str, Entry] = {}
        self.declared: dict[str, Entry] = {}
        self._board = board
        self._keys = keys
        self._life = life
        self._agents: dict[str, Member] = {}
        self._orders: dict[str, int] = {}
        self._slow: frozenset[str] = frozenset()
        self._looked_ns: int | None = None

    def look(self, record: ControlRecord, now_ns: int) -> None:
        """Read who there is, who beats, and who sits where.

        Raises:
            BoardError, RecordError: Not all of it was read.
        """
        keys, board = self._keys, self._board
        self._looked_ns = now_ns
        beats = board.list(keys.alive())
        self.beats = {key.rpartition("/")[2]: entry for key, entry in beats.items()}
        alive = {agent: entry.version for agent, entry in self.beats.items()}
        self._life.look(alive, now_ns)
        told = {agent: _told(entry) for agent, entry in self.beats.items()}
        self.saved = max(filter(None, map(_saved, told.values())), default=self.saved)
        self._slow = frozenset(agent for agent, words in told.items() if words.get(SLOW) is True)
        if alive.keys() - self._agents.keys():
            for key, entry in board.list(keys.agent()).items():
                member = _member(entry)
                if member is not None:
                    self._agents[member.agent] = member
                    self._orders[key.rpartition("/")[2]] = entry.order
        wanted = record.generation if record.phase is not Phase.FORM else record.generation - 1
        while (self.roster is None or self.roster.generation < wanted) and wanted >= 0:
            entry = board.get(keys.roster(wanted))
            if entry.version:
                self.roster = Roster.from_bytes(entry.value)
                return
            wanted -= 1  # a generation that was given up before it had a roster

    def looked_within_s(self, seconds: float, now_ns: int) -> bool:
        """Say whether the last look is less than *seconds* ago."""
        return self._looked_ns is not None and now_ns - self._looked_ns < seconds * NS_PER_S

    def line(self) -> list[str]:
        """Return all agents in the order in which they would lead."""
        seated = [m.agent for m in (self.roster.members if self.roster else ())]
        rest = sorted(self._agents.keys() - set(seated), key=lambda a: self._orders.get(a, 0))
        return [*seated, *rest]

    def place(self, agent: str) -> int | None:
        """Return how many would lead before *agent*, None for one that is not known yet."""
        line = self.line()
        return line.index(agent) if agent in line else None

    def first(self, now_ns: int) -> str | None:
        """Return who leads: the first in line that is not dead.

        One whose every call takes seconds comes after the deputies that are answered at once.
        """
        line = self.line()
        living = self._life.not_dead(line, now_ns)
        quick = set(line[:DEPUTIES]) - self._slow
        return next((agent for agent in living if agent in quick), next(iter(living), None))

    @property
    def dead(self) -> tuple[str, ...]:
        """Return the agents that were dead at the last look; none where there was none."""
        now_ns = self._looked_ns
        if now_ns is None:
            return ()
        return tuple(a for a in self.line() if self._life.of(a, now_ns) is Life.DEAD)

    def life(self, agent: str, now_ns: int) -> Life:
        """Return what to think of *agent*."""
        return self._life.of(agent, now_ns)

    def silent_s(self, agent: str, now_ns: int) -> float:
        """Return for how long *agent* has not beaten; infinite for one that never did."""
        return self._life.silent_s(agent, now_ns)

    def live_nodes(self, record: ControlRecord, now_ns: int) -> tuple[str, ...]:
        """Return the nodes of all agents that are not dead, but those left out by *record*."""
        agents = self._life.not_dead(self.line(), now_ns)
        nodes = dict.fromkeys(self._agents[a].node for a in agents if a in self._agents)
        return tuple(node for node in nodes if node not in record.excluded)

    def ready(self, generation: int, now_ns: int) -> list[Member]:
        """Return who would take a seat in *generation* and is not dead, as they came.

        Raises:
            BoardError: See `Board`.
        """
        entries = self._board.list(self._keys.ready(generation))
        self.declared = {key.rpartition("/")[2]: entry for key, entry in entries.items()}
        members = [member for entry in entries.values() if (member := _member(entry))]
        return [m for m in members if self._life.of(m.agent, now_ns) is not Life.DEAD]

    def reports(self, generation: int) -> dict[str, NodeReport]:
        """Return the reports on *generation* by agent, in order of arrival.

        Raises:
            BoardError: See `Board`.
        """
        found = {}
        for key, entry in self._board.list(self._keys.report(generation)).items():
            try:
                report = NodeReport.from_json(unpack(entry.value))
            except BAD_ENTRY as exc:
                log.warning("a report on generation %d cannot be read: %s", generation, exc)
                continue
            found[key.rpartition("/")[2]] = replace(report, arrival=entry.order)
        return found


def _told(entry: Entry) -> Json:
    try:
        return unpack(entry.value)
    except BAD_ENTRY:
        return {}


def _saved(words: Json) -> int | None:
    step = words.get("checkpoint_step")
    return step if isinstance(step, int) else None


def _member(entry: Entry) -> Member | None:
    try:
        return Member.from_json(unpack(entry.value))
    except BAD_ENTRY as exc:
        log.warning("an agent's entry cannot be read: %s", exc)
        return None
