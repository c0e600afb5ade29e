"""When this node took back drains of its own: a fault that comes and goes must not do so all day.

One small file below the state folder, beside the drain record, which ends with its drain.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ConfigError, ProbeError
from gpuops.host.records import from_json, to_json
from gpuops.host.replacing import replace_file
from gpuops.host.trust import refuse_foreign_file
from gpuops.incident.gate import RESUMES_WINDOW_S
from gpuops.model import UnknownReason

_NAME = "resumes.json"
_BYTES_MAX = 65536
_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A drain for *check* was taken back at *t_us*."""

    check: str
    t_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumes:
    """All that are younger than `RESUMES_WINDOW_S`, the oldest first."""

    items: tuple[Resume, ...] = ()

    def of(self, check: str) -> list[int]:
        """Return when drains for *check* were taken back."""
        return [item.t_us for item in self.items if item.check == check]

    def with_one(self, check: str, now_us: int) -> "Resumes":
        """Return these with one more, without those that are too old to count."""
        since_us = now_us - RESUMES_WINDOW_S * 1e6
        items = [item for item in self.items if since_us < item.t_us <= now_us]
        return Resumes(items=(*items, Resume(check=check, t_us=now_us))[-_KEPT:])


def read_resumes(state_dir: Path, *, uid: int) -> Resumes:
    """Return what is on record.

    Raises:
        ProbeError: The file cannot be read, is not such a record, or others can write it.
    """
    path = state_dir / _NAME
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX)
        refuse_foreign_file(path, uid=uid)
        return from_json(Resumes, json.loads(data), f"the record {path}")
    except FileNotFoundError:
        return Resumes()
    except (OSError, ValueError, ConfigError) as exc:
        text = f"cannot use the record of resumes {path}: {exc}"
        raise ProbeError(text, UnknownReason.CRASH) from exc


def write_resumes(state_dir: Path, resumes: Resumes) -> None:
    """Keep *resumes* in place of what was there.

    Raises:
        ProbeError: It cannot be written.
    """
    path = state_dir / _NAME
    try:
        replace_file(path, json.dumps(to_json(resumes)).encode(), 0o600)
    except OSError as exc:
        text = f"cannot write the record of resumes {path}: {exc.strerror}"
        raise ProbeError(text, UnknownReason.CRASH) from exc
