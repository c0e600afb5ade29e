"""How many nodes may be drained: by the size of the fleet, and by who judged the failure."""

from dataclasses import replace

import pytest
from support.checks import NODE

from gpuops.model import FailureClass, Finding, Status
from gpuops.store.fuse import CauseKind, FuseCounts, FuseSettings, is_tripped, may_drain

HARDWARE, SHARED, LIMIT = CauseKind


@pytest.mark.parametrize(
    ("seen", "limit", "cap"),
    [(0, 3, 3), (1, 3, 3), (39, 3, 3), (40, 3, 4), (199, 3, 19), (200, 4, 20), (2000, 40, 200)],
)
def test_the_fuse_and_the_cap_have_the_size_of_the_fleet(seen, limit, cap):
    assert (FuseSettings().limit(seen), FuseSettings().cap(seen)) == (limit, cap)


def test_settings_count_instead_of_the_fleet():
    settings = FuseSettings(nodes=7, max_drained=9)

    assert (settings.limit(2000), settings.cap(2000)) == (7, 9)


@pytest.mark.parametrize(
    ("kind", "failing", "drained", "drains"),
    [
        (LIMIT, 40, 200, True),
        (SHARED, 40, 200, True),
        (HARDWARE, 40, 200, True),
        (LIMIT, 41, 0, False),
        (SHARED, 41, 0, False),
        (HARDWARE, 41, 199, True),
        (HARDWARE, 41, 200, False),
    ],
)
def test_a_tripped_fuse_stops_all_but_what_the_hardware_reports(kind, failing, drained, drains):
    counts = FuseCounts(seen=2000, failing=failing, drained=drained)

    assert is_tripped(counts, FuseSettings()) == (failing > 40)
    assert may_drain(kind, counts, FuseSettings()) is drains


@pytest.mark.parametrize(
    ("kind", "refused", "drained", "drains"),
    [
        (SHARED, {SHARED}, 0, False),
        (SHARED, {HARDWARE}, 0, True),
        (LIMIT, {SHARED}, 0, True),
        (LIMIT, {LIMIT}, 199, True),
        (LIMIT, {HARDWARE}, 200, False),
    ],
)
def test_a_second_failure_of_a_refused_node_is_no_way_around_the_fuse(
    kind, refused, drained, drains
):
    counts = FuseCounts(seen=2000, failing=1, drained=drained)

    assert may_drain(kind, counts, FuseSettings(), refused) is drains


def test_the_kind_of_a_failure_is_in_its_finding():
    found = Finding(
        check="x",
        entity=NODE,
        status=Status.FAIL,
        message="of a test",
        failure_class=FailureClass.GPU_MISSING,
    )

    assert CauseKind.of(found) is LIMIT
    assert CauseKind.of(replace(found, hardware_reported=True)) is HARDWARE
    assert CauseKind.of(replace(found, hardware_reported=True, shared_cause=True)) is SHARED
