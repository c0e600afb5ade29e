"""A day of health checks of 1,000 nodes, one every five minutes: what is written, what is kept?

Every run of every node is planned, encoded, decoded and ingested as a hook and its flusher do, but
--batch of them in one transaction: a commit of its own for each would add some 15 MB of WAL to the
day. Nodes break, flap, reboot and warn by seed. Postgres writes a
checkpoint after each five minutes, as with its defaults, so that the WAL holds the full pages that
it would. Run as a script:

    python tests/benchmarks/bench_check_day.py --database postgres --out check_day.json
"""

import argparse
import contextlib
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import func, select, text
from support.check_day import ROUNDS, SimulatedNode, WriteCounter, send
from support.postgres import new_server

from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.schema import metadata

GOALS = {"writes": 350_000, "kept_bytes": 50e6, "wal_bytes": 500e6}


@contextlib.contextmanager
def empty_store(database):
    """Yield the URL of an empty store, and a function that ends five minutes of it."""
    if database == "sqlite":
        with tempfile.TemporaryDirectory() as home:
            yield f"sqlite:///{home}/store.db", lambda: None
        return
    server = new_server(options=("fsync=off", "synchronous_commit=off", "checkpoint_timeout=1d"))
    try:
        with server.database() as url:
            yield url, lambda: server.execute("CHECKPOINT")
    finally:
        server.stop()


def size_of(store):
    """Return the bytes of the database, and of the WAL that it wrote so far."""
    with store.begin() as connection:
        if not store.is_sqlite:
            query = "SELECT pg_database_size(current_database()), pg_current_wal_lsn() - '0/0'"
            kept, wal = connection.execute(text(query)).one()
            return int(kept), int(wal)
    path = Path(store.url.database)
    wal = path.with_name(path.name + "-wal")
    return path.stat().st_size, wal.stat().st_size if wal.exists() else 0


def measure(args):
    """Return what the day came to."""
    nodes = [SimulatedNode.drawn(n, args.seed, args.rounds) for n in range(args.nodes)]
    with empty_store(args.database) as (url, end_round):
        upgrade_store(url)
        with open_store(url, mode="write") as store:
            counted, wal_peak = WriteCounter(store), 0
            reader = store.engine.connect()  # while one is open, SQLite keeps its WAL file
            kept_before, wal_before = size_of(store)
            begin = time.perf_counter()
            for number in range(args.rounds):
                for start in range(0, len(nodes), args.batch):
                    some = nodes[start : start + args.batch]
                    send(store, [line for node in some for line in node.lines(number)])
                for node in nodes:
                    node.truth.clear()
                end_round()
                wal_peak = max(wal_peak, size_of(store)[1])
            took_s = time.perf_counter() - begin
            reader.close()
            kept, wal = size_of(store)
            with store.begin() as connection:
                rows = {
                    table.name: connection.scalar(select(func.count()).select_from(table))
                    for table in metadata.sorted_tables
                }
            return {
                "database": args.database,
                "nodes": args.nodes,
                "runs": args.nodes * args.rounds,
                "writes": counted.rows,
                "kept_bytes": kept - kept_before,
                # SQLite reuses its file: what counts is how large that grows.
                "wal_bytes": wal_peak if args.database == "sqlite" else wal - wal_before,
                "rows": {name: count for name, count in rows.items() if count},
                "seconds": round(took_s, 1),
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgres"), required=True)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", default="day")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    found["goals_met"] = {name: found[name] < goal for name, goal in GOALS.items()}
    found["machine"] = platform.machine()
    body = json.dumps(found, indent=1)
    print(body)
    if args.out:
        args.out.write_text(body + "\n")


if __name__ == "__main__":
    main()
