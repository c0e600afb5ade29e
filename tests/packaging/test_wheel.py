"""The wheel alone, in a clean environment away from the checkout, is the whole product."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def gpuops(wheel, tmp_path_factory):
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", str(constraints), str(wheel)],
        check=True,
        capture_output=True,
        cwd=home,
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "GPUOPS_STATE": str(home / "state")}
    env |= {"GPUOPS_STORE": f"sqlite:///{home}/g.db", "GPUOPS_SPOOL": str(home / "spool")}

    def run(*args):
        command = [home / "venv" / "bin" / "gpuops", *args]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=home, env=env, timeout=120
        )

    return run


def test_the_wheel_holds_the_operators_folders_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()

    for folder in ("checks", "runbooks", "slurm"):
        assert any(name.startswith(f"gpuops/_data/{folder}/") for name in names)
    assert "gpuops/py.typed" in names
    assert not any(name.startswith(("tests/", "checks/")) for name in names)


def test_help_works_from_the_wheel_alone(gpuops):
    shown = gpuops("--help")

    assert (shown.returncode, shown.stderr) == (0, "")


def test_check_works_from_the_wheel_alone(gpuops):
    shown = gpuops("check", "--json")

    assert shown.returncode in {0, 1, 3}, shown.stderr
    assert json.loads(shown.stdout)["findings"]


def test_runbooks_are_found_from_the_wheel_alone(gpuops):
    shown = gpuops("runbook", "--list")

    assert shown.returncode == 0, shown.stderr
    assert "host_mem.sigkill_probable" in shown.stdout


@pytest.mark.parametrize("args", [["run", "train.py"], ["demo"]])
def test_without_torch_a_training_command_says_what_to_install(gpuops, args):
    shown = gpuops(*args)

    assert shown.returncode == 64
    assert "pip install 'torch>=2.8' numpy" in shown.stderr


def test_the_store_works_from_the_wheel_alone(gpuops):
    assert gpuops("db", "upgrade").returncode == 0
    assert gpuops("db", "status", "--json").returncode == 0
