"""A signal to an agent, whatever its main thread does."""

import ctypes
import os
import signal

import pytest

from gpuops.agent.elastic.signals import Cancellation, SignalActions
from gpuops.host.clock import FakeClock

pytestmark = pytest.mark.torch


@pytest.fixture
def cancellation():
    found = Cancellation(["SIGUSR2"], FakeClock())
    yield found
    found.restore()


def wait_in_one_call(seconds):
    """Sleep in one call that no signal interrupts: another thread takes the signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        ctypes.CDLL(None).sleep(seconds)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def test_a_signal_in_a_long_call_raises_after_it_where_nobody_may_end_the_process(cancellation):
    from torch.distributed.elastic.multiprocessing.api import SignalException

    cancellation.install()
    with pytest.raises(SignalException), cancellation.interruptible():
        wait_in_one_call(3)

    assert cancellation.received is signal.SIGUSR2


def test_actions_stay_when_the_handlers_are_installed_again(cancellation):
    seen = []
    cancellation.install(SignalActions(seen.append))
    cancellation.install()
    cancellation.restore()
    cancellation.install()
    os.kill(os.getpid(), signal.SIGUSR2)
    for _ in range(300):
        if seen:
            break
        signal.sigtimedwait([], 0.1)

    assert seen == [signal.SIGUSR2]
