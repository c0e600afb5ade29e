"""``gpuops node`` and ``gpuops repair`` as an operator runs them."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.stories import Teller, envelopes, node_incident
from support.warm_python import warm_run

from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, EXIT_USAGE
from gpuops.gate.node_state import read_state
from gpuops.gate.record import CheckOccasion, apply_to_state
from gpuops.host.clock import SystemClock
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest

ROOT = Path(__file__).parents[3]
NOW_US = SystemClock().now_us()
HOUR_US = 3600 * 10**6
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="gpuops repair is root's")


class Site:
    """A store with one broken node ``n1``, and the command beside it."""

    def __init__(self, folder, url):
        self.folder, self.url = folder, url
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)

    def gpuops(self, *args, node="login", **env):
        return warm_run(
            [sys.executable, "-m", "gpuops", *args],
            timeout=60,
            cwd=self.folder,
            env={
                **os.environ,
                "SLURMD_NODENAME": node,
                "GPUOPS_SPOOL": str(self.folder / "spool"),
                "GPUOPS_STATE": str(self.state),
                "GPUOPS_STORE": self.url,
                "USER": "ada",
                **env,
            },
        )

    def json(self, *args, **env):
        done = self.gpuops(*args, "--json", **env)
        assert done.returncode == EXIT_OK, done.stderr
        return json.loads(done.stdout)

    def tell(self, lines, uid=0):
        with open_store(self.url, mode="write") as store, store.begin() as connection:
            ingest(connection, envelopes(lines, uid=uid, cluster="default"), 1)

    def break_node(self):
        teller = Teller()
        teller.now_us = NOW_US - HOUR_US
        finding = {
            "check": "gpu_lost",
            "entity": {"kind": "gpu", "id": "GPU-1"},
            "status": "fail",
            "message": "GPU 0 is lost\x1b[31m",
            "failure_class": "gpu_hw.fell_off_bus",
        }
        run = {"suite": "prolog", "trigger": "prolog", "job_id": "17", "verdict": "fail"}
        for _ in range(3):
            at_us = teller.now_us
            times = {"start_us": at_us, "end_us": at_us + 5, "boot_us": NOW_US - 2 * HOUR_US}
            teller.tell("check.ran", {**run, **times, "findings": [finding]})
        opened = node_incident(first_us=NOW_US - HOUR_US, detected_us=NOW_US - HOUR_US)
        teller.tell("incident.recorded", opened.to_json(), severity=40)
        drain = {"reason": "gpuops:FAIL gpu_lost GPU-1", "actor": "gpuops", "job_id": "17"}
        teller.tell("node.drained", drain, severity=40)
        teller.tell("attempt.started", run_id="0199aaaa", attempt=0, start_us=1)
        teller.tell(
            "attempt.ended", run_id="0199aaaa", attempt=0, end_us=2, outcome="failed", exit_code=1
        )
        self.tell(teller.lines)


@pytest.fixture
def site(tmp_path, store_url):
    return Site(tmp_path, store_url)


def test_a_nodes_history_has_everything_that_is_on_record(site):
    site.break_node()

    shown = site.json("node", "show", "n1")

    assert shown["schema"] == "gpuops.node/1"
    assert shown["node"]["name"] == "n1"
    assert (shown["node"]["state"], shown["node"]["verdict"]) == ("drained", "fail")
    (finding,) = shown["findings"]
    assert (finding["check"], finding["status"], finding["count"]) == ("gpu_lost", "fail", 3)
    assert [item["state"] for item in shown["incidents"]] == ["open"]
    assert [(item["state"], item["job_id"]) for item in shown["states"]] == [("drained", "17")]
    assert [item["entity"] for item in shown["strikes"]] == [{"kind": "gpu", "id": "GPU-1"}]
    assert [item["id"] for item in shown["components"]] == ["GPU-1"]
    assert [item["boot_id"] for item in shown["boots"]] == ["boot-n1"]
    assert [item["run"] for item in shown["failed_attempts"]] == ["0199aaaa"]
    assert shown["repairs"] == []


def test_a_nodes_history_is_told_to_people_without_control_characters(site):
    site.break_node()

    said = site.gpuops("node", "show", "n1").stdout

    for words in (
        "node n1 of cluster default: last state: drained; last check: fail",
        "gpu_lost, gpu GPU-1 (3 times): GPU 0 is lost",
        "by gpuops, job 17: gpuops:FAIL gpu_lost GPU-1",
        "1  gpu GPU-1: gpu_hw.fell_off_bus",
        "run 0199aaaa, attempt 0, exit code 1",
    ):
        assert words in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 100


def test_nodes_are_listed(site):
    site.break_node()

    (row,) = site.json("node", "ls")["nodes"]
    assert (row["name"], row["state"], row["verdict"]) == ("n1", "drained", "fail")
    assert row["open_incidents"] == 1
    assert "n1" in site.gpuops("node", "ls").stdout


def test_an_empty_store_lists_no_nodes(site):
    assert site.gpuops("node", "ls").stdout == "no nodes on record\n"


@pytest.mark.parametrize("command", [["node", "show", "n2"], ["repair", "n2", "--what", "x"]])
@only_root
def test_a_node_that_is_not_on_record_is_said_with_those_that_are_close(site, command):
    site.break_node()

    done = site.gpuops(*command)

    assert done.returncode == EXIT_USAGE
    assert "knows no node 'n2'; did you mean n1?" in done.stderr


@only_root
def test_a_repair_closes_the_incidents_and_forgives_the_strikes(site):
    site.break_node()

    done = site.json("repair", "n1", "--what", "a new GPU")
    shown = site.json("node", "show", "n1")

    assert done["repair"]["by"] == "ada"
    assert [item["state"] for item in done["incidents"]] == ["closed"]
    assert [item["state"] for item in shown["incidents"]] == ["closed"]
    assert shown["incidents"][0]["resolution"] == "repaired by ada: a new GPU"
    assert shown["strikes"] == []
    assert [(item["by"], item["what"]) for item in shown["repairs"]] == [("ada", "a new GPU")]


@only_root
def test_a_repair_of_one_part_leaves_the_others(site):
    site.break_node()
    other = Teller(5)
    other.tell(
        "incident.recorded",
        node_incident(gpu="GPU-2", first_us=NOW_US, detected_us=NOW_US).to_json(),
    )
    site.tell(other.lines)

    site.json("repair", "n1", "--gpu", "GPU-1", "--what", "reseated", "--by", "bob")

    states = {item["culprits"][0]["id"]: item["state"] for item in _incidents(site)}
    assert states == {"GPU-1": "closed", "GPU-2": "open"}


def _incidents(site):
    return site.json("node", "show", "n1")["incidents"]


@only_root
def test_a_part_that_the_node_never_had_is_refused(site):
    site.break_node()

    done = site.gpuops("repair", "n1", "--gpu", "GPU-9", "--what", "x")

    assert done.returncode == EXIT_USAGE
    assert "never had a gpu 'GPU-9'; on record are GPU-1" in done.stderr


@only_root
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--what", " "], "--what needs 1 to 500 printable characters"),
        (["--what", "x", "--by", "a\x1bb"], "--by needs 1 to 500"),
        (["--what", "x", "--gpu", "G", "--nic", "N"], "exclude each other"),
        ([], "Missing option '--what'"),
    ],
)
def test_what_makes_no_sense_is_a_mistake_on_the_command_line(site, options, words):
    done = site.gpuops("repair", "n1", *options)

    assert done.returncode == EXIT_USAGE
    assert words in done.stderr


@only_root
def test_on_the_node_itself_a_repair_needs_no_store(tmp_path):
    site = Site(tmp_path, f"sqlite:///{tmp_path}/file/store.db")
    (tmp_path / "file").write_text("")
    occasion = CheckOccasion(trigger="prolog")
    (opened,) = apply_to_state(_failed_run(), occasion, site.state, 0).incidents

    done = site.gpuops("repair", "n1", "--what", "reseated", node="n1")

    state = read_state(site.state, 0)
    assert done.returncode == EXIT_OK
    assert f"closed incident {opened.id[-8:]}" in done.stdout
    assert "the store was not asked" in done.stderr
    assert "the store gets the repair later" in done.stderr
    assert [repair.what for repair in state.repairs] == ["reseated"]
    assert state.incidents == {}


def _failed_run():
    from gpuops.checks.core.runner import CheckRun

    failing = Finding(
        check="gpu_lost",
        entity=Entity(EntityKind.GPU, "GPU-1"),
        status=Status.FAIL,
        message="lost",
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
    )
    return CheckRun(
        suite="prolog", node="n1", start_us=NOW_US, end_us=NOW_US + 1, findings=(failing,)
    )


@only_root
def test_from_elsewhere_a_repair_without_the_store_is_not_recorded(tmp_path):
    site = Site(tmp_path, f"sqlite:///{tmp_path}/file/store.db")
    (tmp_path / "file").write_text("")

    done = site.gpuops("repair", "n1", "--what", "reseated")

    assert done.returncode == EXIT_TRY_LATER
    assert "cannot open the store" in done.stderr


@only_root
def test_with_neither_file_nor_store_nothing_is_claimed(tmp_path):
    site = Site(tmp_path, f"sqlite:///{tmp_path}/file/store.db")
    (tmp_path / "file").write_text("")

    done = site.gpuops(
        "repair", "n1", "--what", "x", node="n1", GPUOPS_STATE=str(tmp_path / "file")
    )

    assert done.returncode != EXIT_OK
    assert "this repair is not recorded" in done.stderr
