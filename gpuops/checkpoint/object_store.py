"""States in an object store, under any URL that fsspec knows.

There is no rename: the shards go to their final names, and the manifest, written last, makes them a
state. Readers ignore all that has no manifest which verifies. To delete is the same backwards: the
manifest goes first.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuops.checkpoint.digest import chunk_is_good
from gpuops.checkpoint.directory_names import PINS, is_tag, pin_name, pin_of, state_of
from gpuops.checkpoint.manifest import MANIFEST, Manifest, ShardRecord
from gpuops.checkpoint.object_calls import Retrying
from gpuops.checkpoint.object_tree import PARTS, ObjectTree
from gpuops.checkpoint.object_writer import ObjectWriter
from gpuops.checkpoint.state_store import Damaged, NoStateError, Stored, Survey
from gpuops.checkpoint.states import (
    CHUNK_BYTES,
    BadRequestError,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)
from gpuops.host.clock import Clock, SystemClock
from gpuops.scrub import scrub

DEADLINE_S = 300.0
FIRST_ANSWER_S = 20.0
ABANDONED_S = 86_400
_CONNECTIONS = 4
_FETCHES_MAX = 3  # of one chunk whose bytes arrive as others than were saved
# A server that accepts and never answers is found out; what the user has set for fsspec goes first.
_S3_OPTIONS = {
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
}


def open_object_store(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    first_answer_s: float = FIRST_ANSWER_S,
    clock: Clock | None = None,
) -> "ObjectStore":
    """Return the store at *url*; nothing is asked of it yet.

    *options* go to the file system class of fsspec, before what its configuration says. A store
    that has never answered is given up after *first_answer_s*, one that has after *deadline_s*.

    Raises:
        CheckpointError: fsspec, or what it needs for this kind of URL, is not installed; or the
            URL is none.
    """
    shown = scrub(url)
    try:
        import fsspec
        from fsspec.config import conf
    except ImportError as exc:
        raise CheckpointError(
            f"{shown} needs fsspec: pip install 'gpuops[torch]', or give a directory"
        ) from exc
    protocol = url.partition("://")[0]
    defaults = _S3_OPTIONS if protocol in {"s3", "s3a"} else {}
    try:
        # The cached instances of fsspec are shared with whoever else uses it in this process.
        chosen = {**defaults, **conf.get(protocol, {}), **(options or {})}
        filesystem, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **chosen)
    except (ImportError, ValueError, TypeError) as exc:
        raise CheckpointError(f"{shown} cannot be opened: {scrub(str(exc))}") from exc
    clock = clock or SystemClock()
    retrying = Retrying(deadline_s, clock, first_answer_s=first_answer_s)
    return ObjectStore(ObjectTree(filesystem, path, shown, retrying), clock)


class ObjectStore:
    """The states below one prefix; threads may share it."""

    def __init__(self, tree: ObjectTree, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock

    @property
    def address(self) -> str:
        return self._tree.address

    def write(self, state: StateId, world: int, *, session: str | None = None) -> ObjectWriter:
        return ObjectWriter(self._tree, state, world, session=session)

    def holds(self, manifest: Manifest) -> bool:
        return self._tree.holds(manifest)

    def survey(self) -> Survey:
        states, damaged, leftovers = [], [], []
        names = sorted(self._tree.names())
        pins = self._pins()
        for name in names:
            state = state_of(name)
            if state is None:
                continue
            try:
                states.append(Stored(state, self.read_manifest(state), pins.get(state, ())))
            except NoStateError:
                leftovers.append(name)
            except CheckpointError as exc:
                damaged.append(Damaged(name, str(exc), isinstance(exc, CorruptError)))
        states.sort(key=lambda stored: stored.state, reverse=True)
        return Survey(tuple(states), tuple(damaged), tuple(leftovers))

    def list(self) -> tuple[Stored, ...]:
        return self.survey().states

    def read_manifest(self, state: StateId) -> Manifest:
        return self._tree.manifest(state)

    def files(self, state: StateId) -> Mapping[str, int]:
        there = self._tree.sizes(state.name)
        return {name: size for name, size in there.items() if name != MANIFEST}

    def open_shard(self, state: StateId, shard: Shard) -> Path | None:
        if self._tree.size(f"{state.name}/{shard.file_name}") is None:
            raise CheckpointError(f"{self._shown(state, shard)} is not there")
        return None

    def read_chunks(self, state: StateId, shard: Shard) -> Iterator[memoryview]:
        key = f"{state.name}/{shard.file_name}"
        nbytes = self._tree.size(key)
        if nbytes is None:
            raise CheckpointError(f"{self._shown(state, shard)} is not there")
        with ThreadPoolExecutor(_CONNECTIONS, "gpuops-fetch") as pool:
            ahead: deque[Future[bytes]] = deque()
            try:
                for at in range(0, nbytes, CHUNK_BYTES):
                    end = min(at + CHUNK_BYTES, nbytes)
                    ahead.append(pool.submit(self._tree.read, key, at, end))
                    if len(ahead) >= _CONNECTIONS:
                        yield memoryview(ahead.popleft().result())
                while ahead:
                    yield memoryview(ahead.popleft().result())
            finally:
                for waiting in ahead:
                    waiting.cancel()

    def read_bytes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        return self._tree.read(f"{state.name}/{shard.file_name}", begin, end)

    def fetch_shard(self, record: ShardRecord, state: StateId, into: memoryview) -> None:
        key = f"{state.name}/{record.shard.file_name}"
        nbytes, shown = record.digest.nbytes, self._shown(state, record.shard)
        there = self._tree.size(key)
        if there is None:
            raise CheckpointError(f"{shown} is not there")
        if not there == nbytes == len(into):
            raise CorruptError(f"{shown} has {there} bytes, {nbytes} were saved")
        with ThreadPoolExecutor(_CONNECTIONS, "gpuops-fetch") as pool:
            fetches = [
                pool.submit(self._fetch_chunk, key, record, number, into)
                for number in range(-(-nbytes // CHUNK_BYTES))
            ]
            try:
                for fetch in fetches:
                    fetch.result()
            except CorruptError as exc:
                raise CorruptError(f"{shown}: {exc}") from exc
            finally:
                for fetch in fetches:
                    fetch.cancel()

    def delete(self, state: StateId) -> None:
        if tags := self._pins().get(state):
            raise CheckpointError(f"{state} in {self.address} is pinned by {', '.join(tags)}")
        self._tree.remove(f"{state.name}/{MANIFEST}")
        # Without its manifest it is gone; what stays of it here is for a sweep.
        with contextlib.suppress(CheckpointError):
            self._tree.remove_all(state.name)

    def pin(self, state: StateId, tag: str) -> None:
        if not is_tag(tag):
            raise BadRequestError(
                f"{tag[:80]!r} is no tag: letters, digits, dot, dash and underscore, 64 at most"
            )
        self.read_manifest(state)
        self._tree.write(f"{PINS}/{pin_name(state, tag)}", b"pinned\n")

    def unpin(self, state: StateId, tag: str) -> None:
        if is_tag(tag):
            self._tree.remove(f"{PINS}/{pin_name(state, tag)}")

    def sweep(self) -> tuple[str, ...]:
        committed, removed = [], []
        for name in sorted(self._tree.names()):
            if state_of(name) is None:
                continue
            if self._tree.size(f"{name}/{MANIFEST}") is not None:
                committed.append(name)
            elif self._is_abandoned(name):
                self._tree.remove_all(name)
                removed.append(name)
        for name in sorted(self._tree.sizes(PARTS)):
            state_name = ".".join(name.split(".")[:2])
            if state_name in committed or self._is_abandoned(f"{PARTS}/{name}"):
                self._tree.remove_all(f"{PARTS}/{name}")
        return tuple(removed)

    def _is_abandoned(self, folder: str) -> bool:
        changed_s = self._tree.changed_s(folder)
        return changed_s is not None and self._clock.now_us() / 1e6 - changed_s > ABANDONED_S

    def _fetch_chunk(self, key: str, record: ShardRecord, number: int, into: memoryview) -> None:
        at = number * CHUNK_BYTES
        end = min(at + CHUNK_BYTES, record.digest.nbytes)
        for _ in range(_FETCHES_MAX):
            chunk = self._tree.read(key, at, end)
            if chunk_is_good(chunk, record.digest, number):
                into[at:end] = chunk
                return
        raise CorruptError(f"the chunk at byte {at} is not what was saved")

    def _pins(self) -> dict[StateId, tuple[str, ...]]:
        pins: dict[StateId, tuple[str, ...]] = {}
        for name in sorted(self._tree.sizes(PINS)):
            if found := pin_of(name):
                state, tag = found
                pins[state] = (*pins.get(state, ()), tag)
        return pins

    def _shown(self, state: StateId, shard: Shard) -> str:
        return f"{self.address}/{state.name}/{shard.file_name}"
