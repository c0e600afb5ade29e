"""States in a directory: on a local disk, or on a file system that the nodes share.

A state is written into a temporary directory beside its place, file by file, each synced; then the
manifest, the directory; then it is renamed into place and the parent is synced. So a reader sees a
state whole or not at all, at whatever moment a writer or the machine stops.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpuops.checkpoint.directory_files import (
    close_unwritten,
    explained,
    is_directory,
    names_in,
    open_to_read,
    opened_directory,
    read_small,
    remove_tree,
    rename,
    size_of,
    write_synced,
)
from gpuops.checkpoint.directory_names import (
    PINS,
    PINS_UNREADABLE,
    is_tag,
    leftover_of,
    pin_name,
    pin_of,
    state_of,
    this_host,
    trash_name,
    word,
)
from gpuops.checkpoint.directory_sweep import sweep
from gpuops.checkpoint.directory_writer import DirectoryWriter, Place, holds
from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    from_bytes,
)
from gpuops.checkpoint.shard_file import image_chunks, read_image
from gpuops.checkpoint.state_store import Damaged, NoStateError, Stored, Survey
from gpuops.checkpoint.states import (
    BadRequestError,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)


class DirectoryStore:
    """The states in *root*, which is made with the first one; threads may share it.

    *host* and *pid* say whose a temporary directory is, *randomness* names it.
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str | None = None,
        pid: int | None = None,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._root = root.absolute()
        self._place = Place(
            root=self._root,
            host=word(this_host() if host is None else host),
            pid=os.getpid() if pid is None else pid,
            nonce=lambda: randomness(8),
        )

    @property
    def address(self) -> str:
        return str(self._root)

    def write(self, state: StateId, world: int, *, session: str | None = None) -> DirectoryWriter:
        return DirectoryWriter(self._place, state, world, session=session)

    def holds(self, manifest: Manifest) -> bool:
        with self._opened("look into") as root:
            return root is not None and holds(root, self._root, manifest)

    def survey(self) -> Survey:
        states, damaged, leftovers = [], [], []
        with self._opened("list") as root:
            if root is None:
                return Survey(())
            pins = _pins(root)
            for name in names_in(root):
                if leftover_of(name):
                    leftovers.append(name)
                state = state_of(name)
                if state is None:
                    continue
                try:
                    manifest = _manifest(root, self._root, state)
                except FileNotFoundError:  # removed since it was listed
                    continue
                except CheckpointError as exc:
                    damaged.append(Damaged(name, str(exc), isinstance(exc, CorruptError)))
                else:
                    states.append(Stored(state, manifest, pins(state)))
        states.sort(key=lambda stored: stored.state, reverse=True)
        return Survey(tuple(states), tuple(damaged), tuple(leftovers))

    def list(self) -> tuple[Stored, ...]:
        return self.survey().states

    def read_manifest(self, state: StateId) -> Manifest:
        with self._opened("read") as root:
            with contextlib.suppress(FileNotFoundError):
                if root is not None:
                    return _manifest(root, self._root, state)
            raise NoStateError(f"there is no {state} in {self._root}")

    def files(self, state: StateId) -> Mapping[str, int]:
        with self._opened_state(state) as folder:
            return {name: size_of(name, folder) for name in names_in(folder) if name != MANIFEST}

    def open_shard(self, state: StateId, shard: Shard) -> Path:
        with self._opened_state(state, shard.file_name) as folder:
            close_unwritten(open_to_read(shard.file_name, folder))
        return self._root / state.name / shard.file_name

    def read_chunks(self, state: StateId, shard: Shard) -> Iterator[memoryview]:
        with self._opened_state(state, shard.file_name) as folder:
            fd = open_to_read(shard.file_name, folder)
            try:
                with image_chunks(fd, os.fstat(fd).st_size) as chunks:
                    for _, chunk in chunks:
                        yield chunk
            finally:
                close_unwritten(fd)

    def read_bytes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        with self._opened_state(state, shard.file_name) as folder:
            fd = open_to_read(shard.file_name, folder)
            try:
                content = os.pread(fd, end - begin, begin)
            finally:
                close_unwritten(fd)
        if len(content) != end - begin:
            raise CorruptError(
                f"{self._root / state.name / shard.file_name} ends before byte {end}"
            )
        return content

    def fetch_shard(self, record: ShardRecord, state: StateId, into: memoryview) -> None:
        with self._opened_state(state, record.shard.file_name) as folder:
            fd = open_to_read(record.shard.file_name, folder)
            try:
                read_image(fd, record.digest, into)
            except CorruptError as exc:
                path = self._root / state.name / record.shard.file_name
                raise CorruptError(f"{path}: {exc}") from exc
            finally:
                close_unwritten(fd)

    def delete(self, state: StateId) -> None:
        with self._opened("remove a state from") as root:
            if root is None or not is_directory(state.name, root):
                return
            if tags := _pins(root)(state):
                raise CheckpointError(f"{state} in {self._root} is pinned by {', '.join(tags)}")
            trash = trash_name(state, self._place.nonce())
            rename(state.name, trash, root)
            os.fsync(root)
            remove_tree(trash, root)

    def pin(self, state: StateId, tag: str) -> None:
        if not is_tag(tag):
            raise BadRequestError(
                f"{tag[:80]!r} is no tag: letters, digits, dot, dash and underscore, 64 at most"
            )
        with self._opened("pin a state in") as root:
            if root is None or not is_directory(state.name, root):
                raise CheckpointError(f"there is no {state} in {self._root}")
            with contextlib.suppress(FileExistsError):
                os.mkdir(PINS, dir_fd=root)
                os.fsync(root)
            with opened_directory(PINS, dir_fd=root) as pins:
                with contextlib.suppress(FileExistsError):
                    write_synced(pin_name(state, tag), b"", pins)
                os.fsync(pins)

    def unpin(self, state: StateId, tag: str) -> None:
        with self._opened("unpin a state in") as root, contextlib.suppress(FileNotFoundError):
            if root is not None and is_tag(tag):
                with opened_directory(PINS, dir_fd=root) as pins:
                    os.unlink(pin_name(state, tag), dir_fd=pins)
                    os.fsync(pins)

    def sweep(self) -> tuple[str, ...]:
        with self._opened("sweep") as root:
            return () if root is None else sweep(root, self._place)

    @contextlib.contextmanager
    def _opened(self, doing: str) -> Iterator[int | None]:
        """Yield a descriptor of the root; None where it was never made."""
        with explained(doing, self._root), contextlib.ExitStack() as stack:
            try:
                root = stack.enter_context(opened_directory(self._root))
            except FileNotFoundError:
                root = None
            yield root

    @contextlib.contextmanager
    def _opened_state(self, state: StateId, file: str = "") -> Iterator[int]:
        with (
            explained("read", self._root / state.name / file),
            opened_directory(self._root) as root,
            opened_directory(state.name, dir_fd=root) as folder,
        ):
            yield folder


def _manifest(root: int, path: Path, state: StateId) -> Manifest:
    """Return the manifest of *state*; FileNotFoundError: there is no such directory."""
    where = path / state.name / MANIFEST
    with contextlib.ExitStack() as stack:
        if not is_directory(state.name, root):
            os.lstat(state.name, dir_fd=root)
            raise CorruptError(f"{path / state.name} is not a directory")
        try:
            folder = stack.enter_context(opened_directory(state.name, dir_fd=root))
        except FileNotFoundError:
            raise
        except OSError as exc:  # of this state alone: the others can be read
            raise CheckpointError(f"cannot read {where}: {exc.strerror or exc}") from exc
        try:
            content = read_small(MANIFEST, folder, MANIFEST_BYTES_MAX)
        except FileNotFoundError as exc:
            os.lstat(state.name, dir_fd=root)
            raise CorruptError(f"{where} is not there") from exc
        except OSError as exc:
            raise CheckpointError(f"cannot read {where}: {exc.strerror or exc}") from exc
    manifest = from_bytes(content, str(where))
    if manifest.state != state:
        raise CorruptError(f"{where} is of {manifest.state}")
    return manifest


def _pins(root: int) -> Callable[[StateId], tuple[str, ...]]:
    """Return what tells the tags of a state."""
    pins: dict[StateId, tuple[str, ...]] = {}
    try:
        with opened_directory(PINS, dir_fd=root) as folder:
            for name in names_in(folder):
                if found := pin_of(name):
                    state, tag = found
                    pins[state] = (*pins.get(state, ()), tag)
    except FileNotFoundError:
        pass
    except OSError:
        # A state can be loaded all the same; but any may be pinned, so none may be deleted.
        return lambda _state: (PINS_UNREADABLE,)
    return lambda state: pins.get(state, ())
