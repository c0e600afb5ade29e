"""Every ending of the command has its exit code, and none of them a traceback at the user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


# Nothing is read or kept; PYTHONDONTWRITEBYTECODE: a file limit holds for caches, too.
NOWHERE = {**os.environ, "GPUOPS_SPOOL": "/dev/null/x", "PYTHONDONTWRITEBYTECODE": "1"}


def shell(command, **options):
    return subprocess.run(
        ["/bin/sh", "-c", command, "sh", *GPUOPS],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_closed_output_leaves_the_exit_code_as_it_is():
    assert shell('"$@" config show >&-').returncode == 0
    assert shell('"$@" config show >&- 2>&-').returncode == 0
    assert shell('"$@" check --suite nope >&-').returncode == 64


def test_a_full_output_is_one_line_and_our_failure():
    shown = shell('"$@" config show >/dev/full')

    assert shown.returncode == 70
    assert shown.stderr == "gpuops: cannot write the result: no space left on the output\n"


@pytest.mark.parametrize("words", ["config show", "check --suite nope", "nope", "check --json"])
def test_where_neither_output_can_be_written_the_node_has_not_failed(words):
    """Python itself exits with 1, which means a failed node."""
    code = shell(f'"$@" {words} >/dev/full 2>/dev/full', env=NOWHERE).returncode

    assert code in {64, 70}


def test_an_output_that_may_not_grow_is_no_bug(tmp_path):
    shown = shell(f'ulimit -f 0; "$@" config show >{tmp_path}/out', env=NOWHERE)

    assert shown.returncode == 70
    assert shown.stderr == (
        "gpuops: cannot write the result: the output's file may not grow (ulimit -f)\n"
    )


def test_a_home_that_may_not_be_read_is_a_warning(tmp_path):
    """``su`` without ``-`` leaves the other user's home in the environment."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if os.geteuid() != 0:
        home.chmod(0)
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*(prefix if os.geteuid() == 0 else []), *GPUOPS, "config", "show"]
    env = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}

    shown = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=env, cwd="/"
    )

    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.count("\n") == 1
    assert "may not read its directory" in shown.stderr
