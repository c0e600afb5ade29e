"""What a keeper tells of its states, and what of that goes into the run's record; pure.

What another process wrote is read by type and bounded: a keeper that tells nonsense costs a line of
the record and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuops.checkpoint.types import EPOCH_MAX, STEP_MAX, StateId, Tier
from gpuops.incident.incidents.replicas import NAMED_RANKS_MAX, ReplicaMismatch
from gpuops.model import Json, Severity
from gpuops.units import format_bytes, format_seconds

TEXT_CHARS_MAX = 600
COUNT_MAX = 2**62
SECONDS_MAX = 4e9
RANKS_NAMED_MAX = 64
COMMITTED, SKIPPED, GIVEN_UP, RESTORED = "committed", "skipped", "given_up", "restored"
WHOLE, REPLICATED = "whole", "replicated"
DIFFER, ALIKE, APART = "replicas_differ", "replicas_alike", "replicas_apart"
_PLACES = {Tier.PEER.value: "a peer's memory", Tier.PERSISTENT.value: "the directory"}
# Those that are told one by one, and how grave they are; the rest is counted.
_SINGLE = {
    RESTORED: Severity.INFO,
    "persisted": Severity.INFO,
    "corrupt": Severity.ERROR,
    "persist_failed": Severity.ERROR,
    "commit_failed": Severity.WARNING,
    "epoch_behind": Severity.WARNING,
    "passed_over": Severity.WARNING,
    "replica_failed": Severity.WARNING,
    "fetch_failed": Severity.WARNING,
    "cannot_offer": Severity.ERROR,
    DIFFER: Severity.ERROR,
    APART: Severity.WARNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperEvent:
    """One thing that happened in a keeper; unknown values are None."""

    kind: str
    state: StateId | None = None
    tier: str | None = None
    rank: int | None = None
    nbytes: int | None = None
    seconds: float | None = None
    why: str | None = None
    reason: str | None = None
    directory: str | None = None
    count: int = 1
    ranks: str | None = None
    differing: ReplicaMismatch | None = None

    def to_json(self) -> Json:
        """Return the payload of its event in the record."""
        return {
            "step": None if self.state is None else self.state.step,
            "epoch": None if self.state is None else self.state.epoch,
            "tier": self.tier,
            "rank": self.rank,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "why": self.why,
            "directory": self.directory,
        }


def read_events(told: Iterable[Mapping[str, Any]]) -> list[KeeperEvent]:
    """Return what a keeper *told*, without what is not of an event's form."""
    found = []
    for item in told:
        kind = item.get("kind") if isinstance(item, Mapping) else None
        if not isinstance(kind, str) or not 0 < len(kind) <= 40 or not kind.isidentifier():
            continue
        rank = whole(item.get("rank"))
        tier = _text(item.get("tier"))
        found.append(
            KeeperEvent(
                kind=kind,
                state=pair(item.get("state")) or state_of(item),
                tier=tier if tier in list(Tier) else None,
                rank=rank,
                nbytes=whole(item.get("bytes")),
                seconds=_seconds(item.get("seconds")),
                why=_text(item.get("why")),
                reason=_text(item.get("reason")),
                directory=_text(item.get("directory")),
                count=max(1, whole(item.get("n")) or 1),
                ranks=_text(item.get("ranks")),
                differing=_differing(item) if kind == DIFFER else None,
            )
        )
    return found


def _differing(item: Mapping[str, Any]) -> ReplicaMismatch | None:
    state, why, ranks = pair(item.get("state")), _text(item.get("why")), _text(item.get("ranks"))
    suspects, tensors, nodes = item.get("suspects"), item.get("tensors"), item.get("nodes")
    if state is None or why is None or ranks is None:
        return None
    alike = pair(item.get("alike"))
    return ReplicaMismatch(
        description=why,
        step=state.step,
        epoch=state.epoch,
        last_equal_step=None if alike is None else alike.step,
        ranks=ranks,
        suspects=tuple(n for each in _few(suspects) if (n := whole(each)) is not None),
        by_majority=item.get("outcome") == "minority",
        is_local=item.get("is_here") is True,
        tensors=tuple(name for each in _few(tensors) if (name := _text(each)) is not None),
        nodes=tuple(name for each in _few(nodes) if (name := _text(each)) is not None),
    )


def _few(value: object) -> list[Any]:
    return value[:NAMED_RANKS_MAX] if isinstance(value, list) else []


def state_of(item: Mapping[str, Any]) -> StateId | None:
    """Return the state that ``epoch`` and ``step`` of *item* name, None where they name none."""
    epoch, step = whole(item.get("epoch")), whole(item.get("step"))
    if epoch is None or step is None or epoch > EPOCH_MAX or step > STEP_MAX:
        return None
    return StateId(epoch, step)


def pair(value: object) -> StateId | None:
    """Return the state in ``[epoch, step]``, None where it is none."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None
    return state_of({"epoch": value[0], "step": value[1]})


@dataclass(slots=True)
class SaveCounter:
    """What is counted between two lines of the record: commits come with every step."""

    committed: int = 0
    newest: StateId | None = None
    nbytes: int = 0
    longest_s: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    replicas: int = 0
    replica_bytes: int = 0

    def add(self, event: KeeperEvent) -> None:
        """Count *event* in."""
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
        """Return what has been counted as events for the record, and begin anew."""
        found: list[tuple[str, Json, Severity]] = []
        if self.committed:
            payload: Json = {
                "count": self.committed,
                "step": None if self.newest is None else self.newest.step,
                "epoch": None if self.newest is None else self.newest.epoch,
                "bytes": self.nbytes,
                "seconds_max": round(self.longest_s, 6),
            }
            found.append(("checkpoint.committed", payload, Severity.INFO))
        if self.skipped:
            payload = {"count": self.skipped.total(), "by_reason": dict(self.skipped)}
            found.append(("checkpoint.skipped", payload, Severity.INFO))
        if self.given_up:
            found.append(("checkpoint.given_up", {"count": self.given_up}, Severity.INFO))
        if self.replicas:
            payload = {"count": self.replicas, "bytes": self.replica_bytes}
            found.append(("checkpoint.replicated", payload, Severity.INFO))
        self.committed, self.newest, self.nbytes, self.longest_s = 0, None, 0, 0.0
        self.skipped, self.given_up, self.replicas, self.replica_bytes = Counter(), 0, 0, 0
        return found


def single(event: KeeperEvent) -> tuple[str, Json, Severity]:
    """Return *event* as one for the record."""
    severity = _SINGLE.get(event.kind, Severity.INFO)
    return f"checkpoint.{event.kind}", event.to_json(), severity


def is_counted(event: KeeperEvent) -> bool:
    """Say whether *event* is one of many that are told together."""
    return event.kind in {COMMITTED, SKIPPED, GIVEN_UP, WHOLE, REPLICATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What the ranks of one node loaded when a generation began."""

    state: StateId
    tiers: Mapping[int, str]  # by rank
    nbytes: int
    longest_s: float

    def words(self) -> str:
        """Return it in words: ``resumed from step 41: rank 0, 1 from memory, 25 MB in 0.02 s``."""
        by_tier: dict[str, list[int]] = {}
        for rank, tier in sorted(self.tiers.items()):
            by_tier.setdefault(tier, []).append(rank)
        named = "; ".join(
            f"{_ranks(ranks)} from {_PLACES.get(tier, tier)}"
            for tier, ranks in sorted(by_tier.items())
        )
        size, took = format_bytes(self.nbytes), format_seconds(self.longest_s)
        return f"resumed from step {self.state.step}: {named}; {size} in {took}"


def resumed(events: Sequence[KeeperEvent]) -> ResumeReport | None:
    """Return what the ranks that tell of it have loaded, None where none has.

    Where they tell of several states, it is the newest: that of the last restart.
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


def whole(value: object) -> int | None:
    """Return *value* if it is a whole number that is not negative."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX
    return value if is_one and isinstance(value, int) else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(float(value), 6) if 0 <= value < SECONDS_MAX else None


def _text(value: object) -> str | None:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) and value else None
