"""An unsupported torch is refused by name."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuops.agent
from gpuops.agent.launch.torch_compat import NAMES, missing_names

MODULES = sorted(Path(gpuops.agent.__file__).parent.rglob("*.py"))
LISTED = {f"{module}.{path}" for module, paths in NAMES.items() for path in paths}


def test_what_an_instance_gets_in_its_constructor_counts_as_there():
    names = {"argparse": ("Action.no_such",), "textwrap": ("TextWrapper.width",)}

    assert missing_names(names) == ["argparse.Action.no_such"]


def test_missing_names_are_all_told():
    names = {"json": ("loads", "no_such", "JSONDecoder.decode", "JSONDecoder.no"), "no_module": ()}

    assert missing_names(names) == ["json.no_such", "json.JSONDecoder.no", "no_module"]


@pytest.mark.torch
def test_everything_we_lean_on_is_listed_and_there():
    assert missing_names(NAMES) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_name_of_torch_in_the_agent_is_listed(path):
    tree = ast.parse(path.read_text())
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch")
        for alias in node.names
    }
    listed = {name for entry in LISTED for name in (entry, entry.rpartition(".")[0])} | set(NAMES)

    assert {name for name in imported if name not in listed and not is_reached(name)} == set()


def is_reached(name):
    """Say whether another listed module defines what is imported from this one."""
    short = name.rpartition(".")[2]
    return any(entry.endswith(f".{short}") or f".{short}." in entry for entry in LISTED)


def own_names(tree):
    """Return what the classes of *tree* define or set; not what they override of torch's."""
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    } | {
        statement.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    return own | (
        {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        - {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
        }
    )


def names_of_bases(tree):
    """Return what classes of ours have that *tree* derives from."""
    bases = {
        ast.unparse(base)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    homes = {
        node.module.rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gpuops.agent.")
        for alias in node.names
        if alias.name in bases
    }
    trees = [ast.parse(path.read_text()) for path in MODULES if path.stem in homes]
    return {name for home in trees for name in own_names(home) | names_of_bases(home)}


# Not torch's: the standard library's, which have no public name.
STANDARD = {"os._exit", "argparse._ArgumentGroup"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_private_attribute_in_the_agent_is_its_own_or_listed(path):
    tree = ast.parse(path.read_text())
    own = own_names(tree) | names_of_bases(tree)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node) not in STANDARD
    }

    assert {name for name in used - own if not is_reached(f".{name}")} == set()


def test_a_torch_that_does_not_load_is_one_sentence(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file:\\nno such file')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpuops", "run", "x.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(gpuops.agent.__file__).parents[2]}"},
    )

    assert done.returncode == 64
    (line,) = done.stderr.splitlines()
    assert "does not load: ImportError: libcudart.so.12: cannot open shared object file: no" in line
    assert f"{sys.executable} -c 'import torch'" in line


def test_without_torch_the_command_says_what_to_install(tmp_path):
    block = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n == 'torch' else find(n, *a);"
        "from gpuops.cli.main import run_command;"
        "sys.exit(run_command(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", block, "run", "x.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert done.returncode == 64
    (line,) = done.stderr.splitlines()
    assert "pip install 'torch>=2.8' numpy" in line
