"""Write one state into a directory, alone or together with the writers of other nodes.

Alone, the temporary directory is named after this process. Together, it is named after the session:
each writer puts its shard under a name of its own, renames it, and writes a small record next to
it. The one that commits builds the manifest from these records, and then removes them.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    encode_manifest,
    encode_record,
    parse_manifest,
    parse_record,
    record_file_name,
)
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.api import (
    CommitInProgressError,
    ImageSource,
    Throttle,
    require_shards,
    unthrottled,
)
from gpuops.checkpoint.storage.directory_files import (
    LeftoverKind,
    SpaceClaims,
    create,
    is_directory,
    list_names,
    make_directories,
    open_directory,
    parse_leftover_name,
    quarantine_name,
    read_bounded,
    regular_file_size,
    remove_tree,
    rename,
    shared_name,
    temporary_name,
    trash_name,
    wrap_os_errors,
    write_synced,
)
from gpuops.checkpoint.storage.image_file import write_image
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard, StateId

_RENAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class DirectoryContext:
    """A directory and its writer. ``nonce`` returns 8 bytes that were never used before."""

    root: Path
    host: str  # as `name_component` returns it
    pid: int
    nonce: Callable[[], bytes]


class DirectoryWriter:
    """One state that is being written into a directory; see `StateWriter`."""

    shards_at_once = 4

    def __init__(
        self, context: DirectoryContext, state: StateId, world: int, *, session: str | None = None
    ) -> None:
        self._context = context
        self._state = state
        self._world = world
        self._shared_name = None if session is None else shared_name(state, session)
        self._is_closed = False
        self._records: dict[Shard, ShardRecord] = {}
        self._name = self._shared_name or temporary_name(
            state, context.host, context.pid, context.nonce()
        )
        with wrap_os_errors("write into", context.root), contextlib.ExitStack() as opening:
            make_directories(context.root)
            self._root = opening.enter_context(open_directory(context.root))
            self._folder = self._open_temporary(opening)
            self._space = SpaceClaims(self._folder)
            # Shows sweepers that this writer is alive, where the file system has locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._open = opening.pop_all()

    def put_shard(
        self,
        record: ShardRecord,
        source: ImageSource,
        *,
        throttle: Throttle = unthrottled,
        verify: bool = True,
    ) -> None:
        path = self._context.root / self._name / record.shard.file_name
        if record.shard.world != self._world:
            raise CheckpointError(f"{path} is not of a world of {self._world}")
        with wrap_os_errors("write", path):
            try:
                if self._shared_name is not None:
                    self._write_session_shard(record, source, throttle)
                else:
                    pieces = self._write_shard(
                        record.shard.file_name, record, source, throttle, verify=verify
                    )
                    if pieces:
                        write_synced(pieces_file_name(record.shard), pieces, self._folder)
            except CorruptError as exc:
                raise CorruptError(f"{path} was not kept: {exc}") from exc
        self._records[record.shard] = record

    def records(self) -> Mapping[Shard, ShardRecord]:
        if self._shared_name is None:
            return dict(self._records)
        with wrap_os_errors("list", self._context.root / self._name):
            shards = (Shard(rank, self._world) for rank in range(self._world))
            return _read_records(self._folder, self._context.root / self._name, shards)

    def commit(self, manifest: Manifest) -> bool:
        with wrap_os_errors("commit", self._context.root / self._state.name):
            if (manifest.state, manifest.world) != (self._state, self._world):
                raise CheckpointError(f"a manifest of {manifest.state} is not of {self._state}")
            is_new = not contains_state(self._root, self._context.root, manifest)
            if is_new:
                self._take_session_folder()
                self._finish_folder(manifest)
                is_new = self._publish(manifest)
            os.fsync(self._root)
            if is_new and self._shared_name is not None:
                self._remove_superseded()
        self._close(keep=is_new)
        return is_new

    def abort(self) -> None:
        self._close(keep=False)

    def _close(self, *, keep: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with self._open, contextlib.suppress(OSError):
            if keep:
                return
            if self._shared_name is None:
                remove_tree(self._name, self._root)
            elif self._name != self._shared_name:
                # What the nodes put is complete; another node may still commit it.
                rename(self._name, self._shared_name, self._root)
            else:
                os.rmdir(self._name, dir_fd=self._root)  # created by this writer, and empty

    def _open_temporary(self, opening: contextlib.ExitStack) -> int:
        """Return a descriptor of the temporary directory, which *opening* closes."""
        for _ in range(_RENAMES_MAX):
            try:
                os.mkdir(self._name, dir_fd=self._root)
            except FileExistsError:
                if self._shared_name is None:
                    raise
            with contextlib.suppress(FileNotFoundError):  # a committing node renamed it in between
                return opening.enter_context(open_directory(self._name, dir_fd=self._root))
        raise CheckpointError(f"other writers keep renaming {self._name}")

    def _take_session_folder(self) -> None:
        """Claim the nodes' shards for this process: of two that commit, one continues."""
        if self._shared_name is None:
            return
        own_name = temporary_name(
            self._state, self._context.host, self._context.pid, self._context.nonce()
        )
        try:
            rename(self._name, own_name, self._root)
        except FileNotFoundError:
            raise CommitInProgressError(f"another node commits {self._state}") from None
        self._name = own_name
        if not self._is_same_folder():
            raise CommitInProgressError(f"another node has started {self._state} again")

    def _is_same_folder(self) -> bool:
        """Return whether the directory of this name is still the one that was opened."""
        try:
            found = os.lstat(self._name, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._folder))

    def _write_shard(
        self,
        name: str,
        record: ShardRecord,
        source: ImageSource,
        throttle: Throttle,
        *,
        verify: bool = True,
    ) -> bytes:
        """Write the image into the file *name*; return the hashes of its pieces, if any."""
        with self._space.claim(record.digest.nbytes) as on_next:

            def before_write(nbytes: int) -> None:
                throttle(nbytes)
                on_next(nbytes)

            fd = create(name, self._folder)
            try:
                try:
                    return write_image(
                        source, fd, record.digest, throttle=before_write, verify=verify
                    )
                finally:
                    os.close(fd)  # file servers may report a failed write only here
            except BaseException:  # boundary: whatever the error, free the disk
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)
                raise

    def _write_session_shard(
        self, record: ShardRecord, source: ImageSource, throttle: Throttle
    ) -> None:
        name = record.shard.file_name
        if self.records().get(record.shard) == record:
            return
        part = f".{self._context.nonce().hex()}.part"
        pieces = self._write_shard(part, record, source, throttle)
        if not self._is_same_folder():
            os.unlink(part, dir_fd=self._folder)
            raise CheckpointError(f"another node renamed {self._name} while {name} was written")
        rename(part, name, self._folder)
        self._write_renamed(pieces_file_name(record.shard), pieces)
        self._write_renamed(record_file_name(record.shard), encode_record(record))
        os.fsync(self._folder)

    def _write_renamed(self, name: str, content: bytes) -> None:
        part = f".{self._context.nonce().hex()}.part"
        write_synced(part, content, self._folder)
        rename(part, name, self._folder)

    def _finish_folder(self, manifest: Manifest) -> None:
        """Write the manifest and remove the records, all on stable storage."""
        require_shards(self.records(), manifest)
        for record in manifest.shards:
            size_bytes = regular_file_size(record.shard.file_name, self._folder)
            if size_bytes != record.digest.nbytes:
                raise CorruptError(
                    f"{record.shard.file_name} has {size_bytes} bytes, not {record.digest.nbytes}"
                )
        # First write the manifest, then remove the records it is built from: at any moment one of
        # the two lists the shards.
        self._write_renamed(MANIFEST, encode_manifest(manifest))
        os.fsync(self._folder)
        shards = [record.shard for record in manifest.shards]
        expected_names = {MANIFEST, *(shard.file_name for shard in shards)}
        expected_names |= {pieces_file_name(shard) for shard in shards}
        leftovers = [name for name in list_names(self._folder) if name not in expected_names]
        for name in leftovers:
            os.unlink(name, dir_fd=self._folder)
        if leftovers:  # each sync takes milliseconds, in which the state is not there yet
            os.fsync(self._folder)

    def _publish(self, manifest: Manifest) -> bool:
        final = self._state.name
        for _ in range(_RENAMES_MAX):
            if contains_state(self._root, self._context.root, manifest):
                return False
            if is_directory(final, self._root):  # damaged, or the commit would have been refused
                rename(final, quarantine_name(self._state, self._context.nonce()), self._root)
            try:
                rename(self._name, final, self._root)
            except OSError as exc:
                if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            else:
                return True
        raise CheckpointError(f"other writers keep writing {final} into {self._context.root}")

    def _remove_superseded(self) -> None:
        """Remove this session's leftovers of this state and older ones; no node needs them."""
        for name in list_names(self._root):
            leftover = parse_leftover_name(name)
            if (
                leftover
                and leftover.kind is LeftoverKind.SHARED
                and self._shared_name == shared_name(self._state, leftover.session)
                and leftover.state <= self._state
            ):
                with contextlib.suppress(OSError):
                    trash = trash_name(leftover.state, self._context.nonce())
                    rename(name, trash, self._root)
                    remove_tree(trash, self._root)


def contains_state(root: int, path: Path, manifest: Manifest) -> bool:
    """Return whether the directory *root* (called *path*) has the complete state of *manifest*.

    A damaged state does not count. The sizes of the files are compared, not their bytes.

    Raises:
        OSError: It cannot be read.
        CheckpointError: Another state has this name: of another run, or unreadable.
    """
    name = manifest.state.name
    try:
        os.lstat(name, dir_fd=root)
    except FileNotFoundError:
        return False
    if not is_directory(name, root):
        raise CheckpointError(f"{path / name} is not a directory; move it out of the way")
    with open_directory(name, dir_fd=root) as folder:
        try:
            content = read_bounded(MANIFEST, folder, MANIFEST_BYTES_MAX)
            stored = parse_manifest(content, str(path / name / MANIFEST))
        except (FileNotFoundError, CorruptError):
            return False
        if not manifest.has_same_shards(stored):
            raise CheckpointError(
                f"{path / name} is another state of that name, saved by {stored.job or 'a run'} "
                f"at {stored.created}. Give each run a directory of its own"
            )
        try:
            return all(
                regular_file_size(record.shard.file_name, folder) == record.digest.nbytes
                for record in manifest.shards
            )
        except FileNotFoundError:
            return False


def _read_records(folder: int, path: Path, shards: Iterable[Shard]) -> dict[Shard, ShardRecord]:
    """Return what is recorded in the temporary directory *folder*, called *path*."""
    with contextlib.suppress(FileNotFoundError, CorruptError):
        content = read_bounded(MANIFEST, folder, MANIFEST_BYTES_MAX)
        manifest = parse_manifest(content, str(path / MANIFEST))
        return {record.shard: record for record in manifest.shards}
    found = {}
    for shard in shards:
        with contextlib.suppress(FileNotFoundError):
            content = read_bounded(record_file_name(shard), folder, MANIFEST_BYTES_MAX)
            # An unreadable record counts as none: its shard is written again.
            record = parse_record(shard, content)
            if record and regular_file_size(shard.file_name, folder) == record.digest.nbytes:
                found[shard] = record
    return found
