"""States in an object store, under any URL that fsspec knows.

There is no rename: shards are written to their final names, and the manifest, written last,
completes the state. Readers ignore everything without a valid manifest. A deletion removes the
manifest first.

Write one state into an object store, alone or together with the writers of other nodes.
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
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    encode_manifest,
    encode_record,
    parse_record,
    record_file_name,
)
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.api import (
    DamagedState,
    ImageSource,
    NoStateError,
    StoredState,
    StoreScan,
    Throttle,
    require_shards,
    unthrottled,
)
from gpuops.checkpoint.storage.directory_files import (
    PINS,
    check_tag,
    collect_pins,
    is_valid_tag,
    name_component,
    parse_state_name,
    pin_name,
)
from gpuops.checkpoint.storage.image_file import image_fd, verify_image
from gpuops.checkpoint.storage.object_tree import SESSIONS_FOLDER, ObjectTree, Retrying
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)
from gpuops.host.clock import Clock, SystemClock
from gpuops.scrub import scrub


class ObjectWriter:
    """One state that is being written into an object store; see `StateWriter`.

    A state with a valid manifest and all its shards is never written again: its objects have the
    names that ours would have.
    """

    shards_at_once = 1  # several parts of an upload are in flight, each of them copied to memory

    def __init__(
        self, tree: ObjectTree, state: StateId, world: int, *, session: str | None = None
    ) -> None:
        self._tree = tree
        self._state = state
        self._world = world
        # Where the nodes of a session record the shards that they put.
        self._session_folder = (
            None if session is None else f"{SESSIONS_FOLDER}/{state.name}.{name_component(session)}"
        )
        self._records: dict[Shard, ShardRecord] = {}
        self._versions: dict[Shard, str] = {}
        self._upload_ids: dict[Shard, str] = {}
        self._is_finished = False
        self._existing = self._find_existing()

    def put_shard(
        self, record: ShardRecord, source: ImageSource, *, throttle: Throttle = unthrottled
    ) -> None:
        key = self._key(record.shard)
        url = f"{self._tree.address}/{key}"
        if record.shard.world != self._world:
            raise CheckpointError(f"{url} is not of a world of {self._world}")
        if self._existing is not None:
            if self._existing.record(record.shard) != record:
                raise CheckpointError(
                    f"{url} is of another state of that name, saved by "
                    f"{self._existing.job or 'a run'}. Give each run a prefix of its own"
                )
        elif self._read_record(record.shard) != record:
            self._upload(record, source, key, throttle)
        self._records[record.shard] = record

    def records(self) -> Mapping[Shard, ShardRecord]:
        if self._existing is not None:
            return {record.shard: record for record in self._existing.shards}
        if self._session_folder is None:
            return dict(self._records)
        sizes = self._tree.sizes(self._session_folder)
        shards = [Shard(rank, self._world) for rank in range(self._world)]
        named = [shard for shard in shards if record_file_name(shard) in sizes]
        found = ((shard, self._read_record(shard)) for shard in named)
        return {shard: record for shard, record in found if record is not None}

    def commit(self, manifest: Manifest) -> bool:
        if (manifest.state, manifest.world) != (self._state, self._world):
            raise CheckpointError(f"a manifest of {manifest.state} is not of {self._state}")
        key = f"{self._state.name}/{MANIFEST}"
        is_new = not self._tree.contains(manifest)
        if is_new:
            try:
                require_shards(self.records(), manifest)
                self._check_not_replaced(manifest)
            except CheckpointError:
                # Another node has committed it meanwhile, and has removed the records.
                if self._session_folder is None or not self._tree.contains(manifest):
                    raise
                return False
            self._tree.write(key, encode_manifest(manifest))
            if not self._tree.contains(manifest):
                raise CheckpointError(
                    f"{self._tree.address}/{key} was written, and then not found as it was written"
                )
        self._is_finished = True
        if self._session_folder is not None:
            with contextlib.suppress(CheckpointError):  # a sweep removes them otherwise
                self._tree.remove_all(self._session_folder)
        return is_new

    def abort(self) -> None:
        if self._is_finished or self._session_folder is not None:
            return
        self._is_finished = True
        for shard, version in self._versions.items():
            with contextlib.suppress(CheckpointError):  # else a sweep removes it
                if self._tree.version(self._key(shard)) == version:  # no other run has replaced it
                    self._tree.remove(f"{self._state.name}/{pieces_file_name(shard)}")
                    self._tree.remove(self._key(shard))
        self._tree.remove_empty(self._state.name)

    def _find_existing(self) -> Manifest | None:
        """Return the manifest of the state if it exists; remove a damaged one."""
        try:
            stored = self._tree.read_manifest(self._state)
            if self._tree.contains(stored):
                return stored
        except NoStateError:
            return None
        except CorruptError:
            pass
        # An entry with the name of a state must not look like one with our shards in it.
        self._tree.remove(f"{self._state.name}/{MANIFEST}")
        return None

    def _upload(
        self, record: ShardRecord, source: ImageSource, key: str, throttle: Throttle
    ) -> None:
        url = f"{self._tree.address}/{key}"
        try:
            throttle(0)  # an upload calls it first when a part is done
            pieces = verify_image(source, record.digest)
            upload_id = self._tree.upload(key, image_fd(source), throttle)
            verify_image(source, record.digest)  # it did not change meanwhile
        except CorruptError as exc:
            raise CorruptError(f"{url} was not kept: {exc}") from exc
        except OSError as exc:
            raise CheckpointError(f"{url} was not written: {exc}") from exc
        size_bytes = self._tree.size(key)
        if size_bytes != record.digest.nbytes:
            raise CheckpointError(
                f"{url} has {size_bytes} bytes, {record.digest.nbytes} were written"
            )
        self._tree.write(f"{self._state.name}/{pieces_file_name(record.shard)}", pieces)
        self._versions[record.shard] = self._tree.version(key) or ""
        self._upload_ids[record.shard] = upload_id
        if self._session_folder is not None:
            key = f"{self._session_folder}/{record_file_name(record.shard)}"
            self._tree.write(key, encode_record(record))

    def _read_record(self, shard: Shard) -> ShardRecord | None:
        """Return what was recorded of *shard*, where its object is still of that size."""
        if self._session_folder is None:
            return self._records.get(shard)
        key = f"{self._session_folder}/{record_file_name(shard)}"
        nbytes = self._tree.size(key)
        if nbytes is None or nbytes > MANIFEST_BYTES_MAX:
            return None
        record = parse_record(shard, self._tree.read(key, 0, nbytes))
        if record is None or self._tree.size(self._key(shard)) != record.digest.nbytes:
            return None
        return record

    def _check_not_replaced(self, manifest: Manifest) -> None:
        """Raise where another writer has replaced an object since we wrote it."""
        sizes = self._tree.sizes(self._state.name)
        for record in manifest.shards:
            name = record.shard.file_name
            there = sizes.get(name)
            if there != record.digest.nbytes:
                raise CorruptError(f"{name} has {there} bytes, not {record.digest.nbytes}")
        for shard, version in self._versions.items():
            key, nbytes, upload_id = (
                self._key(shard),
                sizes[shard.file_name],
                self._upload_ids[shard],
            )
            if self._tree.version(key) == version:
                continue
            # A client that got no answer sends its request again, and S3 may carry out the first
            # one after the second: a new version of the same bytes.
            if not self._tree.is_uploaded(key, nbytes, upload_id):
                raise CheckpointError(
                    f"{self._tree.address}/{key} was written by another run meanwhile. "
                    "Give each run a prefix of its own"
                )

    def _key(self, shard: Shard) -> str:
        return f"{self._state.name}/{shard.file_name}"


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
                states.append(StoredState(state, self.read_manifest(state), pins.get(state, ())))
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
        key = f"{state.name}/{record.shard.file_name}"
        nbytes, shard_url = record.digest.nbytes, self._shard_url(state, record.shard)
        size_bytes = self._tree.size(key)
        if size_bytes is None:
            raise CheckpointError(f"{shard_url} is not there")
        if not size_bytes == nbytes == len(into):
            raise CorruptError(f"{shard_url} has {size_bytes} bytes, {nbytes} were saved")
        with ThreadPoolExecutor(_CONNECTIONS, "gpuops-fetch") as pool:
            fetches = [
                pool.submit(self._fetch_chunk, key, record, number, into)
                for number in range(-(-nbytes // CHUNK_BYTES))
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
        self, _record: ShardRecord, _state: StateId, *, throttle: Throttle = unthrottled
    ) -> bool:
        throttle(0)
        return False

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

    def _fetch_chunk(self, key: str, record: ShardRecord, number: int, into: memoryview) -> None:
        at = number * CHUNK_BYTES
        end = min(at + CHUNK_BYTES, record.digest.nbytes)
        for _ in range(_FETCHES_MAX):
            chunk = self._tree.read(key, at, end)
            if is_chunk_intact(chunk, record.digest, number):
                into[at:end] = chunk
                return
        raise CorruptError(f"the chunk at byte {at} is not what was saved")

    def _read_pins(self) -> dict[StateId, tuple[str, ...]]:
        return collect_pins(sorted(self._tree.sizes(PINS)))

    def _shard_url(self, state: StateId, shard: Shard) -> str:
        return f"{self.address}/{state.name}/{shard.file_name}"
