"""Who is alive, by the reader's own clock only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.membership import OBSERVED_GAP_S_MAX, Liveness, LivenessTracker
from gpuops.units import NS_PER_S

S = NS_PER_S


@pytest.fixture
def life():
    return LivenessTracker(suspect_s=6.0, dead_s=15.0)


def silence(life, number, seconds, since_s=0.0, step_s=1.0):
    """Look once a *step_s* while *number* of peer a stands still; return the last moment."""
    at_s = since_s
    while at_s <= since_s + seconds:
        life.observe({"a": number}, round(at_s * S))
        at_s += step_s
    return round((at_s - step_s) * S)


def test_a_peer_that_was_never_seen_is_dead(life):
    life.observe({}, 0)

    assert life.status_of("a", 0) is Liveness.DEAD
    assert life.silence_s("a", 0) == float("inf")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, Liveness.LIVE),
        (5, Liveness.LIVE),
        (6, Liveness.SUSPECT),
        (14, Liveness.SUSPECT),
        (15, Liveness.DEAD),
    ],
)
def test_silence_is_judged_by_its_length(life, seconds, expected):
    now_ns = silence(life, 1, seconds)

    assert life.status_of("a", now_ns) is expected
    assert life.silence_s("a", now_ns) == seconds


def test_any_other_number_is_a_sign_of_life(life):
    now_ns = silence(life, 5, 14)
    life.observe({"a": 4}, now_ns + S)

    assert life.status_of("a", now_ns + S) is Liveness.LIVE


def test_a_peer_that_took_itself_off_is_dead_at_once(life):
    life.observe({"a": 1, "b": 1}, 0)
    life.observe({"b": 2}, S)

    assert life.status_of("a", S) is Liveness.DEAD
    assert life.not_dead(["b", "a"], S) == ["b"]


def test_a_reader_that_was_away_knows_nothing_of_that_time(life):
    now_ns = silence(life, 1, 5)
    back_ns = now_ns + round((OBSERVED_GAP_S_MAX + 20) * S)
    life.observe({"a": 1}, back_ns)

    assert life.silence_s("a", back_ns) == 5 + OBSERVED_GAP_S_MAX
    assert life.status_of("a", silence(life, 1, 7, since_s=back_ns / S)) is Liveness.DEAD


def test_a_reader_that_was_away_forgets_nothing_of_before(life):
    back_ns = silence(life, 1, 14) + 100 * S
    life.observe({"a": 1}, back_ns)

    assert life.status_of("a", back_ns) is Liveness.DEAD


def test_a_board_that_is_slow_to_answer_hides_a_death_for_longer_not_for_good(life):
    now_ns = silence(life, 1, 35, step_s=7.0)

    assert life.silence_s("a", now_ns) == 15


def test_a_peer_that_beats_lives_however_rarely_one_looks(life):
    for number in range(9):
        life.observe({"a": number}, 20 * number * S)

    assert life.status_of("a", 160 * S) is Liveness.LIVE


def test_peers_keep_their_order(life):
    life.observe({"a": 1, "b": 1, "c": 1}, 0)

    assert life.not_dead(["c", "a", "b"], 0) == ["c", "a", "b"]


@given(st.lists(st.tuples(st.floats(0.1, 2.9), st.booleans()), min_size=1, max_size=60))
def test_nobody_is_dead_who_beat_within_the_time(looks):
    """Whatever the rhythm of a reader that is never away, and of the peer."""
    life, now_s, number, beaten_s = LivenessTracker(6.0, 15.0), 0.0, 1, 0.0
    life.observe({"a": 1}, 0)
    for gap_s, beats in looks:
        now_s += gap_s
        if beats:
            number, beaten_s = number + 1, now_s
        life.observe({"a": number}, round(now_s * S))
        silent_s = now_s - beaten_s
        if abs(silent_s - 15.0) > 1e-6:
            assert (life.status_of("a", round(now_s * S)) is Liveness.DEAD) == (silent_s > 15.0)
