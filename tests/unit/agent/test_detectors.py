"""What detectors of a site's own say: read with suspicion, and acted on only where they ask."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.monitors import report_of, suspects_of

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.plugins import LINES_MAX, LINES_PER_POLL, PluginMonitor, read_verdict
from gpuops.incident.decision import ReportKind
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side

RANK, NODE = Entity(EntityKind.RANK, "3"), Entity(EntityKind.NODE, "n1")


class Process:
    """A detector that says what the test wants."""

    def __init__(self):
        self.lines, self.is_closed = [], False

    def take(self, lines_max):
        taken, self.lines = self.lines[:lines_max], self.lines[lines_max:]
        return taken

    def close(self, wait_s=0.0):
        self.is_closed = True

    def say(self, **body):
        self.lines.append(json.dumps(body).encode() + b"\n")


class Stand:
    """A sentry over two of them, on a node with the ranks 2 and 3."""

    def __init__(self):
        self.started = []
        self.sentry: Monitor = PluginMonitor(("one", "two"), self._start)
        self.begin(0)

    def _start(self, name, told):
        self.started.append((name, json.loads(told), Process()))
        return self.started[-1][2]

    def begin(self, generation):
        workers = [SimpleNamespace(rank=rank, pid=100 + rank) for rank in (2, 3)]
        self.sentry.begin(
            MonitoredAttempt(generation=generation, node="n1", workers=workers, folder=Path("/run"))
        )
        self.one, self.two = (process for _name, _told, process in self.started[-2:])


def test_a_verdict_that_ends_is_a_report_with_its_culprits():
    stand = Stand()
    stand.one.say(why="sums\n differ", ranks=[3], blames_node=True, ends=True)

    report = report_of(stand.sentry)

    assert (report.kind, report.node, report.generation) == (ReportKind.VERDICT, "n1", 0)
    assert (report.failure_class, report.side) == (FailureClass.SITE_CHECK, Side.INFRA)
    assert (report.how, report.culprits) == ("one: sums differ", (RANK, NODE))
    assert report.blames_node


def test_a_verdict_that_ends_nothing_is_told_and_is_evidence(caplog):
    stand = Stand()
    stand.two.say(why="slower than the others", ranks=[3], failure_class="host_sw.config")
    with caplog.at_level(logging.WARNING):
        assert report_of(stand.sentry) is None

    assert caplog.messages == ["detector two: slower than the others"]
    (evidence,) = stand.sentry.evidence(0)
    assert (evidence.text, evidence.entity) == ("detector two: slower than the others", RANK)


def test_what_blames_the_node_without_ending_anything_is_a_doubt():
    stand = Stand()
    assert suspects_of(stand.sentry) == []
    stand.one.say(why="rank 3 is slow", ranks=[3])
    stand.two.say(why="its sums differ", ranks=[3], blames_node=True)
    assert report_of(stand.sentry) is None

    (doubt,) = suspects_of(stand.sentry)
    assert (doubt.kind, doubt.why) == (ReportKind.VERDICT, "two: its sums differ")
    assert (doubt.culprits, doubt.node) == ((RANK, NODE), "n1")
    assert (doubt.source, doubt.confidence) == ("two", Confidence.PROBABLE)
    stand.begin(1)
    assert stand.sentry.poll() == []


def test_each_generation_is_watched_anew():
    stand = Stand()
    before, told = stand.one, {"node": "n1", "folder": "/run", "ranks": {"2": 102, "3": 103}}
    before.say(why="late", ends=True)
    stand.begin(1)

    assert before.is_closed
    assert report_of(stand.sentry) is None
    assert stand.started[-1][1] == {**told, "generation": 1}
    stand.sentry.close()
    assert stand.one.is_closed
    assert stand.two.is_closed


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\xff\n", b"no\n", b"[]", b"3", b"[" * 100_000, b"{}", b'{"why": ""}'),
        *(b'{"why": 3}', b'{"why": "x", "end": true}', b'{"why": "x", "ends": 1}'),
        *(b'{"why": "x", "ranks": [0]}', b'{"why": "x", "ranks": "3"}'),
        *(b'{"why": "x", "ranks": [true]}', b'{"error": "KeyError()"}'),
        *(b'{"why": "x", "failure_class": %s}' % f for f in (b'"a.b"', b"[]", b'"tool.failure"')),
        b'{"why": "x", "failure_class": "scheduler.preempted"}',
    ],
    ids=range(19),
)
def test_what_is_no_verdict_is_told_once_and_does_nothing(line, caplog):
    with pytest.raises((KeyError, TypeError, ValueError, RecursionError)):
        read_verdict(line, {2, 3})
    stand = Stand()
    stand.one.lines += [line, line]
    with caplog.at_level(logging.WARNING):
        assert report_of(stand.sentry) is None

    (told,) = caplog.messages
    assert told.startswith("detector one failed: ")
    assert len(told) < 700


def test_one_that_says_too_much_is_ended_and_the_other_is_heard():
    stand = Stand()
    for _ in range(LINES_MAX + 10):
        stand.one.say(nonsense=True)
    for _ in range(LINES_MAX // LINES_PER_POLL):
        assert report_of(stand.sentry) is None

    assert stand.one.is_closed
    stand.two.say(why="x", ends=True)
    assert report_of(stand.sentry).how == "two: x"
