"""Resumes that take long, many side by side: none is called hung; what hangs there is, in time.

Rank 1 is killed; the restart loads for minutes from files, by a child or from a slow socket, or
evaluates without a label. ``SOAK_RUNS`` of each kind (1), ``SOAK_SIDE`` of them at a time (24);
``SOAK_OUT`` is the folder where the figures go, as JSON.
"""

import json
import os
import time
from collections import defaultdict, deque
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.faulty import FaultyRun, culprits

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(14_400)]
RUNS, SIDE = int(os.environ.get("SOAK_RUNS", "1")), int(os.environ.get("SOAK_SIDE", "24"))
# What each does, for how long, and who: the longest first.
HEALTHY = [
    *(("read", 900), ("copy", 900), ("receive", 900)),
    *(("read", 120), ("wait", 120), ("evaluate", 100)),
    *(("evaluate-on-device", 100), ("evaluate-in-one-call", 100)),
]
HUNG = ("read", "copy", "receive", "wait", "evaluate", "evaluate-on-device")
LIMIT_S = 2400
# From the limit to the verdict, on a busy machine.
LATE_S = 60


def who_does(what, number):
    """Return who does it in one of the runs: each rank for itself, or one and the other waits."""
    return "all" if what == "evaluate-in-one-call" else ("1", "all", "0")[number % 3]


def limit_s(what, who):
    """Return the limit of what hangs: of a step, else that of a first step.

    Ranks that all stand in one line may evaluate in one long call, unless it waits for a GPU.
    """
    is_step = what == "evaluate-on-device" or (what == "evaluate" and who != "all")
    return 60 if is_step else 600


def ended(run):
    """Return the exit code of the only agent of *run*, None while it runs."""
    return run.agent(run.host).code


def is_over(each):
    """Say whether a run has ended, or will not."""
    _words, run, began_s = each
    return ended(run) is not None or time.monotonic() - began_s > LIMIT_S


def side_by_side(folder, kinds):
    """Run the job for each of *kinds*, words of its command line; yield each with its run."""
    waiting, running, count = deque(kinds), [], 0
    try:
        while waiting or running:
            while waiting and len(running) < SIDE:
                words, count = waiting.popleft(), count + 1
                run = FaultyRun(folder / f"{count}", (), words, script="takes_long.py")
                run.start()
                running.append((words, run, time.monotonic()))
            for each in [each for each in running if is_over(each)]:
                running.remove(each)
                with each[1] as run:
                    yield each[0], run, round(time.monotonic() - each[2], 1)
            time.sleep(0.5)
    finally:
        for _, run, _ in running:
            run.__exit__()


def hangs(run):
    """Return the incidents of *run* that are hangs."""
    return [i for i in run.incidents() if i["failure_class"].startswith("hang.")]


def row_of(words, run, took_s):
    """Return the figures of one run."""
    row = {"what": words[0], "seconds": words[1], "who": words[2], "took_s": took_s}
    row |= {"exit": ended(run), "generations": run.generations()}
    found = [
        {
            "after_s": round(hang["lost_seconds_by_phase"]["detect"], 1),
            "blamed": sorted(f"{kind} {name}" for kind, name in culprits(hang)),
        }
        for hang in hangs(run)
    ]
    row |= {"hangs": found}
    print(json.dumps(row), flush=True)
    return row


def keep(rows, name, test):
    """Write the figures of *rows* down by kind, where ``SOAK_OUT`` says so."""
    if out := os.environ.get("SOAK_OUT"):
        kinds = defaultdict(list)
        for row in rows:
            kinds[row["what"], row["seconds"], row["who"]].append(row)
        command = f'SOAK_RUNS={RUNS} SOAK_SIDE={SIDE} make soak PYTEST_ARGS="-k {test}"'
        date = f"{datetime.now(tz=UTC):%Y-%m-%d}"
        body = {"command": command, "date": date, "kinds": [*map(figures_of, kinds.values())]}
        Path(out, name).write_text(json.dumps(body, indent=2) + "\n")


def figures_of(rows):
    """Return the figures of the runs of one kind, times as the least and the most."""
    after_s = [hang["after_s"] for row in rows for hang in row["hangs"]]
    found = {"found_after_s": [min(after_s), max(after_s)]} if after_s else {}
    took_s = [row["took_s"] for row in rows]
    return {
        **{key: rows[0][key] for key in ("what", "seconds", "who")},
        "runs": len(rows),
        "ended_with_0": sum(row["exit"] == 0 for row in rows),
        "killed_as_hung": len(after_s),
        **found,
        "took_s": [min(took_s), max(took_s)],
    }


def test_no_healthy_resume_is_called_hung(tmp_path):
    kinds = [(what, s, who_does(what, n)) for what, s in HEALTHY for n in range(RUNS)]
    rows = [row_of(*each) for each in side_by_side(tmp_path, kinds)]
    keep(rows, "resumes_healthy.json", "no_healthy_resume")
    assert len(rows) == len(kinds)
    assert not [r for r in rows if r["exit"] or len(r["generations"]) != 2 or r["hangs"]]


def test_a_resume_that_hangs_is_found_by_its_limit(tmp_path):
    kinds = [(what, "hang", who_does(what, n)) for what in HUNG for n in range(RUNS)]
    rows = [row_of(*each) for each in side_by_side(tmp_path, kinds)]
    keep(rows, "resumes_hung.json", "resume_that_hangs")
    assert len(rows) == len(kinds)
    for row in rows:
        least_s, (hang,) = limit_s(row["what"], row["who"]), row["hangs"]
        assert row["exit"] == 0, row
        assert least_s <= hang["after_s"] < least_s + LATE_S, row
        named = [name for name in hang["blamed"] if name.startswith("rank")]
        assert named == named_of(row["what"], row["who"]), row


def named_of(what, who):
    """Return the ranks that are named: those who hang, nobody where each is in its own start.

    Who waits for its GPU may wait for another rank, too.
    """
    if what == "evaluate-on-device":
        return []
    if who != "all":
        return [f"rank {who}"]
    return ["rank 0", "rank 1"] if what == "evaluate" else []
