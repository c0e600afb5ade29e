"""The ledger of the soak finds what it is there to find."""

from dataclasses import replace
from itertools import count

import pytest
from support.ledger import Line, in_one_row, problems, read_lines, redone

GOOD = """
load 0 0 0, load 0 1 0, step 0 0 1, step 0 1 1, step 0 0 2, step 0 1 2, save 0 0 2, step 0 0 3,
load 1 0 2, load 1 1 2, step 1 0 3, step 1 1 3, step 1 0 4, step 1 1 4, save 1 0 4
"""


def diary(text):
    """Return the lines of a diary: ``WHAT GENERATION RANK NUMBER``, one after the other in time."""
    ticks = count(1)
    rows = [row.split() for row in text.replace("\n", " ").split(",") if row.strip()]
    return [Line(row[0], *map(int, row[1:]), next(ticks) * 10**9, 1) for row in rows]


def test_a_run_that_redid_a_step_from_a_recorded_point_is_right():
    assert problems(diary(GOOD), 4) == []
    assert redone(diary(GOOD)) == 1


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("step 1 1 4", "step 1 1 5", "rank 1: not in order: [3, 5]"),
        ("step 0 1 2", "step 0 1 1", "rank 1: not in order: [1, 1]"),
        ("load 1 1 2", "load 1 1 0", "several points: [0, 2]"),
        ("save 0 0 2", "save 0 0 1", "starts at 2, saved nowhere"),
        ("step 1 1 3,", "step 1 1 3, step 0 1 3,", "generation 0 trains on 2.000 s into a later"),
        ("step 0 1 2", "load 0 1 0", "never trained by all ranks: [2]"),
    ],
)
def test_each_way_to_be_wrong_is_found(before, after, problem):
    assert before in GOOD

    found = problems(diary(GOOD.replace(before, after)), 4)

    assert any(problem in text for text in found), found


def test_a_run_that_did_not_come_to_its_end_is_wrong():
    assert problems(diary(GOOD), 5) == ["never trained by all ranks: [5]"]


def test_half_a_line_is_no_line(tmp_path):
    path = tmp_path / "steps"
    path.write_text("step 0 1 2 30 99\nsave 0 0 2 20 98\nstep 0 1 3 4")

    assert read_lines(path) == [Line("save", 0, 0, 2, 20, 98), Line("step", 0, 1, 2, 30, 99)]
    assert read_lines(tmp_path / "none") == []


def test_the_generations_of_a_requeued_job_follow_those_of_its_first_run():
    first, again = diary(GOOD), diary("load 0 0 4, step 0 0 5, load 1 0 4, step 1 0 5")
    later = [replace(line, run="b", mono_ns=line.mono_ns + 100 * 10**9) for line in again]

    row = in_one_row([*first, *later])

    assert [line.generation for line in row[-4:]] == [2, 2, 3, 3]
    assert problems(row, 5) == []
    early = [replace(line, mono_ns=first[-3].mono_ns) for line in later[:2]]
    found = problems(in_one_row([*first, *early]), 4)
    assert any("generation 1 trains on 1.000 s into a later" in problem for problem in found)
