"""No promise is changed by the way: everything that users rely on is as it is written down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "fixtures" / "public_interface.json"
SHOWN_MAX = 40


def flat(value, path=()):
    """Return {path: value} of all that is no container, and of empty ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for key, item in items:
        inner = (*path, str(key))
        is_leaf = not isinstance(item, dict | list) or not item
        found |= {" > ".join(inner): item} if is_leaf else flat(item, inner)
    return found


def sets(value):
    """Return *value* with each list of words as a set of keys: one more word is one difference."""
    if isinstance(value, dict):
        return {key: sets(item) for key, item in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value, "") if len(set(value)) == len(value) else value
    return [sets(item) for item in value] if isinstance(value, list) else value


def differences(before, now):
    """Return what was added, removed or changed, a line each."""
    before, now = flat(sets(before)), flat(sets(now))
    added = [f"added    {key} = {now[key]!r}" for key in now.keys() - before.keys()]
    removed = [f"removed  {key} = {before[key]!r}" for key in before.keys() - now.keys()]
    changed = [
        f"changed  {key}: {before[key]!r} -> {now[key]!r}"
        for key in before.keys() & now.keys()
        if before[key] != now[key]
    ]
    return [*sorted(removed), *sorted(changed), *sorted(added)]


@pytest.mark.timeout(600)
def test_no_promise_has_changed(tmp_path):
    # A process of its own: it counts on no module that was imported, or patched, before.
    out = tmp_path / "now.json"
    paths = (str(ROOT / "tests"), os.environ["PYTHONPATH"])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.public_interface", str(out)]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    found = differences(json.loads(FILE.read_text()), json.loads(out.read_text()))
    more = [f"and {len(found) - SHOWN_MAX} more"] if len(found) > SHOWN_MAX else []
    lines = "\n".join([*found[:SHOWN_MAX], *more])
    assert not found, f"what users rely on has changed; if it may, `make interface`:\n{lines}"


def test_a_difference_names_its_key():
    before = {"a": {"b": 1, "c": ["x", "y"]}, "gone": {}}
    now = {"a": {"b": 2, "c": ["x", "z", "y"]}, "new": None}

    assert differences(before, now) == [
        "removed  gone = {}",
        "changed  a > b: 1 -> 2",
        "added    a > c > z = ''",
        "added    new = None",
    ]
