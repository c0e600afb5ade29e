"""What a holder has itself of an image: the rest and its own ranks' images are that image again."""

from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import TensorSpec, image_order, plan_image
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.peers.alike import (
    ComposedImage,
    ComposedReplica,
    OwnImages,
    PiecePlans,
    Rest,
    composed_pieces,
    remainder_pieces,
    roots_of,
)
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.sharing import plan_sharing
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.wire import PushOffer, TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Shard, StateId

NAMES = ("bias", "embedding", "norm", "weight")
FLOATS = dict(zip(NAMES, (3, 5000, 1, 2000), strict=True))
NODES = {
    "ddp": (range(2), range(2, 4)),
    "alone": (range(1), range(1, 2)),
    "uneven": (range(1), range(1, 4)),
    "hsdp": (range(2), range(2, 4)),
    "sharded": (range(2), range(2, 4)),
}


def specs_of(kind, rank):
    begin = 7 * (rank % 2) if kind == "hsdp" else 7 * rank if kind == "sharded" else 0
    return [TensorSpec(x, "F32", (n,), 4 * n, (begin,), (9999,)) for x, n in FLOATS.items()] + [
        TensorSpec("model.mean", "F32", (9,), 36, (0,), (9,)),  # between what is shared
        TensorSpec("counter", "I64", (1,), 8, (0,), (1,)),
    ]


@cache
def image_of(kind, rank, step=1, wrong=()):
    """Return the layout and the bytes of the image of *rank*."""
    world = NODES[kind][1][-1] + 1
    here = next(node for node in NODES[kind] if rank in node)
    alike = {"sharded": (rank,), "hsdp": range(rank % 2, world, 2)}.get(kind, range(world))
    replicas = dict.fromkeys(NAMES, tuple(alike)) if len(alike) > 1 else {}
    specs = specs_of(kind, rank)
    shared = plan_sharing(Shard(rank, world), image_order(specs), replicas, here)
    layout = plan_image(Shard(rank, world), specs, 100, replicas, shared)
    image = SharedBuffer.create("image", layout.nbytes)
    image.view[:] = bytes(rank % 251 for _ in range(layout.nbytes))
    image.view[: len(layout.header)] = layout.header
    for placed in layout.tensors:
        if placed.spec.name in NAMES:
            value = step + 7 * NAMES.index(placed.spec.name) + placed.spec.offsets[0]
            value += placed.spec.name in wrong
            image.view[placed.begin : placed.end] = bytes([value % 251]) * placed.spec.nbytes
    return layout, image


def own_of(kind, ranks, **more):
    """Return what a node with *ranks* has saved."""
    shards = {}
    for layout, image in (image_of(kind, rank, **more) for rank in ranks):
        copy = SimpleNamespace(layout=layout.header_hash, digest=compute_digest(image.view))
        shards[layout.shard] = SimpleNamespace(copy=copy, memory=image)
    return OwnImages(shards, release=lambda: None)


def bytes_of(image):
    return bytes(image.read(0, image.nbytes))


@pytest.mark.parametrize("kind", ["ddp", "alone", "uneven", "hsdp"])
@pytest.mark.parametrize("is_back", [False, True])
def test_the_rest_of_an_image_is_among_what_the_holders_ranks_saved(kind, is_back):
    mine, its = reversed(NODES[kind]) if is_back else NODES[kind]
    own = own_of(kind, its)
    for rank in mine:
        layout, image = image_of(kind, rank)
        sent = ComposedImage(remainder_pieces(layout, its), {layout.shard: image.view})
        plans, digest = PiecePlans(), compute_digest(image.view, chunk_bytes=4096)
        own_bytes = 36 + 8 + 108 + 16 * len(NAMES)
        assert len(layout.header) < sent.nbytes <= len(layout.header) + own_bytes
        remainder = sent.read(0, sent.nbytes)
        checks = plans.check(layout.header_hash, remainder, digest, own, chunk_bytes=4096)
        n_checked = 0
        while True:
            try:
                next(checks)
                n_checked += 1
            except StopIteration as end:
                rest = end.value
                break
        assert n_checked == len(digest.table) // 8
        pinned = PinnedCopy(-1, digest, view=remainder)
        assert bytes_of(ComposedReplica(pinned, rest).image(own.shards)) == bytes(image.view)
        # What its ranks have saved of another state does not do.
        other = own_of(kind, its, step=2)
        assert ComposedReplica(pinned, rest).image(other.shards) is None
        with pytest.raises(CorruptError, match=r"chunk \d+ has other bytes"):
            list(plans.check(layout.header_hash, remainder, digest, other, chunk_bytes=4096))


def test_nothing_is_left_out_where_the_holder_has_nothing_alike():
    layout, _ = image_of("sharded", 0)
    assert remainder_pieces(layout, range(2, 4)) == ()
    layout, _ = image_of("ddp", 0)
    assert remainder_pieces(layout, range(4, 6)) == remainder_pieces(layout, ()) == ()


def test_a_tensor_that_the_holder_should_have_and_has_not_is_an_error():
    layout, _ = image_of("ddp", 0)
    lacking, _ = image_of("ddp", 3)  # not its neighbour, which owns the rest
    with pytest.raises(CorruptError, match="no rank here has"):
        composed_pieces(layout, [lacking])


def test_a_single_tensor_that_differs_is_found():
    its = NODES["ddp"][1]
    for rank in NODES["ddp"][0]:
        layout, image = image_of("ddp", rank)
        sent = ComposedImage(remainder_pieces(layout, its), {layout.shard: image.view})
        remainder, digest = sent.read(0, sent.nbytes), compute_digest(image.view)
        wrong = next(t.spec.name for t in layout.tensors if t.spec.name in NAMES)
        own = own_of("ddp", its, wrong=(wrong,))
        with pytest.raises(CorruptError):
            list(PiecePlans().check("layout", remainder, digest, own, chunk_bytes=2**24))


class Holder:
    """A store that gets the image of rank 0; ``saved`` is what its own ranks saved."""

    def __init__(self):
        self.its, self.state = NODES["ddp"][1], StateId(1, 1)
        self.saved = own_of("ddp", self.its)
        (self.layout, self.image), self.shard = image_of("ddp", 0), Shard(0, 4)
        self.store = ReplicaStore(
            "n1", SharedBuffer.create, bytes_max=2**30, pin_own=lambda _state: self.saved
        )
        self.store.keep_only([self.shard])
        pieces = remainder_pieces(self.layout, self.its)
        self.sent = ComposedImage(pieces, {self.shard: self.image.view})
        self.digest = self.sent.digest(chunk_bytes=CHUNK_BYTES)
        self.whole = compute_digest(self.image.view)

    def accept(self, *, is_whole=False):
        head = (self.state, self.shard, self.layout.header_hash)
        whole = (self.whole.nbytes, self.whole.root)
        if is_whole:
            return self.store.accept(PushOffer(*head, *whole), self.whole)
        offer = PushOffer(*head, self.digest.nbytes, self.digest.root, None, *whole)
        return self.store.accept(offer, self.digest, self.whole)

    def receive(self, *, is_whole=False):
        inbox = self.accept(is_whole=is_whole)
        inbox.tracker.view[:] = self.image.view if is_whole else bytes_of(self.sent)
        inbox.tracker.find_present()
        try:
            list(inbox.check())
            inbox.complete()
        finally:
            inbox.detach()

    def copies(self, own):
        return [copy.digest for copy in self.store.copies(lambda _state: roots_of(own.shards))]


def test_a_copy_ends_with_what_it_relies_on():
    holder, other = Holder(), own_of("ddp", NODES["ddp"][1], step=2)

    holder.receive()

    assert holder.accept() is None
    assert holder.store.open(holder.state, holder.shard) is None
    assert holder.store.held_bytes == holder.digest.nbytes
    assert holder.copies(holder.saved) == [holder.whole]
    assert holder.copies(other) == holder.store.copies() == []
    holder.saved = other
    with pytest.raises(TransferRefusedError, match="n1 has no rest of shard-00000") as refused:
        holder.receive()
    assert refused.value.code is TransferRefusal.NOT_ALIKE


def test_a_whole_image_takes_the_place_of_one_of_which_a_part_is_gone():
    holder = Holder()
    holder.receive()

    holder.receive(is_whole=True)

    assert [copy.digest for copy in holder.store.copies()] == [holder.whole]
    found = holder.store.open(holder.state, holder.shard)
    assert bytes(found.view) == bytes(holder.image.view)


@given(st.data())
def test_any_range_of_a_composed_image_is_what_its_pieces_are(data):
    own = own_of("ddp", NODES["ddp"][1])
    layout, image = image_of("ddp", 0)
    pieces = remainder_pieces(layout, NODES["ddp"][1])
    sent = ComposedImage(pieces, {layout.shard: image.view})
    remainder = sent.read(0, sent.nbytes)
    own_layouts = [image_of("ddp", rank)[0] for rank in NODES["ddp"][1]]
    rest = Rest(composed_pieces(layout, own_layouts), roots_of(own.shards))
    replica = ComposedReplica(PinnedCopy(-1, compute_digest(image.view), view=remainder), rest)
    whole = replica.image(own.shards)
    begin = data.draw(st.integers(0, layout.nbytes))
    nbytes = data.draw(st.integers(0, layout.nbytes - begin))
    assert bytes(whole.read(begin, nbytes)) == bytes(image.view[begin : begin + nbytes])
    assert sent.digest(chunk_bytes=1000) == compute_digest(remainder, chunk_bytes=1000)
