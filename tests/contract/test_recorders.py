"""What every recorder promises to code that must not fail."""

import pytest
from support.recorders import ListRecorder
from support.stories import Teller

from gpuops.host.clock import FakeClock
from gpuops.store.spool.format import decode_line
from gpuops.store.spool.record import NullRecorder, QueuedRecorder, spool_recorder
from gpuops.store.spool.segments import find_segments


def in_memory(_folder):
    inner = ListRecorder()
    return inner, lambda: inner.events


def to_spool(folder):
    made = spool_recorder(folder, node="n1", boot_id="b1", bytes_max=2**26, clock=FakeClock())

    def kept():
        segments = sorted(find_segments(folder), key=lambda s: s.number)
        lines = [raw for s in segments for raw in s.path.read_bytes().splitlines()]
        return [decode_line(raw).event for raw in lines]

    return made, kept


def from_a_thread(folder):
    inner, kept = to_spool(folder)
    return QueuedRecorder(inner, node="n1", clock=FakeClock()), kept


def nowhere(_folder):
    return NullRecorder(), lambda: None


MAKERS = [in_memory, to_spool, from_a_thread, nowhere]


@pytest.mark.parametrize("make", MAKERS)
def test_events_are_kept_in_order_without_their_secrets(make, tmp_path):
    recorder, kept = make(tmp_path)
    teller = Teller(1)
    for n in range(0, 20, 2):
        recorder.record(
            teller.event("tool.failed", n=n, url="redis://a:hunter2@h"),
            teller.event("tool.failed", n=n + 1),
        )
    recorder.close()

    events = kept()
    if events is not None:
        assert [event.payload["n"] for event in events] == list(range(20))
        assert "hunter2" not in str(events)


@pytest.mark.parametrize("make", MAKERS)
def test_odd_events_and_a_second_end_raise_nothing(make, tmp_path):
    recorder, _kept = make(tmp_path)
    cycle: dict = {}
    cycle["self"] = cycle

    recorder.record()
    recorder.record(Teller(1).event("tool.failed", odd=cycle, also={1, 2}))
    recorder.close()
    recorder.close()
