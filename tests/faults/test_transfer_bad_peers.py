"""Peers that misbehave: each is a clear error within its deadline, and disturbs no other."""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest
from support import bad_peers
from support.lateness import again_if_late
from support.listening import Between, readable
from support.ports import free_port
from support.transfers import (
    CHUNK,
    NBYTES,
    SHARD,
    STATE,
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
from support.xxh3_forgery import forged

from gpuops.checkpoint.digest import chunk_hash
from gpuops.checkpoint.transfer import connection, wire
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch
from gpuops.checkpoint.transfer.connection import TooManyConnectionsError, TransferConnection
from gpuops.checkpoint.transfer.parallel import UNAUTHENTICATED_MAX
from gpuops.checkpoint.transfer.wire import (
    OpenCopy,
    TransferError,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CorruptError
from gpuops.host.net.frames import LENGTH, framed
from gpuops.host.net.job_proof import JobHandshake, ProofWelcome

BIG = 64 * 2**20
# Short, and long enough for a good peer on a busy machine.
QUICK = {"stall_s": 1.0, "handshake_s": 1.5, "idle_s": 1.5}

IMAGE = filled(NBYTES)
COPY = copy_of(IMAGE)

SERVERS = {
    "accepts and says nothing": (bad_peers.hold, "too little"),
    "one byte a second": (bad_peers.trickle, ""),
    "another protocol": (bad_peers.babble, "not a keeper"),
    "resets": (bad_peers.reset, "reset"),
    "does not know the token": (bad_peers.impostor, "does not know the job's token"),
    "a chunk by single bytes": (bad_peers.serves_one_byte_at_a_time(COPY), "too little"),
    "stops in a chunk": (bad_peers.stops_after_a_request(COPY), "too little"),
    "other chunks": (bad_peers.serves_other_chunks(COPY), "not the requested chunks"),
    "a longer image": (bad_peers.lies_about_the_size(COPY), "not the requested copy"),
    "a frame of 4 GB": (bad_peers.huge_frame, "a frame of 4294967295 bytes"),
    "a wrong tag": (bad_peers.wrong_tag, "did not send"),
    "done without a copy": (bad_peers.says_done, "not the requested copy"),
}


@pytest.fixture
def target():
    memory = Memory(NBYTES)
    yield memory
    memory.close()


def patient(**more):
    return terms(deadline_s=20, patience_s=1.2, limits=limits(**QUICK), **more)


@pytest.mark.parametrize(("behave", "why"), SERVERS.values(), ids=SERVERS)
@again_if_late(by_s=0.3)
def test_a_bad_server_is_given_up_and_the_next_holder_asked(behave, why, target):
    with bad_peers.BadServer(behave) as bad, serving(Shelf((IMAGE, COPY))) as good:
        began_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            fetch([peer(bad.port, "bad")], job_pass(), COPY, target.view, patient())
        took_s = time.monotonic() - began_s
        found = fetch(
            [peer(bad.port, "bad"), peer(good.port, "good")],
            job_pass(),
            COPY,
            target.view,
            terms(deadline_s=60, patience_s=2.0, limits=limits(**QUICK)),
        )

    assert f"bad (127.0.0.1:{bad.port})" in str(caught.value)
    assert why in str(caught.value)
    assert took_s < 15  # not the 20 that it may take
    assert bytes(target.view) == bytes(IMAGE.view)
    assert dict(found.served)["good"] == NBYTES


@again_if_late(by_s=0.3)
def test_a_server_that_sends_rubbish_is_a_corrupt_copy(target):
    with (
        bad_peers.BadServer(bad_peers.serves_rubbish(COPY)) as bad,
        pytest.raises(CorruptError, match=r"chunk \d+ of 41 arrived corrupt 6 times"),
    ):
        fetch([peer(bad.port, "bad")], job_pass(), COPY, target.view, patient())


class Forging(Between):
    """Puts *evil* in the place of *good* in what the server sends."""

    def __init__(self, port, good, evil):
        self._good, self._evil = good, evil
        self.n_forged = 0
        super().__init__(port)

    def pass_on(self, client, server):
        held = b""
        while not self.ends.is_set():
            for side in readable(client, server, within_s=0.1):
                data = side.recv(1 << 14)
                if not data:
                    return
                if side is client:
                    server.sendall(data)
                    continue
                held += data
                self.n_forged += held.count(self._good)
                held = held.replace(self._good, self._evil)
                # What may be the beginning of it waits for the rest.
                n_ready = next(n for n in range(len(held) + 1) if self._good.startswith(held[n:]))
                client.sendall(held[:n_ready])
                held = held[n_ready:]


def test_other_bytes_with_the_same_hash_are_not_taken(target, monkeypatch):
    """The exploit: a host between two nodes changes a model that one fetches from the other."""
    monkeypatch.setattr(connection, "is_on_network", lambda _sock: True)
    good = bytes(IMAGE.view[:CHUNK])
    evil = forged(good)
    assert evil != good
    assert chunk_hash(evil) == chunk_hash(good)
    with (
        serving(Shelf((IMAGE, COPY))) as server,
        Forging(server.port, good, evil) as between,
        pytest.raises(TransferError, match="a chunk that the other side did not send"),
    ):
        fetch([peer(between.port)], job_pass(), COPY, target.view, terms(patience_s=0.5))
    assert between.n_forged > 1


@again_if_late(by_s=0.3)
def test_nobody_there(target):
    with pytest.raises(TransferError, match="nobody listens there"):
        fetch([peer(free_port())], job_pass(), COPY, target.view, patient())


@again_if_late(by_s=0.3)
def test_a_name_in_place_of_an_address(target):
    with pytest.raises(TransferError, match="'nowhere' is not an address of"):
        fetch([type(peer(1))("b", "nowhere", 1)], job_pass(), COPY, target.view, patient())


HOLDERS = {name: SERVERS[name] for name in list(SERVERS)[:5]} | {
    "a frame of 4 GB": SERVERS["a frame of 4 GB"],
    "a wrong tag": SERVERS["a wrong tag"],
}


@pytest.mark.parametrize(("behave", "why"), HOLDERS.values(), ids=HOLDERS)
@again_if_late(by_s=0.3)
def test_a_bad_holder_is_given_up(behave, why):
    with bad_peers.BadServer(behave) as bad:
        began_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            hand_over(IMAGE, COPY, peer(bad.port, "bad"), patient())

    assert "shard-00001-of-00004.safetensors of step 120 (epoch 3)" in str(caught.value)
    assert why in str(caught.value)
    assert time.monotonic() - began_s < 15  # not the 20 that it may take


@pytest.fixture
def big():
    memory = Memory(BIG)
    yield memory, copy_of(memory, chunk_bytes=2**20)
    memory.close()


BOUNDS = limits(**QUICK, chunk_bytes=2**20)


@contextlib.contextmanager
def others_go_on(server, copy):
    """Fetch again and again on the side; every one must succeed."""
    stop, done, errors = threading.Event(), [], []
    target = Memory(copy.digest.nbytes)

    def go():
        try:
            while not stop.is_set():
                fetch(
                    [peer(server.port)],
                    job_pass(),
                    copy,
                    target.view,
                    terms(limits=server._limits),
                )
                done.append(1)
        except (TransferError, CorruptError) as exc:
            errors.append(exc)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
        n_before = len(done)
        until(lambda: len(done) > n_before or errors, 20)
    finally:
        stop.set()
        thread.join(20)
        target.close()
    assert errors == []


@again_if_late(by_s=0.3)
def test_a_client_that_never_reads_costs_its_connection_only(big):
    shelf = Shelf(big)
    with serving(shelf, bounds=BOUNDS) as server, others_go_on(server, big[1]):
        lines = [bad_peers.called(server.port) for _ in range(5)]
        for line in lines:
            line.send(TransferFrameKind.OPEN, OpenCopy(STATE, SHARD, 2**20).to_bytes())
            for first in range(0, 48, 16):
                line.send(TransferFrameKind.GET, wire.GetChunks(first, 16).to_bytes())
        until(lambda: shelf.pins >= 5)
        # Given up: each pin goes although the client still holds its connection open.
        until(lambda: len(server._connections) <= 4, 15)
        for line in lines:
            line.close()
    assert shelf.pins == 0


@again_if_late(by_s=0.3)
def test_a_client_that_opens_and_asks_for_nothing_is_cut(big):
    shelf = Shelf(big)
    with serving(shelf, bounds=BOUNDS) as server:
        line = bad_peers.called(server.port)
        line.send(TransferFrameKind.OPEN, OpenCopy(STATE, SHARD, 2**20).to_bytes())
        assert line.receive(5)[0] is TransferFrameKind.COPY
        assert shelf.pins == 1
        until(lambda: shelf.pins == 0)
        line.close()


@again_if_late(by_s=0.3)
def test_a_client_that_resets_costs_its_connection_only(big):
    shelf = Shelf(big)
    with serving(shelf, bounds=BOUNDS) as server, others_go_on(server, big[1]):
        for _ in range(20):
            line = bad_peers.called(server.port)
            line.send(TransferFrameKind.OPEN, OpenCopy(STATE, SHARD, 2**20).to_bytes())
            line.send(TransferFrameKind.GET, wire.GetChunks(0, 16).to_bytes())
            assert line.receive(5)[0] is TransferFrameKind.COPY
            line._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.close()
    assert shelf.pins == 0


STRANGERS = {
    "nothing": b"",
    "half a length": b"\0\0",
    "a length of 4 GB": b"\xff\xff\xff\xff",
    "a length of nothing": b"\0\0\0\0",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a hello that is cut off": b"\0\0\0\x38gpuopst2",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
@again_if_late(by_s=0.3)
def test_a_stranger_is_cut_off_soon(said):
    with serving(Shelf((IMAGE, COPY)), bounds=limits(**QUICK)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
            sock.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 12):
                    pass
        until(lambda: server.counters()["unauthenticated_cut"] == 1)


def drip(sock, data):
    """Send a byte now and then."""
    for byte in data:
        sock.sendall(bytes([byte]))
        threading.Event().wait(0.1)


@again_if_late(by_s=0.3)
def test_a_stranger_that_sends_a_byte_now_and_then_is_cut_off_soon():
    with serving(Shelf((IMAGE, COPY)), bounds=limits(**QUICK)) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as sock,
            pytest.raises((ConnectionResetError, BrokenPipeError)),
        ):
            drip(sock, b"\0\0\0\x38gpuopst2" + bytes(600))
        until(lambda: server.counters()["unauthenticated_cut"] == 1)


# Nobody is cut off for being slow: only for another's place.
ENDLESS = {"handshake_s": 600.0, "idle_s": 600.0}
TOO_FEW = [b"", b"\0\0", b"\0\0\0\x38gpuopst2"]


@contextlib.contextmanager
def strangers(server, number, says=b"", address="127.0.0.1"):
    """Hold *number* connections open, from *address*, that have said *says*."""
    with contextlib.ExitStack() as stack:
        place = (address, 0)
        to = ("127.0.0.1", server.port)
        held = [
            stack.enter_context(socket.create_connection(to, 10, source_address=place))
            for _ in range(number)
        ]
        for sock in held:
            with contextlib.suppress(ConnectionError):
                sock.sendall(says)
        yield held


@pytest.mark.parametrize("says", TOO_FEW, ids=["silent", "half a length", "half a hello"])
def test_strangers_in_number_keep_no_peer_out(says):
    store = replica_store()
    bounds = limits(unauthenticated_per_address_max=4, unknown_max=8, **ENDLESS)
    with serving(store, store, bounds=bounds) as server, strangers(server, 30, says):
        until(lambda: server.counters()["unauthenticated_cut"] >= 26)
        hand_over(IMAGE, COPY, peer(server.port), terms(patience_s=10))
    assert len(store.copies()) == 1
    store.close()


def test_strangers_of_many_addresses_keep_no_peer_out(target):
    bounds = limits(unauthenticated_per_address_max=4, unknown_max=8, **ENDLESS)
    with serving(Shelf((IMAGE, COPY)), bounds=bounds) as server, contextlib.ExitStack() as stack:
        for number in range(2, 12):
            stack.enter_context(strangers(server, 4, address=f"127.0.0.{number}"))
        fetch([peer(server.port)], job_pass(), COPY, target.view, terms(patience_s=10))
    assert bytes(target.view) == bytes(IMAGE.view)


def test_a_node_of_the_job_that_is_slow_keeps_its_place_among_strangers():
    bounds = limits(unauthenticated_per_address_max=4, unknown_max=8, **ENDLESS)
    bounds = replace(bounds, unknown_handshake_s=0.05)
    with serving(Shelf((IMAGE, COPY)), bounds=bounds) as server:
        server.set_peers(["127.0.0.1"])
        with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
            until(lambda: server.counters()["connections"] == 1)
            with strangers(server, 20, address="127.0.0.2"):
                until(lambda: server.counters()["unauthenticated_cut"] == 20)
            # Only now does it speak.
            TransferConnection(sock, job_pass(), bounds).client_handshake()


def test_a_peer_that_has_named_the_job_gives_way_after_those_that_have_not():
    """The exploit: on a node of the job, connect while its keeper is in the handshake."""
    bounds = limits(unauthenticated_per_address_max=2, **ENDLESS)
    with (
        serving(Shelf((IMAGE, COPY)), bounds=bounds) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as sock,
        contextlib.ExitStack() as stack,
    ):
        until(lambda: server.counters()["connections"] == 1)
        stack.enter_context(strangers(server, 1))
        until(lambda: server.counters()["connections"] == 2)
        hello = wire.TransferHello(job_pass().job, bytes(32)).to_bytes()
        sock.sendall(framed(hello))
        challenge = sock.recv(1 << 12)[LENGTH.size :]
        stack.enter_context(strangers(server, 1))
        until(lambda: server.counters()["unauthenticated_cut"] == 1)
        sock.sendall(framed(JobHandshake(job_pass().key, hello + challenge).proof("client")))
        assert sock.recv(1 << 12)[LENGTH.size] == ProofWelcome.ACCEPTED


def test_connections_with_proof_outlast_any_number_of_strangers():
    bounds = limits(connections_max=4, unauthenticated_per_address_max=4, **ENDLESS)
    with serving(Shelf((IMAGE, COPY)), bounds=bounds) as server:
        lines = [bad_peers.called(server.port) for _ in range(3)]
        with strangers(server, 40):
            until(lambda: server.counters()["unauthenticated_cut"] >= 39)
            lines.append(bad_peers.called(server.port))
            for line in lines:
                line.send(TransferFrameKind.OPEN, OpenCopy(STATE, SHARD, CHUNK).to_bytes())
                assert line.receive(5)[0] is TransferFrameKind.COPY
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as sock,
            pytest.raises(TooManyConnectionsError),
        ):
            TransferConnection(sock, job_pass(), bounds).client_handshake()
        for line in lines:
            line.close()


def test_a_peer_that_is_cut_off_in_the_handshake_is_not_taken_for_a_stranger(target):
    with bad_peers.BadServer(bad_peers.cut_in_the_handshake) as bad:
        with pytest.raises(TransferError, match="no progress: the other side closed") as caught:
            fetch([peer(bad.port)], job_pass(), COPY, target.view, terms(patience_s=0.4))
        assert bad.n_calls > UNAUTHENTICATED_MAX
    assert "not a keeper of this job" not in str(caught.value)


BAD_REQUESTS = {
    "a range behind the end": (TransferFrameKind.GET, wire.GetChunks(41, 1).to_bytes()),
    "a range over the end": (TransferFrameKind.GET, wire.GetChunks(40, 2).to_bytes()),
    "an empty range": (TransferFrameKind.GET, wire.GetChunks(0, 0).to_bytes()),
    "a range of 16 TB": (TransferFrameKind.GET, wire.GetChunks(0, 2**32 - 1).to_bytes()),
    "a short message": (TransferFrameKind.GET, b"\0"),
    "a long message": (TransferFrameKind.GET, bytes(500)),
    "no answer was due": (TransferFrameKind.DATA, bytes(9)),
    "done with what": (TransferFrameKind.DONE, b""),
    "an impossible shard": (TransferFrameKind.OPEN, b"\xff" * 52),
}


@pytest.mark.parametrize(("kind", "body"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_that_cannot_be_ends_the_connection(kind, body, target):
    shelf = Shelf((IMAGE, COPY))
    with serving(shelf) as server:
        line = bad_peers.called(server.port)
        line.send(TransferFrameKind.OPEN, OpenCopy(STATE, SHARD, CHUNK).to_bytes())
        assert line.receive(5)[0] is TransferFrameKind.COPY
        line.receive_bytes(len(COPY.digest.table))
        line.send(kind, body)
        with pytest.raises(ConnectionError):
            line.receive(5)
        line.close()
        until(lambda: shelf.pins == 0)
        fetch([peer(server.port)], job_pass(), COPY, target.view, terms())


def test_a_request_before_any_copy_was_opened_ends_the_connection():
    with serving(Shelf((IMAGE, COPY))) as server:
        line = bad_peers.called(server.port)
        line.send(TransferFrameKind.GET, wire.GetChunks(0, 1).to_bytes())
        with pytest.raises(ConnectionError):
            line.receive(5)
        line.close()


def test_a_replica_of_16_tb_is_refused_before_its_table_is_read():
    store = replica_store(NBYTES)
    offer = wire.PushOffer(STATE, SHARD, "ab" * 32, 2**44, "cd" * 32)
    with serving(store, store) as server:
        line = bad_peers.called(server.port)
        line.send(TransferFrameKind.PUSH, offer.to_bytes(CHUNK))
        with pytest.raises(ConnectionError):
            line.receive(5)
        line.close()
    store.close()


def test_other_chunks_are_refused(target):
    with (
        serving(Shelf((IMAGE, COPY)), bounds=limits(chunk_bytes=2 * CHUNK)) as server,
        pytest.raises(TransferError, match="chunks of 4096 bytes, not of 8192"),
    ):
        fetch([peer(server.port)], job_pass(), COPY, target.view, terms())


@again_if_late(by_s=0.3)
def test_a_pusher_that_stops_leaves_what_it_sent_to_the_next(big):
    memory, copy = big
    store = replica_store(2 * BIG, chunk_bytes=2**20)
    with serving(store, store, bounds=BOUNDS) as server:
        line = bad_peers.called(server.port)
        line.send(TransferFrameKind.PUSH, push_of(copy).to_bytes(2**20), copy.digest.table)
        kind, body = line.receive(5)
        assert kind is TransferFrameKind.GET
        get = wire.GetChunks.from_bytes(body)
        line.send(TransferFrameKind.DATA, wire.GetChunks(get.first, get.count).to_bytes())
        for number in range(get.first, get.first + get.count):
            line.send_chunk(PinnedCopy(memory.fd, copy.digest), number * 2**20, 2**20, no_pace())
        # And nothing more, with the connection open: the others are not to wait for it for long.
        done = hand_over(memory, copy, peer(server.port), terms(limits=BOUNDS))
        line.close()

    assert done.sent_bytes == BIG - get.count * 2**20
    assert len(store.copies()) == 1
    store.close()


@again_if_late(by_s=0.3)
def test_a_pusher_of_other_bytes_is_told(big):
    _memory, copy = big
    store = replica_store(2 * BIG, chunk_bytes=2**20)

    def send_rubbish(line):
        line.send(TransferFrameKind.PUSH, push_of(copy).to_bytes(2**20), copy.digest.table)
        while True:
            _kind, body = line.receive(5)
            get = wire.GetChunks.from_bytes(body)
            line.send(TransferFrameKind.DATA, wire.GetChunks(get.first, get.count).to_bytes())
            line._socket.sendall(b"\1" * (get.count * 2**20))

    def refusal(port):
        """Return what the server says; where it hung up amid our bytes, its word may be lost."""
        line = bad_peers.called(port)
        try:
            send_rubbish(line)
        except TransferRefusedError as exc:
            return exc
        except OSError:
            return None
        finally:
            line.close()

    with serving(store, store, bounds=BOUNDS) as server:
        said = next(filter(None, (refusal(server.port) for _ in range(20))))

    assert "arrived corrupt 6 times" in str(said)
    assert said.code is TransferRefusal.DAMAGED
    assert store.copies() == []
    store.close()
