"""Write one state into an object store, alone or together with the writers of other nodes."""

import contextlib
from collections.abc import Mapping

from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    damaged_file_name,
    encode_manifest,
    encode_record,
    parse_record,
    record_file_name,
    verified_file_name,
)
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.api import (
    ImageSource,
    NoStateError,
    Throttle,
    require_shards,
    unthrottled,
)
from gpuops.checkpoint.storage.directory_files import name_component
from gpuops.checkpoint.storage.image_file import image_fd, verify_image
from gpuops.checkpoint.storage.object_tree import SESSIONS_FOLDER, ObjectTree
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard, StateId


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
        self,
        record: ShardRecord,
        source: ImageSource,
        *,
        throttle: Throttle = unthrottled,
        verify: bool = True,  # noqa: ARG002 an upload takes longer than its hash: always verified
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
            for mark in (verified_file_name(record.shard), damaged_file_name(record.shard)):
                self._tree.remove(f"{self._state.name}/{mark}")
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
