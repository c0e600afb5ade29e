"""The history of a run's step time, from what every run records by itself."""

import json
from dataclasses import replace

import pytest
from support.command import command_here
from support.history import T0, a_killed_run, record_run

from gpuops.host.clock import FakeClock
from gpuops.report.render.step_history import ROWS_MAX, history_text
from gpuops.store.events import new_event
from gpuops.store.queries.run_queries import ProgressRow
from gpuops.store.spool.record import spool_recorder
from gpuops.units import US_PER_S

MINUTE_US = 60 * US_PER_S


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    return command_here(tmp_path, monkeypatch, capsys)


def record(tmp_path, minutes):
    """Record the killed run with *minutes*: attempt, minute, step, median and longest step."""
    clock = FakeClock(T0)
    place = {"node": "n041", "boot_id": "b", "bytes_max": 2**24, "clock": clock}
    folder = tmp_path / "run"
    recorder = spool_recorder(tmp_path / "spool", journal=folder / "journal", **place)
    run, attempts, incidents = a_killed_run()
    record_run(recorder, run, attempts, incidents, clock)
    for attempt, minute, step, p50_us, max_us in minutes:
        payload = {
            "minute_us": T0 + minute * MINUTE_US,
            "step_last": step,
            "beats": 60,
            "step_time_p50_us": p50_us,
            "step_time_max_us": max_us,
        }
        where = {"node": "n041", "clock": clock, "run_id": run.id, "attempt": attempt}
        recorder.record(new_event("attempt.progress", payload=payload, **where))
    recorder.close()
    return folder


MINUTES = [
    (0, -2, 30, 400_000, 600_000),
    (0, -1, 57, 415_000, 500_000),
    (1, 1, None, None, None),
    (1, 2, 120, 830_000, 9_000_000),
]


@pytest.mark.parametrize("source", ["store", "folder"])
def test_step_times_and_what_was_detected_are_in_the_order_of_time(tmp_path, call, source):
    folder = record(tmp_path, MINUTES)
    words = () if source == "store" else ("--run-dir", str(folder))
    code, out, err = call("detect", "show", *words)
    head, names, *lines = out.splitlines()

    assert (code, err) == (0, "")
    assert head.startswith("run demo (abcd1234) from ")
    assert head.endswith(": 0.415 s a step in the median, 3 minutes with steps on record")
    assert names.split() == ["time", "attempt", "to", "step", "median", "longest"]
    assert [line.split()[1:8] for line in (lines[0], lines[1], lines[3])] == [
        ["0", "30", "0.4", "s", "0.6", "s", 14 * "#"],
        ["0", "57", "0.415", "s", "0.5", "s", 15 * "#"],
        ["1", "120", "0.83", "s", "9", "s", 30 * "#"],
    ]
    assert "rank 1 on n041 was ended by SIGKILL" in lines[2]
    assert len(lines) == 4


def test_its_json_has_each_minute_and_the_incidents(tmp_path, call):
    record(tmp_path, MINUTES)
    body = json.loads(call("detect", "show", "abcd1234", "--json")[1])

    assert body["schema"] == "gpuops.detect-show/1"
    assert len(body["minutes"]) == 3
    assert body["minutes"][2] == {
        "attempt": 1,
        "start": "2023-11-14T22:15:20.000000Z",
        "step": 120,
        "step_seconds": 0.83,
        "step_seconds_max": 9.0,
    }
    assert [item["failure_class"] for item in body["incidents"]] == [
        a_killed_run()[2][0].failure_class.value
    ]


def test_a_run_without_a_minute_of_steps_says_so_and_an_unknown_one_is_an_error(tmp_path, call):
    record(tmp_path, [])
    code, out, _ = call("detect", "show")

    assert code == 0
    assert "no step times, 0 minutes with steps on record" in out.splitlines()[0]
    assert call("detect", "show", "ffff0000")[0] == 64


def test_days_are_as_many_rows_as_fit_and_none_spans_two_attempts():
    run = replace(a_killed_run()[0], name="\x1b[2Jlong")
    minutes = [
        ProgressRow(
            ordinal=attempt,
            minute_us=T0 + (5000 * attempt + minute) * MINUTE_US,
            step_last=minute,
            step_time_p50_us=0 if minute == 7 else 100_000,
            step_time_max_us=200_000,
        )
        for attempt in (0, 1)
        for minute in range(4001)
    ]
    _, _, *lines = history_text(run, minutes, ())

    assert len(lines) <= 2 * ROWS_MAX
    assert [line.split()[1] for line in lines] == sorted(line.split()[1] for line in lines)
    assert lines[-1].split()[1:3] == ["1", "4000"]
