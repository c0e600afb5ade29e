"""Recording steps: what is written, when, and what happens where it cannot be."""

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuops.agent.monitors import step_recorder
from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.step_recorder import WRITE_S, StepRecorder
from gpuops.host.clock import FakeClock
from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

WALL_US = 1_700_000_000_000_000
STEPPING = WorkerPhase.STEPPING


def beat(clock, step, phase=STEPPING, counted=None, **more):
    source = StepSource.REPORTED if counted is None else StepSource.COUNTED
    return Beat(1, step, clock.mono_ns(), phase, source, step, "", counted, **more)


def watched(folder, generation=0, ranks=(4, 5), world_size=8):
    workers = [SimpleNamespace(rank=rank) for rank in ranks]
    return MonitoredAttempt(
        generation=generation, node="n1", workers=workers, folder=folder, world_size=world_size
    )


def lines_of(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.fixture
def clock():
    return FakeClock(WALL_US)


@pytest.fixture
def recorder(clock):
    made = StepRecorder(clock, slow_after_s=30.0)
    yield made
    made.close()


def test_each_step_is_a_line_with_what_is_known_of_it(recorder, clock, tmp_path):
    recorder.begin(watched(tmp_path))
    clock.advance(2)
    recorder.feed(
        {
            4: [
                beat(clock, STEP_UNKNOWN, WorkerPhase.STARTING),
                beat(clock, 1, data_us=5, optimizer_us=7, tokens=9),
                beat(clock, 1, WorkerPhase.CHECKPOINT),
                beat(clock, 1),
                beat(clock, 2),
            ],
            5: [beat(clock, STEP_UNKNOWN), beat(clock, STEP_UNKNOWN, counted=1)],
        }
    )
    recorder.close()

    path = tmp_path / "steps-4.jsonl.gz"
    schema = "gpuops.step-trace/1"
    assert lines_of(path) == [
        {
            "schema": schema,
            "generation": 0,
            "node": "n1",
            "ranks": [4, 5],
            "slow_after_s": 30.0,
        },
        {
            "rank": 4,
            "step": 1,
            "time_us": WALL_US + 2_000_000,
            "data_us": 5,
            "optimizer_us": 7,
            "tokens": 9,
        },
        {"rank": 4, "step": 2, "time_us": WALL_US + 2_000_000},
        {"rank": 5, "step": 1, "time_us": WALL_US + 2_000_000},
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_monitor_publishes_is_a_line_when_it_changes(recorder, clock, tmp_path):
    recorder.begin(watched(tmp_path))
    for body in ({"ranks": {"4": "x"}}, {"ranks": {"4": "x"}}, {"ranks": {"4": "y"}}):
        recorder.published("straggler", body)
    recorder.close()

    _, *lines = lines_of(tmp_path / "steps-4.jsonl.gz")
    assert [line["published"]["ranks"]["4"] for line in lines] == ["x", "y"]
    assert lines[0]["monitor"] == "straggler"


def test_lines_are_written_now_and_then_and_each_generation_has_a_file(recorder, clock, tmp_path):
    for generation in (0, 1):
        (tmp_path / str(generation)).mkdir()
        recorder.begin(watched(tmp_path / str(generation), generation))
        for step in (1, 2, 3):
            clock.advance(WRITE_S)
            recorder.feed({4: [beat(clock, step)]})
    recorder.close()

    for generation in (0, 1):
        head, *steps = lines_of(tmp_path / str(generation) / "steps-4.jsonl.gz")
        assert head["generation"] == generation
        assert [line["step"] for line in steps] == [1, 2, 3]


def test_a_folder_that_is_gone_is_said_once_and_ends_it(recorder, clock, tmp_path, caplog):
    recorder.begin(watched(tmp_path / "nowhere"))
    recorder.feed({4: [beat(clock, 1)]})
    recorder.close()
    recorder.begin(watched(tmp_path, 1))
    recorder.feed({4: [beat(clock, 1)]})
    recorder.close()

    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("the steps of this node are no longer recorded: ")
    assert line.endswith("No such file or directory")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_place_of_the_file_is_not_followed(recorder, clock, tmp_path, caplog):
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "steps-4.jsonl.gz").symlink_to(target)
    recorder.begin(watched(tmp_path))
    recorder.close()

    assert target.read_text() == "kept"
    assert len(caplog.records) == 1


def test_a_node_writes_its_share_of_what_a_run_may(recorder, clock, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(step_recorder, "BYTES_MAX", 4 * 400)  # its ranks are a quarter of all
    recorder.begin(watched(tmp_path))
    for step in range(5000):
        clock.advance(WRITE_S)
        recorder.feed({4: [beat(clock, step, data_us=step * 7919 % 10007)]})
        recorder._writer.join()
    recorder.close()

    path = tmp_path / "steps-4.jsonl.gz"
    assert path.stat().st_size <= 400
    assert len(lines_of(path)) > 1
    (line,) = (record.getMessage() for record in caplog.records)
    assert "at most" in line


def test_a_file_system_that_does_not_answer_takes_a_bounded_memory(
    recorder, clock, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(step_recorder, "_LINES_MAX", 10)
    recorder.begin(watched(tmp_path))
    for step in range(100):
        recorder.feed({4: [beat(clock, step)]})
        assert len(recorder._lines) <= 10
    recorder.close()

    assert len(caplog.records) == 1


def test_without_workers_nothing_is_written(recorder, clock):
    recorder.begin(watched(Path("/nowhere"), ranks=()))
    recorder.feed({})
    recorder.close()


def test_a_generation_begins_while_what_the_one_before_wrote_is_not_on_disk(
    recorder, clock, tmp_path
):
    """The pipe in place of its file has no reader: who opens it waits, as on a disk that hangs."""
    os.mkfifo(tmp_path / "steps-4.jsonl.gz")
    recorder.begin(watched(tmp_path))
    recorder.feed({4: [beat(clock, 1)]})
    (tmp_path / "next").mkdir()
    recorder.begin(watched(tmp_path / "next", generation=1))
    recorder.feed({4: [beat(clock, 1)]})
    assert recorder._writer.is_alive()

    pipe = os.open(tmp_path / "steps-4.jsonl.gz", os.O_RDONLY)
    recorder.close()
    os.close(pipe)

    head, step = lines_of(tmp_path / "next" / "steps-4.jsonl.gz")
    assert (head["generation"], step["step"]) == (1, 1)
