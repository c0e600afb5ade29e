"""Images handed over between real sockets: fetched, pushed, resumed, refused."""

import dataclasses
import threading
import time

import pytest
from support.transfers import (
    CHUNK,
    NBYTES,
    SHARD,
    STATE,
    TOKEN,
    Memory,
    Shelf,
    copy_of,
    filled,
    hand_over,
    job_pass,
    limits,
    no_pace,
    peer,
    push_of,
    replica_store,
    serving,
    terms,
    until,
)

from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch, fetch_digest, push
from gpuops.checkpoint.transfer.pacing import RATE_MIN_BYTES_S, SendPace
from gpuops.checkpoint.transfer.parts import fetch_parts
from gpuops.checkpoint.transfer.wire import TransferError, TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Shard,
    ShardHolders,
    StateId,
)
from gpuops.host.clock import SystemClock


@pytest.fixture
def image():
    memory = filled(NBYTES)
    yield memory, copy_of(memory)
    memory.close()


@pytest.fixture
def target():
    memory = Memory(NBYTES)
    yield memory
    memory.close()


@pytest.fixture
def store():
    held = replica_store(10 * NBYTES)
    yield held
    held.close()


def is_same(one, other):
    return bytes(one.view) == bytes(other.view)


@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "file"])
@pytest.mark.parametrize("n_connections", [1, 4, 9])
@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, NBYTES])
def test_a_copy_is_fetched(nbytes, n_connections, is_mapped):
    memory, target = filled(nbytes, seed=nbytes), Memory(nbytes)
    copy = copy_of(memory)
    shelf = Shelf((memory, copy), is_mapped=is_mapped)
    with serving(shelf) as server:
        found = fetch(
            [peer(server.port)], job_pass(), copy, target.view, terms(n_connections=n_connections)
        )

    assert is_same(memory, target)
    assert (found.received_bytes, found.found_bytes, found.n_damaged) == (nbytes, 0, 0)
    assert found.served == (("holder", nbytes),)
    assert shelf.pins == 0
    assert server.counters()["sent_bytes"] == nbytes


def test_a_chunk_larger_than_a_range_is_fetched():
    bounds = limits(chunk_bytes=17 * 2**20)
    memory, target = filled(2 * 17 * 2**20 + 5), Memory(2 * 17 * 2**20 + 5)
    copy = copy_of(memory, chunk_bytes=bounds.chunk_bytes)
    with serving(Shelf((memory, copy)), bounds=bounds) as server:
        fetch([peer(server.port)], job_pass(), copy, target.view, terms(limits=bounds))

    assert is_same(memory, target)


def test_only_what_is_missing_is_fetched_again(image, target):
    memory, copy = image
    target.view[: 30 * CHUNK] = memory.view[: 30 * CHUNK]
    with serving(Shelf((memory, copy))) as server:
        found = fetch([peer(server.port)], job_pass(), copy, target.view, terms(), resume=True)

    assert is_same(memory, target)
    assert found.found_bytes == 30 * CHUNK
    assert server.counters()["sent_bytes"] == NBYTES - 30 * CHUNK


def test_the_digest_is_told_where_only_the_root_is_known(image):
    memory, copy = image
    with serving(Shelf((memory, copy))) as server:
        holder = peer(server.port)
        told = fetch_digest(holder, job_pass(), (STATE, SHARD), copy.digest.root, terms())
        with pytest.raises(TransferError, match="has the root"):
            fetch_digest(holder, job_pass(), (STATE, SHARD), "12" * 32, terms())

    assert told == copy.digest


def test_a_copy_that_is_not_there_is_an_error_with_the_peer(image, target):
    memory, copy = image
    other = dataclasses.replace(copy, state=StateId(3, 121))
    with serving(Shelf((memory, copy))) as server, pytest.raises(TransferError) as caught:
        fetch([peer(server.port)], job_pass(), other, target.view, terms())

    assert "shard-00001-of-00004.safetensors of step 121 (epoch 3)" in str(caught.value)
    assert f"holder (127.0.0.1:{server.port}): it has no copy" in str(caught.value)


def test_the_next_holder_is_asked(image, target):
    memory, copy = image
    with serving(Shelf()) as empty, serving(Shelf((memory, copy))) as full:
        peers = [peer(empty.port, "one"), peer(full.port, "two")]
        found = fetch(peers, job_pass(), copy, target.view, terms())

    assert is_same(memory, target)
    assert found.served == (("one", 0), ("two", NBYTES))
    assert "one" in found.failed[0]


def test_a_damaged_copy_is_named_by_chunk_and_the_next_holder_has_the_rest(image, target):
    memory, copy = image
    bad = Memory(NBYTES)
    bad.view[:] = memory.view
    bad.view[7 * CHUNK + 3] ^= 1
    shelf = Shelf((bad, copy))
    with serving(shelf) as damaged, serving(Shelf((memory, copy))) as whole:
        with pytest.raises(CorruptError, match=r"bad \(.*chunk 7 of its copy is damaged"):
            fetch([peer(damaged.port, "bad")], job_pass(), copy, target.view, terms())
        found = fetch(
            [peer(damaged.port, "bad"), peer(whole.port, "good")],
            job_pass(),
            copy,
            target.view,
            terms(n_connections=1),
        )

    assert is_same(memory, target)
    assert set(shelf.damaged) == {7}
    assert found.n_damaged >= 1
    assert dict(found.served)["good"] < NBYTES
    assert shelf.pins == 0


PARTS = limits(chunk_bytes=4 * PIECE_BYTES)
PARTS_NBYTES = 9 * PIECE_BYTES + 123  # two chunks and the beginning of a third


@pytest.fixture
def large():
    """An image of several chunks of several pieces."""
    memory = filled(PARTS_NBYTES)
    yield memory, copy_of(memory, chunk_bytes=PARTS.chunk_bytes)
    memory.close()


def pieces(begin, end):
    return begin * PIECE_BYTES, min(end * PIECE_BYTES, PARTS_NBYTES)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_parts_of_a_copy_are_fetched_and_nothing_else(large, is_mapped):
    memory, copy = large
    ranges = [pieces(0, 1), pieces(2, 4), pieces(4, 8), pieces(9, 10)]
    found = {}
    with serving(Shelf((memory, copy), is_mapped=is_mapped), bounds=PARTS) as server:
        fetch_parts(
            peer(server.port),
            job_pass(),
            copy,
            ranges,
            lambda at, data: found.update({at: bytes(data)}),
            terms(limits=PARTS),
        )

    assert found == {begin: bytes(memory.view[begin:end]) for begin, end in ranges}
    assert server.counters()["sent_bytes"] == sum(end - begin for begin, end in ranges)


def test_of_a_damaged_copy_the_parts_of_its_other_chunks_are_fetched(large):
    memory, copy = large
    memory.view[5 * PIECE_BYTES] ^= 1  # in another piece of the second chunk than is requested
    found, shelf = [], Shelf((memory, copy))
    ranges = [pieces(0, 1), pieces(6, 7), pieces(8, 10)]
    with (
        serving(shelf, bounds=PARTS) as server,
        pytest.raises(CorruptError, match="chunk 1 of its copy is damaged"),
    ):
        fetch_parts(
            peer(server.port),
            job_pass(),
            copy,
            ranges,
            lambda at, _data: found.append(at),
            terms(limits=PARTS),
        )

    assert found == [0, 8 * PIECE_BYTES]
    assert shelf.damaged == [1]
    assert shelf.pins == 0


@pytest.mark.parametrize(
    ("begin", "end"),
    [(1, PIECE_BYTES), (0, 1), pieces(3, 5), pieces(2, 2), (0, 2**63), pieces(12, 13)],
)
def test_what_are_no_pieces_of_one_chunk_is_not_served(large, begin, end):
    memory, copy = large
    with serving(Shelf((memory, copy)), bounds=PARTS) as server, pytest.raises(TransferError):
        fetch_parts(
            peer(server.port),
            job_pass(),
            copy,
            [(begin, end)],
            lambda _at, _data: None,
            terms(limits=PARTS, patience_s=0.1),
        )


def test_parts_come_from_the_next_holder_then_from_the_store_and_else_not_at_all():
    memory, bad = filled(PARTS_NBYTES), filled(PARTS_NBYTES)
    bad.view[3] ^= 1
    copy, bounds = copy_of(memory, chunk_bytes=CHUNK_BYTES), limits(chunk_bytes=CHUNK_BYTES)
    stored, events = [], []

    class Store:
        def read(self, ranges, put):
            for begin, end in ranges:
                stored.append((begin, end))
                put(begin, memory.view[begin:end])

    def found(kind, fields):
        events.append((kind, fields["holder"], fields.get("bytes")))

    with (
        serving(Shelf((bad, copy)), bounds=bounds) as damaged,
        serving(Shelf((memory, copy)), bounds=bounds) as whole,
    ):
        holders = (peer(damaged.port, "bad"), peer(whole.port, "good"))
        peers = PeerShards(
            STATE,
            {SHARD: ShardHolders(holders, copy.digest.root)},
            job_pass(),
            lambda _nbytes: None,
            found,
            no_progress_s=0.2,
        )
        images = [
            peers.open_parts(SHARD, lambda _digest, last=last: last, lambda _nbytes: None)
            for last in ([Store()], [])
        ]
        for image in images:
            image.ensure([(10, 20)])
            assert image.view[10:20] == memory.view[10:20]
    assert not stored  # it has what is needed, and a peer is nearer

    images[0].ensure([(2 * PIECE_BYTES, 3 * PIECE_BYTES)])
    assert stored == [pieces(2, 3)]
    assert images[0].view[2 * PIECE_BYTES : 3 * PIECE_BYTES] == memory.view[slice(*pieces(2, 3))]
    with pytest.raises(CheckpointError, match=r"bad .*; .*good "):
        images[1].ensure([(2 * PIECE_BYTES, 3 * PIECE_BYTES)])
    peers.close()

    assert ("fetch_failed", "bad", None) in events
    assert events.count(("fetched", "good", PIECE_BYTES)) == 2
    for each in (*images, memory, bad):
        each.close()


@pytest.mark.parametrize("n_connections", [1, 4])
def test_a_replica_is_pushed_and_verified(image, store, n_connections):
    memory, copy = image
    with serving(store, store) as server:
        done = hand_over(memory, copy, peer(server.port), terms(n_connections=n_connections))
        again = hand_over(memory, copy, peer(server.port))
        target = Memory(NBYTES)
        fetch([peer(server.port)], job_pass(), copy, target.view, terms())

    (held,) = store.copies()
    assert held == dataclasses.replace(copy, holder="holder")
    assert is_same(memory, target)
    assert (done.sent_bytes, again.sent_bytes) == (NBYTES, 0)


def test_two_who_push_the_same_share_the_work(image, store):
    memory, copy = image
    sent = []
    with serving(store, store, bounds=limits()) as server:

        def give():
            pushed = hand_over(memory, copy, peer(server.port))
            sent.append(pushed.sent_bytes)

        threads = [threading.Thread(target=give) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert len(sent) == 3
    assert server.counters()["received_bytes"] == NBYTES
    assert len(store.copies()) == 1


def test_a_damaged_own_copy_is_not_pushed(image, store):
    memory, copy = image
    memory.view[5] ^= 4
    seen = []
    with serving(store, store) as server, pytest.raises(CorruptError, match="chunk 0 of its copy"):
        push(
            peer(server.port),
            job_pass(),
            push_of(copy),
            PinnedCopy(memory.fd, copy.digest, on_damage=seen.append),
            terms(),
            no_pace(),
        )

    assert set(seen) == {0}
    assert store.copies() == []


def test_a_holder_that_refuses_says_why(image, store):
    memory, copy = image
    other = dataclasses.replace(copy, shard=Shard(2, 4))
    with (
        serving(store, store) as server,
        pytest.raises(TransferRefusedError, match="not a holder") as caught,
    ):
        hand_over(memory, other, peer(server.port))

    assert caught.value.code is TransferRefusal.NOT_WANTED


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (job_pass(token="another"), "it has another token"),
        (job_pass(token=""), "it has another token"),
        (job_pass(job="job-18"), "it is of another job"),
    ],
)
def test_a_stranger_gets_nothing(image, target, job, why):
    memory, copy = image
    shelf = Shelf((memory, copy))
    with serving(shelf) as server, pytest.raises(TransferError, match=why):
        fetch([peer(server.port)], job, copy, target.view, terms())

    assert server.counters()["unauthenticated_cut"] >= 3
    assert server.counters()["sent_bytes"] == 0


def test_a_server_that_does_not_know_the_token_gets_nothing_to_serve(image, target):
    memory, copy = image
    with (
        serving(Shelf((memory, copy)), job=job_pass(token="wrong")) as server,
        pytest.raises(TransferError, match="token"),
    ):
        fetch([peer(server.port)], job_pass(token=TOKEN), copy, target.view, terms())


def test_an_old_epoch_is_refused(image, target):
    memory, copy = image
    with (
        serving(Shelf((memory, copy)), job=job_pass(epoch=4)) as server,
        pytest.raises(TransferRefusedError, match="epoch 4 has begun") as caught,
    ):
        fetch([peer(server.port)], job_pass(epoch=3), copy, target.view, terms())

    assert caught.value.code is TransferRefusal.OLD_EPOCH


def test_a_peer_that_has_not_heard_of_the_new_epoch_is_waited_for(image, target):
    memory, copy = image
    server_job = job_pass(epoch=3)
    with serving(Shelf((memory, copy)), job=server_job) as server:
        timer = threading.Timer(0.3, server_job.advance, [4])
        timer.start()
        fetch([peer(server.port)], job_pass(epoch=4), copy, target.view, terms())
        timer.join()
        assert is_same(memory, target)


def test_an_epoch_that_begins_ends_the_transfers_of_the_last(target):
    memory, server_job = filled(NBYTES), job_pass(epoch=3)
    copy = copy_of(memory)

    class Advancing(Shelf):
        def open(self, state, shard):
            server_job.advance(4)
            return super().open(state, shard)

    with (
        serving(Advancing((memory, copy)), job=server_job) as server,
        pytest.raises(TransferRefusedError, match="epoch 4 has begun"),
    ):
        fetch([peer(server.port)], job_pass(epoch=3), copy, target.view, terms())


def test_a_transfer_can_be_stopped(image, target):
    memory, copy = image
    stop = threading.Event()

    class Stopping(Shelf):
        def open(self, state, shard):
            stop.set()
            return super().open(state, shard)

    shelf = Stopping((memory, copy))
    pace = SendPace(RATE_MIN_BYTES_S, SystemClock())
    pace.take(3 * RATE_MIN_BYTES_S)  # so that the next byte goes out three seconds from now
    with serving(shelf, pace=pace) as server, pytest.raises(TransferError, match="was stopped"):
        fetch([peer(server.port)], job_pass(), copy, target.view, terms(stop=stop))

    assert shelf.pins == 0


def test_a_deadline_ends_a_transfer(image, target):
    memory, copy = image
    pace = SendPace(RATE_MIN_BYTES_S, SystemClock())
    pace.take(30 * RATE_MIN_BYTES_S)
    began_s = time.monotonic()
    with (
        serving(Shelf((memory, copy)), pace=pace) as server,
        pytest.raises(TransferError, match=r"not finished after 0\.5 s, its deadline"),
    ):
        fetch([peer(server.port)], job_pass(), copy, target.view, terms(deadline_s=0.5))

    assert time.monotonic() - began_s < 25  # of thirty that it would take


def test_the_pace_is_kept(store):
    rate = 8 * 2**20
    memory = filled(rate // 2)
    copy = copy_of(memory)
    pace = SendPace(rate, SystemClock())
    target = Memory(memory.nbytes)
    with serving(Shelf((memory, copy)), pace=pace) as server:
        began_s = time.monotonic()
        fetch([peer(server.port)], job_pass(), copy, target.view, terms())
        took_s = time.monotonic() - began_s

    # Half a second's worth, less what may go at once.
    assert took_s > 0.35
    assert is_same(memory, target)


def test_a_server_that_closes_ends_its_threads(image, target):
    memory, copy = image
    before = threading.active_count()
    with serving(Shelf((memory, copy))) as server:
        fetch([peer(server.port)], job_pass(), copy, target.view, terms())
    until(lambda: threading.active_count() <= before)
