"""Whether a stored state is what was saved, to the bit; and if not, which bytes are not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from gpuops.checkpoint.digest import chunk_is_good
from gpuops.checkpoint.manifest import MANIFEST, ShardRecord
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import CHUNK_BYTES, CheckpointError, StateId

# Called with the bytes verified so far and the bytes of the whole state.
Progress = Callable[[int, int], None]


class ProblemKind(StrEnum):
    """What is wrong with a file of a state."""

    MANIFEST = "manifest"  # not there, not readable, edited, or of a later version
    MISSING = "missing"
    EXTRA = "extra"
    TRUNCATED = "truncated"
    LONGER = "longer"
    FLIPPED = "flipped"  # the right number of bytes, and some are not what was saved
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One file that is not as it was saved. ``offsets``: where its bad chunks begin, in bytes."""

    file: str
    kind: ProblemKind
    detail: str
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {self.detail}"


def silent(_done_bytes: int, _all_bytes: int) -> None:
    """Tell nobody how far it is."""


def verify_state(
    store: CheckpointStore, state: StateId, *, progress: Progress = silent, sizes_only: bool = False
) -> list[Problem]:
    """Return what is wrong with *state* in *store*: nothing where every bit is what was saved.

    *sizes_only*: look at the names and sizes of the files, not into them.

    Raises:
        CheckpointError: The store cannot be listed. What is wrong with the state is returned.
    """
    try:
        manifest = store.read_manifest(state)
    except CheckpointError as exc:
        return [Problem(MANIFEST, ProblemKind.MANIFEST, str(exc))]
    there = store.files(state)
    problems = _extra(there, [record.shard.file_name for record in manifest.shards])
    done_bytes = 0
    for record in manifest.shards:
        name, nbytes = record.shard.file_name, record.digest.nbytes
        problem = _size_problem(name, there.get(name), nbytes)
        if problem is None and not sizes_only:
            told = partial(_told_of_all, progress, done_bytes, manifest.nbytes)
            problem = _look_into(store, state, record, told)
        if problem is not None:
            problems.append(problem)
        done_bytes += nbytes
        progress(done_bytes, manifest.nbytes)
    return problems


def _told_of_all(progress: Progress, before_bytes: int, all_bytes: int, so_far: int) -> None:
    progress(before_bytes + so_far, all_bytes)


def _extra(there: Iterable[str], wanted: Iterable[str]) -> list[Problem]:
    return [
        Problem(_plain(name), ProblemKind.EXTRA, "it is not in the manifest")
        for name in sorted(set(there) - set(wanted))
    ]


def _size_problem(name: str, there_bytes: int | None, nbytes: int) -> Problem | None:
    if there_bytes is None:
        return Problem(name, ProblemKind.MISSING, f"it is not there; {nbytes} bytes were saved")
    if there_bytes < 0:
        return Problem(name, ProblemKind.UNREADABLE, "it is not a regular file")
    if there_bytes == nbytes:
        return None
    kind = ProblemKind.TRUNCATED if there_bytes < nbytes else ProblemKind.LONGER
    return Problem(name, kind, f"it has {there_bytes} bytes, {nbytes} were saved")


def _look_into(
    store: CheckpointStore, state: StateId, record: ShardRecord, progress: Callable[[int], None]
) -> Problem | None:
    name, nbytes = record.shard.file_name, record.digest.nbytes
    bad, at = [], 0
    try:
        for number, chunk in enumerate(store.read_chunks(state, record.shard)):
            if at >= nbytes or not chunk_is_good(chunk, record.digest, number):
                bad.append(at)
            at += len(chunk)
            progress(min(at, nbytes))
    except CheckpointError as exc:
        where = f"it ends at byte {at}: " if at else ""
        return Problem(name, ProblemKind.UNREADABLE, f"{where}{exc}", tuple(bad))
    if problem := _size_problem(name, at, nbytes):  # it changed since its size was asked for
        return problem
    if not bad:
        return None
    n_chunks = -(-nbytes // CHUNK_BYTES)
    shown = ", ".join(f"{begin}-{min(begin + CHUNK_BYTES, nbytes) - 1}" for begin in bad[:4])
    more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
    detail = f"{len(bad)} of {n_chunks} chunks are not what was saved: bytes {shown}{more}"
    return Problem(name, ProblemKind.FLIPPED, detail, tuple(bad))


def _plain(name: str) -> str:
    """Return a file's *name*, which anybody may have chosen, as text that harms no terminal."""
    return "".join(char if char.isprintable() else "?" for char in name)
