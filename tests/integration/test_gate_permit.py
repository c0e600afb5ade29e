"""A failing node asks the store for leave to drain: granted, refused, or no answer in time."""

import socket
import time
from dataclasses import replace

import pytest
from support.checks import NODE
from support.command import gpuops
from support.runs import wait_until

from gpuops.config.resolve import GateMode
from gpuops.errors import ProbeError
from gpuops.gate.permit import START_S, GateSettings, start_permission_request
from gpuops.gate.policy import DrainCause
from gpuops.host.clock import FakeClock
from gpuops.host.process import probe
from gpuops.model import ActionKind, FailureClass, Finding, Status, UnknownReason
from gpuops.store.fuse import FuseSettings

pytestmark = pytest.mark.quick_disk

CAUSE = DrainCause(
    finding=Finding(
        check="gpu_count",
        entity=NODE,
        status=Status.FAIL,
        message="of a test",
        failure_class=FailureClass.GPU_MISSING,
    ),
    failure_class=FailureClass.GPU_MISSING,
    action=ActionKind.DRAIN,
)


def gate(tmp_path, store_url, node="n1"):
    return GateSettings(
        node=node,
        cluster="c",
        store_url=store_url,
        state_dir=tmp_path,
        uid=1,
        mode=GateMode.ENFORCE,
        fuse=FuseSettings(),
        passes_to_resume=2,
        resumes_max_per_day=3,
        permit_deadline_s=1.0,
    )


def asked(gate):
    """Return the reply about a drain for `CAUSE`."""
    (reply,) = start_permission_request(gate, [CAUSE], FakeClock())()
    return reply


def test_the_fourth_node_is_refused_and_told_why(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    gpuops("db", "upgrade", "--store", url)
    # Of a busy test machine; a hook has a second.
    names = ("n1", "n2", "n3", "n4")
    gates = [replace(gate(tmp_path, url, n), permit_deadline_s=20.0) for n in names]
    answers = [asked(item) for item in gates]

    assert [answer.granted for answer in answers] == [True, True, True, False]
    assert answers[3].why.startswith("4 nodes of c fail check gpu_count within 600 s or are")


def test_a_check_whose_fuse_is_tripped_does_not_hide_what_another_check_finds(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    gpuops("db", "upgrade", "--store", url)
    for name in ("n1", "n2", "n3", "n4"):
        asked(replace(gate(tmp_path, url, name), permit_deadline_s=20.0))
    other = replace(CAUSE, finding=replace(CAUSE.finding, check="memory_size"))
    last = replace(
        gate(tmp_path, url, "n5"), permit_deadline_s=20.0, fuse=FuseSettings(max_drained=9)
    )

    replies = start_permission_request(last, [CAUSE, other], FakeClock())()

    assert [reply.granted for reply in replies] == [False, True]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql+psycopg://u@127.0.0.1:1/none", "Connection refused"),
        ("oracle://nonsense", "oracle"),
    ],
)
def test_a_store_that_cannot_be_asked_is_no_answer_and_says_why(tmp_path, url, why):
    answer = asked(gate(tmp_path, url))

    assert answer.granted is None
    assert why in answer.why


def test_a_store_that_never_answers_costs_its_deadline_and_no_more(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"postgresql+psycopg://u@127.0.0.1:{deaf.getsockname()[1]}/none"

        def is_in_time():
            begun = time.monotonic()
            answer = asked(gate(tmp_path, url))
            took_s = time.monotonic() - begun
            assert answer.granted is None
            return took_s < START_S + 1.0 + 1.0

        # A busy machine makes one wait longer, and not every one.
        wait_until(is_in_time, what="an answer within the deadline")


def test_without_a_process_to_ask_with_there_is_no_answer(tmp_path, monkeypatch):
    def no_child(*_args, **_kwargs):
        raise ProbeError("cannot fork", UnknownReason.CRASH)

    monkeypatch.setattr(probe, "start_call", no_child)

    assert asked(gate(tmp_path, "sqlite://")).granted is None
