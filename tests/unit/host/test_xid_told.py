"""What a watching child tells, and how a storm becomes few lines."""

import json

from gpuops.host.clock import FakeClock
from gpuops.host.gpu_names import GpuName
from gpuops.host.xid_log import KINDS_MAX
from gpuops.host.xid_watch import (
    XidEvent,
    XidReporter,
    XidSource,
    XidSourceEnded,
    XidWatchMessage,
    parse_message,
)


class Stand:
    """A teller, and what it told."""

    def __init__(self):
        self.clock = FakeClock()
        self.lines = []
        self.reporter = XidReporter(self.lines.append, self.clock)

    def event(self, code=31, **changes):
        values = {
            "source": XidSource.KERNEL,
            "code": code,
            "mono_ns": self.clock.mono_ns(),
            "now_us": self.clock.now_us(),
            "address": "0000:3b:00.0",
        }
        return XidEvent(**{**values, **changes})

    def told(self):
        return [parse_message(line.encode()) for line in self.lines]


def test_lines_are_read_as_they_were_meant():
    stand = Stand()
    gpu = GpuName(index=1, address="0000:3b:00.0", uuid="GPU-1")
    event = stand.event(145, uuid="GPU-1", fatal=False, line="NVRM: Xid \n", process=7)
    stand.reporter.started([gpu])
    stand.reporter.report(event)
    stand.reporter.ended(XidSourceEnded.ABSENT, "no library")

    assert stand.told() == [
        XidWatchMessage(gpus=(gpu,)),
        XidWatchMessage(xid=event),
        XidWatchMessage(over=XidSourceEnded.ABSENT, text="no library"),
    ]
    assert all(line.count("\n") == 1 for line in stand.lines)


def test_a_storm_is_counted_and_told_once_a_second():
    stand = Stand()
    for _ in range(170_000):
        stand.reporter.report(stand.event())
    assert len(stand.lines) == 1
    stand.clock.advance(1)
    stand.reporter.flush_if_due()
    stand.reporter.flush_if_due()

    assert [told.xid.count for told in stand.told()] == [1, 169_999]


def test_what_is_new_in_a_storm_is_told_at_once():
    stand = Stand()
    for _ in range(1000):
        stand.reporter.report(stand.event())
    stand.reporter.report(stand.event(79))

    assert [told.xid.code for told in stand.told()] == [31, 79]


def test_a_repetition_is_dated_by_its_newest_line():
    stand = Stand()
    stand.reporter.report(stand.event())
    newest = stand.event(mono_ns=77)
    stand.reporter.report(newest)
    stand.clock.advance(5)
    stand.reporter.flush_if_due()

    assert stand.told()[1].xid == newest


def test_what_waits_is_told_before_the_end():
    stand = Stand()
    stand.reporter.report(stand.event())
    stand.reporter.report(stand.event())
    stand.reporter.ended(XidSourceEnded.ERROR, "x" * 9999)

    assert [told.xid is not None for told in stand.told()] == [True, True, False]
    assert all(len(line) < 1000 for line in stand.lines)


def test_kinds_are_bounded():
    stand = Stand()
    for code in range(KINDS_MAX + 50):
        stand.reporter.report(stand.event(code))

    assert len(stand.lines) == KINDS_MAX


def test_lines_of_another_form_are_none():
    lines = [b"", b"{", b"[]", b"{}", b'{"over": "why"}', b'{"gpus": [7]}', b'{"xid": 3}', b"\xff"]
    lines += [json.dumps({"xid": {"source": "gossip", "code": 1}}).encode(), b"[" * 99999]

    assert [parse_message(line) for line in lines] == [None] * len(lines)
