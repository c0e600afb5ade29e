"""Software RAID, from ``/proc/mdstat`` (md(4))."""

import re
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"^(md\S*) : (\S+)(.*)$")
_MEMBERS = re.compile(r"\[(\d+)/(\d+)\] \[[U_]+\]")
_FAILED = re.compile(r"(\S+?)\[\d+\]\(F\)")
# The metadata that arrays of firmware (Intel VROC, DDF) share is an array of its own for md, which
# is never started: mdadm(8), CONTAINER. Their members name it as ``external:/md127/0``.
_CONTAINER = re.compile(r"\bsuper external:[^/\s-]")
_WORK = re.compile(r"(resync|recovery|reshape|check) *= *([0-9.]+%)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array.

    ``state`` is ``active``, ``inactive`` or ``broken``. ``wanted`` and ``working`` count its
    members, None for levels without redundancy; ``failed`` names those that the kernel threw out
    and ``work`` what it does about it (``recovery 12.6%``).
    """

    name: str
    state: str
    level: str | None = None
    wanted: int | None = None
    working: int | None = None
    failed: tuple[str, ...] = ()
    work: str | None = None


@dataclass(frozen=True, slots=True)
class MdRaid:
    """All arrays."""

    arrays: tuple[Array, ...] = ()


def read_mdraid(root: Path = Path("/")) -> MdRaid:
    """Return the arrays; none where the kernel has no md driver."""
    try:
        text = (root / "proc/mdstat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return MdRaid()
    return parse_mdstat(text)


def parse_mdstat(text: str) -> MdRaid:
    """Return the arrays in ``/proc/mdstat``, without containers; other text is left out."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            blocks.append([line])
        elif blocks and line.startswith(" "):
            blocks[-1].append(line)
    return MdRaid(tuple(_array(block) for block in blocks if not _is_container(block)))


def _is_container(block: list[str]) -> bool:
    return any(_CONTAINER.search(line) for line in block[1:])


def _array(block: list[str]) -> Array:
    head = _HEAD.match(block[0])
    assert head is not None
    rest = "\n".join(block[1:])
    words = head[3].split()
    members, work = _MEMBERS.search(rest), _WORK.search(rest)
    return Array(
        name=head[1],
        state=head[2],
        level=next((word for word in words if word.startswith(("raid", "linear"))), None),
        wanted=int(members[1]) if members else None,
        working=int(members[2]) if members else None,
        failed=tuple(_FAILED.findall(head[3])),
        work=f"{work[1]} {work[2]}" if work else None,
    )
