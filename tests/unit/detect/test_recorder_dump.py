"""Dumps of torch's flight recorder, as they are read: right ones, damaged and hostile ones."""

import json
import pickle
from pathlib import Path

import pytest
from support.recorded_job import entry

from gpuops.convert.flight_recorder import read_dump
from gpuops.detect import recorder_dump


def parse_dump(data, rank=0):
    return recorder_dump.parse_dump(read_dump(data), rank)


class Runs:
    """Creates a file where a pickle of it is loaded by Python's own unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_of_torch_is_read_as_its_json():
    frames = [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 1},
        {"name": "train", "filename": "/home/u/train.py", "line": 42},
    ]
    body = {"entries": [entry("0", 3, "nccl:all_reduce", frames=frames)]}
    body["pg_config"] = {"0": {"name": "0", "ranks": "[1, 0]"}, "": {"ranks": "[]"}}

    found = parse_dump(pickle.dumps(body), 7)

    assert found == parse_dump(json.dumps(body).encode(), 7)
    assert found.members == {"0": (0, 1)}
    assert found.calls[0].place == "/home/u/train.py:42"


@pytest.mark.parametrize(
    ("backend", "state", "is_retired", "is_complete"),
    [
        ("gloo", "scheduled", True, True),
        ("gloo", "scheduled", False, False),
        ("nccl", "completed", False, True),
        ("nccl", "started", True, False),
    ],
)
def test_gloo_says_by_retired_what_nccl_says_by_state(backend, state, is_retired, is_complete):
    one = entry("0", 1, f"{backend}:all_reduce", state=state, retired=is_retired)

    assert (
        parse_dump(json.dumps({"entries": [one]}).encode(), 0).calls[0].is_complete is is_complete
    )


def test_a_pickle_that_names_a_class_is_refused_and_runs_nothing(tmp_path):
    data = pickle.dumps({"entries": [Runs(tmp_path / "ran")]})

    with pytest.raises(ValueError, match="is not admitted"):
        parse_dump(data, 0)
    assert not (tmp_path / "ran").exists()


def small_pickle_of_many_values():
    """Return a pickle of 2 KB that names 200 ** 5 values."""
    value = []
    for _ in range(5):
        value = [value] * 200
    return pickle.dumps({"entries": value})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        pickle.dumps({"entries": []})[:-3],
        b"not a dump",
        b"[1, 2]",
        b'{"entries": 5}',
        b'{"entries": [5]}',
        b'{"entries": [{"profiling_name": 5}]}',
        b'{"entries": [{"profiling_name": "nccl:x", "process_group": []}]}',
        b'{"entries": [{"profiling_name": "nccl:x", "process_group": ["0"]}]}',
        b"[" * 100_000,
        json.dumps({"entries": [entry("0", -1, "nccl:all_reduce")]}).encode(),
        pickle.dumps({"entries": [entry("0", 10**5000, "nccl:all_reduce")]}),
        small_pickle_of_many_values(),
    ],
    ids=range(14),
)
def test_what_is_no_dump_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        parse_dump(data, 0)


def test_what_a_dump_says_beyond_the_known_is_left_out():
    odd = entry("0", 1, "nccl:send x->y", sizes=[[1] * 99], input_dtypes=[5], frames="none", new=1)
    body = {
        "entries": [odd],
        "pg_config": {"0": {"ranks": "[1,"}, "1": 5, "2": {"ranks": "[-5]"}},
        "new": {},
    }

    found = parse_dump(json.dumps(body).encode(), 0)

    assert (found.calls[0].peer, found.calls[0].dtypes, found.members) == (None, (), {})
    assert len(found.calls[0].sizes[0]) == 16


@pytest.mark.parametrize(
    ("written", "duration_s"), [(2.5, 0.0025), (0, 0.0), (-1.0, None), ("2", None), (None, None)]
)
def test_when_and_how_long_a_collective_was_is_kept(written, duration_s):
    about = {"time_created_ns": 1_795_000_000_000_000_000, "duration_ms": written}
    body = {"entries": [entry("0", 1, "nccl:all_reduce") | about]}

    (call,) = parse_dump(json.dumps(body).encode()).calls

    assert (call.backend, call.created_ns) == ("nccl", 1_795_000_000_000_000_000)
    assert call.duration_s == duration_s
