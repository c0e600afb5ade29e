"""Remove what is no state: the directories of writers that died, and deletions that broke off.

A temporary directory is removed when the process that made it is known to be dead, or when nothing
in it has changed for a day; its lock, where the file system has locks, says that it is not.
"""

import contextlib
import fcntl
import os
import stat

from gpuops.checkpoint.directory_files import (
    is_directory,
    names_in,
    opened_directory,
    remove_tree,
    rename,
)
from gpuops.checkpoint.directory_names import Leftover, LeftoverKind, leftover_of, trash_name
from gpuops.checkpoint.directory_writer import Place

ABANDONED_S = 86_400
ASIDE_S = 7 * 86_400


def sweep(root: int, place: Place) -> tuple[str, ...]:
    """Remove what is left over in the directory *root*; return the names, oldest state first.

    Raises:
        OSError: The directory cannot be listed.
    """
    left = [found for name in names_in(root) if (found := leftover_of(name))]
    left = [found for found in left if is_directory(found.name, root)]
    if not left:
        return ()
    now_s = _now_s(root, trash_name(left[0].state, place.nonce()))
    removed = []
    for found in sorted(left, key=lambda leftover: (leftover.state, leftover.name)):
        with contextlib.suppress(OSError):  # another sweeper was first, or it is not ours
            if _is_dead(found, root, place, now_s):
                discard(found, root, place)
                removed.append(found.name)
    return tuple(removed)


def discard(found: Leftover, root: int, place: Place) -> None:
    """Remove one leftover, all at once to every reader.

    Raises:
        OSError: It could not even be renamed.
    """
    name = found.name
    if found.kind is not LeftoverKind.TRASH:
        name = trash_name(found.state, place.nonce())
        rename(found.name, name, root)
    remove_tree(name, root)


def _is_dead(found: Leftover, root: int, place: Place, now_s: float) -> bool:
    match found.kind:
        case LeftoverKind.TRASH:
            return True
        case LeftoverKind.ASIDE:
            return now_s - _changed_s(found.name, root) > ASIDE_S
        case LeftoverKind.TEMPORARY | LeftoverKind.SHARED:
            of_the_dead = found.host == place.host and not _is_alive(found.pid)
            abandoned = of_the_dead or now_s - _changed_s(found.name, root) > ABANDONED_S
            return abandoned and not _is_locked(found.name, root)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_locked(name: str, root: int) -> bool:
    with opened_directory(name, dir_fd=root) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system
            return False
    return False


def _changed_s(name: str, root: int) -> float:
    """Return when anything in the directory last changed, by the clock of the file system."""
    with opened_directory(name, dir_fd=root) as folder:
        changed = os.fstat(folder).st_mtime
        for entry in names_in(folder):
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(entry, dir_fd=folder)
                if stat.S_ISREG(found.st_mode):
                    changed = max(changed, found.st_mtime)
    return changed


def _now_s(root: int, name: str) -> float:
    """Return the time by the clock that dates the files: a file server's, not that of this host.

    *name*: of a directory made to see it; it is one that a later sweep would remove.
    """
    os.mkdir(name, dir_fd=root)
    try:
        return os.lstat(name, dir_fd=root).st_mtime
    finally:
        os.rmdir(name, dir_fd=root)
