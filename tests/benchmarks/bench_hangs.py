"""Whom the flight recorders name in real hangs over gloo: injected faults, read as in a run.

Ranks of 4 to 8 that train over gloo with groups of pairs; each hang is drawn by seed, its recorders
are read from outside through torch's worker server, also of a rank that holds the interpreter's
lock. Right is exactly the set of faulty ranks. torch's own ``fr_trace`` gets some of the same
dumps, rewritten as NCCL's, because it does not read those of gloo (it needs the package tabulate);
the ranks that it calls missing or culprits count. Run as a script:

    python tests/benchmarks/bench_hangs.py --out hangs.json
"""

import argparse
import json
import pickle
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.drilled_hangs import MODES, HangingRanks, diagnosed, drawn, is_exact
from support.slow_rank_scores import wilson

SEED = 1_000
INJECTIONS = 200
N_PEER = 5  # of each mode


def fr_trace(dumps, folder):
    """Return the ranks that torch's own analysis names in *dumps*."""
    for rank, body in dumps.items():
        groups = {
            name: {"name": name, "desc": name, "ranks": json.dumps(about["ranks"])}
            for name, about in body["pg_config"].items()
        }
        entries = [
            entry
            | {"profiling_name": entry["profiling_name"].replace("gloo:", "nccl:"), "frames": []}
            | {"state": "completed" if entry["retired"] else "scheduled"}
            for entry in body["entries"]
        ]
        data = pickle.dumps(body | {"pg_config": groups, "entries": entries})
        (folder / f"trace_{rank}").write_bytes(data)
    words = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*words, "-p", "trace_"], capture_output=True, text=True, check=False)
    named = re.findall(
        r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)", done.stdout + done.stderr
    )
    return {int(rank) for pair in named for text in pair for rank in re.findall(r"\d+", text)}


def rows(n, seed):
    """Return for each mode in how many of *n* hangs exactly the faulty ranks were named."""
    found = {mode: {"exact": 0, "injections": 0, "kinds": {}} for mode in MODES}
    with HangingRanks() as ranks:
        for number in range(n):
            for mode, row in found.items():
                hang = drawn(mode, seed + number)
                with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
                    dumps = ranks.dumps(hang, Path(folder))
                    verdict = diagnosed(hang, dumps)
                    if number < N_PEER and find_spec("tabulate"):
                        is_named = fr_trace(dumps, Path(own)) == hang.ranks
                        peer = row.setdefault("fr_trace", {"exact": 0, "injections": 0})
                        peer["injections"] += 1
                        peer["exact"] += is_named
                is_right = is_exact(hang, verdict)
                row["injections"] += 1
                row["exact"] += is_right
                row["kinds"][verdict.kind] = row["kinds"].get(verdict.kind, 0) + 1
                if not is_right:
                    print("WRONG", hang, verdict, flush=True)
            print(number + 1, {mode: row["exact"] for mode, row in found.items()}, flush=True)
    return found


def main():
    """Inject, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=float, default=1.0, help="More or fewer hangs.")
    args = parser.parse_args()
    modes = rows(max(1, round(INJECTIONS / len(MODES) * args.trials)), SEED)
    n, exact = (sum(row[key] for row in modes.values()) for key in ("injections", "exact"))
    low, high = wilson(exact, n)
    total = {"injections": n, "exact": exact, "interval_95": [round(low, 4), round(high, 4)]}
    peers = [row["fr_trace"] for row in modes.values() if "fr_trace" in row]
    if peers:
        total["fr_trace"] = {key: sum(x[key] for x in peers) for key in ("injections", "exact")}
    print(total)
    if args.out:
        args.out.write_text(json.dumps({"total": total, "modes": modes}, indent=2) + "\n")


if __name__ == "__main__":
    main()
