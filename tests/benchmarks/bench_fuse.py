"""Who is drained and who starts jobs in a simulated year of a fleet: the gate's fuse beside others.

The gate's own policy decides, over a simulated clock, fleet and store: single faults at the rate of
arXiv 2410.21680, a row of racks that overheats, a dead leaf switch, a dead file server, a bad
driver, a wrong rule, a wrong rule that fails a node now and then; and each storm again while the
store does not answer. A job starts on a node every four hours. Beside: the rule before (the third
node within ten minutes is refused) and no fuse at all. Run as a script:

    python tests/benchmarks/bench_fuse.py --out fuse.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fuse_fleet import RULES, YEAR_S, simulate

from gpuops.store.fuse import FuseSettings

N_STORMS = 12


def measure(nodes, seed):
    """Return the table: for each rule, jobs started and nodes drained, over all and by storm."""
    found = {}
    for rule in RULES:
        began_s = time.monotonic()
        tally = simulate(rule, n_nodes=nodes, apart_s=YEAR_S / (N_STORMS + 1), seed=seed)
        found[rule] = {
            "jobs_on_broken_nodes": dict(sorted(tally.jobs.items())),
            "drained": dict(sorted(tally.drained.items())),
            "by_storm": {name: dict(counts) for name, counts in sorted(tally.by_storm.items())},
            "took_s": round(time.monotonic() - began_s, 1),
        }
    return found


def goals(found, nodes):
    """Return which goals are met: of the fuse of the gate alone."""
    ours, settings = found["by the table"], FuseSettings()
    rules = [c for name, c in ours["by_storm"].items() if "wrong rule" in name]
    return {
        "jobs_on_hardware_faults_below_cap": ours["jobs_on_broken_nodes"].get(
            "hardware_below_cap", 0
        ),
        "jobs_on_hardware_faults_below_cap_goal": 0,
        "healthy_drained_by_one_wrong_rule": max((c.get("healthy", 0) for c in rules), default=0),
        "healthy_drained_by_one_wrong_rule_goal": settings.limit(nodes),
    }


def main():
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.nodes, options.seed)
    for rule, result in found.items():
        print(f"{rule} ({result['took_s']} s)")
        print(f"  jobs started on broken nodes: {result['jobs_on_broken_nodes']}")
        print(f"  nodes drained: {result['drained']}")
        for name, counts in result["by_storm"].items():
            print(f"    {name}: {counts}")
    reached = goals(found, options.nodes)
    print(json.dumps(reached, indent=2))
    if options.out is not None:
        result = {
            "benchmark": "fuse",
            "nodes": options.nodes,
            "days": 365,
            "seed": options.seed,
            **reached,
            "rules": found,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return (
        reached["jobs_on_hardware_faults_below_cap"] > 0
        or reached["healthy_drained_by_one_wrong_rule"]
        > reached["healthy_drained_by_one_wrong_rule_goal"]
    )


if __name__ == "__main__":
    sys.exit(main())
