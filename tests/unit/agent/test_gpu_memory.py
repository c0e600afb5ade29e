"""Is the memory of dead workers free again, before new ones start?"""

import json
import threading

from gpuops.agent.monitors.gpu_memory import SILENT_S, WAIT_MAX_S, GpuMemoryGate
from gpuops.host.clock import FakeClock
from gpuops.incident.decision import NodeReport
from gpuops.model import Entity, EntityKind, FailureClass

GIB = 2**30


class Lines:
    """What NVML tells of memory, as a test writes it."""

    def __init__(self):
        self.waiting = []
        self.given_up = threading.Event()
        self.closed = False

    def take(self, lines_max):
        taken, self.waiting = self.waiting[:lines_max], self.waiting[lines_max:]
        return taken

    def close(self, wait_s=0.0):
        self.closed = True


class Stand:
    """A watch over memory and time that a test gives."""

    def __init__(self):
        self.clock = FakeClock()
        self.opened = []
        self.memory = GpuMemoryGate(self.open, self.clock)

    def open(self):
        self.opened.append(Lines())
        return self.opened[-1]

    def say(self, **held):
        body = {"held": held, "mono_ns": self.clock.mono_ns()}
        self.opened[-1].waiting.append(json.dumps(body).encode())

    def trained(self, **held):
        """Go through a generation that began with *held*, to where its workers are being ended."""
        self.say(**held)
        self.memory.started()
        self.clock.advance(100)
        self.memory.begin()
        self.clock.advance(1)
        return self


def test_nobody_looks_while_workers_train():
    stand = Stand()
    stand.say(a=0)
    stand.memory.started()
    assert [lines.closed for lines in stand.opened] == [True]
    stand.memory.begin()
    assert [lines.closed for lines in stand.opened] == [True, False]
    stand.memory.close()
    assert [lines.closed for lines in stand.opened] == [True, True]


def test_memory_that_is_free_again_is_found_at_the_first_look():
    stand = Stand().trained(a=GIB, b=0)
    assert stand.memory.poll() is None
    stand.say(a=GIB + 100, b=400 * 2**20)

    release = stand.memory.poll()
    assert (release.released, release.waited_s, release.note) == (True, 1.0, None)


def test_memory_that_comes_back_late_is_waited_for():
    stand = Stand().trained(a=0)
    for held in (40, 40, 20):
        stand.say(a=held * GIB)
        assert stand.memory.poll() is None
        stand.clock.advance(10)
    stand.say(a=0)

    assert stand.memory.poll().released


def test_memory_that_stays_is_the_nodes_fault():
    stand = Stand().trained(a=GIB, b=0)
    stand.clock.advance(WAIT_MAX_S)
    stand.say(a=41 * GIB, b=0)
    release = stand.memory.poll()

    assert (release.released, dict(release.held)) == (False, {"a": 40 * GIB})
    report = release.to_report("n1", 3)
    assert report.failure_class is FailureClass.GPU_LEAKED_MEMORY
    assert report.blames_node
    assert report.culprits == (Entity(EntityKind.GPU, "a"), Entity(EntityKind.NODE, "n1"))
    assert "not released after 51 s: 42.9 GB on a" in report.how
    assert NodeReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_only_the_jobs_gpus_count():
    stand = Stand().trained(a=0, b=0)
    stand.say(a=40 * GIB, b=0)

    assert stand.memory.poll(["b"]).released
    assert stand.memory.poll([]).released
    assert stand.memory.poll(["a"]) is None


def test_what_was_seen_before_the_end_does_not_count():
    stand = Stand().trained(a=0)
    body = {"held": {"a": 0}, "mono_ns": stand.clock.mono_ns() - 2 * 10**9}
    stand.opened[-1].waiting.append(json.dumps(body).encode())

    assert stand.memory.poll() is None


def test_a_machine_that_tells_nothing_is_ready_at_once():
    stand = Stand()
    stand.memory.started()
    stand.memory.begin()
    release = stand.memory.poll()

    assert (release.released, release.waited_s) == (True, 0.0)
    assert len(stand.opened) == 1


def test_a_driver_that_falls_silent_is_left_to_the_gate():
    stand = Stand().trained(a=0)
    assert stand.memory.poll() is None
    stand.clock.advance(SILENT_S)
    assert stand.memory.poll().released

    ended = Stand().trained(a=0)
    ended.opened[-1].given_up.set()
    assert ended.memory.poll().note


def test_a_gpu_that_is_gone_holds_nothing():
    stand = Stand().trained(a=0, b=0)
    stand.say(b=0)

    assert stand.memory.poll().released


def test_later_generations_are_held_against_what_was_before_the_first():
    stand = Stand().trained(a=0)
    stand.say(a=0)
    assert stand.memory.poll().released
    stand.memory.started()
    stand.clock.advance(10)
    stand.memory.begin()
    stand.clock.advance(1)
    stand.say(a=GIB)
    assert stand.memory.poll() is None


def test_lines_that_are_none_are_left_out():
    stand = Stand().trained(a=0)
    stand.opened[-1].waiting += [b"{", b"7", b"[]", b'{"held": 3, "mono_ns": 1}', b"\xff"]

    assert stand.memory.poll() is None
