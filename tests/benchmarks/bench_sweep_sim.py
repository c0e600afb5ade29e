"""How a sweep locates a bad node or link, beside the schemes of others: simulated, by seed.

A test of a pair is one number with 1 % noise; nodes or links that fail always, are 25 % slow, or
fail now and then are planted. gpuops' own schedule, limits, blame and history decide; the peers'
schemes (`support.sweep_peers`) get the same faults and seeds. Schemes of all pairs are simulated up
to 256 nodes. Run as a script:

    python tests/benchmarks/bench_sweep_sim.py --out sweep_sim.json
"""

import argparse
import json
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.sweep_fleet import Faults, run_sweep
from support.sweep_peers import ALL_PAIRS, SCHEMES

from gpuops.burnin.history import PairHistory
from gpuops.burnin.schedule import first_rounds

# Nodes of a fleet, and how many fleets are simulated for it with "--trials 1".
HARD = {64: 60, 256: 20, 1024: 10, 4096: 3, 16_384: 2}
ALL_PAIRS_NODES_MAX = 256
SLOW = {64: 300, 1024: 15}
HISTORY = {64: 60, 256: 15, 1024: 4}
LINKS = {64: 200, 1024: 20}
PARTNERS = {64: 300, 256: 60}
NIGHTS = 14
BAD_SHARE = 0.05


def names(n):
    """Return the names of *n* nodes."""
    return [f"n{i:05}" for i in range(n)]


def planted(n, n_bad, seed):
    """Return *n_bad* of *n* nodes."""
    return set(random.Random(f"bad {seed}").sample(names(n), n_bad))


def drawn_links(n, n_bad, seed, *, apart=True):
    """Return *n_bad* of the pairs that gpuops' first two rounds draw; *apart*: of other nodes."""
    pairs = [pair for one in first_rounds(names(n), seed=seed) for pair in one.pairs]
    links, ends = set(), set()
    for pair in random.Random(f"bad {seed}").sample(pairs, len(pairs)):
        if len(links) < n_bad and (ends.isdisjoint(pair) or not apart):
            links.add(pair)
            ends.update(pair)
    return links


def swept(scheme, n, cases):
    """Return what *scheme* named over *cases* (seed, faults, bad nodes, bad pairs), as counts."""
    total = Counter()
    for seed, faults, nodes, pairs in cases:
        found = SCHEMES[scheme](names(n), faults, seed)
        healthy = set(names(n)) - nodes
        total.update(
            sweeps=1,
            bad=len(nodes) + len(pairs),
            located=len(found.nodes & nodes) + len(found.pairs & pairs),
            healthy=len(healthy),
            blamed=len(found.nodes & healthy),
            warned=len(found.suspects & healthy),
            warned_bad=len(found.suspects & nodes),
        )
        total["rounds_max"] = max(total["rounds_max"], found.rounds)
    return summary(total)


def summary(total):
    """Return the rates of the counts in *total*, as percentages."""
    return {
        **total,
        "located_percent": percent(total["located"], total["bad"]),
        "false_percent": percent(total["blamed"], total["healthy"]),
    }


def percent(part, whole):
    """Return *part* of *whole* as a percentage with three digits after the point."""
    return round(100 * part / whole, 3) if whole else 0.0


def schemes_for(n):
    """Return the schemes that are simulated for *n* nodes."""
    return [name for name in SCHEMES if n <= ALL_PAIRS_NODES_MAX or name not in ALL_PAIRS]


def hard_faults(trials):
    """Return, by nodes and scheme, how 1 to 3 nodes that always fail are located; and links."""
    found = {}
    for n, fleets in HARD.items():
        rows = found[f"{n} nodes"] = {}
        for name in schemes_for(n):
            count = max(1, round(fleets * trials / (5 if name in ALL_PAIRS else 1)))
            nodes = [(s, planted(n, 1 + s % 3, s)) for s in range(count)]
            links = [(s, drawn_links(n, 1 + s % 3, s)) for s in range(count)]
            rows[name] = {
                "nodes": swept(name, n, ((s, Faults(hard=bad), bad, set()) for s, bad in nodes)),
                "links": swept(name, n, ((s, Faults(links=bad), set(), bad) for s, bad in links)),
            }
    return found


def share_of_nodes(sizes, trials, faults_of):
    """Return the same for 5 % bad nodes; *faults_of* returns their faults."""
    found = {}
    for n, fleets in sizes.items():
        rows = found[f"{n} nodes"] = {}
        for name in schemes_for(n):
            count = max(1, round(fleets * trials / (10 if name in ALL_PAIRS else 1)))
            bad = [planted(n, round(n * BAD_SHARE), seed) for seed in range(count)]
            rows[name] = swept(name, n, ((s, faults_of(b), b, set()) for s, b in enumerate(bad)))
    return found


def nightly(trials):
    """Return who is named within 14 nights of nodes that fail a fifth of their tests."""
    found = {}
    for n, fleets in HISTORY.items():
        for share in (1 / n, BAD_SHARE):
            total = Counter()
            for seed in range(max(1, round(fleets * trials))):
                bad = planted(n, max(1, round(n * share)), seed)
                total.update(_two_weeks(n, bad, seed))
            total["sweeps"] = NIGHTS
            row = summary(total)
            row["ever_false_percent"] = percent(total["ever_blamed"], total["healthy"])
            found[f"{n} nodes, {max(1, round(n * share))} bad"] = row
    return found


def _two_weeks(n, bad, seed):
    faults = Faults(flaky=dict.fromkeys(bad, 0.2), base=0.001)
    tests, tested, ever = [], set(), set()
    for night in range(NIGHTS):
        found, _ = run_sweep(
            names(n),
            faults,
            seed=1000 * seed + night,
            tested=tested,
            sweep=str(night),
            nightly=True,
        )
        tests += found
        tested |= {test.nodes for test in found}
        if n <= ALL_PAIRS_NODES_MAX or night == NIGHTS - 1:
            named = {item.entity.id for item in PairHistory(tests).offenders()}
            ever |= named
    healthy = set(names(n)) - bad
    return {
        "bad": len(bad),
        "healthy": len(healthy),
        "located": len(named & bad),
        "blamed": len(named & healthy),
        "ever_blamed": len(ever & healthy),
        "pairs_blamed": sum("," in name for name in named),
    }


def one_bad_pair(trials):
    """Return what is named where one pair that was drawn is bad: the link, or a node."""
    found = {}
    for n, fleets in {8: 100, 16: 50, **LINKS}.items():
        count = max(1, round(fleets * trials))
        links = [drawn_links(n, 1, seed) for seed in range(count)]
        cases = ((s, Faults(links=bad), set(), bad) for s, bad in enumerate(links))
        found[f"{n} nodes"] = swept("gpuops", n, cases)
    return found


def links_of_one_node(trials):
    """Return what is named where two bad pairs that were drawn have a node in common."""
    cases = []
    for seed in range(round(LINKS[64] * trials * 40)):
        bad = drawn_links(64, 2, seed, apart=False)
        if len({node for pair in bad for node in pair}) == 3:
            cases.append((seed, Faults(links=bad), set(), bad))
    return {"64 nodes": swept("gpuops", 64, cases)}


def schedule_cost():
    """Return seconds and memory of the first rounds of 16,384 nodes in leaves of 32."""
    nodes = names(16_384)
    leaves = {node: f"leaf{i // 32}" for i, node in enumerate(nodes)}
    began_s = time.process_time()
    rounds = first_rounds(nodes, seed=1, domains=leaves)
    took_s = time.process_time() - began_s
    tested = {pair for one in rounds for pair in one.pairs}
    tracemalloc.start()
    first_rounds(nodes, seed=2, tested=tested, domains=leaves)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"processor_s": round(took_s, 2), "peak_mb": round(peak / 1e6, 1)}


def measure(trials):
    """Return every row of the table."""
    rows = {"schedule_16384": schedule_cost()}
    for name, row in {
        "hard": hard_faults,
        "slow_25_percent": lambda t: share_of_nodes(SLOW, t, lambda bad: Faults(slow=bad)),
        "fails_20_percent_one_sweep": lambda t: share_of_nodes(
            SLOW, t, lambda bad: Faults(flaky=dict.fromkeys(bad, 0.2))
        ),
        "fails_20_percent_14_nights": nightly,
        "one_bad_pair": one_bad_pair,
        "two_bad_pairs_of_one_node": links_of_one_node,
        "bad_partner": lambda t: share_of_nodes(
            PARTNERS, t, lambda bad: Faults(flaky=dict.fromkeys(bad, 0.5))
        ),
    }.items():
        rows[name] = row(trials)
        print(f"… {name}", file=sys.stderr, flush=True)
    return rows


def goals(rows):
    """Return each goal of a simulated row with its figure, and whether it is met."""
    hard = [size["gpuops"][kind] for size in rows["hard"].values() for kind in ("nodes", "links")]
    slow = [size["gpuops"] for size in rows["slow_25_percent"].values()]
    weeks = rows["fails_20_percent_14_nights"].values()
    pairs = rows["one_bad_pair"].values()
    partners = [size["gpuops"] for size in rows["bad_partner"].values()]
    rarely = [size["gpuops"] for size in rows["fails_20_percent_one_sweep"].values()]
    wrong = max(percent(p["blamed"], p["blamed"] + p["located"]) for p in partners + rarely)
    figures = {
        "hard faults located, %": (min(r["located_percent"] for r in hard), ">=", 100),
        "rounds for them": (max(r["rounds_max"] for r in hard), "<=", 4),
        "25 % slow located, %": (min(r["located_percent"] for r in slow), ">=", 99),
        "healthy nodes blamed beside them, %": (max(r["false_percent"] for r in slow), "<=", 0.1),
        "20 % failing, 14 nights, %": (min(r["located_percent"] for r in weeks), ">=", 95),
        "healthy nodes named by history, %": (max(r["false_percent"] for r in weeks), "<=", 0.1),
        "bad pair named as a pair, %": (min(r["located_percent"] for r in pairs), ">=", 99),
        "two bad pairs of one node, named as pairs, %": (
            rows["two_bad_pairs_of_one_node"]["64 nodes"]["located_percent"],
            ">=",
            100,
        ),
        "wrong nodes of those that failed, 5 % bad, %": (wrong, "<=", 1),
        "the same with warnings, failing 50 %": (max(map(wrong_named, partners)), "<=", 1),
        "the same with warnings, failing 20 %": (max(map(wrong_named, rarely)), "<=", 1),
        "schedule of 16,384 nodes, s": (rows["schedule_16384"]["processor_s"], "<=", 2),
        "its memory, MB": (rows["schedule_16384"]["peak_mb"], "<=", 200),
    }
    return {
        name: {"measured": value, "goal": f"{sign} {goal}", "met": _is_met(value, sign, goal)}
        for name, (value, sign, goal) in figures.items()
    }


def wrong_named(row):
    """Return which share of the nodes that a row failed or warned about is healthy."""
    wrong = row["blamed"] + row["warned"]
    return percent(wrong, wrong + row["located"] + row["warned_bad"])


def _is_met(value, sign, goal):
    return value >= goal if sign == ">=" else value <= goal


def show(rows, reached):
    """Print the table of schemes, then the goals."""
    for name in ("hard", "slow_25_percent", "fails_20_percent_one_sweep", "bad_partner"):
        for size, schemes in rows[name].items():
            for scheme, row in schemes.items():
                parts = row.items() if "nodes" in row else [("", row)]
                text = "; ".join(
                    f"{kind} {part['located_percent']:5.1f} % located, {part['blamed']} of"
                    f" {part['healthy']} healthy blamed, {part['rounds_max']} rounds"
                    for kind, part in parts
                )
                print(f"{name:28}{size:13}{scheme:34}{text}")
    for name in ("fails_20_percent_14_nights", "one_bad_pair", "two_bad_pairs_of_one_node"):
        for size, row in rows[name].items():
            print(f"{name:28}{size:24}{row['located_percent']} %, {row['blamed']} healthy named")
    for name, goal in reached.items():
        print(
            f"{name:48}{goal['measured']:>10} {goal['goal']:>8}  {'' if goal['met'] else 'MISSED'}"
        )


def main():
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=float, default=1.0, help="factor of the fleets simulated")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began_s = time.monotonic()
    rows = measure(options.trials)
    reached = goals(rows)
    show(rows, reached)
    if options.out is not None:
        result = {
            "benchmark": "sweep_sim",
            "trials": options.trials,
            "took_s": round(time.monotonic() - began_s),
            "max_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
            "goals": reached,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return not all(goal["met"] for goal in reached.values())


if __name__ == "__main__":
    sys.exit(main())
