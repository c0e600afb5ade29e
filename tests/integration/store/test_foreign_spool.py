"""Root reads the spool of a user who puts links, FIFOs and others' files into it."""

import json
import os
import shutil
import signal

import pytest
from support.user_spools import DATA, LINES, NOW_US, ORIGIN, OTHER, USER, as_user

from gpuops.errors import SpoolError
from gpuops.host.clock import FakeClock
from gpuops.store.spool.forward import measure_users

HANGS_S = 20

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root reads what others write")


@pytest.fixture(autouse=True)
def _ends():
    """A read that blocks would block the whole suite."""

    def give_up(*_):
        pytest.fail("root waits for a file of the user")  # an OSError would be taken for the file's

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def state(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def mark_is_a_link(machine):
    machine.lay(suffix="open")
    (machine.prey / "passwd").write_text("root:x:0:0")
    for name in ("00000001.sent.new", "00000001.sent"):
        path = machine.spool / ORIGIN / name
        path.symlink_to(machine.prey / "passwd")
        machine.own(path)
    machine.hold_lock(machine.spool / ORIGIN / "00000001.open")


def mark_is_a_fifo(machine):
    machine.lay()
    os.mkfifo(machine.spool / ORIGIN / "00000001.sent", 0o600)
    machine.own(machine.spool / ORIGIN / "00000001.sent")


def rejected_is_a_link(machine):
    machine.lay(b"noise\n")
    (machine.spool / "rejected").symlink_to(machine.prey)
    machine.own(machine.spool / "rejected")


def rejected_file_is_a_hard_link(machine):
    machine.lay(b"noise\n")
    (machine.prey / "shadow").write_text("root:!")
    (machine.spool / "rejected").mkdir()
    machine.own(machine.spool / "rejected")
    os.link(machine.prey / "shadow", machine.spool / "rejected" / f"{ORIGIN}-00000001.jsonl")


def dropped_is_a_hard_link(machine):
    machine.lay(b"noise\n")
    rejected = machine.spool / "rejected"
    rejected.mkdir()
    machine.own(rejected)
    (machine.prey / "shadow").write_text("root:!")
    os.link(machine.prey / "shadow", rejected / "dropped")
    with (rejected / "full.jsonl").open("wb") as file:
        file.truncate(2**24)
    machine.own(rejected / "full.jsonl")


def segment_is_a_hard_link(machine):
    """What it has would be kept in a folder of the user's, or sent as root's."""
    (machine.spool / ORIGIN).mkdir()
    machine.own(machine.spool / ORIGIN)
    (machine.prey / "00000009.ready").write_bytes(DATA)
    os.link(machine.prey / "00000009.ready", machine.spool / ORIGIN / "00000001.ready")


def segment_is_a_link(machine):
    (machine.spool / ORIGIN).mkdir()
    machine.own(machine.spool / ORIGIN)
    (machine.prey / "00000009.ready").write_bytes(DATA)
    (machine.spool / ORIGIN / "00000001.ready").symlink_to(machine.prey / "00000009.ready")


def segment_is_a_fifo(machine):
    (machine.spool / ORIGIN).mkdir()
    machine.own(machine.spool / ORIGIN)
    os.mkfifo(machine.spool / ORIGIN / "00000001.ready")
    machine.own(machine.spool / ORIGIN / "00000001.ready")


def segment_is_a_device(machine):
    (machine.spool / ORIGIN).mkdir()
    machine.own(machine.spool / ORIGIN)
    try:
        os.mknod(machine.spool / ORIGIN / "00000001.ready", 0o20600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("this file system takes no devices")
    machine.own(machine.spool / ORIGIN / "00000001.ready")


def origin_is_a_link(machine):
    (machine.prey / "00000001.ready").write_bytes(DATA)
    (machine.spool / ORIGIN).symlink_to(machine.prey)
    machine.own(machine.spool / ORIGIN)


def origin_is_anothers(machine):
    machine.lay()
    machine.own(machine.spool / ORIGIN, OTHER)
    machine.own(machine.spool / ORIGIN / "00000001.ready", OTHER)


def lock_is_a_link(machine):
    machine.lay()
    (machine.spool / ".flush.lock").symlink_to(machine.prey / "made")


ATTACKS = (
    mark_is_a_link,
    mark_is_a_fifo,
    rejected_is_a_link,
    rejected_file_is_a_hard_link,
    dropped_is_a_hard_link,
    segment_is_a_hard_link,
    segment_is_a_link,
    segment_is_a_fifo,
    segment_is_a_device,
    origin_is_a_link,
    origin_is_anothers,
    lock_is_a_link,
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_root_refuses_a_users_spool_as_its_own(machine, attack):
    attack(machine)
    before = state(machine.prey)

    with pytest.raises(SpoolError, match=f"belongs to user {USER}, not to 0; root forwards"):
        machine.flush()

    assert state(machine.prey) == before
    assert machine.events() == []


@pytest.mark.parametrize("attack", ATTACKS)
def test_root_forwards_a_users_spool_and_touches_nothing_of_its_own(machine, attack):
    attack(machine)
    before = state(machine.prey)

    report = machine.forward()

    assert state(machine.prey) == before
    assert report.note is None
    assert {event.kind for event in machine.events()} <= {"tool.failed", *kinds(LINES)}
    assert report.sent in {0, len(LINES)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_measure_of_users_spools_opens_nothing_of_another(machine, attack):
    attack(machine)
    before = state(machine.prey)

    found = measure_users(machine.options, clock=FakeClock(NOW_US), deadline_s=5)

    assert state(machine.prey) == before
    assert found.bytes in {0, len(DATA), len(b"noise\n")}
    is_of_another = attack.__name__.startswith(("segment", "origin"))
    assert (found.segments == 0) == is_of_another


def kinds(lines):
    return {line.event.kind for line in lines}


class Swapping(FakeClock):
    """Replaces the user's origin by a link when it is asked for the time for the *n*-th time."""

    def __init__(self, machine, n):
        super().__init__(NOW_US)
        self._machine = machine
        self._left = n

    def now_us(self):
        self._left -= 1
        if self._left == 0:
            origin = self._machine.spool / ORIGIN
            origin.rename(self._machine.spool / "away")
            origin.symlink_to(self._machine.prey)
        return super().now_us()


@pytest.mark.parametrize(("n", "sent"), [(1, 0), (2, len(LINES))])
def test_an_origin_that_becomes_a_link_during_the_work_costs_root_no_file(machine, n, sent):
    """Once after the spool was listed, once within the transaction of its lines."""
    machine.lay()
    (machine.prey / "00000001.ready").write_bytes(DATA)
    (machine.prey / "00000001.sent").write_text("0 root's")
    before = state(machine.prey)

    report = machine.forward(Swapping(machine, n))

    assert (machine.spool / ORIGIN).is_symlink()
    assert state(machine.prey) == before
    assert report.sent == sent


def test_the_own_spool_of_root_loses_no_file_through_a_swapped_origin(machine):
    """Before: a segment was removed by its path, also through a link."""
    machine.own(machine.lay(), 0)
    machine.own(machine.spool / ORIGIN, 0)
    machine.own(machine.spool, 0)
    (machine.prey / "00000001.ready").write_bytes(DATA)
    before = state(machine.prey)

    machine.flush(Swapping(machine, 1))

    assert state(machine.prey) == before


def test_a_user_who_swaps_folders_all_the_time_reaches_nothing(machine):
    """The attacker is a process without rights that never stops; root passes forty times."""
    (machine.prey / "00000001.ready").write_bytes(DATA)
    machine.prey.chmod(0o711)
    before = state(machine.prey)
    machine.lay()
    pid = as_user(lambda: swap_for_ever(machine))
    try:
        for _ in range(40):
            machine.forward()
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)

    assert os.WTERMSIG(status) == signal.SIGKILL, "the attacker ended by itself"
    assert state(machine.prey) == before
    assert {event.node for event in machine.events()} <= {"n1"}


def swap_for_ever(machine):
    origin, away, link = (machine.spool / name for name in (ORIGIN, "away", "link"))
    while True:
        try:
            if not origin.exists():
                origin.mkdir(mode=0o700)
            (origin / "00000001.ready").write_bytes(DATA)
            (origin / "00000002.ready").symlink_to(machine.prey / "00000001.ready")
            link.symlink_to(machine.prey)
            origin.rename(away)
            link.rename(origin)
            origin.rename(link)
            away.rename(origin)
        except OSError:
            pass
        link.unlink(missing_ok=True)
        (origin / "00000002.ready").unlink(missing_ok=True)
        shutil.rmtree(away, ignore_errors=True)


def test_a_mount_of_the_user_is_not_entered(machine):
    """A file system of the user's need not answer; a bind mount stands for it."""
    machine.lay()
    for number in (2, 3):
        machine.lay(number=number, origin=f"n1.00000000000{number}")
    if (pid := os.fork()) == 0:
        code = 1
        try:
            code = _forward_under_a_mount(machine)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)  # not a child that another test has left
    if os.waitstatus_to_exitcode(status) == 77:
        pytest.skip("no mounts here")

    assert os.waitstatus_to_exitcode(status) == 0


def _forward_under_a_mount(machine):
    """Return 0 if only the segment outside the mounts is read, 77 where nothing can be mounted."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, private, bind = 0x20000, 0x44000, 0x1000
    if libc.unshare(clone_newns) or libc.mount(b"none", b"/", None, private, None):
        return 77
    for path in ("n1.000000000002", "n1.000000000003/00000003.ready"):
        target = os.fsencode(machine.spool / path)
        if libc.mount(target, target, None, bind, None):
            return 77
    report = machine.forward()
    return 0 if (report.sent, report.corrupt, report.note) == (len(LINES), 0, None) else 1


def test_what_root_refuses_is_kept_where_only_root_reads(machine):
    machine.lay(b"noise\n" + DATA)

    report = machine.forward()

    kept = machine.roots / "users" / str(USER) / "rejected"
    (path,) = kept.iterdir()
    assert (report.sent, report.corrupt) == (len(LINES), 1)
    assert json.loads(path.read_text())["raw"] == "noise\n"
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o600)
    assert (kept.parent.stat().st_uid, kept.parent.stat().st_mode & 0o777) == (0, 0o700)
    assert list(machine.spool.iterdir()) == []


def test_a_segment_without_end_is_not_read(machine):
    path = machine.lay(DATA)
    os.truncate(path, 2**40)

    report = machine.forward()

    assert (report.sent, report.corrupt, report.note) == (0, 1, None)
    assert not path.exists()
