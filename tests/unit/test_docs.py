"""The README and the pages in docs/ are true: commands, links, counts, names of functions."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import gpuops as package
from gpuops.checks import NAMES
from gpuops.cli.main import COMMANDS, gpuops
from gpuops.rules import load_rules

ROOT = Path(__file__).parents[2]
FOLDERS = ("checks", "docs", "slurm", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
README = (ROOT / "README.md").read_text()
README_LINES_MAX = 130
HOPS_MAX = 20
ENTRY_POINTS = {"gpuops.detectors"}


def test_the_table_of_commands_is_the_list_of_commands():
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    named = {match[1] for match in re.finditer(r"^\| `gpuops (\w+)", table, re.MULTILINE)}

    assert named == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_is_short_and_its_counts_are_those_of_the_tree():
    runbooks = [page for page in (ROOT / "runbooks").glob("*.md") if page.name != "README.md"]
    rules = load_rules([ROOT / "checks" / "rules"])

    assert len(README.splitlines()) < README_LINES_MAX
    assert f"{len(NAMES)} checks and {len(rules)} log rules" in README
    assert f"{len(runbooks)} pages, one for each failure class" in README


def test_frameworks_shows_where_each_adapter_of_its_table_is_imported_from():
    page = (ROOT / "docs" / "frameworks.md").read_text()
    imported = {
        name: module
        for module, names in re.findall(r"^from (\S+) import (.+)$", page, re.MULTILINE)
        for name in names.split(", ")
    }
    adapters = set(re.findall(r"`(Gpuops\w+)`", page.partition("## Launchers")[0]))

    assert adapters == {"GpuopsCallback", "GpuopsCheckpoint"}
    for name in sorted(adapters):
        assert hasattr(importlib.import_module(imported[name]), name)


def test_every_option_that_a_page_shows_exists():
    shown = "\n".join(page.read_text() for page in PAGES)
    assert "$ gpuops check" in shown
    for name in sorted(COMMANDS):
        result = CliRunner().invoke(gpuops, [name, "--help"])

        assert result.exit_code == 0, name
        for line in shown.splitlines():
            if line.startswith(f"$ gpuops {name}"):
                for option in re.findall(r"(?<= )--[a-z-]+", _ours(line)):
                    assert option in _help_of(name, line), f"{option} in {line!r}"


def _ours(line):
    """Return the words of *line* before the user's own program and its arguments."""
    return re.split(r" -m | \S+\.py\b| -- ", line)[0]


def _help_of(name, line):
    words = [word for word in line.split()[3:] if re.fullmatch(r"[a-z]+", word)]
    texts = [CliRunner().invoke(gpuops, [name, "--help"]).output]
    texts += [CliRunner().invoke(gpuops, [name, word, "--help"]).output for word in words[:1]]
    return "\n".join(texts)


def test_each_function_of_the_walks_exists_and_a_walk_is_short():
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = text.split("\n## ")[2:4]
    assert len(walks) == 2
    for walk in walks:
        hops = re.findall(r"^\d+\. `(gpuops[\w.]+)`", walk, re.MULTILINE)

        assert 5 < len(hops) < HOPS_MAX, walk.splitlines()[0]
    for name in re.findall(r"`(gpuops\.[\w.]+)`", text):
        assert _is_defined(name), name


def test_each_module_and_function_that_the_code_refers_to_exists():
    named = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / "gpuops").rglob("*.py")
        for name in re.findall(r"`(gpuops\.[\w.]+)`", path.read_text())
    ]
    assert len(named) > 50

    assert [item for item in named if not _is_defined(item[1])] == []


def _is_defined(name):
    """Say whether the dotted *name* is a module, or what a module defines, or a method of that."""
    parts = name.split(".")
    public = {f"gpuops.{word}" for word in package.__all__}
    if name in ENTRY_POINTS | public or (ROOT.joinpath(*parts)).is_dir():
        return True
    for length in range(len(parts), 1, -1):
        place = ROOT.joinpath(*parts[:length])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists():
                return _has(ast.parse(path.read_text()).body, parts[length:])
    return False


def _has(scope, parts):
    for part in parts:
        found = [node for node in scope if part in _names(node)]
        if not found:
            return False
        scope = getattr(found[0], "body", [])
    return True


def _names(node):
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}


def test_no_page_holds_a_place_to_fill_in():
    assert README in {page.read_text() for page in PAGES}
    for page in PAGES:
        assert "@@" not in page.read_text()


def test_no_line_of_code_cites_a_page_that_is_not_here():
    modules = list((ROOT / "gpuops").rglob("*.py"))

    assert modules
    assert [path for path in modules if "DESIGN" in path.read_text()] == []
