"""The disk goes wrong, or the writer is killed, at each call: a reader finds old or new, whole."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.checkpoint_images import ORIGIN, images
from support.persist_victim import COUNT, FAIL, FINISHED, HALF, KILL, KILL_HALF, NEW, OLD, REFUSED
from support.services import unavailable
from support.small_disk import small_disk

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.persist import persist
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, StateId

SUPPORT = Path(__file__).parents[1] / "support"
SCENARIOS = ["alone", "shared", "replace", "delete"]
cc = pytest.mark.cc
pytestmark = pytest.mark.quick_disk  # hundreds of syncs; what goes wrong is made up


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        unavailable("no C compiler for the faults of the disk")
    library = tmp_path_factory.mktemp("faults") / "disk_faults.so"
    words = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run([*words, str(SUPPORT / "disk_faults.c"), "-ldl"], check=True, timeout=60)
    return library


@pytest.fixture
def victim(shim, tmp_path):
    return Victim(shim, tmp_path)


class Victim:
    """Runs persist_victim.py."""

    def __init__(self, shim, folder):
        self._shim, self._folder = shim, folder

    def run(self, scenario, mode, *, error=0, only="", first=1, last=None, log=-1, nbytes=3000):
        if last is None:
            last = self.count(scenario, only=only, nbytes=nbytes)
        options = {
            "root": str(self._folder / "victim"),
            "scenario": scenario,
            "mode": mode,
            "error": error,
            "only": only,
            "first": first,
            "last": last,
            "log": log,
            "nbytes": nbytes,
        }
        env = {**os.environ, "LD_PRELOAD": str(self._shim), "PYTHONPATH": str(SUPPORT.parent)}
        words = [sys.executable, str(SUPPORT / "persist_victim.py"), json.dumps(options)]
        fds = () if log < 0 else (log,)
        options = {"capture_output": True, "text": True, "timeout": 600, "pass_fds": fds}
        done = subprocess.run(words, env=env, check=False, **options)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "Traceback" not in done.stderr, done.stderr[-4000:]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(rows) == last - first + 1
        return rows

    def count(self, scenario, **options):
        (row,) = self.run(scenario, COUNT, last=1, **options)
        assert row["code"] == FINISHED
        return row["counted"]


def require_whole(row, scenario):
    """What was there before is there, what is listed is good, and the next writer succeeds."""
    where = f"{scenario}, call {row['n']}: {row}"
    after, again = row["after"], row["again"]
    assert after["bad"] == [], where
    assert set(row["must"]) <= set(after["states"]) <= {OLD.step, NEW.step}, where
    if row["code"] == FINISHED:
        assert after["states"] == ([200] if scenario == "delete" else [200, 100]), where
    assert again["bad"] == [], where
    assert again["states"] == ([200] if scenario == "delete" else [200, 100]), where
    assert [name for name in again["leftovers"] if not name.startswith(".aside.")] == [], where


@cc
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("mode", [KILL, KILL_HALF], ids=["before", "within"])
def test_killed_at_any_call_a_reader_finds_the_old_or_the_new_whole(victim, scenario, mode):
    rows = victim.run(scenario, mode)

    assert len(rows) >= 8
    assert {row["code"] for row in rows} == {137}
    for row in rows:
        require_whole(row, scenario)
    # The last calls come after the state has appeared, so that both outcomes were seen.
    outcomes = {tuple(row["after"]["states"]) for row in rows}
    assert len(outcomes) == 2


@cc
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_call_that_fails_is_told_and_leaves_what_was_there(victim, scenario, error):
    rows = victim.run(scenario, FAIL, error=error)

    for row in rows:
        require_whole(row, scenario)
        assert row["code"] in {FINISHED, REFUSED}, row
        if row["code"] == REFUSED:
            assert os.strerror(error) in row["said"], row
            assert "cannot" in row["said"]
    # A state is deleted once it has its new name; what fails after that is left to the next writer.
    n_refused_min = 2 if scenario == "delete" else len(rows) // 3
    assert sum(row["code"] == REFUSED for row in rows) >= n_refused_min


@cc
def test_a_failed_write_or_sync_is_never_taken_for_success(victim):
    for only in ("write", "fsync", "create", "rename"):
        rows = victim.run("alone", FAIL, error=errno.EIO, only=only)
        assert rows
        for row in rows:
            require_whole(row, "alone")
            assert row["code"] == REFUSED, row
            assert row["after"]["leftovers"] == [], row


@cc
@pytest.mark.parametrize("nbytes", [3000, CHUNK_BYTES + 5000])
def test_short_and_interrupted_writes_are_gone_on_with(victim, nbytes):
    for mode, error in ((HALF, 0), (FAIL, errno.EINTR)):
        rows = victim.run("alone", mode, error=error, only="write", nbytes=nbytes)
        assert rows
        for row in rows:
            assert row["code"] == FINISHED, row
            require_whole(row, "alone")


@cc
@pytest.mark.parametrize("scenario", ["alone", "shared", "replace"])
def test_all_is_on_the_disk_before_it_appears(victim, tmp_path, scenario):
    """Nothing that a power cut could take back: each file, its directory, then the rename."""
    log = tmp_path / "calls"
    with log.open("wb") as file:
        victim.run(scenario, COUNT, log=file.fileno(), last=1)
    calls = [line.split("\t") for line in log.read_text().splitlines()]

    (appears,) = (
        number
        for number, (name, _, _, new) in enumerate(calls)
        if name == "rename" and new == NEW.name
    )
    before, after = calls[:appears], calls[appears + 1 :]
    _, root, temporary, _ = calls[appears]
    folder = f"{root}/{temporary}"
    # What several nodes wrote has had another name before one of them took it.
    for name, _, old, new in before:
        if name == "rename" and new == temporary:
            before = [
                [call[0], call[1].replace(f"{root}/{old}", folder), *call[2:]] for call in before
            ]
    written = [
        (number, path) for number, (name, path, _, _) in enumerate(before) if name == "write"
    ]
    assert len(written) >= 3
    for number, path in written:
        assert path.startswith(folder)
        assert ["fsync", path] in [call[:2] for call in before[number:]]
    # The last change of the directory itself is synced as well, and so is the rename.
    changes = {"create", "rename", "unlink"}
    changed = max(
        n for n, (name, path, *_) in enumerate(before) if name in changes and path == folder
    )
    assert ["fsync", folder] in [call[:2] for call in before[changed:]]
    assert ["fsync", root] in [call[:2] for call in after]


def test_a_disk_that_is_too_small_is_told_with_figures_before_it_is_full(tmp_path):
    with small_disk(tmp_path / "small", "24m") as folder, images(2, nbytes=4 * 2**20) as shards:
        store = DirectoryStore(folder / "states")
        persist(store, OLD, shards, origin=ORIGIN)
        persist(store, StateId(1, 150), shards, origin=ORIGIN)

        with pytest.raises(
            CheckpointError, match=r"needs 4\d+ bytes, and \d+ are free.*keep fewer"
        ):
            persist(store, NEW, shards, origin=ORIGIN)

        assert [stored.state.step for stored in store.list_states()] == [150, 100]
        assert store.scan().leftovers == ()
        assert verify_state(store, OLD) == []
        store.delete(OLD)
        persist(store, NEW, shards, origin=ORIGIN)
        assert verify_state(store, NEW) == []


def test_a_disk_that_fills_while_it_is_written_leaves_the_state_before(tmp_path):
    with small_disk(tmp_path / "small", "64m") as folder, images(1, nbytes=2**25) as shards:
        store = DirectoryStore(folder / "states")
        with images(1, seed=1) as old:
            persist(store, OLD, old, origin=ORIGIN)

        others = folder / "others"

        def others_write(_nbytes):
            if not others.exists():
                others.write_bytes(bytes(40 * 2**20))

        with pytest.raises(CheckpointError, match="No space left on device: free some space"):
            persist(store, NEW, shards, origin=ORIGIN, throttle=others_write)

        assert [stored.state for stored in store.list_states()] == [OLD]
        assert verify_state(store, OLD) == []
        assert store.scan().leftovers == ()


def test_without_inodes_or_into_a_read_only_place_the_reason_is_told(tmp_path):
    with images(1) as shards:
        blocked = tmp_path / "file"
        blocked.touch()
        with pytest.raises(CheckpointError, match=r"/file: Not a directory"):
            persist(DirectoryStore(blocked), NEW, shards, origin=ORIGIN)
        with pytest.raises(CheckpointError, match="/proc/gpuops-states"):
            persist(DirectoryStore(Path("/proc/gpuops-states")), NEW, shards, origin=ORIGIN)


@cc
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_killed_at_every_call_of_every_kind(victim):
    """All kinds of calls, larger images that take several writes, each error of a disk."""
    for scenario in SCENARIOS:
        for nbytes in (1, 70_000, 2 * CHUNK_BYTES + 1):
            for mode in (KILL, KILL_HALF):
                for row in victim.run(scenario, mode, nbytes=nbytes):
                    require_whole(row, scenario)
        for error in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS):
            for row in victim.run(scenario, FAIL, error=error):
                require_whole(row, scenario)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak_killed_at_any_moment(tmp_path):
    """Real SIGKILL at moments spread over the writing, 200 times into one directory."""
    store = DirectoryStore(tmp_path / "states")
    with images(2, nbytes=CHUNK_BYTES) as shards:
        persist(store, StateId(0, 0), shards, origin=ORIGIN)
        begun = persist(store, StateId(0, 1), shards, origin=ORIGIN).seconds
        for step in range(2, 202):
            before = [stored.state for stored in store.list_states()]
            pid = os.fork()
            if pid == 0:
                try:
                    persist(
                        DirectoryStore(tmp_path / "states"), StateId(0, step), shards, origin=ORIGIN
                    )
                finally:
                    os._exit(0)
            killer = threading.Timer(begun * 1.2 * (step % 50) / 50, os.kill, (pid, signal.SIGKILL))
            killer.start()
            os.waitpid(pid, 0)
            killer.cancel()
            killer.join()
            there = [stored.state for stored in store.list_states()]
            assert there in (before, [StateId(0, step), *before])
            assert verify_state(store, there[0]) == []
            store.sweep()
            assert store.scan().leftovers == ()
            for state in there[3:]:
                store.delete(state)
