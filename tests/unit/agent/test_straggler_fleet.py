"""Whom the leader calls slow, by what agents publish of their ranks, and why."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stepped_job import Call, ddp, fsdp, traces

from gpuops.agent.monitors.straggler import fleet as fleet_module
from gpuops.agent.monitors.straggler.fleet import SETTLE_S, StragglerFleetMonitor
from gpuops.detect.own_time import Measure, RankSteps, own_times
from gpuops.detect.step_summary import STEPS_MAX, pack_summary
from gpuops.incident.suspicion import SuspicionLevel
from gpuops.model import Confidence, Entity, EntityKind, FailureClass

STEP_S = 2.0


def about(own_s, *, first=21, n=30, step_s=STEP_S, role=7, measure=Measure.OWN, data=0.0, **more):
    seconds = dict.fromkeys(range(first, first + n), own_s)
    made = RankSteps(
        role=role, measure=measure, seconds=seconds, step_s=step_s, data_share=data / step_s
    )
    return {"steps": pack_summary(made), "tokens": 0, **more}


def publish(ranks, *, per_node=2, generation=0, why=""):
    """Return what the nodes n0, n1, … publish of *ranks*."""
    nodes = {}
    for rank, item in ranks.items():
        body = {"generation": generation, "is_whole": False, "why": why, "ranks": {}}
        nodes.setdefault(f"n{rank // per_node}", body)["ranks"][str(rank)] = item
    return nodes


def judge(monitor, published, now_s=0.0):
    """Return what *monitor* finds once what is *published* has settled."""
    monitor.judge(published, now_s)
    return monitor.judge(published, now_s + SETTLE_S)


def fleet(n=4, slow_s=1.5, slow=(3,), **more):
    return {rank: about(slow_s if rank in slow else 1.0, **more) for rank in range(n)}


def found(ranks, *, hold_s=30.0, **more):
    return judge(StragglerFleetMonitor(hold_s), publish(ranks, **more))


def test_the_slow_rank_is_named_with_its_node_and_what_the_job_would_gain():
    (slow,) = found(fleet())

    assert slow.entity == Entity(EntityKind.RANK, "3")
    assert (slow.node, slow.level) == ("n1", SuspicionLevel.SUSPECT)
    assert slow.failure_class is FailureClass.STRAGGLER_HOST
    assert slow.value == pytest.approx(1.5, rel=0.01)
    assert "1.50 times as long as 3 ranks" in slow.why
    assert "33% faster" in slow.why


def test_until_it_has_lasted_it_has_no_consequence():
    monitor = StragglerFleetMonitor(120.0)

    (early,) = judge(monitor, publish(fleet()))
    (late,) = judge(monitor, publish(fleet(first=81)), 100.0)

    assert (early.level, early.confidence) == (SuspicionLevel.NOTE, Confidence.SYMPTOM_ONLY)
    assert late.level is SuspicionLevel.SUSPECT


def test_ranks_that_measure_something_else_are_not_compared():
    """On a node that times its collectives, they would make own times of all others waiting."""
    ranks = fleet(6, slow=()) | {5: about(0.1, measure=Measure.IN_COLLECTIVES)}

    assert found(ranks) == ()
    assert [slow.entity.id for slow in found(ranks | {0: about(1.5)})] == ["0"]


@pytest.mark.parametrize("ranks", [{}, fleet(slow=())], ids=["nothing yet", "the next one"])
def test_with_its_generation_a_suspicion_ends(ranks):
    monitor = StragglerFleetMonitor(30.0)

    assert judge(monitor, publish(fleet()))
    assert monitor.judge(publish(ranks, generation=1), 100.0) == ()


def test_a_rank_that_is_no_longer_slow_is_no_longer_named():
    monitor = StragglerFleetMonitor(30.0)

    assert judge(monitor, publish(fleet()))
    assert judge(monitor, publish(fleet(first=81, slow=())), 100.0) == ()


def test_the_same_steps_are_judged_once():
    monitor = StragglerFleetMonitor(1e6)
    for number in range(50):
        suspicions = judge(monitor, publish(fleet(first=21 + number % 2)), 10.0 * number)

    assert suspicions[0].level is SuspicionLevel.NOTE, "51 steps of 2 s are not 1e6 s"


def test_what_nodes_publish_one_after_another_is_judged_together():
    monitor, whole = StragglerFleetMonitor(30.0), publish(fleet())

    assert monitor.judge({"n1": whole["n1"]}, 0.0) == ()
    assert monitor.judge(whole, SETTLE_S / 2) == ()
    assert len(monitor.judge(whole, SETTLE_S)) == 1


def test_where_one_node_has_all_ranks_nothing_is_waited_for():
    one = publish(fleet(), per_node=4)
    one["n0"]["is_whole"] = True

    assert len(StragglerFleetMonitor(30.0).judge(one, 0.0)) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_of_one_or_two_ranks_none_is_called_slow_and_that_is_said_once(n):
    told = []
    monitor = StragglerFleetMonitor(30.0, told.append)

    assert judge(monitor, publish(fleet(n, slow=(0,)))) == ()
    assert judge(monitor, publish(fleet(n, slow=(0,), first=60)), 100.0) == ()
    assert len(told) == 1


def test_all_slower_than_before_blames_nobody_and_says_so():
    told = []
    monitor = StragglerFleetMonitor(30.0, told.append)
    all_slow = fleet(first=81, slow=range(4), step_s=1.5 * STEP_S)

    assert judge(monitor, publish(fleet(slow=()))) == ()
    assert judge(monitor, publish(all_slow), 100.0) == ()
    assert ["none is blamed" in line for line in told] == [True]


def test_half_of_the_ranks_are_two_kinds_of_work_and_no_slow_hardware():
    assert found(fleet(6, slow=(3, 4, 5))) == ()


def test_ranks_of_other_roles_are_not_compared():
    stages = {rank: about(1.0 + rank // 3, role=rank // 3) for rank in range(6)}

    assert found(stages) == ()


def test_a_rank_that_publishes_less_than_the_others_is_judged_by_what_it_has():
    ranks = fleet(8) | {5: about(1.0, first=45, n=6), 6: {"steps": "nonsense"}, 7: {}}

    assert [item.entity.id for item in found(ranks)] == ["3"]


def test_a_generation_begins_anew_and_a_smaller_one_has_other_ranks():
    monitor = StragglerFleetMonitor(30.0)
    judge(monitor, publish(fleet()))

    assert judge(monitor, publish(fleet(3, slow=(), first=5), generation=1), 100.0) == ()


def test_what_was_found_ends_with_its_generation():
    """The next one has other nodes, and publishes only after its first steps."""
    monitor = StragglerFleetMonitor(30.0)
    assert judge(monitor, publish(fleet()))

    assert monitor.judge({}, 100.0) == ()


@pytest.mark.parametrize("also", [{}, {"0": {"steps": 3}}])
def test_until_something_new_is_published_what_was_found_remains(also):
    monitor = StragglerFleetMonitor(30.0)
    published = publish(fleet())
    before = judge(monitor, published)

    later = {**published, "n7": {**published["n0"], "ranks": also}}
    assert monitor.judge(later, 100.0) == before


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"generation": "0", "is_whole": False, "why": "", "ranks": {}},
        {"generation": 0, "is_whole": None, "why": "", "ranks": {}},
        {"generation": 0, "is_whole": False, "why": {}, "ranks": {}},
        {"generation": 0, "is_whole": False, "why": "", "ranks": [1]},
    ],
)
def test_a_node_that_publishes_something_else_is_left_out(body):
    (slow,) = judge(StragglerFleetMonitor(30.0), publish(fleet()) | {"n7": body})

    assert slow.entity.id == "3"


@pytest.mark.parametrize("number", [10**400, math.nan, math.inf, -1, "1"])
def test_what_is_no_number_of_tokens_is_no_cause(number):
    (slow,) = found({**fleet(), 1: about(1.0, tokens=number), 3: about(1.5, tokens=number)})

    assert slow.failure_class is FailureClass.STRAGGLER_HOST


def test_a_rank_that_is_slow_on_another_node_as_well_has_other_work():
    monitor = StragglerFleetMonitor(30.0)
    judge(monitor, publish(fleet()))

    (again,) = judge(monitor, publish(fleet(), per_node=1, generation=1), 100.0)

    assert again.failure_class is FailureClass.STRAGGLER_IMBALANCE
    assert (again.node, again.level) == (None, SuspicionLevel.NOTE)
    assert "slow on n1 too" in again.why


def test_a_rank_that_is_a_little_slower_for_no_cause_that_is_seen_suspects_no_node():
    (slow,) = found(fleet(slow_s=1.06))
    (with_cause,) = found(fleet(slow_s=1.06) | {3: about(1.06, cpu=0.1)})

    assert (slow.node, slow.level, slow.confidence) == (
        None,
        SuspicionLevel.NOTE,
        Confidence.PROBABLE,
    )
    assert (with_cause.node, with_cause.level) == ("n1", SuspicionLevel.SUSPECT)


def test_what_cannot_be_told_is_said_once():
    told = []
    monitor = StragglerFleetMonitor(30.0, told.append)

    for number in range(3):
        judge(monitor, publish(fleet(first=21 + number), why="no timing"), 10.0 * number)

    assert ["no timing" in line for line in told] == [True]


@pytest.mark.parametrize(
    ("sign", "of_peers", "failure_class"),
    [
        ({"tokens": 1400}, {"tokens": 1000}, FailureClass.STRAGGLER_IMBALANCE),
        ({"tokens": 1010}, {"tokens": 1000}, FailureClass.STRAGGLER_HOST),
        ({"data": 0.45}, {"data": 0.01}, FailureClass.STRAGGLER_INPUT),
        ({"data": 0.45}, {"data": 0.44}, FailureClass.STRAGGLER_HOST),
        ({"throttled": 1}, {}, FailureClass.STRAGGLER_GPU),
        ({"throttled": 1}, {"throttled": 1}, FailureClass.STRAGGLER_HOST),
        ({"cpu": 0.2}, {"cpu": 0.01}, FailureClass.STRAGGLER_HOST),
        ({"steal": 0.3}, {}, FailureClass.STRAGGLER_HOST),
        ({"memory": 0.3}, {}, FailureClass.STRAGGLER_HOST),
        ({"errors": 12}, {}, FailureClass.STRAGGLER_NETWORK),
        ({"errors": 12}, {"errors": 12}, FailureClass.STRAGGLER_HOST),
        ({"errors": "many", "tokens": None}, {}, FailureClass.STRAGGLER_HOST),
    ],
)
def test_the_cause_is_what_the_peers_do_not_have(sign, of_peers, failure_class):
    ranks = {rank: about(1.0, **of_peers) for rank in range(3)} | {3: about(1.5, **sign)}

    (slow,) = found(ranks)

    assert slow.failure_class is failure_class
    blames_node = failure_class not in {
        FailureClass.STRAGGLER_IMBALANCE,
        FailureClass.STRAGGLER_INPUT,
    }
    assert (slow.node == "n1") is blames_node
    assert (slow.level is SuspicionLevel.SUSPECT) is blames_node


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"cpu": 0.2}, "waited for a processor for 20%"),
        ({"steal": 0.3}, "the hypervisor kept"),
        ({"memory": 0.3}, "waited for memory"),
        ({}, "no cause is seen"),
    ],
)
def test_the_sentence_has_what_was_seen(sign, words):
    ranks = {rank: about(1.0) for rank in range(3)} | {3: about(1.5, **sign)}

    assert words in found(ranks)[0].why


def test_of_many_ranks_a_call_judges_some_steps_and_the_next_ones_the_rest(monkeypatch):
    monkeypatch.setattr(fleet_module, "RANK_STEPS_MAX", 4 * 8)
    monitor, whole = StragglerFleetMonitor(30.0), publish(fleet())
    monitor.judge(whole, 0.0)

    calls = [len(monitor.judge(whole, SETTLE_S + 5.0 * n)) for n in range(6)]

    assert calls[:2] == [0, 1], "8 of 30 steps a call; after 14 steps it is named"
    (role,) = monitor._roles.values()
    assert role.judged == 50


def test_with_timed_collectives_the_rank_that_waits_least_is_slow_and_its_gpu_is_named():
    waits = {rank: about(0.8, measure=Measure.IN_COLLECTIVES) for rank in range(3)}
    slow_one = about(0.1, measure=Measure.IN_COLLECTIVES, gpu="GPU-1")

    (slow,) = found(waits | {3: slow_one})

    assert slow.entity.id == "3"
    assert slow.failure_class is FailureClass.STRAGGLER_GPU
    assert Entity(EntityKind.GPU, "GPU-1") in slow.also


TENSOR_PARALLEL = [
    *(Call("all_reduce", 0.02, blocks=True, groups=((0, 1), (2, 3), (4, 5))) for _ in range(4)),
    Call("all_reduce", 0.02, sizes=((9,),)),
]


def of_job(program, n_ranks, **how):
    own, _ = own_times(traces(program, n_ranks, n_steps=STEPS_MAX + 1, **how), n_ranks)
    return {rank: {"steps": pack_summary(steps), "tokens": 0} for rank, steps in own.items()}


@pytest.mark.parametrize(
    ("program", "n_ranks"), [(ddp(), 8), (fsdp(), 8), (TENSOR_PARALLEL, 6)], ids=str
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_of_any_job_the_slow_rank_and_nobody_else_is_named(program, n_ranks, data):
    slow = data.draw(st.integers(0, n_ranks - 1))
    factor = data.draw(st.sampled_from([1.0, 1.15, 1.3, 2.0]))
    seed = data.draw(st.integers(0, 1000))
    ranks = of_job(program, n_ranks, slow={slow: factor}, seed=seed)

    named = {item.entity.id for item in found(ranks, hold_s=0.1)}

    assert named == ({str(slow)} if factor > 1 else set())
