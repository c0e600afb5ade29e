"""What a burn-in has done so far, in a file of the state folder: ``--resume`` goes on from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.burnin.measurement import Measurement
from gpuops.errors import UsageError
from gpuops.host.trust import atomic_write, read_json
from gpuops.model import Finding, Json

_SCHEMA = "gpuops.burnin-progress/1"
_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedTest:
    """A test that was done: its findings, and what was measured."""

    __test__ = False  # pytest: no class of tests

    name: str
    findings: tuple[Finding, ...] = ()
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BurninProgress:
    """A burn-in that began at ``start_us``. ``plan``: what was asked for, as one text."""

    plan: str
    start_us: int
    done: tuple[TestedTest, ...] = ()

    def to_json(self) -> Json:
        done = [
            {
                "name": test.name,
                "findings": [item.to_json() for item in test.findings],
                "measurements": [item.to_json() for item in test.measurements],
            }
            for test in self.done
        ]
        return {"schema": _SCHEMA, "plan": self.plan, "start_us": self.start_us, "done": done}


def progress_path(state_dir: Path) -> Path:
    """Return the path of the file below *state_dir*."""
    return state_dir / "burnin.json"


def save_progress(state_dir: Path, progress: BurninProgress) -> str | None:
    """Write *progress*; return what went wrong, or None: the burn-in goes on without it."""
    path = progress_path(state_dir)
    try:
        atomic_write(path, json.dumps(progress.to_json()).encode(), 0o600)
    except OSError as exc:
        return f"cannot write {path}: {exc.strerror}; --resume will not know of this test"
    return None


def forget_progress(state_dir: Path) -> None:
    """Remove the file: the burn-in came to its end."""
    try:
        progress_path(state_dir).unlink(missing_ok=True)
    except OSError:
        return


def load_progress(state_dir: Path, plan: str, uid: int) -> BurninProgress:
    """Return the progress of the burn-in that was interrupted.

    Raises:
        UsageError: There is none, it is damaged or another user's, or it had another *plan*.
    """
    path = progress_path(state_dir)
    found = read_json(path, _BYTES_MAX)
    if found is None or found[1] != uid:
        raise UsageError(f"--resume: {path} holds no interrupted burn-in of yours; leave it out")
    try:
        progress = _progress(found[0])
    except (ArithmeticError, KeyError, TypeError, ValueError) as exc:
        raise UsageError(f"--resume: {path} is damaged ({exc}); leave it out") from exc
    if progress.plan != plan:
        raise UsageError(
            f"--resume: the interrupted burn-in was {progress.plan}, this one is {plan};"
            " give the same options"
        )
    return progress


def _progress(body: Mapping[str, Any]) -> BurninProgress:
    if body["schema"] != _SCHEMA:
        raise ValueError(f"schema {body['schema']!r}")
    start_us = int(body["start_us"])
    if not 0 <= start_us < 2**53:  # iso_utc refuses more
        raise ValueError(f"start_us {start_us}")
    return BurninProgress(
        plan=str(body["plan"]),
        start_us=start_us,
        done=tuple(
            TestedTest(
                name=str(item["name"]),
                findings=tuple(map(Finding.from_json, item["findings"])),
                measurements=tuple(Measurement.from_json(each) for each in item["measurements"]),
            )
            for item in body["done"]
        ),
    )
