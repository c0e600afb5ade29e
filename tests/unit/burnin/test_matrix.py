"""The matrix of a sweep as text: every tested pair in its cell, the worst below it."""

from gpuops.burnin.matrix import matrix_lines
from gpuops.burnin.pairs import PairOutcome, PairTest, node_pair
from gpuops.burnin.schedule import first_rounds


def pair_test(a, b, outcome="pass", value=None):
    nodes = node_pair(a, b)
    return PairTest(nodes=nodes, outcome=PairOutcome(outcome), value=value)


def test_each_pair_has_its_sign_on_both_sides_of_the_diagonal():
    tests = [
        pair_test("a", "b", "slow", 300.0),
        pair_test("a", "c", value=400.0),
        pair_test("b", "c", "timeout"),
        pair_test("a", "d", "unknown"),
        pair_test("b", "d", "fail"),
        pair_test("b", "d"),
    ]

    assert matrix_lines(tests) == [
        "      1 2 3 4",
        "a   1 \\ s . ?",
        "b   2 s \\ T X",
        "c   3 . T \\",
        "d   4 ? X   \\",
        "",
        ". passed   s slow   X failed   T timed out   ? not measured   blank: not tested",
        "",
        "b,c  timeout  (1 of 1 tests)",
        "b,d  fail  (1 of 2 tests)",
        "a,b  slow  300 GB/s  (1 of 1 tests)",
    ]


def test_more_than_64_nodes_are_grouped_by_name():
    nodes = [f"gpu{i:03}" for i in range(130)]
    tests = [
        pair_test(a, b, "fail" if a == "gpu000" else "pass")
        for one in first_rounds(nodes, seed=1)
        for a, b in one.pairs
    ]
    by_name = matrix_lines(tests)

    assert by_name[2].startswith("gpu000..gpu002   1 ")
    assert sum(line.startswith("gpu") and ".." in line for line in by_name) == 44
    signs = by_name[2].removeprefix("gpu000..gpu002   1 ").split()
    assert [sign for sign in signs if sign.isdigit()] in (["1", "1"], ["2"])
    assert all(len(line) < 160 for line in by_name)
    assert "gpu000" in by_name[-1]


def test_only_the_worst_pairs_are_listed():
    tests = [pair_test("a", f"b{i:02}", "slow", 100.0 + i) for i in range(15)]
    lines = matrix_lines(tests)

    assert lines[-11].startswith("a,b00  slow  100 GB/s")
    assert lines[-1] == "and 5 more bad pairs"
    assert matrix_lines([]) == ["no pair was tested"]
