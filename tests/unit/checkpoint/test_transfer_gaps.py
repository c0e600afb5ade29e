"""Replicas go out in the gaps that the training leaves: on a link that is only played."""

import random
from statistics import mean

import pytest

from gpuops.checkpoint.transfer.pacing import (
    BEHIND_MAX_BYTES,
    FREE_BYTES,
    GAMMA,
    OVERHEAD,
    QUIET_S,
    RATE_MIN_BYTES_S,
    RECHECK_S,
    ForegroundTraffic,
    GapPace,
    SendDeadline,
    rate_for,
)
from gpuops.host.clock import FakeClock

MB = 10**6
LINK = 1000 * MB  # bytes a second
SLICE = 2**18
TICK_S = 0.0005


def looked(*spans):
    """Return what is seen after spans of (seconds, sent by others, sent by us)."""
    seen, now_s, sent, own = ForegroundTraffic(), 100.0, 0.0, 0.0
    seen.observe(now_s, sent, own)
    for seconds, others, ours in spans:
        now_s, own = now_s + seconds, own + ours
        sent += others + 1.03 * ours
        seen.observe(now_s, sent, own)
    return seen


def test_what_we_send_ourselves_is_not_the_training():
    assert not looked(*[(0.01, 0, 10 * MB)] * 50).is_busy


def test_what_others_send_is():
    assert looked(*[(0.01, 5 * MB, 0)] * 3).is_busy
    # Also where we send at the same time, and have sent alone for long.
    assert looked(*[(0.01, 0, 10 * MB)] * 500, *[(0.01, 5 * MB, 5 * MB)] * 3).is_busy


def test_heartbeats_and_shells_are_not():
    assert not looked(*[(0.01, 20_000, 0)] * 50).is_busy


def test_a_pause_between_two_buckets_is_no_gap():
    burst, pause = (0.01, 5 * MB, 0), (0.01, 0, 0)
    assert looked(burst, burst, pause).is_busy
    assert not looked(burst, burst, *[pause] * (round(QUIET_S / 0.01) + 1)).is_busy


def test_bytes_that_wait_in_a_socket_are_not_taken_for_others():
    seen, own = ForegroundTraffic(), BEHIND_MAX_BYTES / OVERHEAD
    seen.observe(0.00, 0, 0)
    seen.observe(0.01, 0, own)
    for n in range(1, 6):  # they leave one after the other, and we give no more
        seen.observe(0.01 + n / 100, n * 1.03 * own / 5, own)
        assert not seen.is_busy


def test_a_counter_that_begins_anew_is_no_traffic():
    seen = looked(*[(0.01, 5 * MB, 0)] * 3)
    seen.observe(200.0, 10, 0)
    assert not seen.is_busy


def test_in_a_gap_all_goes_and_meanwhile_what_is_needed():
    busy, gap = looked((0.01, 5 * MB, 0)), looked((0.01, 0, 0))
    now_s = busy._now_s
    assert rate_for(now_s, gap, SendDeadline(1, now_s + 1)) is None
    assert rate_for(now_s, busy, None) == RATE_MIN_BYTES_S
    assert rate_for(now_s, busy, SendDeadline(0, now_s + 1)) == RATE_MIN_BYTES_S
    assert rate_for(now_s, busy, SendDeadline(100 * MB, now_s + 2)) == pytest.approx(
        50 * MB, rel=0.01
    )
    assert rate_for(now_s, busy, SendDeadline(100 * MB, now_s)) is None
    assert rate_for(now_s, busy, SendDeadline(FREE_BYTES, now_s + 2)) is None
    # A quarter of the time is expected to be free, at 400 MB a second.
    busy.gap_share, busy.gap_bytes_per_s = 0.25, 400 * MB
    rest = 1000 * MB - GAMMA * 0.25 * 400 * MB * 5
    busy_s = 5 * (1 - GAMMA * 0.25)
    assert rate_for(now_s, busy, SendDeadline(1000 * MB, now_s + 5)) == pytest.approx(rest / busy_s)
    assert rate_for(now_s, busy, SendDeadline(300 * MB, now_s + 5)) == RATE_MIN_BYTES_S


def test_without_a_counter_it_is_a_plain_pace():
    clock = FakeClock()
    pace = GapPace(clock)
    assert pace.take(2**40) == 0
    for counter in (None, lambda: None):
        pace.watch(counter)
        pace.set_rate(100 * MB)
        assert pace.take(0) == 0
        pace.take(100 * MB)
        assert pace.take(0) == pytest.approx(1.0)
        clock.advance(10)
    assert pace.bytes_per_s == 100 * MB


def test_who_waits_continues_when_a_gap_comes():
    clock, others = FakeClock(), [0.0]
    pace = GapPace(clock)
    pace.watch(lambda: round(others[0]))
    pace.take(0)
    clock.advance(RECHECK_S)
    others[0] += 50 * MB
    pace.set_deadline(1000 * MB, 1000.0)
    pace.take(40 * MB)
    turn = pace.enqueue(SLICE)
    assert pace.wait_s(turn) > 5
    for _ in range(5):
        clock.advance(RECHECK_S)
        pace.wait_s(turn)
    assert pace.wait_s(turn) == 0
    assert pace.yielded_s == pytest.approx(QUIET_S, abs=1.01 * RECHECK_S)


# A training whose reductions share a link with replicas: as much for each where both send.


class Link:
    """A training: steps of *compute_s*, then a reduction of *burst* bytes; and replicas beside."""

    def __init__(self, seed, *, compute_s=0.14, burst=60 * MB, pace=None, steps=60):
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.compute_s, self.burst, self.steps = compute_s, burst, steps
        self.pace = GapPace(self.clock) if pace is None else pace(self.clock)
        self.sent = 0.0
        if pace is None:
            self.pace.watch(lambda: round(self.sent))
        self.left = self.ready = 0.0  # of the state, and of the slice that has its turn
        self.enqueue = None
        self.bursts_s, self.step_s = [], []
        self.through_s = []

    def run(self, state, every, within_s):
        """Save *state* bytes at each of *every* steps; return the mean seconds of a reduction."""
        for step in range(self.steps):
            begun_s = self.now_s()
            if state and step % every == 0:
                assert self.left == 0, "the state before is not through"
                self.left, self.saved_s = state, self.now_s()
                self.pace.set_deadline(state, within_s)
            end_s = begun_s + self.compute_s * self.random.uniform(0.95, 1.05)
            while self.now_s() < end_s:
                self.tick(0)
            left = self.burst * self.random.uniform(0.95, 1.05)
            burst_s = self.now_s()
            while left > 0:
                left -= self.tick(left)
            self.bursts_s.append(self.now_s() - burst_s)
            self.step_s.append(self.now_s() - begun_s)
        return mean(self.bursts_s)

    def now_s(self):
        return self.clock.mono_ns() / 1e9

    def tick(self, training):
        """Let a moment pass in which the training wants to send so much; return what it could."""
        room = LINK * TICK_S
        ours = self.ours(room / 2 if training else room)
        theirs = min(training, room - ours)
        self.sent += OVERHEAD * 0.98 * ours + theirs
        self.clock.advance(TICK_S)
        return theirs

    def ours(self, room):
        done = 0.0
        while self.left > 0 and done < room:
            if self.enqueue is None:
                self.enqueue, self.ready = self.pace.enqueue(SLICE), min(SLICE, self.left)
            if self.pace.wait_s(self.enqueue) > 0:
                break
            part = min(room - done, self.ready)
            done, self.ready, self.left = done + part, self.ready - part, self.left - part
            if self.ready <= 0:
                self.enqueue = None
        if done and self.left <= 0:
            self.left, self.enqueue = 0.0, None
            self.through_s.append(self.now_s() - self.saved_s)
        return done


class Unpaced(GapPace):
    """As many bytes as go."""


@pytest.mark.parametrize("seed", range(3))
def test_a_reduction_loses_a_few_percent_where_it_lost_most_of_its_time(seed):
    links = [Link(seed), Link(seed, pace=Unpaced), Link(seed)]
    states = (0, 350 * MB, 350 * MB)
    alone, unpaced, paced = (
        link.run(state, 5, 0.8) for link, state in zip(links, states, strict=True)
    )
    step_s = [mean(link.step_s) for link in links]

    assert unpaced > 1.2 * alone
    assert paced < 1.065 * alone
    assert step_s[2] < 1.02 * step_s[0]
    assert len(links[2].through_s) == 12
    assert max(links[2].through_s) < 0.8


@pytest.mark.parametrize("seed", range(3))
def test_a_training_without_gaps_gives_way_to_what_is_due(seed):
    link = Link(seed, compute_s=0.001, burst=60 * MB)
    link.run(100 * MB, 20, 0.8)

    assert len(link.through_s) == 3
    assert all(0.5 < seconds <= 0.9 for seconds in link.through_s)


def test_what_does_not_fit_into_the_time_takes_all_that_goes_once_it_is_up():
    link = Link(0, compute_s=0.001, burst=60 * MB)
    link.run(1000 * MB, 60, 0.5)

    # Half of the link from then on.
    assert link.through_s == [pytest.approx(0.5 + 1.0, rel=0.5)]
