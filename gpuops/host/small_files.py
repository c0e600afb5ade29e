"""Files of sysfs and procfs: a page long, there one moment and gone the next."""

from pathlib import Path

_BYTES_MAX = 2**16
ENTRIES_MAX = 4096


def text_of(path: Path) -> str | None:
    """Return what *path* holds without the space around it, None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path, base: int = 10) -> int | None:
    """Return the whole number that *path* holds, None where it cannot be read or is none."""
    try:
        return int(text_of(path) or "", base)
    except ValueError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return what is in *folder* by name, at most `ENTRIES_MAX`; nothing where it is not there."""
    try:
        return sorted(folder.iterdir())[:ENTRIES_MAX]
    except OSError:
        return []
