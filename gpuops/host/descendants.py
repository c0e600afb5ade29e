"""The processes that a process has started, theirs too, whatever sessions they are in."""

from pathlib import Path


def descendants(pid: int, root: Path = Path("/")) -> list[int]:
    """Return the living descendants of *pid*, parents before children."""
    children: dict[int, list[int]] = {}
    for stat in (root / "proc").glob("[0-9]*/stat"):
        found = _parent(stat)
        if found is not None:
            children.setdefault(found, []).append(int(stat.parent.name))
    ordered = [pid]
    for parent in ordered:
        ordered += children.get(parent, [])
    return ordered[1:]


def _parent(stat: Path) -> int | None:
    """Return the fourth field of proc(5); the name before it may hold anything."""
    try:
        fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
