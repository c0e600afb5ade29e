"""How long do the questions of docs/store.md take over a year of 2,000 nodes?

The rows are written into the tables directly: a check run a day and node, changes, incidents at
Meta's 6.5 per 1,000 node-days (arXiv 2410.21680), drains, parts. Run as a script:

    python tests/benchmarks/bench_store_questions.py --database postgres --out questions.json
"""

import argparse
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import insert, text
from support.postgres import new_server

from gpuops.store import schema
from gpuops.store.checks import check_results, check_runs
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store

DAY_US = 86_400 * 10**6
GOALS_S = {"sqlite": 5.0, "postgres": 2.0}
NAMES = ("mttf", "lemons", "every_slot", "drained", "noisiest", "not_checked")
PAGE = Path(__file__).parents[2] / "docs" / "store.md"
GPUS, FINDINGS_A_DAY, INCIDENTS_A_NODE_DAY = 8, 0.5, 6.5e-3
CHECKS = [f"check_{n:02d}" for n in range(50)]
CLASSES = ["gpu_hw.fell_off_bus", "gpu_hw.ecc_uncorrectable", "network.port_down", "host_hw.dimm"]


def year(nodes, days, now_us):
    """Yield (table, rows) of a fleet, a day at a time."""
    draw = random.Random("year")
    yield schema.clusters, [{"id": "c", "name": "default"}]
    names = [f"n{n:04d}" for n in range(nodes)]
    seen = {"first_seen_us": now_us - days * DAY_US, "last_seen_us": now_us}
    yield schema.nodes, [{"id": n, "cluster_id": "c", "hostname": n, **seen} for n in names]
    yield (
        schema.components,
        [
            {"node_id": n, "kind": "gpu", "component_id": f"G-{n}-{g}", **seen}
            for n in names
            for g in range(GPUS)
        ],
    )
    for day in range(days):
        yield from _day(draw, names, day, now_us - (days - day) * DAY_US)


def _day(draw, names, day, at_us):
    runs, found, states, incidents, culprits = [], [], [], [], []
    for node in names:
        fails = draw.random() < FINDINGS_A_DAY
        run = {
            "id": f"{day:04d}-{node}",
            "node_id": node,
            "suite": "health",
            "trigger": "periodic",
            "start_us": at_us,
            "last_us": at_us + DAY_US - 1,
            "runs": 288,
            "status": "warn" if fails else "pass",
            "origin_uid": 0,
        }
        runs.append(run)
        if fails:
            about = {"entity_kind": "node", "entity_id": node, "message": "beyond its limit"}
            check = {"check_name": draw.choice(CHECKS), "status": "warn", "ordinal": 0}
            found.append({"check_run_id": run["id"], **check, **about})
        if draw.random() < INCIDENTS_A_NODE_DAY:
            incident, gpu = f"i-{run['id']}", f"G-{node}-{draw.randrange(GPUS)}"
            incidents.append(_incident(draw, incident, at_us, gpu))
            parts = (("gpu", gpu), ("node", node))
            culprits += [
                {"incident_id": incident, "entity_kind": kind, "entity_id": name}
                | {"node_id": node, "account_key": "k"}
                for kind, name in parts
            ]
            for state, after_us in (("drained", 0), ("resumed", DAY_US // 3)):
                told = {"reason": "gpuops: fail", "actor": "gpuops", "t_us": at_us + after_us}
                states.append(
                    {"id": f"{incident}-{state}", "node_id": node, "state": state, **told}
                )
    yield check_runs, runs
    yield check_results, found
    yield schema.incidents, incidents
    yield schema.incident_culprits, culprits
    yield schema.node_states, states


def _incident(draw, name, at_us, gpu):
    failure_class = draw.choice(CLASSES)
    return {
        "id": name,
        "cluster_id": "c",
        "failure_class": failure_class,
        "category": failure_class.partition(".")[0],
        "side": "infra",
        "confidence": "confirmed",
        "state": "closed",
        "title": "a fault",
        "first_us": at_us,
        "detected_us": at_us,
        "culprit_kind": "gpu",
        "culprit_id": gpu,
        "lost_us": 0,
        "authority": 2,
        "rev": 1,
        "body": {},
        "account_key": "k",
    }


@contextlib.contextmanager
def empty_store(database):
    """Yield the URL of an empty store."""
    if database == "sqlite":
        with tempfile.TemporaryDirectory() as home:
            yield f"sqlite:///{home}/store.db"
        return
    server = new_server()
    try:
        with server.database() as url:
            yield url
    finally:
        server.stop()


def measure(args):
    """Return the seconds that each question took, and how many rows it gave."""
    queries = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with empty_store(args.database) as url:
        upgrade_store(url)
        with open_store(url, mode="write") as store:
            for table, rows in year(args.nodes, args.days, time.time_ns() // 1000):
                if rows:
                    with store.begin() as connection:
                        connection.execute(insert(table), rows)
            if args.database == "postgres":
                with store.begin() as connection:
                    connection.execute(text("ANALYZE"))
            found = {}
            for name, query in zip(NAMES, queries, strict=True):
                with store.begin() as connection:
                    begin = time.perf_counter()
                    rows = connection.execute(text(query)).all()
                    found[name] = {
                        "seconds": round(time.perf_counter() - begin, 3),
                        "rows": len(rows),
                    }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=tuple(GOALS_S), required=True)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    slowest_s = max(item["seconds"] for item in found.values())
    body = {"database": args.database, "nodes": args.nodes, "days": args.days, "questions": found}
    body["goal_met"] = slowest_s < GOALS_S[args.database]
    print(json.dumps(body, indent=1))
    if args.out:
        args.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
