"""What the prolog's suite costs on a healthy node with eight GPUs, beside gcm's health checks.

The GPUs are those of the C mock under the real pynvml; everything else is this machine. gcm (PyPI:
gpucm) runs in a virtual environment of its own over the same mock, with its checks that need
nothing but NVML and no expectation of a board, in one process. All commands run in turns; medians.
Then both once more with every NVML call delayed by 100 ms. CPU seconds and peak memory are of the
command and all its children (wait4). Peers that cannot run here are listed with the reason.

    python tests/benchmarks/bench_prolog.py --runs 15 --out prolog.json
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support import mock_nvml  # noqa: E402 found only after the line above

PEERS = HERE.parents[1] / ".venv-peers"
GPUS = 8
HEALTHY_S = 1.0
SLOW_CALLS_S = 3.0
GCM_CHECKS = {
    "gpu_num": ["--gpu_num", str(GPUS)],
    "gpu_temperature": ["--gpu_temperature_threshold", "84"],
    "ecc_uncorrected_volatile_total": ["--ecc_uncorrected_volatile_threshold", "0"],
    "ecc_corrected_volatile_total": ["--ecc_corrected_volatile_threshold", "50000000"],
    "row_remap_pending": [],
    "row_remap_failed": [],
}


def gcm():
    """Return the path of gcm's command, installed if it can be, else the reason why not."""
    command = PEERS / "bin" / "health_checks"
    if command.exists():
        return command, None
    try:
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True, timeout=120)
        pip = [str(PEERS / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "gpucm==0.0.2"], check=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as exc:
        shutil.rmtree(PEERS, ignore_errors=True)
        return None, f"gpucm could not be installed: {exc}"
    return command, None


def gpuops(*options):
    return [sys.executable, "-m", "gpuops", "check", "--suite", "prolog", *options]


def gcm_argv(command, directory):
    argv = [str(command), "check-nvidia-smi", "bench", "app", "--log-folder", str(directory)]
    for name, options in GCM_CHECKS.items():
        argv += ["-c", name, *options]
    return argv


def measured(argv, env):
    """Return exit code, wall and CPU seconds, and peak resident KiB of one run."""
    started = time.perf_counter()
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def row(name, runs):
    walls = [wall for _, wall, _, _ in runs]
    return {
        "command": name,
        "exit_codes": sorted({code for code, *_ in runs}),
        "wall_median_s": statistics.median(walls),
        "wall_max_s": max(walls),
        "cpu_median_s": statistics.median(cpu for _, _, cpu, _ in runs),
        "memory_peak_mib": max(rss for *_, rss in runs) / 1024,
    }


def measure(runs):
    peers_missing = {
        "LBNL NHC": "not in Debian, not on PyPI",
        "nvidia-smi -q": "no NVIDIA driver on this machine",
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        mock = mock_nvml.build(directory)
        base = {
            **os.environ,
            "GPUOPS_STATE": str(directory / "state"),
            "GPUOPS_SPOOL": str(directory / "spool"),
            "GPUOPS_STORE": f"sqlite:///{directory}/store.db",
        }
        healthy = base | mock.env(mock_nvml.shape("h100", count=GPUS))
        slow = base | mock.env(mock_nvml.shape("h100", count=GPUS) + "\ndelay * * 100\n")
        todo = {
            "gpuops check --suite prolog": (gpuops(), healthy),
            "gpuops check --suite prolog --no-record": (gpuops("--no-record"), healthy),
        }
        command, reason = gcm()
        if command is None:
            peers_missing["gcm"] = reason
        else:
            argv = gcm_argv(command, directory)
            todo[f"gcm check-nvidia-smi, {len(GCM_CHECKS)} checks"] = (argv, healthy)
            todo["gcm, 100 ms per NVML call"] = (argv, slow)
        todo["gpuops, 100 ms per NVML call"] = (gpuops("--no-record"), slow)
        for argv, env in todo.values():
            measured(argv, env)
        found = {label: [] for label in todo}
        for _ in range(runs):
            for label, (argv, env) in todo.items():
                found[label].append(measured(argv, env))
        suite = json.loads(
            subprocess.run(
                gpuops("--no-record", "--json"), env=healthy, stdout=subprocess.PIPE, check=False
            ).stdout
        )
    return {
        "benchmark": "prolog",
        "runs": runs,
        "gpus": GPUS,
        "checks": len({finding["check"] for finding in suite["findings"]}),
        "targets_s": {"healthy": HEALTHY_S, "100 ms per call": SLOW_CALLS_S},
        "results": [row(label, of) for label, of in found.items()],
        "peers_that_could_not_run": peers_missing,
    }


def show(result):
    print(f"{result['checks']} checks, {result['gpus']} GPUs, {result['runs']} runs each, in turns")
    print(f"{'command':<42} {'median':>9} {'max':>9} {'CPU':>9} {'peak':>9}  exit")
    for line in result["results"]:
        cells = [line[key] for key in ("wall_median_s", "wall_max_s", "cpu_median_s")]
        text = " ".join(f"{cell:>7.2f} s" for cell in cells)
        codes = ",".join(str(code) for code in line["exit_codes"])
        print(f"{line['command']:<42} {text} {line['memory_peak_mib']:>5.0f} MiB  {codes}")
    for peer, reason in result["peers_that_could_not_run"].items():
        print(f"not run: {peer}: {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the result as JSON to this file")
    options = parser.parse_args()
    result = measure(options.runs)
    show(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
