"""A directory of states beside foreign files, links, other writers and what the dead left."""

import fcntl
import os
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_images import ORIGIN, content_of, image_bytes, images
from support.disk_order import DiskOrder

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.manifest import MANIFEST
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.api import CommitInProgressError
from gpuops.checkpoint.storage.directory import ABANDONED_S, QUARANTINE_S, DirectoryStore
from gpuops.checkpoint.storage.directory_files import (
    LeftoverKind,
    collect_pins,
    host_identity,
    is_valid_tag,
    name_component,
    parse_leftover_name,
    parse_state_name,
    pin_name,
    quarantine_name,
    shared_name,
    temporary_name,
    trash_name,
)
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.persist import (
    RetentionPolicy,
    StateOrigin,
    commit_node_shards,
    persist,
    persist_node_shards,
    prune,
)
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError, Shard, StateId

STATE, LATER = StateId(1, 100), StateId(1, 200)
NONCE = bytes(8)
STATES = st.builds(StateId, st.integers(0, 99_999), st.integers(0, 10**12 - 1))


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "states"


@pytest.fixture
def pair():
    with images(2) as shards:
        yield shards


def states(store):
    return [stored.state for stored in store.list_states()]


def dead_pid():
    """Return the number of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def leave(root, name, *, age_s=0.0, content=b"x" * 100):
    """Make a leftover of this *name* whose content is so old."""
    folder = root / name
    folder.mkdir(parents=True)
    file = folder / Shard(0, 2).file_name
    file.write_bytes(content)
    for path in (file, folder):
        then_s = path.stat().st_mtime - age_s
        os.utime(path, (then_s, then_s))
    return folder


# Names.


@given(
    state=STATES,
    host=st.text(max_size=80),
    pid=st.integers(1, 2**22),
    nonce=st.binary(min_size=8, max_size=8),
)
def test_each_name_of_ours_is_known_again(state, host, pid, nonce):
    made = parse_leftover_name(temporary_name(state, name_component(host), pid, nonce))
    assert (made.kind, made.state, made.pid) == (LeftoverKind.TEMPORARY, state, pid)
    assert made.host == name_component(host)
    made = parse_leftover_name(shared_name(state, host))
    assert (made.kind, made.state, made.session) == (
        LeftoverKind.SHARED,
        state,
        name_component(host),
    )
    assert parse_leftover_name(trash_name(state, nonce)).kind is LeftoverKind.TRASH
    assert parse_leftover_name(quarantine_name(state, nonce)).kind is LeftoverKind.QUARANTINED
    assert parse_state_name(state.name) == state
    assert collect_pins([pin_name(state, "a.b-c"), "a@b"]) == {state: ("a.b-c",)}


@given(st.text(max_size=60) | st.from_regex(r"step-[0-9]{1,14}\.e[0-9]{1,7}(\.tmp.*)?"))
def test_no_other_name_is_taken_for_ours(name):
    state = parse_state_name(name)
    assert state is None or state.name == name
    left = parse_leftover_name(name)
    assert left is None or left.state.name in name
    assert not (state and left)


@given(st.text(), st.text())
def test_texts_that_differ_make_words_that_differ(one, other):
    assert (name_component(one) == name_component(other)) == (one == other)
    assert len(name_component(one)) <= 96
    assert name_component(one).isascii()
    assert not set(name_component(one)) & set("./ \n")


def test_a_word_is_never_another_ones_word():
    hashed = name_component("a/b")

    assert name_component(hashed) != hashed
    assert name_component("a-b") == "a-b"


@pytest.mark.parametrize("tag", ["a\n", "-a", "", "ü", "a" * 65])
def test_no_other_text_is_a_tag(tag):
    assert not is_valid_tag(tag)


def test_this_host_has_a_name_that_fits():
    assert host_identity().startswith(os.uname().nodename)
    assert (
        parse_leftover_name(temporary_name(STATE, name_component(host_identity()), 1, NONCE)).pid
        == 1
    )


# Foreign files and links.


def test_foreign_files_are_neither_listed_nor_touched(store, root, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    foreign = [
        "notes",
        "step-5",
        "step-000000000100",
        "step-000000000300.e00001.tmp",
        "x.tmp.y.1.z",
    ]
    for name in foreign:
        (root / name).mkdir()
        (root / name / "file").touch()
        os.utime(root / name, (0, 0))
    (root / "step-000000000300.e00001.tmp.h.1.0000000000000000").touch()  # a file, no directory
    (root / "README").write_text("mine")
    before = sorted(path.relative_to(root) for path in root.rglob("*"))

    assert states(store) == [STATE]
    assert store.sweep() == ()
    persist(store, LATER, pair, origin=ORIGIN)
    store.delete(LATER)

    assert sorted(path.relative_to(root) for path in root.rglob("*")) == before


def test_links_in_the_place_of_anything_of_ours_are_not_followed(store, root, tmp_path, pair):
    elsewhere = tmp_path / "elsewhere"
    persist(DirectoryStore(elsewhere), STATE, pair, origin=ORIGIN)
    precious = elsewhere / STATE.name
    root.mkdir()
    dead = dead_pid()
    for name in (
        STATE.name,
        temporary_name(STATE, name_component(host_identity()), dead, NONCE),
        shared_name(LATER, "run"),
        trash_name(STATE, NONCE),
        quarantine_name(STATE, NONCE),
        ".pins",
    ):
        (root / name).symlink_to(precious)
    before = sorted((path.name, path.read_bytes()) for path in precious.iterdir())

    assert states(store) == []
    (damaged,) = store.scan().damaged
    assert "is not a directory" in damaged.why
    with pytest.raises(CheckpointError, match="is not a directory"):
        persist(store, STATE, pair, origin=ORIGIN)
    with pytest.raises(CheckpointError):
        persist_node_shards(store, LATER, pair, session="run")
    with pytest.raises(CheckpointError):
        store.read_manifest(STATE)
    with pytest.raises(CheckpointError):
        store.pin(STATE, "x")
    with pytest.raises(CheckpointError):
        store.local_shard_path(STATE, Shard(0, 2))
    store.delete(STATE)
    store.sweep()

    assert sorted((path.name, path.read_bytes()) for path in precious.iterdir()) == before
    assert len(list(root.iterdir())) == 6


def test_where_pins_cannot_be_read_all_can_be_loaded_and_none_deleted(store, root, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    (root / ".pins").write_text("in the way")

    (stored,) = store.list_states()

    assert stored.tags == ("pins-unreadable",)
    with pytest.raises(CheckpointError, match="pinned by pins-unreadable"):
        store.delete(STATE)
    assert verify_state(store, STATE) == []


def test_what_lies_inside_a_state_that_is_removed_is_not_followed(store, root, tmp_path, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (root / STATE.name / "link").symlink_to(precious)

    store.delete(STATE)

    assert list(root.iterdir()) == []
    assert (precious / "file").exists()


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "huge", "empty"])
def test_a_manifest_that_is_something_else_is_damage(store, root, tmp_path, pair, kind):
    persist(store, STATE, pair, origin=ORIGIN)
    path = root / STATE.name / MANIFEST
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "copy").write_bytes(content)
        path.symlink_to(tmp_path / "copy")
    else:
        path.touch()
        os.truncate(path, 10**12 if kind == "huge" else 0)

    survey = store.scan()

    assert survey.states == ()
    assert [damaged.name for damaged in survey.damaged] == [STATE.name]
    assert str(path) in survey.damaged[0].why
    assert len(verify_state(store, STATE)) == 1


def test_a_root_that_is_a_link_is_the_users_choice(tmp_path, pair):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    persist(DirectoryStore(tmp_path / "link"), STATE, pair, origin=ORIGIN)

    assert states(DirectoryStore(tmp_path / "real")) == [STATE]


# Damage, and writers beside each other.


def test_what_was_damaged_is_put_aside_and_kept_for_a_week(store, root, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    shard = root / STATE.name / Shard(0, 2).file_name
    shard.unlink()

    persist(store, STATE, pair, origin=ORIGIN)

    (aside,) = (root / name for name in store.scan().leftovers)
    assert (aside / Shard(1, 2).file_name).read_bytes() == content_of(pair[Shard(1, 2)])
    assert store.sweep() == ()
    for path in (*aside.iterdir(), aside):
        os.utime(path, (path.stat().st_mtime - QUARANTINE_S - 60,) * 2)
    assert store.sweep() == (aside.name,)
    assert not aside.exists()
    assert verify_state(store, STATE) == []


def test_a_file_in_the_place_of_the_state_is_left_and_told(store, root, pair):
    root.mkdir()
    (root / STATE.name).write_text("mine")

    with pytest.raises(CheckpointError, match="is not a directory; move it"):
        persist(store, STATE, pair, origin=ORIGIN)

    assert (root / STATE.name).read_text() == "mine"
    assert store.scan().leftovers == ()


def test_an_empty_directory_in_its_place_makes_room(store, root, pair):
    (root / STATE.name).mkdir(parents=True)

    persist(store, STATE, pair, origin=ORIGIN)

    assert verify_state(store, STATE) == []


def test_of_two_writers_of_one_state_the_second_finds_it_there(store, pair):
    manifests = []
    with images(2) as same:
        writers = [store.open_writer(STATE, 2) for _ in range(2)]
        persist(DirectoryStore(Path(store.address) / "other"), STATE, same, origin=ORIGIN)
        manifests = DirectoryStore(Path(store.address) / "other").list_states()[0].manifest
        for writer in writers:
            for record in manifests.shards:
                writer.put_shard(record, same[record.shard][0])

        assert writers[0].commit(manifests) is True
        assert writers[1].commit(replace(manifests, job="again")) is False

    assert store.read_manifest(STATE).job == ORIGIN.job
    assert store.scan().leftovers == ()


def test_what_a_writer_did_not_put_it_does_not_commit(store, pair):
    other = DirectoryStore(Path(store.address) / "other")
    persist(other, STATE, pair, origin=ORIGIN)
    manifest = other.read_manifest(STATE)
    writer = store.open_writer(STATE, 2)
    writer.put_shard(manifest.shards[0], pair[Shard(0, 2)][0])

    with pytest.raises(CheckpointError, match="1 of 2 shards are not there: shard-00001"):
        writer.commit(manifest)
    with pytest.raises(CheckpointError, match="not of a world of 2"):
        writer.put_shard(replace(manifest.shards[1], shard=Shard(1, 3)), pair[Shard(1, 2)][0])
    writer.abort()
    writer.abort()

    assert states(store) == []
    assert store.scan().leftovers == ()


def test_a_file_cut_short_behind_the_writers_back_is_not_committed(store, root, pair):
    other = DirectoryStore(Path(store.address) / "other")
    persist(other, STATE, pair, origin=ORIGIN)
    manifest = other.read_manifest(STATE)
    writer = store.open_writer(STATE, 2)
    for record in manifest.shards:
        writer.put_shard(record, pair[record.shard][0])
    (path,) = root.glob(f"*.tmp.*/{Shard(1, 2).file_name}")
    os.truncate(path, 17)

    with pytest.raises(CorruptError, match="has 17 bytes"):
        writer.commit(manifest)
    writer.abort()

    assert states(store) == []


def test_a_shared_directory_holds_nothing_else_once_it_is_committed(store, root, pair):
    for shard, source in pair.items():
        persist_node_shards(store, STATE, {shard: source}, session="run")
    (shared,) = root.iterdir()
    (shared / ".0123456789abcdef.part").write_bytes(b"of a writer that died")

    assert commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)

    assert sorted(path.name for path in (root / STATE.name).iterdir()) == sorted(
        [MANIFEST, *(name for s in pair for name in (s.file_name, pieces_file_name(s)))]
    )


def test_directories_that_are_made_are_made_to_last(tmp_path, pair, monkeypatch):
    synced, real = [], os.fsync

    def fsync(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    persist(DirectoryStore(tmp_path / "a" / "b"), STATE, pair, origin=ORIGIN)

    assert synced.index(str(tmp_path)) < synced.index(str(tmp_path / "a"))
    # The folder of the state once, with all of its names.
    assert len([path for path in synced if Path(path).name.startswith(STATE.name)]) == 1


def test_committing_removes_what_the_session_left_of_older_states(store, root, pair):
    older, other_run = StateId(1, 50), StateId(1, 60)
    persist_node_shards(store, older, {Shard(0, 2): pair[Shard(0, 2)]}, session="run")
    persist_node_shards(store, other_run, {Shard(0, 2): pair[Shard(0, 2)]}, session="another run")
    persist_node_shards(store, LATER, {Shard(0, 2): pair[Shard(0, 2)]}, session="run")
    persist_node_shards(store, STATE, pair, session="run")

    assert commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)

    assert sorted(path.name for path in root.iterdir()) == sorted(
        [STATE.name, shared_name(other_run, "another run"), shared_name(LATER, "run")]
    )


def test_of_two_nodes_that_commit_one_does(store, root, pair):
    for shard, source in pair.items():
        persist_node_shards(store, STATE, {shard: source}, session="run")
    other = DirectoryStore(root)
    first, second = (node.open_writer(STATE, 2, session="run") for node in (store, other))
    persist(DirectoryStore(root / "model"), STATE, pair, origin=ORIGIN)
    manifest = DirectoryStore(root / "model").read_manifest(STATE)
    first._take_session_folder()

    with pytest.raises(CommitInProgressError):
        second.commit(manifest)
    assert not commit_node_shards(other, STATE, 2, session="run", origin=ORIGIN)
    second.abort()
    first.abort()  # it had no luck, and puts it back
    assert states(store) == []

    assert commit_node_shards(other, STATE, 2, session="run", origin=ORIGIN)
    assert verify_state(store, STATE) == []
    assert store.scan().leftovers == ()


def test_a_late_writer_never_writes_into_a_state_that_has_appeared(store, root, pair):
    """Its directory was renamed while it wrote a shard that another writer had put as well."""
    shard = Shard(0, 2)
    late = store.open_writer(STATE, 2, session="run")

    def commit_meanwhile(_nbytes):
        persist_node_shards(store, STATE, pair, session="run")
        assert commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)

    persist(DirectoryStore(root / "model"), STATE, pair, origin=ORIGIN)
    record = DirectoryStore(root / "model").read_manifest(STATE).record(shard)
    with pytest.raises(CheckpointError):
        late.put_shard(record, pair[shard][0], throttle=commit_meanwhile)
    late.abort()

    assert verify_state(store, STATE) == []
    assert store.scan().leftovers == ()


@pytest.mark.quick_disk  # hundreds of syncs
def test_four_nodes_at_once_never_disagree(tmp_path):
    """Each puts its shard of eight states and commits until it is there, all at the same time."""
    world, n_states, deadline_s = 4, 8, time.monotonic() + 60
    with images(world) as shards:
        nodes = []
        for shard, source in shards.items():
            pid = os.fork()
            if pid:
                nodes.append(pid)
                continue
            code = 1
            try:
                node = DirectoryStore(tmp_path / "states")
                for step in range(n_states):
                    state = StateId(1, step)
                    persist_node_shards(node, state, {shard: source}, session="run")
                    while not commit_node_shards(node, state, world, session="run", origin=ORIGIN):
                        assert time.monotonic() < deadline_s
                code = 0
            except BaseException:  # noqa: BLE001 the parent wants to know
                traceback.print_exc()
            finally:
                os._exit(code)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in nodes]

    store = DirectoryStore(tmp_path / "states")
    assert codes == [0] * world
    assert len(store.list_states()) == n_states
    assert store.scan().leftovers == ()
    assert all(verify_state(store, stored.state) == [] for stored in store.list_states())


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"nbytes": 1}', b"[" * 10**5])
def test_a_record_that_does_not_read_is_as_good_as_none(store, root, pair, damage):
    persist_node_shards(store, STATE, pair, session="run")
    (record,) = root.glob(f"*/{Shard(1, 2).file_name}.record.json")
    record.write_bytes(damage)

    assert not commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)
    persist_node_shards(store, STATE, pair, session="run")
    assert commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)
    assert verify_state(store, STATE) == []


# Sweeping.


def test_what_a_dead_writer_of_this_host_left_is_swept_at_once(store, root):
    leave(root, temporary_name(STATE, name_component(host_identity()), dead_pid(), NONCE))
    leave(root, trash_name(STATE, NONCE))

    assert len(store.sweep()) == 2
    assert list(root.iterdir()) == []


def test_what_may_be_of_the_living_is_left_for_a_day(store, root):
    names = [
        temporary_name(STATE, name_component(host_identity()), os.getpid(), NONCE),
        temporary_name(STATE, "another-host", dead_pid(), NONCE),
        shared_name(STATE, "run"),
    ]
    for name in names:
        leave(root, name, age_s=ABANDONED_S - 3600)
    assert store.sweep() == ()

    for name in names:
        for path in (*(root / name).iterdir(), root / name):
            os.utime(path, (path.stat().st_mtime - 7200,) * 2)
    assert sorted(store.sweep()) == sorted(names)
    assert list(root.iterdir()) == []


def test_one_new_file_shows_that_the_writer_lives(store, root):
    folder = leave(root, shared_name(STATE, "run"), age_s=2 * ABANDONED_S)
    (folder / "shard").touch()
    os.utime(folder, (0, 0))

    assert store.sweep() == ()


def test_a_lock_shows_that_the_writer_lives_even_if_its_number_seems_dead(store, root):
    """As in a container that numbers its processes anew but has the name of its host."""
    folder = leave(root, temporary_name(STATE, name_component(host_identity()), dead_pid(), NONCE))
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert store.sweep() == ()

    os.close(fd)
    assert len(store.sweep()) == 1


def test_sweepers_at_the_same_time_do_not_disturb_each_other(store, root):
    leave(root, shared_name(STATE, "run"))

    with ThreadPoolExecutor(8) as pool:
        for sweep in [pool.submit(store.sweep) for _ in range(200)]:
            sweep.result()


def test_a_writer_at_work_is_not_swept_by_another(store, root, pair):
    swept, one_sweeper = [], threading.Lock()

    def pace(_nbytes):
        with one_sweeper:
            swept.extend(DirectoryStore(root, host=host_identity()).sweep())

    persist(store, STATE, pair, origin=ORIGIN, throttle=pace)

    assert swept == []
    assert verify_state(store, STATE) == []


def test_a_deletion_that_broke_off_is_gone_for_readers_and_swept(store, root, pair):
    persist(store, STATE, pair, origin=ORIGIN)
    (root / STATE.name).rename(root / trash_name(STATE, NONCE))
    (root / trash_name(STATE, NONCE) / MANIFEST).unlink()

    assert states(store) == []
    assert store.scan().leftovers == (trash_name(STATE, NONCE),)
    assert store.sweep() == (trash_name(STATE, NONCE),)


# Persisting.


def test_another_world_may_save_the_same_step_in_a_later_epoch(store):
    with images(2) as two, images(3) as three:
        persist(store, StateId(1, 100), two, origin=ORIGIN)
        persist(store, StateId(2, 100), three, origin=ORIGIN)

    assert [stored.manifest.world for stored in store.list_states()] == [3, 2]


def test_ordinary_files_can_be_sources(store, tmp_path, pair):
    files = {}
    for shard, source in pair.items():
        path = tmp_path / shard.file_name
        path.write_bytes(content_of(source))
        files[shard] = os.open(path, os.O_RDONLY), source[1]

    persist(store, STATE, files, origin=ORIGIN)

    for fd, _ in files.values():
        os.close(fd)
    assert verify_state(store, STATE) == []


def test_a_slot_is_written_from_where_it_is_mapped(store, root):
    shard = Shard(0, 1)
    content = image_bytes(shard, nbytes=3 * 2**20 + 5)
    digest = compute_digest(memoryview(content))
    with SharedBuffer.create("slot", len(content)) as slot:
        slot.view[:] = content
        persist(store, STATE, {shard: (slot, digest)}, origin=ORIGIN)
        slot.view[-1] ^= 1
        with pytest.raises(CorruptError, match="1 of 1 chunks are not what was saved"):
            persist(store, LATER, {shard: (slot, digest)}, origin=ORIGIN)

    assert (root / STATE.name / shard.file_name).read_bytes() == content
    assert states(store) == [STATE]
    assert store.scan().leftovers == ()


def test_a_source_that_is_longer_or_shorter_is_refused(store, tmp_path, pair):
    for change in (-1, 1):
        path = tmp_path / f"source{change}"
        fd, digest = pair[Shard(0, 2)]
        path.write_bytes((content_of((fd, digest)) + b"\0")[: digest.nbytes + change])
        with path.open("rb") as file:
            shards = {**pair, Shard(0, 2): (file.fileno(), digest)}
            with pytest.raises(CorruptError, match=r"bytes"):
                persist(store, STATE, shards, origin=ORIGIN)
    assert states(store) == []


def test_the_position_of_a_source_is_neither_used_nor_moved(store, pair):
    for fd, _ in pair.values():
        os.lseek(fd, 77, os.SEEK_SET)

    persist(store, STATE, pair, origin=ORIGIN)

    assert verify_state(store, STATE) == []
    assert {os.lseek(fd, 0, os.SEEK_CUR) for fd, _ in pair.values()} == {77}


def test_nothing_stays_open(store, pair):
    def n_open():
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 as the kernel has it

    persist(store, STATE, pair, origin=ORIGIN)
    before = n_open()
    for step in range(300, 310):
        persist(store, StateId(1, step), pair, origin=ORIGIN)
        persist_node_shards(store, StateId(2, step), pair, session="run")
        assert commit_node_shards(store, StateId(2, step), 2, session="run", origin=ORIGIN)
        assert verify_state(store, StateId(1, step)) == []
        with pytest.raises(CheckpointError):
            persist(store, StateId(1, step), pair, origin=StateOrigin("x" * 300, 1))

    assert n_open() == before


@pytest.mark.parametrize("how", ["file://{}", "{}"])
def test_a_path_and_a_file_url_name_a_directory(tmp_path, pair, how):
    store = open_store(how.format(tmp_path / "states"))

    persist(store, STATE, pair, origin=ORIGIN)

    assert isinstance(store, DirectoryStore)
    assert (tmp_path / "states" / STATE.name).is_dir()


def test_a_state_is_verified_once_all_its_shards_were_read_back(store, root):
    with images(2, nbytes=CHUNK_BYTES + 77) as shards:
        for state in (STATE, LATER):
            persist(store, state, shards, origin=ORIGIN)
    records = store.read_manifest(STATE).shards
    path = root / LATER.name / Shard(1, 2).file_name
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    store.read_back(records[0], STATE)
    assert not any(stored.is_verified for stored in store.list_states())
    store.read_back(records[1], STATE)
    with pytest.raises(CorruptError, match=f"{path}: the chunk at byte {CHUNK_BYTES} is not"):
        store.read_back(records[1], LATER)

    verified = {stored.state: stored.is_verified for stored in store.list_states()}
    assert verified == {STATE: True, LATER: False}
    assert verify_state(store, STATE) == []
    # The newer one is not known to be good.
    assert prune(store, RetentionPolicy(keep_last=1), {LATER}) == []


# What a crash leaves.


def test_a_state_appears_with_all_of_it_on_disk(store, root, pair, monkeypatch):
    disk = DiskOrder(monkeypatch)

    persist(store, STATE, pair, origin=ORIGIN)

    final = root / STATE.name
    inodes = {path.stat().st_ino for path in (final, *final.iterdir())}
    assert len(inodes) == 1 + 2 * len(pair) + 1
    assert not inodes & disk.change("rename", STATE.name).unsynced
    assert disk.is_synced(root, root.parent)


def test_a_shard_of_many_nodes_is_on_disk_when_its_node_says_so(store, root, pair, monkeypatch):
    disk = DiskOrder(monkeypatch)

    persist_node_shards(store, STATE, pair, session="run")

    (folder,) = root.iterdir()
    files = list(folder.iterdir())
    assert len(files) == 3 * len(pair)
    assert disk.is_synced(folder, *files)


def test_the_records_of_the_nodes_go_once_the_manifest_is_on_disk(store, root, pair, monkeypatch):
    persist_node_shards(store, STATE, pair, session="run")
    disk = DiskOrder(monkeypatch)

    assert commit_node_shards(store, STATE, 2, session="run", origin=ORIGIN)

    final = root / STATE.name
    record = f"{Shard(0, 2).file_name}.record.json"
    first = next(c for c in disk.changes if c.what == "unlink" and c.name.endswith(".record.json"))
    assert first.name == record
    assert not {final.stat().st_ino, (final / MANIFEST).stat().st_ino} & first.unsynced
    assert final.stat().st_ino not in disk.change("rename", STATE.name).unsynced
    assert disk.is_synced(root)


def test_a_shard_is_not_put_into_what_another_node_has_taken(store, root, pair):
    taken = root / "taken"

    def take(_nbytes):
        for folder in root.glob("*.tmp*"):
            with suppress(FileNotFoundError):  # of the two shards' threads, one takes it
                folder.rename(taken)

    with pytest.raises(CheckpointError, match="another node renamed"):
        persist_node_shards(store, STATE, pair, session="run", throttle=take)

    assert list(taken.iterdir()) == []
