"""How a node's counters grew, by the samples that it kept."""

import pytest

from gpuops.host.node_state import Counters, CounterSample

HOUR_S = 3600.0
UP_S = 100 * HOUR_S
NOW_US = 1_800_000_000_000_000


def counters(*samples, boot_id="now"):
    """Return counters with samples of ``a``, each an age in hours and a value."""
    return Counters(
        boot_id="now",
        since_boot_s=UP_S,
        t_us=NOW_US,
        samples=tuple(
            CounterSample(
                boot_id=boot_id,
                since_boot_s=UP_S - hours * HOUR_S,
                t_us=NOW_US - round(hours * HOUR_S * 1e6),
                values={"a": value},
            )
            for hours, value in samples
        ),
    )


@pytest.mark.parametrize(
    ("samples", "grown", "hours"),
    [
        ([(24.0, 1), (2.0, 5)], 99, 24.0),
        ([(24.01, 1), (2.0, 5)], 95, 2.0),
        ([(72.0, 1)], 99, 72.0),
        ([(72.0, 1), (48.0, 2)], 98, 48.0),
    ],
)
def test_growth_is_since_the_oldest_sample_of_a_day_or_the_newest_before(samples, grown, hours):
    growth = counters(*samples).since("a", 100)

    assert growth is not None
    assert (growth.grown, growth.elapsed_s) == (grown, pytest.approx(hours * HOUR_S))


@pytest.mark.parametrize(
    ("samples", "grown", "hours"),
    [
        ([(23.0, 1), (2.0, 5), (1.0, 9), (0.99, 50)], 91, 1.0),
        ([(23.0, 1), (0.99, 50)], 99, 23.0),
        ([(0.5, 10), (0.1, 50)], 90, 0.5),
        ([(72.0, 1)], 99, 72.0),
    ],
)
def test_lately_is_since_an_hour_ago_or_as_near_to_it_as_there_is(samples, grown, hours):
    growth = counters(*samples).lately("a", 100)

    assert growth is not None
    assert (growth.grown, growth.elapsed_s) == (grown, pytest.approx(hours * HOUR_S))


def test_an_hour_of_errors_is_not_hidden_by_a_quiet_day():
    growth = counters((23.0, 0), (1.0, 0)).lately("a", 12)

    assert growth is not None
    assert growth.per_hour == 12


def test_samples_of_another_boot_or_of_the_future_do_not_count():
    for known in (counters((1.0, 1), boot_id="before"), counters((-1.0, 1)), counters()):
        assert known.since("a", 2) is None
        assert known.lately("a", 2) is None
    assert counters((1.0, 1)).since("b", 2) is None


def test_a_counter_that_fell_counts_from_zero():
    growth = counters((2.0, 50)).lately("a", 7)

    assert growth is not None
    assert (growth.grown, growth.reset) == (7, True)
