"""``gpuops db`` as an operator runs it: by subprocess, with its exit codes and its JSON."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.stories import Teller
from support.warm_python import warm_run

from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, EXIT_USAGE
from gpuops.host.clock import SystemClock
from gpuops.store.events import new_event
from gpuops.store.schema import REVISION
from gpuops.store.spool.record import spool_recorder

ROOT = Path(__file__).parents[3]


def gpuops(*args, tmp_path, **env):
    return warm_run(
        [sys.executable, "-m", "gpuops", *args],
        timeout=60,
        cwd=tmp_path,
        env={
            **os.environ,
            "GPUOPS_SPOOL": str(tmp_path / "spool"),
            "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db",
            **env,
        },
    )


def recorded(tmp_path, count=3):
    keeper = spool_recorder(
        tmp_path / "spool", node="n1", boot_id="b", bytes_max=2**26, clock=SystemClock()
    )
    teller = Teller()
    keeper.record(*(teller.event("tool.failed", n=n) for n in range(count)))
    keeper.close()


def test_a_new_machine_has_no_store_and_that_is_fine(tmp_path):
    done = gpuops("db", "status", tmp_path=tmp_path)

    assert done.returncode == EXIT_OK
    assert "created on first use" in done.stdout
    assert "nothing waits" in done.stdout


def test_upgrade_makes_the_tables_once(tmp_path):
    first = gpuops("db", "upgrade", tmp_path=tmp_path)
    second = gpuops("db", "upgrade", tmp_path=tmp_path)

    assert (first.returncode, second.returncode) == (EXIT_OK, EXIT_OK)
    assert f"schema none -> {REVISION}" in first.stdout
    assert f"already at schema {REVISION}" in second.stdout


def test_status_counts_the_backlog_and_flush_sends_it(tmp_path):
    recorded(tmp_path)
    before = json.loads(gpuops("db", "status", "--json", tmp_path=tmp_path).stdout)
    sent = gpuops("db", "flush", "--json", tmp_path=tmp_path)
    after = json.loads(gpuops("db", "status", "--json", tmp_path=tmp_path).stdout)

    flushed = json.loads(sent.stdout)
    assert sent.returncode == EXIT_OK
    assert before["schema"] == "gpuops.db-status/1"
    assert before["spool"]["lines"] == 3
    assert before["spool"]["bytes"] > 0
    assert before["spool"]["oldest_age_s"] >= 0
    assert (flushed["schema"], flushed["sent"], flushed["remaining"]) == ("gpuops.db-flush/1", 3, 0)
    assert after["spool"]["lines"] == 0
    assert after["store"]["state"] == "current"
    assert after["store"]["rows"]["events"] == 3


def test_a_quiet_flush_says_nothing(tmp_path):
    recorded(tmp_path)

    done = gpuops("db", "flush", "--quiet", "--deadline", "20", tmp_path=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (EXIT_OK, "", "")


@pytest.mark.parametrize("command", [("status",), ("upgrade",), ("flush",)])
@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("mysql://ada:hunter2@db/x", EXIT_USAGE, "not known"),
        ("rubbish", EXIT_USAGE, "malformed"),
        ("postgresql://ada:hunter2@127.0.0.1:1/x", EXIT_TRY_LATER, "refused"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_clear_line(tmp_path, command, url, code, words):
    recorded(tmp_path)

    done = gpuops("db", *command, tmp_path=tmp_path, GPUOPS_STORE=url)

    said = done.stdout + done.stderr
    assert done.returncode == code
    assert words in said
    assert "hunter2" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("args", [("--deadline", "-1"), ("--deadline", "soon"), ("--nope",)])
def test_a_wrong_flag_is_a_usage_error(tmp_path, args):
    assert gpuops("db", "flush", *args, tmp_path=tmp_path).returncode == EXIT_USAGE


def test_a_spool_that_is_a_file_is_said(tmp_path):
    (tmp_path / "spool").write_text("")

    done = gpuops("db", "flush", tmp_path=tmp_path)

    assert done.returncode == EXIT_TRY_LATER
    assert "cannot read the spool" in done.stderr


def test_a_store_on_a_network_file_system_is_refused(tmp_path):
    info = tmp_path / "root" / "proc" / "self" / "mountinfo"
    info.parent.mkdir(parents=True)
    info.write_text(f"23 22 0:50 / {tmp_path} rw - nfs4 server:/export rw\n")

    done = gpuops("db", "upgrade", tmp_path=tmp_path, GPUOPS_ROOT=str(tmp_path / "root"))

    assert done.returncode == EXIT_USAGE
    assert "network file system" in done.stderr


@pytest.mark.postgres
def test_a_real_postgres_is_made_fed_and_shown(tmp_path, guarded_postgres):
    recorded(tmp_path)
    with guarded_postgres.database() as url:
        early = gpuops("db", "flush", tmp_path=tmp_path, GPUOPS_STORE=url)
        made = gpuops("db", "upgrade", tmp_path=tmp_path, GPUOPS_STORE=url)
        for _ in range(10):
            sent = gpuops("db", "flush", tmp_path=tmp_path, GPUOPS_STORE=url)
            if sent.returncode != EXIT_TRY_LATER:  # a busy server may be late, and says so
                break
        shown = gpuops("db", "status", tmp_path=tmp_path, GPUOPS_STORE=url)

    assert [done.returncode for done in (early, made, sent, shown)] == [EXIT_TRY_LATER, 0, 0, 0]
    assert "`gpuops db upgrade`" in early.stderr
    assert sent.stdout.startswith("3 sent")
    assert "events 3" in shown.stdout
    assert "s3cret" not in early.stderr + made.stdout + sent.stdout + shown.stdout


def test_prune_deletes_by_the_settings_and_says_what(tmp_path):
    recorded(tmp_path)
    gpuops("db", "flush", tmp_path=tmp_path)
    env = {"GPUOPS_RETENTION_EVENTS_DAYS": "1"}

    shown = gpuops("db", "prune", "--dry-run", tmp_path=tmp_path, **env)
    done = gpuops("db", "prune", "--json", tmp_path=tmp_path, **env)
    again = gpuops("db", "prune", tmp_path=tmp_path, **env)
    wrong = gpuops("db", "prune", tmp_path=tmp_path, GPUOPS_RETENTION_EVENTS_DAYS="-1")

    assert shown.stdout == "would delete: events 3, ingest_log 1\n"
    body = json.loads(done.stdout)
    assert body["schema"] == "gpuops.db-prune/1"
    assert body["deleted"] == {"events": 3, "ingest_log": 1}
    assert body["retention"]["events_days"] == 1
    assert again.stdout == "deleted: nothing is older than its retention\n"
    assert (wrong.returncode, "retention.events_days" in wrong.stderr) == (EXIT_USAGE, True)


def test_status_shows_how_large_each_table_is_and_how_it_grows(tmp_path):
    keeper = spool_recorder(
        tmp_path / "spool", node="n1", boot_id="b", bytes_max=2**26, clock=SystemClock()
    )
    keeper.record(*(new_event("tool.failed", node="n1", clock=SystemClock()) for _ in range(7)))
    keeper.close()
    gpuops("db", "flush", tmp_path=tmp_path)

    body = json.loads(gpuops("db", "status", "--json", tmp_path=tmp_path).stdout)
    text = gpuops("db", "status", tmp_path=tmp_path).stdout

    tables = {item["name"]: item for item in body["store"]["tables"]}
    assert (tables["events"]["rows"], tables["events"]["rows_per_day"]) == (7, 1.0)
    assert tables["events"]["bytes"] > tables["events"]["bytes_per_day"] > 0
    assert "a day (new rows of the last 7 days)" in text
    assert re.search(r"^ +events +\S+ \S+ +7 +1 ", text, re.MULTILINE)
