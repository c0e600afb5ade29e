"""Replicas of one state, compared by digest: who differs, in what, and since when; pure.

Data-parallel ranks hold the same parameters bit for bit, since each applies the same sum of
gradients to the same values: a rank that differs has been computed, copied or stored wrong, which
nothing else would tell. Comparing digests over the copies of parameters is an invariant of
TrainCheck (OSDI 2025); blame goes by majority, and two alone have none.

One tensor that differs is named from four numbers per rank: with h the digests of the tensors,
modulo the prime 2^61 - 1, the sums of h, i h and i^2 h differ by d, i d and i^2 d where only tensor
i does (the syndromes of a Reed-Solomon code).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from gpuops.checkpoint.replicated import words_of
from gpuops.checkpoint.states import StateId

N_STRIPES = 16
SKETCH_BYTES = 16 + 3 * 8 + N_STRIPES
_PRIME = 2**61 - 1
_FEW = 8
NAMED_MAX = 8
TOLD_MAX = 8  # of one set of ranks: what comes and goes for ever is not told for ever


class Outcome(StrEnum):
    """What the digests of the ranks of one set say."""

    ALIKE = "alike"
    MINORITY = "minority"  # most agree, and at least two
    TIE = "tie"  # no more agree than differ: any may be wrong
    APART = "apart"  # no two agree, or all of it differs: a program that lets them


@dataclass(frozen=True, slots=True)
class Verdict:
    """``suspects`` may be wrong: the minority, or all where there is no majority."""

    outcome: Outcome
    suspects: tuple[int, ...] = ()


def judge(digests: Mapping[int, object]) -> Verdict:
    """Return who of these ranks differs; the digest of each rank may be any value.

    A majority is more than half of all and at least two: two ranks that agree bit for bit by
    accident are not to be had, so a few that differ from it are wrong.
    """
    sides: dict[object, list[int]] = {}
    for rank, digest in digests.items():
        sides.setdefault(digest, []).append(rank)
    if len(sides) < 2:
        return Verdict(Outcome.ALIKE)
    largest = max(sides.values(), key=len)
    if len(largest) >= 2 and 2 * len(largest) > len(digests):
        return Verdict(Outcome.MINORITY, tuple(sorted(digests.keys() - set(largest))))
    everybody = tuple(sorted(digests))
    is_apart = len(largest) == 1 and len(digests) > 2
    return Verdict(Outcome.APART if is_apart else Outcome.TIE, everybody)


def weighed(verdict: Verdict, n_differ: int, n_tensors: int) -> Verdict:
    """Return *verdict* in view of in how many tensors the ranks differ.

    A fault of one rank's changes few of them, for whatever it did to a gradient went into the sum
    that all apply. Where more than half differ, and nobody outvotes anybody, the ranks train apart.
    """
    is_broad = n_differ > max(_FEW, n_tensors // 2)
    if verdict.outcome is Outcome.TIE and is_broad:
        return Verdict(Outcome.APART, verdict.suspects)
    return verdict


@dataclass(frozen=True, slots=True)
class Sketch:
    """The tensors of one rank in `SKETCH_BYTES`.

    ``digest`` is of all; ``sums`` name one that differs; each of ``stripes`` is a byte of every
    sixteenth tensor, so that they tell a few that differ from nearly all.
    """

    digest: bytes
    sums: tuple[int, int, int]
    stripes: bytes

    def to_bytes(self) -> bytes:
        sums = b"".join(each.to_bytes(8, "big") for each in self.sums)
        return self.digest + sums + self.stripes

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the sketch in *data*; raises ValueError where that is none."""
        if len(data) != SKETCH_BYTES:
            raise ValueError(f"a sketch has {SKETCH_BYTES} bytes, not {len(data)}")
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


def n_differing(a: Sketch, b: Sketch, n_tensors: int) -> int:
    """Return about how many tensors differ: 1 is exact; many, some two dozen, count as all."""
    if only_difference(a, b, n_tensors) is not None:
        return 1
    n_stripes = sum(x != y for x, y in zip(a.stripes, b.stripes, strict=True))
    return n_tensors if n_stripes > N_STRIPES * 3 // 4 else n_stripes


def only_difference(a: Sketch, b: Sketch, n_tensors: int) -> int | None:
    """Return the number (from 0) of the one tensor that differs, None where several do, or none."""
    d, d_i, d_ii = ((x - y) % _PRIME for x, y in zip(a.sums, b.sums, strict=True))
    if not d:
        return None
    i = d_i * pow(d, -1, _PRIME) % _PRIME
    if not 1 <= i <= n_tensors or (i * d_i) % _PRIME != d_ii:
        return None
    return i - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one node's ranks have of what ``n_ranks`` must hold alike, some of them elsewhere."""

    state: StateId
    key: str
    n_ranks: int
    n_tensors: int
    sketches: Mapping[int, Sketch]


@dataclass(slots=True)
class Course:
    """How the comparisons of one set of ranks went so far.

    ``alike``: the newest state in which they were equal. ``differs``: the first of the run of
    states in which they are not.
    """

    alike: StateId | None = None
    differs: StateId | None = None

    def hear(self, state: StateId, *, differ: bool) -> bool:
        """Take in the comparison of *state*; say whether a run of differing ones begins with it."""
        newest = max((s for s in (self.alike, self.differs) if s is not None), default=None)
        if newest is not None and state <= newest:
            return False
        if not differ:
            self.alike, self.differs = state, None
            return False
        begins = self.differs is None
        self.differs = self.differs or state
        return begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Replicas that differ from *state* on. ``alike``: the last state in which they did not.

    ``tensors`` are some of the ``n_tensors`` that differ; 0: more than one, over several nodes.
    With the outcome `Outcome.ALIKE` they are equal again, from *state* on.
    """

    state: StateId
    ranks: tuple[int, ...]
    verdict: Verdict
    tensors: tuple[str, ...] = ()
    n_tensors: int = 0
    alike: StateId | None = None

    @property
    def words(self) -> str:
        """Say it to a person, in one sentence."""
        suspects = self.verdict.suspects
        others = [rank for rank in self.ranks if rank not in suspects]
        since = f" (alike at step {self.alike.step})" if self.alike is not None else ""
        when = f"at step {self.state.step}{since}"
        what = named(self.tensors, self.n_tensors)
        if self.verdict.outcome is Outcome.MINORITY:
            verb = "differs" if len(suspects) == 1 else "differ"
            return f"{ranks_of(suspects)} {verb} from {ranks_of(others)} in {what} {when}"
        end = "either may be wrong" if len(suspects) == 2 else "no majority agrees"
        return f"{ranks_of(suspects)}, which must be equal, differ in {what} {when}: {end}"


def ranks_of(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    each = sorted(ranks)
    return f"{'rank' if len(each) == 1 else 'ranks'} {words_of(each)}"


def named(tensors: Sequence[str], n_tensors: int) -> str:
    """Return two of *tensors*, and how many more there are."""
    if not tensors:
        return "one tensor" if n_tensors == 1 else "several tensors"
    shown = ", ".join(tensors[:2])
    more = n_tensors - min(len(tensors), 2)
    return shown if more <= 0 else f"{shown} and {more} more"
