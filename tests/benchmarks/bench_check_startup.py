"""What `gpuops check --suite prolog` costs before a job: wall time against `python -c pass`.

Runs both, and the command without anything to check, in turns; medians; then the import time of
the heaviest modules. "Cold" is a process each time; the page cache is warm unless run as root with
``--drop-caches``, which empties it before every run of either.

    python tests/benchmarks/bench_check_startup.py --runs 30 --out startup.json
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_S = 0.35
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| +(\S+)")


def commands(python):
    gpuops = [python, "-m", "gpuops", "check", "--suite", "prolog"]
    return {
        "python -c pass": [python, "-c", "pass"],
        "gpuops check --list": [*gpuops, "--list"],
        "gpuops check --suite prolog --no-record": [*gpuops, "--no-record"],
        "gpuops check --suite prolog": gpuops,
    }


def environment(directory):
    return {
        **os.environ,
        "GPUOPS_SPOOL": str(directory / "spool"),
        "GPUOPS_STORE": f"sqlite:///{directory}/store.db",
    }


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def timed(argv, env, *, cold):
    if cold:
        drop_caches()
    started = time.perf_counter()
    # Through a pipe: waiting with a timeout for the process alone polls every 50 ms.
    subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True, timeout=60)
    return time.perf_counter() - started


def wait_for_the_flusher(spool, seconds=20):
    """The command leaves a process behind that sends its result; it must not slow the next run."""
    deadline = time.monotonic() + seconds
    while any(spool.rglob("*.ready")) and time.monotonic() < deadline:
        time.sleep(0.05)


def imports(python, env, top):
    argv = [python, "-X", "importtime", "-m", "gpuops", "check", "--suite", "prolog", "--no-record"]
    run = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    found = [IMPORT_LINE.match(line) for line in run.stderr.splitlines()]
    rows = [
        {"module": match[3], "self_us": int(match[1]), "cumulative_us": int(match[2])}
        for match in found
        if match
    ]
    return sorted(rows, key=lambda row: -row["self_us"])[:top], sum(r["self_us"] for r in rows)


def measure(runs, *, cold):
    with tempfile.TemporaryDirectory() as directory:
        env = environment(Path(directory))
        todo = commands(sys.executable)
        for argv in todo.values():
            timed(argv, env, cold=False)
        times = {name: [] for name in todo}
        for _ in range(runs):
            for name, argv in todo.items():
                times[name].append(timed(argv, env, cold=cold))
                wait_for_the_flusher(Path(directory) / "spool")
        rows, total_us = imports(sys.executable, env, top=15)
    base = statistics.median(times["python -c pass"])
    return {
        "benchmark": "check_startup",
        "runs": runs,
        "page_cache": "dropped" if cold else "warm",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "target_overhead_s": TARGET_S,
        "results": [
            {
                "command": name,
                "median_s": statistics.median(seconds),
                "best_s": min(seconds),
                "p90_s": statistics.quantiles(seconds, n=10)[8] if runs > 1 else seconds[0],
                "overhead_s": statistics.median(seconds) - base,
            }
            for name, seconds in times.items()
        ],
        "imports_total_us": total_us,
        "imports": rows,
    }


def show(result):
    print(f"{'command':<42} {'best':>9} {'median':>9} {'p90':>9} {'overhead':>9}")
    for row in result["results"]:
        cells = [row[key] for key in ("best_s", "median_s", "p90_s", "overhead_s")]
        print(f"{row['command']:<42} " + " ".join(f"{cell:>7.3f} s" for cell in cells))
    overhead = result["results"][-1]["overhead_s"]
    verdict = "met" if overhead < TARGET_S else "MISSED"
    print(f"target: overhead under {TARGET_S} s: {verdict} ({result['page_cache']} page cache)")
    print(f"\nimports, {result['imports_total_us'] / 1000:.0f} ms in all (traced); the heaviest:")
    for row in result["imports"]:
        print(f"  {row['self_us'] / 1000:>7.1f} ms  {row['module']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--drop-caches", action="store_true", help="empty the page cache (root)")
    options = parser.parse_args()
    result = measure(options.runs, cold=options.drop_caches)
    show(result)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
