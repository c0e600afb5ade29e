"""An unsupported torch is refused by name."""

import subprocess
import sys

import pytest

from gpuops.agent.compat import NAMES, missing_names


def test_missing_names_are_all_told():
    names = {"json": ("loads", "no_such", "JSONDecoder.decode", "JSONDecoder.no"), "no_module": ()}

    assert missing_names(names) == ["json.no_such", "json.JSONDecoder.no", "no_module"]


@pytest.mark.torch
def test_everything_we_lean_on_is_listed_and_there():
    assert missing_names(NAMES) == []


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
    assert "pip install 'gpuops[torch]'" in line
