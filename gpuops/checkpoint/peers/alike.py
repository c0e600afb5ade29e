"""What the holder of a replica has itself: of an image only the rest is sent.

Data-parallel ranks of several nodes hold most of their state alike. Of a rank's image a holder
needs the *remainder*: the header, and what no rank of the holder's must have alike. All else is in
the images that its own ranks have saved of the same state. The holder hashes both together: only
where that has the digest of the whole image, it has a copy.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import xxhash

from gpuops.checkpoint.digest import HASH_BYTES, Digester
from gpuops.checkpoint.header_json import abbreviate
from gpuops.checkpoint.image import ImageLayout, PlacedTensor, read_layout
from gpuops.checkpoint.memory.node_memory import MemoryShard
from gpuops.checkpoint.sharing import held_alike
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.wire import TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import CorruptError, Digest, Shard, StateId

_PLANS_MAX = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` bytes from ``begin`` on: of the image of ``shard``, None for the remainder."""

    shard: Shard | None
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OwnImages:
    """What the ranks of this node saved of a state; it does not change until `release`."""

    shards: Mapping[Shard, MemoryShard]
    release: Callable[[], None]


def remainder_pieces(layout: ImageLayout, ranks: Collection[int]) -> tuple[Piece, ...]:
    """Return what to send of an image to a node with *ranks*; () for all of it."""
    held = _held_by(layout, ranks)
    if not held:
        return ()
    rest = (Piece(layout.shard, t.begin, _size(t)) for t in _placed(layout) if _name(t) not in held)
    return _merged([Piece(layout.shard, 0, len(layout.header)), *rest])


def composed_pieces(layout: ImageLayout, own_layouts: Collection[ImageLayout]) -> tuple[Piece, ...]:
    """Return where the bytes of an image are on a node with *own_layouts* and its remainder.

    Raises:
        CorruptError: They lack a tensor that they should have.
    """
    held = _held_by(layout, {own.shard.rank for own in own_layouts})
    places = {key: piece for own in own_layouts for key, piece in _places(own)}
    found, at = [Piece(None, 0, len(layout.header))], len(layout.header)
    for tensor in _placed(layout):
        key = held.get(_name(tensor))
        if key is None:
            found.append(Piece(None, at, _size(tensor)))
            at += _size(tensor)
            continue
        piece = places.get((key, _name(tensor)))
        if piece is None or piece.nbytes != _size(tensor):
            raise CorruptError(f"no rank here has {abbreviate(_name(tensor))} alike")
        found.append(piece)
    return _merged(found)


def _held_by(layout: ImageLayout, ranks: Collection[int]) -> dict[str, str]:
    """Return by name the key of the group of each tensor of the image that one of *ranks* holds."""
    return {
        name: each.key
        for each in held_alike(layout)
        if not set(ranks).isdisjoint(each.ranks)
        for name, owner in zip(each.names, each.owners, strict=True)
        if owner == layout.shard.rank
    }


def _places(layout: ImageLayout) -> Iterator[tuple[tuple[str, str], Piece]]:
    placed = {_name(tensor): tensor for tensor in layout.tensors}
    for each in held_alike(layout):
        for name in each.names:
            if (tensor := placed.get(name)) is not None:
                yield (each.key, name), Piece(layout.shard, tensor.begin, _size(tensor))


def _placed(layout: ImageLayout) -> list[PlacedTensor]:
    more = [layout.metadata_blob, *([layout.digests] if layout.digests is not None else [])]
    return sorted([*layout.tensors, *more], key=lambda tensor: (tensor.begin, tensor.end))


def _name(tensor: PlacedTensor) -> str:
    return tensor.spec.name


def _size(tensor: PlacedTensor) -> int:
    return tensor.end - tensor.begin


def _merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and (last.shard, last.begin + last.nbytes) == (piece.shard, piece.begin):
            found[-1] = Piece(last.shard, last.begin, last.nbytes + piece.nbytes)
        elif piece.nbytes:
            found.append(piece)
    return tuple(found)


class ComposedImage:
    """The bytes of *pieces*, one after the other, in *views*, which must not change meanwhile."""

    def __init__(self, pieces: tuple[Piece, ...], views: Mapping[Shard | None, memoryview]) -> None:
        self._pieces, self._views = pieces, views
        self._ends = list(accumulate(piece.nbytes for piece in pieces))
        self.nbytes = self._ends[-1]

    def parts(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from *begin* to *end*, in parts; nothing is copied."""
        number = bisect_right(self._ends, begin)
        while begin < end:
            piece = self._pieces[number]
            at = piece.begin + piece.nbytes - (self._ends[number] - begin)
            n_bytes = min(end, self._ends[number]) - begin
            yield self._views[piece.shard][at : at + n_bytes]
            begin += n_bytes
            number += 1

    def read(self, begin: int, nbytes: int) -> memoryview:
        """Return a copy of the *nbytes* bytes from *begin* on."""
        return memoryview(b"".join(self.parts(begin, begin + nbytes)))

    def digest(self, *, chunk_bytes: int) -> Digest:
        digester = Digester(chunk_bytes=chunk_bytes)
        for part in self.parts(0, self.nbytes):
            digester.update(part)
        return digester.finish()

    def check(self, digest: Digest, *, chunk_bytes: int) -> Iterator[None]:
        """Hash all of it, and yield after each chunk.

        Raises:
            CorruptError: It is not the image with *digest*.
        """
        if self.nbytes != digest.nbytes:
            raise CorruptError(f"there are {self.nbytes} bytes of {digest.nbytes}")
        for number, begin in enumerate(range(0, self.nbytes, chunk_bytes)):
            hasher = xxhash.xxh3_64()
            for part in self.parts(begin, min(begin + chunk_bytes, self.nbytes)):
                hasher.update(part)
            if hasher.digest() != digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
                raise CorruptError(f"chunk {number} has other bytes")
            yield

    def copy_to(self, target: memoryview) -> None:
        """Write all of it to the beginning of *target*."""
        at = 0
        for part in self.parts(0, self.nbytes):
            target[at : at + len(part)] = part
            at += len(part)


def compose(
    pieces: tuple[Piece, ...], remainder: memoryview, own: Mapping[Shard, MemoryShard]
) -> ComposedImage:
    """Return the image of which *own* ranks have all but the *remainder*."""
    views: dict[Shard | None, memoryview] = {None: remainder}
    views.update({shard: entry.memory.view for shard, entry in own.items()})
    return ComposedImage(pieces, views)


def roots_of(own: Mapping[Shard, MemoryShard]) -> dict[Shard, str]:
    """Return the root of the digest of each image."""
    return {shard: entry.copy.digest.root for shard, entry in own.items()}


def no_images(state: StateId) -> OwnImages:
    """Refuse a remainder: this node has saved nothing of *state*."""
    raise TransferRefusedError(TransferRefusal.NOT_ALIKE, f"no rank here saves {state}")


@dataclass(frozen=True, slots=True)
class Rest:
    """All but the remainder of an image, in those of own ranks with the digests of these roots."""

    pieces: tuple[Piece, ...]
    roots: Mapping[Shard, str]


@dataclass(frozen=True, slots=True)
class ComposedReplica:
    """A copy that is in a slot, pinned, but for its ``rest``, where there is one."""

    pinned: PinnedCopy
    rest: Rest | None

    def image(self, own: Mapping[Shard, MemoryShard]) -> ComposedImage | None:
        """Return it, None where the rest is no longer among the images of *own* ranks."""
        rest, remainder, roots = self.rest, self.pinned.view, roots_of(own)
        if rest is None or remainder is None or not rest.roots.items() <= roots.items():
            return None
        return compose(rest.pieces, remainder, own)


class PiecePlans:
    """Remembers the pieces of images by the hashes of their layouts. Thread-safe.

    Reading the headers of 20,000 tensors takes a tenth of a second, and each save has the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[object, Any] = {}

    def remainder(self, entry: MemoryShard, ranks: range) -> tuple[Piece, ...]:
        """As `remainder_pieces` of the image in memory; () where its header is invalid."""

        def plan() -> tuple[Piece, ...]:
            with suppress(CorruptError):
                return remainder_pieces(read_layout(entry.memory.view), ranks)
            return ()

        return self._remember((entry.copy.layout, ranks), plan) if ranks else ()

    def known_remainder_bytes(self, entry: MemoryShard, ranks: range) -> int:
        """Return how many bytes are sent of the image; all, until `remainder` was called."""
        found = self._known.get((entry.copy.layout, ranks))
        return sum(piece.nbytes for piece in found or ()) or entry.copy.digest.nbytes

    def check(
        self,
        layout: str,
        remainder: memoryview,
        image: Digest,
        own: OwnImages,
        *,
        chunk_bytes: int,
    ) -> Generator[None, None, Rest]:
        """Hash the image with the *remainder*, and yield after each chunk; return the rest.

        Raises:
            CorruptError: *own* ranks have other bytes, or a header is invalid.
        """

        def plan() -> tuple[Piece, ...]:
            own_layouts = [read_layout(entry.memory.view) for entry in own.shards.values()]
            return composed_pieces(read_layout(remainder, nbytes=image.nbytes), own_layouts)

        own_hashes = tuple((shard, entry.copy.layout) for shard, entry in own.shards.items())
        pieces = self._remember((layout, image.nbytes, own_hashes), plan)
        yield from compose(pieces, remainder, own.shards).check(image, chunk_bytes=chunk_bytes)
        return Rest(pieces, roots_of(own.shards))

    def _remember(self, key: object, plan: Callable[[], T]) -> T:
        with self._lock:
            if key not in self._known:
                while len(self._known) >= _PLANS_MAX:
                    del self._known[next(iter(self._known))]
                self._known[key] = plan()
            found: T = self._known[key]
            return found
