"""Many writers into one real Postgres (fsync on): none lost, none doubled, events per second.

Each writer process appends its events to a spool of its own and flushes as it goes, as an agent
does. The same is then done with the server killed for ten seconds in the middle. Run as a script:

    python tests/benchmarks/bench_postgres_writers.py --out writers.json
"""

import argparse
import json
import multiprocessing
import os
import platform
import queue
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import func, select
from support.postgres import new_server

from gpuops.host.clock import SystemClock
from gpuops.store import schema
from gpuops.store.engine import open_store
from gpuops.store.events import new_event
from gpuops.store.migrate import upgrade_store
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.send import flush

PATIENCE_S = 300


def write(number, spool, url, events, start, results):
    """Be one writer: record, flush in between, and flush until nothing remains."""
    clock = SystemClock()
    node = f"n{number:03d}"
    run = f"run-{number:03d}"
    recorder = spool_recorder(spool, node=node, boot_id="boot", bytes_max=2**28, clock=clock)
    start.wait()
    began = time.monotonic()
    sent = failed = flushes = 0
    worst_record_s = 0.0

    def send():
        nonlocal sent, failed, flushes
        report = flush(spool, url, deadline_s=30, clock=clock)
        flushes += 1
        sent += report.sent + report.already_there
        failed += report.note is not None
        return report

    for done in range(1, events + 1):
        before = time.monotonic()
        recorder.record(
            new_event(
                "attempt.progress",
                node=node,
                clock=clock,
                run_id=run,
                attempt=0,
                payload={"minute_us": done * 60_000_000, "step_last": done, "beats": done},
            )
        )
        worst_record_s = max(worst_record_s, time.monotonic() - before)
        if done % 500 == 0:
            send()
    recorder.close()
    pause = threading.Event()
    while time.monotonic() - began < PATIENCE_S:
        report = send()
        if report.note is None and report.remaining == 0:
            break
        pause.wait(0.2)
    results.put(
        {
            "lost_by_recorder": recorder.lost,
            "failed_flushes": failed,
            "flushes": flushes,
            "worst_record_ms": worst_record_s * 1000,
            "took_s": time.monotonic() - began,
        }
    )


def measure(server, writers, events, outage_s):
    """Return the figures of one round; with *outage_s*, the server is killed in the middle."""
    spools = Path(tempfile.mkdtemp(prefix="gpuops-bench-"))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    try:
        with server.database() as url:
            upgrade_store(url)
            processes = [
                context.Process(
                    target=write, args=(n, spools / str(n), url, events, start, results)
                )
                for n in range(writers)
            ]
            for process in processes:
                process.start()
            began = time.monotonic()
            start.set()
            if outage_s:
                _wait_for_rows(url, writers * events // 4)
                server.kill()
                threading.Event().wait(outage_s)
                server.start()
            reports = [_next(results, processes) for _ in processes]
            for process in processes:
                process.join(30)
            took_s = time.monotonic() - began
            return _judge(url, reports, writers, events, took_s, outage_s)
    finally:
        shutil.rmtree(spools, ignore_errors=True)


def _next(results, processes):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                break
    raise RuntimeError("a writer ended without its report")


def _wait_for_rows(url, wanted):
    deadline = time.monotonic() + PATIENCE_S
    with open_store(url, mode="read") as store:
        while time.monotonic() < deadline:
            with store.begin() as connection:
                if connection.scalar(select(func.count()).select_from(schema.events)) >= wanted:
                    return
            threading.Event().wait(0.02)
    raise TimeoutError(f"{wanted} events did not arrive")


def _judge(url, reports, writers, events, took_s, outage_s):
    table = schema.events.c
    with open_store(url, mode="read") as store, store.begin() as connection:
        rows = connection.scalar(select(func.count()).select_from(schema.events))
        distinct = connection.scalar(select(func.count(func.distinct(table.node + "/" + _text()))))
        minutes = connection.scalar(select(func.count()).select_from(schema.progress))
    wanted = writers * events
    return {
        "writers": writers,
        "events": wanted,
        "outage_s": outage_s,
        "lost": wanted - distinct,
        "doubled": rows - distinct,
        "progress_rows": minutes,
        "lost_by_recorders": sum(report["lost_by_recorder"] for report in reports),
        "failed_flushes": sum(report["failed_flushes"] for report in reports),
        "worst_record_ms": round(max(report["worst_record_ms"] for report in reports), 1),
        "took_s": round(took_s, 2),
        "events_per_s": round(wanted / took_s),
    }


def _text():
    from sqlalchemy import Text, cast

    return cast(schema.events.c.seq, Text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--outage", type=float, default=10.0, help="seconds")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    server = new_server(options=("max_connections=200",))
    try:
        rounds = [measure(server, args.writers, args.events, s) for s in (0.0, args.outage)]
    finally:
        server.stop()
    body = {
        "benchmark": "postgres_writers",
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "rounds": rounds,
    }
    print(f"{'outage':>8} {'writers':>8} {'events':>8} {'lost':>6} {'doubled':>8}", end="")
    print(f" {'events/s':>9} {'took':>8} {'failed flushes':>15} {'worst record':>13}")
    for row in rounds:
        print(
            f"{row['outage_s']:>6.0f} s {row['writers']:>8} {row['events']:>8} {row['lost']:>6}"
            f" {row['doubled']:>8} {row['events_per_s']:>9} {row['took_s']:>6.1f} s"
            f" {row['failed_flushes']:>15} {row['worst_record_ms']:>10} ms"
        )
    if args.out:
        args.out.write_text(json.dumps(body, indent=2) + "\n")
    lost = any(row["lost"] or row["doubled"] or row["lost_by_recorders"] for row in rounds)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
