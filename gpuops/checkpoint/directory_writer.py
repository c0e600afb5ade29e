"""Write one state into a directory, alone or together with the writers of other nodes.

Alone, the temporary directory is named after this process. Together, it is named after the session:
each writer puts its shard under a name of its own, renames it, and leaves a small record of it
beside. The one that commits makes the manifest of these records, and then removes them.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint.directory_files import (
    create,
    explained,
    is_directory,
    make_durably,
    names_in,
    opened_directory,
    read_small,
    remove_tree,
    rename,
    require_room,
    size_of,
    write_synced,
)
from gpuops.checkpoint.directory_names import (
    LeftoverKind,
    aside_name,
    leftover_of,
    shared_name,
    temporary_name,
    trash_name,
)
from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    from_bytes,
    parse_object,
    record_from_json,
    record_to_json,
    to_bytes,
)
from gpuops.checkpoint.shard_file import write_image
from gpuops.checkpoint.state_store import (
    BeingCommittedError,
    ImageSource,
    Pace,
    require_shards,
    unpaced,
)
from gpuops.checkpoint.states import CheckpointError, CorruptError, Shard, StateId

_RENAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class Place:
    """A directory and who writes into it. ``nonce`` returns 8 bytes that were never used before."""

    root: Path
    host: str  # a `word`
    pid: int
    nonce: Callable[[], bytes]


class DirectoryWriter:
    """One state on its way into a directory; see `StateWriter`."""

    def __init__(
        self, place: Place, state: StateId, world: int, *, session: str | None = None
    ) -> None:
        self._place = place
        self._state = state
        self._world = world
        self._shared_name = None if session is None else shared_name(state, session)
        self._ended = False
        self._records: dict[Shard, ShardRecord] = {}
        self._name = self._shared_name or temporary_name(
            state, place.host, place.pid, place.nonce()
        )
        with explained("write into", place.root), contextlib.ExitStack() as opening:
            make_durably(place.root)
            self._root = opening.enter_context(opened_directory(place.root))
            self._folder = self._opened(opening)
            # Tells sweepers that we live, where the file system has locks.
            with contextlib.suppress(OSError):
                fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._open = opening.pop_all()

    def put_shard(self, record: ShardRecord, source: ImageSource, *, pace: Pace = unpaced) -> None:
        path = self._place.root / self._name / record.shard.file_name
        if record.shard.world != self._world:
            raise CheckpointError(f"{path} is not of a world of {self._world}")
        with explained("write", path):
            try:
                if self._shared_name is not None:
                    self._put_beside_others(record, source, pace)
                else:
                    self._put(record.shard.file_name, record, source, pace)
            except CorruptError as exc:
                raise CorruptError(f"{path} was not kept: {exc}") from exc
        self._records[record.shard] = record

    def records(self) -> Mapping[Shard, ShardRecord]:
        if self._shared_name is None:
            return dict(self._records)
        with explained("look into", self._place.root / self._name):
            shards = (Shard(rank, self._world) for rank in range(self._world))
            return _records(self._folder, self._place.root / self._name, shards)

    def commit(self, manifest: Manifest) -> bool:
        with explained("commit", self._place.root / self._state.name):
            if (manifest.state, manifest.world) != (self._state, self._world):
                raise CheckpointError(f"a manifest of {manifest.state} is not of {self._state}")
            is_new = not holds(self._root, self._place.root, manifest)
            if is_new:
                self._claim()
                self._complete(manifest)
                is_new = self._move_into_place(manifest)
            os.fsync(self._root)
            if is_new and self._shared_name is not None:
                self._remove_superseded()
        self._end(keep=is_new)
        return is_new

    def abort(self) -> None:
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        if self._ended:
            return
        self._ended = True
        with self._open, contextlib.suppress(OSError):
            if keep:
                return
            if self._shared_name is None:
                remove_tree(self._name, self._root)
            elif self._name != self._shared_name:
                # What the nodes put is whole; one of them may have better luck with it.
                rename(self._name, self._shared_name, self._root)
            else:
                os.rmdir(self._name, dir_fd=self._root)  # made by asking, and empty

    def _opened(self, opening: contextlib.ExitStack) -> int:
        """Return a descriptor of the temporary directory, which *opening* closes."""
        for _ in range(_RENAMES_MAX):
            try:
                os.mkdir(self._name, dir_fd=self._root)
            except FileExistsError:
                if self._shared_name is None:
                    raise
            with contextlib.suppress(FileNotFoundError):  # one that commits took it in between
                return opening.enter_context(opened_directory(self._name, dir_fd=self._root))
        raise CheckpointError(f"others keep taking {self._name}")

    def _claim(self) -> None:
        """Take what the nodes put for this process alone: of two that commit, one goes on."""
        if self._shared_name is None:
            return
        own = temporary_name(self._state, self._place.host, self._place.pid, self._place.nonce())
        try:
            rename(self._name, own, self._root)
        except FileNotFoundError:
            raise BeingCommittedError(f"another node commits {self._state}") from None
        self._name = own
        if not self._is_ours():
            raise BeingCommittedError(f"another node has begun {self._state} anew")

    def _is_ours(self) -> bool:
        """Return whether the directory of our name is still the one that we opened."""
        try:
            there = os.lstat(self._name, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._folder))

    def _put(self, name: str, record: ShardRecord, source: ImageSource, pace: Pace) -> None:
        require_room(self._folder, record.digest.nbytes)
        fd = create(name, self._folder)
        try:
            try:
                write_image(source, fd, record.digest, pace=pace)
            finally:
                os.close(fd)  # file servers tell of a failed write here, too
        except BaseException:  # boundary: whatever ends it, its bytes need not fill the disk
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder)
            raise

    def _put_beside_others(self, record: ShardRecord, source: ImageSource, pace: Pace) -> None:
        name = record.shard.file_name
        if self.records().get(record.shard) == record:
            return
        part = f".{self._place.nonce().hex()}.part"
        self._put(part, record, source, pace)
        if not self._is_ours():
            os.unlink(part, dir_fd=self._folder)
            raise CheckpointError(f"another node took {self._name} while {name} was written")
        rename(part, name, self._folder)
        self._write_renamed(_record_name(record.shard), _record_content(record))
        os.fsync(self._folder)

    def _write_renamed(self, name: str, content: bytes) -> None:
        part = f".{self._place.nonce().hex()}.part"
        write_synced(part, content, self._folder)
        rename(part, name, self._folder)

    def _complete(self, manifest: Manifest) -> None:
        """Bring the temporary directory to what it is to be, all on stable storage."""
        require_shards(self.records(), manifest)
        for record in manifest.shards:
            there = size_of(record.shard.file_name, self._folder)
            if there != record.digest.nbytes:
                raise CorruptError(
                    f"{record.shard.file_name} has {there} bytes, not {record.digest.nbytes}"
                )
        # First the manifest, then away with the records it is made of: at any moment one of the
        # two says which shards are there.
        self._write_renamed(MANIFEST, to_bytes(manifest))
        os.fsync(self._folder)
        wanted = {MANIFEST, *(record.shard.file_name for record in manifest.shards)}
        for name in names_in(self._folder):
            if name not in wanted:
                os.unlink(name, dir_fd=self._folder)
        os.fsync(self._folder)

    def _move_into_place(self, manifest: Manifest) -> bool:
        final = self._state.name
        for _ in range(_RENAMES_MAX):
            if holds(self._root, self._place.root, manifest):
                return False
            if is_directory(final, self._root):  # damaged, or it would have been refused
                rename(final, aside_name(self._state, self._place.nonce()), self._root)
            try:
                rename(self._name, final, self._root)
            except OSError as exc:
                if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise
            else:
                return True
        raise CheckpointError(f"others keep writing {final} into {self._place.root}")

    def _remove_superseded(self) -> None:
        """Remove what this session left of this state and older ones: all nodes are past them."""
        for name in names_in(self._root):
            found = leftover_of(name)
            if (
                found
                and found.kind is LeftoverKind.SHARED
                and self._shared_name == shared_name(self._state, found.session)
                and found.state <= self._state
            ):
                with contextlib.suppress(OSError):
                    trash = trash_name(found.state, self._place.nonce())
                    rename(name, trash, self._root)
                    remove_tree(trash, self._root)


def holds(root: int, path: Path, manifest: Manifest) -> bool:
    """Return whether the directory *root* (called *path*) has the state of *manifest*, whole.

    A damaged one is not held; of a whole one the sizes of the files are compared, not their bytes.

    Raises:
        OSError: It cannot be looked at.
        CheckpointError: Another state of this name is there: of another run, or not to be read.
    """
    name = manifest.state.name
    try:
        os.lstat(name, dir_fd=root)
    except FileNotFoundError:
        return False
    if not is_directory(name, root):
        raise CheckpointError(f"{path / name} is not a directory; move it out of the way")
    with opened_directory(name, dir_fd=root) as folder:
        try:
            content = read_small(MANIFEST, folder, MANIFEST_BYTES_MAX)
            there = from_bytes(content, str(path / name / MANIFEST))
        except (FileNotFoundError, CorruptError):
            return False
        if not manifest.has_bytes_of(there):
            raise CheckpointError(
                f"{path / name} is another state of that name, saved by {there.job or 'a run'} "
                f"at {there.created}. Give each run a directory of its own"
            )
        try:
            return all(
                size_of(record.shard.file_name, folder) == record.digest.nbytes
                for record in manifest.shards
            )
        except FileNotFoundError:
            return False


def _records(folder: int, path: Path, shards: Iterable[Shard]) -> dict[Shard, ShardRecord]:
    """Return what is recorded in the temporary directory *folder*, called *path*."""
    with contextlib.suppress(FileNotFoundError, CorruptError):
        content = read_small(MANIFEST, folder, MANIFEST_BYTES_MAX)
        manifest = from_bytes(content, str(path / MANIFEST))
        return {record.shard: record for record in manifest.shards}
    found = {}
    for shard in shards:
        with contextlib.suppress(FileNotFoundError):
            content = read_small(_record_name(shard), folder, MANIFEST_BYTES_MAX)
            # A record that does not read is as good as none: its shard is written again.
            with contextlib.suppress(ValueError):
                record = record_from_json(shard.file_name, parse_object(content))
                if size_of(shard.file_name, folder) == record.digest.nbytes:
                    found[shard] = record
    return found


def _record_name(shard: Shard) -> str:
    return f"{shard.file_name}.record.json"


def _record_content(record: ShardRecord) -> bytes:
    return json.dumps(record_to_json(record)).encode()
