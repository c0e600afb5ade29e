"""Tables of recorded jobs: how long each worker computed, and what one costs the others."""

import pytest

from gpuops.detect.step_table import TableWorker, own_times, share_saved


def row(**more):
    base = {"dp_rank": "0", "stage": "0", "step": "7", "optype": "forward-compute", "duration": "1"}
    return base | {name: str(value) for name, value in more.items()}


def test_computing_is_summed_by_worker_and_step_and_waiting_is_not_computing():
    rows = [
        row(step=8),
        row(duration=0.5),
        row(optype="backward-compute"),
        row(optype="grads-recv"),
    ]

    assert own_times(rows) == {7: {TableWorker(0, 0): 1.5}, 8: {TableWorker(0, 0): 1.0}}
    assert list(own_times(rows)) == [7, 8]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"step": "x"}, "line 2: invalid literal"),
        ({"duration": ""}, "line 2: could not convert"),
        ({"duration": "nan"}, "line 2: 'nan' is no number of seconds"),
        ({"duration": "-1"}, "line 2: '-1' is no number of seconds"),
        ({"stage": None}, "line 2"),
    ],
)
def test_a_row_without_numbers_is_named(bad, says):
    with pytest.raises(ValueError, match=says):
        own_times([row() | bad])


def test_a_table_without_a_column_is_refused():
    with pytest.raises(ValueError, match="no column 'stage'"):
        own_times([{name: value for name, value in row().items() if name != "stage"}])


def test_what_a_slow_worker_costs_is_the_time_of_the_slowest_without_it():
    rows = [row(dp_rank=rank, duration=2 if rank == 1 else 1) for rank in range(4)]
    rows += [row(dp_rank=rank, stage=1, duration=1.5) for rank in range(4)]

    assert share_saved(own_times(rows), TableWorker(0, 1)) == pytest.approx(0.25)
    assert share_saved(own_times(rows), TableWorker(0, 2)) == 0
