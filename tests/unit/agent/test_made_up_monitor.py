"""A monitor that does all that one can, in one file; `docs/architecture.md` says how to add one.

On each node it counts errors of links. It suspects the node at the other end, publishes what it
counted, and on the leader the node with the most errors is suspected or ends the generation.
"""

from dataclasses import replace

import pytest
from support.monitors import report_of
from support.runs import wait_until
from support.supervised import Agent, Node

from gpuops.agent.monitors.api import FleetMonitor, Monitor, MonitoredAttempt
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.agent.monitors.fleet import JUDGE_S, FleetJudge, SuspectReporter
from gpuops.agent.monitors.registry import PUBLISH_S, PUBLISHED_BYTES_MAX
from gpuops.control.record import Roster, RunPhase
from gpuops.incident.decision import NodeReport, ReportKind, RestartPolicy
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.model import Confidence, Entity, EntityKind, Evidence, FailureClass, Role, Side

pytestmark = pytest.mark.torch

MAY_SUSPECT, MAY_FAIL = 10, 100


def suspicion(node, errors, limit=MAY_SUSPECT):
    return Suspicion(
        entity=Entity(EntityKind.LINK, f"leaf1:{node}"),
        failure_class=FailureClass.NETWORK_ERRORS,
        confidence=Confidence.CONFIRMED,
        level=SuspicionLevel.END if errors > MAY_FAIL else SuspicionLevel.SUSPECT,
        source="links",
        why=f"the link to {node} has {errors} errors",
        value=errors,
        threshold=f"{limit}",
        node=node,
        side=Side.INFRA,
    )


class LinkMonitor(Monitor):
    """Counts errors of the links of this node, by the node at the other end."""

    name = "links"

    def __init__(self, clock, **errors):
        self.clock, self.errors = clock, errors
        self.watched, self.n_beats, self.is_slow = None, 0, False

    def begin(self, watched):
        self.watched, self.n_beats = watched, 0

    def feed(self, beats):
        self.n_beats += sum(map(len, beats.values()))

    def poll(self):
        return [suspicion(node, n) for node, n in self.errors.items() if n > MAY_SUSPECT]

    def evidence(self, deadline_ns):
        if self.is_slow:
            self.clock.advance(max(0.0, (deadline_ns - self.clock.mono_ns()) / 1e9))
        text = f"errors of links: {sum(self.errors.values())}"
        return [Evidence(role=Role.SYMPTOM, text=text)]

    def publish(self):
        return {"errors": sum(self.errors.values())}


class FleetLinkMonitor:
    """Suspects the node with the most errors once it was that twice."""

    name = "links"

    def __init__(self):
        self.before = None

    def judge(self, published, now_s):
        worst = max(published, key=lambda node: published[node]["errors"], default=None)
        before, self.before = self.before, worst
        if worst is None or worst != before:
            return []
        return [suspicion(worst, published[worst]["errors"])]


class Hang(Monitor):
    """A hang that is noticed in the same second."""

    def poll(self):
        return [
            Suspicion(
                entity=Entity(EntityKind.RANK, "0"),
                failure_class=FailureClass.HANG_COLLECTIVE,
                confidence=Confidence.SYMPTOM_ONLY,
                level=SuspicionLevel.END,
                source="hang",
                why="no step",
                kind=ReportKind.HANG,
            )
        ]


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path, terms=RestartPolicy(nodes_min=1, nodes_max=2))


@pytest.fixture
def other(node, tmp_path):
    agent, terms = node.agent, node.agent.restart_policy
    return Agent(tmp_path, terms=terms, board=agent.shared, clock=agent.clock, number=2)


def stops(node, other):
    """Let the agent of the other node do what it is asked to."""

    def look():
        other.run_once()
        if other.control.record.phase is RunPhase.COLLECT:
            other.control.file_report(NodeReport(kind=ReportKind.STOPPED, node="n2", generation=0))

    return look


def run(node, other):
    node.agent.while_waiting = [stops(node, other)] * 20
    return node.then(*[other.run_once] * 20).watch(other).run()


def test_it_is_told_of_the_generation_and_its_beats(node, tmp_path):
    monitor = LinkMonitor(node.agent.clock)
    node.agent.monitors = [monitor]
    watched = MonitoredAttempt(generation=3, node="n1", workers=(), folder=tmp_path)
    group = node.agent.parts.monitors
    group.begin(watched)
    group.feed({0: ["beat"], 1: ["beat", "beat"]})

    assert (monitor.watched, monitor.n_beats) == (watched, 3)


@pytest.mark.parametrize("turn", [1, -1])
def test_what_it_holds_against_another_node_is_the_cause_and_that_node_goes(node, other, turn):
    link = LinkMonitor(node.agent.clock, n2=500)
    node.agent.monitors = [Hang(), link][::turn]
    assert run(node, other) is None

    record = node.agent.control.record
    cause = record.decision.cause
    assert (record.generation, list(record.excluded)) == (1, ["n2"])
    assert (cause.kind, cause.node) == (ReportKind.VERDICT, "n2")
    assert cause.failure_class is FailureClass.NETWORK_ERRORS
    assert cause.culprits == (
        Entity(EntityKind.LINK, "leaf1:n2"),
        Entity(EntityKind.NODE, "n2"),
    )
    assert node.file_report().kind is ReportKind.HANG, "what was seen here is reported too"


def test_a_suspicion_that_ends_nothing_is_for_the_next_restart(node, other):
    node.agent.monitors = [LinkMonitor(node.agent.clock, n2=50)]
    story = [other.run_once] * 4
    node.then(*story, node.codes(r0=-9)).agent.while_waiting = [stops(node, other)] * 20
    assert node.watch(other).run() is None

    record = node.agent.control.record
    assert record.decision.cause.node == "n1"
    assert record.excluded == {"n2": "suspected: the link to n2 has 50 errors"}
    incidents = node.agent.payloads("incident.recorded")
    assert any("n2 is suspected: the link to n2" in each["title"] for each in incidents)


def test_all_give_evidence_by_one_deadline(node):
    clock = node.agent.clock
    first, second = LinkMonitor(clock, n2=1), LinkMonitor(clock, n2=2)
    first.is_slow = second.is_slow = True
    node.agent.monitors = [first, second]
    group, before_ns = node.agent.parts.monitors, clock.mono_ns()

    found = [item.text for item in group.evidence()]

    assert found == ["errors of links: 1", "errors of links: 2"]
    assert clock.mono_ns() - before_ns == EVIDENCE_S * 1e9


class Broken(FleetMonitor):
    """Fails whenever it is asked."""

    name = "broken"

    def judge(self, published, now_s):
        raise ZeroDivisionError


class Fleet:
    """Two nodes that publish, the first of which leads."""

    def __init__(self, node, other, **errors):
        node.agent.take_seats(other)
        self.agents, self.monitor = (node.agent, other), FleetLinkMonitor()
        self.clock, self.leader, self.failures = node.agent.clock, node.agent, []
        for agent in self.agents:
            agent.monitors = [LinkMonitor(agent.clock, here=errors[agent.node])]
        self.groups = [agent.parts.monitors for agent in self.agents]
        parts = node.agent.parts
        self.judge = FleetJudge(
            node.agent.control,
            [Broken(), self.monitor],
            self.clock,
            SuspectReporter(parts.control, self.clock, parts.session, parts.say),
            self.safely,
        )

    def safely(self, what, act):
        try:
            act()
        except ZeroDivisionError:
            self.failures.append(what)

    def publish(self, generation=0):
        self.clock.advance(PUBLISH_S)
        for group in self.groups:
            group.publish(generation)
        wait_until(lambda: not any(g._writer and g._writer.is_alive() for g in self.groups))

    def turn(self):
        self.publish()
        control = self.leader.control
        self.leader.threads.run_once(hold_s=0.0)
        roster = Roster.from_bytes(control.store.get(control.keys.roster(0)).value)
        self.judge.on_heartbeats(control.record, roster, {})
        return control.record


def test_the_leader_judges_what_all_publish_and_one_that_fails_stops_no_other(node, other):
    fleet = Fleet(node, other, n1=1, n2=50)

    assert fleet.turn().suspected == {}, "it was the worst only once"
    assert fleet.turn().suspected == {"n2": "the link to n2 has 50 errors"}
    assert fleet.turn().phase is RunPhase.RUN
    assert set(fleet.failures) == {"judging what broken publishes"}


def test_the_leader_ends_the_generation_for_what_is_bad_enough(node, other):
    fleet = Fleet(node, other, n1=500, n2=50)
    fleet.turn()
    record = fleet.turn()

    assert (record.phase, record.trigger) == (RunPhase.COLLECT, ReportKind.VERDICT)
    assert record.reason == "the link to n1 has 500 errors"
    for agent in fleet.agents:
        report = NodeReport(kind=ReportKind.STOPPED, node=agent.node, generation=0)
        agent.control.file_report(report)
    for _ in range(10):
        fleet.leader.run_once()
    decision = fleet.leader.control.record.decision
    assert (decision.cause.node, list(decision.exclude)) == ("n1", ["n1"])


def test_what_is_published_is_small_and_rare_and_of_this_generation(node, other):
    fleet = Fleet(node, other, n1=1, n2=50)
    control = fleet.leader.control

    fleet.publish(generation=7)
    versions = {k: e.version for k, e in control.store.list(control.keys.published()).items()}
    assert set(versions.values()) == {1}
    for group in fleet.groups:
        group.publish(generation=0)
    assert {k: e.version for k, e in control.store.list(control.keys.published()).items()} == (
        versions
    )
    roster = Roster.from_bytes(control.store.get(control.keys.roster(0)).value)
    fleet.judge.on_heartbeats(control.record, roster, {})
    assert fleet.monitor.before is None, "generation 7 is not this one"

    fleet.leader.monitors[0].errors = {"x" * PUBLISHED_BYTES_MAX: 1}
    fleet.leader.monitors[0].publish = lambda: fleet.leader.monitors[0].errors
    fleet.publish()
    found = control.store.list(control.keys.published(LinkMonitor.name, fleet.leader.me.agent))
    assert [entry.version for entry in found.values()] == [1]


def test_the_leader_judges_now_and_then_and_only_while_workers_run(node, other):
    fleet = Fleet(node, other, n1=1, n2=50)
    fleet.turn()
    control = fleet.leader.control
    roster = Roster.from_bytes(control.store.get(control.keys.roster(0)).value)
    fleet.judge.on_heartbeats(control.record, roster, {})
    assert control.record.suspected == {}, f"{JUDGE_S} s have not passed"
    fleet.clock.advance(JUDGE_S)
    record = control.record
    fleet.judge.on_heartbeats(replace(record, phase=RunPhase.DRAIN), roster, {})
    assert control.record.suspected == {}
    fleet.judge.on_heartbeats(record, roster, {})
    fleet.leader.threads.run_once(hold_s=0.0)
    assert list(control.record.suspected) == ["n2"]


def test_its_report_is_what_the_agent_makes_of_it(node):
    monitor = LinkMonitor(node.agent.clock, n7=101)

    assert report_of(monitor).node == "n7"
    monitor.errors = {"n7": MAY_SUSPECT}
    assert monitor.poll() == []
