"""A day of health checks on many simulated nodes, every five minutes, sent as hooks send them."""

import functools
import random
from dataclasses import dataclass, field, replace

from sqlalchemy import event, text

from gpuops.checks.core.runner import CheckFailure, CheckRun
from gpuops.gate.check_changes import plan_record
from gpuops.gate.record import CheckOccasion, events_of
from gpuops.host.clock import FakeClock
from gpuops.host.node_state import BootMoment
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, uuid7
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.spool.format import LineEncoder, decode_line

ROUND_S = 300
ROUNDS = 86_400 // ROUND_S
START_US = 1_780_000_000 * 10**6
OCCASION = CheckOccasion(trigger="periodic", mode="enforce")
# As many checks of each kind as `gpuops check` prints for a healthy node with eight GPUs.
MEASURED, VALUELESS, SKIPPED = 22, 8, 20
STEADY_WARNINGS, BROKEN, FLAPPING, REBOOTING, OWN_FAILURE = 0.3, 0.01, 0.02, 0.01, 0.005


@dataclass
class SimulatedNode:
    """One node: what is wrong with it, and what it recorded before."""

    name: str
    draw: random.Random
    broken_from: int | None = None
    rebooted_at: int | None = None
    warns: bool = False
    flaps: bool = False
    fails_itself: bool = False
    recorded: object = None
    truth: list = field(default_factory=list)

    @classmethod
    def drawn(cls, number, seed, rounds=ROUNDS):
        draw = random.Random(f"{seed}.{number}")
        at = draw.randrange(1, rounds)
        return cls(
            name=f"n{number:04d}",
            draw=draw,
            broken_from=at if draw.random() < BROKEN else None,
            rebooted_at=at if draw.random() < REBOOTING else None,
            warns=draw.random() < STEADY_WARNINGS,
            flaps=draw.random() < FLAPPING,
            fails_itself=draw.random() < OWN_FAILURE,
        )

    def run(self, number):
        """Return the check run of round *number*."""
        boot = "a" if self.rebooted_at is None or number < self.rebooted_at else "b"
        start_us = START_US + number * ROUND_S * 10**6
        failures = (CheckFailure("judge of x", "KeyError", "…"),) if self.fails_itself else ()
        made = CheckRun(
            suite="health",
            node=self.name,
            start_us=start_us,
            end_us=start_us + 400_000,
            findings=tuple(self._findings(number)),
            failures=failures,
            profile="h100",
            moment=BootMoment(boot_id=boot, since_boot_s=1e5, t_us=start_us),
        )
        self.truth.append(made)
        return made

    def _findings(self, number):
        passed, *steady = self._steady
        for n in range(MEASURED):
            value = round(self.draw.uniform(20, 80), 1)
            yield replace(passed, check=f"measured_{n:02d}", value=value, unit="GB/s")
        yield from steady
        if self.warns:
            yield replace(passed, check="clock_sync", status=Status.WARN, message=f"is {number}")
        if self.flaps and self.draw.random() < 0.5:
            yield replace(passed, check="load", status=Status.WARN, message="it is busy")
        if self.broken_from is not None and number >= self.broken_from:
            yield Finding(
                check="gpu_lost",
                entity=Entity(EntityKind.GPU, f"GPU-{self.name}-3"),
                status=Status.FAIL,
                message=f"lost, {number} lines in the log",
                failure_class=FailureClass.GPU_FELL_OFF_BUS,
            )

    @functools.cached_property
    def _steady(self):
        """Return a finding that passes, and those that are the same in every run."""
        passed = Finding(
            check="",
            entity=Entity(EntityKind.NODE, self.name),
            status=Status.PASS,
            message="all is as expected",
        )
        gpus = [Entity(EntityKind.GPU, f"GPU-{self.name}-{number}") for number in range(8)]
        return [
            passed,
            *(replace(passed, check=f"passes_{n:02d}") for n in range(VALUELESS)),
            *(
                replace(passed, check=f"skipped_{n:02d}", status=Status.SKIP)
                for n in range(SKIPPED)
            ),
            *(replace(passed, check="gpu_count", entity=gpu) for gpu in gpus),
        ]

    def lines(self, number):
        """Return the lines that the hook of round *number* spools."""
        made = self.run(number)
        planned = plan_record(
            made,
            self.recorded,
            mode="enforce",
            all_gpus=True,
            new_id=lambda: uuid7(made.start_us, self.draw.randbytes(10)),
        )
        self.recorded = planned.run
        clock = FakeClock(now_us=made.end_us)
        encoder = LineEncoder(node=self.name, boot_id="boot", randomness=self.draw.randbytes)
        events = events_of(made, OCCASION, clock, planned)
        return [EventEnvelope(decode_line(encoder.encode(event))) for event in events]


def send(store, envelopes):
    """Ingest *envelopes* as one flush does."""
    with store.begin() as connection:
        ingest(connection, envelopes, 0)


class WriteCounter:
    """Counts the rows inserted, updated and deleted in a store from now on."""

    def __init__(self, store):
        self._store = store
        self._sqlite = 0
        if store.is_sqlite:
            event.listen(store.engine, "begin", self._begin)
            event.listen(store.engine, "commit", self._commit)
        self._before = 0 if store.is_sqlite else self._postgres()

    def _begin(self, connection):
        self._at_begin = connection.connection.driver_connection.total_changes

    def _commit(self, connection):
        self._sqlite += connection.connection.driver_connection.total_changes - self._at_begin

    def _postgres(self):
        # The tables of the schema alone, and of every backend: those of closed ones are flushed.
        self._store.engine.dispose()
        query = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables"
        with self._store.begin() as connection:
            return int(connection.execute(text(query)).scalar())

    @property
    def rows(self):
        return self._sqlite if self._store.is_sqlite else self._postgres() - self._before
