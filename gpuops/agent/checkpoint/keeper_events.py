"""The events of a keeper, for the run's journal; pure.

The input comes from another process: it is validated by type and bounded, and malformed events are
dropped.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuops.checkpoint.types import StateId, Tier
from gpuops.incident.incidents.replicas import NAMED_RANKS_MAX, ReplicaMismatch
from gpuops.model import Json, Severity
from gpuops.units import format_bytes, format_seconds
from gpuops.wire.messages import LENIENT, Limit, Message, MessageFormatError

TEXT_CHARS_MAX = 600
COUNT_MAX = 2**62
SECONDS_MAX = 4e9
RANKS_NAMED_MAX = 64
COMMITTED, SKIPPED, GIVEN_UP, RESTORED = "committed", "skipped", "given_up", "restored"
WHOLE, REPLICATED = "whole", "replicated"
OFFERED, FRESH_START, STEPS_DIFFER = "offered", "fresh_start", "steps_differ"
DIFFER, ALIKE, APART = "replicas_differ", "replicas_alike", "replicas_apart"
_TIER_NAMES = {Tier.PEER.value: "a peer's memory", Tier.PERSISTENT.value: "the directory"}
# The severities of events that are recorded one by one; the others are counted.
_SEVERITIES = {
    RESTORED: Severity.INFO,
    "persisted": Severity.INFO,
    "corrupt": Severity.ERROR,
    "unreadable": Severity.ERROR,
    "persist_failed": Severity.ERROR,
    "commit_failed": Severity.WARNING,
    "epoch_behind": Severity.WARNING,
    "passed_over": Severity.WARNING,
    "replica_failed": Severity.WARNING,
    "fetch_failed": Severity.WARNING,
    "cannot_offer": Severity.ERROR,
    DIFFER: Severity.ERROR,
    APART: Severity.WARNING,
    STEPS_DIFFER: Severity.WARNING,
}


_Text = Annotated[str | None, Limit(TEXT_CHARS_MAX), LENIENT]
_Number = Annotated[int | None, Limit(COUNT_MAX), LENIENT]
_State = Annotated[StateId | None, LENIENT]
_Names = Annotated[tuple[Annotated[str, Limit(TEXT_CHARS_MAX)], ...], LENIENT]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperEvent(Message):
    """One event in a keeper; unknown values are None.

    The last fields describe replicas that differ; ``alike`` is the last state in which they were
    equal.
    """

    kind: Annotated[str, Limit(40, low=1)]
    state: _State = None
    tier: Annotated[Tier | None, LENIENT] = None
    rank: _Number = None
    nbytes: _Number = None
    seconds: Annotated[float | None, Limit(SECONDS_MAX), LENIENT] = None
    why: _Text = None
    reason: _Text = None
    directory: _Text = None
    count: Annotated[int, Limit(COUNT_MAX, low=1), LENIENT] = 1
    ranks: _Text = None
    outcome: _Text = None
    is_here: Annotated[bool, LENIENT] = False
    suspects: Annotated[tuple[int, ...], Limit(NAMED_RANKS_MAX), LENIENT] = ()
    tensors: _Names = ()
    nodes: _Names = ()
    alike: _State = None

    def __post_init__(self) -> None:
        if not self.kind.isidentifier():
            raise ValueError("the kind of an event is not an identifier")

    def payload(self) -> Json:
        """Return the payload of its event in the journal."""
        return {
            **state_json(self.state),
            "tier": None if self.tier is None else self.tier.value,
            "rank": self.rank,
            "bytes": self.nbytes,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "why": self.why or None,
            "directory": self.directory or None,
        }

    @property
    def differing(self) -> ReplicaMismatch | None:
        """Return which replicas differ, None where none do."""
        if self.kind != DIFFER or self.state is None or not self.why or not self.ranks:
            return None
        return ReplicaMismatch(
            description=self.why,
            step=self.state.step,
            epoch=self.state.epoch,
            last_equal_step=None if self.alike is None else self.alike.step,
            ranks=self.ranks,
            suspects=self.suspects,
            by_majority=self.outcome == "minority",
            is_local=self.is_here,
            tensors=self.tensors,
            nodes=self.nodes,
        )


def state_json(state: StateId | None) -> Json:
    """Return the step and the epoch of *state* for a payload; null where there is none."""
    return {
        "step": None if state is None else state.step,
        "epoch": None if state is None else state.epoch,
    }


def read_events(items: Iterable[Mapping[str, Any]]) -> list[KeeperEvent]:
    """Return the events in *items*, without malformed ones."""
    found = []
    for item in items:
        with suppress(MessageFormatError, AttributeError):
            named = {"nbytes": item.get("bytes"), "count": item.get("n", 1)}
            found.append(KeeperEvent.from_json({**item, **named}))
    return found


@dataclass(slots=True)
class SaveCounter:
    """Counts frequent events between two journal entries: commits come with every step."""

    committed: int = 0
    newest: StateId | None = None
    nbytes: int = 0
    longest_s: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    replicas: int = 0
    replica_bytes: int = 0

    def add(self, event: KeeperEvent) -> None:
        """Count *event*."""
        if event.kind == SKIPPED:
            self.skipped[event.reason or "unknown"] += event.count
            return
        if event.kind == GIVEN_UP:
            self.given_up += event.count
            return
        if event.kind == WHOLE:
            return  # with several nodes, before each commit
        if event.kind == REPLICATED:
            self.replicas += event.count
            self.replica_bytes += event.nbytes or 0
            return
        self.committed += event.count
        self.nbytes += event.nbytes or 0
        self.longest_s = max(self.longest_s, event.seconds or 0.0)
        if event.state is not None and (self.newest is None or event.state > self.newest):
            self.newest = event.state

    def take(self) -> list[tuple[str, Json, Severity]]:
        """Return the counts as events for the journal, and reset them."""
        counts: dict[str, Json] = {
            "checkpoint.committed": {
                "count": self.committed,
                **state_json(self.newest),
                "bytes": self.nbytes,
                "seconds_max": round(self.longest_s, 6),
            },
            "checkpoint.skipped": {"count": self.skipped.total(), "by_reason": dict(self.skipped)},
            "checkpoint.given_up": {"count": self.given_up},
            "checkpoint.replicated": {"count": self.replicas, "bytes": self.replica_bytes},
        }
        self.committed, self.newest, self.nbytes, self.longest_s = 0, None, 0, 0.0
        self.skipped, self.given_up, self.replicas, self.replica_bytes = Counter(), 0, 0, 0
        return [(kind, body, Severity.INFO) for kind, body in counts.items() if body["count"]]


def journal_event(event: KeeperEvent) -> tuple[str, Json, Severity]:
    """Return kind, payload and severity of *event* for the journal."""
    severity = _SEVERITIES.get(event.kind, Severity.INFO)
    return f"checkpoint.{event.kind}", event.payload(), severity


def is_counted(event: KeeperEvent) -> bool:
    """Return whether *event* is counted instead of being recorded on its own."""
    return event.kind in {COMMITTED, SKIPPED, GIVEN_UP, WHOLE, REPLICATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """The state that the ranks of one node loaded when a generation began."""

    state: StateId
    tiers: Mapping[int, str]  # by rank
    nbytes: int
    longest_s: float

    def to_text(self, why: str = "") -> str:
        """Return ``resumed from step 41: ranks 0-1 from memory; 25 MB in all in 0.02 s``.

        *why*: the reason why they load this state, or from there.
        """
        by_tier: dict[str, list[int]] = {}
        for rank, tier in sorted(self.tiers.items()):
            by_tier.setdefault(tier, []).append(rank)
        named = "; ".join(
            f"{_ranks(ranks)} from {_TIER_NAMES.get(tier, tier)}"
            for tier, ranks in sorted(by_tier.items())
        )
        size, took = format_bytes(self.nbytes), format_seconds(self.longest_s)
        in_all = " in all" if len(self.tiers) > 1 else ""
        because = f", because {why}" if why else ""
        return f"resumed from step {self.state.step}: {named}; {size}{in_all} in {took}{because}"


def resume_report(events: Sequence[KeeperEvent]) -> ResumeReport | None:
    """Return what ranks have loaded according to *events*, None where none has.

    Of several states the newest is reported: that of the last restart.
    """
    loads = [e for e in events if e.kind == RESTORED and e.state is not None]
    if not loads:
        return None
    newest = max(e.state for e in loads if e.state is not None)
    mine = [e for e in loads if e.state == newest]
    return ResumeReport(
        state=newest,
        tiers={e.rank if e.rank is not None else -1: e.tier or "unknown" for e in mine},
        nbytes=sum(e.nbytes or 0 for e in mine),
        longest_s=max(e.seconds or 0.0 for e in mine),
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0-7`` or ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = "" if len(ranks) <= RANKS_NAMED_MAX else f" and {len(ranks) - RANKS_NAMED_MAX} more"
    return f"ranks {', '.join(map(str, ranks[:RANKS_NAMED_MAX]))}{more}"
