"""A recorder never raises, says once what is wrong, and reports what it lost."""

import logging
import shutil

import pytest
from support.recorders import ListRecorder
from support.stories import Teller

from gpuops.host.clock import FakeClock
from gpuops.model import Severity
from gpuops.store.events import new_event
from gpuops.store.spool.format import decode_line
from gpuops.store.spool.record import NullRecorder, spool_recorder
from gpuops.store.spool.segments import find_segments


def recorder(spool, journal=None):
    return spool_recorder(
        spool, node="n1", boot_id="b1", bytes_max=2**26, clock=FakeClock(), journal=journal
    )


def event(n=0, **payload):
    return Teller(n).event("tool.failed", n=n, **payload)


def raw_lines(spool):
    segments = sorted(find_segments(spool), key=lambda s: s.number)
    return [raw for s in segments for raw in s.path.read_bytes().splitlines(keepends=True)]


def test_the_journal_holds_the_lines_of_the_spool(tmp_path):
    keeper = recorder(tmp_path / "spool", tmp_path / "journal")
    keeper.record(event(1), event(2))
    keeper.record(event(3))
    keeper.close()

    (journal,) = (tmp_path / "journal").iterdir()
    assert journal.name == f"{keeper.origin}.jsonl"
    assert journal.read_bytes() == b"".join(raw_lines(tmp_path / "spool"))
    assert journal.stat().st_mode & 0o777 == 0o600


def test_a_spool_that_cannot_be_written_is_said_once_and_the_journal_goes_on(tmp_path, caplog):
    (tmp_path / "spool").write_text("in the way")
    keeper = recorder(tmp_path / "spool", tmp_path / "journal")
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            keeper.record(event(n))
        keeper.close()

    (journal,) = (tmp_path / "journal").iterdir()
    assert keeper.lost == 5
    assert len(journal.read_bytes().splitlines()) == 5
    assert len(caplog.records) == 1
    assert "cannot write the spool" in caplog.text


def test_a_journal_that_cannot_be_written_does_not_stop_the_spool(tmp_path, caplog):
    (tmp_path / "journal").write_text("in the way")
    keeper = recorder(tmp_path / "spool", tmp_path / "journal")
    keeper.record(event(1))
    keeper.record(event(2))
    keeper.close()

    assert len(raw_lines(tmp_path / "spool")) == 2
    assert caplog.text.count("cannot write the journal") == 1


def test_what_was_lost_is_reported_when_the_spool_is_back(tmp_path):
    (tmp_path / "spool").write_text("in the way")
    keeper = recorder(tmp_path / "spool")
    keeper.record(event(1), event(2))
    (tmp_path / "spool").unlink()
    keeper.record(event(3))
    keeper.close()

    report, third = (decode_line(raw).event for raw in raw_lines(tmp_path / "spool"))
    assert report.payload["dropped"] == 2
    assert report.payload["what"] == "spool"
    assert third.payload["n"] == 3


def test_a_spool_that_vanishes_loses_no_later_events(tmp_path):
    keeper = recorder(tmp_path / "spool")
    keeper.record(event(1))
    shutil.rmtree(tmp_path / "spool")
    keeper.record(event(2))
    keeper.close()
    again = recorder(tmp_path / "spool")
    again.record(event(3))
    again.close()

    assert [decode_line(raw).event.payload["n"] for raw in raw_lines(tmp_path / "spool")][-1] == 3


def test_no_event_however_odd_raises(tmp_path, caplog):
    keeper = recorder(tmp_path / "spool")
    cycle: dict = {}
    cycle["self"] = cycle

    keeper.record(event(1, odd=cycle))
    keeper.record(event(2, odd=object(), also={1, 2}))
    keeper.close()

    assert len(raw_lines(tmp_path / "spool")) == 2
    assert caplog.text == ""


@pytest.mark.parametrize("made", [ListRecorder, NullRecorder])
def test_the_fakes_take_events_and_an_end(made):
    keeper = made()

    keeper.record(event(1, url="postgresql://a:pw@h/d"))
    keeper.close()

    assert "pw" not in str(getattr(keeper, "events", ""))


def test_a_new_event_is_of_now_and_sorts_after_older_ones():
    clock = FakeClock()
    first = new_event("tool.failed", node="n1", clock=clock)
    clock.advance(0.002)
    second = new_event("tool.failed", node="n1", clock=clock, severity=Severity.ERROR)

    assert first.t_us + 2000 == second.t_us == clock.now_us()
    assert first.id < second.id
