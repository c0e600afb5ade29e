"""The commands that read history: from a spool and store, and from a run directory alone."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support.command import command_here
from support.history import T0, a_killed_run, record_run

from gpuops.host.clock import FakeClock
from gpuops.store.events import new_event
from gpuops.store.spool.record import spool_recorder

SHOW_TORCH = "print('torch' in sys.modules)"
INCIDENT_KEYS = {
    "id",
    "failure_class",
    "side",
    "confidence",
    "state",
    "title",
    "run",
    "attempt",
    "culprits",
    "culprit_how",
    "first_seen",
    "detected",
    "evidence",
    "actions",
    "lost_seconds",
    "lost_seconds_by_phase",
    "resolved",
    "resolution",
    "authority",
    "rev",
}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    return command_here(tmp_path, monkeypatch, capsys)


@pytest.fixture
def run_dir(tmp_path):
    """Record the killed run into the spool and into a run directory; return the latter."""
    clock = FakeClock(T0)
    recorder = spool_recorder(
        tmp_path / "spool",
        node="n041",
        boot_id="b",
        bytes_max=2**24,
        clock=clock,
        journal=tmp_path / "run" / "journal",
    )
    run, rows, incidents = a_killed_run()
    # The end of a run is the time of its event.
    record_run(recorder, _live(run), rows, incidents, clock)
    clock.advance(100)
    record_run(recorder, run, [], [], clock)
    recorder.close()
    return tmp_path / "run"


def _live(run):
    return replace(run, outcome=None)


def test_report_shows_the_newest_run_with_what_still_waited_in_the_spool(call, run_dir):
    code, out, err = call("report")

    assert code == 0
    assert err == ""
    assert out.splitlines()[0].startswith("run demo (abcd1234) completed after 1 restart")
    assert "rank 1 on n041 was ended by SIGKILL at step 57" in out


def test_the_death_of_a_keeper_is_the_reason_for_steps_that_were_made_again(tmp_path, call):
    clock = FakeClock(T0)
    place = {"node": "n041", "boot_id": "b", "bytes_max": 2**24, "clock": clock}
    recorder = spool_recorder(tmp_path / "spool", **place)
    run, rows, incidents = a_killed_run()
    record_run(recorder, run, rows, incidents, clock)
    for kind, attempt, lost_step in (("fresh_start", 0, None), ("offered", 1, 55)):
        payload = {"why": None, "lost_step": lost_step}
        where = {"node": "n041", "clock": clock, "run_id": run.id, "attempt": attempt}
        recorder.record(new_event(f"checkpoint.{kind}", payload=payload, **where))
    recorder.close()
    _, out, _ = call("report")

    said = " ".join(out.split())
    assert "because the keeper of the checkpoints died" in said
    assert "before attempt 1 (step 55); the newest state on disk was that much older" in said


@pytest.mark.parametrize("words", [["abcd1234"], ["run"], ["run", "abcd1234"], ["0190f6a0"]])
def test_a_run_is_named_by_the_end_or_the_beginning_of_its_id(call, run_dir, words):
    code, out, _ = call("report", *words)

    assert code == 0
    assert out.startswith("run demo (abcd1234)")


def test_the_report_s_json_has_the_documented_keys(call, run_dir):
    code, out, _ = call("report", "--json")
    body = json.loads(out)

    assert code == 0
    assert set(body) == {
        "schema",
        "gpuops_version",
        "run",
        "nodes",
        "wall_seconds",
        "seconds_by_phase",
        "lost_seconds",
        "lost_seconds_by_phase",
        "ettr_alloc",
        "ettr_alloc_max",
        "ettr_definition",
        "redone_steps",
        "attempts",
        "exclusions",
        "decisions",
        "incidents",
        "advice",
        "notes",
    }
    assert body["schema"] == "gpuops.report/1"
    assert body["nodes"] == ["n041"]
    assert sum(body["seconds_by_phase"].values()) == pytest.approx(body["wall_seconds"])
    assert set(body["attempts"][0]) == {
        "attempt",
        "outcome",
        "exit_code",
        "started",
        "first_step",
        "caught_up",
        "last_step",
        "ended",
        "world_size",
        "n_nodes",
        "nodes",
        "steps_first",
        "steps_last",
        "step_source",
        "beats",
        "redone_steps",
        "began_again",
        "log_dir",
        "slurm_job_id",
        "phases",
    }
    assert set(body["run"]) == {
        "id",
        "name",
        "user",
        "cluster",
        "command",
        "run_dir",
        "created",
        "ended",
        "outcome",
        "exit_code",
        "reason",
        "torch_version",
        "max_restarts",
        "agent",
    }
    (incident,) = body["incidents"]
    assert set(incident) == INCIDENT_KEYS


def test_a_run_directory_alone_is_reportable(call, run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUOPS_STORE", "postgresql+psycopg://nobody@127.0.0.1:1/none")
    code, out, _ = call("report", "--run-dir", str(run_dir))
    listed, incidents, _ = call("incident", "ls", "--run-dir", str(run_dir), "--json")

    assert code == listed == 0
    assert out.startswith("run demo (abcd1234)")
    assert len(json.loads(incidents)["incidents"]) == 1
    assert not (tmp_path / "store.db").exists()


def test_a_run_whose_agent_is_gone_is_not_said_to_be_running(call, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n041")
    run, _, _ = a_killed_run()
    recorder = spool_recorder(
        tmp_path / "spool", node="n041", boot_id="b", bytes_max=2**24, clock=FakeClock(T0)
    )
    record_run(recorder, replace(_live(run), run_dir=str(tmp_path)), [], [], FakeClock(T0))
    recorder.close()
    with subprocess.Popen([sys.executable, "-c", "pass"]) as agent:
        pass
    state = {"run_id": run.id, "node": "n041", "agent_pid": agent.pid}
    (tmp_path / "state.json").write_text(json.dumps(state))
    code, out, _ = call("report")

    assert code == 0
    assert out.startswith("run demo (abcd1234): the agent is gone (killed?), last event at")
    assert json.loads(call("report", "--json")[1])["run"]["agent"] == "gone"


@pytest.mark.parametrize("words", [(), ("abcd1234",), ("0190f6a0",), ("20260101T-run-abcd1234",)])
def test_the_parent_of_run_directories_is_read_as_run_status_reads_it(call, run_dir, words):
    parent = run_dir.parent / "runs"
    (parent / "20260102T-empty-ffff0000").mkdir(parents=True)
    run_dir.rename(parent / "20260101T-run-abcd1234")
    state = {"run_id": "0190f6a0-0000-7000-8000-0000abcd1234"}
    (parent / "20260101T-run-abcd1234" / "state.json").write_text(json.dumps(state))

    code, out, _ = call("report", *words, "--run-dir", str(parent))
    assert (code, out.splitlines()[0][:23]) == (0, "run demo (abcd1234) com")
    code, out, _ = call(
        "incident", "ls", *(("--run", *words) if words else ()), "--run-dir", str(parent)
    )
    assert (code, "SIGKILL" in out) == (0, True)


def test_a_run_that_is_not_in_the_parent_is_named(call, run_dir):
    code, _, err = call("report", "dddd", "--run-dir", str(run_dir.parent))

    assert code == 64
    assert "no run in" in err
    assert "'dddd'" in err


def test_incident_ls_lists_and_filters(call, run_dir):
    everything = json.loads(call("incident", "ls", "--json")[1])
    assert everything["schema"] == "gpuops.incidents/1"
    assert set(everything) == {"schema", "gpuops_version", "incidents", "notes"}

    assert len(everything["incidents"]) == 1
    assert "host_mem.sigkill_probable" in call("incident", "ls", "--run", "abcd1234")[1]
    assert call("incident", "ls", "--state", "open")[1] == "no incidents on record\n"
    assert json.loads(call("incident", "ls", "--state", "open", "--json")[1])["incidents"] == []


def test_incident_show_gives_the_whole_incident(call, run_dir):
    (listed,) = json.loads(call("incident", "ls", "--json")[1])["incidents"]
    code, out, _ = call("incident", "show", listed["id"][-8:])
    shown = json.loads(call("incident", "show", listed["id"], "--json")[1])

    assert code == 0
    assert out.startswith(f"incident {listed['id'][-8:]}  host_mem.sigkill_probable")
    assert "log /runs/demo/generation-0/rank1/stderr.log" in out
    assert shown["schema"] == "gpuops.incident/1"
    assert shown["incident"] == listed
    assert set(shown["incident"]) == INCIDENT_KEYS


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "ffffffff"], "no run has an id"),
        (["report", "run", "a", "b"], "one run at a time"),
        (["report", "--run-dir", "nowhere"], "no journal"),
        (["report", "--run-dir", "x", "--store", "sqlite:///y"], "exclude each other"),
        (["incident", "show", "ffffffff"], "no incident has an id"),
        (["incident", "ls", "--state", "gone"], "'gone' is not one of"),
        (["incident", "ls", "--run", "ffffffff"], "no run has an id"),
        (["runbook", "host_mem.sigkil"], "did you mean host_mem.sigkill_probable"),
        (["runbook", "../../etc/passwd"], "passwd'; `gpuops runbook --list` names"),
        (["incident", "show", "ab"], "is too short: give 4 characters of the incident's id"),
        (["runbook"], "--list"),
        (["runbook", "--list", "crash.abort"], "--list"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_64(call, run_dir, args, message):
    code, _, err = call(*args)

    assert code == 64
    assert message in err
    assert "Traceback" not in err


def test_an_empty_store_says_how_to_get_a_run(call):
    assert call("db", "upgrade")[0] == 0

    code, _, err = call("report")

    assert code == 64
    assert "gpuops run" in err


def test_runbook_prints_a_page_plain_raw_and_as_json(call):
    plain = call("runbook", "crash.abort")[1]
    raw = call("runbook", "crash.abort", "--raw")[1]
    body = json.loads(call("runbook", "crash.abort", "--json")[1])

    assert plain.startswith("# crash.abort: ")
    assert "action restart" in plain
    assert raw.startswith("+++\n")
    assert body["schema"] == "gpuops.runbook/1"
    assert set(body["runbook"]) == {
        "failure_class",
        "severity",
        "side",
        "action",
        "returns",
        "title",
        "sources",
        "text",
    }


def test_runbook_lists_every_class(call):
    lines = call("runbook", "--list")[1].splitlines()
    body = json.loads(call("runbook", "--list", "--json")[1])

    assert body["schema"] == "gpuops.runbooks/1"
    assert len(lines) == 1 + len(body["runbooks"])
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1:]] == [
        row["failure_class"] for row in body["runbooks"]
    ]


def test_the_commands_import_no_torch():
    program = "import sys; from gpuops.cli import history, runbook; " + SHOW_TORCH
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )

    assert ran.stdout == "False\n"


def test_a_page_is_rendered_for_a_terminal():
    from gpuops.cli.runbook import render
    from gpuops.incident.runbook import load_runbooks
    from gpuops.resources import data_dir

    pages = load_runbooks(data_dir("runbooks"))
    assert pages
    for page in pages.values():
        assert "What gpuops already did" in render(page, width=80)


def test_help_names_what_a_run_is():
    from gpuops.cli.main import gpuops

    assert "RUN is the end" in CliRunner().invoke(gpuops, ["report", "--help"]).output
