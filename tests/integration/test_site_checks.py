"""A site's own executables, run by ``gpuops check``: whatever they do, it ends in time."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.command import gpuops
from support.fake_root import FakeRoot
from support.runs import wait_until

pytestmark = pytest.mark.quick_disk

SUITE = """
deadline_s = {deadline_s}
[[check]]
name = "site/mine"
timeout_s = {timeout_s}
{more}
"""


class Site:
    """A site's folder with one executable, and the command that runs it."""

    def __init__(self, path):
        self.path = path / "site"
        self.root = FakeRoot(path / "root")
        for name in ("suites", "checks.d"):
            (self.path / name).mkdir(parents=True)
        self.file = self.path / "checks.d" / "mine"
        self.suite()

    def suite(self, *, timeout_s=10, deadline_s=20, more=""):
        text = SUITE.format(timeout_s=timeout_s, deadline_s=deadline_s, more=more)
        (self.path / "suites" / "own.toml").write_text(text)
        return self

    def script(self, text, *, first="#!/bin/sh\n", mode=0o755):
        self.file.write_text(first + text)
        self.file.chmod(mode)
        return self

    def check(self, *args, env=None):
        return gpuops(
            "check",
            "--suite",
            "own",
            "--no-record",
            *args,
            env={
                "GPUOPS_SITE_DIR": str(self.path),
                "GPUOPS_ROOT": str(self.root.path),
                "SLURMD_NODENAME": "n1",
                **(env or {}),
            },
            timeout=60,
        )

    def finding(self, **kwargs):
        run = self.check("--json", **kwargs)
        # A busy disk may cost the state file, with a finding of its own.
        findings = json.loads(run.stdout)["findings"]
        (found,) = [item for item in findings if item["check"] != "node_state"]
        return run, found


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "exit_code"), [(0, "pass", 0), (1, "warn", 0), (2, "fail", 1)]
)
def test_its_exit_code_is_the_verdict(site, code, status, exit_code):
    run, found = site.script(f'echo "fan 3: 900 rpm | rpm=900"; exit {code}').finding()

    assert (run.returncode, found["status"]) == (exit_code, status)
    assert (found["check"], found["message"]) == ("site/mine", "fan 3: 900 rpm")
    assert found["failure_class"] == ("site.check" if code == 2 else None)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "no sensor"; exit 3', "no sensor"),
        ("exit 42", "no result: it exited with code 42 (0 pass, 1 warn, 2 fail, 3 unknown)"),
        ("kill -SEGV $$", "no result: it ended by SIGSEGV"),
        ("no-such-program; exit 7", "and printed: "),
    ],
)
def test_an_ending_that_is_no_verdict_never_fails_the_node(site, script, message):
    run, found = site.script(script).finding()

    assert (run.returncode, found["status"]) == (3, "unknown")
    assert message in found["message"]


def test_what_cannot_be_started_is_named(site):
    reasons = {}
    _, missing = site.finding()
    reasons["missing"] = missing
    reasons["closed"] = site.script("exit 2", mode=0o644).finding()[1]
    reasons["no interpreter"] = site.script("", first="#!/no/such/shell\n").finding()[1]
    reasons["no program"] = site.script("", first="\x7fELF nonsense").finding()[1]

    assert {found["status"] for found in reasons.values()} == {"unknown"}
    assert {name: found["unknown_reason"] for name, found in reasons.items()} == {
        "missing": "missing_tool",
        "closed": "no_permission",
        "no interpreter": "missing_tool",
        "no program": "crash",
    }
    assert reasons["missing"]["message"] == f"there is no {site.file}"
    assert reasons["closed"]["message"] == f"{site.file} is not executable"
    assert all(str(site.file) in found["message"] for found in reasons.values())


def test_it_gets_its_arguments_and_nothing_of_the_callers_environment(site):
    site.suite(more='run = "mine"\narguments = ["-w", "5", "-c", "5", "a b"]')
    site.script('echo "$# $5 $(pwd) $GPUOPS_NODE $GPUOPS_ROOT $PATH ${SECRET:-unset}"')

    _, found = site.finding(env={"SECRET": "hunter2"})

    assert found["message"].startswith(f"5 a b / n1 {site.root.path} /usr/local/sbin:")
    assert found["message"].endswith(" unset")


def test_one_that_prints_megabytes_is_judged_by_its_first_line(site):
    site.script("echo first; head -c 50000000 /dev/zero | tr '\\0' x; exit 1")

    _, found = site.finding()

    assert (found["status"], found["message"]) == ("warn", "first")


def test_one_that_prints_for_ever_is_stopped_in_its_time(site):
    run, found = site.suite(timeout_s=1.5).script("exec yes").finding()

    assert (run.returncode, found["unknown_reason"]) == (3, "timeout")
    assert f"{site.file} gave no answer in" in found["message"]


def test_control_characters_and_bytes_that_are_no_text_do_not_reach_the_terminal(site):
    site.script("printf '\\033[31mred\\377\\n'; exit 1")

    run = site.check()

    assert run.returncode == 0
    assert "\x1b" not in run.stdout
    assert "red" in run.stdout


def test_one_that_ignores_term_is_killed_and_named_as_late(site):
    site.suite(timeout_s=4)
    site.script(f"trap '' TERM; echo $$ > {site.path}/pid; while :; do :; done")

    started_s = time.monotonic()
    run, found = site.finding()

    assert time.monotonic() - started_s < 40
    assert json.loads(run.stdout)["late"] == ["site/mine"]
    assert (found["status"], found["unknown_reason"]) == ("unknown", "timeout")
    assert gone(int((site.path / "pid").read_text()))


def test_a_child_that_stays_and_holds_the_output_delays_nobody(site):
    site.script(f"sleep 300 & echo $! > {site.path}/pid; echo fine; exit 0")

    def is_in_time():
        started_s = time.monotonic()
        _, found = site.finding()
        took_s = time.monotonic() - started_s
        assert (found["status"], found["message"]) == ("pass", "fine")
        assert gone(int((site.path / "pid").read_text()))
        return took_s < 8

    # A busy machine makes one take longer, and not every one.
    wait_until(is_in_time, what="an answer in eight seconds")


def test_a_child_that_left_for_its_own_session_delays_nobody(site):
    left = site.path / "pid"
    site.script(
        f"setsid sh -c 'echo $$ > {left}; exec sleep 60' &\n"
        f"while [ ! -s {left} ]; do :; done; echo fine; exit 1"
    )

    _, found = site.finding()
    os.kill(int(left.read_text()), signal.SIGKILL)

    assert (found["status"], found["message"]) == ("warn", "fine")


def test_one_that_forks_without_end_is_stopped_with_all_its_children(site):
    site.suite(timeout_s=1.5)
    site.script(f"for i in $(seq 200); do sleep 300 & echo $! >> {site.path}/pids; done; wait")

    _, found = site.finding()

    assert found["unknown_reason"] == "timeout"
    assert all(gone(int(pid)) for pid in (site.path / "pids").read_text().split())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_root_runs_nothing_that_somebody_else_could_have_written(site):
    site.script(f"touch {site.path}/ran; exit 2")
    os.chown(site.file, 12345, 0)

    run = site.check()

    assert (run.returncode, run.stdout) == (64, "")
    assert f"root does not read {site.file}: it belongs to uid 12345" in run.stderr
    assert not (site.path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_link_to_a_file_in_somebody_elses_folder_is_not_run(site, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine").write_text("#!/bin/sh\nexit 2\n")
    (home / "mine").chmod(0o755)
    os.chown(home, 12345, 0)
    site.file.symlink_to(home / "mine")

    run = site.check()

    assert run.returncode == 64
    assert f"root does not read {site.file}: {home} belongs to uid 12345" in run.stderr


def test_a_silence_turns_its_failure_into_a_skip_until_it_ends(site):
    silence = """
    [[silence]]
    check = "site/*"
    node = "n[1-3]"
    until = {until}
    owner = "ann"
    reason = "fan swap CHG7"
    """
    site.script("echo slow; exit 2")
    (site.path / "silences.toml").write_text(silence.format(until="2099-01-01"))
    silent, found = site.finding()
    (site.path / "silences.toml").write_text(silence.format(until="2020-01-01"))
    over, heard = site.finding()

    assert (silent.returncode, found["status"], found["failure_class"]) == (0, "skip", None)
    assert found["message"] == (
        "silenced until 2099-01-02T00:00Z by ann: fan swap CHG7 (was fail: slow)"
    )
    assert (over.returncode, heard["status"]) == (1, "fail")


def test_a_profile_that_is_named_and_not_there_is_a_mistake_of_the_configuration(site):
    (site.path / "profiles").mkdir()
    (site.path / "profiles" / "blue.toml").write_text("")
    site.script("exit 0")

    assert site.check(env={"GPUOPS_PROFILE": "blue"}).returncode == 0
    run = site.check(env={"GPUOPS_PROFILE": "bleu"})

    assert run.returncode == 64
    assert "check.profile: there is no profile 'bleu'; did you mean 'blue'?" in run.stderr


def test_a_sites_check_can_be_picked_and_is_listed(site):
    site.script("echo fine")

    picked = site.check("--only", "site/mine", "--json")
    listed = site.check("--list")

    assert [item["check"] for item in json.loads(picked.stdout)["findings"]] == ["site/mine"]
    assert listed.returncode == 0
    assert "site/mine" in listed.stdout


def eventually(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pid):
    """Say whether *pid* has ended (a zombie that nobody reaped yet has)."""

    def ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return eventually(ended)
