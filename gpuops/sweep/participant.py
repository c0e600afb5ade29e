"""A node of a sweep: it joins, tests what it is ordered to, and learns what was found about it."""

import json
from collections.abc import Callable, Sequence

from gpuops.control.store import ControlStore, ControlStoreError, ControlStoreUnreachableError
from gpuops.model import Finding
from gpuops.sweep.messages import (
    ALIVE,
    COORDINATOR_KEY,
    FINDING,
    LEFT,
    ORDER,
    PORT,
    REPORT,
    STEP_KEY,
    PairOrder,
    PairReport,
    Participant,
    SweepStep,
    decode,
    encode,
    key,
)

HOLD_S = 2.0
COORDINATOR_S = 10.0  # for it to begin, once the store is there
PORT_S = 60.0  # for the partner to begin to listen: it may still end its last test
_POLL_S = 0.05

Exchange = Callable[[int | None], tuple[str, int] | None]
IsOver = Callable[[], bool]
PairTester = Callable[[PairOrder, str, str, Exchange, IsOver], PairReport]
Pause = Callable[[float], None]


class CoordinatorLostError(ControlStoreUnreachableError):
    """The coordinator of the sweep ended before the sweep: nobody decides about further rounds."""


def participate(
    store: ControlStore,
    me: Participant,
    test_pair: PairTester,
    pause: Pause,
    *,
    hold_s: float = HOLD_S,
    coordinator_s: float = COORDINATOR_S,
) -> Sequence[Finding]:
    """Take part until the sweep is over; return the findings about this node and its pairs.

    *test_pair* gets the order, this node's name and address, and an exchange: called with a port it
    tells the partner where this node listens, called with None it returns the partner's address and
    port, None if the partner does not say in time. Its last argument says, when it is asked now and
    then, whether nobody waits for the result any more.

    Raises:
        CoordinatorLostError: See there.
        ControlStoreError: The store cannot be reached, or speaks of something else.
    """
    seen, waited_s = 0, 0.0
    while True:
        reply = store.heartbeat(
            key(ALIVE, me.node), encode(me), watch=STEP_KEY, seen_version=seen, hold_s=hold_s
        )
        if reply.watched is None:
            waited_s = 0.0 if _is_led(store) else waited_s + hold_s
            if waited_s >= coordinator_s:
                raise CoordinatorLostError("the coordinator of the sweep does not answer any more")
            continue
        seen, waited_s = reply.watched.version, 0.0
        step = decode(SweepStep, reply.watched, "the step of the sweep")
        if step.is_over:
            found = _findings(store, me.node)
            store.put(key(LEFT, me.node), b"1")
            if step.is_interrupted:
                raise CoordinatorLostError("it was interrupted on the node that leads it")
            return found
        _obey(store, me, step.number, test_pair, pause)


def _is_led(store: ControlStore) -> bool:
    return bool(store.list(COORDINATOR_KEY))


def _obey(
    store: ControlStore, me: Participant, step: int, test_pair: PairTester, pause: Pause
) -> None:
    entry = store.get(key(ORDER, step, me.node))
    if not entry.version:
        return  # this node is left out of the round
    order = decode(PairOrder, entry, "an order of the sweep")

    def exchange(port: int | None) -> tuple[str, int] | None:
        if port is not None:
            store.put(key(PORT, step, me.node), str(port).encode())
            return None
        return _partner_port(store, step, order.a, pause)

    def is_over() -> bool:
        try:
            now = decode(SweepStep, store.get(STEP_KEY), "the step of the sweep")
        except ControlStoreUnreachableError:
            return False  # perhaps only slow: the link is under test
        return now.is_over or now.number != step

    report = test_pair(order, me.node, me.address, exchange, is_over)
    store.put(key(REPORT, step, me.node), encode(report))


def _partner_port(
    store: ControlStore, step: int, partner: str, pause: Pause
) -> tuple[str, int] | None:
    for _ in range(round(PORT_S / _POLL_S)):
        entry = store.get(key(PORT, step, partner))
        if entry.version:
            other = decode(Participant, store.get(key(ALIVE, partner)), "a participant")
            return other.address, int(entry.value)
        if not store.get(key(ALIVE, partner)).version:
            return None
        pause(_POLL_S)
    return None


def _findings(store: ControlStore, node: str) -> Sequence[Finding]:
    entry = store.get(key(FINDING, node))
    if not entry.version:
        return ()
    try:
        return tuple(map(Finding.from_json, json.loads(entry.value)))
    except (ValueError, KeyError, TypeError) as exc:
        raise ControlStoreError(f"another version of gpuops takes part: {exc}") from exc
