"""The run's folder, its state and its rings."""

import json
import os

import pytest

from gpuops.agent.rings import RingReader
from gpuops.agent.rundir import (
    SAFE_NAME,
    RunDirectory,
    create_rings,
    folder_name,
    writable_parent,
)
from gpuops.errors import UsageError
from gpuops.wire import (
    RING_BYTES,
    SLOTS,
    Beat,
    Phase,
    RingHeader,
    StepSource,
    write_beat,
    write_header,
)


@pytest.mark.parametrize("name", ["train", "a b/c", "..", "", "x" * 200, "née", "-rf"])
def test_a_folder_name_is_safe_whatever_the_run_is_called(name):
    folder = folder_name(name, "01a1fa5f-0ddb-70e5-a0e9-00493e185152", 1_772_442_840_000_000)

    assert SAFE_NAME.fullmatch(folder)
    assert folder.startswith("20260302T091400Z-")
    assert folder.endswith("-3e185152")


def test_a_directory_that_the_user_named_must_be_writable(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()

    with pytest.raises(UsageError, match=r"cannot write .*file/runs: Not a directory"):
        writable_parent(blocked / "runs", was_asked_for=True, fallbacks=[tmp_path])
    fallback = writable_parent(blocked / "runs", was_asked_for=False, fallbacks=[tmp_path / "b"])
    assert fallback == tmp_path / "b"


def test_the_state_file_is_replaced_as_a_whole(tmp_path):
    directory = RunDirectory(tmp_path, tmp_path / "rings")
    directory.write_state({"generation": 0}, group_rank=0)
    directory.write_state({"generation": 1}, group_rank=0)
    directory.write_state({"generation": 1}, group_rank=1)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["state-1.json", "state.json"]
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {"schema": "gpuops.run-state/1", "generation": 1}


def test_rings_of_dead_agents_are_removed_and_those_of_the_living_stay(tmp_path):
    dead, living = tmp_path / "gpuops-rings-4194305-x", tmp_path / f"gpuops-rings-{os.getpid()}-y"
    dead.mkdir()
    living.mkdir()

    mine = create_rings([tmp_path / "none", tmp_path])

    assert not dead.exists()
    assert living.exists()
    assert mine.stat().st_mode & 0o777 == 0o700


def beat(seq):
    return Beat(seq, seq, seq, Phase.STEPPING, StepSource.OPTIMIZER_STATE, seq)


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
