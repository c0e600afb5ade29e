"""The benchmarks of checkpoints run, in small, and have every row; the figures do not matter.

``gpuops ckpt bench`` measures this machine; tests/benchmarks/bench_checkpoint.py has the same rows
beside torch's own ways, and tests that nothing is lost by kills and flipped bits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_checkpoint.py"
SMALL = "--size 8MB --tensors 30 --small-tensors 60 --rounds 2 --step 1ms"
LIMITS = {"memcpy", "write + fsync", "write past the cache + fsync", "gpuops"}
TORCH = {
    "dcp.save",
    "dcp.save, 2 threads, no fsync",
    "dcp.async_save, thread",
    "dcp.async_save, thread, kept stager",
    "dcp.async_save, process",
    "dcp.async_save, process, kept stager",
    "torch.save",
}
RESTORE_LIMITS = {
    "memcpy",
    "memcpy out of another process's memory",
    "hash, one thread",
    "memcpy, one thread",
    "gpuops",
    "gpuops, not mapped before",
}
TORCH_LOADS = {"dcp.load", "torch.load", "torch.load, mmap", "safetensors load_file"}
GOALS = {"stall", "recoverable", "durable", "recovery", "training slower while persisting"}


def run(folder, *argv):
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=280, check=False
    )


def bench(folder, *options):
    return run(folder, "-m", "gpuops", "ckpt", "bench", "--dir", str(folder), *options)


def numbers(figures):
    return [figures[name] for name in ("first", "median", "min", "max")]


def check_saves(found, names, n_tensors):
    assert {way["way"] for way in found["ways"]} == names
    assert found["n_tensors"] == n_tensors
    for way in found["ways"]:
        assert way["stall_s"]["n"] == 2
        assert all(value > 0 for value in numbers(way["stall_s"]) + numbers(way["durable_s"]))
        assert way["durable_s"]["median"] >= way["stall_s"]["median"]
    by_name = {way["way"]: way for way in found["ways"]}
    assert all(value > 0 for value in numbers(by_name["gpuops"]["recoverable_s"]))
    # A save that is durable before the next step slows none: its two durations are one number.
    ours = by_name["gpuops"]
    at_once = {ours["durable_s"][name] for name in ("min", "max")} & {
        ours["stall_s"][name] for name in ("min", "max")
    }
    assert ours["loss"]["n"] == 2 - len(at_once)
    assert all(value > 0 for ratio in found["ratios"].values() for value in numbers(ratio))


def check_envelope(body):
    assert body["schema"] == "gpuops.checkpoint-bench/1"
    assert body["plan"]["nbytes"] == 8_000_000
    assert body["plan"]["rounds"] == 2


def check_restores(row, names):
    ways = {way["way"]: way["seconds"] for way in row["ways"]}
    assert set(ways) == names
    assert all(value > 0 for figures in ways.values() for value in numbers(figures))


def check_goals(body):
    for goal in body["goals"]:
        assert goal["value"] is not None
        assert goal["beside"]
    return {goal["metric"] for goal in body["goals"]}


def test_this_machine_is_measured(tmp_path):
    done = bench(tmp_path, *SMALL.split(), "--json")

    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("gpuops-bench-*")) == []
    body = json.loads(done.stdout)
    check_envelope(body)
    check_saves(body["save"], LIMITS, 30)
    check_saves(body["small"], LIMITS, 60)
    check_restores(body["recovery"], RESTORE_LIMITS)
    assert check_goals(body) == GOALS


def test_others_are_measured_and_nothing_is_lost(tmp_path):
    rows = "save,small,recovery,kills,flips,odds"
    out = tmp_path / "figures.json"
    options = [
        "--kills",
        "2",
        "--flips",
        "30",
        "--no-peers",
        "--dir",
        str(tmp_path),
        "--only",
        rows,
        "--out",
        str(out),
    ]
    done = run(tmp_path, str(SCRIPT), *SMALL.split(), *options)

    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("gpuops-bench-*")) == []
    body = json.loads(out.read_text())
    check_envelope(body)
    assert body["did_not_run"] == {}
    check_saves(body["save"], LIMITS | TORCH, 30)
    small = LIMITS | {"dcp.save", "dcp.async_save, thread"}
    check_saves(body["small"], small, 60)
    check_restores(body["recovery"], RESTORE_LIMITS | TORCH_LOADS)
    assert GOALS | {"saves lost"} <= check_goals(body)
    for kills in (body["recovery"]["kills"], body["kills"]):
        assert kills["n"] >= 2
        assert (kills["unrecoverable"], kills["wrong"]) == (0, 0)
        assert kills["lost_max"] <= 1
    check_flips(body["flips"])
    assert [round(row["exact"], 3) for row in body["odds"]] == [0.933, 0.8]
    for row in body["odds"]:
        assert abs(row["simulated"] - row["exact"]) < 0.02
    assert "93.3 %" in done.stdout


def check_flips(tallies):
    ours = [tally for tally in tallies if tally["way"] == "gpuops"]
    assert {tally["where"] for tally in ours} == {"slot", "wire", "disk"}
    for tally in ours:
        assert tally["found"] == tally["flips"] == 10
        assert tally["alarms"] == 0
    assert {tally["way"] for tally in tallies} == {"gpuops", "DCP", "torch.save", "safetensors"}


def test_a_part_is_printed_as_a_table(tmp_path):
    done = bench(tmp_path, *SMALL.split(), "--only", "save,recovery")

    assert done.returncode == 0, done.stderr
    heads = next(line for line in done.stdout.splitlines() if line.startswith("┃ save "))
    assert all(cell.strip() for cell in heads.split("┃")[1:-1]), "a row with more cells than heads"
    assert "memcpy out of another process's memory" in done.stdout


def test_an_unknown_row_is_refused(tmp_path):
    done = bench(tmp_path, "--only", "speed")

    assert done.returncode == 64
    assert "there are save, small" in done.stderr
