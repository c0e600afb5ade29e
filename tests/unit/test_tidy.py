"""House rules that a linter does not know, as ordinary tests."""

import ast
from pathlib import Path

import pytest

from gpuops.checks import NAMES

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "gpuops").rglob("*.py"))
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
BROAD = {"Exception", "BaseException"}

# The one reader of the environment, and a training script that could be anybody's.
READS_ENVIRON = {"gpuops/config.py", "gpuops/demo/train.py"}
# Processes are started by the host layer, and by the tour that types commands as a user would.
STARTS_PROCESSES = {"gpuops/demo/scenario.py"}


def name(path):
    return path.relative_to(ROOT).as_posix()


def lines(path):
    return [line for line in path.read_text().splitlines() if line.strip()]


def nodes(path, *kinds):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_has_one_idea(path):
    assert len(lines(path)) <= MODULE_LINES_MAX
    assert path.stem not in {"utils", "helpers", "common", "misc", "manager"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_functions_fit_on_a_screen(path):
    too_long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno - node.body[0].lineno + 1 > FUNCTION_LINES_MAX
    }

    assert too_long == {}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_config_reads_the_environment(path):
    if name(path) in READS_ENVIRON:
        return
    reads = [
        ast.unparse(node)
        for node in nodes(path, ast.Attribute)
        if ast.unparse(node) in {"os.environ", "os.getenv"}
    ]

    assert reads == []


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_the_host_starts_processes_and_never_a_shell(path):
    text = path.read_text()
    if not name(path).startswith("gpuops/host/") and name(path) not in STARTS_PROCESSES:
        imported = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes(path, ast.ImportFrom)}

        assert "subprocess" not in imported
    assert "shell=True" not in text
    assert "os.system(" not in text


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_broad_except_says_what_boundary_it_guards(path):
    source = path.read_text().splitlines()
    for handler in nodes(path, ast.ExceptHandler):
        caught = {ast.unparse(node) for node in ast.walk(handler.type)} if handler.type else BROAD
        if caught & BROAD:
            assert "boundary:" in source[handler.lineno - 1], f"{path}:{handler.lineno}"


def test_nothing_unpickles():
    for path in MODULES:
        for word in ("import pickle", "import marshal", "import shelve", "eval(", "exec("):
            assert word not in path.read_text().replace("literal_eval(", ""), f"{word} in {path}"


def test_every_check_module_is_listed_has_its_test_and_its_line_in_a_suite():
    suites = "".join(p.read_text() for p in (ROOT / "checks" / "suites").glob("*.toml"))
    package = ROOT / "gpuops" / "checks"
    checks = [p.stem for p in package.glob("*.py") if "\nCHECK = Check(" in p.read_text()]

    assert sorted(checks) == sorted(NAMES)
    for check in checks:
        assert f'name = "{check}"' in suites
        assert (ROOT / "tests" / "unit" / "checks" / f"test_{check}.py").exists()


def test_the_data_folders_hold_no_python():
    for folder in ("checks", "runbooks", "slurm"):
        assert list((ROOT / folder).rglob("*.py")) == []
