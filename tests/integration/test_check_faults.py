"""``gpuops check`` on a bad day: many at once, killed at any moment, no room, and no mercy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import mock_nvml
from support.fake_root import FakeRoot
from support.mock_nvml import addresses, shape
from support.services import unavailable

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk]

COMMAND = (sys.executable, "-m", "gpuops")
LOST = "\n".join([shape("h100"), "lost 3"])
EVIL = "\x1b[31mNVIDIA\x1b]0;x\x07 \u202eH100"


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


class Site:
    """A node made of files below *path*, and what it remembers, spools and stores there."""

    def __init__(self, path, mock):
        self.path = path
        self.state = path / "state"
        self.spool = path / "spool"
        root = FakeRoot(path / "root")
        for address in addresses(8):
            root.gpu(address)
        self._mock = mock

    def env(self, scenario):
        return {
            **os.environ,
            "GPUOPS_ROOT": str(self.path / "root"),
            "GPUOPS_STATE": str(self.state),
            "GPUOPS_SPOOL": str(self.spool),
            "GPUOPS_STORE": f"sqlite:///{self.path}/store.db",
            "SLURMD_NODENAME": "n1",
            **self._mock.env(scenario),
        }

    def start(self, scenario, *args, front=()):
        return subprocess.Popen(
            [*front, *COMMAND, "check", "--suite", "prolog", *args],
            env=self.env(scenario),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def check(self, scenario, *args, front=()):
        process = self.start(scenario, *args, front=front)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def asked(self, *words):
        return subprocess.run(
            [*COMMAND, *words],
            env=self.env("init 12"),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout


@pytest.fixture
def site(tmp_path, mock):
    return Site(tmp_path, mock)


def wait_until(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_time(said):
    """Say whether checks that wrote *said* kept and recorded all within the second that they have.

    Else a busy machine made them late, which is all that they may have written.
    """
    late = ("gpuops: this result is not recorded", "gpuops: cannot save the state of this node")
    lines = [line for text in said for line in text.splitlines()]
    assert [line for line in lines if not line.startswith(late)] == []
    return not lines


@pytest.mark.timeout(300)
def test_checks_at_once_agree_and_lose_or_double_nothing(tmp_path, mock):
    n_checks, tries = 4, []  # more of them would take a busy machine longer than each has

    def all_are_in_time():
        site = Site(tmp_path / f"{len(tries)}", mock)
        running = [site.start(LOST, "--job", str(number), "--json") for number in range(n_checks)]
        ended = [(process.communicate(timeout=100), process.returncode) for process in running]
        tries.append((site, ended))
        # On a busy machine one of them may find something slow that the others do not.
        said = {tuple((x["check"], x["status"]) for x in findings(out)) for (out, _), _ in ended}
        return in_time(err for (_, err), _ in ended) and len(said) == 1

    def findings(out):
        return json.loads(out)["findings"]

    wait_until(all_are_in_time, 150)
    site, ended = tries[-1]
    assert {code for _, code in ended} == {1}
    assert {json.loads(out)["verdict"] for (out, _), _ in ended} == {"fail"}
    known = json.loads((site.state / "node.json").read_text())["state"]
    assert len(known["incidents"]) == 1
    site.asked("db", "flush")
    (node,) = json.loads(site.asked("node", "ls", "--json"))["nodes"]

    def counts():
        site.asked("db", "flush")
        shown = json.loads(site.asked("node", "show", node["name"], "--json"))["findings"]
        return {item["count"] for item in shown if item["status"] == "fail"}

    wait_until(lambda: counts() == {n_checks})
    # The same result each time: one record, extended by all others.
    assert "check_runs 1\n" in site.asked("db", "status")
    (incident,) = json.loads(site.asked("incident", "ls", "--json"))["incidents"]
    assert incident["failure_class"] == "gpu_hw.fell_off_bus"


@pytest.mark.parametrize("after_s", [0.2, 0.3, 0.4])
def test_one_that_is_killed_at_any_moment_leaves_nothing_that_the_next_trips_over(site, after_s):
    site.check(LOST)
    process = site.start(LOST)
    try:
        process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate(timeout=30)
    code, out, err = site.check(LOST, "--json")

    assert (code, err) == (1, "")
    assert "node_state" not in {finding["check"] for finding in json.loads(out)["findings"]}
    assert json.loads((site.state / "node.json").read_text())["state"]["samples"]
    site.asked("db", "flush")
    assert len(json.loads(site.asked("incident", "ls", "--json"))["incidents"]) == 1
    assert not (site.spool / "rejected").exists()


def children_of(pid):
    """Return the pids below *pid*, that of a hung driver's helper among them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found += [int(path.parent.name), *children_of(int(path.parent.name))]
    return found


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_one_that_is_ended_during_its_looks_leaves_no_child_behind(site, number, code):
    process = site.start(f"{shape('h100')}\ndelay_ms 60000")
    wait_until(lambda: len(children_of(process.pid)) > 1)
    children = children_of(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)

    assert process.returncode == code
    assert "Traceback" not in err
    wait_until(lambda: not any(is_there(child) for child in children))


def mounted(options, path):
    """Return the words that run a command with a file system of its own at *path*."""
    script = f'mount -t tmpfs -o {options} tmpfs {path} && exec "$@"'
    front = ("unshare", "--mount", "sh", "-c", script, "sh")
    tried = shutil.which("unshare") and subprocess.run(
        [*front, "true"], capture_output=True, check=False, timeout=30
    )
    if not tried or tried.returncode != 0:
        unavailable("mounting a file system of its own")
    return front


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ro", "Read-only file system"),
        ("size=4k,nr_inodes=6", "No space left on device"),
    ],
)
def test_no_room_for_state_and_spool_changes_no_verdict_and_is_one_line(site, options, why):
    room = site.path / "room"
    room.mkdir()
    site.state, site.spool = room / "state", room / "spool"
    code, out, err = site.check(LOST, "--nagios", front=mounted(options, room))

    assert code == 2
    assert out.startswith("GPUOPS CRITICAL - ")
    assert why in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("form", [(), ("--json",), ("--jsonl",), ("--nagios",)])
def test_no_name_that_hardware_gives_itself_can_drive_a_terminal(site, form):
    scenario = "\n".join([shape("h100"), f"set * name {EVIL}", f"set 0 serial {EVIL}", "lost 3"])
    prom = site.path / "metrics.prom"
    code, out, err = site.check(scenario, "--prom", str(prom), *form)

    assert code in {1, 2}
    for text in (out, err, prom.read_text()):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_node_cannot_be_called_what_drives_a_terminal(site):
    env = {**site.env(LOST), "SLURMD_NODENAME": "n1\x1b[31m\nn2"}
    ran = subprocess.run(
        [*COMMAND, "check", "--suite", "prolog", "--no-record"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 1
    assert "\x1b" not in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("n1�[31m n2: fail (suite prolog, ")
