"""Many prologs at once against one Postgres: all rows arrive, none twice, and no prolog waits.

The small form of tests/benchmarks/bench_prologs.py.
"""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select
from support.postgres import running_server
from support.prologs import GPUS, check_run, record

from gpuops.host.clock import SystemClock
from gpuops.model import Status
from gpuops.store import schema
from gpuops.store.checks import check_results, check_runs
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.spool.send import flush

NODES = 60
FLUSHERS = 8
# Writing one line costs milliseconds; this is what waiting for a dead database would exceed.
WAIT_MAX_S = 2.0
PASSES_MAX = 10

pytestmark = [pytest.mark.postgres, pytest.mark.quick_disk]


def prolog(number, folder):
    return record(check_run(number), folder / str(number))


def send(url, spool):
    return flush(spool, url, deadline_s=60, clock=SystemClock())


def send_all(url, spool):
    """As the timer does: what a busy server did not answer in time goes with the next pass."""
    for _ in range(PASSES_MAX):
        report = send(url, spool)
        if report.note is None:
            break
    return report


def counts(url):
    tables = (schema.events, check_runs, check_results, schema.components)
    with open_store(url, mode="read") as store, store.begin() as connection:
        return [connection.scalar(select(func.count()).select_from(table)) for table in tables]


FAILED = sum(check_run(number).verdict is Status.FAIL for number in range(NODES))
EXPECTED = [NODES, NODES, FAILED, NODES * GPUS]


def test_all_rows_of_many_prologs_arrive_and_none_twice(tmp_path, postgres_url):
    upgrade_store(postgres_url)
    spools, again = tmp_path / "spools", tmp_path / "again"
    with ThreadPoolExecutor(FLUSHERS) as pool:
        list(pool.map(lambda n: prolog(n, spools), range(NODES)))
        # As a flusher leaves it that was killed between the commit and the deleting.
        shutil.copytree(spools, again)
        sent = list(pool.map(lambda n: send_all(postgres_url, spools / str(n)), range(NODES)))
        first = counts(postgres_url)
        doubled = list(pool.map(lambda n: send_all(postgres_url, again / str(n)), range(NODES)))

    assert [report.note for report in sent] == [None] * NODES
    assert [report.sent for report in sent] == [1] * NODES
    assert [(report.sent, report.already_there) for report in doubled] == [(0, 1)] * NODES
    # The parts of a node are kept for root's runs only, as this one's may not be.
    assert first[:3] == counts(postgres_url)[:3] == EXPECTED[:3]
    assert first[3] in (0, EXPECTED[3])


def test_a_database_that_answers_nobody_holds_up_no_prolog(tmp_path):
    with running_server() as server, server.database() as url:
        upgrade_store(url)
        server.signal(signal.SIGSTOP)
        try:
            waits_s = [prolog(number, tmp_path) for number in range(NODES)]
        finally:
            server.signal(signal.SIGCONT)
        reports = [send(url, tmp_path / str(number)) for number in range(NODES)]

        assert max(waits_s) < WAIT_MAX_S
        assert sum(report.sent for report in reports) == NODES
        assert counts(url)[:3] == EXPECTED[:3]
