"""One generation on one node, from its start to what is decided after it: no processes, no time."""

import signal
from dataclasses import replace
from functools import partial

import pytest
from support.exits import PEER_CLOSED
from support.keepers import FakeKeeper, Heard
from support.kernel_log import write_kmsg
from support.supervised import Agent, FakeWorkers, Node, over

from gpuops.agent.checkpoint.keeper_supervisor import KeeperSupervisor, KeeperTimeouts
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.monitors.api import Monitor
from gpuops.agent.monitors.evidence import EVIDENCE_S
from gpuops.control.record import RunPhase
from gpuops.control.transitions import grow
from gpuops.incident.decision import NodeReport, ReportKind, RestartPolicy
from gpuops.incident.kernel import JobXidFilter
from gpuops.incident.suspicion import Suspicion, SuspicionLevel
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.wire.ring import Beat, StepSource, WorkerFlag
from gpuops.wire.ring import WorkerPhase as BeatPhase

pytestmark = pytest.mark.torch


class Sentry(Monitor):
    """Suspects what a test gives it, one word at each poll; a word of END is kept."""

    def __init__(self, *words):
        self.words = list(words)
        self.deadlines_ns = []

    def poll(self):
        word = self.words.pop(0) if self.words else None
        if isinstance(word, Exception):
            raise word
        if word is not None and word.level is not SuspicionLevel.NOTE:
            self.words.insert(0, word)
        return () if word is None else (word,)

    def evidence(self, deadline_ns):
        self.deadlines_ns.append(deadline_ns)
        return ()


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_when_every_worker_is_done_the_run_is_over(node):
    result = node.then(lambda: None, node.codes(r0=0), node.codes(r1=0)).watch().run()

    assert not result.is_failed()
    record = node.agent.control.record
    assert (record.phase, record.exit_code) == (RunPhase.STOP, 0)
    assert node.file_report().kind is ReportKind.DONE
    assert [end.exit_code for end in node.file_report().ends] == [0, 0]


def test_a_worker_that_fails_ends_the_others_and_a_new_generation_follows(node):
    assert node.then(node.codes(r1=-9)).watch().run() is None

    record = node.agent.control.record
    assert (record.phase, record.generation) == (RunPhase.RENDEZVOUS, 1)
    assert record.decision.failure.failure_class is FailureClass.SIGKILL_PROBABLE
    assert node.agent.workers.ended_by_us == [0]
    report = node.file_report()
    assert report.kind is ReportKind.WORKERS_FAILED
    assert [culprit.id for culprit in report.culprits] == ["1"]
    assert any("attempt 0 failed" in line for line in node.agent.said)
    assert any("attempt 1 follows" in line for line in node.agent.said)
    assert node.agent.states == ["restarting"]
    (incident,) = node.agent.payloads("incident.recorded")[-1:]
    assert incident["failure_class"] == "host_mem.sigkill_probable"


def test_with_the_budget_spent_the_run_is_over(tmp_path):
    node = Node(tmp_path, terms=RestartPolicy(restarts_max=0))
    record = over(node.then(node.codes(r0=1)).watch())

    assert record.exit_code == 1
    assert node.agent.states == ["ended"]


def test_what_happens_elsewhere_ends_the_generation_here(tmp_path):
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    other = Agent(tmp_path, terms=terms, board=node.agent.shared, clock=node.agent.clock, number=2)

    def fails_there():
        other.run_once()
        other.control.file_report(
            NodeReport(
                kind=ReportKind.WORKERS_FAILED,
                node="n2",
                generation=0,
                failure_class=FailureClass.SIGKILL_PROBABLE,
            )
        )
        other.control.update_record(
            lambda now: replace(now, phase=RunPhase.COLLECT, trigger=ReportKind.WORKERS_FAILED)
        )

    assert node.then(fails_there).watch(other).run() is None
    assert node.file_report().kind is ReportKind.STOPPED
    assert node.agent.workers.ended_by_us == [0, 1]
    record = node.agent.control.record
    assert (record.generation, record.decision.cause.node) == (1, "n2")


@pytest.mark.parametrize(
    ("code", "words", "kind"),
    [(1, PEER_CLOSED, ReportKind.STOPPED), (-9, "", ReportKind.WORKERS_FAILED)],
)
def test_ranks_that_lose_their_peers_because_nodes_join_have_not_failed(
    tmp_path, code, words, kind
):
    """The workers of the other node were ended first; what was killed has failed all the same."""
    node = Node(tmp_path, terms=RestartPolicy(nodes_min=1, nodes_max=2))
    agent = node.agent

    def nodes_join():
        agent.workers.codes[0], agent.workers.log_tails[0] = code, (words,)
        agent.control.update_record(
            lambda now: grow(now, now, reason="1 more nodes wait", by="n2", now_s=1.0)
        )

    assert node.then(nodes_join).watch().run() is None
    assert node.file_report().kind is kind
    assert bool(agent.payloads("incident.recorded")) == (kind is ReportKind.WORKERS_FAILED)


def test_done_here_it_goes_on_when_others_fail(tmp_path):
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    other = Agent(tmp_path, terms=terms, board=node.agent.shared, clock=node.agent.clock, number=2)

    def fails_there():
        other.run_once()
        lost = NodeReport(
            kind=ReportKind.WORKERS_FAILED,
            node="n2",
            generation=0,
            failure_class=FailureClass.PEER_CLOSED,
            confidence=Confidence.SYMPTOM_ONLY,
        )
        other.control.file_report(lost)
        other.control.update_record(lambda now: replace(now, phase=RunPhase.COLLECT))

    node.agent.while_waiting = [fails_there]
    assert node.then(node.codes(r0=0, r1=0)).watch(other).run() is None
    cause = node.agent.control.record.decision.cause
    assert (cause.failure_class, cause.node) == (FailureClass.USER_EARLY_EXIT, "n1")
    assert [culprit.id for culprit in cause.culprits] == ["0", "1"]


def fault(**changes):
    xid = Suspicion(
        kind=ReportKind.GPU_FAULT,
        entity=Entity(EntityKind.GPU, "GPU-3"),
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED,
        level=SuspicionLevel.END,
        source="gpu",
        why="Xid 79 on GPU 3",
    )
    return replace(xid, **changes)


def hang():
    return fault(
        kind=ReportKind.HANG,
        entity=Entity(EntityKind.RANK, "1"),
        failure_class=FailureClass.HANG_NO_PROGRESS,
        confidence=Confidence.PROBABLE,
        why="no progress for 10 s",
    )


def test_what_a_sentry_reports_ends_the_generation_under_its_words(node):
    node.agent.monitors = [Sentry(None, fault())]
    assert node.watch().run() is None

    report = node.file_report()
    assert (report.kind, report.how) == (ReportKind.GPU_FAULT, "Xid 79 on GPU 3")
    assert len(report.ends) == 2, "with what became of the workers"
    assert node.agent.monitors[0].deadlines_ns == [], "only a standstill is looked into"


def doubt(node="n1", how="sums: its sums differ"):
    return fault(
        kind=ReportKind.VERDICT,
        entity=Entity(EntityKind.RANK, "1"),
        failure_class=FailureClass.SITE_CHECK,
        confidence=Confidence.PROBABLE,
        level=SuspicionLevel.SUSPECT,
        node=node,
        why=how,
    )


def test_a_doubt_ends_nothing_and_the_restart_that_comes_anyway_does_without_the_node(tmp_path):
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    agent = node.agent
    agent.monitors = [Sentry(doubt()), Sentry(doubt(how="chatter: more of it"))]
    other = Agent(tmp_path, terms=terms, board=agent.shared, clock=agent.clock, number=2)
    seen = []

    def doubted():
        seen.append((agent.control.record.phase, dict(agent.control.record.suspected)))

    def fails_there():
        other.run_once()
        other.control.file_report(
            NodeReport(kind=ReportKind.WORKERS_FAILED, node="n2", generation=0)
        )
        other.control.update_record(lambda now: replace(now, phase=RunPhase.COLLECT))

    story = [lambda: None, lambda: None, doubted, fails_there]
    assert node.then(*story).watch(other).run() is None

    assert seen == [(RunPhase.RUN, {"n1": "sums: its sums differ"})]
    record = agent.control.record
    assert (record.phase, record.generation) == (RunPhase.RENDEZVOUS, 1)
    assert record.excluded == {"n1": "suspected: sums: its sums differ"}
    assert record.decision.rule == "restart"
    assert record.decision.reason.endswith("; restart, and without the suspected n1")
    agent.session.journal.excluded(record.excluded["n1"], agent.clock.now_us())
    found = agent.told("node.doubted", "decision.made", "incident.recorded")
    (told,) = found["node.doubted"]
    assert (told["doubted"], told["reason"]) == ("n1", "sums: its sums differ")
    (made,) = found["decision.made"]
    assert made["cluster"]["doubted"] == {"n1": "sums: its sums differ"}
    incidents = [i for i in found["incident.recorded"] if "is suspected" in i["title"]]
    assert [(i["state"], i["actions"], i["attempt"]) for i in incidents] == [
        ("open", [], None),
        ("closed", ["exclude-node"], None),
    ]
    assert incidents[1]["resolution"] == "n1 was excluded from the run"
    assert {item["id"] for item in incidents[1]["culprits"]} == {"1", "n1"}


def test_a_doubt_waits_for_a_board_that_is_away(node):
    agent = node.agent
    agent.monitors = [Sentry(doubt())]
    tries = []

    def away():
        agent.store.is_cut = True

    def back():
        tries.append(dict(agent.control.record.suspected))
        agent.store.is_cut = False

    story = [away, *[lambda: None] * 3, back, *[lambda: None] * 30, node.codes(r0=0, r1=0)]
    assert not node.then(*story).watch().run().is_failed()

    assert tries == [{}]
    assert agent.control.record.suspected == {"n1": "sums: its sums differ"}
    assert len(agent.payloads("node.doubted")) == 1


def test_before_workers_that_stand_still_are_ended_they_are_looked_at(node):
    node.agent.monitors = [Sentry(hang()), Sentry()]
    assert node.watch().run() is None

    (first,), (second,) = (sentry.deadlines_ns for sentry in node.agent.monitors)
    assert first == second
    assert 0 < first - node.agent.clock.mono_ns() <= EVIDENCE_S * 1e9
    assert node.file_report().kind is ReportKind.HANG


@pytest.mark.parametrize("turn", [1, -1])
def test_a_gpu_that_fails_in_the_same_second_explains_a_hang_whoever_speaks_first(node, turn):
    node.agent.monitors = [Sentry(hang()), Sentry(fault(node="n1"))][::turn]
    over(node.watch())

    report = node.file_report()
    assert (report.kind, report.failure_class) == (
        ReportKind.GPU_FAULT,
        FailureClass.GPU_FELL_OFF_BUS,
    )
    assert (report.blames_node, len(report.ends)) == (True, 2)


class Late(Sentry):
    """Has something to say once the workers have been looked at."""

    def poll(self):
        return super().poll() if self.deadlines_ns else ()


def test_a_gpu_that_fails_while_a_hang_is_looked_at_explains_it(node):
    node.agent.monitors = [Sentry(hang()), Late(fault(node="n1"))]
    record = over(node.watch())

    assert (record.trigger, record.decision.cause.kind) == (ReportKind.HANG, ReportKind.GPU_FAULT)
    assert list(record.excluded) == ["n1"]


def hangs(other):
    """The agent *other* files a hang and ends the generation for it."""
    other.run_once()
    other.control.file_report(NodeReport(kind=ReportKind.HANG, node="n2", generation=0))
    other.control.update_record(
        lambda now: replace(now, phase=RunPhase.COLLECT, trigger=ReportKind.HANG)
    )


def test_a_gpu_of_this_node_explains_the_hang_of_another(tmp_path):
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    node.agent.monitors = [Late(fault(node="n1"))]
    other = Agent(tmp_path, terms=terms, board=node.agent.shared, clock=node.agent.clock, number=2)

    assert node.then(partial(hangs, other)).watch(other).run() is None
    decision = node.agent.control.record.decision
    assert (decision.cause.node, decision.cause.kind) == ("n1", ReportKind.GPU_FAULT)
    assert list(decision.exclude) == ["n1"]


@pytest.mark.parametrize(
    ("before_s", "failure_class"),
    [(2.0, FailureClass.GPU_ILLEGAL_ACCESS), (900.0, FailureClass.HANG_NO_PROGRESS)],
)
def test_an_xid_of_the_second_in_which_the_ranks_fell_silent_explains_the_hang(
    node, before_s, failure_class
):
    """The hang is noticed minutes later; the Xid alone did not end the generation."""
    silent_ns = node.agent.clock.mono_ns() - 600 * 10**9
    note = fault(
        level=SuspicionLevel.NOTE,
        failure_class=FailureClass.GPU_ILLEGAL_ACCESS,
        last_ns=silent_ns - round(before_s * 1e9),
    )
    node.agent.monitors = [Sentry(replace(hang(), since_ns=silent_ns)), Sentry(*[note] * 9)]
    assert node.watch().run() is None

    assert node.file_report().failure_class is failure_class


@pytest.mark.parametrize("stuck", [True, False])
def test_for_the_hang_of_another_node_each_node_reports_what_its_own_ranks_do(tmp_path, stuck):
    """The rank in state D may be on the slower node."""
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    here = hang()
    if stuck:
        here = replace(here, failure_class=FailureClass.HANG_D_STATE, node="n1")
    node.agent.monitors = [Late(here)]
    other = Agent(tmp_path, terms=terms, board=node.agent.shared, clock=node.agent.clock, number=2)

    assert node.then(partial(hangs, other)).watch(other).run() is None
    assert node.file_report().kind is ReportKind.HANG
    assert list(node.agent.control.record.excluded) == (["n1"] if stuck else [])


def test_what_is_only_probable_does_not_explain_a_hang_that_came_first(node):
    node.agent.monitors = [Sentry(hang()), Late(fault(confidence=Confidence.PROBABLE))]
    assert node.watch().run() is None

    assert node.file_report().kind is ReportKind.HANG


def test_a_sentry_that_fails_is_recorded_as_ours_and_the_training_goes_on(node):
    node.agent.monitors = [Sentry(*[ZeroDivisionError("ours")] * 3)]
    story = [lambda: None] * 4
    result = node.then(*story, node.codes(r0=0, r1=0)).watch().run()

    assert not result.is_failed()
    failures = node.agent.payloads("tool.failed")
    assert [payload["what"] for payload in failures] == ["watching the workers"] * 2
    assert failures[1]["times"] == 2


def notice(node, name="SIGTERM"):
    return lambda: setattr(node.agent.cancellation, "drain", signal.Signals[name])


def test_a_notice_of_preemption_drains_the_run(node):
    record = over(node.then(notice(node)).watch())

    assert (record.phase, record.exit_code, record.drain_signal) == (RunPhase.STOP, 85, "SIGTERM")
    assert node.agent.workers.ended_by_us == [0, 1]
    assert node.file_report().kind is ReportKind.STOPPED
    (incident,) = node.agent.payloads("incident.recorded")
    assert incident["title"].startswith("drained on SIGTERM")


def at_their_end(node, flags=WorkerFlag.HANDLES_SIGTERM):
    def end():
        for ring in node.agent.workers.rings:
            ring.flags = flags
        node.agent.workers.codes = {0: 0, 1: 0}

    return end


@pytest.mark.parametrize("looks", [1, 0])
def test_ranks_that_end_by_themselves_while_the_run_drains_are_done(node, looks):
    def asked():
        node.agent.workers.beat(0, 1)
        notice(node)()
        if not looks:
            at_their_end(node)()

    story = [asked, *[lambda: None] * looks, at_their_end(node)]
    record = over(node.then(*story).watch())

    assert (record.phase, record.exit_code) == (RunPhase.STOP, 0)
    assert node.file_report().kind is ReportKind.DONE
    told = node.agent.told("incident.recorded", "attempt.ended")
    assert [end["outcome"] for end in told["attempt.ended"]] == ["completed"]
    assert not told["incident.recorded"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(WorkerFlag(0), id="with a handler of its own"),
        pytest.param(
            WorkerFlag.HANDLES_SIGTERM | WorkerFlag.STOP_POLLED | WorkerFlag.STOP_RETURNED,
            id="as should_stop said",
        ),
    ],
)
def test_ranks_that_end_with_0_as_they_were_asked_to_are_drained(node, flags):
    story = [lambda: node.agent.workers.beat(0, 1), notice(node), at_their_end(node, flags)]
    record = over(node.then(*story).watch())

    assert (record.exit_code, node.file_report().kind) == (85, ReportKind.STOPPED)


def test_a_notice_to_a_worker_counts_as_one_to_us(node):
    flags = lambda: setattr(node.agent.workers.rings[1], "flags", WorkerFlag.SIGNALLED)  # noqa: E731

    assert over(node.then(flags).watch()).drain_signal == "SIGUSR1"


def test_ranks_that_ask_are_given_one_common_step(node):
    def steps():
        for ring in node.agent.workers.rings:
            ring.flags = WorkerFlag.STOP_POLLED
        node.agent.workers.news = {
            rank: [
                Beat(
                    step,
                    step,
                    node.agent.clock.mono_ns() + step * 10**9,
                    BeatPhase.STEPPING,
                    StepSource.REPORTED,
                    step,
                )
                for step in (1, 2, 3)
            ]
            for rank in (0, 1)
        }

    story = [steps, lambda: None, notice(node), lambda: None, node.codes(r0=0, r1=0)]
    record = over(node.then(*story).watch())

    wanted = {ring.wanted[1] for ring in node.agent.workers.rings}
    assert wanted == {record.drain_step}
    assert record.drain_step > 3


def test_a_signal_that_cancels_is_raised_at_once(node):
    cancelled = lambda: setattr(node.agent.cancellation, "received", signal.SIGINT)  # noqa: E731

    with pytest.raises(KeyboardInterrupt):
        node.then(cancelled).watch().run()


def test_a_board_that_is_away_delays_the_end_and_loses_nothing(node):
    agent = node.agent

    def fails_unheard():
        agent.workers.codes[0] = -9
        agent.store.is_cut = True

    agent.while_waiting = [lambda: None, lambda: setattr(agent.store, "is_cut", False)]
    assert node.then(fails_unheard).watch().run() is None

    assert agent.control.record.generation == 1
    assert node.file_report().kind is ReportKind.WORKERS_FAILED


def test_workers_that_were_never_started_are_reported_without_asking_torch(node):
    node.agent.workers = FakeWorkers(0)
    refused = NodeReport(
        kind=ReportKind.START_FAILED,
        node="n1",
        generation=0,
        failure_class=FailureClass.START_FAILED,
        how="no such program",
        is_infrastructure=True,
    )
    watching = node.watch()
    watching.end((refused,))

    assert node.reaped == 0
    assert node.file_report().how == "no such program"
    assert node.agent.control.record.decision.rule == "launch.infrastructure"


def test_a_worker_that_outlives_sigkill_keeps_its_node_out(node):
    node.agent.workers.stuck_ranks = (1,)
    record = over(node.then(node.codes(r0=-9)).watch())

    assert node.file_report().failure_class is FailureClass.HANG_D_STATE
    assert (record.exit_code, list(record.excluded)) == (86, ["n1"])
    # torch would wait for it, longer than the others wait for the report.
    assert (node.reaped, node.left) == (0, [(1,)])


def test_a_worker_that_still_gives_its_memory_back_blames_nobody(node):
    node.agent.workers.exiting_ranks = (0,)
    assert node.then(node.codes(r1=-9)).watch().run() is None

    assert node.file_report().failure_class is FailureClass.SIGKILL_PROBABLE
    assert not node.file_report().blames_node
    assert (node.reaped, node.left) == (0, [(0,)])
    (incident,) = node.agent.payloads("incident.recorded")[-1:]
    assert any("memory back" in item["text"] for item in incident["evidence"])


@pytest.mark.parametrize(
    ("own", "blames"), [("0000:3b:00.0", True), ("0000:5e:00.0", False), (None, True)]
)
def test_another_jobs_gpu_in_the_log_does_not_blame_the_node(node, tmp_path, own, blames):
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus."
    watching, root = node.watch(), tmp_path / "n1"
    write_kmsg(root, [(1, "boot")])
    node.agent.session.kernel_log.mark()
    write_kmsg(root, [(1, "boot"), (2, line)])
    if own is not None:
        node.agent.job_xids = lambda _since_ns: JobXidFilter(addresses=frozenset({own}))
        watching = node.watch()
    node.then(node.codes(r0=-9))
    if blames:
        assert over(watching).exit_code == 86
    else:
        assert watching.run() is None
    assert node.file_report().blames_node is blames
    fell_off = node.file_report().failure_class is FailureClass.GPU_FELL_OFF_BUS
    (incident,) = node.agent.payloads("incident.recorded")[-1:]
    assert fell_off is (incident["failure_class"] == "gpu_hw.fell_off_bus") is blames


def test_a_fenced_node_says_so_when_it_is_back(tmp_path):
    terms = RestartPolicy(nodes_min=1, nodes_max=2)
    node = Node(tmp_path, terms=terms)
    agent = node.agent
    other = Agent(tmp_path, terms=terms, board=agent.shared, clock=agent.clock, number=2)
    watching = node.watch(other)

    def cut_off():
        agent.store.is_cut = True
        for _ in range(60):
            agent.run_once()
            other.run_once()
        agent.threads.check_fence()

    def back():
        agent.store.is_cut = False
        other.run_once()

    agent.while_waiting = [back, *[other.run_once] * 80]
    node.then(cut_off)
    assert watching.run() is None

    assert agent.workers.killed
    assert agent.states == ["fenced"]
    assert node.file_report().kind is ReportKind.NODE_LOST
    assert agent.control.record.generation == 1
    assert [p["away_s"] >= 10 for p in agent.payloads("agent.rejoined")] == [True]
    assert (node.reaped, node.left) == (1, [])


def test_a_fenced_node_does_not_wait_for_what_outlives_sigkill(node):
    agent = node.agent
    agent.workers.stuck_ranks = (1,)
    watching = node.watch()

    def cut_off():
        agent.store.is_cut = True
        for _ in range(60):
            agent.run_once()
        agent.threads.check_fence()

    def back():
        agent.store.is_cut = False

    agent.while_waiting = [back]
    record = over(node.then(cut_off) and watching)

    assert (node.reaped, node.left) == (0, [(1,)])
    assert (node.file_report().kind, node.file_report().blames_node) == (ReportKind.NODE_LOST, True)
    assert record.exit_code == 86


class Kept:
    """A keeper of the node's checkpoints, told of its first generation."""

    def __init__(self, node):
        self.keeper = FakeKeeper()
        self.agent = node.agent
        record = CheckpointRecord(
            self.agent.session.journal,
            self.agent.step_tracker,
            self.agent.clock,
            self.agent.said.append,
            n_ranks=2,
        )
        self.agent.checkpoints = KeeperSupervisor(
            self.keeper.started, record, self.agent.clock, times=KeeperTimeouts(poll_s=60.0)
        )
        self.agent.checkpoints.begin(0, 1, None)


def test_a_drain_persists_the_newest_state_in_what_is_left_of_the_grace(node):
    kept = Kept(node)

    def last_step():
        kept.keeper.commit(7)
        node.agent.clock.advance(10)

    over(node.then(notice(node), lambda: None, last_step).watch())

    assert kept.keeper.persisted.step == 7
    (flushed,) = node.agent.payloads("checkpoint.flushed")
    assert flushed["fitted"]
    assert 5 < flushed["within_s"] <= 15
    (incident,) = [
        event.payload for event in node.agent.recorder.events if event.kind == "incident.recorded"
    ]
    assert "the checkpoint of step 7 persisted in /ckpt (" in str(incident["evidence"])


def test_a_drain_says_that_the_newest_state_did_not_fit(node):
    kept = Kept(node)
    kept.keeper.commit(7)
    kept.keeper.flush_s = 600.0

    over(node.then(notice(node)).watch())

    (incident,) = node.agent.payloads("incident.recorded")
    assert "the newest checkpoint of step 7 did not persist" in str(incident["evidence"])
    assert any("did not persist" in line for line in node.agent.said)


def test_workers_that_take_all_of_the_grace_leave_a_second_for_the_last_save(node):
    kept = Kept(node)
    kept.keeper.commit(7)
    for ring in node.agent.workers.rings:
        ring.flags = WorkerFlag.STOP_POLLED

    over(node.then(notice(node)).watch())

    (flushed,) = node.agent.payloads("checkpoint.flushed")
    assert flushed["within_s"] == pytest.approx(1.0, abs=0.5)
    assert flushed["fitted"]


def test_the_run_drains_until_the_last_state_has_persisted(node):
    kept, phases = Kept(node), []
    kept.keeper.commit(7)
    kept.keeper.flush_may_go_on.clear()

    def look():
        if kept.keeper.flushing.is_set():
            node.agent.run_once()
            phases.append(node.agent.control.record.phase)
            if len(phases) == 20:
                kept.keeper.flush_may_go_on.set()

    node.agent.while_waiting = [look] * 1000
    over(node.then(notice(node)).watch())

    assert len(phases) >= 20
    assert set(phases[:20]) == {RunPhase.DRAIN}


def test_a_second_signal_ends_the_wait_for_the_last_save(node):
    kept = Kept(node)
    kept.keeper.commit(7)
    kept.keeper.flush_may_go_on.clear()

    def again():
        if kept.keeper.flushing.is_set():
            raise KeyboardInterrupt

    node.agent.while_waiting = [again] * 1000

    with pytest.raises(KeyboardInterrupt):
        node.then(notice(node)).watch().run()
    kept.keeper.flush_may_go_on.set()


def test_the_report_of_a_failure_knows_what_was_saved_a_moment_before(node):
    kept = Kept(node)

    def fails():
        kept.keeper.commit(41)
        node.agent.workers.codes[1] = -9

    node.then(fails).watch().run()

    assert node.file_report().checkpoint_step == 41


def test_what_the_ranks_resumed_from_is_heard_before_their_first_step_is_told(node):
    kept = Kept(node)
    heard = Heard()
    node.agent.checkpoints = KeeperSupervisor(
        kept.keeper.started, heard, node.agent.clock, times=KeeperTimeouts(poll_s=60.0)
    )
    node.agent.checkpoints.begin(1, 1, None)
    told = []
    chronicle = node.agent.session.journal
    beats = chronicle.beats

    def listening(by_rank):
        if any(by_rank.values()):
            told.append([event.kind for event in heard.events])
        beats(by_rank)

    chronicle.beats = listening

    def steps():
        kept.keeper.restored(41, rank=0)
        beat = Beat(1, 42, node.agent.clock.mono_ns(), BeatPhase.STEPPING, StepSource.REPORTED, 1)
        node.agent.workers.news = {0: [beat]}

    node.then(steps, node.codes(r0=0, r1=0)).watch().run()

    assert told[0] == ["restored"]
