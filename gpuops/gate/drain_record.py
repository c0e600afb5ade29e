"""The drain that this node wants or has, in one file below the state folder.

It is what makes a drain ours: a reason in Slurm is only text that anybody can type.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuops.errors import ConfigError, ProbeError
from gpuops.host.records import from_json, to_json
from gpuops.host.replacing import replace_file
from gpuops.host.trust import refuse_foreign_file
from gpuops.model import UnknownReason

_NAME = "drain.json"
_BYTES_MAX = 65536


class Stage(StrEnum):
    """How far it came: wanted here, or known to slurmctld."""

    WANTED = "wanted"
    SET = "set"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRecord:
    """One drain. ``hook``: what found the cause; ``why``: it was decided to drain.

    ``replaces``: reasons that its own may take the place of (`gpuops.incident.gate.replaceable`);
    ``passes``: health checks passed in a row since; ``kept``: why it is not taken back though
    there were enough of them.

    ``node`` is the name that Slurm has for it, ``stage`` a `Stage`.
    """

    id: str
    node: str
    hook: str
    reason: str
    check: str
    failure_class: str
    t_us: int
    why: str = ""
    replaces: tuple[str, ...] = ()
    incident: str | None = None
    job_id: str | None = None
    stage: str = Stage.WANTED.value
    passes: int = 0
    kept: str | None = None


def read_drain(state_dir: Path, *, uid: int) -> DrainRecord | None:
    """Return what is recorded, None where nothing is.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or others can write it.
    """
    path = state_dir / _NAME
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX)
        refuse_foreign_file(path, uid=uid)
        return from_json(DrainRecord, json.loads(data), f"the drain record {path}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as exc:
        text = f"cannot use the drain record {path}: {exc}"
        raise ProbeError(text, UnknownReason.CRASH) from exc


def write_drain(state_dir: Path, record: DrainRecord | None) -> None:
    """Keep *record* in place of what was there; None: there is no drain of ours any more.

    Raises:
        ProbeError: It cannot be written.
    """
    path = state_dir / _NAME
    try:
        if record is None:
            path.unlink(missing_ok=True)
            return
        state_dir.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(to_json(record)).encode(), 0o600)
    except OSError as exc:
        text = f"cannot write the drain record {path}: {exc.strerror}"
        raise ProbeError(text, UnknownReason.CRASH) from exc
