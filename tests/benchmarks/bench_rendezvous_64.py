"""64 real agents on one machine, workers without torch: how long after the last one is ready?

Most of the wall time is 64 processes that import torch on few cores; what counts begins when the
last of them has said on the board that it would take a seat. Run as a script:

    python tests/benchmarks/bench_rendezvous_64.py --agents 64 --out rendezvous_64.json
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.many_agents import gather

GOAL_S = 10.0
PATIENCE_S = 560.0


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpuops-bench-") as folder:
        row = gather(args.agents, Path(folder), PATIENCE_S)
    print(f"{'agents':>6} {'all ready after':>15} {'then all seated':>15} {'all workers step':>16}")
    print(
        f"{row['agents']:>6} {row['last_ready_s']:>13} s {row['seated_s']:>13} s "
        f"{row['working_s']:>14} s"
    )
    result = {"what": "rendezvous of many agents, seconds", "goal_seated_s": GOAL_S, **row}
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
