"""The spools of users that root forwards: ``<users_dir>/<uid>``, each of its user, mode 700.

A user has no password of the fleet's store. The agent writes a second copy of each event there, and
root sends it (`gpuops.store.spool.forward`). Root alone writes into *users_dir*, so that no user
can make, replace or remove the spool of another; its prolog makes the spool of the job's user.
Nothing is forwarded where *users_dir* does not exist.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gpuops.store.spool.folders import ensure_folder, open_file, open_folder, replace_file

USER_BYTES_MAX = 64 * 2**20
USERS_MAX = 4096
ROOT = 0
_NODE = ".node"
_NODE_BYTES_MAX = 256


def make_user_spool(users_dir: Path, uid: int, *, node: str) -> str | None:
    """Create the spool of *uid* as root; return what is wrong, None also without *users_dir*.

    *node*: Slurm's name of this node, which a command outside a hook does not know.
    """
    if uid == ROOT:
        return None
    try:
        with _open_users(users_dir) as users:
            # Two prologs may do so at once; each writes the same.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                replace_file(users, _NODE, node.encode())
            ensure_folder(users, str(uid))
            # Root's own only while it is new.
            with (
                contextlib.suppress(PermissionError),
                open_folder(users_dir, str(uid), uid=os.geteuid()) as folder,
            ):
                os.fchmod(folder, 0o700)
                os.fchown(folder, uid, -1)
            with open_folder(users_dir / str(uid), uid=uid):
                return None
    except FileNotFoundError:
        return None
    except OSError as exc:
        return f"cannot make the spool {users_dir / str(uid)}: {exc.strerror}"


@contextlib.contextmanager
def _open_users(users_dir: Path) -> Iterator[int]:
    with open_folder(users_dir, uid=os.geteuid()) as users:
        if os.fstat(users).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(1, "other users may write into its parent (chmod 755 it)")
        yield users


def own_user_spool(users_dir: Path) -> Path | None:
    """Return the spool of this user that root forwards, or None if root made none."""
    path, uid = users_dir / str(os.geteuid()), os.geteuid()
    try:
        parent, found = users_dir.lstat(), path.lstat()
    except OSError:
        return None
    is_roots = stat.S_ISDIR(parent.st_mode) and parent.st_uid == ROOT
    closed = not parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == uid != ROOT
    return path if is_roots and closed and is_ours else None


def find_user_spools(users_dir: Path) -> list[int]:
    """Return the uids that have a spool in *users_dir*; none if there is no such directory.

    Raises:
        OSError: It cannot be read, or is not root's alone.
    """
    try:
        with _open_users(users_dir) as users, os.scandir(users) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    uids = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
    return [uid for uid in uids if uid != ROOT][:USERS_MAX]


def node_names(users_dir: Path, node: str) -> frozenset[str]:
    """Return *node* and the name that this node's prolog wrote down."""
    try:
        with open_folder(users_dir, uid=os.geteuid()) as users:
            fd = open_file(users, _NODE, uid=os.geteuid())
        with os.fdopen(fd, "rb") as file:
            return frozenset({node, file.read(_NODE_BYTES_MAX).decode(errors="replace")})
    except OSError:
        return frozenset({node})
