"""Every ending of the command has its exit code, and none of them a traceback at the user."""

import json
import subprocess
import sys

import pytest

GPUOPS = [sys.executable, "-m", "gpuops"]


def gpuops(*args, env=None):
    return subprocess.run(
        [*GPUOPS, *args], check=False, capture_output=True, text=True, timeout=60, env=env
    )


def test_help_lists_every_command():
    shown = gpuops("--help")

    assert shown.returncode == 0
    for name in ("check", "run", "incident", "report", "db", "config", "runbook", "demo"):
        assert f"\n  {name} " in shown.stdout


@pytest.mark.parametrize(
    "args", [["nope"], ["--nope"], ["config", "nope"], ["config", "show", "--nope"]]
)
def test_what_is_not_a_command_or_flag_is_usage(args):
    shown = gpuops(*args)

    assert shown.returncode == 64
    assert "nope" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_missing_configuration_file_is_one_line_and_usage(tmp_path):
    shown = gpuops("--config", str(tmp_path / "none.toml"), "config", "show")

    assert shown.returncode == 64
    assert shown.stderr.count("\n") == 1
    assert "none.toml does not exist" in shown.stderr


def test_config_show_prints_origins_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUOPS_STORE", "postgresql+psycopg://app:s3cret@db/x")

    shown, as_json = gpuops("config", "show"), gpuops("config", "show", "--json")

    assert "s3cret" not in shown.stdout + as_json.stdout
    assert "[environment GPUOPS_STORE]" in shown.stdout
    settings = {row["key"]: row for row in json.loads(as_json.stdout)["settings"]}
    assert settings["store.url"]["value"] == "postgresql+psycopg://app:***@db/x"


def test_config_validate_accepts_what_ships():
    shown = gpuops("config", "validate")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "log rules" in shown.stdout


def test_a_reader_that_goes_away_never_reads_as_a_failed_node():
    with subprocess.Popen(
        [*GPUOPS, "config", "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert process.returncode == 141
    assert errors == b""


def test_the_commands_of_the_hooks_import_neither_torch_nor_sqlalchemy():
    program = (
        "import sys; from gpuops.cli.main import run_command; run_command(['--help']);"
        "run_command(['config', 'show']);"
        "print(sorted({'torch', 'sqlalchemy', 'rich', 'pynvml'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )

    assert shown.stdout.endswith("[]\n")
