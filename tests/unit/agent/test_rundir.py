"""The run's folder, its state and its rings."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gpuops.agent.elastic.workers import RingReader
from gpuops.agent.journal.run_dir import (
    RunDirectory,
    RunParent,
    create_rings,
    folder_name,
    writable_parent,
)
from gpuops.control.record import FOLDER_PATTERN
from gpuops.errors import UsageError
from gpuops.wire.ring import (
    RING_BYTES,
    SLOTS,
    Beat,
    RingHeader,
    StepSource,
    WorkerPhase,
    write_beat,
    write_header,
)


@pytest.mark.parametrize("name", ["train", "a b/c", "..", "", "x" * 200, "née", "-rf"])
def test_a_folder_name_is_safe_whatever_the_run_is_called(name):
    folder = folder_name(name, "01a1fa5f-0ddb-70e5-a0e9-00493e185152", 1_772_442_840_000_000)

    assert FOLDER_PATTERN.fullmatch(folder)
    assert folder.startswith("20260302T091400Z-")
    assert folder.endswith("-3e185152")


def test_a_directory_that_the_user_named_must_be_writable(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()

    with pytest.raises(UsageError, match=r"cannot write .*file/runs: Not a directory"):
        writable_parent(blocked / "runs", was_asked_for=True, fallbacks=[tmp_path])
    fallback = writable_parent(blocked / "runs", was_asked_for=False, fallbacks=[tmp_path / "b"])
    assert fallback == RunParent(tmp_path / "b", "Not a directory")


def test_a_directory_that_can_be_written_is_as_the_users_umask_has_it(tmp_path):
    before = os.umask(0o027)
    try:
        found = writable_parent(tmp_path / "runs", was_asked_for=False, fallbacks=[])
    finally:
        os.umask(before)

    assert found == RunParent(tmp_path / "runs")
    assert found.path.stat().st_mode & 0o777 == 0o750


def test_a_fallback_that_somebody_else_prepared_gives_way_to_a_new_one(tmp_path):
    (tmp_path / "trap").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "trap")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()

    found = writable_parent(
        tmp_path / "file" / "runs",
        was_asked_for=False,
        fallbacks=[tmp_path / "link", tmp_path / "open"],
    )

    try:
        assert found.path.parent == Path(tempfile.gettempdir())
        assert found.path.stat().st_mode & 0o777 == 0o700
    finally:
        found.path.rmdir()


def test_the_state_file_is_replaced_as_a_whole(tmp_path):
    directory = RunDirectory(tmp_path, tmp_path / "rings")
    directory.write_state({"generation": 0}, group_rank=0)
    directory.write_state({"generation": 1}, group_rank=0)
    directory.write_state({"generation": 1}, group_rank=1)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["state-1.json", "state.json"]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {"schema": "gpuops.run-state/1", "generation": 1}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_rings_of_dead_agents_are_removed_and_those_of_the_living_stay(tmp_path):
    dead, lock = create_rings([tmp_path])
    living, other = create_rings([tmp_path])
    os.close(lock)

    mine, third = create_rings([tmp_path / "none", tmp_path])

    assert not dead.exists()
    assert living.exists()
    assert mine.stat().st_mode & 0o777 == 0o700
    os.close(other)
    RunDirectory(tmp_path, mine, third).remove_rings()
    assert not mine.exists()


def test_rings_of_older_generations_are_given_back(tmp_path):
    mine, lock = create_rings([tmp_path])
    directory = RunDirectory(tmp_path, mine, lock)
    for generation in (0, 9, 10):
        directory.ring(generation, 3).parent.mkdir()
        directory.ring(generation, 3).write_bytes(b"beats")
    before = {path.name for path in mine.iterdir()}

    directory.remove_rings_before(10)

    assert before - {path.name for path in mine.iterdir()} == {"generation-0", "generation-9"}
    assert directory.ring(10, 3).read_bytes() == b"beats"
    directory.remove_rings()


def test_rings_of_an_agent_whose_process_id_means_nothing_here_stay(tmp_path):
    code = (
        "import sys; from pathlib import Path; from gpuops.agent.journal.run_dir import "
        "create_rings\n"
        "print(create_rings([Path(sys.argv[1])])[0], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        theirs = Path(agent.stdout.readline().strip())
        os.close(create_rings([tmp_path])[1])
        lived = theirs.exists()
        agent.kill()
        agent.wait()
        os.close(create_rings([tmp_path])[1])

    assert lived
    assert not theirs.exists()


def beat(seq):
    return Beat(seq, seq, seq, WorkerPhase.STEPPING, StepSource.OPTIMIZER_STATE, seq)


def test_a_reader_returns_each_beat_once_and_follows_a_wrapped_ring(tmp_path):
    path = tmp_path / "rank0.ring"
    reader = RingReader(path)
    assert reader.poll() == []
    ring = bytearray(RING_BYTES)
    write_header(ring, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    write_beat(ring, beat(1))
    path.write_bytes(ring)

    assert [b.seq for b in reader.poll()] == [1]
    assert reader.poll() == []
    for seq in range(2, SLOTS + 10):
        write_beat(ring, beat(seq))
    with path.open("r+b") as file:
        file.write(ring)
    assert len(reader.poll()) == SLOTS
    reader.close()


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"\xff" * RING_BYTES])
def test_a_damaged_ring_has_no_beats(tmp_path, data):
    path = tmp_path / "rank0.ring"
    path.write_bytes(data)
    reader = RingReader(path)

    assert reader.poll() == []
    assert reader.poll() == []
    reader.close()


def test_the_ring_of_another_gpuops_is_named_once_and_has_no_beats(tmp_path, caplog):
    path = tmp_path / "rank0.ring"
    ring = bytearray(RING_BYTES)
    write_header(ring, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    write_beat(ring, beat(1))
    ring[8] = 2
    path.write_bytes(ring)
    reader = RingReader(path)

    assert [reader.poll() for _ in range(3)] == [[], [], []]
    reader.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("the heartbeats in rank0.ring are ignored (not a heartbeat ring of ver")
    assert "install the same" in line
