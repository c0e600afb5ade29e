"""What an agent does that its run has left out: it ends, or waits under srun to be readmitted."""

from types import SimpleNamespace

import pytest

from gpuops.host.clock import FakeClock

pytestmark = pytest.mark.torch


def wait_of(*, parks):
    from gpuops.agent.elastic.waiting import AgentWait

    noted = []
    journal = SimpleNamespace(excluded=lambda reason, _at_us: noted.append(reason))
    services = SimpleNamespace(
        session=SimpleNamespace(journal=journal, safely=lambda _what, act: act()),
        plan=SimpleNamespace(parks=parks),
        clock=FakeClock(),
        node="n1",
        say=noted.append,
    )
    return AgentWait(services), noted


def test_an_agent_that_does_not_wait_ends():
    from gpuops.agent.elastic.rendezvous import ExcludedError

    with pytest.raises(ExcludedError, match="sick"):
        wait_of(parks=False)[0].excluded("sick")


def test_one_under_srun_waits_and_says_once_what_takes_it_back():
    wait, noted = wait_of(parks=True)
    for reason in ("sick", "sick", "sick again"):
        wait.excluded(reason)

    assert noted[::2] == ["sick", "sick again"]
    assert [text.rpartition("; ")[2] for text in noted[1::2]] == [
        "once it is repaired, `gpuops run readmit n1` takes it back"
    ] * 2
