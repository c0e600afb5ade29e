"""The cause over nodes: causal role first, then arrival."""

from dataclasses import replace
from itertools import permutations

import pytest
from support.decisions import rank_end, report, stopped

from gpuops.incident.correlate import CausalRank, causal_rank_of, find_root
from gpuops.incident.decision import ReportKind
from gpuops.model import Confidence, FailureClass, Role, Side

KEY_ERROR = "KeyError at data.py:88 in collate: 'labels'"


def user(node="n1", rank=1, arrival=0, signature=KEY_ERROR, **changes):
    end = rank_end(
        rank,
        failure_class=FailureClass.USER_EXCEPTION,
        side=Side.USER,
        signal=None,
        exit_code=1,
        signature=signature,
        summary=f"rank {rank} raised KeyError: 'labels'",
    )
    fields = {
        "failure_class": FailureClass.USER_EXCEPTION,
        "side": Side.USER,
        "ends": (end,),
        "arrival": arrival,
    }
    return report(node, **{**fields, **changes})


def symptom(node="n2", rank=2, arrival=0, step=57, **changes):
    end = rank_end(
        rank, role=Role.SYMPTOM, failure_class=FailureClass.PEER_CLOSED, signal=None, step=step
    )
    fields = {
        "failure_class": FailureClass.PEER_CLOSED,
        "confidence": Confidence.SYMPTOM_ONLY,
        "culprits": (),
        "ends": (end,),
        "arrival": arrival,
    }
    return report(node, **{**fields, **changes})


def lost(node="n3", arrival=0):
    return report(
        node,
        ReportKind.NODE_LOST,
        failure_class=FailureClass.NODE_LOST,
        side=Side.INFRA,
        arrival=arrival,
    )


def xid(node="n4", arrival=0):
    return report(
        node,
        ReportKind.GPU_FAULT,
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
        side=Side.INFRA,
        blames_node=True,
        arrival=arrival,
    )


def hung_end(rank, failure_class, step=57, role=Role.ROOT):
    return rank_end(
        rank, failure_class=failure_class, role=role, signal=None, step=step, summary=""
    )


def waiting(rank, step=57):
    return hung_end(rank, FailureClass.HANG_COLLECTIVE, step, Role.SYMPTOM)


def hang(node, *ends, arrival=0, **changes):
    fields = {"failure_class": FailureClass.HANG_COLLECTIVE, "ends": ends, "arrival": arrival}
    return report(node, ReportKind.HANG, **{**fields, **changes})


def done(node="n5", *ranks, arrival=0):
    ends = tuple(rank_end(r, role=Role.NOISE, signal=None, exit_code=0) for r in ranks)
    return report(node, ReportKind.DONE, ends=ends, arrival=arrival)


BY_STRENGTH = [
    stopped("n0", failure_class=FailureClass.PREEMPTED),
    xid("n1"),
    lost("n2"),
    report("n3"),
    user("n4"),
    report("n5", ReportKind.START_FAILED, is_infrastructure=True),
    hang("n6", waiting(6)),
    symptom("n7"),
    stopped("n8"),
]


@pytest.mark.parametrize("index", range(len(BY_STRENGTH) - 1))
def test_the_stronger_claim_is_the_cause_whoever_came_first(index):
    stronger, weaker = BY_STRENGTH[index], BY_STRENGTH[index + 1]
    for late, early in ((1, 0), (0, 1)):
        reports = [replace(weaker, arrival=early), replace(stronger, arrival=late)]
        assert find_root(reports).report.node == stronger.node


def test_of_two_equal_claims_the_one_that_arrived_first_is_the_cause():
    assert find_root([user("n1", 1, arrival=5), user("n2", 2, arrival=2, signature="x")]).nodes == (
        "n2",
    )


def test_the_order_of_reports_does_not_matter():
    few = [BY_STRENGTH[i] for i in (1, 3, 4, 6, 7)]
    found = {find_root(order).report.node for order in permutations(few)}

    assert found == {"n1"}


def test_a_gate_that_failed_speaks_against_its_node():
    gate = report("n1", ReportKind.GATE_FAILED, failure_class=FailureClass.GATE_FAILED)

    assert causal_rank_of(gate) is CausalRank.NODE_EVIDENCE


def test_a_kernel_fault_on_a_node_that_was_only_stopped_counts():
    late = stopped("n2", blames_node=True, failure_class=FailureClass.KERNEL_FAULT)

    assert find_root([symptom("n1"), late]).report.node == "n2"


def test_nobody_reported_anything():
    root = find_root([])

    assert (root.causal_rank, root.report, root.nodes, root.step) == (
        CausalRank.NOTHING,
        None,
        (),
        None,
    )


def test_nearly_all_ranks_with_one_exception_are_the_program():
    ranks = iter(range(20))
    nodes = [
        user(
            f"n{n}",
            arrival=n,
            ends=tuple(user(rank=next(ranks)).ends[0] for _ in range(5)),
        )
        for n in range(4)
    ]
    root = find_root(nodes)

    assert root.is_shared
    assert root.nodes == ()
    assert root.report.confidence is Confidence.CONFIRMED
    assert "20 of 20 ranks" in root.report.how
    assert root.report.culprits[0].id == "0"


def test_a_rank_that_was_ended_while_it_raised_the_same_counts_for_the_share():
    cut = replace(user(rank=2).ends[0], role=Role.TEARDOWN)
    root = find_root([user("n1"), stopped("n2", ends=(cut,))])

    assert root.is_shared
    assert [end.rank for _, end in root.ends] == [1]


def test_half_of_the_ranks_are_not_the_program():
    root = find_root([user("n1"), symptom("n2")])

    assert not root.is_shared
    assert root.nodes == ("n1",)


def test_ranks_that_were_done_while_others_needed_them():
    root = find_root([symptom("n1", 0), done("n2", 2, 3)])

    assert root.causal_rank is CausalRank.EARLY_EXIT
    assert root.report.failure_class is FailureClass.USER_EARLY_EXIT
    assert root.report.side is Side.USER
    assert [entity.id for entity in root.report.culprits] == ["2", "3"]
    assert "n2" in root.report.how


def test_ranks_that_wait_for_one_that_is_done():
    root = find_root([hang("n1", waiting(0)), done("n2", 1)])

    assert root.report.failure_class is FailureClass.USER_EARLY_EXIT


def test_a_crash_after_others_were_done_is_its_own_cause():
    root = find_root([report("n1"), done("n2", 1)])

    assert root.report.failure_class is FailureClass.SIGKILL_PROBABLE


def test_nobody_left_early_where_nobody_misses_anyone():
    assert find_root([done("n1", 0), stopped("n2")]).causal_rank is CausalRank.NOTHING


def test_symptoms_alone_name_who_was_behind():
    root = find_root([symptom("n1", 0, 0, 57), symptom("n2", 1, 1, 56)])

    assert root.causal_rank is CausalRank.SYMPTOM
    assert root.nodes == ()
    assert "rank 1 on n2 had reached only step 56" in root.report.how


@pytest.mark.parametrize(
    "failure_class",
    [FailureClass.HANG_STOPPED, FailureClass.HANG_GIL_HELD, FailureClass.HANG_D_STATE],
)
def test_a_worker_that_cannot_run_is_whom_the_others_wait_for(failure_class):
    root = find_root(
        [hang("n1", waiting(0, 56), waiting(1, 57)), hang("n2", hung_end(2, failure_class, 57))]
    )

    assert root.report.failure_class is failure_class
    assert [end.rank for _, end in root.ends] == [2]
    assert root.nodes == ("n2",)


def test_the_rank_with_the_lowest_step_is_whom_the_others_wait_for():
    behind = rank_end(3, role=Role.TEARDOWN, step=56, failure_class=FailureClass.UNRESOLVED)
    root = find_root([hang("n1", waiting(0), waiting(1)), stopped("n2", ends=(behind,))])

    assert root.report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert root.nodes == ("n2",)
    assert "step 56" in root.report.how


def test_of_those_behind_the_one_outside_the_collective_is_named():
    sleeper = hung_end(2, FailureClass.HANG_NO_PROGRESS, 56)
    root = find_root([hang("n1", waiting(0), waiting(1, 56), sleeper)])

    assert [end.rank for _, end in root.ends] == [2]


def test_at_equal_steps_the_rank_outside_the_collective_is_named():
    sleeper = hung_end(2, FailureClass.HANG_NO_PROGRESS)
    root = find_root([hang("n1", waiting(0), waiting(1)), hang("n2", sleeper)])

    assert root.nodes == ("n2",)
    assert root.report.failure_class is FailureClass.HANG_NO_PROGRESS


def test_where_all_wait_nobody_is_named():
    root = find_root([hang("n1", waiting(0)), hang("n2", waiting(1))])

    assert root.report.failure_class is FailureClass.HANG_COLLECTIVE
    assert root.ends == ()
    assert root.report.confidence is Confidence.SYMPTOM_ONLY


def starting(rank):
    end = hung_end(rank, FailureClass.HANG_NO_PROGRESS, None, Role.SYMPTOM)
    return replace(end, signature="hang at train.py in load")


def test_where_all_stand_in_their_own_start_nobody_is_named():
    own = {"failure_class": FailureClass.HANG_NO_PROGRESS, "how": "each is in its own start"}
    root = find_root([hang("n1", starting(0), **own), hang("n2", starting(1), arrival=1, **own)])

    assert (root.ends, root.report.culprits, root.nodes) == ((), (), ())
    assert root.report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert root.report.how == "each is in its own start"


def test_who_stands_in_its_own_start_while_other_nodes_wait_is_named():
    own = {"failure_class": FailureClass.HANG_NO_PROGRESS}
    waits = hang("n1", waiting(0, None))
    root = find_root([waits, hang("n2", starting(1), arrival=1, **own)])

    assert [(node, end.rank) for node, end in root.ends] == [("n2", 1)]


def test_a_hang_report_without_ranks_keeps_its_own_account():
    alone = hang(
        "n1", failure_class=FailureClass.HANG_NO_PROGRESS, culprits=report().culprits, how="still"
    )
    root = find_root([alone])

    assert root.report.failure_class is FailureClass.HANG_NO_PROGRESS
    assert root.report.how == "still"
    assert root.report.culprits == alone.culprits


def test_who_was_done_while_others_needed_it_is_told_by_its_own_node():
    done = report(
        "n1",
        ReportKind.DONE,
        arrival=5,
        ends=(rank_end(3, role=Role.NOISE, signal=None, exit_code=0),),
    )
    root = find_root([symptom("n2", arrival=1), done, stopped("n3")])

    assert root.causal_rank is CausalRank.EARLY_EXIT
    assert root.report.node == "n1"
    assert root.report.failure_class is FailureClass.USER_EARLY_EXIT
    # A success is nobody's fault; this one is.
    assert root.report.kind is ReportKind.WORKERS_FAILED
    assert [entity.id for entity in root.report.culprits] == ["3"]


def test_two_of_four_ranks_with_one_exception_are_not_the_program():
    root = find_root([user("n1", 1), user("n2", 2, 1), symptom("n3", 3), symptom("n4", 4)])

    assert not root.is_shared
    assert root.nodes == ("n1",)


def test_a_lost_node_is_lost_whatever_else_speaks_against_it():
    assert causal_rank_of(replace(lost(), blames_node=True)) is CausalRank.NODE_LOST
