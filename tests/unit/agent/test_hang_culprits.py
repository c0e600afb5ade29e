"""Who holds the others up."""

import pytest

from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.hang.report import blame, class_of, sentence
from gpuops.agent.monitors.rank_state import RankDiagnosis, RankState
from gpuops.detect.wait_graph import CollectiveHang, HangKind
from gpuops.model import Confidence, FailureClass, Side

U, C, S = RankState.IN_USER_CODE, RankState.IN_COLLECTIVE, RankState.STOPPED
D, G, E, X = RankState.D_STATE, RankState.GIL_HELD, RankState.EXITED, RankState.UNKNOWN
V, L = RankState.WAITS_FOR_DEVICE, RankState.WAITS_FOR_LOCK


def hang(lagging=(), steps=None, made=9):
    steps = steps or dict.fromkeys(range(3), 41)
    return HangFinding(
        phase="step",
        limit_s=60.0,
        silent_s=62.0,
        step=41 if made else None,
        lagging=lagging,
        steps=steps,
        silences_s=dict.fromkeys(steps, 63.4),
        steps_made=made,
    )


def verdicts(*states):
    return {rank: RankDiagnosis(state, f"is {state.value}") for rank, state in enumerate(states)}


@pytest.mark.parametrize(
    ("states", "lagging", "ranks", "failure_class"),
    [
        ((C, S, C), (), (1,), FailureClass.HANG_STOPPED),
        ((D, S, U), (2,), (0,), FailureClass.HANG_D_STATE),
        ((C, G, C), (0,), (1,), FailureClass.HANG_GIL_HELD),
        ((C, C, E), (), (2,), FailureClass.USER_EARLY_EXIT),
        ((C, U, C), (), (1,), FailureClass.HANG_NO_PROGRESS),
        ((U, U, U), (2,), (2,), FailureClass.HANG_NO_PROGRESS),
        ((C, U, C), (2,), (1,), FailureClass.HANG_NO_PROGRESS),
        ((C, C, C), (2,), (2,), FailureClass.HANG_NO_PROGRESS),
        ((X, X, X), (1,), (1,), FailureClass.HANG_NO_PROGRESS),
        ((C, V, C), (), (), FailureClass.HANG_COLLECTIVE),
        ((X, X, X), (), (), FailureClass.HANG_COLLECTIVE),
        ((U, U, U), (), (0, 1, 2), FailureClass.HANG_NO_PROGRESS),
        ((C, L, C), (), (1,), FailureClass.HANG_NO_PROGRESS),
        ((L, U, L), (), (1,), FailureClass.HANG_NO_PROGRESS),
    ],
)
def test_who_is_blamed(states, lagging, ranks, failure_class):
    found = blame(hang(lagging), verdicts(*states))

    assert (found.ranks, found.failure_class) == (ranks, failure_class)
    assert (found.confidence is Confidence.SYMPTOM_ONLY) is (not ranks)


@pytest.mark.parametrize(
    ("kind", "states", "awaited", "ranks", "failure_class"),
    [
        (HangKind.ABSENT, (C, C, C), (1,), (1,), FailureClass.HANG_COLLECTIVE),
        (HangKind.ABSENT, (C, C, U), (1, 2), (2,), FailureClass.HANG_NO_PROGRESS),
        (HangKind.ABSENT, (C, X, C), (1,), (1,), FailureClass.HANG_NO_PROGRESS),
        (HangKind.ABSENT, (C, U, C), (7,), (1,), FailureClass.HANG_NO_PROGRESS),
        (HangKind.ABSENT, (C, C, S), (1,), (2,), FailureClass.HANG_STOPPED),
        (HangKind.STALLED, (C, C, C), (2,), (2,), FailureClass.HANG_COLLECTIVE),
        (HangKind.DEADLOCK, (C, C, C), (0, 1), (0, 1), FailureClass.HANG_DEADLOCK),
        (HangKind.MISMATCH, (C, U, C), (0,), (0,), FailureClass.COLLECTIVE_MISMATCH),
        (HangKind.ALL_IN, (C, U, C), (), (1,), FailureClass.HANG_NO_PROGRESS),
        (HangKind.ALL_IN, (C, C, C), (), (), FailureClass.HANG_COLLECTIVE),
    ],
)
def test_collectives_come_after_states_and_before_steps_and_stacks(
    kind, states, awaited, ranks, failure_class
):
    collectives = CollectiveHang(kind=kind, ranks=awaited, why="", how="the calls")
    found = blame(hang((0,)), verdicts(*states), (), collectives)

    assert (found.ranks, found.failure_class) == (ranks, failure_class)
    is_program = kind in {HangKind.DEADLOCK, HangKind.MISMATCH}
    assert (found.side is Side.USER) is is_program
    assert not is_program or found.why == "the calls"


@pytest.mark.parametrize("kind", [HangKind.DEADLOCK, HangKind.MISMATCH])
def test_what_most_ranks_do_is_left_to_the_leader_where_other_nodes_have_ranks(kind):
    collectives = CollectiveHang(kind=kind, ranks=(0,), without_dump=(2, 3), why="")
    states = verdicts(C, C)
    steps = dict.fromkeys(range(2), 41)

    found = blame(hang(steps=steps), states, (), collectives)
    assert (found.ranks, found.failure_class) == ((), FailureClass.HANG_COLLECTIVE)
    own = CollectiveHang(kind=kind, ranks=(0,), without_dump=(1,), why="")
    assert blame(hang(steps=steps), states, (), own).ranks == (0,)


@pytest.mark.parametrize("states", [(U, U, U), (U, X, U), (L, L, L), (X, X), (U,)])
@pytest.mark.parametrize("lagging", [(), (0,)])
def test_nobody_is_named_where_all_stand_in_their_own_start(states, lagging):
    start = hang(lagging, steps=dict.fromkeys(range(3)), made=0)
    found = blame(start, verdicts(*states))

    assert (found.ranks, found.confidence) == ((), Confidence.SYMPTOM_ONLY)
    assert found.failure_class is FailureClass.HANG_NO_PROGRESS
    text = sentence(start, found)
    assert text.startswith("ranks 0-2 (no step known): none has made a step or waits for another")


@pytest.mark.parametrize(
    ("states", "ranks"), [((C, U, C), (1,)), ((C, C, C), ()), ((U, S, U), (1,)), ((U, D, L), (1,))]
)
def test_in_a_start_too_the_one_that_the_others_wait_for_is_named(states, ranks):
    assert blame(hang(steps=dict.fromkeys(range(3)), made=0), verdicts(*states)).ranks == ranks


def test_the_kernels_word_goes_before_steps_and_places():
    assert blame(hang((1,)), verdicts(C, U, C)).ranks == (1,)
    assert blame(hang((1,)), verdicts(C, U, S)).ranks == (2,)


def test_who_finished_is_named_where_the_others_wait_for_somebody():
    found = blame(hang(), verdicts(C, C), finished=[2])

    assert (found.ranks, found.failure_class) == ((2,), FailureClass.USER_EARLY_EXIT)
    assert blame(hang(), verdicts(C, U), finished=[2]).ranks == (1,)


def test_the_part_of_one_rank_has_a_class():
    assert [class_of(state) for state in (C, V, U, X, S)] == [
        FailureClass.HANG_COLLECTIVE,
        FailureClass.HANG_COLLECTIVE,
        FailureClass.HANG_NO_PROGRESS,
        FailureClass.HANG_NO_PROGRESS,
        FailureClass.HANG_STOPPED,
    ]


def test_the_sentence_names_ranks_step_silence_and_limit():
    late = hang((1,), steps={0: 41, 1: 40, 2: 41})

    assert sentence(late, blame(late, verdicts(C, U, C))) == (
        "rank 1 (last step 40): is in_user_code; silent for 63 s,"
        " the limit for this phase (step) is 60 s"
    )
    assert sentence(hang(), blame(hang(), verdicts(C, C, C))).startswith(
        "none of the ranks 0-2 is behind (last step 41): all wait"
    )
