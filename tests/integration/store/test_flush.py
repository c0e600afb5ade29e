"""From a spool into a store: torn, corrupted and hostile lines, crashed and living writers."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from support.command import gpuops
from support.stories import Teller, incident, story

from gpuops.host.clock import FakeClock, SystemClock
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import encode_line
from gpuops.store.spool.read import REJECTED_BYTES_MAX, count_dropped, count_rejected
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.segments import find_segments, measure_spool
from gpuops.store.spool.send import flush

LINES = [line for line in story(1) if line.event.node == "n1"]
ORIGIN = LINES[0].origin


@pytest.fixture
def spool(tmp_path):
    return tmp_path / "spool"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/store.db"


def lay(spool, data, *, number=1, suffix="ready", origin=ORIGIN):
    """Put a segment where a writer would have left it."""
    directory = spool / origin
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{number:08d}.{suffix}"
    path.write_bytes(data)
    return path


def raw(lines):
    return b"".join(encode_line(line) for line in lines)


def send(spool, url, **changes):
    return flush(spool, url, **{"clock": SystemClock(), "cluster": "c1", **changes})


def stored(url, **query):
    with open_store(url, mode="read") as store, store.begin() as connection:
        return run_queries.events(connection, **query)


def recorder(spool):
    return spool_recorder(spool, node="n1", boot_id="b1", bytes_max=2**26, clock=SystemClock())


def test_an_empty_spool_makes_no_store(spool, url, tmp_path):
    report = send(spool, url)

    assert (report.sent, report.note) == (0, None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_is_gone_from_the_spool(spool, url):
    lay(spool, raw(LINES))

    report = send(spool, url)

    assert (report.sent, report.remaining, report.note) == (len(LINES), 0, None)
    assert len(stored(url)) == len(LINES)
    assert find_segments(spool) == []
    assert not (spool / ORIGIN).exists()


def test_a_crashed_writers_open_segment_is_delivered_and_its_torn_line_counted(spool, url):
    lay(spool, raw(LINES)[:-9], suffix="open")

    report = send(spool, url)

    assert (report.sent, report.torn, report.corrupt) == (len(LINES) - 1, 1, 0)
    assert find_segments(spool) == []


def test_a_living_writers_lines_are_sent_once_and_its_segment_stays(spool, url):
    keeper = recorder(spool)
    teller = Teller()
    keeper.record(teller.event("tool.failed", n=1))
    first = send(spool, url)
    again = send(spool, url)
    keeper.record(teller.event("tool.failed", n=2))
    second = send(spool, url)
    (segment,) = find_segments(spool)
    keeper.close()
    last = send(spool, url)

    assert [r.sent for r in (first, again, second, last)] == [1, 0, 1, 0]
    assert [r.already_there for r in (first, again, second, last)] == [0, 0, 0, 0]
    assert not segment.is_ready
    assert find_segments(spool) == []
    assert len(stored(url)) == 2


def test_a_lost_mark_only_sends_again(spool, url):
    keeper = recorder(spool)
    keeper.record(Teller().event("tool.failed"))
    send(spool, url)
    (segment,) = find_segments(spool)
    segment.offset_path.unlink()

    assert send(spool, url).already_there == 1
    keeper.close()


def test_a_mark_of_another_store_is_not_believed(spool, url, tmp_path):
    keeper = recorder(spool)
    keeper.record(Teller().event("tool.failed"))
    send(spool, url)
    keeper.record(Teller(1).event("tool.failed"))

    report = send(spool, f"sqlite:///{tmp_path}/other.db")

    assert report.sent == 2
    keeper.close()


def test_a_refused_line_that_no_longer_fits_is_counted(spool, url):
    """A file with nothing in it stands for all that was refused before."""
    (spool / "rejected").mkdir(parents=True)
    with (spool / "rejected" / "n0-00000001.jsonl").open("wb") as file:
        file.truncate(REJECTED_BYTES_MAX)
    damaged = encode_line(LINES[0]).replace(b'"seq"', b'"sEq"')
    lay(spool, damaged + damaged + encode_line(LINES[1]))

    report = send(spool, url)
    status = json.loads(db_status(spool, url, "--json").stdout)["spool"]

    assert (report.sent, report.corrupt) == (1, 2)
    assert count_dropped(spool) == status["rejected_dropped"] == 2
    assert "2 more did not fit there and were dropped" in db_status(spool, url).stdout


def db_status(spool, url, *args):
    return gpuops("db", "status", *args, env={"GPUOPS_SPOOL": str(spool), "GPUOPS_STORE": url})


def test_a_corrupted_line_is_kept_aside_and_reported_and_the_rest_delivered(spool, url):
    good = [encode_line(line) for line in LINES]
    damaged = good[1].replace(b'"seq"', b'"sEq"')
    lay(spool, good[0] + damaged + b"".join(good[2:]))

    report = send(spool, url)

    (kept,) = (spool / "rejected").iterdir()
    entry = json.loads(kept.read_text())
    (told,) = [e for e in stored(url, kind="tool.failed") if e.payload["what"] == "spool"]
    assert (report.sent, report.corrupt) == (len(LINES) - 1, 1)
    assert entry["raw"].encode() == damaged
    assert "checksum" in entry["reason"]
    assert "refused lines" in told.payload["error"]
    assert told.node == "n1"
    assert count_rejected(spool) == 1
    assert find_segments(spool) == []


def hostile(n, kind, payload):
    """Return a well-formed line whose payload no table takes."""
    event = replace(
        LINES[0].event,
        id=f"01a1fa51-d523-777c-b8fe-ce320f93d{n:03x}",
        kind=kind,
        run_id="r1",
        attempt=0,
        payload=payload,
    )
    return replace(LINES[0], seq=900 + n, event=event)


HOSTILE = [
    hostile(0, "attempt.progress", {"minute_us": "soon"}),
    hostile(1, "attempt.progress", {"minute_us": 2**70}),
    hostile(2, "attempt.started", {"start_us": [1]}),
    hostile(3, "attempt.started", {"slurm_job_id": "9" * 5000}),
    hostile(4, "attempt.ended", {"outcome": {"a": 1}}),
    hostile(5, "run.started", {"command": "rm -rf /"}),
    hostile(6, "run.ended", {}),
    hostile(7, "node.seen", {"boot_id": "b" * 5000}),
    hostile(8, "check.ran", {"suite": "s", "findings": 5}),
    hostile(9, "check.ran", {**story(1)[1].event.payload, "findings": [{"entity": "node"}]}),
    hostile(10, "incident.recorded", {}),
    hostile(11, "incident.recorded", {**incident("r1", 0).to_json(), "id": "i" * 5000}),
    hostile(12, "incident.recorded", {**incident("r1", 0).to_json(), "attempt": "first"}),
    hostile(13, "incident.recorded", {**incident("r1", 0).to_json(), "rev": 10**12}),
    hostile(14, "incident.recorded", {**incident("r1", 0).to_json(), "culprits": "abc"}),
    hostile(
        15,
        "incident.recorded",
        {**incident("r1", 0).to_json(), "culprits": [{"kind": "node", "id": "n" * 5000}]},
    ),
    hostile(
        16,
        "incident.recorded",
        {**incident("r1", 0).to_json(), "lost_seconds_by_phase": {"detect": "inf"}},
    ),
]


@pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def test_lines_that_no_table_takes_are_refused_alone(spool, url, request, database):
    if database == "postgres":
        url = request.getfixturevalue("postgres_url")
        upgrade_store(url)
    lay(spool, raw([*LINES[:2], *HOSTILE, *LINES[2:]]))

    report = send(spool, url)

    assert (report.sent, report.refused, report.note) == (len(LINES), len(HOSTILE), None)
    assert count_rejected(spool) == len(HOSTILE)
    assert find_segments(spool) == []


def test_a_line_that_steals_a_number_is_refused(spool, url):
    lay(spool, raw(LINES))
    send(spool, url)
    thief = replace(
        LINES[0],
        event=replace(LINES[0].event, id="01a1fa51-d523-777c-b8fe-ce320f93dce8"),
    )
    lay(spool, raw([thief]))

    report = send(spool, url)

    assert (report.sent, report.refused) == (0, 1)


def test_a_line_of_another_origin_is_refused(spool, url):
    lay(spool, raw(LINES), origin="n9.000000000000")

    report = send(spool, url)

    assert (report.sent, report.corrupt) == (0, len(LINES))


def test_what_is_not_a_segment_is_left_alone(spool, url, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(raw(LINES))
    (spool / ORIGIN).mkdir(parents=True)
    (spool / ORIGIN / "00000001.ready").symlink_to(secret)
    os.mkfifo(spool / ORIGIN / "00000002.ready")
    (spool / ORIGIN / "notes.txt").write_text("mine")
    (spool / "lost+found").mkdir()

    report = send(spool, url)

    assert (report.sent, report.note) == (0, None)
    assert secret.exists()
    assert (spool / ORIGIN / "notes.txt").exists()


def test_many_batches_of_one_living_segment_arrive(spool, url):
    keeper = recorder(spool)
    teller = Teller()
    keeper.record(*(teller.event("tool.failed", n=n) for n in range(1700)))

    assert send(spool, url).sent == 1700
    keeper.close()
    assert send(spool, url).sent == 0


def test_many_small_segments_share_batches(spool, url):
    for line in LINES:
        lay(spool, raw([line]), number=line.seq)

    assert send(spool, url).sent == len(LINES)
    assert find_segments(spool) == []


def test_the_deadline_leaves_the_rest_for_the_next_time(spool, url):
    lay(spool, raw(LINES))

    class Late(FakeClock):
        def mono_ns(self):
            self.advance(1)
            return super().mono_ns()

    report = send(spool, url, clock=Late(), deadline_s=2)

    assert report.remaining == len(LINES)
    assert "deadline" in report.note
    assert send(spool, url).sent == len(LINES)


def test_a_second_flusher_waits_and_then_leaves_it_to_the_first(spool, url):
    lay(spool, raw(LINES))
    with (spool / ".flush.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        report = send(spool, url, deadline_s=0.2)

    assert report.remaining == len(LINES)
    assert "another flusher" in report.note
    assert send(spool, url).sent == len(LINES)


FLUSH = """
import sys
from pathlib import Path
from gpuops.host.clock import SystemClock
from gpuops.store.spool.send import flush
report = flush(Path(sys.argv[1]), sys.argv[2], cluster="c1", clock=SystemClock(), deadline_s=30)
print(report.sent, report.remaining)
"""


def test_flushers_at_once_double_and_lose_nothing(spool, url):
    for number in range(1, 41):
        lay(
            spool,
            raw(
                [
                    replace(line, seq=number * 100 + n, event=_renamed(line.event, number, n))
                    for n, line in enumerate(LINES)
                ]
            ),
            number=number,
        )
    expected = 40 * len(LINES)

    flushers = [
        subprocess.Popen(
            [sys.executable, "-c", FLUSH, str(spool), url], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=60)[0].split() for process in flushers]

    assert sum(int(sent) for sent, _ in results) == expected
    assert len(stored(url)) == expected


def _renamed(event, number, n):
    return replace(event, id=f"{event.id[:24]}{number:06x}{n:06x}")


def test_recording_while_flushing_loses_nothing(spool, url):
    keeper = recorder(spool)
    done = threading.Event()
    reports = []

    def send_on():
        while not done.is_set():
            reports.append(send(spool, url))

    thread = threading.Thread(target=send_on)
    thread.start()
    teller = Teller()
    for n in range(600):
        keeper.record(teller.event("tool.failed", n=n))
    keeper.close()
    done.set()
    thread.join(timeout=60)
    send(spool, url)

    assert sorted(e.payload["n"] for e in stored(url)) == list(range(600))
    assert measure_spool(spool).lines == 0


@pytest.mark.parametrize("url", ["sqlite:////proc/nowhere/store.db", "sqlite:////etc"])
def test_a_store_that_cannot_be_opened_leaves_everything_in_the_spool(spool, url):
    lay(spool, raw(LINES))

    report = send(spool, url)

    assert report.remaining == len(LINES)
    assert report.note.startswith("cannot ")


def test_refused_lines_that_cannot_be_kept_stay_in_the_spool(spool, url):
    lay(spool, raw(LINES[:1]) + b"noise\n")
    (spool / "rejected").write_text("in the way")

    report = send(spool, url)

    assert "cannot write the spool" in report.note
    assert report.remaining == 2


def test_while_one_flushes_no_other_does(spool, url):
    lay(spool, raw(LINES))
    others = []

    class Watching(SystemClock):
        """Asked for the time within the first flusher's transaction."""

        def now_us(self):
            others.append(send(spool, url, deadline_s=0.1))
            return super().now_us()

    report = send(spool, url, clock=Watching())

    assert (report.sent, report.note) == (len(LINES), None)
    assert others
    assert {other.note for other in others} == {f"another flusher is working on {spool}"}
