"""The verdicts on zombies and leftovers."""

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.host.processes import Parameters, judge
from gpuops.host.leftovers import Leftovers, UserProcess

ZOMBIES = Parameters(zombies=limit(warn=100, fail=1000))
STRICT = Parameters(
    zombies=limit(warn=100), leftovers=limit(warn=1, fail=3), age_s=60.0, ignore=("systemd*",)
)


def left(*items):
    found = tuple(
        UserProcess(pid, name, 1000, age_s) for pid, (name, age_s) in enumerate(items, start=50)
    )
    return Leftovers(zombies=0, count=len(found), processes=found)


@pytest.mark.parametrize(
    ("count", "status"), [(99, "pass"), (100, "warn"), (999, "warn"), (1000, "fail")]
)
def test_zombies_are_counted(count, status):
    (finding,) = judge(Leftovers(zombies=count), ZOMBIES, CASE)

    assert (finding.status.word, finding.value) == (status, count)


def test_leftovers_are_not_judged_unless_the_suite_asks():
    assert len(judge(left(("python", 9999.0)), ZOMBIES, CASE)) == 1


@pytest.mark.parametrize(("count", "status"), [(0, "pass"), (1, "warn"), (2, "warn"), (3, "fail")])
def test_leftovers_are_counted_by_their_limit(count, status):
    (_, finding) = judge(left(*[("python", 100.0)] * count), STRICT, CASE)

    assert finding.status.word == status
    assert (finding.failure_class is None) == (status == "pass")


def test_the_young_and_the_ignored_do_not_count():
    facts = left(("python", 59.9), ("systemd", 9999.0), ("python", 60.0))
    (_, finding) = judge(facts, STRICT, CASE)

    assert said([finding]) == [("n1", "warn", "host_sw.leftovers")]
    assert finding.message == "left over: python (52, user 1000, 60.0 s old)"


def test_more_than_are_listed_count_too():
    facts = Leftovers(count=200, processes=left(*[("python", 100.0)] * 100).processes)
    (_, finding) = judge(facts, STRICT, CASE)

    assert finding.value == 200
    assert finding.message.endswith("and 195 more")


def test_hidden_processes_are_not_read_as_none():
    (_, finding) = judge(Leftovers(hidden=True), STRICT, CASE)

    assert (finding.status.word, finding.unknown_reason) == ("unknown", "no_permission")
