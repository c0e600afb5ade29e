"""What every store of states does: a directory, an object store in memory, and one over S3."""

import itertools
import os

import pytest
from support.checkpoint_images import ORIGIN, content_of, images
from support.s3_server import s3_server

from gpuops.checkpoint.manifest import MANIFEST, parse_manifest
from gpuops.checkpoint.pieces import BLOCK_BYTES, PIECE_BYTES, pieces_file_name
from gpuops.checkpoint.storage.api import CheckpointStore, NoStateError
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import FileProblemKind, verify_state
from gpuops.checkpoint.storage.object_store import open_object_store
from gpuops.checkpoint.storage.persist import (
    RetentionPolicy,
    StateOrigin,
    commit_node_shards,
    persist,
    persist_node_shards,
    prune,
)
from gpuops.checkpoint.storage.stored_ranges import StoredRanges
from gpuops.checkpoint.storage.throttle import until_stopped
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Digest,
    Shard,
    StateId,
)

STATE = StateId(1, 100)
LATER = StateId(1, 200)
AGAIN = StateId(2, 100)  # the same step after a restart
_numbers = itertools.count(1)


class Directory:
    """A store in a directory, and how its bytes are damaged."""

    def __init__(self, root):
        self.root = root

    def open(self):
        return DirectoryStore(self.root)

    def read(self, key):
        return (self.root / key).read_bytes()

    def write(self, key, content):
        (self.root / key).write_bytes(content)

    def remove(self, key):
        (self.root / key).unlink()


class Objects:
    """A store under a URL, and how its bytes are damaged."""

    def __init__(self, url, options=None):
        self.url, self.options = url, options
        import fsspec

        self.fs, self.root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **(options or {}))

    def open(self):
        return open_object_store(self.url, self.options, deadline_s=60)

    def read(self, key):
        self.fs.invalidate_cache()
        return self.fs.cat_file(f"{self.root}/{key}")

    def write(self, key, content):
        self.fs.pipe_file(f"{self.root}/{key}", content)

    def remove(self, key):
        self.fs.rm_file(f"{self.root}/{key}")


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


# S3's own behaviour, and its faults, are in tests/integration/test_object_store_faults.py.
@pytest.fixture(params=["directory", "memory", pytest.param("s3", marks=pytest.mark.soak)])
def kind(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path / "not" / "yet" / "there")
    if request.param == "memory":
        return Objects(f"memory://bucket-{next(_numbers)}/run")
    server = request.getfixturevalue("s3")
    options = server.options(connect_timeout=30, read_timeout=30)
    return Objects(f"s3://{server.bucket()}/some/run", options)


@pytest.fixture
def store(kind):
    return kind.open()


@pytest.fixture
def pair():
    with images(2) as shards:
        yield shards


def states(store):
    return [stored.state for stored in store.list_states()]


def is_good(store, state=STATE):
    return verify_state(store, state) == []


def file_key(rank=0, state=STATE):
    return f"{state.name}/{Shard(rank, 2).file_name}"


def test_it_is_a_store(store):
    assert isinstance(store, CheckpointStore)


def test_nothing_is_in_one_that_was_never_written_to(store):
    survey = store.scan()

    assert (survey.states, survey.damaged, survey.leftovers) == ((), (), ())
    assert store.sweep() == ()
    with pytest.raises(NoStateError, match="no step 100"):
        store.read_manifest(STATE)
    store.delete(STATE)
    store.unpin(STATE, "gone")


def test_a_state_is_there_as_it_was_saved(store, kind, pair):
    done = persist(store, STATE, pair, origin=StateOrigin("räder [3]", 7))

    assert done.state == STATE
    assert done.nbytes == sum(digest.nbytes for _, digest in pair.values())
    assert states(store) == [STATE]
    manifest = store.read_manifest(STATE)
    assert (manifest.job, manifest.generation, manifest.world) == ("räder [3]", 7, 2)
    assert store.file_sizes(STATE) == {
        shard.file_name: digest.nbytes for shard, (_, digest) in pair.items()
    } | {pieces_file_name(shard): 3 * 8 for shard in pair}
    for shard, source in pair.items():
        assert kind.read(f"{STATE.name}/{shard.file_name}") == content_of(source)
        assert manifest.record(shard).digest == source[1]
    assert is_good(store)
    assert store.scan().leftovers == ()


def test_another_process_sees_it_at_once(store, kind, pair):
    other = kind.open()
    assert states(other) == []

    persist(store, STATE, pair, origin=ORIGIN)

    assert states(other) == [STATE]
    assert is_good(other)


def test_the_newest_comes_first_and_epochs_go_before_steps(store, pair):
    for state in (LATER, AGAIN, STATE):
        persist(store, state, pair, origin=ORIGIN)

    assert states(store) == [AGAIN, LATER, STATE]


def test_persisting_it_again_writes_nothing(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    before = kind.read(f"{STATE.name}/{MANIFEST}")

    assert persist(store, STATE, pair, origin=ORIGIN).nbytes == 0
    assert kind.read(f"{STATE.name}/{MANIFEST}") == before


def test_two_runs_in_one_place_are_told_apart_and_the_first_stays(store, pair):
    persist(store, STATE, pair, origin=StateOrigin("first", 1))
    with images(2, seed=1) as others, pytest.raises(CheckpointError, match="saved by first"):
        persist(store, STATE, others, origin=StateOrigin("second", 1))

    assert is_good(store)
    assert store.read_manifest(STATE).job == "first"
    assert store.scan().leftovers == ()


@pytest.mark.parametrize("part", [MANIFEST, Shard(1, 2).file_name])
def test_a_damaged_state_makes_room_for_a_complete_one(store, kind, pair, part):
    persist(store, STATE, pair, origin=ORIGIN)
    kind.write(f"{STATE.name}/{part}", b"{}")

    assert persist(store, STATE, pair, origin=ORIGIN).nbytes > 0

    assert states(store) == [STATE]
    assert is_good(store)


def test_a_state_that_lost_its_manifest_makes_room_for_a_complete_one(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    kind.remove(f"{STATE.name}/{MANIFEST}")
    assert states(store) == []

    persist(store, STATE, pair, origin=ORIGIN)

    assert is_good(store)


def test_a_state_of_a_later_version_is_left_as_it_is(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    key = f"{STATE.name}/{MANIFEST}"
    newer = kind.read(key).replace(b"gpuops.checkpoint/1", b"gpuops.checkpoint/2")
    kind.write(key, newer)

    (damaged,) = store.scan().damaged
    assert damaged.name == STATE.name
    assert "version 2" in damaged.why
    with pytest.raises(CheckpointError, match=r"version 2.*Install the gpuops"):
        persist(store, STATE, pair, origin=ORIGIN)
    assert kind.read(key) == newer
    assert kind.read(file_key()) == content_of(pair[Shard(0, 2)])


def test_bytes_that_changed_since_they_were_written_are_not_kept(store, pair):
    shard = Shard(1, 2)
    fd, digest = pair[shard]
    os.pwrite(fd, bytes([os.pread(fd, 1, digest.nbytes - 1)[0] ^ 1]), digest.nbytes - 1)

    with pytest.raises(CorruptError, match="1 of 1 chunks"):
        persist(store, STATE, pair, origin=ORIGIN)

    assert states(store) == []
    assert store.scan().leftovers == ()


def test_a_digest_of_another_length_is_refused(store, pair):
    shard = Shard(0, 2)
    fd, digest = pair[shard]
    other = {**pair, shard: (fd, Digest(digest.nbytes - 1, digest.table, digest.root))}

    with pytest.raises(CorruptError, match="shard-00000-of-00002"):
        persist(store, STATE, other, origin=ORIGIN)
    assert states(store) == []


def test_shards_of_no_complete_world_are_refused(store, pair):
    with pytest.raises(CheckpointError, match="not all of one world"):
        persist(store, STATE, {Shard(0, 2): pair[Shard(0, 2)]}, origin=ORIGIN)
    with pytest.raises(CheckpointError, match="not all of one world"):
        persist(store, STATE, {}, origin=ORIGIN)
    with pytest.raises(CorruptError, match="the image is shard-00000-of-00002"):
        persist(store, STATE, dict.fromkeys(pair, pair[Shard(0, 2)]), origin=ORIGIN)


def test_stopping_leaves_what_was_there_before(store):
    with images(2, nbytes=CHUNK_BYTES + 1) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        answers = iter([False, True])
        pace = until_stopped(lambda: next(answers, True))
        with pytest.raises(CheckpointError, match="stopped"):
            persist(store, LATER, shards, origin=ORIGIN, throttle=pace)

    assert states(store) == [STATE]
    assert is_good(store)


def test_nodes_put_their_parts_and_any_of_them_commits(kind):
    with images(4, ranks=(0, 1)) as ours, images(4, ranks=(2, 3)) as theirs:
        mine, other = kind.open(), kind.open()
        options = {"session": "run/7", "origin": ORIGIN}
        assert commit_node_shards(mine, STATE, 4, **options) is False
        persist_node_shards(mine, STATE, ours, session="run/7")
        assert commit_node_shards(mine, STATE, 4, **options) is False
        assert states(mine) == states(other) == []
        persist_node_shards(other, STATE, theirs, session="run/7")

        assert commit_node_shards(mine, STATE, 4, **options) is True
        assert commit_node_shards(other, STATE, 4, **options) is True
        assert persist_node_shards(other, STATE, theirs, session="run/7").nbytes == 0

    assert states(other) == [STATE]
    assert is_good(other)
    assert other.scan().leftovers == ()


def test_parts_of_another_session_are_not_taken(store):
    with images(2, ranks=(0,)) as ours, images(2, ranks=(1,)) as theirs:
        persist_node_shards(store, STATE, ours, session="a")
        persist_node_shards(store, STATE, theirs, session="b")

    assert commit_node_shards(store, STATE, 2, session="a", origin=ORIGIN) is False
    assert states(store) == []


def test_a_part_that_was_cut_short_is_not_committed(store, kind, pair):
    for shard, source in pair.items():
        persist_node_shards(store, STATE, {shard: source}, session="a")
    if isinstance(kind, Directory):
        (key,) = (path for path in kind.root.rglob(Shard(0, 2).file_name))
        os.truncate(key, 10)
    else:
        kind.write(file_key(), b"short")

    assert commit_node_shards(store, STATE, 2, session="a", origin=ORIGIN) is False

    persist_node_shards(store, STATE, pair, session="a")
    assert commit_node_shards(store, STATE, 2, session="a", origin=ORIGIN) is True
    assert is_good(store)


def test_a_shard_is_fetched_into_memory_and_verified(store, kind):
    with images(2, nbytes=CHUNK_BYTES * 2 + 77) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        record = store.read_manifest(STATE).record(Shard(1, 2))
        into = bytearray(record.digest.nbytes)
        store.fetch_shard(record, STATE, memoryview(into))
        assert into == content_of(shards[Shard(1, 2)])

        damaged = bytearray(into)
        damaged[CHUNK_BYTES + 5] ^= 4
        kind.write(file_key(1), bytes(damaged))
        with pytest.raises(CorruptError, match=f"the chunk at byte {CHUNK_BYTES} "):
            store.fetch_shard(record, STATE, memoryview(into))
        kind.write(file_key(1), bytes(damaged)[:-1])
        with pytest.raises(CorruptError, match=rf"has {len(damaged) - 1} bytes"):
            store.fetch_shard(record, STATE, memoryview(into))
        kind.remove(file_key(1))
        with pytest.raises(CheckpointError, match="shard-00001-of-00002"):
            store.fetch_shard(record, STATE, memoryview(into))


def test_some_bytes_of_a_shard_are_read(store, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    shard = Shard(0, 2)
    data = content_of(pair[shard])

    assert store.read_bytes(STATE, shard, 3, 40) == data[3:40]
    with pytest.raises(CheckpointError) as refused:
        store.read_bytes(STATE, shard, len(data) - 1, len(data) + 1)
    assert "attempts" not in str(refused.value)
    with pytest.raises(CheckpointError):
        store.read_bytes(LATER, shard, 0, 1)


def ranges_of(store, shard):
    return StoredRanges(store, STATE, store.read_manifest(STATE).record(shard))


def read_range(ranges, begin, end):
    """Return where the bytes begin that are read for a range, and the bytes."""
    found = []
    ranges.read([(begin, end)], lambda at, data: found.append((at, bytes(data))))
    return found[0]


def test_a_range_is_verified_by_its_pieces_alone(store, kind):
    """What is damaged elsewhere in its chunk does not matter: it was not read."""
    shard = Shard(1, 2)
    with images(2, nbytes=CHUNK_BYTES + 5 * PIECE_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        data = bytearray(content_of(shards[shard]))
    data[3 * PIECE_BYTES] ^= 1
    kind.write(file_key(1), bytes(data))
    begin, end = 4 * PIECE_BYTES, 7 * PIECE_BYTES
    last = CHUNK_BYTES + 5 * PIECE_BYTES

    ranges = ranges_of(store, shard)

    assert read_range(ranges, begin, end) == (begin, bytes(data[begin:end]))
    assert read_range(ranges, last, len(data)) == (last, bytes(data[last:]))
    with pytest.raises(CorruptError, match="corrupt in piece 0 of 2"):
        read_range(ranges, 3 * PIECE_BYTES, 4 * PIECE_BYTES)


@pytest.mark.parametrize("damage", ["of an older gpuops", "flipped", "cut short", "swapped"])
def test_without_good_hashes_of_its_pieces_whole_chunks_are_read(store, kind, damage):
    shard, key = Shard(1, 2), f"{STATE.name}/{pieces_file_name(Shard(1, 2))}"
    with images(2, nbytes=CHUNK_BYTES + 5 * PIECE_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        data = content_of(shards[shard])
    blocks = bytearray(kind.read(key))
    match damage:
        case "of an older gpuops":
            kind.remove(key)
        case "flipped":
            blocks[BLOCK_BYTES + 8] ^= 1
            kind.write(key, bytes(blocks))
        case "cut short":
            kind.write(key, bytes(blocks[: BLOCK_BYTES + 20]))
        case "swapped":
            kind.write(key, kind.read(f"{STATE.name}/{pieces_file_name(Shard(0, 2))}"))

    begin = CHUNK_BYTES + PIECE_BYTES
    assert read_range(ranges_of(store, shard), begin, begin + PIECE_BYTES) == (
        CHUNK_BYTES,
        data[CHUNK_BYTES:],
    )
    changed = bytearray(data)
    changed[CHUNK_BYTES + 3 * PIECE_BYTES] ^= 1
    kind.write(file_key(1), bytes(changed))
    with pytest.raises(CorruptError, match="corrupt in piece 1 of 2"):
        read_range(ranges_of(store, shard), begin, begin + PIECE_BYTES)


def test_a_shard_is_opened_as_a_path_or_fetched(store, pair):
    persist(store, STATE, pair, origin=ORIGIN)

    path = store.local_shard_path(STATE, Shard(0, 2))

    if path is not None:
        assert path.read_bytes() == content_of(pair[Shard(0, 2)])
    with pytest.raises(CheckpointError):
        store.local_shard_path(LATER, Shard(0, 2))


def test_each_kind_of_damage_is_named(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    first, second = kind.read(file_key(0)), kind.read(file_key(1))
    kind.write(file_key(0), first[:-3])
    kind.write(file_key(1), second + b"\0")
    kind.write(f"{STATE.name}/notes.txt", b"mine")
    problems = {problem.file: problem for problem in verify_state(store, STATE)}
    assert problems.keys() == {Shard(0, 2).file_name, Shard(1, 2).file_name, "notes.txt"}
    assert problems["notes.txt"].kind is FileProblemKind.EXTRA
    assert problems[Shard(0, 2).file_name].kind is FileProblemKind.TRUNCATED
    assert problems[Shard(1, 2).file_name].kind is FileProblemKind.LONGER

    kind.remove(file_key(0))
    kind.write(file_key(1), second[:-1] + bytes([second[-1] ^ 128]))
    problems = {problem.file: problem for problem in verify_state(store, STATE)}
    assert problems[Shard(0, 2).file_name].kind is FileProblemKind.MISSING
    assert problems[Shard(1, 2).file_name].kind is FileProblemKind.FLIPPED
    assert problems[Shard(1, 2).file_name].offsets == (0,)


def test_verifying_tells_how_far_it_is(store):
    told = []
    with images(2, nbytes=CHUNK_BYTES + 1) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        whole = sum(digest.nbytes for _, digest in shards.values())

        assert verify_state(store, STATE, progress=lambda *bytes_: told.append(bytes_)) == []

    assert told[-1] == (whole, whole)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) >= 4


def test_a_manifest_edited_by_hand_is_found(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    key = f"{STATE.name}/{MANIFEST}"
    kind.write(key, kind.read(key).replace(b'"generation": 1', b'"generation": 2'))

    assert states(store) == []
    (problem,) = verify_state(store, STATE)
    assert problem.kind is FileProblemKind.MANIFEST
    assert "edited or damaged" in problem.detail
    with pytest.raises(CorruptError, match="edited"):
        store.read_manifest(STATE)


def test_the_manifest_of_another_state_is_not_taken(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    persist(store, LATER, pair, origin=ORIGIN)
    kind.write(f"{STATE.name}/{MANIFEST}", kind.read(f"{LATER.name}/{MANIFEST}"))

    assert states(store) == [LATER]
    with pytest.raises(CorruptError, match="is of step 200"):
        store.read_manifest(STATE)


def test_what_is_pinned_is_not_deleted(store, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    store.pin(STATE, "paper-v1")
    store.pin(STATE, "paper-v1")
    store.pin(STATE, "best")
    assert [stored.tags for stored in store.list_states()] == [("best", "paper-v1")]

    with pytest.raises(CheckpointError, match="pinned by best, paper-v1"):
        store.delete(STATE)
    assert is_good(store)

    for tag in ("best", "paper-v1", "never-was"):
        store.unpin(STATE, tag)
    store.delete(STATE)
    assert states(store) == []
    assert store.scan().leftovers == ()


@pytest.mark.parametrize("tag", ["", "..", "a/b", "a@b", ".hidden", "x" * 65, "é", "a\nb"])
def test_what_is_no_tag_is_refused(store, pair, tag):
    persist(store, STATE, pair, origin=ORIGIN)

    with pytest.raises(CheckpointError, match="is not a tag"):
        store.pin(STATE, tag)
    store.unpin(STATE, tag)


def test_a_state_that_is_not_there_is_not_pinned(store, pair):
    persist(store, STATE, pair, origin=ORIGIN)

    with pytest.raises(CheckpointError, match="there is no step 200"):
        store.pin(LATER, "x")


def test_pruning_keeps_what_it_must(store, pair):
    steps = [StateId(1, step) for step in range(0, 100, 10)]
    for state in steps:
        persist(store, state, pair, origin=ORIGIN)
    store.pin(StateId(1, 10), "keep")

    gone = prune(store, RetentionPolicy(keep_last=2, keep_every=40), {StateId(1, 50)})

    assert [state.step for state in states(store)] == [90, 80, 50, 40, 10, 0]
    assert [verdict.state.step for verdict in gone] == [20, 30, 60, 70]
    assert all(is_good(store, state) for state in states(store))


def test_a_state_is_verified_once_it_was_read_back_and_no_more_once_it_is_damaged(
    store, kind, pair
):
    def is_verified():
        (stored,) = store.list_states()
        return stored.is_verified

    persist(store, STATE, pair, origin=ORIGIN)
    first, second = store.read_manifest(STATE).shards
    store.read_back(first, STATE)
    assert not is_verified()
    intact = kind.read(file_key(1))
    kind.write(file_key(1), intact[:-1] + bytes([intact[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"shard-00001-of-00002.safetensors: the chunk at byte"):
        store.read_back(second, STATE)
    kind.write(file_key(1), intact)
    store.read_back(second, STATE)
    assert is_verified()
    assert verify_state(store, STATE) == []

    store.mark_damaged(second, STATE)
    store.mark_damaged(second, STATE)
    assert not is_verified()
    (stored,) = store.list_states()
    assert stored.is_damaged
    (problem,) = verify_state(store, STATE, sizes_only=True)
    assert (
        str(problem)
        == f"{file_key(1).partition('/')[2]}: it was not what was saved when it was read last"
    )
    assert verify_state(store, STATE) == []
    store.read_back(second, STATE)
    assert is_verified()
    assert not store.list_states()[0].is_damaged
    kind.remove(f"{STATE.name}/{MANIFEST}")
    persist(store, STATE, pair, origin=ORIGIN)
    assert not is_verified()


def test_a_state_that_was_not_verified_as_it_was_written_has_all_hashes_once_it_was_read_back(
    store, kind
):
    shard, key = Shard(1, 2), f"{STATE.name}/{pieces_file_name(Shard(1, 2))}"
    with images(2, nbytes=CHUNK_BYTES + 5 * PIECE_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        blocks = kind.read(key)
        store.delete(STATE)
        persist(store, STATE, shards, origin=ORIGIN, verify=False)
        data = content_of(shards[shard])
    record = store.read_manifest(STATE).record(shard)
    begin, end = CHUNK_BYTES + PIECE_BYTES, CHUNK_BYTES + 2 * PIECE_BYTES
    at, found = read_range(ranges_of(store, shard), begin, end)
    assert found[begin - at :][:PIECE_BYTES] == data[begin:end]

    store.read_back(record, STATE)

    assert kind.read(key) == blocks
    assert read_range(ranges_of(store, shard), begin, end) == (begin, data[begin:end])


def test_a_state_that_lacks_a_shard_or_was_damaged_is_damaged_until_it_is_written_anew(
    store, kind, pair
):
    persist(store, STATE, pair, origin=ORIGIN)
    for record in store.read_manifest(STATE).shards:
        store.read_back(record, STATE)
    kind.remove(file_key(1))
    (stored,) = store.list_states()
    assert (stored.is_verified, stored.is_damaged) == (False, True)

    store.mark_damaged(stored.manifest.shards[1], STATE)
    persist(store, STATE, pair, origin=ORIGIN)
    (stored,) = store.list_states()
    assert (stored.is_verified, stored.is_damaged) == (False, False)


def test_the_manifest_is_complete_without_the_store(store, kind, pair):
    persist(store, STATE, pair, origin=ORIGIN)

    manifest = parse_manifest(kind.read(f"{STATE.name}/{MANIFEST}"), "copied elsewhere")

    assert manifest == store.read_manifest(STATE)
