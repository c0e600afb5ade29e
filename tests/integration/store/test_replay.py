"""Refused lines are sent again: once, as those of their user, and none is lost on the way."""

import errno
import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
from support.command import gpuops
from support.stories import START_US, incident
from support.user_spools import LINES, NOW_US, ORIGIN, RUN, USER, Machine, as_user, line, raw

from gpuops.host.clock import FakeClock
from gpuops.store import schema
from gpuops.store.checks import check_runs
from gpuops.store.spool import replay as replay_module
from gpuops.store.spool.format import LINE_BYTES_MAX, encode_line
from gpuops.store.spool.read import (
    HEAD_BYTES,
    BadLine,
    RejectedLine,
    count_dropped,
    count_rejected,
    quarantine,
)
from gpuops.store.spool.replay import replay_rejected
from gpuops.store.spool.segments import SpoolSegment
from gpuops.store.spool.send import SpoolSender, flush_lock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root forwards what others write")


NO_RELEASE_TAKES = line("attempt.progress", {"minute_us": "soon"}, seq=501)


def records_of(machine, uid=None):
    return machine.roots / "users" / str(uid) if uid else machine.roots


def keep(machine, lines, *, uid=None, number=1, origin=ORIGIN, reason="-"):
    """Leave *lines* (events or bytes) where an older release, which refused them, kept them."""
    records = records_of(machine, uid)
    records.mkdir(parents=True, exist_ok=True, mode=0o700)
    segment = SpoolSegment(records, origin, number, True, uid or 0, records)
    found = [item if isinstance(item, bytes) else encode_line(item) for item in lines]
    quarantine(
        records, [RejectedLine(segment, n, BadLine(reason, data)) for n, data in enumerate(found)]
    )


def kept(machine, uid=None):
    """Return (reason, raw) of each refused line, in order."""
    folder = records_of(machine, uid) / "rejected"
    texts = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
    entries = [json.loads(text) for found in texts for text in found]
    return [(e["reason"], e["raw"].encode("utf-8", "surrogateescape")) for e in entries]


def replay(machine, *, dry_run=False, deadline_s=30, clock=None, **changes):
    return replay_rejected(
        replace(machine.options, **changes),
        dry_run=dry_run,
        deadline_s=deadline_s,
        clock=clock or FakeClock(NOW_US),
    )


def test_lines_that_this_release_takes_are_stored_once_and_the_others_stay(either):
    """Root's and a user's, each with the uid of the directory that they are kept in."""
    other = "n1.0123456789ab"
    theirs = [replace(item, origin=other, event=other_event(item.event)) for item in LINES]
    keep(either, [*LINES[:2], NO_RELEASE_TAKES, *LINES[2:]])
    keep(either, [NO_RELEASE_TAKES, *theirs], uid=USER, origin=other)

    first, second = replay(either), replay(either)

    assert (first.stored, first.already_there, first.refused) == (2 * len(LINES), 0, 2)
    assert (second.stored, second.already_there, second.refused) == (0, 0, 2)
    reason = "attempt.progress: minute_us is not a whole number"
    assert kept(either) == [(reason, encode_line(NO_RELEASE_TAKES))]
    assert kept(either, USER) == [(f"it claims the origin {ORIGIN}", encode_line(NO_RELEASE_TAKES))]
    found = {row["id"]: row["origin_uid"] for row in either.rows(schema.events)}
    assert found == {i.event.id: 0 for i in LINES} | {i.event.id: USER for i in theirs}


def other_event(event):
    return replace(event, id=f"{event.id[:-4]}f{event.id[-3:]}", run_id="another-run")


def test_a_line_is_kept_whole_and_byte_for_byte(machine):
    """One of 20 kB with a field that only a newer release knows, and one that is no text."""
    long = encode_line(line("incident.recorded", {"title": "x" * 20_000}))
    newer = reseal(long, b'"v":1', b'"later":[2],"v":1')
    noise = b'\xff\xfe \\udcff "\xc3\xa9"' + b"z" * HEAD_BYTES + b"\r\n"
    machine.lay(newer + noise + b"y" * (LINE_BYTES_MAX + 9) + b"\n")

    machine.forward()
    before = kept(machine, USER)
    report = replay(machine)

    assert [data for _, data in before] == [newer, noise, b"y" * HEAD_BYTES]
    assert kept(machine, USER) == before
    assert "it was too long: only its head was kept" in report.reasons


def reseal(data, old, new):
    import zlib

    body = data[len(b'{"crc":"12345678",') : -1].replace(old, new)
    return b'{"crc":"%08x",%s\n' % (zlib.crc32(body), body)


def test_a_replay_that_is_killed_after_its_commit_doubles_nothing(either):
    keep(either, LINES)
    before = kept(either)

    def run():
        replay_module._rewrite = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        replay(either)

    _, status = os.waitpid(as_user(run, uid=0), 0)
    after_kill = kept(either)
    report = replay(either)

    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert after_kill == before
    assert (report.stored, report.already_there, report.refused) == (0, len(LINES), 0)
    assert kept(either) == []
    assert sorted(e.id for e in either.events()) == sorted(item.event.id for item in LINES)
    assert sum(row["rows"] for row in either.rows(schema.ingest_log)) == len(LINES)


def test_a_dry_run_says_the_same_and_changes_nothing(either):
    keep(either, [*LINES, NO_RELEASE_TAKES])
    before = kept(either)

    tried = replay(either, dry_run=True)

    assert (tried.stored, tried.refused) == (len(LINES), 1)
    assert kept(either) == before
    assert either.events() == []
    assert replay(either) == tried


def hostile():
    """What a user may have had refused to be replayed as root's."""
    blames = incident(RUN, 0)
    forged = encode_line(line("check.ran", {"suite": "health"}, seq=601))
    return [
        line("node.drained", {"reason": "mine", "actor": "root"}, seq=600),
        forged,
        line("node.resumed", {"reason": "mine", "actor": "root"}, seq=602),
        line("node.seen", {"kernel": "6.66"}, seq=603),
        line("incident.recorded", {**blames.to_json(), "run": None}, run_id=None, seq=604),
        line("run.phase", {"origin_uid": 0, "uid": 0}, seq=605, t_us=NOW_US - 15 * 86_400_000_000),
        b'{"origin_uid":0,"uid":0,"records":"..","raw":"x"}\n',
        reseal(forged, b'"v":1', b'"uid":0,"v":1'),
        b'"}\\n{"origin":"root.0123456789ab","reason":"x","raw":"y"}\n',
    ]


def test_a_users_line_gains_nothing_by_a_replay(machine):
    machine.lay(
        b"".join(item if isinstance(item, bytes) else encode_line(item) for item in hostile())
    )
    machine.forward()
    keep(machine, hostile(), uid=USER, number=2)
    (records_of(machine) / "users" / "0" / "rejected").mkdir(parents=True)
    before = [data for _, data in kept(machine, USER)]

    report = replay(machine)

    assert (report.stored, report.already_there) == (0, 0), report
    assert [data for _, data in kept(machine, USER)] == before
    assert "its time is not within the last 14 days" in report.reasons
    for table in (schema.strikes, schema.node_states, schema.components, check_runs, schema.boots):
        assert machine.rows(table) == []


def test_a_run_of_another_user_is_not_taken_by_a_replay(machine):
    keep(machine, [line("run.ended", {"outcome": "failed"}, origin="n1.0123456789ab")], uid=65533)
    machine.lay()
    machine.forward()

    report = replay(machine)

    assert (report.stored, report.refused) == (0, 1)
    assert [row["outcome"] for row in machine.rows(schema.runs)] == [None]


@pytest.mark.parametrize("way", ["a link", "another's"])
def test_records_that_are_not_roots_are_not_read(machine, way):
    theirs = (
        machine.own(machine.base / "theirs") if (machine.base / "theirs").mkdir() is None else 0
    )
    keep(machine, LINES)
    (machine.roots / "rejected").rename(theirs / "rejected")
    if way == "a link":
        (machine.roots / "rejected").symlink_to(theirs / "rejected")
    else:
        (theirs / "rejected").rename(machine.roots / "rejected")
        machine.own(machine.roots / "rejected")

    assert replay(machine).stored == 0
    assert machine.events() == []


@pytest.mark.parametrize("uid", [None, USER])
def test_while_one_flushes_nothing_is_replayed(machine, uid):
    keep(machine, LINES, uid=uid)
    locked = records_of(machine, uid).parent if uid else machine.roots
    with flush_lock(locked, 1) as held:
        report = replay(machine, deadline_s=0.2)

    assert held
    assert (report.stored, report.note) == (0, f"a flusher is working on {locked}")
    assert replay(machine).stored == len(LINES)


def test_replays_and_flushes_at_once_lose_and_double_nothing(either):
    lines = [line("attempt.progress", {"minute_us": START_US + n}, seq=n) for n in range(1, 61)]
    bad = [replace(NO_RELEASE_TAKES, seq=900 + n) for n in range(20)]
    bad = [replace(b, event=replace(b.event, id=f"{b.event.id[:-4]}f{b.seq}")) for b in bad]
    for n in range(10):
        keep(either, lines[n * 3 : n * 3 + 3], uid=USER, number=n + 1)
    for n in range(10):
        part = [*lines[30 + n * 3 : 33 + n * 3], *bad[n * 2 : n * 2 + 2]]
        either.lay(raw(part), number=n + 1)
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(4)

    def run(act):
        start.wait(30)
        act(either)

    acts = (replay, replay, Machine.forward, Machine.forward)
    workers = [fork.Process(target=run, args=(act,)) for act in acts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    either.forward()
    replay(either)

    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sorted(e.id for e in either.events(kind="attempt.progress")) == sorted(
        item.event.id for item in lines
    )
    assert sorted(data for _, data in kept(either, USER)) == sorted(map(encode_line, bad))


def test_a_damaged_record_stays_and_blocks_no_other(machine):
    keep(machine, LINES)
    path = machine.roots / "rejected" / f"{ORIGIN}-00000001.jsonl"
    junk = b'{"raw": 5}\n[]\n' + b"[" * 5000 + b'\n{"origin":"n1'
    path.write_bytes(path.read_bytes() + junk)

    report = replay(machine)

    assert (report.stored, report.refused) == (len(LINES), 4)
    assert path.read_bytes() == junk


def test_what_is_not_tried_in_time_stays_for_the_next_replay(machine):
    keep(machine, LINES)

    class Late(FakeClock):
        def mono_ns(self):
            self.advance(1)
            return super().mono_ns()

    report = replay(machine, clock=Late(NOW_US), deadline_s=2)

    assert (report.stored, len(kept(machine))) == (0, len(LINES))
    assert "passed" in report.note
    assert replay(machine).stored == len(LINES)


def test_a_store_that_is_lost_midway_costs_no_line(machine, monkeypatch):
    monkeypatch.setattr(replay_module, "BATCH_LINES", 4)
    keep(machine, LINES)
    resend, calls = SpoolSender.resend, []

    def lose(self, *args, **kwargs):
        from gpuops.errors import StoreError

        calls.append(1)
        if len(calls) == 2:
            raise StoreError("the store went away")
        return resend(self, *args, **kwargs)

    monkeypatch.setattr(SpoolSender, "resend", lose)
    report = replay(machine)

    assert (report.stored, report.note) == (4, "the store went away")
    assert [data for _, data in kept(machine)] == list(map(encode_line, LINES[4:]))
    assert replay(machine).stored == len(LINES) - 4


def test_a_file_that_cannot_be_rewritten_keeps_its_lines(machine, monkeypatch):
    keep(machine, [*LINES, NO_RELEASE_TAKES])
    before = kept(machine)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(replay_module, "replace_file", full)
        first = replay(machine)
    after = kept(machine)
    second = replay(machine)

    assert (first.stored, after) == (len(LINES), before)
    assert "No space left" in first.note
    assert (second.stored, second.already_there, second.note) == (0, len(LINES), None)


def test_what_is_left_is_on_the_disk_before_the_old_file_goes(machine, monkeypatch):
    keep(machine, [*LINES, NO_RELEASE_TAKES])
    path = machine.roots / "rejected" / f"{ORIGIN}-00000001.jsonl"
    old, synced, fsync = path.stat().st_ino, [], os.fsync

    def sync(fd):
        synced.append((os.fstat(fd).st_ino, path.stat().st_ino))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    replay(machine)

    new = path.stat().st_ino
    assert (new, old) in synced
    assert (path.parent.stat().st_ino, new) in synced


def test_half_a_record_does_not_spoil_the_next_one(machine, monkeypatch):
    """A disk that is full takes a part of it."""
    keep(machine, LINES[:1])
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="No space left"):
            keep(machine, LINES[1:2])

    keep(machine, LINES[1:])

    assert [data for _, data in kept(machine)] == list(map(encode_line, LINES))


def test_incidents_have_room_when_all_else_is_full(machine):
    """A file of nothing stands for what was refused before: three quarters of the bound."""
    folder = records_of(machine, USER) / "rejected"
    folder.mkdir(parents=True)
    with (folder / "n0.000000000000-00000001.jsonl").open("wb") as file:
        file.truncate(3 * 2**18)
    recorded = line("incident.recorded", {"id": "mine"}, seq=700)
    machine.lay(raw([NO_RELEASE_TAKES, recorded]))

    machine.forward()

    assert count_dropped(records_of(machine, USER)) == 1
    found = (folder / f"{ORIGIN}-00000001.jsonl").read_text()
    assert json.loads(found)["raw"].encode() == encode_line(recorded)


def test_newer_reasons_do_not_break_the_bound(machine, monkeypatch):
    monkeypatch.setattr(SpoolSender, "rejected_bytes_max", 700)
    keep(machine, [NO_RELEASE_TAKES] * 3)

    replay(machine)

    assert (machine.roots / "rejected" / f"{ORIGIN}-00000001.jsonl").stat().st_size < 2000
    assert {reason for reason, _ in kept(machine)} == {"-"}


def test_the_command_says_what_became_of_the_lines(machine):
    env = {
        "GPUOPS_SPOOL": str(machine.roots),
        "GPUOPS_SPOOL_USERS": str(machine.users),
        "GPUOPS_STORE": machine.url,
        "SLURMD_NODENAME": "n1",
    }
    keep(machine, [*LINES, NO_RELEASE_TAKES, b"noise\x1b[31m\n"])

    tried = json.loads(gpuops("db", "replay", "--dry-run", "--json", env=env).stdout)
    done = gpuops("db", "replay", env=env)
    with flush_lock(machine.roots, 1):
        busy = gpuops("db", "replay", "--dry-run", "--deadline", "0.2", env=env)

    assert (tried["schema"], tried["stored"], tried["refused"]) == (
        "gpuops.db-replay/1",
        len(LINES),
        2,
    )
    assert {"reason": "no checksum at its start", "lines": 1} in tried["reasons"]
    assert done.returncode == 0, done.stderr
    assert f"{len(LINES)} stored\n0 already there\n2 refused again\n" in done.stdout
    assert "  1: attempt.progress: minute_us is not a whole number\n" in done.stdout
    assert (busy.returncode, "a flusher is working on" in busy.stderr) == (75, True)
    assert "0 would be stored\n" in busy.stdout
    assert count_rejected(machine.roots) == 2
