"""What saving and restoring costs beside torch's own ways, other checkpointers, and the hardware.

The code of ``gpuops ckpt bench`` beside torch's own ways and the peers of ``.venv-peers``; workers
that are killed, bits that are flipped, the odds of placements, and a fetch from another keeper,
over loopback, beside a raw socket (see bench_transfer).

    python tests/benchmarks/bench_checkpoint.py --size 2GB --rounds 7 --out checkpoint.json
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import bench_transfer
import checkpoint_peers
from checkpoint_plan import ROWS, PeerBenchPlan
from checkpoint_rows import run_bench
from rich.console import Console
from rich.table import Table

from gpuops.cli.ckpt.bench import print_bench
from gpuops.model import envelope
from gpuops.units import parse_bytes, parse_seconds
from gpuops.worker.bench.figures import summarize
from gpuops.worker.bench.savers import SCHEMA

CONNECTIONS = 4


def peer_row(nbytes, n_rounds):
    """Return a fetch's seconds and its rate as a share of the raw socket's, round by round."""
    took = bench_transfer.measure(nbytes, n_rounds, CONNECTIONS)
    shares = [raw / mine for raw, mine in zip(took["raw"], took["fetch"], strict=True)]
    return {
        "nbytes": nbytes,
        "connections": CONNECTIONS,
        "ways": [{"way": name, "seconds": summarize(seconds)} for name, seconds in took.items()],
        "of_raw": summarize(shares)["median"],
    }


def flips_table(tallies):
    """Return what came of each flipped bit, by where it was and what loaded it."""
    table = Table("flipped in", "loaded by", title="single bits", title_justify="left")
    for head in ("flips", "found", "silently wrong", "of no consequence"):
        table.add_column(head, justify="right")
    for tally in tallies:
        counts = (tally[name] for name in ("flips", "found", "silent", "harmless"))
        table.add_row(tally["where"], tally["way"], *map(str, counts))
    return table


def odds_table(rows):
    """Return the odds that a state survives lost nodes."""
    table = Table("lost of 16", title="GEMINI, 2 copies", title_justify="left")
    for head in ("published", "counted", "simulated"):
        table.add_column(head, justify="right")
    for row in rows:
        shares = (row[name] for name in ("published", "exact", "simulated"))
        table.add_row(str(row["lost"]), *(f"{100 * share:.1f} %" for share in shares))
    return table


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--small-tensors", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step", default="10ms", help="of the training beside a save")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kill-size", default="64MB")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--peer-size", default="512MiB")
    parser.add_argument("--no-peers", action="store_true", help="only torch and gpuops")
    parser.add_argument(
        "--every-round", action="store_true", help="also those that take long, in each round"
    )
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    found = parser.parse_args()
    if min(found.rounds, found.kills, found.flips) < 1:
        parser.error("--rounds, --kills and --flips must be at least 1; --only leaves rows out")
    return found


def main():
    """Measure, print the tables, write the figures."""
    args = options()
    logging.disable(logging.INFO)  # a peer tells of each save
    plan = PeerBenchPlan(
        nbytes=parse_bytes(args.size),
        n_tensors=args.tensors,
        small_tensors=args.small_tensors,
        rounds=args.rounds,
        step_s=parse_seconds(args.step),
        kills=args.kills,
        kill_nbytes=parse_bytes(args.kill_size),
        flips=args.flips,
        only=tuple(args.only.split(",")),
        is_brief=not args.every_round,
    )
    began_s = time.monotonic()

    def keep(found):
        if args.out:
            args.out.write_text(json.dumps(envelope(SCHEMA, found), indent=2) + "\n")

    found = run_bench(
        plan,
        args.dir.absolute(),
        lambda text: print(f"{time.monotonic() - began_s:7.1f} s  {text}", file=sys.stderr),
        peer=lambda: peer_row(parse_bytes(args.peer_size), args.rounds),
        extra_savers=None if args.no_peers else checkpoint_peers.others,
        on_figures=keep,
    )
    print_bench(envelope(SCHEMA, found))
    console = Console()
    if "flips" in found:
        console.print(flips_table(found["flips"]))
    if "odds" in found:
        console.print(odds_table(found["odds"]))
    for name, why in found["did_not_run"].items():
        console.print(f"{name} did not run: {why}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
