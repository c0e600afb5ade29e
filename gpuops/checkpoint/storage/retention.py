"""Which states are removed: pure, so that what would be removed can be shown before it is.

A state stays for any one reason: it is among the newest, at a multiple of so many steps, the
newest of an hour or a day that is still told apart, pinned, or the newest that was verified. The
ages are counted from the newest state, not from the clock: a job that stood still for a month, or a
clock that jumped, removes nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuops.checkpoint.storage.api import CheckpointStore, StoredState
from gpuops.checkpoint.types import StateId

HOUR_S = 3_600
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class RetentionBucket:
    """For states up to *age_s* older than the newest, keep the newest of each *every_s* seconds."""

    every_s: int
    age_s: int

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.age_s:
            raise ValueError(f"no state of the last {self.age_s} s is kept each {self.every_s} s")


DEFAULT_BUCKETS = (RetentionBucket(HOUR_S, DAY_S), RetentionBucket(DAY_S, 7 * DAY_S))


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Keep the newest *keep_last*, each with a step that *keep_every* divides, and the *buckets*.

    *keep_last* is at least 1; *keep_every* 0 keeps none for its step.
    """

    keep_last: int = 3
    keep_every: int = 0
    buckets: tuple[RetentionBucket, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(
                f"keep_last is {self.keep_last} and keep_every {self.keep_every}: "
                "keep_last is at least 1, keep_every at least 0"
            )


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """What happens to a state, and why: the reasons to keep it, or what speaks for none."""

    state: StateId
    is_kept: bool
    why: str


def decide_retention(
    states: Sequence[StoredState], retention: RetentionPolicy, verified: Collection[StateId] = ()
) -> list[RetentionDecision]:
    """Return a verdict on each of *states*, newest first.

    *verified*: those whose bytes are known to be good. The newest of them stays; where none is
    known to be good, each of the newest *keep_last* could be bad, and nothing is removed.
    """
    ordered = sorted(states, key=lambda stored: stored.state, reverse=True)
    reasons: dict[StateId, list[str]] = {stored.state: [] for stored in ordered}
    for stored in ordered[: retention.keep_last]:
        reasons[stored.state].append(f"among the newest {retention.keep_last}")
    for stored in ordered:
        if retention.keep_every and stored.state.step % retention.keep_every == 0:
            reasons[stored.state].append(f"each {retention.keep_every} steps")
        if stored.tags:
            reasons[stored.state].append(f"pinned by {', '.join(stored.tags)}")
    for bucket in retention.buckets:
        for state in _newest_in_buckets(ordered, bucket):
            reasons[state].append(f"one in {bucket.every_s} s for {bucket.age_s} s")
    newest_verified = max((state for state in verified if state in reasons), default=None)
    if newest_verified is not None:
        reasons[newest_verified].append("the newest that was verified")
    return [_decision(stored.state, reasons[stored.state], newest_verified) for stored in ordered]


def states_to_delete(
    states: Sequence[StoredState], retention: RetentionPolicy, verified: Collection[StateId] = ()
) -> list[RetentionDecision]:
    """Return the verdicts on the states to be removed, oldest first."""
    return [
        decision
        for decision in reversed(decide_retention(states, retention, verified))
        if not decision.is_kept
    ]


def prune(
    store: CheckpointStore,
    retention: RetentionPolicy,
    verified: Collection[StateId],
    *,
    on_delete: Callable[[RetentionDecision], None] = lambda _verdict: None,
) -> list[RetentionDecision]:
    """Remove from *store* what `doomed` says, the oldest first; return the verdicts carried out.

    *on_delete* is called before each.

    Raises:
        CheckpointError: One could not be removed; those before it were.
    """
    removed = []
    for decision in states_to_delete(store.list_states(), retention, verified):
        on_delete(decision)
        store.delete(decision.state)
        removed.append(decision)
    return removed


def _decision(
    state: StateId, reasons: list[str], newest_verified: StateId | None
) -> RetentionDecision:
    if reasons:
        return RetentionDecision(state, is_kept=True, why="; ".join(reasons))
    if newest_verified is None:
        return RetentionDecision(state, is_kept=True, why="no state is known to be good")
    return RetentionDecision(state, is_kept=False, why="no rule keeps it")


def _newest_in_buckets(ordered: Sequence[StoredState], bucket: RetentionBucket) -> list[StateId]:
    """Return the newest state of each span of *bucket*."""
    if not ordered:
        return []
    newest_s = max(stored.manifest.created_s for stored in ordered)
    recent = [stored for stored in ordered if newest_s - stored.manifest.created_s <= bucket.age_s]
    recent.sort(key=lambda stored: (stored.manifest.created_s, stored.state), reverse=True)
    spans = groupby(recent, key=lambda stored: stored.manifest.created_s // bucket.every_s)
    return [next(iter(group)).state for _, group in spans]
