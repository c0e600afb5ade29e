"""The report as people read it: the whole text of one, and the hard cases of its parts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.exits import NODE, PEER_CLOSED, RUN, S, incident_of, killed, raised, terminated
from support.history import a_killed_run, attempt_row, run_row, us

from gpuops.incident.incidents.cancelled import incident_from_cancel
from gpuops.incident.incidents.replicas import ReplicaMismatch, incident_from_replicas
from gpuops.incident.lifecycle import close
from gpuops.model import Evidence, Incident, Role
from gpuops.report.advice import advice
from gpuops.report.render.incident_text import incident_block, incident_list
from gpuops.report.render.json_bodies import report_json
from gpuops.report.render.layout import WIDTH, count_noun, table, truncate
from gpuops.report.render.run_text import report_text
from gpuops.report.time_breakdown import AgentLiveness, CheckpointStart, break_down_run

GOLDEN = Path(__file__).parents[2] / "fixtures" / "report" / "killed_run.txt"


def repeated(times=2):
    rows = [
        attempt_row(n, (1 + 20 * n, 5 + 20 * n, None, 10 + 20 * n, 11 + 20 * n), (1, 12), "failed")
        for n in range(times)
    ]
    incidents = [
        incident_of(raised(0), raised(1), attempt=n, detected_s=10.5 + 20 * n) for n in range(times)
    ]
    return break_down_run(run_row(outcome="failed", exit_code=1), rows, incidents)


def test_the_report_of_a_killed_run_reads_as_agreed():
    """To accept a change: write the new text into the file and look at the diff."""
    assert report_text(break_down_run(*a_killed_run())) == GOLDEN.read_text(encoding="utf-8")


def test_the_first_three_lines_say_what_happened_what_it_cost_and_who_was_to_blame():
    first = report_text(break_down_run(*a_killed_run())).splitlines()[:3]

    assert first[0].startswith("run demo (abcd1234) completed after 1 restart in 100.0 s on n041")
    assert "30.0 s lost to failures" in first[1]
    assert "ETTR 0.55" in first[1]
    assert "rank 1 on n041 was ended by SIGKILL at step 57" in first[2]


def test_no_line_is_wider_than_the_terminal_but_for_paths():
    long = "x" * 300
    run, rows, _ = a_killed_run()
    incident = incident_of(raised(0, f"ValueError: {long} {long}", log_tail=(long,)))
    text = report_text(break_down_run(run, rows, [incident]))

    assert max(len(line) for line in text.splitlines() if "log /" not in line) <= WIDTH


@pytest.mark.parametrize(("worlds", "said"), [((1, 1), "1 rank"), ((1, 2), "1 then 2 ranks")])
def test_the_number_of_ranks_is_said_as_people_say_it(worlds, said):
    run, rows, _ = a_killed_run()
    rows = [replace(row, world_size=world) for row, world in zip(rows, worlds, strict=True)]

    (line,) = [x for x in report_text(break_down_run(run, rows, [])).splitlines() if "where" in x]
    assert line.endswith(f"; {said}")


def test_control_characters_of_a_log_never_reach_the_terminal():
    evil = "\x1b]0;owned\x07\x1b[2J\rfine"
    run, rows, _ = a_killed_run()
    incident = incident_of(raised(0, f"ValueError: {evil}", log_tail=(evil,), log_path=f"/x{evil}"))
    text = report_text(break_down_run(run_row(name=evil, command=(evil,)), rows, [incident]))
    text += incident_list([incident]) + "\n".join(incident_block(incident, full=True))

    assert run
    assert not any(ord(char) < 32 and char != "\n" for char in text)


def test_a_run_without_a_checkpoint_is_told_so_plainly():
    (first, *_) = advice(break_down_run(*a_killed_run()))

    assert "57 steps were made a second time" in first
    assert "began again at step 1: the job loads no checkpoint" in first
    assert "in a Hugging Face Trainer GpuopsCallback, see docs/frameworks.md" in first
    assert "25.0 s" in first


def start(why, *, is_fresh=True, lost_step=None):
    return CheckpointStart(is_fresh=is_fresh, why=why, lost_step=lost_step)


def advised(starts):
    return advice(replace(break_down_run(*a_killed_run()), starts=starts))


@pytest.mark.parametrize(
    ("is_fresh", "advised_to"),
    [(True, "set a directory (--ckpt-dir)"), (False, "persist_every= sets how often")],
)
def test_steps_that_were_lost_with_a_keeper_are_not_blamed_on_the_interval(is_fresh, advised_to):
    (first, *_) = advised({1: start("it died", is_fresh=is_fresh, lost_step=55)})

    assert "57 steps were made a second time, in 25.0 s, because the keeper of the check" in first
    assert "before attempt 1 (step 55)" in first
    assert advised_to in first
    assert "save" not in first


def test_steps_that_were_lost_with_a_damaged_state_are_not_blamed_on_the_interval():
    run, rows, incidents = a_killed_run()
    rows = [rows[0], replace(rows[1], steps_first=31)]
    found = replace(
        break_down_run(run, rows, incidents),
        starts={1: start("step 55 (epoch 0) is skipped: /c/x is corrupt", is_fresh=False)},
    )
    (first, *_) = advice(found)

    assert "because a newer checkpoint could not be loaded: step 55 (epoch 0) is skipped" in first
    assert "save more often" not in first


def test_a_job_with_a_checkpointer_is_told_why_it_had_nothing_to_load():
    why = "no state is in memory, and no directory is set"
    (first, *_) = advised({0: start(""), 1: start(why)})

    assert f"because the Checkpointer of attempt 1 had nothing to load: {why}; save ear" in first
    assert "loads no checkpoint" not in first


def test_one_step_is_one_step():
    found = break_down_run(*a_killed_run())
    one = [replace(item, redone_steps=item.redone_steps and 1) for item in found.attempts]

    assert advice(replace(found, attempts=tuple(one)))[0].startswith(
        "1 step was made a second time"
    )


def test_the_same_exception_twice_is_blamed_once_and_restarts_are_called_useless():
    found = repeated()
    text = report_text(found)

    assert "2 times: ranks 0-1 on n041 raised ValueError" in text
    assert "another restart will not help" in advice(found)[0]


def test_where_the_job_went_on_is_no_evidence_and_never_left_out():
    words = "resumed from step 41: ranks 0-1 from memory; 25 MB in all in 0.02 s"
    seen = [Evidence(role=Role.SYMPTOM, text=f"rank {n} went too") for n in range(30)]
    went_on = Evidence(role=Role.RECOVERY, text=words)
    incident = replace(incident_of(raised(0)), evidence=(*seen, went_on))
    text = "\n".join(incident_block(incident))

    assert f"  recovery   {words}" in text
    assert "recovery:" not in text
    assert Incident.from_json(incident.to_json()) == incident


def test_an_unresolved_incident_stays_visible():
    run, rows, _ = a_killed_run()
    incident = incident_of(raised(0, f"RuntimeError: {PEER_CLOSED}"), terminated(1))
    text = report_text(break_down_run(run, rows, [incident]))

    assert "nobody found: 1 rank on n041 lost a peer" in text
    assert "has no known cause" in text
    assert "suspect: rank 1" in text


@pytest.mark.parametrize(
    ("more", "to_check"),
    [
        ({}, "check n4 ("),
        ({"nodes": ("n4",), "is_local": False}, "check n4 ("),
        ({"nodes": (), "is_local": False}, "check where rank 1 ran ("),
        ({"suspects": (0, 1), "nodes": ("n3", "n4"), "by_majority": False}, "check n3 and n4 ("),
        ({"suspects": (), "is_local": False}, "check where these ranks ran ("),
    ],
    ids=["here", "there", "moved", "tie", "many"],
)
def test_ranks_that_differ_are_advice_until_they_are_equal_again(more, to_check):
    """What is open says which nodes to check, and never that there is nothing to change."""
    run, rows, _ = a_killed_run()
    told = {"step": 12, "epoch": 1, "ranks": "0-2", "suspects": (1,), "by_majority": True}
    told |= {
        "description": "rank 1 differs from ranks 0, 2 in w at step 12",
        "is_local": True,
        **more,
    }
    found = ReplicaMismatch(**told)
    incident = incident_from_replicas(found, run_id=RUN, node="n4", at_us=us(20))
    (said,) = advice(break_down_run(run, rows[1:], [incident]))

    assert said.startswith("rank 1 differs from ranks 0, 2 in w at step 12, and no later")
    assert to_check in said
    assert "an earlier checkpoint" in said
    over = close(incident, at_us=us(30), lost_s={}, resolution="ranks 0-2 are equal again")
    assert "nothing to change" in advice(break_down_run(run, rows[1:], [over]))[0]


def test_unknown_steps_are_shown_as_unknown():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), outcome="failed", beats=50),
        attempt_row(1, (41, 45, None, 95, 96), beats=90, step_source="counted"),
    ]
    text = " ".join(report_text(break_down_run(run_row(), rows, [])).split())

    assert "unknown (50 beats)" in text
    assert "90 counted" in text
    assert "ETTR between 0.30 and 0.80 (50.0 s unknown)" in text
    assert "repeated steps cannot be told from new ones" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"ended_us": None, "outcome": None},
            "no end on record; last event at 2023-11-14 22:14:01",
        ),
        ({"outcome": "cancelled", "exit_code": 130}, "cancelled without a restart"),
    ],
)
def test_the_headline_says_how_the_run_stands(changes, expected):
    row = attempt_row(0, (1, 10, None, 40, 41), (1, 57), changes["outcome"])
    text = report_text(break_down_run(run_row(**changes), [row], []))

    assert expected in text.splitlines()[0]


def test_a_cancelled_run_blames_nobody_and_needs_no_advice():
    row = attempt_row(0, (1, 10, None, 40, 41), (1, 57), "cancelled")
    incident = incident_from_cancel(
        "SIGINT",
        [terminated(0)],
        run_id=RUN,
        attempt=0,
        node=NODE,
        rules=(),
        detected_us=us(41),
        detected_mono_ns=101 * S,
    )
    found = break_down_run(run_row(outcome="cancelled", exit_code=130), [row], [incident])
    text = report_text(found)

    assert "blame      nobody: cancelled by SIG" in text
    assert "cost       nothing\n" in text
    assert advice(found) == []


def test_a_run_that_never_started_an_attempt_has_a_report():
    text = report_text(break_down_run(run_row(outcome="failed"), [], []))

    assert "none on record" in text
    assert "blame      not known: no incident on record" in text
    assert "cost       the cost of the failure is not known; ETTR 0.00" in text


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (
            AgentLiveness.GONE,
            "the agent is gone (killed?), last event at 2023-11-14 22:14:00 UTC",
        ),
        (AgentLiveness.RUNNING, "still running; last event at 2023-11-14 22:14:00 UTC"),
        (AgentLiveness.UNKNOWN, "no end on record; last event at 2023-11-14 22:14:00 UTC"),
    ],
)
def test_a_run_without_an_end_is_never_said_to_have_not_failed(agent, expected):
    row = attempt_row(0, (1, 10, None, 40, None), (1, 57), None)
    found = break_down_run(run_row(ended_us=None, outcome=None), [row], [], agent=agent)
    text = report_text(found)

    assert text.splitlines()[0] == f"run demo (abcd1234): {expected}"
    assert "blame      not known: no incident on record" in text
    assert ("running" in text.partition("attempts")[2]) is (agent is AgentLiveness.RUNNING)
    assert report_json(found)["run"]["agent"] == agent.value


def test_above_a_run_that_failed_at_once_something_is_lost():
    row = attempt_row(0, (1, None, None, None, 1.25), outcome="failed")
    found = break_down_run(run_row(ended_us=us(2), outcome="failed", exit_code=1), [row], [])
    text = report_text(found)

    assert "cost       0.25 s lost to failures (detect 0.25 s); ETTR 0.00" in text
    assert "attempt 0 failed before a step was seen, so all of that time counts" in text


def test_many_incidents_are_summed_up():
    incidents = [incident_of(killed(0), attempt=n) for n in range(14)]
    run, rows, _ = a_killed_run()
    text = report_text(break_down_run(run, rows, incidents))

    assert "and 4 more incidents" in text


def test_a_list_of_incidents_fits_eighty_columns():
    found = [incident_of(killed(0)), incident_of(killed(1), attempt=1)]
    lines = incident_list(found, width=80).splitlines()

    assert max(map(len, lines)) <= 80
    assert len(lines) == 5
    for line in lines[2::2]:
        assert re.match(r" {10}(run \w+|no run), (lost .+|cost not known): \w", line)


def test_the_list_has_two_lines_an_incident():
    lines = incident_list([incident_of(killed(0)), incident_of(killed(1), attempt=1)]).splitlines()

    assert len(lines) == 1 + 4
    assert "host_mem.sigkill_probable" in lines[1]
    assert lines[2].strip() == "rank 0 on n041 was ended by SIGKILL at step 57"


def test_small_helpers():
    assert truncate("abcdef", 4) == "abc…"
    assert count_noun(1, "rank") == "1 rank"
    assert count_noun(0, "rank") == "0 ranks"
    assert table(("a", "b"), [("1", "x"), ("22", "y")], right=(0,)) == " a  b\n 1  x\n22  y"
