"""The end of a run waits for its newest checkpoint, and a signal does not wait for either."""

import threading
from signal import SIGINT, SIGTERM
from types import SimpleNamespace

import pytest

from gpuops.agent.checkpoint.api import awaited
from gpuops.agent.launch.plan import CheckpointPlan

pytestmark = pytest.mark.torch


class Checkpoints:
    """Ends at once, or when a test lets it."""

    def __init__(self):
        self.ended = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_ending = threading.Event()

    def end(self, save_s):
        self.ended.append(save_s)
        self.is_ending.set()
        assert self.may_end.wait(30)


class End:
    """What `launch` ends the checkpoints with."""

    def __init__(self, drain_signal=None):
        self.checkpoints = Checkpoints()
        self.said = []
        self.cancellation = SimpleNamespace(received=None, drain=None, is_urgent=False)
        parts = SimpleNamespace(
            checkpoints=self.checkpoints,
            control=SimpleNamespace(record=SimpleNamespace(drain_signal=drain_signal)),
            plan=SimpleNamespace(checkpoints=CheckpointPlan(last_save_s=77.0)),
            say=self.said.append,
        )
        self.assembly = SimpleNamespace(services=parts)
        self.launch = SimpleNamespace(cancellation=self.cancellation)

    def run(self):
        from gpuops.agent.launch.launch import _end_checkpoints

        _end_checkpoints(self.launch, self.assembly)
        return self

    def later(self, **changes):
        """Let a signal come while the last state is being persisted."""
        self.checkpoints.may_end.clear()

        def come():
            assert self.checkpoints.is_ending.wait(10)
            vars(self.cancellation).update(changes)

        threading.Thread(target=come).start()
        self.run()
        self.checkpoints.may_end.set()
        return self


def test_what_is_done_is_waited_for_and_what_is_asked_meanwhile_is_asked():
    done, asked = threading.Event(), []

    def waiting():
        asked.append(1)
        if len(asked) == 3:
            done.set()

    awaited(lambda: done.wait(30), waiting)

    assert len(asked) >= 3


def test_what_is_raised_meanwhile_ends_the_wait():
    done = threading.Event()

    def waiting():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        awaited(lambda: done.wait(30), waiting)
    done.set()


def test_a_run_that_ends_by_itself_has_its_newest_state_persisted():
    end = End().run()

    assert (end.checkpoints.ended, end.said) == ([77.0], [])


@pytest.mark.parametrize("asked", [{"received": SIGINT}, {"drain": SIGTERM}, {}])
def test_one_that_was_asked_to_end_has_had_its_time(asked):
    end = End(drain_signal=None if asked else "SIGTERM")
    vars(end.cancellation).update(asked)
    end.run()

    assert end.checkpoints.ended == [0.0]


@pytest.mark.parametrize("comes", [{"received": SIGINT}, {"drain": SIGTERM}])
def test_a_signal_ends_the_wait_for_the_last_state(comes):
    end = End().later(**comes)

    (number,) = comes.values()
    assert end.said == [f"{number.name}: the last checkpoint is not waited for any more"]


def test_the_second_signal_ends_it_where_the_first_had_ended_the_run():
    end = End()
    end.cancellation.received = SIGINT
    end.later(is_urgent=True)

    assert len(end.said) == 1
