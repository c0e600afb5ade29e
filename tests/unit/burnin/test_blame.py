"""What the outcomes of pair tests name: a node, a pair, the fabric, or nothing."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep_fleet import Faults, run_sweep

from gpuops.burnin.blame import BlameKind, blame, open_questions
from gpuops.burnin.pairs import PairOutcome, PairTest, node_pair
from gpuops.burnin.schedule import first_rounds
from gpuops.burnin.speed import SpeedLimit
from gpuops.burnin.sweep_findings import sweep_findings, unmeasured_findings
from gpuops.model import EntityKind, FailureClass, Status

OUTCOMES = {"+": "pass", "-": "fail", "s": "slow", "t": "timeout", "?": "unknown"}


def swept(*rounds):
    """Return tests of rounds like ``"a+b c-d"``: a passed with b, c failed with d."""
    return [
        PairTest(
            nodes=node_pair(text[0], text[2]),
            outcome=PairOutcome(OUTCOMES[text[1]]),
            round=number,
            value=300.0 if text[1] == "s" else None,
        )
        for number, line in enumerate(rounds)
        for text in line.split()
    ]


def named(verdicts):
    return [(v.kind.value, v.entity.id, v.status.word) for v in verdicts]


def names(n):
    return [f"n{i:02}" for i in range(n)]


def test_all_passed_names_nothing():
    assert blame(swept("a+b c+d", "a+c b+d")) == ()
    assert blame([]) == ()


def test_a_node_that_fails_with_two_that_pass_elsewhere_is_to_blame():
    (verdict,) = blame(swept("x-a b+c d+e", "x-b a+d c+e"))

    assert named([verdict]) == [("node", "x", "fail")]
    assert "failed with a, b, which passed elsewhere; it passed with nobody" in verdict.why
    assert [test.nodes for test in verdict.evidence] == [("a", "x"), ("b", "x")]


@pytest.mark.parametrize(
    ("rounds", "status"),
    [
        (("x-a b+c d+e", "x+b a+c d+e", "x-c a+d b+e", "x+d a+e b+c"), "warn"),  # one of two
        (("x-a b+c d+e", "x-b a+c d+e", "x-c a+d b+e", "x+d a+e b+c"), "warn"),  # one of two
        (("x-a b+c d+e", "x+b a+c d+e", "x-c a+d b+e", "x-d a+e b+c"), "fail"),  # both
        (("x-a b+c d+e", "x-b a+c d+e", "x-c a+d b+e", "x-d a+e b+c"), "fail"),
        (("x+a b+c d+e", "x+b a+c d+e", "x-c a+d b+e", "x-d a+e b+c"), "warn"),  # not most
    ],
)
def test_a_conviction_by_one_of_two_partners_warns_and_by_both_fails(rounds, status):
    assert named(blame(swept(*rounds))) == [("node", "x", status)]


def test_a_partner_that_passed_with_nobody_convicts_nobody():
    verdicts = blame(swept("x-y a+b c+d e+f g+h", "x-a y-c b+d e+g f+h"))

    # x and y failed with one good partner each, and with each other.
    assert {v.kind for v in verdicts} == {BlameKind.INCONCLUSIVE}
    assert all(v.status is Status.WARN for v in verdicts)


def test_a_healthy_node_that_met_two_bad_ones_is_explained_by_them():
    rounds = ("a-x b-y c+d e+f", "a-y b-x c+e d+f", "x-c y-d a+e b+f", "x-d y-e a+f b+c")

    assert named(blame(swept(*rounds))) == [("node", "x", "fail"), ("node", "y", "fail")]


def test_of_two_equal_accounts_the_one_with_witnesses_of_its_own_is_blamed():
    # x and z fail now and then; s met both. s has as many failures, but x's t and z's u met none.
    rounds = ("t-x s-z u+v w+y", "s-x u-z t+v w+y", "s+t x+v z+w u+y", "s+u x+w z+y t+v")

    assert {name for _, name, _ in named(blame(swept(*rounds)))} == {"x", "z"}


def test_a_pair_of_which_both_pass_elsewhere_is_a_link():
    once = swept("a-b c+d", "a+c b+d")
    again = swept("a-b c+d", "a+c b+d", "a+d b+c", "a-b c+d")

    assert named(blame(once)) == [("pair", "a,b", "warn")]
    assert named(blame(again)) == [("pair", "a,b", "fail")]
    assert "failed 2 of 2 times; a passed with 2 others and b with 2" in blame(again)[0].why
    assert blame(again)[0].entity.kind is EntityKind.PAIR


def test_a_pair_that_passes_when_repeated_is_inconclusive():
    found = blame(swept("a-b c+d", "a+c b+d", "a+d b+c", "a+b c+d"))

    assert named(found) == [("inconclusive", "a,b", "warn")]
    assert "passed when it was repeated" in found[0].why


def test_a_bad_pair_of_two_nodes_has_no_bad_end():
    (verdict,) = blame(swept("a-b", "a-b"))

    assert named([verdict]) == [("pair", "a,b", "fail")]
    assert "of two nodes nobody can say which is bad" in verdict.why
    assert open_questions(swept("a-b")).repeat == (("a", "b"),)
    assert open_questions(swept("a-b", "a-b")).repeat == ()


def test_more_than_a_third_that_passed_with_nobody_blame_nobody():
    three_of_eight = blame(swept("a-b c-d e+f g+h"))

    assert named(three_of_eight) == [("fabric", "fabric", "fail")]
    assert "4 of 8 nodes passed with nobody" in three_of_eight[0].why
    assert open_questions(swept("a-b c-d e+f g+h")).suspects == ()
    # Three of nine are a third, and not more.
    assert all(v.kind is not BlameKind.FABRIC for v in blame(swept("a-b c-d d+e f+g h+i")))
    # Two of four are more than a third, and not three.
    assert all(v.kind is not BlameKind.FABRIC for v in blame(swept("a-b c+d")))


def test_a_leaf_whose_nodes_pass_below_it_and_never_across_is_named_and_none_of_them():
    leaves = {
        name: ("l0" if name in "abcd" else "l1" if name in "efgh" else "l2")
        for name in "abcdefghijkl"
    }
    tests = swept("a+b c+d e+f g+h i+j k+l", "a-e b-f c-i d-j g+k h+l")

    assert named(blame(tests, leaves)) == [("fabric", "l0", "fail")]
    assert open_questions(tests, leaves).suspects == ()
    assert all(v.kind is not BlameKind.FABRIC for v in blame(tests))
    # One bad node of a leaf is not its switch.
    one = swept("a-b c+d e+f g+h i+j k+l", "a-e b+f c+i d+j g+k h+l", "a-h")
    assert named(blame(one, leaves)) == [("node", "a", "fail")]


def test_what_did_not_measure_says_nothing():
    tests = swept("a?b c+d", "a+c b?d", "a+d b?c")

    assert blame(tests) == ()
    (finding,) = unmeasured_findings(tests)
    assert (finding.entity.id, finding.status) == ("b", Status.UNKNOWN)


def test_findings_have_the_class_of_what_was_seen():
    limit = SpeedLimit(low=380.0, text=">= 380 GB/s", source="this sweep's median")

    def found(*rounds):
        (finding,) = sweep_findings(
            blame(swept(*rounds)), slow_node=FailureClass.GPU_THERMAL_POWER, limit=limit
        )
        return finding

    slow = found("xsa b+c d+e", "xsb a+d c+e")
    assert (slow.failure_class, slow.value) == (FailureClass.GPU_THERMAL_POWER, 300.0)
    assert (slow.threshold, slow.source) == (limit.text, limit.source)
    hung = found("xta b+c d+e", "xsb a+d c+e")
    assert hung.failure_class is FailureClass.NETWORK_NODE_FAILING
    assert hung.threshold != limit.text
    pair = found("asb c+d", "a+c b+d")
    assert (pair.failure_class, pair.status) == (FailureClass.NETWORK_PAIR_SLOW, Status.WARN)
    assert found("atb c+d", "a+c b+d").failure_class is FailureClass.NETWORK_CONNECTION
    assert found("asb csd e+f g+h").shared_cause
    assert not slow.shared_cause


def test_a_slow_rate_of_a_slow_network_is_not_rounded_to_nothing():
    tests = [replace(test, value=test.value and 0.0016149) for test in swept("asb c+d", "a+c b+d")]
    (finding,) = sweep_findings(blame(tests), slow_node=FailureClass.HOST_SLOW)
    assert finding.value == 0.001615


@pytest.mark.parametrize("n", range(3, 10))
def test_every_single_bad_node_and_link_of_a_small_cluster_is_named(n):
    """All of them, one after the other; of three nodes, a bad link looks like any other."""
    for bad in names(n):
        tests, _ = run_sweep(names(n), Faults(hard={bad}), seed=n)
        assert named(blame(tests)) == [("node", bad, "fail")]
    for pair in itertools.combinations(names(n), 2):
        tests, _ = run_sweep(names(n), Faults(links={pair}), seed=n)
        assert named(blame(tests)) == [("pair", ",".join(pair), "fail")]


@given(
    n=st.integers(17, 80),
    seed=st.integers(0, 10_000),
    n_bad=st.integers(1, 2),
    slow=st.booleans(),
)
def test_bad_nodes_of_a_larger_cluster_are_named_in_four_rounds_and_no_others(n, seed, n_bad, slow):
    bad = set(names(n)[:n_bad])
    tests, rounds = run_sweep(names(n), Faults(**{"slow" if slow else "hard": bad}), seed=seed)

    assert named(blame(tests)) == [("node", name, "fail") for name in sorted(bad)]
    assert rounds <= 4


@given(n=st.integers(18, 80).filter(lambda n: n % 2 == 0), seed=st.integers(0, 10_000))
def test_a_bad_link_that_a_round_drew_is_named_and_confirmed(n, seed):
    link = first_rounds(names(n), seed=seed)[0].pairs[0]
    tests, rounds = run_sweep(names(n), Faults(links={link}), seed=seed)

    assert named(blame(tests)) == [("pair", ",".join(link), "fail")]
    assert rounds == 4


def test_nothing_is_asked_about_nodes_that_another_one_explains():
    questions = open_questions(swept("x-a b+c d+e", "x-b a+d c+e"))

    assert questions.suspects == ("x",)
    assert questions.repeat == ()
    assert "x" not in questions.partners
    assert questions.partners["c"] > questions.partners["a"]
    assert questions.met["x"] == {"a", "b"}


def test_a_suspect_that_passed_may_have_met_two_bad_ones_so_these_are_tested_too():
    rounds = ("s-y a+b c+d z+e", "s-z a+c b+d y+e", "s+a b+c d+e")

    assert set(open_questions(swept(*rounds)).suspects) == {"s", "y", "z"}
    found = blame(swept(*rounds, "s+b y-c z+d"))
    assert named(found)[0] == ("node", "y", "warn")
    assert "it fails now and then, or several of its links are bad" in found[0].why
    assert "s" not in {verdict.entity.id for verdict in found}
