"""The benchmark of checkpoints runs, in small, and has every row; what it measures is no matter."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SMALL = "--size 8MB --tensors 30 --small-tensors 60 --rounds 2 --step 1ms --kills 2 --flips 30"
WAYS = {
    "memcpy",
    "write + fsync",
    "write past the cache + fsync",
    "gpuops",
    "dcp.save",
    "dcp.save, 2 threads, no fsync",
    "dcp.async_save, thread",
    "dcp.async_save, thread, kept stager",
    "dcp.async_save, process",
    "dcp.async_save, process, kept stager",
    "torch.save",
}


def run(folder, *options):
    argv = [sys.executable, "-m", "gpuops", "ckpt", "bench", "--dir", str(folder), *options]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def body(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    done = run(folder, *SMALL.split(), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(folder.glob("gpuops-bench-*")) == []
    return json.loads(done.stdout)


def numbers(figures):
    return [figures[name] for name in ("first", "median", "min", "max")]


def test_the_envelope_says_what_was_measured(body):
    assert body["schema"] == "gpuops.checkpoint-bench/1"
    assert body["plan"]["nbytes"] == 8_000_000
    assert body["plan"]["rounds"] == 2
    assert list(body["did_not_run"]) == ["peer recovery"]


@pytest.mark.parametrize(("row", "n_tensors"), [("save", 30), ("small", 60)])
def test_every_way_to_save_has_positive_times(body, row, n_tensors):
    found = body[row]

    assert {way["way"] for way in found["ways"]} == WAYS
    assert found["n_tensors"] == n_tensors
    for way in found["ways"]:
        assert way["stall_s"]["n"] == 2
        assert all(value > 0 for value in numbers(way["stall_s"]) + numbers(way["durable_s"]))
        assert way["durable_s"]["median"] >= way["stall_s"]["median"]
    by_name = {way["way"]: way for way in found["ways"]}
    assert all(value > 0 for value in numbers(by_name["gpuops"]["recoverable_s"]))
    assert by_name["gpuops"]["loss"]["n"] == 2
    assert all(value > 0 for ratio in found["ratios"].values() for value in numbers(ratio))


def test_killed_workers_are_restored(body):
    ways = {way["way"]: way["seconds"] for way in body["recovery"]["ways"]}

    assert set(ways) == {
        "memcpy",
        "memcpy out of another process's memory",
        "hash, one thread",
        "gpuops",
        "dcp.load",
        "torch.load",
        "torch.load, mmap",
        "safetensors load_file",
    }
    assert all(value > 0 for figures in ways.values() for value in numbers(figures))
    for kills in (body["recovery"]["kills"], body["kills"]):
        assert kills["n"] >= 2
        assert (kills["unrecoverable"], kills["wrong"]) == (0, 0)
        assert kills["lost_max"] <= 1


def test_every_flipped_bit_is_found_and_nothing_else(body):
    ours = [tally for tally in body["flips"] if tally["way"] == "gpuops"]

    assert {tally["where"] for tally in ours} == {"slot", "wire", "disk"}
    for tally in ours:
        assert tally["found"] == tally["flips"] == 10
        assert tally["alarms"] == 0
    assert {tally["way"] for tally in body["flips"]} == {
        "gpuops",
        "DCP",
        "torch.save",
        "safetensors",
    }


def test_the_published_odds_are_counted(body):
    assert [round(row["exact"], 3) for row in body["odds"]] == [0.933, 0.8]
    for row in body["odds"]:
        assert abs(row["simulated"] - row["exact"]) < 0.02


def test_each_goal_says_beside_what_and_whether_it_is_met(body):
    metrics = {goal["metric"] for goal in body["goals"]}

    assert {"stall", "recoverable", "durable", "recovery", "saves lost"} <= metrics
    assert all(goal["value"] is not None and goal["beside"] for goal in body["goals"])


def test_a_part_is_printed_as_a_table(tmp_path):
    done = run(tmp_path, "--only", "odds")

    assert done.returncode == 0, done.stderr
    assert "93.3 %" in done.stdout


def test_an_unknown_row_is_refused(tmp_path):
    done = run(tmp_path, "--only", "speed")

    assert done.returncode == 64
    assert "there are save, small" in done.stderr
