"""Turns come in the order in which they were asked for, whoever asks most."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.boards import eventually

from gpuops.control.fair_lock import FairLock


def test_who_asks_again_at_once_comes_after_who_waits():
    turns, order, over = FairLock(), [], threading.Event()

    def ask_without_end():
        while not over.is_set():
            with turns.acquire(30) as is_ours:
                assert is_ours
                order.append("greedy")
                eventually(lambda: turns.n_waiting or over.is_set(), "another waits")

    with ThreadPoolExecutor(1) as pool:
        greedy = pool.submit(ask_without_end)
        eventually(lambda: order, "a first turn")
        for _ in range(5):
            with turns.acquire(30) as is_ours:
                assert is_ours
                order.append("modest")
                eventually(lambda: turns.n_waiting, "the other waits")
        over.set()
        greedy.result(30)

    assert order[:10] == ["greedy", "modest"] * 5


def test_many_have_their_turns_as_they_came():
    turns, order = FairLock(), []

    def take(name):
        with turns.acquire(30) as is_ours:
            order.append((name, is_ours))

    with ThreadPoolExecutor(5) as pool, turns.acquire(0) as is_ours:
        assert is_ours
        for name in range(5):
            pool.submit(take, name)
            eventually(lambda wanted=name + 1: turns.n_waiting == wanted, "it waits")

    assert order == [(name, True) for name in range(5)]


def test_who_has_waited_long_enough_leaves_no_gap():
    turns = FairLock()
    with turns.acquire(0):
        with turns.acquire(0.01) as is_ours:
            assert not is_ours
        assert turns.n_waiting == 0
    with turns.acquire(0) as is_ours:
        assert is_ours


def test_an_exception_ends_a_turn():
    turns = FairLock()
    with pytest.raises(KeyboardInterrupt), turns.acquire(0):
        raise KeyboardInterrupt
    with turns.acquire(0) as is_ours:
        assert is_ours
