"""Change the code in small ways and see that a test fails each time: ``make mutation``.

The mutants are in ``mutants.toml``. Each is tried in a copy of the tree, by the tests named with
it. One whose text is gone is an error, as is a test that fails without any mutant. The results are
kept in ``results.json``; where only some files are tried, theirs replace those of an earlier time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 120
_COPIED = ("gpuops", "tests", "checks", "runbooks", "slurm", "docs")
_FAILED, _PASSED = 1, 0


@dataclass(frozen=True)
class Mutant:
    """In the file *path*, *new* takes the place of *old*; one of *tests* must fail."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self):
        """Return the file and what it becomes, on one line."""
        return (
            f"{self.path}: {' '.join(self.old.split())[:70]} -> {' '.join(self.new.split())[:40]}"
        )

    @property
    def command(self):
        """Return what runs the tests."""
        quiet = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header")
        return (sys.executable, "-m", "pytest", *quiet, *self.options, *self.tests)


def load_mutants():
    """Return all mutants, in the order of their file."""
    files = tomllib.loads((HERE / "mutants.toml").read_text())["file"]
    return [
        Mutant(file["path"], old, new, tuple(file["tests"]), tuple(file.get("options", ())))
        for file in files
        for old, new in file["mutants"]
    ]


def copy_tree(to):
    """Copy what the tests need of the tree to *to*."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in {".toml", ".md", ".txt"}:
            shutil.copy(path, to)


def run_tests(mutant, tree):
    """Return pytest's exit code, 1 where the tests did not end in time; and their output."""
    # A failing example is enough; to look for a smaller one can take minutes.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    env["GPUOPS_TEST_DRAWS"] = "first"
    with subprocess.Popen(
        mutant.command,
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return _FAILED, "timed out"
    return process.returncode, output


def try_mutant(mutant, tree):
    """Return "found", "survived" or what is wrong with *mutant*."""
    path = tree / mutant.path
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return f"error: its text occurs {original.count(mutant.old)} times"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(mutant, tree)
    finally:
        path.write_text(original)
    if code not in {_FAILED, _PASSED}:
        return f"error: pytest ended with {code}: {output[-300:]}"
    return "found" if code == _FAILED else "survived"


def check_import(tree):
    """Raise where tests in *tree* would import another tree's code."""
    command = [sys.executable, "-c", "import gpuops; print(gpuops.__file__)"]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    found = subprocess.run(command, cwd=tree, env=env, check=True, capture_output=True, text=True)
    if not found.stdout.startswith(str(tree)):
        raise RuntimeError(f"the tests would import {found.stdout.strip()}")


def unmutated(mutants):
    """Return what changes nothing, with all tests of *mutants* by their options."""
    by_options = {}
    for mutant in mutants:
        by_options.setdefault(mutant.options, {}).update(dict.fromkeys(mutant.tests))
    return [Mutant("", "", "", tuple(tests), options) for options, tests in by_options.items()]


def try_all(mutants, n_workers):
    """Return what came of each of *mutants*, printing it as it comes."""
    trees = SimpleQueue()

    def in_tree(function, mutant):
        tree = trees.get()
        try:
            return function(mutant, tree)
        finally:
            trees.put(tree)

    def without(mutant):
        code, output = in_tree(run_tests, mutant)
        return None if code == _PASSED else output[-2000:]

    def one(mutant):
        result = in_tree(try_mutant, mutant)
        print(f"{result:9} {mutant.name}", flush=True)
        return result

    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ThreadPoolExecutor(n_workers) as pool,
    ):
        for number in range(n_workers):
            tree = Path(folder) / str(number)
            tree.mkdir()
            copy_tree(tree)
            check_import(tree)
            trees.put(tree)
        failures = [text for text in pool.map(without, unmutated(mutants)) if text]
        if failures:
            sys.exit("these fail without any mutant:\n" + "\n".join(failures))
        return list(pool.map(one, mutants))


def keep(mutants, results):
    """Write the *results* of the files that were tried in place of those of an earlier time."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    from run_all import machine

    path = HERE / "results.json"
    files = json.loads(path.read_text())["files"] if path.exists() else {}
    of_file = {}
    for mutant, result in zip(mutants, results, strict=True):
        of_file.setdefault(mutant.path, []).append((mutant, result))
    today = f"{datetime.now(tz=UTC):%Y-%m-%d}"
    for name, tried in of_file.items():
        lost = [mutant.name for mutant, result in tried if result != "found"]
        files[name] = {"date": today, "mutants": len(tried), "not_found": lost}
    listed = {mutant.path for mutant in load_mutants()}
    files = {name: files[name] for name in sorted(files) if name in listed}
    kept = {
        "command": "make mutation",
        "machine": machine(),
        "mutants": sum(file["mutants"] for file in files.values()),
        "not_found": sum(len(file["not_found"]) for file in files.values()),
        "files": files,
    }
    path.write_text(json.dumps(kept, indent=2) + "\n")


def main():
    """Try the mutants of the files named, or all of them; return 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="only mutants of these files")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    mutants = [m for m in load_mutants() if not arguments.paths or m.path in arguments.paths]
    began_s = time.monotonic()
    results = try_all(mutants, arguments.workers)
    keep(mutants, results)
    n_lost = sum(result != "found" for result in results)
    print(f"{len(mutants)} mutants, {n_lost} not found, {time.monotonic() - began_s:.0f} s")
    return int(n_lost > 0)


if __name__ == "__main__":
    sys.exit(main())
