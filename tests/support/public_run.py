"""What a real ``gpuops run`` shows: to its workers, in its folder, over HTTP, in the store."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuops.store.spool.format import decode_line
from support.public_shape import keys, shape

JOB = Path(__file__).parents[1] / "fixtures" / "jobs" / "tells_its_surroundings.py"
FLAGS = ("--standalone", "--nproc-per-node=1", "--max-restarts=1", "--health-gate=off")
# Whether there are others depends on how long things take.
KINDS = {
    *("node.seen", "run.started", "run.phase", "run.ended", "worker.exited", "agent.report"),
    *("attempt.started", "attempt.first_step", "attempt.caught_up", "attempt.progress"),
    *("attempt.ended", "decision.made", "incident.recorded", "checkpoint.keeper"),
}


def one_run():
    """Return what a run of one rank tells that fails once and is restarted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": name,
            "GPUOPS_STORE": f"sqlite:///{folder / 'store.db'}",
            "GPUOPS_SPOOL": str(folder / "spool"),
            "GPUOPS_STATE": str(folder / "state"),
            "GPUOPS_RUN_DIR": str(folder / "runs"),
        }
        limits = _gpuops(env, "--print-timeouts", "--json", *FLAGS, JOB)
        _gpuops(env, *FLAGS, JOB, folder)
        told = json.loads((folder / "told.json").read_text())
        return {
            "environment of a worker": _environment(told["environment"], set(env)),
            "files of its folder": _files(told["files"]),
            "state.json": shape(told["state file"]),
            "error file": shape(_exception(folder)),
            "/state": keys(json.loads(told["state"])),
            "/metrics": sorted(_families(told["metrics"])),
            "/healthz": told["healthz"],
            "gpuops run status --json": keys(told["status"]),
            "gpuops run --print-timeouts --json": shape(json.loads(limits)),
            "events": _events(folder),
        }


def _gpuops(env, *words):
    command = [sys.executable, "-m", "gpuops", "run", *map(str, words)]
    done = subprocess.run(
        command, env=env, cwd=env["HOME"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment(found, given):
    return sorted(name for name in found if name not in given)


def _files(names):
    return sorted(re.sub(r"journal/.*\.", "journal/WRITER.", name) for name in names)


def _exception(folder):
    (path,) = folder.glob("runs/*/generation-0/rank0/exception.json")
    return json.loads(path.read_text())


def _families(text):
    return [line.removeprefix("# TYPE ") for line in text.splitlines() if line.startswith("# TYPE")]


def _events(folder):
    """Return the keys of each kind's payload."""
    lines = [
        line
        for path in sorted(folder.glob("runs/*/journal/**/*"))
        if path.is_file()
        for line in path.read_bytes().splitlines()
    ]
    by_kind = {}
    for line in lines:
        event = decode_line(line).event
        by_kind.setdefault(event.kind, []).append(event.payload)
    assert by_kind.keys() >= KINDS, by_kind.keys()
    return {kind: keys(*by_kind[kind]) for kind in KINDS}
