"""The list of monitors: each does what the agent asks of one, also where there is no worker."""

from contextlib import ExitStack

import pytest

from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.registry import MonitorContext, MonitorRegistry
from gpuops.host.clock import FakeClock


@pytest.fixture
def monitors(tmp_path):
    registry = MonitorRegistry(
        MonitorContext(
            clock=FakeClock(),
            node="n1",
            env={},
            root=tmp_path,
            site_dir=None,
            hang_timeout_s=None,
        )
    )
    with ExitStack() as stack:
        for monitor in registry.all:
            stack.callback(monitor.close)
        yield registry


def test_the_monitors_that_others_ask_for_more_are_in_the_list(monitors):
    assert monitors.hang in monitors.all
    assert monitors.gpu in monitors.all
    assert len(monitors.all) > 2


def test_each_watches_a_generation_without_workers_and_has_nothing_to_say(monitors, tmp_path):
    attempt = MonitoredAttempt(generation=0, node="n1", workers=(), folder=tmp_path)
    for monitor in monitors.all:
        monitor.begin(attempt)

        assert list(monitor.poll()) == []
        assert list(monitor.evidence(0)) == []
