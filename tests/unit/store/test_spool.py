"""The writing end of a spool: durable, bounded, private, and clear when it cannot write."""

import errno
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.disk_order import DiskOrder
from support.stories import Teller

from gpuops.errors import SpoolError
from gpuops.host.clock import FakeClock
from gpuops.model import Severity
from gpuops.store.spool.format import decode_line
from gpuops.store.spool.rotate import drop_oldest
from gpuops.store.spool.segments import (
    find_segments,
    has_live_writer,
    open_segment,
    read_offset,
    write_offset,
)
from gpuops.store.spool.write import SEGMENT_BYTES, SpoolWriter


def writer(directory, **changes):
    wanted = {
        "node": "n1",
        "boot_id": "b1",
        "bytes_max": 64 * 2**20,
        "clock": FakeClock(),
        **changes,
    }
    return SpoolWriter(directory, **wanted)


def events(count, *, severity=20, size=0):
    teller = Teller()
    return [
        teller.event("tool.failed", severity=severity, n=n, fill="x" * size) for n in range(count)
    ]


def lines_in(spool):
    return [
        decode_line(raw)
        for segment in sorted(find_segments(spool), key=lambda s: (s.origin, s.number))
        for raw in segment.path.read_bytes().splitlines()
    ]


def test_what_is_appended_is_there_at_once_and_ready_when_closed(tmp_path):
    spool = writer(tmp_path)
    told = events(3)

    spool.append(told[:2])
    (open_one,) = find_segments(tmp_path)
    spool.append(told[2:])
    spool.close()

    (ready,) = find_segments(tmp_path)
    assert (open_one.is_ready, ready.is_ready) == (False, True)
    assert [line.event for line in lines_in(tmp_path)] == told
    assert [line.seq for line in lines_in(tmp_path)] == [1, 2, 3]


def test_a_writer_that_wrote_nothing_leaves_nothing(tmp_path):
    writer(tmp_path).close()

    assert list(tmp_path.iterdir()) == []


def test_the_spool_is_for_its_owner_only(tmp_path):
    spool = writer(tmp_path / "new" / "spool")
    spool.append(events(1))

    (segment,) = find_segments(tmp_path / "new" / "spool")
    for path in (tmp_path / "new" / "spool", segment.directory, segment.path):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_segment_is_complete_after_a_minute(tmp_path):
    clock = FakeClock()
    spool = writer(tmp_path, clock=clock)
    spool.append(events(1))
    clock.advance(60)
    spool.append(events(1))

    assert [segment.is_ready for segment in find_segments(tmp_path)] == [True, False]


def test_a_segment_is_complete_at_its_size(tmp_path):
    spool = writer(tmp_path)
    batch = events(20, size=200_000)
    for _ in range(3):
        spool.append(batch)
    spool.close()

    sizes = [segment.path.stat().st_size for segment in find_segments(tmp_path)]
    assert len(sizes) == 3 - 1 + (sizes[0] < SEGMENT_BYTES)
    assert all(size < 2 * SEGMENT_BYTES for size in sizes)


def test_the_lock_says_whether_a_writer_lives(tmp_path):
    spool = writer(tmp_path)
    spool.append(events(1))
    (segment,) = find_segments(tmp_path)
    fd = open_segment(segment)

    lives = has_live_writer(segment, fd)
    spool.close()

    assert lives
    assert not has_live_writer(segment, fd)
    os.close(fd)


def test_above_its_bound_the_oldest_events_go_and_that_is_reported(tmp_path):
    old = writer(tmp_path, bytes_max=10**9)
    for _ in range(4):
        old.append(events(10, size=100_000))
        old.close()
        old = writer(tmp_path, bytes_max=10**9)
    bound = 2 * 2**20
    spool = writer(tmp_path, bytes_max=bound)

    spool.append(events(1))
    spool.close()

    found = lines_in(tmp_path)
    (report,) = [x.event for x in found if x.event.payload.get("what") == "spool"]
    size = sum(segment.path.stat().st_size for segment in find_segments(tmp_path))
    assert size <= bound
    assert report.severity is Severity.WARNING
    assert report.payload["dropped"] == 41 - (len(found) - 1)
    assert f"its oldest {report.payload['dropped']} events" in report.payload["error"]


def test_incidents_outlast_the_rest_of_a_full_spool(tmp_path):
    teller = Teller()
    for number in range(6):
        spool = writer(tmp_path, bytes_max=10**9)
        checks = [teller.event("check.ran", n=number, fill="x" * 50_000) for _ in range(10)]
        spool.append([*checks[:5], teller.event("incident.recorded", n=number), *checks[5:]])
        spool.close()
    spool = writer(tmp_path, bytes_max=2 * 2**20)

    spool.append(events(1))
    spool.close()

    found = [line.event for line in lines_in(tmp_path)]
    kept = [event.payload["n"] for event in found if event.kind == "incident.recorded"]
    (report,) = [event for event in found if event.payload.get("what") == "spool"]
    assert sorted(kept) == list(range(6))
    assert report.payload["dropped"] == 60 - sum(event.kind == "check.ran" for event in found)
    assert sum(segment.path.stat().st_size for segment in find_segments(tmp_path)) <= 2 * 2**20


def test_a_spool_full_of_incidents_is_bounded_too(tmp_path):
    teller = Teller()
    for number in range(6):
        spool = writer(tmp_path, bytes_max=10**9)
        spool.append([teller.event("incident.recorded", n=number, fill="x" * 100_000)] * 5)
        spool.close()
    spool = writer(tmp_path, bytes_max=2 * 2**20)

    spool.append(events(1))
    spool.close()

    found = [line.event.payload["n"] for line in lines_in(tmp_path) if "fill" in line.event.payload]
    assert sum(segment.path.stat().st_size for segment in find_segments(tmp_path)) <= 2 * 2**20
    assert max(found) == 5


def test_a_mark_of_before_lines_were_dropped_skips_none_of_the_rest(tmp_path):
    """Root keeps the marks of a user's spool, whose writer cannot remove them."""
    (spool := tmp_path / "1000").mkdir(mode=0o700)
    (records := tmp_path / "records").mkdir(mode=0o700)
    spooled = writer(spool)
    spooled.append(events(100, size=200))
    (segment,) = (replace(item, records=records) for item in find_segments(spool))
    live = segment.path.stat()
    write_offset(segment, live.st_ino, live.st_size, "tag")
    assert read_offset(segment, live.st_ino, "tag") == live.st_size
    spooled.append([Teller().event("incident.recorded")])
    spooled.close()

    drop_oldest(spool, bytes_max=8192, segments_max=5)

    (segment,) = (replace(item, records=records) for item in find_segments(spool))
    left = segment.path.stat()
    assert 0 < left.st_size < live.st_size
    assert read_offset(segment, left.st_ino, "tag") == 0


def test_a_living_writers_segment_is_never_dropped(tmp_path):
    living = writer(tmp_path)
    living.append(events(10, size=100_000))
    other = writer(tmp_path, bytes_max=1000)

    other.append(events(1))

    assert len(find_segments(tmp_path)) == 2


def test_a_file_in_place_of_the_directory_is_said(tmp_path):
    (tmp_path / "spool").write_text("")

    with pytest.raises(SpoolError, match=r"cannot write the spool .*/spool: .*GPUOPS_SPOOL"):
        writer(tmp_path / "spool")


def test_a_link_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "spool").symlink_to(tmp_path / "real")

    with pytest.raises(SpoolError, match="not a directory"):
        writer(tmp_path / "spool")


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)

    with pytest.raises(SpoolError, match="chmod 700"):
        writer(tmp_path / "spool")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path):
    (tmp_path / "spool").mkdir()
    os.chown(tmp_path / "spool", 65534, 65534)

    with pytest.raises(SpoolError, match="belongs to user 65534, not to 0"):
        writer(tmp_path / "spool")


def test_after_closing_nothing_is_taken(tmp_path):
    spool = writer(tmp_path)
    spool.close()

    with pytest.raises(SpoolError, match="closed"):
        spool.append(events(1))


FULL_DISK = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from gpuops.errors import SpoolError
from gpuops.host.clock import SystemClock
from gpuops.store.spool.write import SpoolWriter
from support.disk_order import DiskOrder
from support.stories import Teller

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
spool = SpoolWriter(
    Path(sys.argv[1]), node="n1", boot_id="b1", bytes_max=2**26, clock=SystemClock()
)
teller, refused, taken = Teller(), 0, 0
for n in range(40):
    try:
        spool.append([teller.event("tool.failed", n=n, fill="x" * 4000)])
        taken += 1
    except SpoolError as exc:
        refused += 1
        message = str(exc)
    if n == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, resource.RLIM_INFINITY))
spool.close()
print(taken, refused, message)
"""


def test_a_full_disk_is_said_and_spoils_no_line(tmp_path):
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "spool"), str(tests)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    taken, refused, message = done.stdout.split(" ", 2)
    assert int(refused) > 0
    assert int(taken) == len(lines_in(tmp_path / "spool"))
    assert os.strerror(errno.EFBIG) in message


NO_ROOM = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from gpuops.errors import SpoolError
from gpuops.host.clock import SystemClock
from gpuops.store.spool.write import SpoolWriter
from support.disk_order import DiskOrder
from support.stories import Teller

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
spool = SpoolWriter(
    Path(sys.argv[1]), node="n1", boot_id="b1", bytes_max=2**26, clock=SystemClock()
)
try:
    spool.append([Teller().event("tool.failed")])
except SpoolError:
    print("refused")
"""


def test_a_run_on_a_full_disk_leaves_no_empty_folder_behind(tmp_path):
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path / "spool"), str(tests)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout == "refused\n"
    assert list((tmp_path / "spool").iterdir()) == []


def test_an_error_and_the_way_to_it_are_on_disk_before_the_writer_goes_on(tmp_path, monkeypatch):
    disk = DiskOrder(monkeypatch)
    spool = writer(tmp_path)

    spool.append(events(1, severity=40))

    (segment,) = find_segments(tmp_path)
    assert disk.is_synced(segment.path, segment.directory, tmp_path)
