"""Asks workers for torch's flight recorder: HTTP over a socket in the run's private folder.

2,000 entries, torch's default, are 1 MB and 0.1 s of a core in the worker (measured, torch 2.13).
"""

import json
import logging
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from gpuops.detect.recorder_dump import RankDump, parse_dump
from gpuops.model import Json

log = logging.getLogger(__name__)

BYTES_MAX = 64 * 2**20
GROUPS_BYTES_MAX = 4 * 2**20  # what a worker writes at most
_CHUNK = 2**18
# torch's handlers; the first is there where torch has NCCL, and knows of NCCL's collectives only.
_NCCL, _OTHERS = "dump_nccl_trace_json", "fr_trace_json"
_GLOO = "/gloo"  # after the name of a group, where torch has NCCL
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: unix(7), SO_PEERCRED


class RecorderError(ValueError):
    """A worker's flight recorder cannot be read; the message says why."""


class Readable(Protocol):
    """A worker that may be asked; None: it has no recorder."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def recorder(self) -> Path | None: ...
    @property
    def groups(self) -> Path | None: ...


def recorder_paths(ring: Path, rank: int) -> tuple[Path, Path]:
    """Return where *rank* serves its recorder and notes its groups: beside its *ring*."""
    return ring.with_name(f"recorder_{rank}.sock"), ring.with_name(f"groups_{rank}.jsonl")


def recorder_env(ring: Path, rank: int) -> dict[str, str]:
    """Return what `gpuops.worker.recorder` must know of these paths."""
    path, groups = recorder_paths(ring, rank)
    return {"GPUOPS_RECORDER": str(path), "GPUOPS_GROUPS": str(groups)}


def read_recorders(targets: Sequence[Readable], deadline_s: float) -> dict[int, RankDump]:
    """Return by rank what the recorders of *targets* hold, asked at once; a failure is left out."""
    return parse_dumps(read_bodies(targets, deadline_s))


def parse_dumps(bodies: Mapping[int, Json]) -> dict[int, RankDump]:
    """Return by rank those of *bodies* that are dumps."""
    dumps = {}
    for rank, body in bodies.items():
        try:
            dumps[rank] = parse_dump(body, rank)
        except ValueError as exc:
            log.debug("the flight recorder of rank %d is not used: %s", rank, exc)
    return dumps


def read_bodies(targets: Sequence[Readable], deadline_s: float) -> dict[int, Json]:
    """Return the same as plain data, for `parse_dumps` or for a file."""

    def ask(target: Readable) -> Json | None:
        if target.recorder is None or target.groups is None:
            return None
        try:
            return read_body(target.recorder, target.groups, pid=target.pid, deadline_s=deadline_s)
        except RecorderError as exc:
            log.debug("the flight recorder of rank %d is not read: %s", target.rank, exc)
            return None

    if not targets:
        return {}
    with ThreadPoolExecutor(len(targets), "gpuops-recorder") as pool:
        bodies = pool.map(ask, targets)
        return {t.rank: body for t, body in zip(targets, bodies, strict=True) if body is not None}


def read_body(
    path: Path, groups: Path, *, pid: int, deadline_s: float, bytes_max: int = BYTES_MAX
) -> Json:
    """Return what the recorder of process *pid* holds now, at most *deadline_s* later.

    It is the dump as torch gives it, with the members of all groups that are known.

    Raises:
        RecorderError: Nobody answers in time, or with more than *bytes_max* bytes, or with anything
            else, or somebody else listens at *path*.
    """
    end_s = time.monotonic() + deadline_s
    answers = {name: _post(path, name, pid, end_s, bytes_max) for name in (_NCCL, _OTHERS)}
    bodies = {name: _dump(data) for name, data in answers.items() if data is not None}
    if not bodies:
        raise RecorderError("this torch does not give its flight recorder")
    members = _noted_groups(groups)
    if members and not any(body["pg_config"] for body in bodies.values()):
        raise RecorderError("it knows of no group: TORCH_FR_BUFFER_SIZE=0 turns it off")
    if _NCCL not in bodies:
        return _with_members(bodies[_OTHERS], members)
    # A group may have both backends, each of which counts its own collectives.
    body, others = bodies[_NCCL], bodies.get(_OTHERS, {"entries": []})
    body["entries"] += [_as_gloo(entry) for entry in others["entries"]]
    twice = {f"{name}{_GLOO}": about for name, about in members.items()}
    return _with_members(body, members | twice)


def _with_members(body: Json, members: Json) -> Json:
    """Return *body* with the *members* of groups that it does not name; gloo's has no name."""
    named = {name: about for name, about in body["pg_config"].items() if name}
    return body | {"pg_config": members | named}


def _as_gloo(entry: Any) -> Any:  # noqa: ANN401 what JSON holds
    group = entry.get("process_group") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(group, list) or not group:
        return entry  # `parse_dump` says what is wrong with it
    return entry | {"process_group": [f"{group[0]}{_GLOO}", *group[1:]]}


def _dump(data: bytes) -> Json:
    """Return a dump in JSON with its list of entries, which torch leaves out where it is empty."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise RecorderError(f"it answers with no JSON: {exc}") from exc
    if not isinstance(body, dict) or not isinstance(body.get("pg_config"), dict):
        raise RecorderError(f"it answers with {data[:80]!r}, not with a dump")
    if not isinstance(body.setdefault("entries", []), list):
        raise RecorderError("its entries are no list")
    return body


def _noted_groups(path: Path) -> Json:
    """Return the groups that the worker noted, a later one in place of one with the same name."""
    found: Json = {}
    try:
        with open(path, "rb", opener=_no_link) as file:
            lines = file.read(GROUPS_BYTES_MAX).splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            noted = json.loads(line)
            found[str(noted["group"])] = {"ranks": noted["ranks"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a worker that was killed while it wrote
    return found


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _post(path: Path, handler: str, pid: int, end_s: float, bytes_max: int) -> bytes | None:
    """Return what *handler* answers, None where this torch has no such handler."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise RecorderError(f"{path} is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_left(end_s))
            connection.connect(str(path))
            _check_peer(connection, pid)
            connection.sendall(
                f"POST /handler/{handler} HTTP/1.1\r\nHost: localhost\r\n"
                "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
            )
            answer = _receive(connection, end_s, bytes_max)
    except OSError as exc:
        raise RecorderError(f"{path} does not answer: {exc}") from exc
    return _content(answer)


def _check_peer(connection: socket.socket, pid: int) -> None:
    """Refuse who is not the worker: any process that may write there may listen there."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    peer_pid, uid, _ = _CREDENTIALS.unpack(raw)
    if (peer_pid, uid) != (pid, os.geteuid()):
        raise RecorderError(f"process {peer_pid} of user {uid} listens there, not the worker {pid}")


def _receive(connection: socket.socket, end_s: float, bytes_max: int) -> bytes:
    answer = bytearray()
    while True:
        connection.settimeout(_left(end_s))
        chunk = connection.recv(_CHUNK)
        if not chunk:
            return bytes(answer)
        answer += chunk
        if len(answer) > bytes_max:
            raise RecorderError(f"it answers with more than {bytes_max} bytes")


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _content(answer: bytes) -> bytes | None:
    head, _, content = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status == [b"404"]:
        return None
    length = re.search(rb"\r\ncontent-length: *([0-9]{1,12})\r?", head, re.IGNORECASE)
    if status != [b"200"] or length is None:
        raise RecorderError(f"it answers with {answer[:80]!r}")
    if len(content) != int(length[1]):
        raise RecorderError(f"its answer ends after {len(content)} of {int(length[1])} bytes")
    return content
