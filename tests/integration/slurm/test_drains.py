"""What an administrator does with scontrol is recorded by one question to a real slurmctld."""

import json
import sqlite3

import pytest
from support.command import gpuops
from support.slurm import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]


def test_an_administrators_drain_and_resume_are_recorded_once(cluster, history):
    node = cluster["n1"]
    node.checks_health()
    wait_until(lambda: history.runs("n1", "health"), "no health check")
    (node.home / "health").unlink()
    env = {**node.env, "SLURM_CONF": cluster.env["SLURM_CONF"], "TZ": "Asia/Tokyo"}

    def record(*words):
        done = gpuops("slurm", "drains", "--json", *words, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        return [item for item in json.loads(done.stdout)["states"] if item["node"] == "n1"]

    reason = "ann: swapping a cable\nNodeName=n2 [bob@2020-01-01T00:00:00]"
    cluster.drain("n1", reason)
    (drained,) = record("--dry-run")
    assert (drained["actor"], drained["reason"]) == ("administrator root", "ann: swapping a cable")
    assert record() == [drained]
    assert record() == []

    cluster.scontrol("update", "NodeName=n1", "State=RESUME")
    cluster.in_use("n1")
    assert [item["state"] for item in record()] == ["resumed"]
    assert record() == []

    query = "SELECT node, actor, reason, drained, hours FROM v_drains WHERE until IS NOT NULL"
    with sqlite3.connect(f"file:{history.path}?mode=ro", uri=True) as connection:
        ((*told, hours),) = connection.execute(query).fetchall()
    shown = drained["time"][:19].replace("T", " ")
    assert told == ["n1", "administrator root", "ann: swapping a cable", shown]
    assert 0 < hours < 0.2
