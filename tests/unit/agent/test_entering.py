"""A board that stops answering between the meeting and the entry is met again."""

import threading
from types import SimpleNamespace

import pytest
from support.launches import requested

from gpuops.agent.elastic.signals import Cancellation
from gpuops.agent.launch.launch import _join
from gpuops.control.etcd.handle import QuorumHandle
from gpuops.control.etcd.quorum import QuorumPhase, QuorumState
from gpuops.control.memory import MemoryControlStore
from gpuops.control.store import ControlStoreUnreachableError
from gpuops.host.clock import FakeClock

pytestmark = pytest.mark.torch


@pytest.fixture
def prepared(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    clock = FakeClock()
    return SimpleNamespace(
        env={},
        request=requested(str(script)),
        clock=clock,
        cancellation=Cancellation((), clock),
    )


def test_it_is_entered_at_the_second_try(prepared):
    tries = []

    def enter(met):
        tries.append(met)
        if len(tries) == 1:
            raise ControlStoreUnreachableError("no answer in time")
        return "entered"

    assert _join(prepared, enter) == "entered"
    assert tries[0].store is not tries[1].store


def test_after_the_time_to_join_it_is_given_up(prepared):
    def enter(_met):
        prepared.clock.advance(prepared.request.plan.join_timeout_s)
        raise ControlStoreUnreachableError("no answer in time")

    with pytest.raises(ControlStoreUnreachableError):
        _join(prepared, enter)


def test_a_quorum_that_stopped_answering_is_announced_no_more(prepared, tmp_path):
    """Agents that wait for it would never begin another."""
    introduction, tries = MemoryControlStore(prepared.clock), []

    def enter(met):
        tries.append(met)
        if len(tries) > 1:
            return [thread.name for thread in threading.enumerate()].count("gpuops-quorum")
        handle = QuorumHandle(
            store=met.store,
            run_key="k",
            state=QuorumState(phase=QuorumPhase.ON),
            introduction=introduction.new_handle,
            folder=tmp_path / "certificates",
        )
        handle.start()
        object.__setattr__(met, "quorum", handle)  # a run of one node has none of its own
        raise ControlStoreUnreachableError("no answer in time")

    assert _join(prepared, enter) == 0
