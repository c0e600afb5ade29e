"""Two jobs never save into one directory at once, and one that was requeued always may."""

import itertools
import json
import os

import pytest

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.directory_lock import (
    EXIT_GRACE_S,
    LOCK_NAME,
    RENEWAL_TIMEOUT_S,
    STALE_S,
    DirectoryLock,
    DirectoryLockedError,
    DirectoryLocks,
    LockProcess,
    is_alive,
    lock_conflict,
    parse_owner,
    this_process,
)
from gpuops.host.clock import FakeClock

_numbers = itertools.count(1)


class World:
    """Processes on hosts that claim one directory; time passes only while one of them waits."""

    def __init__(self, root):
        self.root, self.clock, self.living, self.each_second = root, FakeClock(), set(), []

    def process(self, host="n1"):
        pid = next(_numbers)
        self.living.add(pid)
        me = LockProcess(
            host,
            pid,
            lambda pid, _ticks: pid in self.living,
            random_bytes=lambda n: next(_numbers).to_bytes(n),
            clock=self.clock,
            sleep=self.sleep,
        )
        return DirectoryLock(self.root, me)

    def sleep(self, seconds):
        self.clock.advance(seconds)
        for act in self.each_second:
            act()

    def kill(self, claim):
        self.living.discard(claim._process.pid)

    def lives(self, claim):
        """Have *claim* renewed as time passes."""

        def act():
            claim.renew()
            found = (self.root / LOCK_NAME).stat()
            now_ns = found.st_mtime_ns + 10**9  # the clock of the file system moves on
            os.utime(self.root / LOCK_NAME, ns=(now_ns, now_ns))

        self.each_second.append(act)

    @property
    def owner(self):
        return parse_owner((self.root / LOCK_NAME).read_bytes())

    def seconds_of(self, act):
        began_ns = self.clock.mono_ns()
        act()
        return (self.clock.mono_ns() - began_ns) / 1e9


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "states")


def test_a_second_job_is_refused_while_the_first_lives(world):
    first, second = world.process(), world.process()
    first.acquire("job-a")

    with pytest.raises(
        DirectoryLockedError,
        match=r"another job saves into .*states: job-a on n1, its keeper's pid \d+",
    ):
        second.acquire("job-b")
    first.acquire("job-a")
    assert world.owner.job == "job-a"

    first.release()
    assert world.seconds_of(lambda: second.acquire("job-b")) == 0


def test_a_second_job_on_another_host_is_refused_by_the_sign_of_life(world):
    first, second = world.process("n1"), world.process("n2")
    first.acquire("job-a")
    world.lives(first)

    def refused():
        with pytest.raises(DirectoryLockedError, match="job-a on n1"):
            second.acquire("job-b")

    assert world.seconds_of(refused) <= EXIT_GRACE_S + 1


def test_who_leaves_meanwhile_is_followed(world):
    first, second = world.process(), world.process()
    first.acquire("job-a")
    world.each_second.append(first.release)

    assert world.seconds_of(lambda: second.acquire("job-b")) <= 2
    assert world.owner.job == "job-b"


def test_an_owner_of_this_host_that_was_killed_is_followed_at_once(world):
    first, second = world.process(), world.process()
    first.acquire("job-a")
    world.kill(first)

    assert world.seconds_of(lambda: second.acquire("job-b")) == 0
    assert world.owner.job == "job-b"


def test_an_owner_elsewhere_is_followed_once_it_shows_no_life(world):
    first, second = world.process("n1"), world.process("n2")
    first.acquire("job-a")

    assert STALE_S <= world.seconds_of(lambda: second.acquire("job-b")) <= STALE_S + 2
    world.lives(second)
    with pytest.raises(DirectoryLockedError, match="job-b on n2"):
        first.acquire("job-a")  # it was frozen, and thaws


def test_the_nodes_of_one_run_share_it_and_follow_a_peer_that_is_lost(world):
    first, second = world.process("n1"), world.process("n2")
    first.acquire("job-a")

    assert world.seconds_of(lambda: second.acquire("job-a")) == 0
    assert world.owner.host == "n1"
    world.clock.advance(STALE_S)
    second.acquire("job-a")
    assert world.owner.host == "n2"


def test_a_run_without_a_name_is_nobodys_peer(world):
    first, second = world.process(), world.process()
    first.acquire("")
    with pytest.raises(DirectoryLockedError, match="a job on n1"):
        second.acquire("")


def test_who_adopts_a_keeper_has_its_directory(world):
    keeper = world.process()
    keeper.acquire("job-a")
    keeper.acquire("job-b")

    assert world.owner.job == "job-b"


def test_of_several_that_follow_one_does(world):
    dead = world.process()
    dead.acquire("job-0")
    world.kill(dead)
    others = [world.process() for _ in range(3)]
    seen = others[0]._read()
    others[1].acquire("job-1")

    others[0]._break_stale(seen)  # of what it saw before the other one was faster

    assert world.owner.job == "job-1"
    assert sorted(path.name for path in world.root.iterdir()) == [LOCK_NAME]


def test_a_look_before_the_workers_start_describes_another_job_that_stays(world):
    first, second, elsewhere = world.process(), world.process(), world.process("n2")
    assert second.conflict("job-b") is None
    assert not world.root.exists()
    first.acquire("job-a")

    assert "job-a on n1" in second.conflict("job-b")
    assert second.conflict("job-a") is None  # a peer of the same run
    assert second.conflict("job-b", first._process.pid) is None  # the keeper that its agent adopted
    assert (
        world.seconds_of(lambda: elsewhere.conflict("job-b")) <= RENEWAL_TIMEOUT_S
    )  # `hold` will tell
    world.lives(first)
    assert "job-a on n1" in elsewhere.conflict("job-b")
    assert world.owner.job == "job-a"


def test_a_look_before_the_workers_start_lets_a_job_leave_and_follows_a_dead_one(world):
    first, second, third = world.process(), world.process(), world.process()
    first.acquire("job-a")
    world.each_second.append(first.release)
    assert world.seconds_of(lambda: second.conflict("job-b")) <= 2

    third.acquire("job-c")
    world.kill(third)
    assert world.seconds_of(lambda: second.conflict("job-b")) == 0


def test_a_look_at_what_cannot_be_read_or_claimed_tells_nothing(tmp_path):
    (tmp_path / "file").write_text("")

    for address in ("s3://bucket/a", str(tmp_path / "file"), str(tmp_path / "missing")):
        assert lock_conflict(address, "job-a", FakeClock(), None, pytest.fail) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"job": 1}', b"\xff" * 9000, b"[" * 5000])
def test_what_names_nobody_is_waited_for_and_then_put_away(world, content):
    world.root.mkdir()
    (world.root / LOCK_NAME).write_bytes(content)

    assert world.seconds_of(lambda: world.process().acquire("job-a")) >= STALE_S
    assert world.owner.job == "job-a"


def test_a_process_is_known_by_when_it_began(world):
    me = this_process()
    DirectoryLock(world.root, me).acquire("job-a")

    owner = world.owner
    assert owner.pid == os.getpid()
    assert is_alive(owner.pid, owner.start_ticks)
    assert not is_alive(owner.pid, owner.start_ticks + 1)
    assert json.loads((world.root / LOCK_NAME).read_bytes())["since"].endswith("Z")


def test_stores_are_claimed_while_they_are_in_use_and_urls_are_not(tmp_path):
    claims = DirectoryLocks(lambda: "job-a", lambda: True, this_process())
    (tmp_path / "file").write_text("")

    store = claims.open_store(str(tmp_path / "a"))
    claims.open_store(f"file://{tmp_path}/b")
    claims.open_store("memory://c")
    claims.open_store(str(tmp_path / "file" / "d"))  # cannot be made: whoever writes will tell

    assert isinstance(store, DirectoryStore)
    assert store.scan().states == ()
    assert (tmp_path / "a" / LOCK_NAME).exists()
    assert (tmp_path / "b" / LOCK_NAME).exists()
    claims.close()
    assert list((tmp_path / "a").iterdir()) == list((tmp_path / "b").iterdir()) == []
