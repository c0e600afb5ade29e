"""Who is alive, by the reader's own clock only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.liveness import BLIND_S, Life, Liveness
from gpuops.units import NS_PER_S

S = NS_PER_S


@pytest.fixture
def life():
    return Liveness(suspect_s=6.0, dead_s=15.0)


def silence(life, number, seconds, since_s=0.0, step_s=1.0):
    """Look once a *step_s* while *number* of peer a stands still; return the last moment."""
    at_s = since_s
    while at_s <= since_s + seconds:
        life.look({"a": number}, round(at_s * S))
        at_s += step_s
    return round((at_s - step_s) * S)


def test_a_peer_that_was_never_seen_is_dead(life):
    life.look({}, 0)

    assert life.of("a", 0) is Life.DEAD
    assert life.silent_s("a", 0) == float("inf")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, Life.LIVE), (5, Life.LIVE), (6, Life.SUSPECT), (14, Life.SUSPECT), (15, Life.DEAD)],
)
def test_silence_is_judged_by_its_length(life, seconds, expected):
    now_ns = silence(life, 1, seconds)

    assert life.of("a", now_ns) is expected
    assert life.silent_s("a", now_ns) == seconds


def test_any_other_number_is_a_sign_of_life(life):
    now_ns = silence(life, 5, 14)
    life.look({"a": 4}, now_ns + S)

    assert life.of("a", now_ns + S) is Life.LIVE


def test_a_peer_that_took_itself_off_is_dead_at_once(life):
    life.look({"a": 1, "b": 1}, 0)
    life.look({"b": 2}, S)

    assert life.of("a", S) is Life.DEAD
    assert life.not_dead(["b", "a"], S) == ["b"]


def test_a_reader_that_was_away_knows_nothing_of_that_time(life):
    now_ns = silence(life, 1, 5)
    back_ns = now_ns + round((BLIND_S + 20) * S)
    life.look({"a": 1}, back_ns)

    assert life.silent_s("a", back_ns) == 5 + BLIND_S
    assert life.of("a", silence(life, 1, 7, since_s=back_ns / S)) is Life.DEAD


def test_a_reader_that_was_away_forgets_nothing_of_before(life):
    back_ns = silence(life, 1, 14) + 100 * S
    life.look({"a": 1}, back_ns)

    assert life.of("a", back_ns) is Life.DEAD


def test_a_board_that_is_slow_to_answer_hides_a_death_for_longer_not_for_good(life):
    now_ns = silence(life, 1, 35, step_s=7.0)

    assert life.silent_s("a", now_ns) == 15


def test_a_peer_that_beats_lives_however_rarely_one_looks(life):
    for number in range(9):
        life.look({"a": number}, 20 * number * S)

    assert life.of("a", 160 * S) is Life.LIVE


def test_peers_keep_their_order(life):
    life.look({"a": 1, "b": 1, "c": 1}, 0)

    assert life.not_dead(["c", "a", "b"], 0) == ["c", "a", "b"]


@given(st.lists(st.tuples(st.floats(0.1, 2.9), st.booleans()), min_size=1, max_size=60))
def test_nobody_is_dead_who_beat_within_the_time(looks):
    """Whatever the rhythm of a reader that is never away, and of the peer."""
    life, now_s, number, beaten_s = Liveness(6.0, 15.0), 0.0, 1, 0.0
    life.look({"a": 1}, 0)
    for gap_s, beats in looks:
        now_s += gap_s
        if beats:
            number, beaten_s = number + 1, now_s
        life.look({"a": number}, round(now_s * S))
        silent_s = now_s - beaten_s
        if abs(silent_s - 15.0) > 1e-6:
            assert (life.of("a", round(now_s * S)) is Life.DEAD) == (silent_s > 15.0)
