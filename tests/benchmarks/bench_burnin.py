"""What burn-in and sweep cost over the work that they measure: beside bare torch, in turns.

* The programs of `gpuops burnin` (all_reduce of two ranks, product, copy) and a bare loop of torch
  (`jobs/bare_torch.py`) run one after the other, ``--turns`` times, on the same processors. Of a
  turn the median of its repeats counts; the ratio is the median of all turns.
* `gpuops sweep --hosts` sweeps eight hosts in network namespaces, whose links are limited. From its
  wall time goes what the processes take to start: that of the same number of processes, started at
  the same time, is measured three times beside it, and the median of it counts.

Run as a script; as root for the sweep:

    python tests/benchmarks/bench_burnin.py --out burnin.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.hosts import Hosts, why_no_namespaces
from support.swept_hosts import swept

BARE = Path(__file__).parent / "jobs" / "bare_torch.py"
MIB = 2**20
N_HOSTS = 8
KBIT, BURST_KB, QUEUE_MS = 50_000, 128, 2000  # 2 MiB take a third of a second
MOST_CORES = 2  # those of gemm and copy, also where the machine has more
# Of collectives there are six, of three sizes, and each has its share of the time.
COLLECTIVES = 18


def outputs(commands):
    """Run *commands* at the same time; return what each printed.

    Burn-in's programs end at the end of their input, which stays open here.

    Raises:
        RuntimeError: One failed.
    """
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        pipes = {"stdin": reader, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        children = [subprocess.Popen(one, **pipes, text=True) for one in commands]
        ends = [child.communicate(timeout=170) for child in children]
    for child, command, (_, errors) in zip(children, commands, ends, strict=True):
        if child.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {errors[-500:]}")
    return [printed for printed, _ in ends]


def program(test, cpus, seconds, *words):
    """Return the command of burn-in's program of *test*."""
    device = f"cpu:{','.join(map(str, cpus))}"
    module = [sys.executable, "-m", "gpuops.worker.burnin", test, "--device", device]
    return [*module, "--seconds", f"{seconds:g}", *words]


def bare(work, cpus, size, *words):
    """Return the command of the bare loop of *work*."""
    where = ["--cpus", ",".join(map(str, cpus)), "--size", str(size)]
    return [sys.executable, str(BARE), work, *where, *words]


def measured(printed, **parameters):
    """Return the median of the measurement with *parameters* in what a program *printed*."""
    found = [json.loads(line) for line in printed.splitlines()]
    values = [
        item["values"]
        for item in found
        if "values" in item and parameters.items() <= item["parameters"].items()
    ]
    return statistics.median(values[0])


def all_reduce_turns(seconds, folder):
    """Return how to measure all_reduce of 16 MiB by the program, and bare."""
    cpus = sorted(os.sched_getaffinity(0))
    places = [(cpus[0],), (cpus[-1],)]

    def by_program():
        meet = ["--ranks", "2", "--node", "n0", "--meet", tempfile.mktemp(dir=folder)]
        ranks = [
            program("collectives", place, seconds * COLLECTIVES, "--rank", str(rank), *meet)
            for rank, place in enumerate(places)
        ]
        return measured(outputs(ranks)[0], collective="all_reduce", size="16MiB")

    def by_loop():
        words = ["--calls", "30", "--meet", tempfile.mktemp(dir=folder)]
        ranks = [
            bare("all_reduce", place, 16 * MIB, "--rank", str(rank), *words)
            for rank, place in enumerate(places)
        ]
        return json.loads(outputs(ranks)[0])

    return by_program, by_loop


def gemm_turns(seconds, _folder):
    """Return how to measure a product by the program, which has two formats, and bare."""
    cpus = sorted(os.sched_getaffinity(0))[:MOST_CORES]
    words = ["--seconds", f"{seconds:g}"]
    return (
        lambda: measured(*outputs([program("gemm", cpus, 2 * seconds)]), dtype="fp32"),
        lambda: json.loads(*outputs([bare("gemm", cpus, 1024, *words)])),
    )


def copy_turns(seconds, _folder):
    """Return how to measure a copy by the program, which has two kernels, and bare."""
    cpus = sorted(os.sched_getaffinity(0))[:MOST_CORES]
    words = ["--seconds", f"{seconds:g}"]
    return (
        lambda: measured(*outputs([program("hbm", cpus, 2 * seconds)]), kernel="copy"),
        lambda: json.loads(*outputs([bare("copy", cpus, 128 * MIB, *words)])),
    )


RATES = {
    "all_reduce, 16 MiB, 2 ranks": (all_reduce_turns, 0.97),
    "gemm, fp32, 1024": (gemm_turns, 0.98),
    "copy, 128 MiB": (copy_turns, 0.98),
}


def in_turns(make, turns, seconds):
    """Return the rates of the program and of the bare loop, one after the other, *turns* times."""
    with tempfile.TemporaryDirectory() as folder:
        both = make(seconds, Path(folder))
        found = ([], [])
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                found[which].append(both[which]())
    return {
        "program": found[0],
        "bare": found[1],
        "ratios": [a / b for a, b in zip(*found, strict=True)],
        "load": load(),
    }


def load():
    """Return the load of the last minute."""
    return round(os.getloadavg()[0], 1)


def start_s(module, *words):
    """Return the seconds until as many processes as there are hosts have imported *module*."""
    began_s = time.monotonic()
    outputs([[sys.executable, "-m", module, *words, "--help"]] * N_HOSTS)
    return time.monotonic() - began_s


def sweep_time(seconds):
    """Return the wall time of a sweep of eight hosts, and what of it is process start.

    The processes of a round start at the same time, as those that are measured beside it.
    """
    program_s = [start_s("gpuops.worker.burnin.pair") for _ in range(2)]
    command_s = start_s("gpuops", "sweep")
    with tempfile.TemporaryDirectory() as folder, Hosts(N_HOSTS, folder) as hosts:
        for host in hosts:
            host.throttle(KBIT, burst_kb=BURST_KB, queue_ms=QUEUE_MS)
        began_s = time.monotonic()
        words = ("--seconds", f"{seconds:g}", "--no-record", "--timeout", "120")
        code, result = swept(hosts, Path(folder), *words)
        wall_s = time.monotonic() - began_s
    program_s.append(start_s("gpuops.worker.burnin.pair"))
    rounds = 1 + max(test["round"] for test in result["tests"])
    started_s = 2 * command_s + rounds * statistics.median(program_s)  # the leader, then the hosts
    return {
        "exit_code": code,
        "rounds": rounds,
        "test_s": seconds,
        "wall_s": wall_s,
        "start_of_pair_programs_s": program_s,
        "start_of_commands_s": command_s,
        "ratios": [(wall_s - started_s) / (rounds * seconds)],
        "load": load(),
    }


def goals(rows):
    """Return each goal with its figure, the spread, the load, and whether it is met."""
    found = {}
    for name, row in rows.items():
        ratios = row["ratios"]
        is_rate = name in RATES
        goal = RATES[name][1] if is_rate else 1.5
        median = statistics.median(ratios)
        found[name] = {
            "measured": round(median, 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
            "goal": f"{'>=' if is_rate else '<='} {goal:g} x",
            "met": median >= goal if is_rate else median <= goal,
            "load": row["load"],
        }
    return found


def table(reached):
    """Return the lines of the table of goals."""
    return [
        f"{name:42}{goal['goal']:>10}  {goal['measured']:.3f} x ({goal['lowest']:.3f} to"
        f" {goal['highest']:.3f}), load {goal['load']:g}{'' if goal['met'] else '  MISSED'}"
        for name, goal in reached.items()
    ]


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one rate, for each turn")
    parser.add_argument("--test-seconds", type=float, default=5.0, help="of a pair test")
    parser.add_argument("--only", choices=("rates", "sweep"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, notes = {}, []
    if options.only != "sweep":
        for name, (make, _goal) in RATES.items():
            rows[name] = in_turns(make, options.turns, options.seconds)
    if options.only != "rates":
        if why := why_no_namespaces():
            notes.append(f"no sweep: {why}")
        else:
            rows["sweep, 8 hosts, over rounds x test time"] = sweep_time(options.test_seconds)
    reached = goals(rows)
    print("\n".join([*table(reached), *notes]))
    if options.out is not None:
        result = {"benchmark": "burnin", "goals": reached, "notes": notes, "rows": rows}
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return not all(goal["met"] for goal in reached.values())


if __name__ == "__main__":
    sys.exit(main())
