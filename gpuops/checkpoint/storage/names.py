"""The names of what a store's directory holds: states, and what writers leave when they die.

Only these names are ever written, renamed or removed there; all others belong to somebody else.

* ``step-000000001200.e00003``                          a state
* ``step-000000001200.e00003.tmp.<host>.<pid>.<nonce>``  one that a process is writing
* ``step-000000001200.e00003.tmp-of.<session>``          one that several nodes are writing
* ``.trash.step-000000001200.e00003.<nonce>``            one being removed
* ``.aside.step-000000001200.e00003.<nonce>``            a damaged one that had to make room
"""

import hashlib
import os
import re
from dataclasses import dataclass
from enum import StrEnum

from gpuops.checkpoint.types import StateId

PINS = ".pins"
PINS_UNREADABLE = "pins-unreadable"  # the tag of every state while it cannot be known
_STATE = r"step-(?P<step>[0-9]{12})\.e(?P<epoch>[0-9]{5})"
_COMPONENT = r"[A-Za-z0-9_-]{1,96}"
_STATE_NAME = re.compile(_STATE + r"\Z")
_TEMPORARY = re.compile(
    _STATE + rf"\.tmp\.(?P<host>{_COMPONENT})\.(?P<pid>[0-9]{{1,10}})\.[0-9a-f]{{16}}\Z"
)
_SHARED = re.compile(_STATE + rf"\.tmp-of\.(?P<session>{_COMPONENT})\Z")
_REMOVED = re.compile(rf"\.(?P<kind>trash|aside)\.{_STATE}\.[0-9a-f]{{16}}\Z")
_PIN = re.compile(_STATE + r"@(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]{0,63})\Z")
_HASHED = re.compile(r"(-[0-9a-f]{16}|^)\Z")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class LeftoverKind(StrEnum):
    """What a directory that is no state was for."""

    TEMPORARY = "temporary"
    SHARED = "shared"
    TRASH = "trash"
    QUARANTINED = "aside"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory of ours that is no state: of which, and whose where one process made it."""

    name: str
    kind: LeftoverKind
    state: StateId
    host: str = ""
    pid: int = 0
    session: str = ""


def parse_state_name(name: str) -> StateId | None:
    """Return the state that a directory of this *name* is, or None."""
    found = _STATE_NAME.match(name)
    return _state_id(found) if found else None


def parse_leftover_name(name: str) -> Leftover | None:
    """Return what a directory of this *name* was for, or None where it is not ours."""
    if found := _TEMPORARY.match(name):
        return Leftover(
            name,
            LeftoverKind.TEMPORARY,
            _state_id(found),
            host=found["host"],
            pid=int(found["pid"]),
        )
    if found := _SHARED.match(name):
        return Leftover(name, LeftoverKind.SHARED, _state_id(found), session=found["session"])
    if found := _REMOVED.match(name):
        return Leftover(name, LeftoverKind(found["kind"]), _state_id(found))
    return None


def temporary_name(state: StateId, host: str, pid: int, nonce: bytes) -> str:
    """Return the name under which a process of *host*, a `word`, writes *state*."""
    return f"{state.name}.tmp.{host}.{pid}.{nonce.hex()}"


def shared_name(state: StateId, session: str) -> str:
    """Return the name under which the nodes of *session* write *state*."""
    return f"{state.name}.tmp-of.{name_component(session)}"


def trash_name(state: StateId, nonce: bytes) -> str:
    """Return the name of *state* while it is removed."""
    return f".trash.{state.name}.{nonce.hex()}"


def quarantine_name(state: StateId, nonce: bytes) -> str:
    """Return the name of a damaged *state* that made room for a whole one."""
    return f".aside.{state.name}.{nonce.hex()}"


def pin_name(state: StateId, tag: str) -> str:
    """Return the name of the file that pins *state* with *tag*."""
    return f"{state.name}@{tag}"


def parse_pin_name(name: str) -> tuple[StateId, str] | None:
    """Return the state and the tag of a pin of this *name*, or None."""
    found = _PIN.match(name)
    return (_state_id(found), found["tag"]) if found else None


def is_valid_tag(text: str) -> bool:
    """Return whether *text* can be a tag: letters, digits, dot, dash and underscore, 64 at most."""
    return _TAG.match(text) is not None


def name_component(text: str) -> str:
    """Return *text* as a part of a name; two texts that differ have names that differ."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]
    if plain == text and not _HASHED.search(plain):
        return plain
    return f"{plain}-{hashlib.blake2s(text.encode(errors='replace'), digest_size=8).hexdigest()}"


def host_identity() -> str:
    """Return a name of this host in which the numbers of processes mean what they mean to us.

    Containers often share the name of their host and number their processes anew.
    """
    try:
        namespace = f"-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 no path to build
    except OSError:
        namespace = ""
    return os.uname().nodename + namespace


def _state_id(found: re.Match[str]) -> StateId:
    return StateId(int(found["epoch"]), int(found["step"]))
