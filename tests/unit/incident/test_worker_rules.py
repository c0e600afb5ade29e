"""The shipped rules for worker logs: each is about its own lines only, and fast."""

import time

import pytest

from gpuops.model import FailureClass, Role, Side
from gpuops.resources import data_dir
from gpuops.rules import LogSource, load_rules

FILE = data_dir("checks") / "rules" / "worker.toml"
RULES = tuple(rule for rule in load_rules([FILE.parent]) if f'id = "{rule.id}"' in FILE.read_text())


def by_id(rule):
    return rule.id


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_a_rule_knows_its_example_and_not_its_counter_example(rule):
    assert rule.source is LogSource.WORKER
    assert rule.matches(rule.example)
    assert rule.counter_example is not None
    assert not rule.matches(rule.counter_example)


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_no_other_rule_takes_a_rule_s_example_or_counter_example(rule):
    others = [other for other in RULES if other is not rule]

    assert [o.id for o in others if o.matches(rule.example)] == []
    assert [o.id for o in others if o.role is Role.ROOT and o.matches(rule.counter_example)] == []


def test_collective_classes_are_symptoms_only_but_for_what_the_program_itself_did():
    rules = [rule for rule in RULES if rule.failure_class.category == "collective"]
    roots = [rule for rule in rules if rule.role is not Role.SYMPTOM]

    assert len(rules) > len(roots)
    assert {rule.failure_class for rule in roots} == {FailureClass.COLLECTIVE_MISMATCH}
    assert {rule.side for rule in roots} == {Side.USER}


@pytest.mark.parametrize("rule", RULES, ids=by_id)
def test_a_hostile_line_costs_a_bounded_time(rule):
    lines = [
        rule.example * 40,
        "gloo/transport/tcp/a.cc:1]" * 150,
        "[rank0]: " * 400,
        "recvValue failed on " * 200,
        " " * 4096,
    ]
    begin = time.process_time()
    for line in lines:
        rule.matches(line)

    assert time.process_time() - begin < 1
