"""The files that an operator copies parse; a hook fails only with a verdict of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import gpuops
from support.fake_root import FakeRoot
from support.services import unavailable

from gpuops.checks.core.suite import load_suite
from gpuops.config.resolve import SETTINGS
from gpuops.errors import UsageError
from gpuops.gate import health_check, hook, permit
from gpuops.gate.hook import OWNERS_S
from gpuops.gate.install import HOOKS, SHIPPED_GPUOPS, SHIPPED_HOOKS, check_program, installation
from gpuops.gate.node_state import READ_S
from gpuops.gate.permit import START_S
from gpuops.gate.record import RECORD_S
from gpuops.gate.session import CheckRequest, make_plan
from gpuops.host.process.probe import STOP_S
from gpuops.resources import data_dir
from gpuops.slurm.scontrol import TIMEOUT_S

SLURM = Path(__file__).parents[2] / "slurm"
SCRIPTS = sorted(path for path in SLURM.iterdir() if path.suffix in {".sh", ".sbatch"})
pytestmark = pytest.mark.quick_disk
# Python and its imports; see tests/benchmarks/bench_check_startup.py.
STARTING_S = 0.4
# What is killed takes another second, and the system's log is told.
OVER_S = 1.5


def hook_with(tmp_path, name, body, limit_s=None, logger_s=20):
    """Return a shipped hook, calling a program that does *body* in place of gpuops.

    It is given *limit_s*; left out, a second where the program sleeps, and else what a busy machine
    needs to start it. The program in the place of logger is given *logger_s*.
    """
    limit_s = limit_s or (1 if "sleep" in (body or "") else 20)
    program = tmp_path / "gpuops"
    if body is not None:
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    (tmp_path / "verdicts").mkdir(exist_ok=True)
    text = (SLURM / f"{name}.sh").read_text().replace(SHIPPED_GPUOPS, str(program))
    text = text.replace("/etc/gpuops/hook.env", str(tmp_path / "hook.env"))
    text = text.replace("/run/gpuops", str(tmp_path / "verdicts"))
    text = text.replace("/usr/bin/logger", str(tmp_path / "logger"))
    assert "--signal=KILL 0.5 " in text
    text = text.replace("--signal=KILL 0.5 ", f"--signal=KILL {logger_s:g} ")
    script = tmp_path / f"{name}.sh"
    script.write_text(re.sub(r"LIMIT_S=\d+", f"LIMIT_S={limit_s}", text))
    script.chmod(0o755)
    return script


def run(script, *shell):
    return subprocess.run(
        ["/usr/bin/env", "-i", *shell, str(script)], check=False, capture_output=True, timeout=60
    )


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "body",
    [
        None,
        "exit 0",
        "exit 1",
        "exit 3",
        "exit 64",
        "exit 70",
        "kill -9 $$",
        "trap '' TERM; exec sleep 60",
        'echo refuse >"$4"; exit 70',
        "exec sleep 60",
        'echo refuses >"$4"; exec sleep 60',
        'echo refuses >"$4"; exit 1',
        'echo refuse >"$4.other"; exit 1',
        'mkdir "$4"; exit 1',
    ],
    ids=str,
)
def test_a_hook_fails_for_nothing_that_may_go_wrong(tmp_path, name, body):
    ended = run(hook_with(tmp_path, name, body))

    assert (ended.returncode, ended.stdout) == (0, b"")


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "end", ["exit 1", "exec sleep 60", "trap '' TERM; exec sleep 60", "kill -9 $$"]
)
def test_a_hook_fails_with_the_verdict_that_it_named_though_gpuops_takes_too_long(
    tmp_path, name, end
):
    script = hook_with(tmp_path, name, f'echo refuse >"$4"; {end}')

    assert run(script).returncode == 1
    assert list((tmp_path / "verdicts").iterdir()) == []


def logged_by(tmp_path, script):
    """Return the exit code of *script*, and what it told the system's log."""
    logger, lines = tmp_path / "logger", tmp_path / "log"
    logger.write_text(f'#!/bin/sh\nshift 4; echo "$*" >>{lines}\n')
    logger.chmod(0o755)
    return run(script).returncode, lines.read_text() if lines.exists() else ""


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    ("body", "code"),
    [(None, 127), ("exit 1", 1), ("exit 64", 64), ("kill -9 $$", 137), ("sleep 60", 124)],
)
def test_a_hook_whose_gpuops_judged_nothing_tells_the_systems_log(tmp_path, name, body, code):
    script = hook_with(tmp_path, name.removesuffix(".sh"), body)
    word = name.removesuffix("_check.sh").removesuffix(".sh")
    told = f"{word}: gpuops ended with {code} and judged nothing; see: gpuops config validate\n"

    assert logged_by(tmp_path, script) == (0, told)


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("prolog", "exit 0", 0),
        ("epilog", "exit 0", 0),
        ("health_check", "exit 0", 0),
        ("prolog", 'echo refuse >"$4"; exit 1', 1),
        ("epilog", 'echo refuse >"$4"; exit 1', 1),
    ],
)
def test_a_hook_that_did_its_work_has_nothing_for_the_systems_log(tmp_path, name, body, code):
    assert logged_by(tmp_path, hook_with(tmp_path, name, body)) == (code, "")


@pytest.mark.parametrize("name", HOOKS)
def test_a_log_that_hangs_holds_no_hook_up_and_fails_nothing(tmp_path, name):
    script = hook_with(tmp_path, name.removesuffix(".sh"), "exit 70", logger_s=0.5)
    (tmp_path / "logger").write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 60\n")
    (tmp_path / "logger").chmod(0o755)

    assert run(script).returncode == 0


@pytest.mark.parametrize("shell", ["dash", "bash"])
@pytest.mark.parametrize(
    "typo", ["if then fi ((", 'echo "', "set -u; $nope", ". /nonexistent", "}"]
)
@pytest.mark.parametrize("name", HOOKS)
def test_a_mistake_in_a_hook_itself_fails_nothing(tmp_path, name, typo, shell):
    if shutil.which(shell) is None:
        unavailable(f"{shell} is not installed")
    script = hook_with(tmp_path, name.removesuffix(".sh"), "exit 1")
    lines = script.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("GPUOPS="))
    script.write_text("\n".join([*lines[: at + 1], typo, *lines[at + 1 :]]) + "\n")

    assert run(script, shutil.which(shell)).returncode == 0


@pytest.mark.parametrize("env", ["if then fi ((", "exit 1", "exec sleep 60", "nonsense"])
def test_a_mistake_in_the_hooks_environment_fails_nothing(tmp_path, env):
    script = hook_with(tmp_path, "prolog", "exit 1", limit_s=1)
    (tmp_path / "hook.env").write_text(env + "\n")

    assert run(script).returncode == 0


def limit_s(name):
    return float(re.search(r"^LIMIT_S=(\d+)$", (SLURM / name).read_text(), re.MULTILINE)[1])


def permit_s():
    (setting,) = (item for item in SETTINGS if item.key == "gate.permit_deadline_s")
    return START_S + setting.default({}, True)


def deadline_s(suite):
    return load_suite(suite, [data_dir("checks") / "suites"]).deadline_s


def hook_s(suite, *, state_hangs):
    """Return what a hook may take: its node fails, and what can hang does, but for one thing.

    Where the state folder hangs, so does what is recorded from it, and no decision is told.
    """
    looks_s = STARTING_S + READ_S + deadline_s(suite) + STOP_S
    decided_s = max(permit_s(), RECORD_S) + OWNERS_S + hook.WRITE_S
    return looks_s + decided_s + (2 * STOP_S if state_hangs else hook.TELL_S)


@pytest.mark.parametrize("state_hangs", [False, True])
def test_a_prolog_ends_before_its_hook_would_kill_it(state_hangs):
    assert hook_s("prolog", state_hangs=state_hangs) < limit_s("prolog.sh")
    assert limit_s("prolog.sh") + OVER_S < 10  # Slurm's MessageTimeout


@pytest.mark.parametrize("state_hangs", [False, True])
def test_an_epilog_ends_before_its_hook_would_kill_it(state_hangs):
    conf = (SLURM / "slurm.conf.example").read_text()
    timeout_s = float(re.search(r"PrologEpilogTimeout=(\d+)", conf)[1])

    assert hook_s("epilog", state_hangs=state_hangs) < limit_s("epilog.sh")
    assert limit_s("epilog.sh") + OVER_S < timeout_s


def test_a_health_check_ends_before_its_hook_would_kill_it():
    jitter_s = 10.0
    asked_s = START_S + permit.FETCH_S + STOP_S + TIMEOUT_S + STOP_S
    looks_s = READ_S + deadline_s("health") + STOP_S
    acted_s = permit_s() + hook.WRITE_S + health_check.HEALTH_PUBLISH_S + TIMEOUT_S + STOP_S
    told_s = 3 * RECORD_S
    limit = limit_s("health_check.sh")

    assert STARTING_S + jitter_s + asked_s + looks_s + acted_s + told_s < limit
    assert limit_s("health_check.sh") + OVER_S < 60  # slurmd's own limit


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        unavailable("shellcheck is not installed")

    shown = subprocess.run(["shellcheck", str(script)], check=False, capture_output=True, text=True)

    assert (shown.returncode, shown.stdout) == (0, "")


def test_install_fills_in_the_paths_of_this_machine(tmp_path):
    hooks = tmp_path / "hooks"
    done = gpuops("slurm", "install", "--dir", str(hooks), "--gpuops", "/srv/venv/bin/gpuops")

    assert done.returncode == 0
    assert sorted(path.name for path in hooks.iterdir()) == sorted(HOOKS)
    for name in HOOKS:
        assert "\nGPUOPS=/srv/venv/bin/gpuops\n" in (hooks / name).read_text()
        assert (hooks / name).stat().st_mode & 0o777 == 0o755
        assert f"={hooks}/{name}\n" in done.stdout


def test_install_prints_all_and_writes_nothing_when_asked_to(tmp_path):
    hooks = tmp_path / "hooks"
    done = gpuops("slurm", "install", "--print", "--dir", str(hooks))

    assert not hooks.exists()
    assert "PrologFlags=Alloc" in done.stdout
    assert all(f"{hooks}/{name}" in done.stdout for name in HOOKS)


ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs hooks")


@ROOT_ONLY
@pytest.mark.parametrize("part", ["bin/gpuops", "bin", "lib/python3.11/site-packages", "python3"])
def test_install_refuses_a_program_that_another_user_can_change(tmp_path, part):
    """The exploit: hooks that run, as root, the gpuops of a virtual environment in a home."""
    venv, hooks = tmp_path / "venv", tmp_path / "hooks"
    (venv / "lib/python3.11/site-packages").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "python3").touch()
    program = venv / "bin" / "gpuops"
    program.write_text(f"#!{venv}/python3 -P\n")
    assert gpuops("slurm", "install", f"--dir={hooks}", f"--gpuops={program}").returncode == 0
    shutil.rmtree(hooks)
    os.chown(venv / part, 12345, -1)

    done = gpuops("slurm", "install", f"--dir={hooks}", f"--gpuops={program}")
    shown = gpuops("slurm", "install", "--print", f"--dir={hooks}", f"--gpuops={program}")

    assert done.returncode == 64
    assert f"the hooks would run {program} as root, but " in done.stderr
    assert "belongs to uid 12345" in done.stderr
    assert not hooks.exists()
    assert shown.returncode == 0
    assert "gpuops: warning: the hooks would run" in shown.stderr


@ROOT_ONLY
def test_install_checks_the_interpreter_that_pip_names_behind_a_shell(tmp_path):
    """Pip's form for an interpreter whose path is too long for the first line."""
    (python := tmp_path / "a venv" / "python3").parent.mkdir()
    python.touch()
    (program := tmp_path / "gpuops").write_text(
        f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    )
    check_program(program, tmp_path, 0)
    os.chown(python, 12345, -1)

    with pytest.raises(UsageError, match="belongs to uid 12345"):
        check_program(program, tmp_path, 0)


def test_install_refuses_a_program_whose_python_is_chosen_by_path(tmp_path):
    (program := tmp_path / "gpuops").write_text("#!/usr/bin/env python3\n")

    with pytest.raises(UsageError, match="Python that PATH names"):
        check_program(program, tmp_path, os.geteuid())


@ROOT_ONLY
def test_install_refuses_this_gpuops_if_another_user_can_change_it(tmp_path):
    (tmp_path / "gpuops").mkdir()
    os.chown(tmp_path / "gpuops", 12345, -1)

    with pytest.raises(UsageError, match=r"would run /none/gpuops as root, but .*uid 12345"):
        check_program(Path("/none/gpuops"), tmp_path / "gpuops", 0)


@pytest.mark.parametrize("path", ["relative/gpuops", "/opt/my gpuops", "/opt/$(id)", "/opt/a'b"])
def test_install_refuses_a_path_that_a_shell_would_read_otherwise(path):
    done = gpuops("slurm", "install", "--print", "--gpuops", path)

    assert done.returncode == 64
    assert "an absolute path of letters" in done.stderr


def test_the_shipped_files_name_the_paths_that_install_replaces():
    found = installation(SLURM, Path("/a/hooks"), Path("/b/gpuops"))

    assert SHIPPED_HOOKS not in found.conf
    assert all(SHIPPED_GPUOPS not in text for text in found.hooks.values())


WHAT_IS_IMPORTED = """
import sys
from gpuops.cli.main import run_command
code = run_command(sys.argv[1:])
heavy = {"torch", "sqlalchemy", "alembic", "numpy", "rich", "psutil"} & set(sys.modules)
print(f"code {code} heavy {sorted(heavy)}", file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_hook_of_a_healthy_node_imports_nothing_heavy_and_writes_no_verdict(tmp_path, name):
    verdict = tmp_path / "verdicts" / "n"
    env = {
        "GPUOPS_ROOT": str(FakeRoot(tmp_path / "root").path),
        "GPUOPS_STATE": str(tmp_path / "state"),
        "GPUOPS_SPOOL": str(tmp_path / "spool"),
        "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db",
        "GPUOPS_MODE": "enforce",
        "SLURM_JOB_ID": "17",
    }
    argv = ["-c", WHAT_IS_IMPORTED, "slurm", name, "--verdict", str(verdict)]
    done = subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stderr.splitlines()[-1] == "code 0 heavy []"
    assert not verdict.exists()


@pytest.mark.parametrize(("deadline", "taken"), [(60.0, 3.5), (1.0, 1.0)])
def test_a_sites_suite_takes_no_longer_than_the_hook_has_time_for(tmp_path, deadline, taken):
    suite = tmp_path / "suites" / "prolog.toml"
    suite.parent.mkdir()
    suite.write_text(f'inherits = "full"\nrun = ["memory"]\ndeadline_s = {deadline}\n')
    request = CheckRequest(
        suite="prolog", node="n1", root=tmp_path, state_dir=tmp_path, uid=0, site_dir=tmp_path
    )

    assert hook.within_shipped_deadline(make_plan(request), "prolog").suite.deadline_s == taken
