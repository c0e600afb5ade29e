"""Compare replicas of one state by digest: which ranks differ, in which tensors, since when; pure.

Data-parallel ranks hold bitwise equal parameters, since each applies the same sum of gradients to
the same values: a rank that differs computed, copied or stored something wrong (silent data
corruption). Comparing digests over the copies of parameters is an invariant of TrainCheck (OSDI
2025). The minority is suspect; with two ranks there is no majority.

One differing tensor is identified from four numbers per rank: with h the digests of the tensors,
modulo the prime 2^61 - 1, the sums of h, i h and i^2 h differ by d, i d and i^2 d where only tensor
i does (the syndromes of a Reed-Solomon code).

The JSON forms are bounded, and their readers are lenient.

A comparison is not needed to restore a state, so invalid input is ignored.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from gpuops.checkpoint.agreement.replicated import format_spans, to_spans
from gpuops.checkpoint.types import WORLD_MAX, StateId
from gpuops.wire.messages import Limit, Message, MessageFormatError, Using, read

N_STRIPES = 16
RANK_DIGEST_BYTES = 16 + 3 * 8 + N_STRIPES
_PRIME = 2**61 - 1
_FEW_TENSORS = 8
NAMED_MAX = 8
REPORTS_MAX = 8  # per set of ranks: a recurring difference is not reported for ever


class ReplicaOutcome(StrEnum):
    """The result of comparing the digests of one set of ranks."""

    ALIKE = "alike"
    MINORITY = "minority"  # a majority of at least two ranks agrees
    TIE = "tie"  # no majority: any rank may be wrong
    APART = "apart"  # no two agree, or everything differs: the program does not replicate these


@dataclass(frozen=True, slots=True)
class ReplicaVerdict:
    """``suspects`` may be wrong: the minority, or all ranks where there is no majority."""

    outcome: ReplicaOutcome
    suspects: tuple[int, ...] = ()


def compare_ranks(digests: Mapping[int, object]) -> ReplicaVerdict:
    """Return which of these ranks differ; the digest of a rank may be any hashable value.

    A majority is more than half of all and at least two: ranks do not agree bit for bit by
    accident, so a minority that differs from it is wrong.
    """
    ranks_by_digest: dict[object, list[int]] = {}
    for rank, digest in digests.items():
        ranks_by_digest.setdefault(digest, []).append(rank)
    if len(ranks_by_digest) < 2:
        return ReplicaVerdict(ReplicaOutcome.ALIKE)
    largest = max(ranks_by_digest.values(), key=len)
    if len(largest) >= 2 and 2 * len(largest) > len(digests):
        return ReplicaVerdict(ReplicaOutcome.MINORITY, tuple(sorted(digests.keys() - set(largest))))
    all_ranks = tuple(sorted(digests))
    is_apart = len(largest) == 1 and len(digests) > 2
    return ReplicaVerdict(ReplicaOutcome.APART if is_apart else ReplicaOutcome.TIE, all_ranks)


def adjust_for_breadth(verdict: ReplicaVerdict, n_differ: int, n_tensors: int) -> ReplicaVerdict:
    """Return *verdict*, adjusted for the number of tensors in which the ranks differ.

    A fault on one rank changes few tensors, because its effect on a gradient went into the sum
    that all ranks apply. Where more than half differ and there is no majority, the ranks train
    independently.
    """
    is_broad = n_differ > max(_FEW_TENSORS, n_tensors // 2)
    if verdict.outcome is ReplicaOutcome.TIE and is_broad:
        return ReplicaVerdict(ReplicaOutcome.APART, verdict.suspects)
    return verdict


@dataclass(frozen=True, slots=True)
class RankDigest:
    """The digest of one rank's tensors, in `RANK_DIGEST_BYTES`.

    ``digest`` covers all; ``sums`` identify a single differing tensor; each of ``stripes`` is a
    byte that covers every sixteenth tensor, so that few differing tensors are distinguished from
    many.
    """

    digest: bytes
    sums: tuple[int, int, int]
    stripes: bytes

    def to_bytes(self) -> bytes:
        sums = b"".join(each.to_bytes(8, "big") for each in self.sums)
        return self.digest + sums + self.stripes

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the rank digest in *data*; raises ValueError where it is invalid."""
        if len(data) != RANK_DIGEST_BYTES:
            raise ValueError(f"a rank digest has {RANK_DIGEST_BYTES} bytes, not {len(data)}")
        first, second, third = (int.from_bytes(data[at : at + 8], "big") for at in (16, 24, 32))
        return cls(data[:16], (first, second, third), data[40:])


def sums_of(digests: Sequence[bytes]) -> tuple[int, int, int]:
    """Return the three sums over the *digests* of a rank's tensors, in order."""
    first = second = third = 0
    for number, digest in enumerate(digests, 1):
        h = int.from_bytes(digest[:8], "big") % _PRIME
        first += h
        second += number * h
        third += number * number * h
    return first % _PRIME, second % _PRIME, third % _PRIME


def stripes_of(digests: Sequence[bytes]) -> bytes:
    """Return the stripes over the *digests* of a rank's tensors, in order."""
    found = bytearray(N_STRIPES)
    for number, digest in enumerate(digests):
        found[number % N_STRIPES] ^= digest[-1]
    return bytes(found)


def n_differing(a: RankDigest, b: RankDigest, n_tensors: int) -> int:
    """Estimate how many tensors differ: 1 is exact; about two dozen or more count as all."""
    if only_difference(a, b, n_tensors) is not None:
        return 1
    n_stripes = sum(x != y for x, y in zip(a.stripes, b.stripes, strict=True))
    return n_tensors if n_stripes > N_STRIPES * 3 // 4 else n_stripes


def only_difference(a: RankDigest, b: RankDigest, n_tensors: int) -> int | None:
    """Return the number (from 0) of the one tensor that differs, None where several do or none."""
    d, d_first, d_ii = ((x - y) % _PRIME for x, y in zip(a.sums, b.sums, strict=True))
    if not d:
        return None
    i = d_first * pow(d, -1, _PRIME) % _PRIME
    if not 1 <= i <= n_tensors or (i * d_first) % _PRIME != d_ii:
        return None
    return i - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDigest:
    """What one node has of ``n_ranks`` ranks that must be equal, some of them on other nodes."""

    state: StateId
    key: str
    n_ranks: int
    n_tensors: int
    rank_digests: Mapping[int, RankDigest]


@dataclass(slots=True)
class ComparisonHistory:
    """The history of comparisons of one set of ranks.

    ``last_equal``: the newest state in which they were equal. ``first_different``: the first of the
    current run of states in which they differ.
    """

    last_equal: StateId | None = None
    first_different: StateId | None = None

    def record(self, state: StateId, *, is_different: bool) -> bool:
        """Record the comparison of *state*; return whether a series of differences begins."""
        newest = max(
            (s for s in (self.last_equal, self.first_different) if s is not None), default=None
        )
        if newest is not None and state <= newest:
            return False
        if not is_different:
            self.last_equal, self.first_different = state, None
            return False
        begins = self.first_different is None
        self.first_different = self.first_different or state
        return begins


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDifference:
    """Replicas that differ from *state* on. ``last_equal``: the last state with equal ones.

    ``tensors``: some of the ``n_tensors`` that differ; 0: more than one, over several nodes.
    With the outcome `Outcome.ALIKE` they are equal again, from *state* on.
    """

    state: StateId
    ranks: tuple[int, ...]
    verdict: ReplicaVerdict
    tensors: tuple[str, ...] = ()
    n_tensors: int = 0
    last_equal: StateId | None = None

    @property
    def summary(self) -> str:
        """Describe the difference in one sentence."""
        suspects = self.verdict.suspects
        others = [rank for rank in self.ranks if rank not in suspects]
        since = f" (equal at step {self.last_equal.step})" if self.last_equal is not None else ""
        when = f"at step {self.state.step}{since}"
        what = format_tensors(self.tensors, self.n_tensors)
        if self.verdict.outcome is ReplicaOutcome.MINORITY:
            verb = "differs" if len(suspects) == 1 else "differ"
            return f"{format_ranks(suspects)} {verb} from {format_ranks(others)} in {what} {when}"
        end = "either may be wrong" if len(suspects) == 2 else "no majority agrees"
        return f"{format_ranks(suspects)}, which must be equal, differ in {what} {when}: {end}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    each = sorted(ranks)
    return f"{'rank' if len(each) == 1 else 'ranks'} {format_spans(each)}"


def format_tensors(tensors: Sequence[str], n_tensors: int) -> str:
    """Return up to two of *tensors*, and how many more there are."""
    if not tensors:
        return "one tensor" if n_tensors == 1 else "several tensors"
    shown = ", ".join(tensors[:2])
    more = n_tensors - min(len(tensors), 2)
    return shown if more <= 0 else f"{shown} and {more} more"


# Of one node, in one heartbeat: about 100 bytes each. With HSDP each rank of a node has its own.
RANK_DIGESTS_MAX = 20
RANKS_MAX = 64
_SPANS: Any = Annotated[tuple[Annotated[int, Limit(WORLD_MAX)], ...], Limit(2 * RANKS_MAX)]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Ranks of several nodes that differ; ``number``: the only tensor of ``key`` that does.

    With the outcome ``alike`` they are equal again; the suspects are those reported before.
    ``nodes``: the node of each suspect; () where that is unknown.
    """

    key: str
    difference: ReplicaDifference
    number: int | None = None
    nodes: tuple[str, ...] = ()

    @property
    def reporter_rank(self) -> int:
        """Return the rank whose node reports the difference."""
        return min(self.difference.verdict.suspects or self.difference.ranks, default=0)


def _ranks_from_spans(data: object) -> tuple[int, ...]:
    spans = read(_SPANS, data)
    if len(spans) % 2:
        raise ValueError("a span without an end")
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return tuple(sorted({rank for begin, end in pairs for rank in range(begin, end)}))


def _encode_digest(rank_digest: RankDigest) -> str:
    return b64encode(rank_digest.to_bytes()).decode()


def _decode_digest(text: str) -> RankDigest:
    return RankDigest.from_bytes(b64decode(text, validate=True))


_Key = Annotated[str, Limit(16, low=1)]
_Count = Annotated[int, Limit(10**8)]
_Ranks = Annotated[
    tuple[int, ...], Using(lambda ranks: to_spans(ranks[:RANKS_MAX]), _ranks_from_spans)
]
_Row = tuple[
    int,
    int,
    _Key,
    _Count,
    _Count,
    _Ranks,
    Annotated[RankDigest, Using(_encode_digest, _decode_digest)],
]
_ROWS: Any = Annotated[tuple[_Row, ...], Limit(RANK_DIGESTS_MAX)]
_LAST_EQUAL: Any = Annotated[Mapping[_Key, StateId], Limit(NAMED_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportMessage(Message):
    key: _Key
    state: StateId
    alike: StateId | None
    ranks: _Ranks
    suspects: _Ranks
    outcome: ReplicaOutcome
    number: _Count | None
    nodes: Annotated[tuple[Annotated[str, Limit(255, low=1)], ...], Limit(NAMED_MAX)] = ()


def group_digests_to_json(group_digests: Sequence[GroupDigest]) -> list[list[Any]]:
    """Return *group_digests* as JSON; those beyond the limit are left out."""
    found: list[list[Any]] = []
    for group in group_digests:
        ranks_by_digest: dict[RankDigest, list[int]] = {}
        for rank, rank_digest in sorted(group.rank_digests.items()):
            ranks_by_digest.setdefault(rank_digest, []).append(rank)
        head = [group.state.epoch, group.state.step, group.key, group.n_ranks, group.n_tensors]
        rows = [
            [*head, to_spans(ranks), _encode_digest(rank_digest)]
            for rank_digest, ranks in ranks_by_digest.items()
        ]
        if len(found) + len(rows) <= RANK_DIGESTS_MAX:
            found += rows
    return found


def group_digests_from_json(data: object) -> tuple[GroupDigest, ...]:
    """Return the group digests in *data*, () where it is invalid."""
    found: dict[tuple[StateId, str, int, int], dict[int, RankDigest]] = {}
    try:
        for epoch, step, key, n_ranks, n_tensors, ranks, rank_digest in read(_ROWS, data):
            name = (StateId(epoch, step), key, n_ranks, n_tensors)
            found.setdefault(name, {}).update(dict.fromkeys(ranks, rank_digest))
    except ValueError:
        return ()
    return tuple(
        GroupDigest(
            state=state, key=key, n_ranks=n_ranks, n_tensors=n_tensors, rank_digests=rank_digests
        )
        for (state, key, n_ranks, n_tensors), rank_digests in found.items()
    )


def replica_report_to_json(report: ReplicaReport) -> dict[str, Any]:
    """Return *report* as JSON; of very many ranks only the first are included."""
    found = report.difference
    return _ReportMessage(
        key=report.key,
        state=found.state,
        alike=found.last_equal,
        ranks=found.ranks,
        suspects=found.verdict.suspects,
        outcome=found.verdict.outcome,
        number=report.number,
        nodes=report.nodes,
    ).to_json()


def replica_report_from_json(data: object) -> ReplicaReport | None:
    """Return the report in *data*, None where it is invalid."""
    try:
        found = _ReportMessage.from_json(data)
    except MessageFormatError:
        return None
    verdict = ReplicaVerdict(found.outcome, found.suspects)
    difference = ReplicaDifference(
        state=found.state, ranks=found.ranks, verdict=verdict, last_equal=found.alike
    )
    return ReplicaReport(found.key, difference, found.number, found.nodes)


def replica_reports_to_json(reports: Sequence[ReplicaReport]) -> list[dict[str, Any]]:
    """Return *reports* as JSON."""
    return [replica_report_to_json(report) for report in reports]


def replica_reports_from_json(data: object) -> tuple[ReplicaReport, ...]:
    """Return the reports in *data*, () where it is invalid."""
    items = data[:NAMED_MAX] if isinstance(data, list) else []
    return tuple(report for item in items if (report := replica_report_from_json(item)) is not None)


def last_equal_to_json(last_equal: Mapping[str, StateId]) -> dict[str, list[int]]:
    """Return the states of *last_equal* by key as JSON."""
    return {key: [state.epoch, state.step] for key, state in last_equal.items()}


def last_equal_from_json(data: object) -> dict[str, StateId]:
    """Return the states by key in *data*, {} where it is invalid."""
    try:
        return dict(read(_LAST_EQUAL, data))
    except MessageFormatError:
        return {}
