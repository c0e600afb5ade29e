"""Log rules are data: bad data is refused with its file and rule."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.errors import ConfigError
from gpuops.model import FailureClass, Status
from gpuops.resources import data_dir
from gpuops.rules import LINE_MAX, LogSource, first_match, load_rules, required_literals

RULE = """
[[rule]]
id = "oom"
pattern = 'Killed process \\d+'
failure_class = "host_mem.kernel_oom"
source = "kernel"
side = "ambiguous"
status = "warn"
reference = "mm/oom_kill.c"
example = "Killed process 17 (python)"
"""


def write(tmp_path, text, name="site.toml"):
    (tmp_path / name).write_text(text)
    return tmp_path


def test_a_rule_is_read_from_toml(tmp_path):
    (rule,) = load_rules([write(tmp_path, RULE)])

    assert rule.failure_class is FailureClass.KERNEL_OOM
    assert rule.status is Status.WARN
    assert rule.matches("[1.0] Killed process 99 (train)")


def test_a_sites_rule_overrides_the_shipped_one_by_id(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    write(site, RULE.replace('status = "warn"', 'status = "fail"'))

    (rule,) = load_rules([write(tmp_path, RULE), site])

    assert rule.status is Status.FAIL


def test_only_rules_for_the_logs_source_are_tried(tmp_path):
    rules = load_rules([write(tmp_path, RULE)])

    assert first_match(rules, "Killed process 1", LogSource.KERNEL) is not None
    assert first_match(rules, "Killed process 1", LogSource.WORKER) is None


def test_a_hostile_line_is_read_to_a_bound_only(tmp_path):
    (rule,) = load_rules([write(tmp_path, RULE)])

    assert not rule.matches("x" * LINE_MAX + "Killed process 1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Killed process \\d+'", "Killed (process'", "oom.*site.toml"),
        ("host_mem.kernel_oom", "host_mem.unheard_of", "unheard_of"),
        ('example = "Killed process 17 (python)"', 'example = "all is well"', "own example"),
        ('side = "ambiguous"', 'side = "ambiguous"\nseverity = 3', "unknown key 'severity'"),
        ('reference = "mm/oom_kill.c"', "", "'reference'"),
        ('status = "warn"', 'counter_example = "Killed process 1"', "counter_example"),
        ('status = "warn"', "within_s = 0", "within_s must be seconds above zero"),
        ('status = "warn"', "within_s = true", "within_s must be seconds above zero"),
        ('status = "warn"', "cleared_by = '('", "oom.*site.toml"),
        ('status = "warn"', "cleared_by = 'Killed'", "cleared_by matches its own example"),
        ('source = "kernel"', 'source = "worker"\nwithin_s = 9', "for rules of the kernel's log"),
        ("process \\d+", "(\\w+\\s?)+\\d+", "repeats a repetition"),
    ],
)
def test_a_bad_rule_is_refused_by_name(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_rules([write(tmp_path, RULE.replace(old, new))])


def test_the_shipped_rules_load_and_have_unique_ids():
    folder = data_dir("checks") / "rules"
    rules = load_rules([folder])
    written = sum(path.read_text().count("[[rule]]") for path in folder.glob("*.toml"))

    assert len(rules) == written > 0


def with_pattern(pattern):
    return RULE.replace("'Killed process \\d+'", f"'.|{pattern}'")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\s?)+!",
        r"(a*)*",
        r"(?:x.*)+",
        r"(?:(?:a|b+)c?){2,}",
        r"(?:.{1,80},){0,99}",
        r"(\d+?x)*",
    ],
)
def test_a_pattern_that_repeats_a_repetition_is_refused(tmp_path, pattern):
    with pytest.raises(ConfigError, match="repeats a repetition"):
        load_rules([write(tmp_path, with_pattern(pattern))])


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+ \w+ .*!",
        r"(?:ab|cd)+",
        r"(?:\d{4}:)+",
        r"(?:\d{1,3}\.){3}\d+",
        r"(?:x\w+)?",
        r"(?=a+)b*",
    ],
)
def test_a_pattern_whose_time_is_bounded_is_taken(tmp_path, pattern):
    assert load_rules([write(tmp_path, with_pattern(pattern))])


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("Killed process", ("Killed process",)),
        (r"EDAC MC(?P<subject>\d+): \d+ UE |machine check", ("EDAC MC", "machine check")),
        (r"task (?P<subject>.{1,40}):\d+ blocked for more", (" blocked for more",)),
        (r"(?:was lost)?in libnccl(?=x)", ("in libnccl",)),
        (r"\d+|abc", ()),
        (r"(?i)killed", ()),
        (r"(?i:killed) \d", (" ",)),
    ],
)
def test_what_a_pattern_cannot_match_without_is_known(pattern, literals):
    assert required_literals(re.compile(pattern)) == literals


SHIPPED = load_rules([data_dir("checks") / "rules"])


@given(st.data())
def test_no_line_that_a_rule_matches_is_passed_over(data):
    rule = data.draw(st.sampled_from(SHIPPED))
    line = data.draw(st.from_regex(rule.pattern))[:LINE_MAX]

    assert rule.may_match(line) or rule.pattern.search(line) is None


def test_a_rule_may_leave_its_lines_to_another_check(tmp_path):
    (rule,) = load_rules([write(tmp_path, RULE.replace('status = "warn"', 'check = "gpu_xid"'))])

    assert rule.check == "gpu_xid"
