"""States in an object store, under any URL that fsspec knows.

There is no rename: shards are written to their final names, and the manifest, written last,
completes the state. Readers ignore everything without a valid manifest. A deletion removes the
manifest first.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuops.checkpoint.digest import is_chunk_intact
from gpuops.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    damaged_file_name,
    names_tell_damage,
    names_verify,
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
    check_tag,
    collect_pins,
    is_valid_tag,
    parse_state_name,
    pin_name,
)
from gpuops.checkpoint.storage.object_tree import SESSIONS_FOLDER, ObjectTree, Retrying
from gpuops.checkpoint.storage.object_writer import ObjectWriter
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)
from gpuops.host.clock import Clock, SystemClock
from gpuops.scrub import scrub

DEADLINE_S = 300.0
FIRST_RESPONSE_TIMEOUT_S = 20.0
ABANDONED_S = 86_400
_CONNECTIONS = 4
_FETCHES_MAX = 3  # of one chunk that arrives corrupt
# Detects a server that accepts and never answers; the user's fsspec settings take precedence.
_S3_OPTIONS = {
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
}


def open_object_store(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    first_response_timeout_s: float = FIRST_RESPONSE_TIMEOUT_S,
    clock: Clock | None = None,
) -> "ObjectStore":
    """Return the store at *url*; no request is sent yet.

    *options* go to the file system class of fsspec, before its configuration. A store that has
    never answered is given up after *first_response_timeout_s*, one that has after *deadline_s*.

    Raises:
        CheckpointError: fsspec, or what it needs for this kind of URL, is not installed; or the URL
            is invalid.
    """
    safe_url = scrub(url)
    try:
        import fsspec
        from fsspec.config import conf
    except ImportError as exc:
        raise CheckpointError(
            f"{safe_url} needs the Python module fsspec, which is missing: pip install fsspec, or "
            "give a directory"
        ) from exc
    protocol = url.partition("://")[0]
    defaults = _S3_OPTIONS if protocol in {"s3", "s3a"} else {}
    try:
        # The cached instances of fsspec are shared with its other users in this process.
        chosen = {**defaults, **conf.get(protocol, {}), **(options or {})}
        filesystem, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **chosen)
    except (ImportError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{safe_url} cannot be opened: {scrub(str(exc))}") from exc
    clock = clock or SystemClock()
    retrying = Retrying(deadline_s, clock, first_response_timeout_s=first_response_timeout_s)
    return ObjectStore(ObjectTree(filesystem, path, safe_url, retrying), clock)


class ObjectStore:
    """The states below one prefix; threads may share it."""

    def __init__(self, tree: ObjectTree, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock

    @property
    def address(self) -> str:
        return self._tree.address

    def open_writer(
        self, state: StateId, world: int, *, session: str | None = None
    ) -> ObjectWriter:
        return ObjectWriter(self._tree, state, world, session=session)

    def contains(self, manifest: Manifest) -> bool:
        return self._tree.contains(manifest)

    def scan(self) -> StoreScan:
        states, damaged, leftovers = [], [], []
        names = sorted(self._tree.list_names())
        pins = self._read_pins()
        for name in names:
            state = parse_state_name(name)
            if state is None:
                continue
            try:
                manifest = self.read_manifest(state)
                files = self._tree.sizes(name)
                is_damaged = names_tell_damage(files, manifest)
                is_verified = not is_damaged and names_verify(files, manifest)
                tags = pins.get(state, ())
                states.append(StoredState(state, manifest, tags, is_verified, is_damaged))
            except NoStateError:
                leftovers.append(name)
            except CheckpointError as exc:
                damaged.append(DamagedState(name, str(exc), isinstance(exc, CorruptError)))
        states.sort(key=lambda stored: stored.state, reverse=True)
        return StoreScan(tuple(states), tuple(damaged), tuple(leftovers))

    def list_states(self) -> tuple[StoredState, ...]:
        return self.scan().states

    def read_manifest(self, state: StateId) -> Manifest:
        return self._tree.read_manifest(state)

    def file_sizes(self, state: StateId) -> Mapping[str, int]:
        sizes = self._tree.sizes(state.name)
        return {name: size for name, size in sizes.items() if name != MANIFEST}

    def local_shard_path(self, state: StateId, shard: Shard) -> Path | None:
        if self._tree.size(f"{state.name}/{shard.file_name}") is None:
            raise CheckpointError(f"{self._shard_url(state, shard)} is not there")
        return None

    def read_chunks(self, state: StateId, shard: Shard) -> Iterator[memoryview]:
        key = f"{state.name}/{shard.file_name}"
        nbytes = self._tree.size(key)
        if nbytes is None:
            raise CheckpointError(f"{self._shard_url(state, shard)} is not there")
        with ThreadPoolExecutor(_CONNECTIONS, "gpuops-fetch") as pool:
            prefetched: deque[Future[bytes]] = deque()
            try:
                for at in range(0, nbytes, CHUNK_BYTES):
                    end = min(at + CHUNK_BYTES, nbytes)
                    prefetched.append(pool.submit(self._tree.read, key, at, end))
                    if len(prefetched) >= _CONNECTIONS:
                        yield memoryview(prefetched.popleft().result())
                while prefetched:
                    yield memoryview(prefetched.popleft().result())
            finally:
                for waiting in prefetched:
                    waiting.cancel()

    def read_bytes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        return self._tree.read(f"{state.name}/{shard.file_name}", begin, end)

    def read_piece_hashes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        key = f"{state.name}/{pieces_file_name(shard)}"
        nbytes = self._tree.size(key) or 0
        return self._tree.read(key, begin, min(end, nbytes)) if begin < nbytes else b""

    def fetch_shard(self, record: ShardRecord, state: StateId, into: memoryview) -> None:
        shard_url = self._shard_url(state, record.shard)
        n_chunks = self._n_chunks(record, state)
        if record.digest.nbytes != len(into):
            raise CorruptError(f"{shard_url} has {record.digest.nbytes} bytes, not {len(into)}")
        with ThreadPoolExecutor(_CONNECTIONS, "gpuops-fetch") as pool:
            fetches = [
                pool.submit(self._fetch_chunk, record, state, number, into)
                for number in range(n_chunks)
            ]
            try:
                for fetch in fetches:
                    fetch.result()
            except CorruptError as exc:
                raise CorruptError(f"{shard_url}: {exc}") from exc
            finally:
                for fetch in fetches:
                    fetch.cancel()

    def read_back(
        self, record: ShardRecord, state: StateId, *, throttle: Throttle = unthrottled
    ) -> None:
        marker = f"{state.name}/{verified_file_name(record.shard)}"
        if self._tree.size(marker) is not None:
            return
        try:
            for number in range(self._n_chunks(record, state)):
                throttle(CHUNK_BYTES)
                self._read_chunk(record, state, number)
        except CorruptError as exc:
            raise CorruptError(f"{self._shard_url(state, record.shard)}: {exc}") from exc
        self._tree.remove(f"{state.name}/{damaged_file_name(record.shard)}")
        self._tree.write(marker, b"")

    def mark_damaged(self, record: ShardRecord, state: StateId) -> None:
        self._tree.remove(f"{state.name}/{verified_file_name(record.shard)}")
        self._tree.write(f"{state.name}/{damaged_file_name(record.shard)}", b"")

    def delete(self, state: StateId) -> None:
        if tags := self._read_pins().get(state):
            raise CheckpointError(f"{state} in {self.address} is pinned by {', '.join(tags)}")
        self._tree.remove(f"{state.name}/{MANIFEST}")
        # Without its manifest it is gone; a sweep removes the rest.
        with contextlib.suppress(CheckpointError):
            self._tree.remove_all(state.name)

    def pin(self, state: StateId, tag: str) -> None:
        check_tag(tag)
        self.read_manifest(state)
        self._tree.write(f"{PINS}/{pin_name(state, tag)}", b"pinned\n")

    def unpin(self, state: StateId, tag: str) -> None:
        if is_valid_tag(tag):
            self._tree.remove(f"{PINS}/{pin_name(state, tag)}")

    def sweep(self) -> tuple[str, ...]:
        committed, removed = [], []
        for name in sorted(self._tree.list_names()):
            if parse_state_name(name) is None:
                continue
            if self._tree.size(f"{name}/{MANIFEST}") is not None:
                committed.append(name)
            elif self._is_abandoned(name):
                self._tree.remove_all(name)
                removed.append(name)
        for name in sorted(self._tree.sizes(SESSIONS_FOLDER)):
            state_name = ".".join(name.split(".")[:2])
            if state_name in committed or self._is_abandoned(f"{SESSIONS_FOLDER}/{name}"):
                self._tree.remove_all(f"{SESSIONS_FOLDER}/{name}")
        return tuple(removed)

    def _is_abandoned(self, folder: str) -> bool:
        changed_s = self._tree.last_modified_s(folder)
        return changed_s is not None and self._clock.now_us() / 1e6 - changed_s > ABANDONED_S

    def _n_chunks(self, record: ShardRecord, state: StateId) -> int:
        """Return the number of chunks of a shard that is there in its size."""
        nbytes, shard_url = record.digest.nbytes, self._shard_url(state, record.shard)
        size_bytes = self._tree.size(f"{state.name}/{record.shard.file_name}")
        if size_bytes is None:
            raise CheckpointError(f"{shard_url} is not there")
        if size_bytes != nbytes:
            raise CorruptError(f"{shard_url} has {size_bytes} bytes, {nbytes} were saved")
        return -(-nbytes // CHUNK_BYTES)

    def _fetch_chunk(
        self, record: ShardRecord, state: StateId, number: int, into: memoryview
    ) -> None:
        chunk, at = self._read_chunk(record, state, number), number * CHUNK_BYTES
        into[at : at + len(chunk)] = chunk

    def _read_chunk(self, record: ShardRecord, state: StateId, number: int) -> bytes:
        """Return a verified chunk."""
        at = number * CHUNK_BYTES
        end = min(at + CHUNK_BYTES, record.digest.nbytes)
        for _ in range(_FETCHES_MAX):
            chunk = self.read_bytes(state, record.shard, at, end)
            if is_chunk_intact(chunk, record.digest, number):
                return chunk
        raise CorruptError(f"the chunk at byte {at} is not what was saved")

    def _read_pins(self) -> dict[StateId, tuple[str, ...]]:
        return collect_pins(sorted(self._tree.sizes(PINS)))

    def _shard_url(self, state: StateId, shard: Shard) -> str:
        return f"{self.address}/{state.name}/{shard.file_name}"
