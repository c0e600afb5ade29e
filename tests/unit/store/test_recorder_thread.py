"""Whoever records does not wait, however long the writing takes."""

import logging
import threading
import time

import pytest
from support.recorders import ListRecorder
from support.stories import Teller

from gpuops.host.clock import FakeClock
from gpuops.store.spool.record import QueuedRecorder

LIMIT_S = 10


class Held(ListRecorder):
    """Writes nothing until it is let go, like a shared file system whose server is away."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Event()
        self.go = threading.Event()

    def record(self, *events):
        self.entered.set()
        assert self.go.wait(LIMIT_S)
        super().record(*events)


@pytest.fixture
def held():
    inner = Held()
    yield inner
    inner.go.set()


def queued(inner, events_max=100):
    return QueuedRecorder(inner, node="n1", clock=FakeClock(), events_max=events_max)


def event(n):
    return Teller(n).event("tool.failed", n=n)


def numbers(inner):
    return [e.payload["n"] for e in inner.events if "n" in e.payload]


def test_recording_does_not_wait_and_nothing_is_lost_or_out_of_order(held):
    recorder = queued(held)
    did = []
    for n in range(40):
        recorder.record(event(2 * n), event(2 * n + 1))
    recorder.call(lambda: did.append(len(held.events)))
    recorder.record(event(80))

    assert held.events == []
    held.go.set()
    recorder.close()
    assert numbers(held) == list(range(81))
    assert did == [80]
    assert held.closed


def test_closing_returns_within_its_time_and_says_what_waits(held, caplog):
    recorder = queued(held)
    recorder.record(event(1), event(2))
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        recorder.close(0.05)

    assert time.monotonic() - start < LIMIT_S / 2
    (line,) = caplog.messages
    assert line.startswith("2 events of this run are not written")


def test_what_finds_no_room_is_dropped_and_the_count_is_recorded(held):
    recorder = queued(held, events_max=3)
    recorder.record(event(0))
    assert held.entered.wait(LIMIT_S)
    for n in range(1, 6):
        recorder.record(event(n))
    held.go.set()
    recorder.close()

    assert numbers(held) == [0, 1, 2]
    lost = held.events[-1]
    assert (lost.kind, lost.payload["what"], lost.payload["dropped"]) == (
        "tool.failed",
        "recorder",
        3,
    )


def test_a_call_that_raises_ends_nothing(caplog):
    inner = ListRecorder()
    recorder = queued(inner)
    recorder.call(lambda: 1 // 0)
    recorder.record(event(1))
    recorder.close()

    assert numbers(inner) == [1]
    assert "ZeroDivisionError" in caplog.text


def test_after_the_end_nothing_is_taken():
    inner = ListRecorder()
    recorder = queued(inner)
    recorder.close()
    recorder.record(event(1))
    recorder.close()

    assert inner.events == []
