"""1,000 prologs at once against one real Postgres (fsync on): does any wait for the database?

Each simulated node records a check run of 48 findings into a spool of its own, as the hook's child
does, and a flusher sends it. As many processes as there are CPUs record, as fast as they can, while
many flushers, at the lowest priority as they would be on other machines, load the database. The
same is then done with the database frozen: who waits for it would wait until it thaws. Run as a
script:

    python tests/benchmarks/bench_prologs.py --out prologs.json
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import func, select
from support.postgres import new_server
from support.prologs import FINDINGS, check_run, record

from gpuops.host.clock import SystemClock
from gpuops.store import schema
from gpuops.store.checks import check_results, check_runs
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.spool.send import flush

PATIENCE_S = 600
WAIT_MAX_MS = 50.0


def record_all(numbers, spools, ready, start, results):
    """Be the prologs of the nodes *numbers*; hand each finished spool to the flushers."""
    runs = [check_run(number) for number in numbers]
    start.wait()
    took = []
    for ran in runs:
        took.append(record(ran, spools / ran.node))
        ready.put(spools / ran.node)
    results.put(took)


def flush_all(url, ready, results):
    """Be flushers, one after the other, until there is nothing more to send."""
    os.nice(19)
    took, sent = [], 0
    while (spool := ready.get()) is not None:
        before = time.perf_counter()
        report = flush(spool, url, deadline_s=60, clock=SystemClock())
        took.append(time.perf_counter() - before)
        sent += report.sent
    results.put((took, sent))


def measure(args, spools, url):
    """Return the seconds of every record and every flush; without *url* nothing is sent."""
    context = multiprocessing.get_context("fork")
    start, ready = context.Event(), context.Queue()
    recorded, flushed = context.Queue(), context.Queue()
    workers = os.cpu_count()
    recorders = [
        context.Process(
            target=record_all,
            args=(range(n, args.nodes, workers), spools, ready, start, recorded),
        )
        for n in range(workers)
    ]
    flushers = [
        context.Process(target=flush_all, args=(url, ready, flushed))
        for _ in range(args.flushers if url else 0)
    ]
    for process in (*recorders, *flushers):
        process.start()
    began = time.monotonic()
    start.set()
    records = [value for _ in recorders for value in recorded.get(timeout=PATIENCE_S)]
    recorded_s = time.monotonic() - began
    if url:
        for process in recorders:
            process.join(PATIENCE_S)  # what they hand over is then in the queue
    for _ in flushers:
        ready.put(None)
    sent = [flushed.get(timeout=PATIENCE_S) for _ in flushers]
    if not url:
        ready.cancel_join_thread()
        for _ in range(args.nodes):
            ready.get(timeout=PATIENCE_S)
    for process in (*recorders, *flushers):
        process.join(30)
    return {
        "records": records,
        "flushes": [value for took, _ in sent for value in took],
        "sent": sum(count for _, count in sent),
        "recorded_s": round(recorded_s, 2),
        "took_s": round(time.monotonic() - began, 2),
    }


def rows(url):
    """Return how many events, nodes with events, check runs and results there are."""
    event = schema.events.c
    with open_store(url, mode="read") as store, store.begin() as connection:
        return {
            "events": connection.scalar(select(func.count()).select_from(schema.events)),
            "nodes": connection.scalar(select(func.count(func.distinct(event.node)))),
            "check_runs": connection.scalar(select(func.count()).select_from(check_runs)),
            "check_results": connection.scalar(select(func.count()).select_from(check_results)),
        }


def milliseconds(values):
    """Return median, 99th percentile and maximum of seconds, in milliseconds."""
    ordered = sorted(value * 1000 for value in values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "max": round(ordered[-1], 2),
    }


def compare(args, server):
    """Return the figures with the database at work, and with it frozen."""
    folder = Path(tempfile.mkdtemp(prefix="gpuops-bench-"))
    try:
        with server.database() as url:
            upgrade_store(url)
            busy = measure(args, folder / "busy", url)
            found = rows(url)
            server.signal(signal.SIGSTOP)
            try:
                frozen = measure(args, folder / "frozen", None)
            finally:
                server.signal(signal.SIGCONT)
        return {
            "nodes": args.nodes,
            "findings_per_prolog": FINDINGS,
            "recorders": os.cpu_count(),
            "flushers": args.flushers,
            "record_ms": milliseconds(busy["records"]),
            "record_ms_database_frozen": milliseconds(frozen["records"]),
            "over_50_ms": sum(value * 1000 > WAIT_MAX_MS for value in busy["records"]),
            "over_50_ms_database_frozen": sum(
                value * 1000 > WAIT_MAX_MS for value in frozen["records"]
            ),
            "flush_ms": milliseconds(busy["flushes"]),
            "lost": args.nodes - found["nodes"],
            "doubled": found["events"] - found["nodes"],
            "results_missing": args.nodes * FINDINGS - found["check_results"],
            "sent": busy["sent"],
            "recorded_s": busy["recorded_s"],
            "took_s": busy["took_s"],
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    """Run it and print the figures; exit 1 where a row is lost, doubled or a prolog waited."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--flushers", type=int, default=16, help="at once")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    server = new_server(options=("max_connections=200",))
    try:
        found = compare(args, server)
    finally:
        server.stop()
    for name, value in found.items():
        print(f"{name:<28} {value}")
    body = {
        "benchmark": "prologs",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **found,
    }
    if args.out:
        args.out.write_text(json.dumps(body, indent=2) + "\n")
    wrong = found["lost"] or found["doubled"] or found["results_missing"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
