"""Who differs, in what and since when: from digests alone."""

import random

import pytest

from gpuops.checkpoint.agreement.replica_check import (
    ComparisonHistory,
    RankDigest,
    ReplicaDifference,
    ReplicaOutcome,
    ReplicaVerdict,
    adjust_for_breadth,
    compare_ranks,
    n_differing,
    only_difference,
)
from gpuops.checkpoint.agreement.replicated import ReplicatedTensors, format_spans, read_replicated
from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.keeper.replica_digests import rank_digest_of
from gpuops.checkpoint.keeper.state_sampler import StateSampler
from gpuops.checkpoint.types import Shard, StateId

A, B, C, D = b"a", b"b", b"c", b"d"


@pytest.mark.parametrize(
    ("digests", "outcome", "suspects"),
    [
        ((A,), ReplicaOutcome.ALIKE, ()),
        ((A, A), ReplicaOutcome.ALIKE, ()),
        ((A, A, A, A), ReplicaOutcome.ALIKE, ()),
        ((A, B), ReplicaOutcome.TIE, (0, 1)),
        ((A, B, A), ReplicaOutcome.MINORITY, (1,)),
        ((A, A, B, C, A), ReplicaOutcome.MINORITY, (2, 3)),
        ((A, A, B, B), ReplicaOutcome.TIE, (0, 1, 2, 3)),
        ((A, A, B, C), ReplicaOutcome.TIE, (0, 1, 2, 3)),
        ((A, B, C), ReplicaOutcome.APART, (0, 1, 2)),
        ((A, B, C, D), ReplicaOutcome.APART, (0, 1, 2, 3)),
    ],
)
def test_the_verdict_follows_from_who_agrees(digests, outcome, suspects):
    assert compare_ranks(dict(enumerate(digests))) == ReplicaVerdict(outcome, suspects)


@pytest.mark.parametrize(
    ("outcome", "n_differ", "n_tensors", "wanted"),
    [
        (ReplicaOutcome.TIE, 1, 300, ReplicaOutcome.TIE),
        (ReplicaOutcome.TIE, 4, 4, ReplicaOutcome.TIE),
        (ReplicaOutcome.TIE, 151, 300, ReplicaOutcome.APART),
        (ReplicaOutcome.TIE, 20, 20, ReplicaOutcome.APART),
        (ReplicaOutcome.MINORITY, 300, 300, ReplicaOutcome.MINORITY),
    ],
)
def test_two_that_differ_nearly_everywhere_train_apart(outcome, n_differ, n_tensors, wanted):
    assert (
        adjust_for_breadth(ReplicaVerdict(outcome, (0, 1)), n_differ, n_tensors).outcome is wanted
    )


def test_two_that_differ_by_as_much_are_not_taken_for_the_one_between_them():
    good = rank_digest_of([number.to_bytes(8, "big") for number in (10, 20, 30)])
    bad = rank_digest_of([number.to_bytes(8, "big") for number in (11, 20, 31)])

    assert only_difference(bad, good, 3) is None


def test_one_tensor_that_differs_is_named_by_sketches_and_several_are_not():
    dice = random.Random(5)
    for n_tensors in (1, 2, 300, 20_000):
        digests = [dice.randbytes(16) for _ in range(n_tensors)]
        good = rank_digest_of(digests)
        assert only_difference(good, good, n_tensors) is None
        for number in {0, n_tensors // 2, n_tensors - 1}:
            changed = [*digests[:number], dice.randbytes(16), *digests[number + 1 :]]
            bad = rank_digest_of(changed)
            assert bad.digest != good.digest
            assert only_difference(good, bad, n_tensors) == number
            assert only_difference(bad, good, n_tensors) == number
            assert n_differing(bad, good, n_tensors) == 1
            assert RankDigest.from_bytes(bad.to_bytes()) == bad
    digests = digests[:300]
    good, n_tensors = rank_digest_of(digests), 300
    for _ in range(200):
        changed = list(digests)
        for number in dice.sample(range(n_tensors), dice.randint(2, 9)):
            changed[number] = dice.randbytes(16)
        assert only_difference(good, rank_digest_of(changed), n_tensors) is None
        assert n_differing(good, rank_digest_of(changed), n_tensors) <= 9
    other = rank_digest_of([dice.randbytes(16) for _ in digests])
    assert n_differing(good, other, n_tensors) == n_tensors
    with pytest.raises(ValueError, match="56 bytes"):
        RankDigest.from_bytes(good.digest)


PAIR = "ranks 0-1, which must be equal,"
WHEN = "at step 9 (equal at step 8)"


def state(step, epoch=1):
    return StateId(epoch, step)


def test_a_run_of_differing_states_is_told_once_and_a_new_one_again():
    course = ComparisonHistory()
    heard = [course.record(state(n), is_different=d) for n, d in enumerate((0, 0, 1, 1, 0, 1))]

    assert heard == [False, False, True, False, False, True]
    assert (course.last_equal, course.first_different) == (state(4), state(5))
    assert not course.record(state(3), is_different=True)  # older than what is known
    assert not course.record(state(9, epoch=2), is_different=True)
    assert not course.record(state(2, epoch=3), is_different=False)
    assert course.last_equal == state(2, epoch=3)


@pytest.mark.parametrize(
    ("ranks", "verdict", "tensors", "n", "words"),
    [
        (
            (0, 1, 2),
            ReplicaVerdict(ReplicaOutcome.MINORITY, (1,)),
            ("w",),
            1,
            f"rank 1 differs from ranks 0, 2 in w {WHEN}",
        ),
        (
            (0, 1),
            ReplicaVerdict(ReplicaOutcome.TIE, (0, 1)),
            ("a", "b"),
            3,
            f"{PAIR} differ in a, b and 1 more {WHEN}: either may be wrong",
        ),
        (
            (0, 1, 2, 3),
            ReplicaVerdict(ReplicaOutcome.TIE, (0, 1, 2, 3)),
            (),
            0,
            f"ranks 0-3, which must be equal, differ in several tensors {WHEN}: no majority agrees",
        ),
    ],
)
def test_what_is_said_names_ranks_tensors_and_steps(ranks, verdict, tensors, n, words):
    found = ReplicaDifference(
        state=state(9),
        ranks=ranks,
        verdict=verdict,
        tensors=tensors,
        n_tensors=n,
        last_equal=state(8),
    )

    assert found.summary == words


def test_comparing_takes_no_more_than_its_share_and_all_choose_alike():
    now_s, chosen = 0.0, {}
    for took_s in (0.002, 0.2):
        sampler = StateSampler(share=0.01)
        chosen[took_s] = set()
        for step in range(20_000):
            now_s += 0.1
            if sampler.is_sampled(state(step), now_s):
                chosen[took_s].add(step)
                sampler.record_cost(took_s)
        assert len(chosen[took_s]) * took_s <= 0.012 * 20_000 * 0.1
    assert {step for step in chosen[0.2] if step > 100} <= chosen[0.002]
    rare = StateSampler()
    rare.record_cost(0.2)
    assert all(rare.is_sampled(state(step), 60.0 * step) for step in range(100))


SPECS = [TensorSpec(name, "F32", (2,), 8, (0,), (2,)) for name in "abcdefg"]


def test_the_header_says_which_tensors_and_whose():
    alike = {"a": (0, 3), "b": (0, 3), "d": (0, 3), "e": (0, 1, 2, 3)}
    layout = plan_image(Shard(3, 4), SPECS, 64, alike)

    assert read_replicated(layout.header, layout.shard, len(layout.tensors)) == (
        ReplicatedTensors((0, 1, 2, 3), (4,)),
        ReplicatedTensors((0, 3), (0, 1, 3)),
    )
    assert format_spans((0, 1, 3)) == "0-1, 3"
    plain = plan_image(Shard(3, 4), SPECS, 64)
    assert read_replicated(plain.header, plain.shard, 7) == ()
    assert b"replicated" not in plain.header


@pytest.mark.parametrize(
    "told",
    [
        '{"ranks":[0,2],"tensors":[0,1]}',
        '[{"ranks":[0,2]}]',
        '[{"ranks":[0,1],"tensors":[0,1]}]',
        '[{"ranks":[2,4],"tensors":[0,1]}]',
        '[{"ranks":[0,2],"tensors":[0,9]}]',
        '[{"ranks":[0,2],"tensors":[1,0]}]',
        '[{"ranks":[0,2],"tensors":[0.5,1]}]',
        '[{"ranks":[0,2],"tensors":[0]}]',
        '[{"ranks":[0,2],"tensors":[0,1]},{"ranks":[0,4],"tensors":[0,1]}]',
        "[7]",
        "null",
    ],
)
def test_a_header_that_tells_nonsense_costs_the_comparison_only(told):
    own = '{"replicated":' + told + "}"
    text = '{"__metadata__":{"gpuops":' + repr(own).replace('"', '\\"').replace("'", '"') + "}}"
    header = len(text).to_bytes(8, "little") + text.encode()

    assert read_replicated(header, Shard(1, 4), 7) == ()
