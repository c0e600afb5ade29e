"""What NCCL's RAS says of a hang becomes evidence, and whatever else answers there does not."""

import pytest
from support.fake_ras import fake_ras

from gpuops.agent.monitors.nccl_ras import (
    BYTES_MAX,
    LINES_MAX,
    RasMonitor,
    ask_status,
    ras_address,
    status_lines,
)
from gpuops.host.clock import SystemClock
from gpuops.model import Role

MINUTE_NS = 60 * 10**9


def evidence_at(port, **env):
    clock = SystemClock()
    monitor = RasMonitor(clock, {"NCCL_RAS_ADDR": f"127.0.0.1:{port}", **env})
    return monitor.evidence(clock.mono_ns() + MINUTE_NS)


def test_its_status_is_evidence_without_the_lines_of_the_protocol():
    with fake_ras() as ras:
        (found,) = evidence_at(ras.port)

    assert (found.role, found.text) == (
        Role.SYMPTOM,
        f"NCCL's RAS at 127.0.0.1:{ras.port} reports",
    )
    assert found.lines[0] == "Job summary"
    assert found.lines[-1] == "  Missing ranks: 3"
    assert ras.heard == ["client protocol 2", "timeout 2", "verbose status"]


def test_where_nobody_listens_there_is_none():
    with fake_ras() as ras:
        port = ras.port

    assert evidence_at(port) == ()
    assert evidence_at(port, NCCL_RAS_ENABLE="0") == ()


def test_one_that_does_not_answer_is_given_up():
    with fake_ras(is_hung=True) as ras:
        assert evidence_at(ras.port) == ()


def test_another_service_is_not_quoted():
    with fake_ras() as ras:
        ras._answer = lambda _word: "220 mail.example ESMTP\n"

        with pytest.raises(ValueError, match="is no answer of NCCL's RAS"):
            ask_status("127.0.0.1", ras.port, 30.0)
        assert evidence_at(ras.port) == ()


def test_a_long_answer_is_cut():
    with fake_ras("x" * 500 + "\n" + "rank\n" * 200_000) as ras:
        text = ask_status("127.0.0.1", ras.port, 60.0)

    lines = status_lines(text)
    assert len(text) == BYTES_MAX
    assert len(lines) == LINES_MAX
    assert max(map(len, lines)) == 200


def test_after_the_deadline_nobody_is_asked():
    clock = SystemClock()
    with fake_ras() as ras:
        monitor = RasMonitor(clock, {"NCCL_RAS_ADDR": f"127.0.0.1:{ras.port}"})

        assert monitor.evidence(clock.mono_ns()) == ()
    assert ras.heard == []


@pytest.mark.parametrize(
    ("env", "address"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ADDR": "n1:4000"}, ("n1", 4000)),
        ({"NCCL_RAS_ADDR": "[::1]:4000"}, ("::1", 4000)),
        ({"NCCL_RAS_ADDR": "n1:many"}, ("n1", 28028)),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_where_it_listens(env, address):
    assert ras_address(env) == address
