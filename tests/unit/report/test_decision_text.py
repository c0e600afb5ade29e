"""Why a run went on or stopped, as people and programs read it; the payload may be anything."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import cluster, decision, failure, rank_end, report, stopped
from support.history import a_killed_run, attempt_row, record_run, us

from gpuops.agent.journal.payloads import decision_made
from gpuops.cli.main import run_command
from gpuops.host.clock import FakeClock
from gpuops.incident.decision import RestartPolicy, RunAction
from gpuops.report.render.incident_text import decision_block, decision_json, log_paths
from gpuops.report.render.layout import WIDTH
from gpuops.report.render.run_text import report_text
from gpuops.report.time_breakdown import break_down_run
from gpuops.store.events import new_event
from gpuops.store.queries.run_queries import DecisionRow, ExclusionRow
from gpuops.store.spool.record import spool_recorder

KEY_ERROR = "KeyError/train.py"


def row_of(made, reports=(), history=(), note=None, terms=None):
    """Return the decision as the store gives it back."""
    around = replace(cluster("n1", "n2", "n3", terms=terms), live=("n1", "n3", "s1"))
    body = decision_made(made, reports, around, history, note)
    return DecisionRow(
        ordinal=made.failure.generation,
        node="n3",
        t_us=us(40),
        verdict=made.action.value,
        rule=made.rule,
        reason=made.reason,
        exit_code=made.exit_code,
        backoff_us=round(made.backoff_s * 1e6),
        restarts_used=body["budget"]["used"],
        restarts_max=body["budget"]["max"],
        note=note,
        body=json.loads(json.dumps(body)),
    )


def test_a_decision_says_who_said_what_in_which_order_and_what_followed():
    killed = report("n2", blames_node=True, last_step=57, arrival=1)
    made = decision(killed, exclude={"n2": "Xid 79 on n2"}, backoff_s=2.0)
    row = row_of(made, [killed, stopped("n1", arrival=2)], [failure(0)], note="agreed")
    text = "\n".join(decision_block(row))
    flat = " ".join(text.split())

    assert "decided restart after 2.00 s, at 22:14:00 by the agent on n3" in flat
    assert "because a worker failed and the budget is not spent (rule worker-failed)" in flat
    assert (
        "1. n2 reported workers failed (host_mem.sigkill_probable, at step 57): rank 1 was ended by"
        " SIGKILL; it blames the node 2. n1 reported stopped"
    ) in flat
    assert "excluded n2: Xid 79 on n2" in flat
    assert "3 members, 3 alive; gone: n2; spare: s1" in flat
    assert "budget 2 failures counted, 3 restarts allowed, 1 left" in flat
    assert "site agreed (the site's own decision)" in flat


def test_who_was_doubted_and_stayed_is_told_with_the_reason():
    made = decision(exclude={"n3": "suspected: sums: slow"})
    doubted = {"n3": "sums: slow", "n1": "sums: slow too", "n2": "sums: gone anyway"}
    around = replace(cluster("n1", "n2", "n3"), live=("n1", "n3"), suspected=doubted)
    body = decision_made(made, [], around, [], None)
    text = " ".join("\n".join(decision_block(replace(row_of(made), body=body))).split())

    assert "excluded n3: suspected: sums: slow suspect n1: sums: slow too; it cannot be" in text
    assert "gone anyway" not in text
    stopped_for_good = replace(row_of(made), body=body, verdict="stop")
    assert "cannot be spared" not in " ".join(decision_block(stopped_for_good))


def test_a_stop_for_good_names_both_logs():
    before = failure(0, signature=KEY_ERROR, log_path="/logs/0/rank1.log")
    again = failure(1, signature=KEY_ERROR, log_path="/logs/1/rank0.log")
    other = failure(0, signature="another", log_path="/logs/other.log")
    made = decision(report(), RunAction.STOP, failure=again, exit_code=93)
    row = row_of(made, history=[other, before])

    assert log_paths(row) == ["/logs/1/rank0.log", "/logs/0/rank1.log"]
    lines = decision_block(row)
    assert (
        lines[0]
        .split(None, 1)[1]
        .startswith("stop, do not requeue: it would fail again (exit code 93)")
    )
    assert [line.split()[-1] for line in lines[-2:]] == log_paths(row)


def test_a_budget_within_a_window_says_so():
    terms = RestartPolicy(restarts_max=3, restarts_window_s=600.0)
    history = [failure(0, at_s=10.0), failure(1, at_s=900.0)]
    row = row_of(decision(report(), failure=failure(2, at_s=1000.0)), (), history, terms=terms)

    assert "2 failures counted within 10 min 00 s, 3 restarts allowed" in "\n".join(
        decision_block(row)
    )


def test_many_reports_are_counted_and_the_first_are_shown():
    reports = [report(f"n{n}", arrival=n) for n in range(100)]
    lines = decision_block(row_of(decision(reports[0]), reports))

    assert sum("reported workers failed" in line for line in lines) == 16
    assert any(line.endswith("17. and 84 more") for line in lines)


def test_hostile_text_is_cleaned_and_no_line_is_too_wide():
    evil = "\x1b]0;owned\x07\x1b[2J\r" + "x " * 300
    told = report(f"n{evil}", how=evil, ends=(rank_end(summary=evil, log_path=evil),))
    made = decision(told, reason=evil, rule=evil, exclude={evil: evil})
    lines = "\n".join(decision_block(row_of(made, [told], note=evil))).split("\n")

    assert not any(ord(char) < 32 for line in lines for char in line)
    assert max(map(len, lines)) <= WIDTH


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["node", "kind", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = ("decision", "reports", "reports_total", "cluster", "history", "budget", "note")


@given(st.dictionaries(st.sampled_from(KEYS), JSON))
def test_whatever_a_payload_holds_it_can_be_shown(body):
    row = replace(row_of(decision()), body=body)

    assert decision_block(row)
    assert set(decision_json(row)) >= {"verdict", "rule", "reports", "log_paths"}


def test_the_report_shows_nodes_of_attempts_and_who_was_left_out():
    run, rows, incidents = a_killed_run()
    rows = [
        replace(rows[0], nodes=("n1", "n2", "n3")),
        attempt_row(1, (41, 45, 70, 95, 96), (1, 120), nodes=("n1", "n3")),
    ]
    gone = ExclusionRow(excluded="n2", t_us=us(41), ordinal=0, reason="Xid 79", told_by="n1")
    text = report_text(replace(break_down_run(run, rows, incidents), exclusions=(gone,)))

    assert "n[1-3]" in text
    assert "n[1,3]" in text
    assert "excluded   n2 since 22:14:01, after attempt 0: Xid 79" in text


@pytest.fixture
def spooled(tmp_path, monkeypatch):
    """Record a run with a decision into a spool that the commands read."""
    monkeypatch.setenv("GPUOPS_STORE", f"sqlite:///{tmp_path / 'store.db'}")
    monkeypatch.setenv("GPUOPS_SPOOL", str(tmp_path / "spool"))
    clock = FakeClock(us(0))
    recorder = spool_recorder(
        tmp_path / "spool", node="n1", boot_id="b", bytes_max=2**24, clock=clock
    )
    run, rows, incidents = a_killed_run()
    record_run(recorder, run, rows, incidents, clock)
    told = report("n1")
    made = decision(told, exclude={"n2": "sick"})
    payload = decision_made(made, [told], cluster("n1", "n2"), (), None)
    for kind, body in (
        ("decision.made", payload),
        ("node.excluded", {"excluded": "n2", "reason": "sick"}),
    ):
        recorder.record(
            new_event(kind, node="n1", clock=clock, run_id=run.id, attempt=0, payload=body)
        )
    recorder.close()
    return incidents[0]


def test_the_commands_show_why(spooled, capsys):
    assert run_command(["incident", "show", spooled.id]) == 0
    shown = capsys.readouterr().out
    assert run_command(["incident", "show", spooled.id, "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["decisions"]
    assert run_command(["report", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)

    assert "decided    restart, at 22:13:20 by the agent on n1" in shown
    assert (made["rule"], made["excluded"]) == ("worker-failed", {"n2": "sick"})
    assert made["reports"][0]["node"] == "n1"
    assert body["decisions"] == [made]
    assert [item["node"] for item in body["exclusions"]] == ["n2"]
