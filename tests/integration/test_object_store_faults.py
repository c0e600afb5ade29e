"""A server that speaks S3 and fails: a state is whole or not there, and what is read is right."""

import contextlib
import itertools
import random
import threading

import pytest
from support.checkpoint_images import ORIGIN, content_of, images
from support.faulty_http import FaultyHttp
from support.s3_server import s3_server

from gpuops.checkpoint.manifest import MANIFEST
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.object_store import ABANDONED_S, open_object_store
from gpuops.checkpoint.storage.object_tree import ObjectStoreUnreachableError
from gpuops.checkpoint.storage.persist import persist
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError, Shard, StateId
from gpuops.host.clock import FakeClock, SystemClock

STATE, LATER = StateId(1, 100), StateId(1, 200)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server):
    faulty = FaultyHttp(server.port)
    yield faulty
    faulty.close()


@pytest.fixture
def bucket(server):
    return server.bucket()


@pytest.fixture
def store(server, bucket):
    return open_object_store(f"s3://{bucket}/run", server.options(), deadline_s=30)


@pytest.fixture
def behind(server, proxy, bucket):
    """The same store, seen through the proxy."""

    def open_(deadline_s=30, **timing):
        options = server.options(proxy.port, **timing)
        return open_object_store(f"s3://{bucket}/run", options, deadline_s=deadline_s)

    return open_


@pytest.fixture
def pair():
    with images(2) as shards:
        yield shards


def states(store):
    return [stored.state for stored in store.list_states()]


def every(n, *faults):
    """Return a plan by which each *n*-th request meets the next of *faults*."""
    numbers, turns, lock = itertools.count(1), itertools.cycle(faults), threading.Lock()

    def plan(_method, _path):
        with lock:
            return next(turns) if next(numbers) % n == 0 else None

    return plan


@pytest.mark.parametrize(
    "fault", [500, pytest.param(503, marks=pytest.mark.soak), "reset", "reset late", "cut"]
)
def test_what_fails_now_and_then_is_done_again(store, behind, proxy, pair, fault):
    proxy.plan = every(3, fault)
    through = behind()

    persist(through, STATE, pair, origin=ORIGIN)

    assert states(through) == [STATE]
    assert verify_state(through, STATE) == []
    for shard, source in pair.items():
        into = bytearray(source[1].nbytes)
        through.fetch_shard(through.read_manifest(STATE).record(shard), STATE, memoryview(into))
        assert into == content_of(source)
    assert len(proxy.met) >= 5
    proxy.plan = lambda _method, _path: None
    assert verify_state(store, STATE) == []


def test_large_shards_go_in_parts_and_survive_the_same(store, behind, proxy):
    with images(1, nbytes=130 * 2**20) as shards:
        proxy.plan = every(4, 500, "reset")
        done = persist(behind(60), STATE, shards, origin=ORIGIN)
        assert done.nbytes > 130 * 2**20
        assert len(proxy.met) >= 2
        proxy.plan = lambda _method, _path: None
        assert verify_state(store, STATE) == []

        proxy.plan = every(3, "cut", 500)
        (source,) = shards.values()
        into = bytearray(source[1].nbytes)
        through = behind(60)
        record = through.read_manifest(STATE).record(Shard(0, 1))
        through.fetch_shard(record, STATE, memoryview(into))
        assert into == content_of(source)


@pytest.mark.parametrize("fault", ["reset late", pytest.param("500 late", marks=pytest.mark.soak)])
def test_an_upload_in_parts_that_was_completed_unheard_is_there(store, behind, proxy, fault):
    """S3 answers the second request to complete it that there is no such upload."""
    posts = []

    def plan(method, path):
        if method != "POST":
            return None
        posts.append(path)
        return fault if "uploadId=" in path and not proxy.met else None

    proxy.plan = plan
    with images(1, nbytes=101 * 2**20) as shards:
        # A busy machine is not a second fault: the client waits for the answer.
        persist(behind(60, read_timeout=60), STATE, shards, origin=ORIGIN)

    assert proxy.met == [fault]
    assert len([path for path in posts if "uploadId=" not in path]) == 1  # begun once
    assert verify_state(store, STATE) == []


@pytest.mark.parametrize(
    "fault", [500, *(pytest.param(how, marks=pytest.mark.soak) for how in ("reset", "cut"))]
)
def test_a_store_that_only_fails_is_told_in_time_and_nothing_changes(
    store, behind, proxy, pair, fault
):
    persist(store, STATE, pair, origin=ORIGIN)
    clock = SystemClock()
    proxy.plan = lambda _method, _path: fault
    through = behind(2)

    began_ns = clock.mono_ns()
    with pytest.raises(CheckpointError, match=r"cannot inspect s3://"):
        persist(through, LATER, pair, origin=ORIGIN)
    with pytest.raises(CheckpointError):
        through.list_states()
    assert (clock.mono_ns() - began_ns) / 1e9 < 60

    proxy.plan = lambda _method, _path: None
    assert states(store) == [STATE]
    assert verify_state(store, STATE) == []


def test_a_server_that_never_answers_is_given_up(behind, proxy):
    proxy.plan = lambda _method, _path: "silent"
    clock = SystemClock()

    began_ns = clock.mono_ns()
    with pytest.raises(CheckpointError):
        behind(1, read_timeout=0.5, connect_timeout=0.5).list_states()

    assert (clock.mono_ns() - began_ns) / 1e9 < 60


def test_a_server_that_is_gone_is_told(server, bucket, pair):
    options = server.options(port=1, connect_timeout=0.5)
    store = open_object_store(f"s3://{bucket}/run", options, deadline_s=1)

    with pytest.raises(CheckpointError, match="cannot"):
        persist(store, STATE, pair, origin=ORIGIN)


def test_an_address_at_which_nobody_listens_is_told_long_before_a_store_that_fails(server, bucket):
    store = open_object_store(
        f"s3://{bucket}/run", server.options(port=1), first_response_timeout_s=0.5
    )
    clock = SystemClock()

    began_ns = clock.mono_ns()
    with pytest.raises(
        ObjectStoreUnreachableError, match=rf"cannot list s3://{bucket}/run: no answer"
    ) as gone:
        store.scan()

    assert (clock.mono_ns() - began_ns) / 1e9 < 60  # of 300
    assert gone.value.exit_code == 75


def test_a_bucket_that_is_not_there_is_told_and_not_made(server, pair):
    store = open_object_store("s3://no-such-bucket/run", server.options(), deadline_s=60)
    clock = SystemClock()

    began_ns = clock.mono_ns()
    with pytest.raises(CheckpointError, match="bucket"):
        persist(store, STATE, pair, origin=ORIGIN)

    assert (clock.mono_ns() - began_ns) / 1e9 < 30  # it is not asked again
    assert store.list_states() == ()


def lose_the_connection(store, behind, proxy, pair, choose):
    """Lose it for good at the n-th request, before or after that was heeded, for the chosen n."""
    persist(store, STATE, pair, origin=ORIGIN)
    requests = []
    proxy.plan = lambda method, path: requests.append((method, path))
    persist(behind(), StateId(1, 101), pair, origin=ORIGIN)
    n_requests = len(requests)
    assert n_requests >= 10

    for n, fault in choose(itertools.product(range(1, n_requests + 1), ("reset", "reset late"))):
        state = StateId(2, 2 * n + (fault == "reset"))
        numbers = itertools.count(1)

        def plan(_method, _path, numbers=numbers, n=n, fault=fault):
            number = next(numbers)
            return fault if number == n else "reset" if number > n else None

        proxy.plan = plan
        with contextlib.suppress(CheckpointError):
            persist(behind(0.01), state, pair, origin=ORIGIN)
        proxy.plan = lambda _method, _path: None
        there = states(store)
        assert set(there) - {state} >= {STATE}
        if state in there:
            assert verify_state(store, state) == []
            store.delete(state)
    assert verify_state(store, STATE) == []


def test_a_connection_lost_on_the_way_leaves_the_old_or_the_new(store, behind, proxy, pair):
    def some(cases):
        return random.Random(11).sample(list(cases), 5)

    lose_the_connection(store, behind, proxy, pair, some)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_a_connection_lost_at_every_request(store, behind, proxy, pair):
    lose_the_connection(store, behind, proxy, pair, list)


def test_bytes_that_arrive_damaged_are_asked_for_again(store, behind, proxy, pair):
    """Whatever damages them on the way; here the object itself, until it is put back."""
    persist(store, STATE, pair, origin=ORIGIN)
    shard = Shard(1, 2)
    record = store.read_manifest(STATE).record(shard)
    good = content_of(pair[shard])
    key = f"{STATE.name}/{shard.file_name}"
    store._tree.write(key, good[:-1] + bytes([good[-1] ^ 1]))
    gets = itertools.count(1)

    def plan(method, path):
        if method == "GET" and path.endswith(shard.file_name) and next(gets) == 2:
            store._tree.write(key, good)

    proxy.plan = plan
    into = bytearray(len(good))
    behind().fetch_shard(record, STATE, memoryview(into))

    assert into == good
    assert next(gets) >= 3


def test_an_object_that_another_run_replaced_is_not_committed(store, pair):
    other_bytes = {}
    with images(2, seed=9) as others:
        other_bytes.update({shard: content_of(source) for shard, source in others.items()})
    writer_store = store

    def pace(nbytes):
        if nbytes == 0 and (key := f"{STATE.name}/{Shard(0, 2).file_name}"):
            calls.append(key)
            if len(calls) == 2:  # the first shard is there, the second is about to be written
                store._tree.write(key, other_bytes[Shard(0, 2)])

    calls = []
    with pytest.raises(CheckpointError, match="another run meanwhile"):
        persist(writer_store, STATE, pair, origin=ORIGIN, throttle=pace)

    assert states(store) == []


def test_an_upload_that_the_store_carries_out_twice_is_committed(store, server, bucket, pair):
    """A client that heard nothing asks again, and in the end both requests are carried out."""
    s3fs = pytest.importorskip("s3fs", reason="S3 needs s3fs")
    filesystem = s3fs.S3FileSystem(skip_instance_cache=True, **server.options())
    first = {"Bucket": bucket, "Key": f"run/{STATE.name}/{Shard(0, 2).file_name}"}
    calls, tags = [], []

    def carry_out_again(nbytes):
        calls.append(nbytes)
        if nbytes == 0 and calls.count(0) == 2:  # the second shard is about to be written
            there = filesystem.call_s3("get_object", **first)
            tags.append(there["ETag"])
            begun = filesystem.call_s3(
                "create_multipart_upload", **first, Metadata=there["Metadata"]
            )
            one = {"PartNumber": 1, "UploadId": begun["UploadId"]}
            part = filesystem.call_s3(
                "upload_part", **first, **one, Body=content_of(pair[Shard(0, 2)])
            )
            parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
            done = filesystem.call_s3(
                "complete_multipart_upload",
                **first,
                UploadId=begun["UploadId"],
                MultipartUpload={"Parts": parts},
            )
            tags.append(done["ETag"])

    persist(store, STATE, pair, origin=ORIGIN, throttle=carry_out_again)

    assert len(set(tags)) == 2  # a new version
    assert states(store) == [STATE]
    assert verify_state(store, STATE) == []


def test_what_was_never_finished_is_swept_after_a_day_and_not_before(server, bucket, store, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    persist(store, LATER, pair, origin=ORIGIN)
    store._tree.remove(f"{LATER.name}/{MANIFEST}")
    assert store.scan().leftovers == (LATER.name,)
    assert store.sweep() == ()

    clock = FakeClock(now_us=SystemClock().now_us())
    later = open_object_store(f"s3://{bucket}/run", server.options(), deadline_s=10, clock=clock)
    clock.advance(ABANDONED_S + 60)
    assert later.sweep() == (LATER.name,)

    assert store.scan().leftovers == ()
    assert states(store) == [STATE]
    assert verify_state(store, STATE) == []


def test_secrets_in_the_url_and_options_are_not_shown():
    pytest.importorskip("s3fs")
    store = open_object_store(
        "s3://bucket/run",
        {"key": "AKIAIOSFODNN7EXAMPLE", "secret": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"},
    )

    assert "EXAMPLE" not in store.address


def test_an_unknown_kind_of_url_is_told():
    with pytest.raises(CheckpointError, match="nosuch://"):
        open_object_store("nosuch://bucket/run")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_soak_random_failures(store, behind, proxy):
    """Each request fails with one chance in five, for 60 states; all that is listed verifies."""
    seeded, lock = random.Random(7), threading.Lock()

    def plan(_method, _path):
        with lock:
            faults = (500, 503, "reset", "reset late", "cut")
            return seeded.choice(faults) if seeded.random() < 0.2 else None

    with images(2, nbytes=CHUNK_BYTES) as shards:
        for step in range(60):
            proxy.plan = plan
            with contextlib.suppress(CheckpointError, CorruptError):
                persist(behind(20), StateId(1, step), shards, origin=ORIGIN)
            proxy.plan = lambda _method, _path: None
            for stored in store.list_states():
                assert verify_state(store, stored.state) == []
                store.delete(stored.state)
