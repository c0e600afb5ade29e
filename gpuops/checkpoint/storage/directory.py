"""States in a directory: on a local disk, or on a file system that the nodes share.

A state is written into a temporary directory next to its final one, file by file, each synced;
then the manifest and the directory are synced, it is renamed into place and the parent is synced.
So a reader sees a complete state or none, at whatever moment a writer or the machine stops.

A sweep removes the directories of dead writers and interrupted deletions. A temporary directory is
removed when the process that made it is known to be dead, or when nothing in it has changed for a
day, unless it is locked.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    damaged_file_name,
    names_tell_damage,
    names_verify,
    parse_manifest,
    verified_file_name,
)
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.api import (
    DamagedState,
    NoStateError,
    StoredState,
    StoreScan,
    Throttle,
    unthrottled,
)
from gpuops.checkpoint.storage.directory_files import (
    PINS,
    PINS_UNREADABLE,
    Leftover,
    LeftoverKind,
    check_tag,
    close_quietly,
    collect_pins,
    host_identity,
    is_directory,
    is_valid_tag,
    list_names,
    name_component,
    open_directory,
    open_regular_file,
    parse_leftover_name,
    parse_state_name,
    pin_name,
    read_bounded,
    regular_file_size,
    remove_tree,
    rename,
    trash_name,
    wrap_os_errors,
    write_synced,
)
from gpuops.checkpoint.storage.directory_writer import (
    DirectoryContext,
    DirectoryWriter,
    contains_state,
)
from gpuops.checkpoint.storage.image_file import image_chunks, read_image, verify_on_disk
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard, StateId

ABANDONED_S = 86_400
QUARANTINE_S = 7 * 86_400


def remove_leftovers(root: int, context: DirectoryContext) -> tuple[str, ...]:
    """Remove the leftovers in the directory *root*; return the names, oldest state first.

    Raises:
        OSError: The directory cannot be listed.
    """
    leftovers = [found for name in list_names(root) if (found := parse_leftover_name(name))]
    leftovers = [found for found in leftovers if is_directory(found.name, root)]
    if not leftovers:
        return ()
    now_s = _filesystem_now_s(root, trash_name(leftovers[0].state, context.nonce()))
    removed = []
    for found in sorted(leftovers, key=lambda leftover: (leftover.state, leftover.name)):
        with contextlib.suppress(
            OSError
        ):  # another sweeper was first, or the owner is another user
            if _is_dead(found, root, context, now_s):
                remove_leftover(found, root, context)
                removed.append(found.name)
    return tuple(removed)


def remove_leftover(leftover: Leftover, root: int, context: DirectoryContext) -> None:
    """Remove one leftover, all at once to every reader.

    Raises:
        OSError: It could not even be renamed.
    """
    name = leftover.name
    if leftover.kind is not LeftoverKind.TRASH:
        name = trash_name(leftover.state, context.nonce())
        rename(leftover.name, name, root)
    remove_tree(name, root)


def _is_dead(leftover: Leftover, root: int, context: DirectoryContext, now_s: float) -> bool:
    match leftover.kind:
        case LeftoverKind.TRASH:
            return True
        case LeftoverKind.QUARANTINED:
            return now_s - _modified_s(leftover.name, root) > QUARANTINE_S
        case LeftoverKind.TEMPORARY | LeftoverKind.SHARED:
            is_writer_dead = leftover.host == context.host and not _is_alive(leftover.pid)
            is_abandoned = is_writer_dead or now_s - _modified_s(leftover.name, root) > ABANDONED_S
            return is_abandoned and not _is_locked(leftover.name, root)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_locked(name: str, root: int) -> bool:
    with open_directory(name, dir_fd=root) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system
            return False
    return False


def _modified_s(name: str, root: int) -> float:
    """Return when anything in the directory last changed, by the clock of the file system."""
    with open_directory(name, dir_fd=root) as folder:
        changed = os.fstat(folder).st_mtime
        for entry in list_names(folder):
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(entry, dir_fd=folder)
                if stat.S_ISREG(found.st_mode):
                    changed = max(changed, found.st_mtime)
    return changed


def _filesystem_now_s(root: int, name: str) -> float:
    """Return the current time of the file system, which may be a file server's.

    *name*: of a directory that is created to read it; a later sweep would remove it.
    """
    os.mkdir(name, dir_fd=root)
    try:
        return os.lstat(name, dir_fd=root).st_mtime
    except FileNotFoundError:  # another sweeper removed it, which changed *root* just now
        return os.fstat(root).st_mtime
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=root)


class DirectoryStore:
    """The states in *root*, which is made with the first one; threads may share it.

    *host* and *pid* say whose a temporary directory is, *random_bytes* names it.
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str | None = None,
        pid: int | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._root = root.absolute()
        self._context = DirectoryContext(
            root=self._root,
            host=name_component(host_identity() if host is None else host),
            pid=os.getpid() if pid is None else pid,
            nonce=lambda: random_bytes(8),
        )

    @property
    def address(self) -> str:
        return str(self._root)

    def open_writer(
        self, state: StateId, world: int, *, session: str | None = None
    ) -> DirectoryWriter:
        return DirectoryWriter(self._context, state, world, session=session)

    def contains(self, manifest: Manifest) -> bool:
        with self._open_root("list") as root:
            return root is not None and contains_state(root, self._root, manifest)

    def scan(self) -> StoreScan:
        states, damaged, leftovers = [], [], []
        with self._open_root("list") as root:
            if root is None:
                return StoreScan(())
            pins = _read_pins(root)
            for name in list_names(root):
                if parse_leftover_name(name):
                    leftovers.append(name)
                state = parse_state_name(name)
                if state is None:
                    continue
                try:
                    manifest = _read_manifest(root, self._root, state)
                except FileNotFoundError:  # removed since it was listed
                    continue
                except CheckpointError as exc:
                    damaged.append(DamagedState(name, str(exc), isinstance(exc, CorruptError)))
                else:
                    states.append(_stored_state(manifest, root, pins(state)))
        states.sort(key=lambda stored: stored.state, reverse=True)
        return StoreScan(tuple(states), tuple(damaged), tuple(leftovers))

    def list_states(self) -> tuple[StoredState, ...]:
        return self.scan().states

    def read_manifest(self, state: StateId) -> Manifest:
        with self._open_root("read") as root:
            with contextlib.suppress(FileNotFoundError):
                if root is not None:
                    return _read_manifest(root, self._root, state)
            raise NoStateError(f"there is no {state} in {self._root}")

    def file_sizes(self, state: StateId) -> Mapping[str, int]:
        with self._open_state(state) as folder:
            return {
                name: regular_file_size(name, folder)
                for name in list_names(folder)
                if name != MANIFEST
            }

    def local_shard_path(self, state: StateId, shard: Shard) -> Path:
        with self._open_state(state, shard.file_name) as folder:
            close_quietly(open_regular_file(shard.file_name, folder))
        return self._root / state.name / shard.file_name

    def read_chunks(self, state: StateId, shard: Shard) -> Iterator[memoryview]:
        with self._open_state(state, shard.file_name) as folder:
            fd = open_regular_file(shard.file_name, folder)
            try:
                with image_chunks(fd, os.fstat(fd).st_size) as chunks:
                    yield from chunks
            finally:
                close_quietly(fd)

    def read_bytes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        with self._open_state(state, shard.file_name) as folder:
            fd = open_regular_file(shard.file_name, folder)
            try:
                content = os.pread(fd, end - begin, begin)
            finally:
                close_quietly(fd)
        if len(content) != end - begin:
            raise CorruptError(
                f"{self._root / state.name / shard.file_name} ends before byte {end}"
            )
        return content

    def read_piece_hashes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        name = pieces_file_name(shard)
        with self._open_state(state, name) as folder:
            try:
                fd = open_regular_file(name, folder)
            except FileNotFoundError:
                return b""
            try:
                return os.pread(fd, end - begin, begin)
            finally:
                close_quietly(fd)

    def fetch_shard(self, record: ShardRecord, state: StateId, into: memoryview) -> None:
        with self._open_state(state, record.shard.file_name) as folder:
            fd = open_regular_file(record.shard.file_name, folder)
            try:
                read_image(fd, record.digest, into)
            except CorruptError as exc:
                path = self._root / state.name / record.shard.file_name
                raise CorruptError(f"{path}: {exc}") from exc
            finally:
                close_quietly(fd)

    def read_back(
        self, record: ShardRecord, state: StateId, *, throttle: Throttle = unthrottled
    ) -> None:
        name, verified = record.shard.file_name, verified_file_name(record.shard)
        pieces = pieces_file_name(record.shard)
        with self._open_state(state, name) as folder:
            names = list_names(folder)
            if verified in names:
                return
            fd = open_regular_file(name, folder)
            try:
                blocks = verify_on_disk(
                    fd, record.digest, throttle=throttle, hash_pieces=pieces not in names
                )
            except CorruptError as exc:
                raise CorruptError(f"{self._root / state.name / name}: {exc}") from exc
            finally:
                close_quietly(fd)
            if blocks:
                _write_pieces(pieces, blocks, folder)
            _set_mark(verified, damaged_file_name(record.shard), folder)

    def mark_damaged(self, record: ShardRecord, state: StateId) -> None:
        name = damaged_file_name(record.shard)
        with self._open_state(state, name) as folder:
            _set_mark(name, verified_file_name(record.shard), folder)

    def delete(self, state: StateId) -> None:
        with self._open_root("remove a state from") as root:
            if root is None or not is_directory(state.name, root):
                return
            if tags := _read_pins(root)(state):
                raise CheckpointError(f"{state} in {self._root} is pinned by {', '.join(tags)}")
            trash = trash_name(state, self._context.nonce())
            rename(state.name, trash, root)
            os.fsync(root)
            remove_tree(trash, root)

    def pin(self, state: StateId, tag: str) -> None:
        check_tag(tag)
        with self._open_root("pin a state in") as root:
            if root is None or not is_directory(state.name, root):
                raise CheckpointError(f"there is no {state} in {self._root}")
            with contextlib.suppress(FileExistsError):
                os.mkdir(PINS, dir_fd=root)
                os.fsync(root)
            with open_directory(PINS, dir_fd=root) as pins:
                with contextlib.suppress(FileExistsError):
                    write_synced(pin_name(state, tag), b"", pins)
                os.fsync(pins)

    def unpin(self, state: StateId, tag: str) -> None:
        with self._open_root("unpin a state in") as root, contextlib.suppress(FileNotFoundError):
            if root is not None and is_valid_tag(tag):
                with open_directory(PINS, dir_fd=root) as pins:
                    os.unlink(pin_name(state, tag), dir_fd=pins)
                    os.fsync(pins)

    def sweep(self) -> tuple[str, ...]:
        with self._open_root("sweep") as root:
            return () if root is None else remove_leftovers(root, self._context)

    @contextlib.contextmanager
    def _open_root(self, action: str) -> Iterator[int | None]:
        """Yield a descriptor of the root; None where it does not exist."""
        with wrap_os_errors(action, self._root), contextlib.ExitStack() as stack:
            try:
                root = stack.enter_context(open_directory(self._root))
            except FileNotFoundError:
                root = None
            yield root

    @contextlib.contextmanager
    def _open_state(self, state: StateId, file: str = "") -> Iterator[int]:
        with (
            wrap_os_errors("read", self._root / state.name / file),
            open_directory(self._root) as root,
            open_directory(state.name, dir_fd=root) as folder,
        ):
            yield folder


def _read_manifest(root: int, path: Path, state: StateId) -> Manifest:
    """Return the manifest of *state*; FileNotFoundError: there is no such directory."""
    where = path / state.name / MANIFEST
    with contextlib.ExitStack() as stack:
        if not is_directory(state.name, root):
            os.lstat(state.name, dir_fd=root)
            raise CorruptError(f"{path / state.name} is not a directory")
        try:
            folder = stack.enter_context(open_directory(state.name, dir_fd=root))
        except FileNotFoundError:
            raise
        except OSError as exc:  # of this state only: the others can be read
            raise CheckpointError(f"cannot read {where}: {exc.strerror or exc}") from exc
        try:
            content = read_bounded(MANIFEST, folder, MANIFEST_BYTES_MAX)
        except FileNotFoundError as exc:
            os.lstat(state.name, dir_fd=root)
            raise CorruptError(f"{where} is not there") from exc
        except OSError as exc:
            raise CheckpointError(f"cannot read {where}: {exc.strerror or exc}") from exc
    manifest = parse_manifest(content, str(where))
    if manifest.state != state:
        raise CorruptError(f"{where} is of {manifest.state}")
    return manifest


def _stored_state(manifest: Manifest, root: int, tags: tuple[str, ...]) -> StoredState:
    """Return the state of *manifest*, and what the files next to it say about its shards."""
    try:
        with open_directory(manifest.state.name, dir_fd=root) as folder:
            names = set(list_names(folder))
    except OSError:  # it is removed just now
        return StoredState(manifest.state, manifest, tags)
    is_damaged = names_tell_damage(names, manifest)
    is_verified = not is_damaged and names_verify(names, manifest)
    return StoredState(manifest.state, manifest, tags, is_verified, is_damaged)


def _set_mark(name: str, other: str, folder: int) -> None:
    """Make the empty file *name*, and remove *other*, which says the opposite."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(other, dir_fd=folder)
    with contextlib.suppress(FileExistsError):
        write_synced(name, b"", folder)
    os.fsync(folder)


def _write_pieces(name: str, blocks: bytes, folder: int) -> None:
    """Write the hashes of pieces into the file *name*, if that is possible: reading needs none."""
    try:
        write_synced(name, blocks, folder)
    except FileExistsError:  # another reader was faster
        pass
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _read_pins(root: int) -> Callable[[StateId], tuple[str, ...]]:
    """Return a function from a state to its tags."""
    try:
        with open_directory(PINS, dir_fd=root) as folder:
            pins = collect_pins(list_names(folder))
    except FileNotFoundError:
        pins = {}
    except OSError:
        # States can still be loaded; but any may be pinned, so none may be deleted.
        return lambda _state: (PINS_UNREADABLE,)
    return lambda state: pins.get(state, ())
