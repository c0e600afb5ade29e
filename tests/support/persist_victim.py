"""A process whose n-th call to the disk goes wrong, for each n; says after each what is left.

Runs with disk_faults.so preloaded. Reads one JSON object of options from its command line, and
writes one JSON line for each n.
"""

import ctypes
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

from gpuops.checkpoint.manifest import MANIFEST
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.storage.persist import commit_node_shards, persist, persist_node_shards
from gpuops.checkpoint.types import CheckpointError, StateId
from support.checkpoint_images import ORIGIN, images

COUNT, KILL, FAIL, HALF, KILL_HALF = range(5)
OLD, NEW = StateId(1, 100), StateId(1, 200)
WORLD = 2
FINISHED, REFUSED, BROKEN = 0, 1, 2


def shared(store, shards):
    """Put the parts of two nodes, and commit them."""
    for shard, source in shards.items():
        persist_node_shards(store, NEW, {shard: source}, session="run")
    assert commit_node_shards(store, NEW, WORLD, session="run", origin=ORIGIN)


def alone(store, shards):
    """Persist the state as one node does."""
    persist(store, NEW, shards, origin=ORIGIN)


def delete(store, _shards):
    """Remove the older state."""
    store.delete(OLD)


def damaged(root, store, shards):
    """Have the new state there already, with a manifest that somebody edited."""
    alone(store, shards)
    with (root / NEW.name / MANIFEST).open("ab") as file:
        file.write(b" ")


def both(_root, store, shards):
    """Have both states."""
    alone(store, shards)


def nothing(_root, _store, _shards):
    """Have the old state only."""


# How it is before, what is done, and which states must be there whatever goes wrong.
SCENARIOS = {
    "alone": (nothing, alone, {OLD}),
    "shared": (nothing, shared, {OLD}),
    "replace": (damaged, alone, {OLD}),
    "delete": (both, delete, {NEW}),
}


def in_child(act, arm):
    """Do *act* in a child with a call that goes wrong; return how it ended and what it counted."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, counted = BROKEN, 0
        try:
            arm()
            act()
            code = FINISHED
        except CheckpointError as exc:
            code = REFUSED
            counted = faults.faults_disarm()
            os.write(write, f"{exc}".encode())
        except BaseException:  # noqa: BLE001 the test wants to see it
            faults.faults_disarm()
            traceback.print_exc()
        finally:
            counted = faults.faults_disarm()
            os.write(write, f"\n{counted}".encode())
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said, _, counted = pipe.read().rpartition("\n")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, said, int(counted or 0)


def look(store):
    """Return what a reader finds."""
    survey = store.scan()
    return {
        "states": [stored.state.step for stored in survey.states],
        "bad": [
            str(problem)
            for stored in survey.states
            for problem in verify_state(store, stored.state)
        ],
        "leftovers": list(survey.leftovers),
    }


def one(root, options, n):
    """Let the *n*-th call go wrong in a directory of its own; return what came of it."""
    prepare, act, must = SCENARIOS[options["scenario"]]
    store = DirectoryStore(root)
    sizes = {"nbytes": options["nbytes"]}
    with images(WORLD, **sizes) as shards, images(WORLD, seed=1, **sizes) as old:
        persist(store, OLD, old, origin=ORIGIN)
        prepare(root, store, shards)

        def arm():
            only = options["only"].encode()
            faults.faults_arm(n, options["mode"], options["error"], only, options["log"])

        code, said, counted = in_child(lambda: act(DirectoryStore(root), shards), arm)
        after = look(store)
        # The next writer is not hindered by what is left, and clears it away.
        act(store, shards)
        swept = store.sweep()
        again = look(store)
    shutil.rmtree(root)
    return {
        "n": n,
        "code": code,
        "said": said,
        "counted": counted,
        "after": after,
        "swept": len(swept),
        "again": again,
        "must": sorted(state.step for state in must),
    }


def main():
    """Run each n asked for."""
    options = json.loads(sys.argv[1])
    root = Path(options["root"])
    for n in range(options["first"], options["last"] + 1):
        print(json.dumps(one(root / str(n), options, n)), flush=True)


if __name__ == "__main__":
    faults = ctypes.CDLL(os.environ["LD_PRELOAD"])
    faults.faults_disarm.restype = ctypes.c_long
    faults.faults_arm.argtypes = [
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
    ]
    main()
