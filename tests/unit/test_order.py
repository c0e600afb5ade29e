"""The order of tests over several processes."""

import pytest
from support.order import spread

PATHS = [
    *(f"tests/faults/test_{n % 3}.py" for n in range(6)),
    *(f"tests/integration/slurm/test_{n}.py" for n in range(4)),
    *("tests/unit/test_quick.py" for _ in range(20)),
]


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4, 40])
def test_each_test_runs_once(n_workers):
    assert sorted(spread(PATHS, n_workers)) == list(range(len(PATHS)))


def test_each_part_begins_with_its_share_of_the_slow_ones():
    ordered = [PATHS[index] for index in spread(PATHS, 3)]
    parts = [ordered[:10], ordered[10:20], ordered[20:]]

    assert [path for path in parts[0] if "quick" not in path] == PATHS[6:10]
    assert [sum("faults" in path for path in part) for part in parts] == [0, 4, 2]
    assert all("quick" in path for part in parts for path in part[4:])


def test_a_worker_without_slow_tests_has_quick_ones():
    assert spread(PATHS[10:], 2) == list(range(20))
