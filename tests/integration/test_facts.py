"""Facts recorded on one node, judged on another: the same verdict, and no look at the second."""

import json
import os
import time

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import addresses, shape
from support.runs import wait_until

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk]

XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=python, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


class Node:
    """A node made of files with eight GPUs, and commands on it that remember."""

    def __init__(self, tmp_path, mock, scenario):
        self.root = FakeRoot(tmp_path / "n1")
        for address in addresses(8):
            self.root.gpu(address)
        self.root.write("proc/uptime", "1000.0 1.0\n")
        self.env = {
            "GPUOPS_ROOT": str(self.root.path),
            "GPUOPS_SPOOL": str(tmp_path / "spool"),
            "GPUOPS_STORE": "postgresql+psycopg://u@127.0.0.1:1/none",
            "GPUOPS_STATE": str(tmp_path / "state"),
            "SLURMD_NODENAME": "n1",
            **mock.env(scenario),
        }

    def __call__(self, *args):
        return gpuops(*args, env=self.env)

    def quiet(self, *args):
        """Return the first run that had nothing to say on standard error.

        On a busy machine one may read or keep too late what the node remembers, not every one.
        """
        told = []

        def is_quiet():
            told.append(self(*args))
            return told[-1].stderr == ""

        wait_until(is_quiet, 80, "a run without a warning")
        return told[-1]

    def play(self, scenario):
        mock_nvml.change(self.env, scenario)


@pytest.fixture
def elsewhere(tmp_path):
    """Return the environment of a machine without GPUs, of another name, where nothing is."""
    root = FakeRoot(tmp_path / "elsewhere")
    root.memory(total_kib=1000, available_kib=1)
    return {
        "GPUOPS_ROOT": str(root.path),
        "GPUOPS_SPOOL": str(tmp_path / "spool-elsewhere"),
        "GPUOPS_STORE": f"sqlite:///{tmp_path}/elsewhere.db",
        "GPUOPS_STATE": str(tmp_path / "state-elsewhere"),
        "SLURMD_NODENAME": "login1",
        "GPUOPS_GPUS_EXPECTED": "3",
    }


def body(run):
    return json.loads(run.stdout)


def judged(run):
    """Return what a run found, without what depends on when it ran."""
    return body(run)["verdict"], body(run)["late"], body(run)["findings"]


SCENARIOS = {
    "healthy": (shape("h100"), ()),
    "a GPU that fell off the bus": (shape("h100", broken={2: 15}), (XID_79,)),
    "rows to remap": (shape("a100", per_gpu={1: {"remapped_pending": 1}}), ()),
    "no driver": ("init 12", ()),
    "a crash": ("segfault", ()),
    "an unknown model": (mock_nvml.gpus(8), ()),
}


@pytest.mark.parametrize(
    ("suite", "name"),
    [*(("default", name) for name in SCENARIOS), ("prolog", "a GPU that fell off the bus")],
)
def test_a_recording_gets_the_verdict_that_the_node_gets(tmp_path, mock, elsewhere, name, suite):
    scenario, lines = SCENARIOS[name]
    node = Node(tmp_path, mock, scenario)
    node.root.kmsg("boot", *lines)
    made = node.quiet("facts", "--out", str(tmp_path / "n1.json"))
    live = node("check", "--suite", suite, "--json", "--no-record")
    replayed = gpuops(
        "check", "--suite", suite, "--json", "--facts", str(tmp_path / "n1.json"), env=elsewhere
    )

    assert (made.returncode, replayed.stderr) == (0, "")
    assert timeless(judged(replayed)) == timeless(judged(live))
    assert replayed.returncode == live.returncode
    assert body(replayed)["node"] == "n1"


def timeless(found):
    """Leave out what is read anew at each look: how long a mount took, how far the disk is full."""
    verdict, late, findings = found
    moving = {"mount_alive", "disk_space", "load", "processes", "munge", "clock_sync"}
    return verdict, late, [item for item in findings if item["check"] not in moving]


def test_a_recording_without_gpus_cannot_be_judged_by_a_prolog(tmp_path, mock, elsewhere):
    node = Node(tmp_path, mock, shape("h100"))
    facts = tmp_path / "n1.json"
    node.quiet("facts", "--out", str(facts))
    recorded = json.loads(facts.read_text())
    del recorded["looks"]["gpus"]
    facts.write_text(json.dumps(recorded))

    replayed = gpuops("check", "--suite", "prolog", "--facts", str(facts), env=elsewhere)

    assert replayed.returncode == 3
    assert "the recording has no 'gpus' (and 2" in replayed.stdout
    assert replayed.stdout.count("the recording has no 'gpus'") == 2  # its row, and the last line


def test_judging_a_recording_leaves_nothing_behind(tmp_path, mock, elsewhere):
    node = Node(tmp_path, mock, shape("h100"))
    node("facts", "--out", str(tmp_path / "n1.json"))
    run = gpuops("check", "--facts", str(tmp_path / "n1.json"), env=elsewhere)

    assert run.stderr == ""
    assert not (tmp_path / "spool-elsewhere").exists()
    assert not (tmp_path / "state-elsewhere").exists()
    assert not (tmp_path / "elsewhere.db").exists()


def test_what_the_node_remembers_is_recorded_and_judged_with(tmp_path, mock, elsewhere):
    node = Node(tmp_path, mock, shape("h100"))
    node.quiet("check", "--suite", "prolog")
    node.root.write("proc/uptime", "8200.0 1.0\n")
    node.play(shape("h100", per_gpu={3: {"pcie_replays": 100000}}))
    node.quiet("facts", "--out", str(tmp_path / "n1.json"))
    run = gpuops(
        "check", "--json", "--only", "gpu_pcie_replays",
        "--facts", str(tmp_path / "n1.json"), env=elsewhere,
    )  # fmt: skip

    (finding,) = body(run)["findings"]
    assert (finding["status"], finding["unit"]) == ("warn", "replays/h")


def test_facts_go_to_standard_output_and_files_are_their_owners(tmp_path, mock):
    node = Node(tmp_path, mock, shape("h100"))
    shown = body(node("facts", "--suite", "prolog"))
    node("facts", "--out", str(tmp_path / "n1.json"))
    kept = json.loads((tmp_path / "n1.json").read_text())

    assert shown["schema"] == kept["schema"] == "gpuops.facts/1"
    assert list(shown) == [
        "schema",
        "gpuops_version",
        "node",
        "boot_id",
        "since_boot_s",
        "t_us",
        "t",
        "profile",
        "gpus_expected",
        "looks",
        "state",
    ]
    assert len(shown["looks"]["gpus"]["facts"]["nvml"]["gpus"]) == 8
    assert (tmp_path / "n1.json").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.glob("*n1.json*")) == ["n1.json"]


def test_a_driver_that_hangs_is_recorded_as_that(tmp_path, mock, elsewhere):
    node = Node(tmp_path, mock, "deaf\ndelay_ms 600000\n" + shape("h100"))
    suites = tmp_path / "site" / "suites"
    suites.mkdir(parents=True)
    (suites / "quick.toml").write_text(
        'inherits = "full"\nrun = ["gpu_count", "memory"]\ndeadline_s = 5\n'
    )
    node.env["GPUOPS_SITE_DIR"] = str(tmp_path / "site")
    started = time.monotonic()
    made = node("facts", "--suite", "quick", "--out", str(tmp_path / "n1.json"))
    run = gpuops(
        "check", "--only", "gpu_count", "--json",
        "--facts", str(tmp_path / "n1.json"), env=elsewhere,
    )  # fmt: skip

    assert made.returncode == 0
    assert time.monotonic() - started < 60
    assert (run.returncode, body(run)["late"]) == (3, ["gpu_count"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a recording of `gpuops facts`: not JSON"),
        ('{"schema": "gpuops.facts/1", "no', "not JSON"),
        ('{"schema": "gpuops.check/1"}', "is not a recording of `gpuops facts`"),
        ('{"schema": "gpuops.facts/9", "gpuops_version": "7.0"}', "made by gpuops 7.0"),
        ('{"schema": "gpuops.facts/1", "node": "n1"}', "is a broken recording"),
    ],
)
def test_what_is_no_recording_is_one_clear_line(tmp_path, elsewhere, text, message):
    (tmp_path / "n1.json").write_text(text)
    run = gpuops("check", "--facts", str(tmp_path / "n1.json"), env=elsewhere)

    assert (run.returncode, run.stdout) == (64, "")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["check", "--facts", "/nowhere/n1.json"], "cannot read /nowhere/n1.json: No such file"),
        (["facts", "--out", "/proc/n1.json"], "cannot write /proc/n1.json"),
        (["facts", "--suite", "non"], "there is no suite 'non'"),
    ],
)
def test_a_file_that_cannot_be_had_is_one_clear_line(elsewhere, args, message):
    run = gpuops(*args, env=elsewhere)

    assert (run.returncode, run.stdout) == (64, "")
    assert message in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
def test_a_state_file_that_others_may_write_is_said_and_left_out(tmp_path, mock):
    node = Node(tmp_path, mock, shape("h100"))
    node.quiet("check", "--suite", "prolog")
    (tmp_path / "state/node.json").chmod(0o666)
    made = node("facts", "--suite", "prolog", "--out", str(tmp_path / "n1.json"))

    assert made.returncode == 0
    assert "root does not read" in made.stderr
    assert json.loads((tmp_path / "n1.json").read_text())["state"]["samples"] == []
