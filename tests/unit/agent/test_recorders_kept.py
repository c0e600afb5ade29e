"""Flight recorders as evidence: one private, scrubbed file a hang, and bounded for a run."""

import gzip
import os
import stat

import pytest

from gpuops.agent.monitors.recorder.kept import keep_recorders
from gpuops.convert.flight_recorder import BYTES_MAX, read_dumps
from gpuops.detect.recorder_dump import parse_dump

BODY = {
    "version": "2.10",
    "entries": [
        {
            "collective_seq_id": 1,
            "process_group": ["0", "password=hunter2"],
            "profiling_name": "gloo:all_reduce",
            "retired": True,
            "frames": [["token: abcdefgh"], {"https://u:secret@host": None}],
        }
    ],
    "pg_config": {"0": {"ranks": [0, 1]}},
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run/generation-0"
    path.mkdir(parents=True)
    return path


def test_a_kept_file_gives_the_dumps_again_without_secrets(folder):
    path = keep_recorders(folder, {0: BODY, 3: BODY | {"entries": []}})

    assert path.parent == folder
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    assert not any(
        secret in gzip.decompress(data) for secret in (b"hunter", b"abcdefgh", b"secret")
    )
    dumps = {rank: parse_dump(body, rank) for rank, body in read_dumps(data).items()}
    assert dumps == {0: parse_dump(BODY, 0), 3: parse_dump(BODY | {"entries": []}, 3)}


def test_the_same_dumps_are_one_file_with_the_name_of_their_digest(folder):
    first, second = (keep_recorders(folder, {0: BODY}) for _ in range(2))

    assert first == second
    assert [*folder.iterdir()] == [first]
    assert keep_recorders(folder, {1: BODY}) != first


def test_the_oldest_of_a_run_make_room(folder, caplog):
    size = keep_recorders(folder, {0: BODY}).stat().st_size
    later = folder.with_name("generation-1")
    later.mkdir()
    other = folder / "stdout.log"
    other.write_text("x" * 10 * size)
    files = [next(folder.glob("*.gz"))]
    for number in (1, 2, 3):
        files.append(keep_recorders(later, {number: BODY}, 3 * size + size // 2))
        for age, file in enumerate(reversed(files)):
            if file.exists():
                os.utime(file, (1000 - age, 1000 - age))

    assert [file.exists() for file in files] == [False, True, True, True]
    assert f"{files[0]} is removed" in caplog.text
    assert other.exists()


def test_what_is_too_large_alone_or_cannot_be_written_is_said(folder, caplog):
    assert keep_recorders(folder, {0: BODY}, 10) is None
    assert "are not kept" in caplog.text
    caplog.clear()
    assert keep_recorders(folder / "gone", {0: BODY}) is None
    assert "are not kept: [Errno 2]" in caplog.text
    assert [*folder.iterdir()] == []


def zipped(text):
    return gzip.compress(text.encode())


DAMAGED = {
    "not compressed": (b'{"ranks": {}}', "no gzip file"),
    "cut off": (zipped('{"ranks": {}}')[:-9], "cut off"),
    "no JSON": (zipped("x"), "neither JSON nor a pickle"),
    "a list": (zipped("[]"), "no dumps by rank"),
    "other names": (zipped('{"ranks": {"-1": {}}}'), "no dumps by rank"),
    "a bomb": (zipped(" " * (BYTES_MAX + 1)), "larger than 256 MiB"),
}


@pytest.mark.parametrize(("data", "why"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        read_dumps(data)
