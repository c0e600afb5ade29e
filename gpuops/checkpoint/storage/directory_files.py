"""Names and files of a store's directory, which others may write to as well.

Files are opened by name, never through a link. Only these names are ever written, renamed or
removed; all others have other owners:

* ``step-000000001200.e00003``                          a state
* ``step-000000001200.e00003.tmp.<host>.<pid>.<nonce>``  one that a process is writing
* ``step-000000001200.e00003.tmp-of.<session>``          one that several nodes are writing
* ``.trash.step-000000001200.e00003.<nonce>``            one being removed
* ``.aside.step-000000001200.e00003.<nonce>``            a damaged one that was replaced
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuops.checkpoint.types import BadRequestError, CheckpointError, StateId

PINS = ".pins"
PINS_UNREADABLE = "pins-unreadable"  # the tag of every state while pins cannot be read
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
    """The purpose of a directory that is not a state."""

    TEMPORARY = "temporary"
    SHARED = "shared"
    TRASH = "trash"
    QUARANTINED = "aside"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory of the store that is not a state: its state, and the process that made it."""

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
    """Return the purpose of a directory of this *name*, None where it is not of the store."""
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
    """Return the name under which a process of *host*, a `name_component`, writes *state*."""
    return f"{state.name}.tmp.{host}.{pid}.{nonce.hex()}"


def shared_name(state: StateId, session: str) -> str:
    """Return the name under which the nodes of *session* write *state*."""
    return f"{state.name}.tmp-of.{name_component(session)}"


def trash_name(state: StateId, nonce: bytes) -> str:
    """Return the name of *state* while it is removed."""
    return f".trash.{state.name}.{nonce.hex()}"


def quarantine_name(state: StateId, nonce: bytes) -> str:
    """Return the name of a damaged *state* that was replaced by a complete one."""
    return f".aside.{state.name}.{nonce.hex()}"


def pin_name(state: StateId, tag: str) -> str:
    """Return the name of the file that pins *state* with *tag*."""
    return f"{state.name}@{tag}"


def collect_pins(names: Iterable[str]) -> dict[StateId, tuple[str, ...]]:
    """Return the tags of each state for which *names* has a pin."""
    pins: dict[StateId, tuple[str, ...]] = {}
    for found in filter(None, map(_PIN.match, names)):
        state = _state_id(found)
        pins[state] = (*pins.get(state, ()), found["tag"])
    return pins


def is_valid_tag(text: str) -> bool:
    """Return whether *text* is a tag: letters, digits, dot, dash and underscore, 64 at most."""
    return _TAG.match(text) is not None


def check_tag(text: str) -> None:
    """Raise BadRequestError where *text* is not a valid tag."""
    if not is_valid_tag(text):
        raise BadRequestError(
            f"{text[:80]!r} is not a tag: letters, digits, dot, dash and underscore, 64 at most"
        )


def name_component(text: str) -> str:
    """Return *text* as a part of a name; different texts give different names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64]
    if plain == text and not _HASHED.search(plain):
        return plain
    return f"{plain}-{hashlib.blake2s(text.encode(errors='replace'), digest_size=8).hexdigest()}"


def host_identity() -> str:
    """Return a name of this host and its pid namespace.

    Containers often share the name of their host and have their own pids.
    """
    try:
        namespace = f"-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116 no path to build
    except OSError:
        namespace = ""
    return os.uname().nodename + namespace


def _state_id(found: re.Match[str]) -> StateId:
    return StateId(int(found["epoch"]), int(found["step"]))


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: the name may be that of a pipe without a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES = 2**20
_TRIED_BYTES = 4096
# Time alone mends none of these.
_PERMANENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENOENT}
)
_ADVICE = {
    errno.ENOSPC: ": free some space, or keep fewer states",
    errno.EDQUOT: ": free some of the quota, or keep fewer states",
    errno.EROFS: ": it is mounted read-only",
    errno.EACCES: ": another user owns it, or its mode forbids it",
    errno.ENOTDIR: ": it is a file, or one of the names before the last is",
    errno.ELOOP: ": it is a symbolic link, which is not followed here",
    errno.ESTALE: ": the file server no longer knows it",
}


@contextlib.contextmanager
def wrap_os_errors(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError with the action and the path."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        advice = _ADVICE.get(exc.errno or 0, "")
        raise CheckpointError(f"cannot {action} {path}: {reason}{advice}") from exc


@contextlib.contextmanager
def open_directory(path: Path | str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a directory; below *dir_fd* it may not be a link.

    Raises:
        OSError: It is not a directory, or cannot be opened.
    """
    # The store's own root may be reached through links: its user named it.
    flags = _DIRECTORY if dir_fd is not None else _DIRECTORY & ~os.O_NOFOLLOW
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        close_quietly(fd)


def close_quietly(fd: int) -> None:
    """Close *fd*, through which nothing was written, and ignore errors."""
    with contextlib.suppress(OSError):
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make the directory *path* and its missing parents, on stable storage.

    Raises:
        OSError: One of them cannot be made.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        with open_directory(path.parent) as parent:
            os.fsync(parent)


def try_writing(path: Path) -> tuple[str, bool] | None:
    """Write a file where the directory *path* is, or would be made; nothing is left behind.

    Returns:
        None where that succeeds; else why not, and whether it will stay so.
    """
    where = path
    while not os.path.lexists(where):
        where = where.parent
    try:
        with (
            wrap_os_errors("write into", where),
            tempfile.TemporaryFile(dir=where, buffering=0) as file,
        ):
            file.write(bytes(_TRIED_BYTES))
            os.fsync(file.fileno())
    except CheckpointError as exc:
        cause = exc.__cause__
        return str(exc), isinstance(cause, OSError) and cause.errno in _PERMANENT
    return None


def open_regular_file(name: str, dir_fd: int) -> int:
    """Return a descriptor of the regular file *name*.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """
    fd = os.open(name, _READ, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        close_quietly(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def read_bounded(name: str, dir_fd: int, bytes_max: int) -> bytes:
    """Return at most *bytes_max* + 1 bytes of the regular file *name*.

    Raises:
        OSError: It is not a regular file, or cannot be read.
    """
    fd = open_regular_file(name, dir_fd)
    try:
        parts, left_bytes = [], bytes_max + 1
        while left_bytes and (part := os.read(fd, min(left_bytes, _READ_BYTES))):
            parts.append(part)
            left_bytes -= len(part)
    finally:
        close_quietly(fd)
    return b"".join(parts)


def list_names(fd: int) -> list[str]:
    """Return what is in the directory *fd*, sorted.

    Raises:
        OSError: It cannot be listed.
    """
    return sorted(os.listdir(fd))


def create(name: str, dir_fd: int) -> int:
    """Return a descriptor of the new file *name*.

    Raises:
        OSError: The name exists, or it cannot be made.
    """
    return os.open(name, _CREATE, 0o666, dir_fd=dir_fd)


def write_synced(name: str, content: bytes, dir_fd: int) -> None:
    """Make the new file *name* with *content*, on stable storage.

    Raises:
        OSError: It cannot be made or written; a part of it may be there.
    """
    fd = create(name, dir_fd)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)  # file servers may report a failed write only here


def write_all(fd: int, data: memoryview) -> None:
    """Write all of *data*.

    Raises:
        OSError: Not all of it could be written.
    """
    while data:
        n_written = os.write(fd, data)
        if n_written == 0:
            raise OSError(errno.EIO, "the file accepts no more bytes, for an unknown reason")
        data = data[n_written:]


class SpaceClaims:
    """The bytes that threads have yet to write into the file system of *fd*."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._claimed_bytes = 0

    @contextlib.contextmanager
    def claim(self, nbytes: int) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the bytes that are written next, of *nbytes* in all.

        Those of the call before are written by then, and no longer claimed.

        Raises:
            OSError: There is no room for *nbytes* and what others claim; names both figures.
        """
        with self._lock:
            filesystem = os.fstatvfs(self._fd)
            free_bytes = filesystem.f_bavail * filesystem.f_frsize - self._claimed_bytes
            if filesystem.f_blocks and free_bytes < nbytes:  # some report no size
                why = f"it needs {nbytes} bytes, and {max(free_bytes, 0)} are free there"
                raise OSError(errno.ENOSPC, why)
            self._claimed_bytes += nbytes
        left_bytes, next_bytes = nbytes, 0

        def before_write(n: int) -> None:
            nonlocal left_bytes, next_bytes
            self._release(next_bytes)
            left_bytes, next_bytes = left_bytes - next_bytes, n

        try:
            yield before_write
        finally:
            self._release(left_bytes)

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._claimed_bytes -= nbytes


def rename(old: str, new: str, dir_fd: int) -> None:
    """Give *old* the name *new* in the same directory.

    Raises:
        OSError: It cannot be renamed.
    """
    os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def remove_tree(name: str, dir_fd: int) -> None:
    """Remove the directory *name* as far as possible; the next sweep removes the rest."""
    with contextlib.suppress(OSError):  # of closing descriptors
        shutil.rmtree(name, ignore_errors=True, dir_fd=dir_fd)


def regular_file_size(name: str, dir_fd: int) -> int:
    """Return the size of the regular file *name*; -1 for anything else.

    Raises:
        OSError: It does not exist, or cannot be inspected.
    """
    found = os.lstat(name, dir_fd=dir_fd)
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def is_directory(name: str, dir_fd: int) -> bool:
    """Return whether *name* is a directory, and not a link to one.

    Raises:
        OSError: It cannot be inspected.
    """
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=dir_fd).st_mode)
    except FileNotFoundError:
        return False
