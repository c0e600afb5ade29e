"""The interface of persistent stores, directories and object stores alike.

A state exists when its manifest does: shards are written first, the manifest last, and readers
ignore shards without one. The files of a dead writer never count as a state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpuops.checkpoint.manifest import Manifest, ShardRecord
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError, Shard, StateId

# An image: a slot, or the descriptor of a file or of memory. A slot is already mapped here;
# mapping it again, page by page, takes as long as hashing it.
ImageSource = SharedBuffer | int
# Called with the number of bytes about to be moved. It may wait; its exceptions end the transfer.
Throttle = Callable[[int], None]


class NoStateError(CheckpointError):
    """The store has no such state."""


class CommitInProgressError(CheckpointError):
    """Another node of the session is committing this state."""


def unthrottled(_nbytes: int) -> None:
    """Do not limit the rate."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state with a valid manifest. ``tags`` pin it: it is not deleted while it has one.

    ``is_verified``: all its shards were read back from the store, and were what was saved.
    ``is_damaged``: one of them is not there, or was not what was saved when it was read last.
    """

    state: StateId
    manifest: Manifest
    tags: tuple[str, ...] = ()
    is_verified: bool = False
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class DamagedState:
    """An entry with the name of a state that cannot be used as one: ``why`` is one sentence.

    Not ``is_corrupt``: it may be intact, but of a later gpuops or not readable for this user.
    """

    name: str
    why: str
    is_corrupt: bool = True

    @property
    def condition(self) -> str:
        """Return ``"is damaged"`` or ``"cannot be read"``."""
        return "is damaged" if self.is_corrupt else "cannot be read"


@dataclass(frozen=True, slots=True)
class StoreScan:
    """What is in a store: the states, newest first; the damaged; and writers' leftovers."""

    states: tuple[StoredState, ...]
    damaged: tuple[DamagedState, ...] = ()
    leftovers: tuple[str, ...] = ()


def require_shards(records: Mapping[Shard, ShardRecord], manifest: Manifest) -> None:
    """Raise unless *records* has each shard that *manifest* names.

    Raises:
        CheckpointError: One is missing, or is another than *manifest* says.
    """
    missing = [record.shard.file_name for record in manifest.shards if record.shard not in records]
    mismatched = [
        record.shard.file_name
        for record in manifest.shards
        if records.get(record.shard, record) != record
    ]
    for names, what in ((missing, "not there"), (mismatched, "not the ones that were saved")):
        if names:
            raise CheckpointError(
                f"{manifest.state} cannot be committed: {len(names)} of {manifest.world} shards "
                f"are {what}: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
            )


class StateWriter(Protocol):
    """One state being written. It is invisible before `commit`.

    ``shards_at_once``: how many threads may call `put_shard` at a time, each with its own shard.
    """

    shards_at_once: int

    def put_shard(
        self,
        record: ShardRecord,
        source: ImageSource,
        *,
        throttle: Throttle = unthrottled,
        verify: bool = True,
    ) -> None:
        """Write the shard from the start of *source* (a descriptor's position is not moved).

        Returns once the bytes are on stable storage. Without *verify* a store may leave it to
        `CheckpointStore.read_back` to compare them with the record's digest.

        Raises:
            CorruptError: The bytes that were written are not those of the record's digest.
            CheckpointError: They cannot be written.
        """
        ...

    def records(self) -> Mapping[Shard, ShardRecord]:
        """Return the shards that are there, also those that other nodes put.

        Raises:
            CheckpointError: They cannot be read.
        """
        ...

    def commit(self, manifest: Manifest) -> bool:
        """Make the complete state visible; return False where the same one exists already.

        Raises:
            CommitInProgressError: Another node of the session is committing it.
            CheckpointError: A shard is missing or is not the one that *manifest* names; another
                run has saved another state under this name; or the store cannot be written.
        """
        ...

    def abort(self) -> None:
        """End without a commit; after one, do nothing.

        What this writer put is removed as far as it can be; of a session the complete shards stay,
        for another node to commit.
        """
        ...


@runtime_checkable
class CheckpointStore(Protocol):
    """States in a directory or under a URL; ``address`` names it without secrets."""

    @property
    def address(self) -> str: ...

    def open_writer(self, state: StateId, world: int, *, session: str | None = None) -> StateWriter:
        """Begin to write *state*.

        *session*: the name of the run, where several nodes put the shards of one state; it is the
        same on all of them, and one of them commits. None: this writer puts all shards. Raises:
            CheckpointError: Nothing can be written there.
        """
        ...

    def contains(self, manifest: Manifest) -> bool:
        """Return whether the state of *manifest* is there, with all its shards of the right size.

        Raises:
            CheckpointError: Another state has its name, or the store cannot be read.
        """
        ...

    def scan(self) -> StoreScan:
        """Return everything in the store.

        Raises:
            CheckpointError: It cannot be listed.
        """
        ...

    def list_states(self) -> tuple[StoredState, ...]:
        """Return the states whose manifest reads, newest first.

        Raises:
            CheckpointError: It cannot be listed.
        """
        ...

    def read_manifest(self, state: StateId) -> Manifest:
        """Return the manifest of *state*.

        Raises:
            NoStateError: There is none.
            CorruptError: It is not what was written.
            CheckpointError: It cannot be read, or is of a later version.
        """
        ...

    def file_sizes(self, state: StateId) -> Mapping[str, int]:
        """Return the names and sizes of all files next to the manifest of *state*; -1: not a file.

        Raises:
            CheckpointError: It cannot be listed.
        """
        ...

    def local_shard_path(self, state: StateId, shard: Shard) -> Path | None:
        """Return a path that can be mapped; None where the bytes must be fetched.

        Nothing is verified.

        Raises:
            CheckpointError: There is no such shard.
        """
        ...

    def read_chunks(self, state: StateId, shard: Shard) -> Iterator[memoryview]:
        """Yield the bytes of a shard in pieces of `CHUNK_BYTES`, each valid until the next.

        Raises:
            CheckpointError: They cannot be read.
        """
        ...

    def read_bytes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end* of a shard; nothing is verified.

        Raises:
            CheckpointError: They are not there, or cannot be read.
        """
        ...

    def read_piece_hashes(self, state: StateId, shard: Shard, begin: int, end: int) -> bytes:
        """Return the bytes *begin* to *end* of the file of `gpuops.checkpoint.pieces` of a shard.

        As many as there are; none where there is no such file. Nothing is verified.

        Raises:
            CheckpointError: They cannot be read.
        """
        ...

    def fetch_shard(self, record: ShardRecord, state: StateId, into: memoryview) -> None:
        """Fill *into*, of the size of the shard, with its bytes and verify them.

        Raises:
            CorruptError: The bytes are not those that were saved; *into* is worthless.
            CheckpointError: They cannot be read.
        """
        ...

    def read_back(
        self, record: ShardRecord, state: StateId, *, throttle: Throttle = unthrottled
    ) -> None:
        """Read a shard from the store and record that it is intact, unless that is recorded.

        What `mark_damaged` recorded of it is removed then. The hashes of its pieces are added where
        the writer left them out.

        Raises:
            CorruptError: It is not what was saved.
            CheckpointError: It cannot be read, or the result not be recorded.
        """
        ...

    def mark_damaged(self, record: ShardRecord, state: StateId) -> None:
        """Record that a shard is damaged; remove what `read_back` recorded of it.

        Raises:
            CheckpointError: It cannot be recorded.
        """
        ...

    def delete(self, state: StateId) -> None:
        """Remove *state* atomically, its bytes follow; do nothing where there is none.

        Raises:
            CheckpointError: It is pinned, or cannot be removed.
        """
        ...

    def pin(self, state: StateId, tag: str) -> None:
        """Keep *state* until `unpin`.

        Raises:
            CheckpointError: *tag* is no tag, the state is not there, or it cannot be written.
        """
        ...

    def unpin(self, state: StateId, tag: str) -> None:
        """Undo `pin`; without such a pin do nothing.

        Raises:
            CheckpointError: It cannot be written.
        """
        ...

    def sweep(self) -> tuple[str, ...]:
        """Remove what dead writers and interrupted deletions left; return what was removed.

        Raises:
            CheckpointError: It cannot be listed.
        """
        ...


def are_all_damaged(store: CheckpointStore) -> bool:
    """Return whether *store* knows of each of its states that it is damaged."""
    try:
        survey = store.scan()
    except CheckpointError:
        return False
    return all(found.is_damaged for found in survey.states) and all(
        found.is_corrupt for found in survey.damaged
    )
