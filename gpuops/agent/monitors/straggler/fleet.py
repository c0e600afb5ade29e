"""Names slow ranks on the leader, by what all nodes publish of their steps. Pure.

A rank is compared with those of its role only, and must be slow for a time before its node is
suspected; without a sign of its cause by a tenth, for a program may give one rank more to do.
Nobody is named where two ranks differ, where all became slower, or where half of a role would be.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gpuops.agent.monitors.straggler import signs
from gpuops.detect.own_time import Measure
from gpuops.detect.slow_rank import GROUP_MIN, SlowRank, SlowRankDetector
from gpuops.detect.step_summary import StepSummary, gain_without, own_by_step, unpack_summary
from gpuops.detect.step_time import RISE
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.log import log_notice
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Json, Side

# Agents publish within this time of one another; then what is there is judged.
SETTLE_S = 6.0
# A call is in the leader's control thread: with 16,384 ranks it takes 1 to 3 s (measured, busy).
RANK_STEPS_MAX = 65_536
# A cause must explain this share of what the rank takes longer.
_EXPLAINS = 0.5
_HOST_SIGNS = {
    signs.CPU: "a thread of it waited for a processor",
    signs.MEMORY: "tasks of its node waited for memory",
    signs.STEAL: "the hypervisor kept the processors",
}
_OF_HARDWARE = frozenset(
    {
        FailureClass.STRAGGLER_GPU,
        FailureClass.STRAGGLER_NETWORK,
        FailureClass.STRAGGLER_HOST,
    }
)


@dataclass(frozen=True, slots=True)
class _Rank:
    node: str
    summary: StepSummary
    about: Mapping[str, object]

    def number(self, name: str) -> float:
        """Return what its node published of it as *name*, 0 where it did not."""
        value = self.about.get(name, 0)
        return float(value) if isinstance(value, int | float) and 0 <= value < 2**63 else 0.0


@dataclass(slots=True)
class _Role:
    """The ranks that do the same, by their steps; a step is judged once."""

    groups: dict[int, int] = field(default_factory=dict)
    judged: int = -1
    steps: list[int] = field(default_factory=list)  # by the number of their evaluation
    own_s: Mapping[int, float] = field(default_factory=dict)
    slow: Sequence[SlowRank[int]] = ()
    is_behind: bool = False  # there are more steps than one call may judge
    detector: SlowRankDetector[int] = field(init=False)

    def __post_init__(self) -> None:
        self.detector = SlowRankDetector(self.groups)

    def feed(self, ranks: Mapping[int, _Rank]) -> None:
        """Judge the next steps that most of *ranks* have, after those before."""
        self.groups.update(dict.fromkeys(ranks, 0))
        found = own_by_step({rank: item.summary for rank, item in ranks.items()})
        new = [s for s in sorted(found) if s > self.judged and 2 * len(found[s]) > len(ranks)]
        n_allowed = max(1, RANK_STEPS_MAX // len(ranks))
        new, self.is_behind = new[:n_allowed], len(new) > n_allowed
        for step in new:
            self.slow = self.detector.feed(found[step])
            self.steps.append(step)
            self.judged = step
        if new:
            self.own_s = {
                rank: statistics.median(found[s][rank] for s in new if rank in found[s])
                for rank in ranks
                if any(rank in found[s] for s in new)
            }


class StragglerFleetMonitor:
    """Suspects the node of a rank that was slow for *hold_s*; a `FleetMonitor`.

    *say* tells the user, once, why nobody is named.
    """

    name = "straggler"

    def __init__(self, hold_s: float, say: Callable[[str], None] = log_notice) -> None:
        self._hold_s = hold_s
        self._say = say
        self._generation = -1
        self._published: Mapping[str, Json] = {}
        self._since_s: float | None = None  # when the first of what is not judged yet came
        self._step_s: float | None = None
        self._roles: dict[Hashable, _Role] = {}
        self._nodes_named: dict[int, str] = {}  # of ranks, in all generations
        self._logged: set[Hashable] = set()
        self._found: tuple[Suspicion, ...] = ()

    def judge(self, published: Mapping[str, Json], now_s: float) -> Sequence[Suspicion]:
        """Return who is slow by all that was *published* so far in a generation."""
        published = {node: body for node, body in published.items() if is_readable(body)}
        if all(body["generation"] != self._generation for body in published.values()):
            self._found = ()  # of a generation that has ended
        if published != self._published:
            self._published = published
            self._since_s = now_s if self._since_s is None else self._since_s
        waits = not any(body["is_whole"] for body in published.values())
        if self._since_s is None or (waits and now_s - self._since_s < SETTLE_S):
            return self._found
        self._since_s = None
        by_role: dict[Hashable, dict[int, _Rank]] = defaultdict(dict)
        for rank, item in self._ranks(published).items():
            by_role[item.summary.role, item.summary.measure][rank] = item
        self._found = tuple(s for key, role in by_role.items() for s in self._judge(key, role))
        if any(role.is_behind for role in self._roles.values()):
            self._since_s = now_s - SETTLE_S
        self._follow_step(
            [item.summary.step_s for role in by_role.values() for item in role.values()]
        )
        return self._found

    def compared(self) -> set[int]:
        """Return the ranks of this generation that were compared with others."""
        roles = self._roles.values()
        return {rank for role in roles for rank in role.groups if role.detector.is_compared(rank)}

    def _ranks(self, published: Mapping[str, Json]) -> dict[int, _Rank]:
        """Return the ranks of the newest generation; what cannot be read is left out."""
        found: dict[int, _Rank] = {}
        newest = max((b["generation"] for b in published.values()), default=self._generation)
        if newest != self._generation:
            self._generation, self._step_s = newest, None
            self._roles.clear()
        for node, body in published.items():
            if body["why"]:
                self._log_once(
                    f"slow ranks on {node} and nodes like it: {body['why']}", body["why"]
                )
            for number, about in body["ranks"].items():
                with suppress(ValueError, TypeError, KeyError):
                    found[int(number)] = _Rank(
                        node=node, summary=unpack_summary(about["steps"]), about=about
                    )
        return found

    def _judge(self, key: Hashable, ranks: Mapping[int, _Rank]) -> Iterator[Suspicion]:
        role = self._roles.setdefault(key, _Role())
        role.feed(ranks)
        if len(ranks) < GROUP_MIN:
            names = ", ".join(map(str, sorted(ranks)))
            self._log_once(
                f"no other ranks do the same as {names}: none of them is called slow", key
            )
        if 2 * len(role.slow) >= len(ranks):
            return
        for item in role.slow:
            if item.rank in ranks:
                yield self._suspicion(item, role, ranks)

    def _suspicion(self, item: SlowRank[int], role: _Role, ranks: Mapping[int, _Rank]) -> Suspicion:
        rank, others = ranks[item.rank], [r for n, r in ranks.items() if n != item.rank]
        step_s = rank.summary.step_s
        peers_s = statistics.median(s for n, s in role.own_s.items() if n != item.rank)
        own_s = peers_s * item.ratio
        first = role.steps[item.since - 1]
        failure_class, cause, is_seen = find_cause(rank, others, item.ratio, own_s - peers_s)
        before = self._nodes_named.setdefault(item.rank, rank.node)
        if failure_class in _OF_HARDWARE and not is_seen and before != rank.node:
            failure_class, cause = FailureClass.STRAGGLER_IMBALANCE, f"it was slow on {before} too"
        is_suspect = failure_class in _OF_HARDWARE and (is_seen or item.ratio >= 1 + RISE)
        has_lasted = (role.judged - first) * step_s >= self._hold_s
        gain = gain_without(step_s, own_s, peers_s)
        gpu = rank.about.get("gpu")
        return Suspicion(
            entity=Entity(EntityKind.RANK, str(item.rank)),
            also=(Entity(EntityKind.GPU, gpu),) if isinstance(gpu, str) else (),
            failure_class=failure_class,
            confidence=Confidence.PROBABLE if has_lasted else Confidence.SYMPTOM_ONLY,
            level=SuspicionLevel.SUSPECT if is_suspect and has_lasted else SuspicionLevel.NOTE,
            source=self.name,
            why=f"rank {item.rank} takes {item.ratio:.2f} times as long as {item.n_peers} ranks"
            f" that do the same, since step {first}; {cause}; without it the job would be"
            f" {gain:.0%} faster",
            value=round(item.ratio, 3),
            threshold=f"slower than its peers for {self._hold_s:.0f} s",
            node=rank.node if is_suspect else None,
            side=Side.INFRA if is_suspect else Side.AMBIGUOUS,
        )

    def _follow_step(self, step_s: Collection[float]) -> None:
        """Say once that all ranks became slower alike, where nobody is slower than the others."""
        if not step_s:
            return
        now_s = statistics.median(step_s)
        before_s = self._step_s = min(self._step_s or now_s, now_s)
        if now_s > before_s * (1 + RISE) and not self._found:
            self._log_once(
                f"the steps of all ranks take {now_s:.3g} s, and took {before_s:.3g} s: no rank is"
                " slower than the others, so none is blamed",
                "all",
            )

    def _log_once(self, text: str, key: Hashable) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._say(text)


def is_readable(body: Mapping[str, object]) -> bool:
    """Return whether *body* is what `StragglerMonitor` publishes, also that of another gpuops."""
    return (
        isinstance(body.get("generation"), int)
        and isinstance(body.get("is_whole"), bool)
        and isinstance(body.get("why"), str)
        and isinstance(body.get("ranks"), dict)
    )


def find_cause(
    rank: _Rank, others: Sequence[_Rank], ratio: float, excess_s: float
) -> tuple[FailureClass, str, bool]:
    """Return why *rank* takes *ratio* times as long as the *others*, *excess_s* a step.

    Each sign is compared with the median of the others. Where none explains it (the last is then
    False), by what was timed.
    """
    for failure_class, why in _causes(rank, others, ratio, excess_s):
        return failure_class, why, True
    if rank.summary.measure is Measure.IN_COLLECTIVES:
        return FailureClass.STRAGGLER_GPU, "no cause is seen; it waits least for the others", False
    return FailureClass.STRAGGLER_HOST, "no cause is seen; it works longest before it waits", False


def _causes(
    rank: _Rank, others: Sequence[_Rank], ratio: float, excess_s: float
) -> Iterator[tuple[FailureClass, str]]:
    def more(value: Callable[[_Rank], float]) -> float:
        return value(rank) - statistics.median(map(value, others))

    needed_s, step_s = _EXPLAINS * excess_s, rank.summary.step_s
    own, *peers = (item.number("tokens") for item in (rank, *others))
    if own and min(peers) and own / statistics.median(peers) - 1 >= _EXPLAINS * (ratio - 1):
        share = own / statistics.median(peers) - 1
        yield FailureClass.STRAGGLER_IMBALANCE, f"it has {share:.0%} more tokens"
    data_s = more(lambda item: item.summary.data_share * item.summary.step_s)
    if data_s >= needed_s:
        how = f"its data loader takes {data_s * 1e3:.0f} ms a step longer"
        yield FailureClass.STRAGGLER_INPUT, how
    if more(lambda item: item.number(signs.THROTTLED)) > 0:
        yield FailureClass.STRAGGLER_GPU, "its GPU is throttled"
    for name, what in _HOST_SIGNS.items():
        share = more(lambda item, name=name: item.number(name))  # type: ignore[misc]
        if share * step_s >= needed_s:
            yield FailureClass.STRAGGLER_HOST, f"{what} for {share:.0%} of the time"
    if more(lambda item: item.number(signs.ERRORS)) > 0:
        yield FailureClass.STRAGGLER_NETWORK, "the network adapters of its node count errors"
