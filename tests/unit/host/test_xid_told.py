"""What a watching child tells, and how a storm becomes few lines."""

import json

from gpuops.host.clock import FakeClock
from gpuops.host.gpu_names import GpuName
from gpuops.host.xid import KINDS_MAX
from gpuops.host.xid_told import Over, Source, Teller, Told, XidEvent, read_told


class Stand:
    """A teller, and what it told."""

    def __init__(self):
        self.clock = FakeClock()
        self.lines = []
        self.teller = Teller(self.lines.append, self.clock)

    def event(self, code=31, **changes):
        values = {
            "source": Source.KERNEL,
            "code": code,
            "mono_ns": self.clock.mono_ns(),
            "now_us": self.clock.now_us(),
            "address": "0000:3b:00.0",
        }
        return XidEvent(**{**values, **changes})

    def told(self):
        return [read_told(line.encode()) for line in self.lines]


def test_lines_are_read_as_they_were_meant():
    stand = Stand()
    gpu = GpuName(index=1, address="0000:3b:00.0", uuid="GPU-1")
    event = stand.event(145, uuid="GPU-1", fatal=False, line="NVRM: Xid \n", process=7)
    stand.teller.begun([gpu])
    stand.teller.tell(event)
    stand.teller.over(Over.ABSENT, "no library")

    assert stand.told() == [
        Told(gpus=(gpu,)),
        Told(xid=event),
        Told(over=Over.ABSENT, text="no library"),
    ]
    assert all(line.count("\n") == 1 for line in stand.lines)


def test_a_storm_is_counted_and_told_once_a_second():
    stand = Stand()
    for _ in range(170_000):
        stand.teller.tell(stand.event())
    assert len(stand.lines) == 1
    stand.clock.advance(1)
    stand.teller.tick()
    stand.teller.tick()

    assert [told.xid.count for told in stand.told()] == [1, 169_999]


def test_what_is_new_in_a_storm_is_told_at_once():
    stand = Stand()
    for _ in range(1000):
        stand.teller.tell(stand.event())
    stand.teller.tell(stand.event(79))

    assert [told.xid.code for told in stand.told()] == [31, 79]


def test_a_repetition_is_dated_by_its_newest_line():
    stand = Stand()
    stand.teller.tell(stand.event())
    newest = stand.event(mono_ns=77)
    stand.teller.tell(newest)
    stand.clock.advance(5)
    stand.teller.tick()

    assert stand.told()[1].xid == newest


def test_what_waits_is_told_before_the_end():
    stand = Stand()
    stand.teller.tell(stand.event())
    stand.teller.tell(stand.event())
    stand.teller.over(Over.ERROR, "x" * 9999)

    assert [told.xid is not None for told in stand.told()] == [True, True, False]
    assert all(len(line) < 1000 for line in stand.lines)


def test_kinds_are_bounded():
    stand = Stand()
    for code in range(KINDS_MAX + 50):
        stand.teller.tell(stand.event(code))

    assert len(stand.lines) == KINDS_MAX


def test_lines_of_another_form_are_none():
    lines = [b"", b"{", b"[]", b"{}", b'{"over": "why"}', b'{"gpus": [7]}', b'{"xid": 3}', b"\xff"]
    lines += [json.dumps({"xid": {"source": "gossip", "code": 1}}).encode(), b"[" * 99999]

    assert [read_told(line) for line in lines] == [None] * len(lines)
