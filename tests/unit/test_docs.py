"""The README is true: commands, links, and the files it names."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuops.cli.main import COMMANDS, gpuops

ROOT = Path(__file__).parents[2]
FOLDERS = ("checks", "gpuops", "slurm", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
README = (ROOT / "README.md").read_text()


def test_the_table_of_commands_is_the_list_of_commands():
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    named = {match[1] for match in re.finditer(r"^\| `gpuops (\w+)", table, re.MULTILINE)}

    assert named == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_option_the_readme_shows_exists():
    for name in sorted(COMMANDS):
        result = CliRunner().invoke(gpuops, [name, "--help"])

        assert result.exit_code == 0, name
        for line in README.splitlines():
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


def test_no_page_holds_a_place_to_fill_in():
    for page in PAGES:
        assert "@@" not in page.read_text()


def test_no_line_of_code_cites_a_page_that_is_not_here():
    for path in (ROOT / "gpuops").rglob("*.py"):
        assert "DESIGN" not in path.read_text(), path
