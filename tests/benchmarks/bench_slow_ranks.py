"""How slow ranks are found on made-up jobs: recall, delay, false alarms, beside NVRx's rule.

Own times of 4 to 64 ranks with noise, drift, lasting differences, hiccups and pauses
(`support.slow_traces`); our detector gets them as it does in a run, in packed summaries of 30
steps. An hour has six of these. The rise of a job's step time: CUSUM with verification. Run as a
script:

    python tests/benchmarks/bench_slow_ranks.py --out slow_ranks.json
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.slow_rank_scores import false_alarms, nvrx, ours, score

from gpuops.detect.slow_rank import SlowRankDetector
from gpuops.detect.step_time import StepTimeWatch

RULES = {"gpuops": ours, "nvrx": nvrx}
# Factor, noise from and to, within how many steps, the goal.
SLOW = (
    (1.10, (0.002, 0.01), 15, 0.99),
    (1.05, (0.002, 0.01), 30, 0.90),
    (1.20, (0.10, 0.15), 40, 0.90),
    (1.50, (0.002, 0.01), 15, None),
)
NOISES = (0.005, 0.02, 0.12)
SEED = 10_000_000
N_RANKS = 16_384
N_STEPS, RISE_AT = 600, 300


def slow_rows(n):
    """Return how each rule finds one slow rank."""
    rows = []
    for factor, noise, within, goal in SLOW:
        row = {"slower": factor, "noise": noise, "within_steps": within, "goal": goal}
        for name, rule in RULES.items():
            found = score(rule, factor=factor, noise=noise, within=within, n=n, seed=SEED)
            row[name] = found.row()
        rows.append(row)
        print(row, flush=True)
    return rows


def false_rows(n):
    """Return how often each rule names a healthy rank."""
    rows = []
    for noise in NOISES:
        row = {"noise": noise}
        for name, rule in RULES.items():
            named, hours = false_alarms(rule, noise=noise, n=n, seed=2 * SEED)
            per = round(10_000 * named / hours, 3)
            row[name] = {"named": named, "rank_hours": round(hours), "per_10000_rank_hours": per}
        rows.append(row)
        print(row, flush=True)
    return rows


def rises(factor, seed):
    """Return after how many steps each alarm of a job came whose step 300 is the first slow one."""
    draw, watch, found = random.Random(seed), StepTimeWatch(), []
    for number in range(N_STEPS):
        step_s = 0.1 * draw.gauss(1, 0.01) * (1.25 if draw.random() < 0.01 else 1)
        step_s *= (1.6 if number % 100 == 99 else 1) * (factor if number >= RISE_AT else 1)
        if watch.feed(step_s) is not None:
            found.append(number)
    return found


def rise_rows(n):
    """Return how a rise of the step time is found, and how often one is seen that is none."""
    rows = []
    for factor in (1.0, 1.05, 1.1, 1.2):
        alarms = [rises(factor, seed) for seed in range(3 * SEED, 3 * SEED + n)]
        first = [[at for at in each if at >= RISE_AT][:1] for each in alarms]
        delays = sorted(at - RISE_AT + 1 for each in first for at in each) if factor > 1 else []
        row = {
            "factor": factor,
            "found": round(len(delays) / n, 4),
            "median_delay_steps": delays[len(delays) // 2] if delays else None,
            "false": sum(map(len, alarms)) - len(delays),
            "steps": n * N_STEPS,
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def seconds_an_evaluation():
    """Return the processor time of one evaluation of `N_RANKS` ranks in groups of 16."""
    draw = random.Random(4)
    detector = SlowRankDetector({rank: rank // 16 for rank in range(N_RANKS)})
    taken_s = []
    for _ in range(40):
        own = {rank: 0.1 * draw.gauss(1, 0.12) for rank in range(N_RANKS)}
        began_s = time.process_time()
        detector.feed(own)
        taken_s.append(time.process_time() - began_s)
    return round(max(taken_s), 3)


def main():
    """Score both rules and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trials", type=float, default=1.0, help="More or fewer jobs.")
    args = parser.parse_args()
    n = max(1, round(300 * args.trials))
    result = {
        "injections_a_row": n,
        "slow_rank": slow_rows(n),
        "false_alarms": false_rows(max(1, round(60 * args.trials))),
        "step_time_rise": rise_rows(n),
        "seconds_an_evaluation_of_16384_ranks": seconds_an_evaluation(),
    }
    print(result["seconds_an_evaluation_of_16384_ranks"], "s for 16,384 ranks")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
