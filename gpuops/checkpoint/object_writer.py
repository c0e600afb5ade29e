"""Write one state into an object store, alone or together with the writers of other nodes."""

import contextlib
import json
from collections.abc import Mapping

from gpuops.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    ShardRecord,
    parse_object,
    record_from_json,
    record_to_json,
    to_bytes,
)
from gpuops.checkpoint.object_tree import ObjectTree
from gpuops.checkpoint.shard_file import descriptor_of, hash_image
from gpuops.checkpoint.state_store import (
    ImageSource,
    NoStateError,
    Pace,
    require_shards,
    unpaced,
)
from gpuops.checkpoint.states import CheckpointError, CorruptError, Shard, StateId


class ObjectWriter:
    """One state on its way into an object store; see `StateWriter`.

    A state with a manifest that reads and all its shards is never written to again: its objects
    have the names that ours would have.
    """

    def __init__(
        self, tree: ObjectTree, state: StateId, world: int, *, session: str | None = None
    ) -> None:
        self._tree = tree
        self._state = state
        self._world = world
        self._parts = None if session is None else tree.parts_folder(state, session)
        self._records: dict[Shard, ShardRecord] = {}
        self._versions: dict[Shard, str] = {}
        self._is_over = False
        self._there = self._look()

    def put_shard(self, record: ShardRecord, source: ImageSource, *, pace: Pace = unpaced) -> None:
        key = self._key(record.shard)
        shown = f"{self._tree.address}/{key}"
        if record.shard.world != self._world:
            raise CheckpointError(f"{shown} is not of a world of {self._world}")
        if self._there is not None:
            if self._there.record(record.shard) != record:
                raise CheckpointError(
                    f"{shown} is of another state of that name, saved by "
                    f"{self._there.job or 'a run'}. Give each run a prefix of its own"
                )
        elif self._recorded(record.shard) != record:
            self._put(record, source, key, pace)
        self._records[record.shard] = record

    def records(self) -> Mapping[Shard, ShardRecord]:
        if self._there is not None:
            return {record.shard: record for record in self._there.shards}
        if self._parts is None:
            return dict(self._records)
        there = self._tree.sizes(self._parts)
        shards = [Shard(rank, self._world) for rank in range(self._world)]
        named = [shard for shard in shards if _record_name(shard) in there]
        found = ((shard, self._recorded(shard)) for shard in named)
        return {shard: record for shard, record in found if record is not None}

    def commit(self, manifest: Manifest) -> bool:
        if (manifest.state, manifest.world) != (self._state, self._world):
            raise CheckpointError(f"a manifest of {manifest.state} is not of {self._state}")
        key = f"{self._state.name}/{MANIFEST}"
        is_new = not self._tree.holds(manifest)
        if is_new:
            try:
                require_shards(self.records(), manifest)
                self._require_ours(manifest)
            except CheckpointError:
                # Another node that committed it meanwhile has removed the records.
                if self._parts is None or not self._tree.holds(manifest):
                    raise
                return False
            self._tree.write(key, to_bytes(manifest))
            if not self._tree.holds(manifest):
                raise CheckpointError(
                    f"{self._tree.address}/{key} was written, and then not found as it was written"
                )
        self._is_over = True
        if self._parts is not None:
            with contextlib.suppress(CheckpointError):  # a sweep removes them otherwise
                self._tree.remove_all(self._parts)
        return is_new

    def abort(self) -> None:
        if self._is_over or self._parts is not None:
            return
        self._is_over = True
        for shard, version in self._versions.items():
            with contextlib.suppress(CheckpointError):  # a sweep removes it otherwise
                if self._tree.version(self._key(shard)) == version:  # not another run's by now
                    self._tree.remove(self._key(shard))
        self._tree.remove_empty(self._state.name)

    def _look(self) -> Manifest | None:
        """Return the manifest of the state where it is there; make room where it is damaged."""
        try:
            there = self._tree.manifest(self._state)
            if self._tree.holds(there):
                return there
        except NoStateError:
            return None
        except CorruptError:
            pass
        # What has the name of a state, and is none, must not look like one with our shards in it.
        self._tree.remove(f"{self._state.name}/{MANIFEST}")
        return None

    def _put(self, record: ShardRecord, source: ImageSource, key: str, pace: Pace) -> None:
        shown = f"{self._tree.address}/{key}"
        try:
            pace(0)  # the first call of an upload comes when a part of it is done
            hash_image(source, record.digest)
            self._tree.upload(key, descriptor_of(source), pace)
            hash_image(source, record.digest)  # it was the same all the while
        except CorruptError as exc:
            raise CorruptError(f"{shown} was not kept: {exc}") from exc
        except OSError as exc:
            raise CheckpointError(f"{shown} was not written: {exc}") from exc
        there = self._tree.size(key)
        if there != record.digest.nbytes:
            raise CheckpointError(f"{shown} has {there} bytes, {record.digest.nbytes} were written")
        self._versions[record.shard] = self._tree.version(key) or ""
        if self._parts is not None:
            content = json.dumps(record_to_json(record)).encode()
            self._tree.write(f"{self._parts}/{_record_name(record.shard)}", content)

    def _recorded(self, shard: Shard) -> ShardRecord | None:
        """Return what was recorded of *shard*, where its object is still of that size."""
        if self._parts is None:
            return self._records.get(shard)
        key = f"{self._parts}/{_record_name(shard)}"
        nbytes = self._tree.size(key)
        if nbytes is None or nbytes > MANIFEST_BYTES_MAX:
            return None
        try:
            record = record_from_json(
                shard.file_name, parse_object(self._tree.read(key, 0, nbytes))
            )
        except ValueError:
            return None
        return record if self._tree.size(self._key(shard)) == record.digest.nbytes else None

    def _require_ours(self, manifest: Manifest) -> None:
        """Say nothing where no other writer has replaced an object since we wrote it."""
        sizes = self._tree.sizes(self._state.name)
        for record in manifest.shards:
            name = record.shard.file_name
            there = sizes.get(name)
            if there != record.digest.nbytes:
                raise CorruptError(f"{name} has {there} bytes, not {record.digest.nbytes}")
        for shard, version in self._versions.items():
            if self._tree.version(self._key(shard)) != version:
                raise CheckpointError(
                    f"{self._tree.address}/{self._key(shard)} was written by another run "
                    "meanwhile. Give each run a prefix of its own"
                )

    def _key(self, shard: Shard) -> str:
        return f"{self._state.name}/{shard.file_name}"


def _record_name(shard: Shard) -> str:
    return f"{shard.file_name}.record.json"
