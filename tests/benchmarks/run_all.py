"""Run every benchmark beside its peers and keep the results with machine, date and command.

``make bench`` calls this. Each benchmark is a script of its own that prints a table and takes
``--out FILE``; the JSON files lie in ``tests/benchmarks/results`` and the README quotes them.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"


def machine():
    """Return what a reader needs to judge a figure, and nothing that names the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


def run(script):
    """Run one benchmark; return its exit code."""
    out = RESULTS / f"{script.stem.removeprefix('bench_')}.json"
    command = [sys.executable, str(script), "--out", str(out)]
    print(f"\n== {script.name}", flush=True)
    began_s = time.time()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    # Of one that failed half-way, what it had measured by then.
    if out.exists() and out.stat().st_mtime >= began_s:
        result = json.loads(out.read_text())
        header = {
            "command": f"python {script.relative_to(ROOT)}",
            "date": f"{datetime.now(tz=UTC):%Y-%m-%d}",
            "machine": machine(),
            **({"exit_code": code} if code else {}),
        }
        out.write_text(json.dumps({**header, **result}, indent=2) + "\n")
    return code


def main():
    """Run the benchmarks named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bench_NAME.py without bench_ and .py")
    names = parser.parse_args().names
    scripts = sorted(HERE.glob("bench_*.py"))
    chosen = [s for s in scripts if not names or s.stem.removeprefix("bench_") in names]
    RESULTS.mkdir(exist_ok=True)
    return max((run(script) for script in chosen), default=1)


if __name__ == "__main__":
    sys.exit(main())
