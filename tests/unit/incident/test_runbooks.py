"""Runbooks: one page for each failure class, and pages that are not one are refused by name."""

import re

import click
import pytest
from click.testing import CliRunner

from gpuops.cli.main import gpuops
from gpuops.errors import ConfigError, UsageError
from gpuops.incident.runbook import (
    SECTIONS,
    find_runbook,
    load_runbooks,
    parse_runbook,
    return_condition,
)
from gpuops.model import FailureClass, ReturnCondition
from gpuops.resources import data_dir
from gpuops.rules import load_rules

RUNBOOKS = load_runbooks(data_dir("runbooks"))
PAGES = list(RUNBOOKS.values())
NAME = "host_mem.cgroup_oom.md"
TEXT = RUNBOOKS[FailureClass.CGROUP_OOM].text


def by_class(page):
    return page.failure_class.value


def test_failure_classes_and_pages_are_the_same_set():
    files = {path.name for path in data_dir("runbooks").glob("*.md")} - {"README.md"}

    assert set(RUNBOOKS) == set(FailureClass)
    assert files == {f"{kind.value}.md" for kind in FailureClass}


def test_every_class_that_a_rule_names_has_a_page():
    rules = load_rules([data_dir("checks") / "rules"])

    assert {rule.failure_class for rule in rules} <= set(RUNBOOKS)


@pytest.mark.parametrize("page", PAGES, ids=by_class)
def test_a_page_is_of_use(page):
    sections = re.split(r"^## .+$", page.body, flags=re.MULTILINE)[1:]

    assert len(sections) == len(SECTIONS)
    assert all(len(section.split()) >= 10 for section in sections)
    assert 30 <= len(page.text.splitlines()) <= 120
    assert page.title == page.title.strip().rstrip(".")
    assert "TODO" not in page.text


@pytest.mark.parametrize("page", PAGES, ids=by_class)
def test_a_page_refers_to_pages_that_exist(page):
    named = re.findall(r"gpuops runbook\s+([a-z_]+\.[a-z_]+)", page.body)

    assert set(named) <= {kind.value for kind in FailureClass}


def test_a_page_says_how_a_drained_node_returns_and_faulty_gpus_need_a_diagnostic(tmp_path):
    def returns(kind, **lines):
        text = RUNBOOKS[kind].text
        for old, new in lines.values():
            text = text.replace(old, new)
        (tmp_path / f"{kind.value}.md").write_text(text)
        return return_condition(kind, tmp_path)

    asks = {"line": ('action = "drain"\n', 'action = "drain"\nreturns = "burnin"\n')}
    assert returns(FailureClass.GPU_NVLINK) is ReturnCondition.DIAG
    assert returns(FailureClass.GPU_NVLINK, **asks) is ReturnCondition.BURNIN
    assert returns(FailureClass.HOST_SERVICE) is ReturnCondition.CHECK
    assert returns(FailureClass.HOST_SERVICE, line=("+++", "---")) is ReturnCondition.CHECK
    assert returns(FailureClass.GPU_NVLINK, line=("+++", "---")) is ReturnCondition.DIAG
    assert RUNBOOKS[FailureClass.GPU_INFOROM].returns is ReturnCondition.PERSON


def commands_in(page):
    """Return each ``gpuops …`` that stands in code, as words."""
    fenced = re.findall(r"^ *```\n(.*?)^ *```", page.body, flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(
        r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", page.body, flags=re.MULTILINE | re.DOTALL)
    )
    code = "\n".join([*fenced, *(text.replace("\n", " ") for text in inline)])
    return [match.split() for match in re.findall(r"\bgpuops ((?:[a-z]+|--[a-z])[^|;\n]*)", code)]


def test_pages_show_commands():
    assert sum(bool(commands_in(page)) for page in PAGES) > len(PAGES) // 2


@pytest.mark.parametrize("page", PAGES, ids=by_class)
def test_a_page_shows_commands_and_options_of_gpuops_that_exist(page):
    for words in commands_in(page):
        options = {word for word in words if word.startswith("--")}
        names = [word for word in words if re.fullmatch(r"[a-z]+", word)][:2]
        if names[:1] == ["run"]:
            continue
        assert options <= known_options(names), words


def known_options(names):
    """Return the options of the command that *names* lead to; fails where it does not exist."""
    command, found = gpuops, set(re.findall(r"--[a-z-]+", help_of([])))
    for depth, name in enumerate(names):
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), name)
        assert command is not None, names
        found |= set(re.findall(r"--[a-z-]+", help_of(names[: depth + 1])))
    return found


def help_of(names):
    return CliRunner().invoke(gpuops, [*names, "--help"]).output


@pytest.mark.parametrize("page", PAGES, ids=by_class)
def test_code_fences_are_closed(page):
    assert page.text.count("```") % 2 == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("+++\nfailure_class", "failure_class", "front matter between"),
        ('severity = "ticket"', 'severity = "loud"', "severity 'loud'"),
        ('action = "stop"', 'action = "shrug"', "shrug"),
        ('action = "stop"', 'action = "stop"\nreturns = "soon"', "soon"),
        ('side = "user"', "", "lacks 'side'"),
        ('side = "user"', 'side = "user"\nowner = "me"', "unknown key 'owner'"),
        ('side = "user"', "side = ", "not TOML"),
        ("## Confirm", "## Check", "its sections are"),
        ("## Escalate", "", "its sections are"),
        ("host_mem.cgroup_oom", "host_mem.kernel_oom", "rename it"),
        ("host_mem.cgroup_oom", "host_mem.unheard_of", "unheard_of"),
    ],
)
def test_a_page_that_is_none_is_refused_by_name(old, new, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_runbook(NAME, TEXT.replace(old, new, 1))

    assert NAME in str(caught.value)


def test_a_heading_in_a_code_block_is_not_a_section():
    fenced = TEXT.replace("## Fix\n", "## Fix\n\n```\n## not a heading\n```\n")

    assert parse_runbook(NAME, fenced).failure_class is FailureClass.CGROUP_OOM


@pytest.mark.parametrize(
    "name", ["host_mem.cgroup_oom", "host_mem.cgroup_oom.md", "cgroup_oom", "CGROUP_OOM"]
)
def test_a_page_is_found_by_its_class_or_the_unique_part_of_it(name):
    assert find_runbook(RUNBOOKS, name).failure_class is FailureClass.CGROUP_OOM


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("host_mem.cgroup_oon", "host_mem.cgroup_oom"),
        ("sigkil_probable", "host_mem.sigkill_probable"),
        ("host_mem", "host_mem.low or"),
    ],
)
def test_an_unknown_page_is_answered_with_the_closest(name, hint):
    with pytest.raises(UsageError, match="did you mean") as caught:
        find_runbook(RUNBOOKS, name)

    assert hint in str(caught.value)
