"""What the leader writes next, from what it sees: the table of cases of `next_change`."""

from dataclasses import replace

import pytest
from support.decisions import decision as restart_decision

from gpuops.control.membership import Liveness
from gpuops.control.record import ControlRecord, Member, Roster, RunPhase
from gpuops.control.step import (
    FileReports,
    FormRoster,
    LeaderPolicy,
    LeaderTimeouts,
    Observation,
    UpdateRecord,
    next_change,
)
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_REQUEUE
from gpuops.incident.decision import NodeReport, OnExhausted, ReportKind, RestartPolicy

LIVE, SUSPECT, DEAD = Liveness.LIVE, Liveness.SUSPECT, Liveness.DEAD
TIMEOUTS = LeaderTimeouts()


def member(number):
    return Member(
        agent=f"a{number}",
        node=f"n{number}",
        address=f"n{number}",
        n_workers=2,
        node_rank_hint=None,
    )


def roster(*numbers, generation=3):
    return Roster(generation=generation, members=tuple(map(member, numbers)), spares=())


def report(kind=ReportKind.STOPPED, number=1):
    return NodeReport(kind=kind, node=f"n{number}", generation=3, arrival=number)


def record(phase, **changes):
    made = ControlRecord(run_id="r1", folder="run", generation=3, phase=phase, since_s=0.0)
    return replace(made, **changes)


def observed(phase, **changes):
    """Return what a leader of two live nodes sees, with *changes*."""
    given = {
        "record": record(phase),
        "roster": roster(1, 2, generation=2 if phase is RunPhase.RENDEZVOUS else 3),
        "live": ("n1", "n2"),
        "liveness": {"a1": LIVE, "a2": LIVE},
        "silence_s": {"a1": 0.0, "a2": 20.0},
        "now_s": 1000.0,
        "phase_s": 1.0,
        "workers_ended_s": 100.0,
        "reports": {},
    }
    return Observation(**given | changes)


def policy(decide=lambda *_: None, **restart):
    given = {"nodes_min": 1, "nodes_max": 2, "restarts_max": 3}
    return LeaderPolicy(restart=RestartPolicy(**given | restart), timeouts=TIMEOUTS, decide=decide)


def change_of(seen, **restart):
    return next_change(seen, policy(**restart), "n1")


def written(change, seen):
    """Return the record after *change*."""
    assert isinstance(change, UpdateRecord | FormRoster)
    return change.update(seen.record)


BOTH_DONE = {"a1": report(ReportKind.DONE, 1), "a2": report(ReportKind.DONE, 2)}
BOTH_STOPPED = {"a1": report(number=1), "a2": report(number=2)}
ONE_DEAD = {"a1": LIVE, "a2": DEAD}
FULL = {"ready": (member(1), member(2)), "candidate": roster(1, 2)}
SETTLED = {"settled": frozenset(("a1", "a2"))}
HALF = {"ready": (member(1),), "candidate": roster(1)}
EXITS = {
    "all done": (RunPhase.RUN, {"reports": BOTH_DONE}, EXIT_OK),
    "all done while it drained": (RunPhase.DRAIN, {"reports": BOTH_DONE, **SETTLED}, EXIT_OK),
    "one done, one drained": (
        RunPhase.DRAIN,
        {"reports": {"a1": report(ReportKind.DONE, 1), "a2": report(number=2)}, **SETTLED},
        EXIT_REQUEUE,
    ),
    "drained": (RunPhase.DRAIN, {"reports": BOTH_STOPPED, **SETTLED}, EXIT_REQUEUE),
    "drained, one dead that was to persist": (
        RunPhase.DRAIN,
        {"reports": BOTH_STOPPED, "liveness": ONE_DEAD},
        EXIT_REQUEUE,
    ),
    "drained, one dead": (
        RunPhase.DRAIN,
        {"reports": {"a1": report()}, "liveness": ONE_DEAD},
        EXIT_REQUEUE,
    ),
    "drained before it ran": (RunPhase.DRAIN, {"roster": None, "liveness": {}}, EXIT_REQUEUE),
    "too few come again": (RunPhase.RENDEZVOUS, {"phase_s": 600.0}, EXIT_REQUEUE),
    "too few ever came": (RunPhase.RENDEZVOUS, {"phase_s": 600.0, "roster": None}, EXIT_FAIL),
}
WAITS = {
    "all live": (RunPhase.RUN, {}),
    "one is suspect": (RunPhase.RUN, {"liveness": {"a1": LIVE, "a2": SUSPECT}}),
    "one is done": (RunPhase.RUN, {"reports": {"a1": report(ReportKind.DONE)}}),
    "the roster is an older one": (RunPhase.RUN, {"roster": roster(1, generation=2)}),
    "one has not reported": (RunPhase.COLLECT, {"reports": {"a1": report()}}),
    "one that is suspect has not reported, however long": (
        RunPhase.COLLECT,
        {"reports": {}, "liveness": {"a1": SUSPECT, "a2": LIVE}, "phase_s": 1e6},
    ),
    "a live one drains": (RunPhase.DRAIN, {"reports": {"a1": report()}}),
    "a live one drains, the other has persisted its last state": (
        RunPhase.DRAIN,
        {"reports": {"a1": report()}, "settled": frozenset({"a1"})},
    ),
    "the last state of one is not persistent yet": (
        RunPhase.DRAIN,
        {"reports": BOTH_STOPPED, "settled": frozenset({"a1"})},
    ),
    "nobody is ready": (RunPhase.RENDEZVOUS, {"phase_s": 599.0}),
    "workers may live": (
        RunPhase.RENDEZVOUS,
        {**HALF, "workers_ended_s": 29.9, "enough_s": 60.0},
    ),
    "a survivor comes whose place a spare would take": (
        RunPhase.RENDEZVOUS,
        {
            "ready": (member(1), member(3)),
            "candidate": roster(1, 3),
            "live": ("n1", "n2", "n3"),
            "enough_s": 4.9,
        },
    ),
    "in the back-off": (
        RunPhase.RENDEZVOUS,
        {
            **FULL,
            "record": record(
                RunPhase.RENDEZVOUS,
                decision=replace(restart_decision(), backoff_s=5.0),
                not_before_s=1004.0,
            ),
        },
    ),
    "a survivor comes": (RunPhase.RENDEZVOUS, {**HALF, "enough_s": 4.9}),
    "the first call lasts": (
        RunPhase.RENDEZVOUS,
        {
            **HALF,
            "record": record(RunPhase.RENDEZVOUS, generation=0),
            "roster": None,
            "enough_s": 29,
        },
    ),
    "the run is over": (RunPhase.STOP, {"liveness": ONE_DEAD}),
}


@pytest.mark.parametrize(("phase", "changes"), WAITS.values(), ids=WAITS)
def test_the_leader_waits(phase, changes):
    assert change_of(observed(phase, **changes)) is None


@pytest.mark.parametrize(("phase", "changes", "code"), EXITS.values(), ids=EXITS)
def test_the_run_ends(phase, changes, code):
    seen = observed(phase, **changes)

    after = written(change_of(seen), seen)

    assert (after.phase, after.exit_code, after.decided_by) == (RunPhase.STOP, code, "n1")


def test_a_dead_node_is_reported_and_then_all_reports_are_collected():
    seen = observed(RunPhase.RUN, liveness=ONE_DEAD)

    first = change_of(seen)
    assert isinstance(first, FileReports)
    assert list(first.reports) == ["a2"]
    assert first.reports["a2"].kind is ReportKind.NODE_LOST
    assert first.reports["a2"].how == "its agent sent no heartbeat for 20 s"

    after = written(change_of(replace(seen, filed=frozenset({"a2"}))), seen)
    assert (after.phase, after.trigger) == (RunPhase.COLLECT, ReportKind.NODE_LOST)
    assert after.reason == "no heartbeat of n2"


def test_one_that_died_after_it_was_done_is_no_failure():
    seen = observed(RunPhase.RUN, liveness=ONE_DEAD, reports={"a2": report(ReportKind.DONE, 2)})
    assert change_of(seen) is None


def test_a_dead_node_is_reported_while_reports_are_collected():
    seen = observed(RunPhase.COLLECT, liveness=ONE_DEAD, reports={"a1": report()})
    assert list(change_of(seen).reports) == ["a2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"reports": BOTH_STOPPED},
        {"reports": {"a1": report()}, "filed": frozenset({"a2"}), "liveness": ONE_DEAD},
        {"reports": {"a1": report()}, "phase_s": TIMEOUTS.end_s},
    ],
    ids=["all have reported", "the other is dead", "the other has had its time"],
)
def test_a_decision_is_made_on_the_reports_in_order_of_arrival(changes):
    seen = observed(RunPhase.COLLECT, **changes)
    made, asked = restart_decision(), []

    def decide(*given):
        asked.append(given)
        return made, "a note"

    change = next_change(seen, policy(decide), "n1")

    ((reports, cluster, history, now_s),) = asked
    assert reports == tuple(sorted(changes["reports"].values(), key=lambda r: r.arrival))
    assert (cluster.members, cluster.live, now_s) == (("n1", "n2"), ("n1", "n2"), 1000.0)
    assert change.decided.decision is made
    assert (change.decided.reports, change.decided.note) == (reports, "a note")
    assert history == seen.record.history
    assert written(change, seen).decision == made


def test_a_decision_that_is_still_being_made_is_waited_for():
    seen = observed(RunPhase.COLLECT, reports=BOTH_STOPPED)
    assert next_change(seen, policy(lambda *_: None), "n1") is None


@pytest.mark.parametrize(
    "changes",
    [
        FULL,
        {**HALF, "live": ("n1",), "liveness": ONE_DEAD},
        {**HALF, "enough_s": TIMEOUTS.last_call_s},
        {**FULL, "live": ("n1", "n2", "n3")},
        {**FULL, "workers_ended_s": 0.0},
        {**HALF, "workers_ended_s": 0.0, "reports": {"a2": report()}, "live": ("n1",)},
    ],
    ids=[
        "all are ready",
        "the other is dead",
        "the last call is over",
        "a late spare",
        "to be ready says that the workers have ended",
        "a report says so, too",
    ],
)
def test_a_roster_is_formed(changes):
    seen = observed(RunPhase.RENDEZVOUS, **changes)

    change = change_of(seen)

    assert change.roster is seen.candidate
    assert written(change, seen).phase is RunPhase.RUN


@pytest.mark.parametrize(
    ("changes", "restart", "forms"),
    [
        (FULL, {}, True),
        ({**HALF, "enough_s": TIMEOUTS.first_call_s}, {}, True),
        ({**HALF, "live": ("n1",)}, {}, False),
    ],
    ids=["full", "first call over", "others may not have started yet"],
)
def test_the_first_roster_waits_for_all_or_for_the_first_call(changes, restart, forms):
    first = {"record": record(RunPhase.RENDEZVOUS, generation=0), "roster": None}
    change = change_of(observed(RunPhase.RENDEZVOUS, **first | changes), **restart)
    assert isinstance(change, FormRoster) == forms


@pytest.mark.parametrize(
    ("live", "phase_s", "is_asked"),
    [((), 599.0, False), (("n1",), 4.9, False), (("n1",), 5.0, True), ((), 600.0, True)],
)
def test_a_failed_check_is_decided_once_the_nodes_that_it_concerns_may_hear_of_it(
    live, phase_s, is_asked
):
    """Of three nodes that are all needed one is sick, and the third has not come."""
    asked = []
    seen = observed(
        RunPhase.RENDEZVOUS,
        record=record(RunPhase.RENDEZVOUS, generation=0, excluded={"n2": "sick"}),
        roster=None,
        live=live,
        phase_s=phase_s,
        failed_gates=(report(ReportKind.GATE_FAILED, 2),),
    )
    next_change(seen, policy(lambda *_: asked.append(1), nodes_min=3, nodes_max=3), "n2")
    assert bool(asked) == is_asked


def test_too_few_for_a_run_that_must_be_full_name_the_full_number():
    seen = observed(RunPhase.RENDEZVOUS, phase_s=600.0, live=("n1",))
    change = change_of(seen, on_exhausted=OnExhausted.REQUEUE)
    assert written(change, seen).reason == "1 of at least 2 nodes came within 600 s: n1"


WAITING = {"live": ("n1", "n2", "n3"), "waiting_s": 1.0}


@pytest.mark.parametrize(
    ("changes", "grows"),
    [
        ({**WAITING, "has_saved": True, "checkpoint_step": 7, "waiting_s": 60.0}, True),
        ({**WAITING, "checkpoint_step": 7, "waiting_s": 1e5}, False),
        ({**WAITING, "waiting_s": 299.0}, False),
        ({**WAITING, "waiting_s": 301.0}, True),
        ({"waiting_s": 301.0}, False),
        ({**WAITING, "waiting_s": 301.0, "reports": {"a1": report(ReportKind.DONE)}}, False),
    ],
    ids=[
        "right after a checkpoint",
        "long after the last one",
        "no checkpoints, not long enough",
        "no checkpoints, long enough",
        "nobody waits",
        "a node is done",
    ],
)
def test_a_run_grows_at_a_good_moment(changes, grows):
    seen = observed(RunPhase.RUN, **changes)

    change = change_of(seen, nodes_max=3)

    assert (change is not None) == grows
    if grows:
        after = written(change, seen)
        assert (after.phase, after.generation) == (RunPhase.RENDEZVOUS, 4)
