"""Which states are removed: pure, so that what would be removed can be shown before it is.

A state stays for any one reason: it is among the newest, at a multiple of so many steps, the
newest of an hour or a day that is still told apart, pinned, or the newest that was verified. The
ages are counted from the newest state, not from the clock: a job that stood still for a month, or a
clock that jumped, removes nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuops.checkpoint.state_store import CheckpointStore, Stored
from gpuops.checkpoint.states import StateId

HOUR_S = 3_600
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class Rung:
    """For states up to *age_s* older than the newest, keep the newest of each *every_s* seconds."""

    every_s: int
    age_s: int

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.age_s:
            raise ValueError(f"no state of the last {self.age_s} s is kept each {self.every_s} s")


LADDER = (Rung(HOUR_S, DAY_S), Rung(DAY_S, 7 * DAY_S))


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest *keep_last*, each with a step that *keep_every* divides, and the *ladder*.

    *keep_last* is at least 1; *keep_every* 0 keeps none for its step.
    """

    keep_last: int = 3
    keep_every: int = 0
    ladder: tuple[Rung, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(
                f"keep_last is {self.keep_last} and keep_every {self.keep_every}: "
                "keep_last is at least 1, keep_every at least 0"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a state, and why: the reasons to keep it, or what speaks for none."""

    state: StateId
    is_kept: bool
    why: str


def judge(
    states: Sequence[Stored], retention: Retention, verified: Collection[StateId] = ()
) -> list[Verdict]:
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
    for rung in retention.ladder:
        for state in _on_rung(ordered, rung):
            reasons[state].append(f"one in {rung.every_s} s for {rung.age_s} s")
    good = max((state for state in verified if state in reasons), default=None)
    if good is not None:
        reasons[good].append("the newest that was verified")
    return [_verdict(stored.state, reasons[stored.state], good) for stored in ordered]


def doomed(
    states: Sequence[Stored], retention: Retention, verified: Collection[StateId] = ()
) -> list[Verdict]:
    """Return the verdicts on the states to be removed, oldest first."""
    return [
        verdict for verdict in reversed(judge(states, retention, verified)) if not verdict.is_kept
    ]


def prune(
    store: CheckpointStore,
    retention: Retention,
    verified: Collection[StateId],
    *,
    told: Callable[[Verdict], None] = lambda _verdict: None,
) -> list[Verdict]:
    """Remove from *store* what `doomed` says, the oldest first; return the verdicts carried out.

    *told* is called before each.

    Raises:
        CheckpointError: One could not be removed; those before it were.
    """
    removed = []
    for verdict in doomed(store.list(), retention, verified):
        told(verdict)
        store.delete(verdict.state)
        removed.append(verdict)
    return removed


def _verdict(state: StateId, reasons: list[str], good: StateId | None) -> Verdict:
    if reasons:
        return Verdict(state, is_kept=True, why="; ".join(reasons))
    if good is None:
        return Verdict(state, is_kept=True, why="no state is known to be good")
    return Verdict(state, is_kept=False, why="no rule keeps it")


def _on_rung(ordered: Sequence[Stored], rung: Rung) -> list[StateId]:
    """Return the newest state of each span of *rung*."""
    if not ordered:
        return []
    newest_s = max(stored.manifest.created_s for stored in ordered)
    young = [stored for stored in ordered if newest_s - stored.manifest.created_s <= rung.age_s]
    young.sort(key=lambda stored: (stored.manifest.created_s, stored.state), reverse=True)
    spans = groupby(young, key=lambda stored: stored.manifest.created_s // rung.every_s)
    return [next(iter(group)).state for _, group in spans]
