"""Whom a hung job waits for, by the collectives that the ranks of all nodes called."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import cluster, rank_end, report
from support.recorded_job import RecordedJob, broken_jobs, dumps_of, entry, played

from gpuops.detect.recorder_dump import parse_dump
from gpuops.incident.correlate import find_root
from gpuops.incident.decide import decide
from gpuops.incident.decision import NodeReport, ReportKind, RestartPolicy, RunAction
from gpuops.incident.incidents.cluster import decided_incident, preflight_incident
from gpuops.model import Confidence, EntityKind, FailureClass, Role, Side

CROSSED = RecordedJob(
    {"a": [0, 1], "b": [0, 1], "0": [0, 1, 2, 3]},
    {
        0: [("a", "all_reduce"), ("b", "all_reduce"), ("0", "barrier")],
        1: [("b", "all_reduce"), ("a", "all_reduce"), ("0", "barrier")],
        2: [("0", "barrier")],
        3: [("0", "barrier")],
    },
).play()
USUAL = entry("0", 4, "gloo:all_reduce")
ODD = entry("0", 4, "gloo:all_reduce", sizes=[(512,)])


def mismatched(*odd):
    return [parse_dump({"entries": [ODD if rank in odd else USUAL]}, rank) for rank in range(4)]


def end(dump, **changes):
    """Return a rank that by its stack waits in a collective."""
    fields = {"role": Role.SYMPTOM, "failure_class": FailureClass.HANG_COLLECTIVE, "signal": None}
    fields |= {"summary": f"rank {dump.rank} waits for other ranks in all_reduce"}
    return rank_end(dump.rank, collectives=dump, **(fields | changes))


def hang(node, *ends, **changes):
    """Return the report of *node* as the leader reads it."""
    fields = {"failure_class": FailureClass.HANG_COLLECTIVE, "ends": ends}
    told = report(node, ReportKind.HANG, **(fields | changes))
    return NodeReport.from_json(json.loads(json.dumps(told.to_json())))


def nodes(dumps, n_ranks=4):
    """Return a report of each node of *n_ranks* ranks."""
    starts = range(0, len(dumps), n_ranks)
    return [
        hang(f"n{number}", *map(end, dumps[start : start + n_ranks]), arrival=number)
        for number, start in enumerate(starts)
    ]


def named(root):
    return {found.rank for _, found in root.ends}


@given(broken_jobs(), st.permutations(range(4)))
def test_the_ranks_that_stopped_are_named_whichever_node_reports_first(job, order):
    reports = nodes(dumps_of(job))
    root = find_root([replace(reports[i], arrival=place) for place, i in enumerate(order)])

    assert root == replace(find_root(reports), report=root.report)
    assert bool(root.ends) == any(map(job.waits, job.programs))
    assert named(root) <= job.awaited()
    assert {node for node, _ in root.ends} == {f"n{rank // 4}" for rank in named(root)}
    assert not root.ends or root.report.node == root.ends[0][0]


@given(broken_jobs(), st.integers(0, 3), st.booleans())
def test_without_the_report_of_one_node_nobody_else_is_named(job, lost, is_old):
    """It is missing, or of a gpuops that reports no collectives."""
    reports = nodes(dumps_of(job))
    body = reports[lost].to_json()
    for item in body["ends"]:
        del item["collectives"]
    reports[lost : lost + 1] = [NodeReport.from_json(body)] if is_old else []
    root = find_root(reports)

    assert named(root) <= job.awaited()
    assert not {f"n{lost}"} & {node for node, _ in root.ends}


def test_a_rank_on_a_node_that_noticed_nothing_is_named_with_its_node():
    """By their stacks all ranks wait in a collective, and the leader's node reports first."""
    reports = nodes(dumps_of(played(stops_before={9: 3})))
    root = find_root(reports)

    assert (root.report.node, root.nodes, named(root)) == ("n2", ("n2",), {9})
    assert root.report.failure_class is FailureClass.HANG_COLLECTIVE
    assert root.report.confidence is Confidence.PROBABLE
    assert root.report.how.startswith("rank 9 has not called all_reduce(1024 Float), call 1 of")

    decision = decide(reports, cluster("n0", "n1", "n2", "n3"), (), 5.0)
    own = preflight_incident(reports[0], run_id="r", now_us=1)
    incident = decided_incident(
        decision, reports, run_id="r", node="n0", detected_us=1, own_incident=own
    )

    assert {(item.kind, item.id) for item in incident.culprits} == {
        (EntityKind.RANK, "9"),
        (EntityKind.NODE, "n2"),
    }
    assert incident.title == "rank 9 on n2 waits for other ranks in all_reduce"
    assert "rank 9 has not called" in incident.culprit_how


def test_the_deciding_node_takes_the_account_of_all_nodes_also_of_its_own_ranks():
    reports = nodes(mismatched(1), n_ranks=2)
    own = preflight_incident(reports[0], run_id="r", now_us=1)
    decision = decide(reports, cluster("n0", "n1"), (), 5.0)

    incident = decided_incident(
        decision, reports, run_id="r", node="n0", detected_us=1, own_incident=own
    )

    assert incident.failure_class is FailureClass.COLLECTIVE_MISMATCH
    assert (
        incident.title
        == "rank 1 on n0 called another operation, shape or dtype than the other ranks"
    )


@pytest.mark.parametrize(
    ("dumps", "failure_class", "ranks", "how"),
    [
        (
            mismatched(1),
            FailureClass.COLLECTIVE_MISMATCH,
            {1},
            (
                "call 4 of group 0 (all ranks) is all_reduce(1024 Float) on ranks 0,2-3"
                " and all_reduce(512 Float) on rank 1"
            ),
        ),
        (
            dumps_of(CROSSED),
            FailureClass.HANG_DEADLOCK,
            {0, 1},
            (
                "ranks 2-3 wait in barrier(1024 Float), call 1 of group 0 (all ranks);"
                " rank 0 waits in all_reduce(1024 Float), call 1 of group a (ranks 0-1);"
                " rank 1 waits in all_reduce(1024 Float), call 1 of group b (ranks 0-1):"
                " ranks 0-1 wait in one group for ranks that wait for them in another"
            ),
        ),
    ],
    ids=["mismatch", "deadlock"],
)
def test_collectives_that_do_not_match_are_the_programs_fault_and_stop_it_at_the_second_time(
    dumps, failure_class, ranks, how
):
    reports = nodes(dumps, n_ranks=2)
    root = find_root(reports)

    assert (root.report.failure_class, root.report.side) == (failure_class, Side.USER)
    assert (named(root), root.nodes, root.report.how) == (ranks, (), how)

    run = cluster("n0", "n1", terms=RestartPolicy(nodes_max=2, restarts_max=9))
    reports = [replace(told, has_stepped=True) for told in reports]
    first = decide(reports, run, (), 100.0)
    again = decide(reports, run, (first.failure,), 200.0)

    assert first.action is RunAction.RESTART
    assert not first.exclude
    assert all(end.collectives is None for end in first.cause.ends)
    assert first.reason.startswith(f"{failure_class.value}: {how[:40]}")
    assert (again.action, again.exit_code) == (RunAction.STOP, 93)
    assert again.rule == "software.same_step"


def test_another_mismatch_at_that_step_is_another_failure():
    run = cluster("n0", "n1", terms=RestartPolicy(nodes_max=2, restarts_max=9))
    other = [replace(told, has_stepped=True) for told in nodes(dumps_of(CROSSED), 2)]
    first = decide(other, run, (), 100.0)
    reports = [replace(told, has_stepped=True) for told in nodes(mismatched(1), n_ranks=2)]

    assert decide(reports, run, (first.failure,), 200.0).action is RunAction.RESTART


def test_a_state_of_a_process_comes_before_its_collectives():
    dumps = mismatched(1)
    stopped = end(dumps[3], failure_class=FailureClass.HANG_STOPPED, role=Role.ROOT)
    root = find_root([hang("n0", *map(end, dumps[:3]), stopped)])

    assert (root.report.failure_class, named(root)) == (FailureClass.HANG_STOPPED, {3})


def test_collectives_come_before_the_lowest_step():
    """A rank that saves every other step counts fewer: that does not make it the one."""
    first, *others = dumps_of(played(stops_before={9: 3}))
    root = find_root([hang("n0", end(first, step=11), *map(end, others))])

    assert named(root) == {9}


def test_of_ranks_that_did_not_come_those_that_stand_elsewhere_are_named():
    """Rank 9 receives from rank 14, which gloo does not record, and rank 14 sleeps."""
    sleeps = {"failure_class": FailureClass.HANG_NO_PROGRESS, "role": Role.ROOT}
    dumps = dumps_of(played(stops_before={9: 3, 14: 3}))
    ends = [end(dump, **(sleeps if dump.rank == 14 else {})) for dump in dumps]
    root = find_root([hang("n0", *ends)])

    assert (named(root), root.report.failure_class) == ({14}, FailureClass.HANG_NO_PROGRESS)
    assert "ranks 9,14 have not called" in root.report.how


@pytest.mark.parametrize("step", [57, 56])
def test_where_all_called_what_is_pending_it_is_the_network_or_a_gpu(step):
    """A rank that counts fewer steps is not behind: it waits where the others wait."""
    first, *others = mismatched()
    reports = [hang("n0", end(first, step=step)), hang("n1", *map(end, others), arrival=1)]
    root = find_root(reports)

    assert (root.ends, root.report.failure_class) == ((), FailureClass.HANG_COLLECTIVE)
    assert root.report.how == (
        "all ranks called all_reduce(1024 Float), call 4 of group 0 (all ranks), and none"
        " completed it: the network, or a GPU"
    )


def places(**ranks_at):
    """Return the report of ranks without a flight recorder, which wait in these places."""
    ends = [
        rank_end(
            rank,
            role=Role.SYMPTOM,
            failure_class=FailureClass.HANG_COLLECTIVE,
            signal=None,
            place=f"{place} (/job/train.py:{len(place)})",
        )
        for place, ranks in ranks_at.items()
        for rank in ranks
    ]
    return [hang("n0", *ends[:64]), hang("n1", *ends[64:], arrival=1)]


def test_without_a_flight_recorder_it_is_told_which_few_ranks_wait_elsewhere_in_the_program():
    root = find_root(places(step=range(100), save=[100, 101], evaluate=[102]))

    assert (root.ends, root.report.failure_class) == ((), FailureClass.HANG_COLLECTIVE)
    assert root.report.how == (
        "every rank waits in a collective and none is behind;"
        " rank 102 waits in evaluate (/job/train.py:8);"
        " rank 100-101 waits in save (/job/train.py:4); the other 100 in step (/job/train.py:4)"
    )


@pytest.mark.parametrize(
    "ranks_at",
    [
        {"step": range(100)},
        {"step": range(20), "save": range(20, 40)},
        {"step": range(100), "save": range(100, 109)},
        {"step": [0], "save": [1]},
        {"step": [0, 1], "save": [2], "evaluate": [3]},
    ],
    ids=["one place", "halves", "many", "two ranks", "no majority"],
)
def test_places_without_a_clear_majority_are_not_told(ranks_at):
    how = find_root(places(**ranks_at)).report.how

    assert how == "every rank waits in a collective and none is behind"


def test_ranks_of_which_nothing_is_known_are_named_as_such():
    unknown = rank_end(4, role=Role.SYMPTOM, failure_class=FailureClass.HANG_COLLECTIVE)
    root = find_root([*nodes(mismatched(1), 2), hang("n2", unknown, arrival=2)])

    assert named(root) == {1}
    assert root.report.how.endswith("; no collectives are known of rank 4")


def test_a_report_with_ranks_beyond_all_bounds_is_judged_too():
    far = rank_end(2**60, role=Role.SYMPTOM, failure_class=FailureClass.HANG_COLLECTIVE)

    assert named(find_root([*nodes(mismatched(1), 2), hang("n2", far, arrival=2)])) == {1}
