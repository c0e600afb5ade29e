"""Which calls are made again, how often, and for how long."""

import threading

import pytest

from gpuops.checkpoint.storage.object_tree import (
    PAUSE_MAX_S,
    ObjectStoreUnreachableError,
    Retrying,
    ShortReadError,
    is_final,
)
from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.host.clock import FakeClock


class Calls:
    """A function that raises some errors before it succeeds."""

    def __init__(self, *errors):
        self.errors, self.n_calls = list(errors), 0

    def __call__(self):
        self.n_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class StatusError(Exception):
    """As of gcsfs and aiohttp."""

    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


class BotoError(Exception):
    """As of botocore."""

    def __init__(self, status):
        super().__init__(f"boto {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def from_boto(error, status):
    error.__cause__ = BotoError(status)
    return error


class NoCredentialsError(Exception):
    """As of botocore."""


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def retrying(clock):
    return Retrying(60.0, clock, sleep=clock.advance, random=lambda: 0.5)


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ConnectionResetError(),
        TimeoutError(),
        ShortReadError("3 bytes came of 5"),
        StatusError(500),
        StatusError(503),
        StatusError(429),
        BotoError(500),
        from_boto(OSError(5, "translated"), 502),
        Exception("of some library"),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(retrying, error):
    call = Calls(error, error)

    assert retrying.call("read x", call) == "done"
    assert call.n_calls == 3


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Access Denied"),
        FileExistsError(),
        IsADirectoryError(),
        ValueError("no bucket"),
        NotImplementedError(),
        StatusError(403),
        StatusError(400),
        BotoError(412),
        from_boto(OSError(22, "translated"), 416),
        NoCredentialsError(),
    ],
    ids=repr,
)
def test_what_will_not_pass_is_told_at_once(retrying, clock, error):
    call, before_ns = Calls(error), clock.mono_ns()

    with pytest.raises(CheckpointError, match=rf"cannot read x: {type(error).__name__}") as raised:
        retrying.call("read x", call)

    assert call.n_calls == 1
    assert clock.mono_ns() == before_ns
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), CorruptError("bad"), CheckpointError("stop")]
)
def test_what_says_enough_by_itself_is_passed_on(retrying, error):
    with pytest.raises(type(error)) as raised:
        retrying.call("read x", Calls(error))

    assert raised.value is error


def test_it_ends_by_the_deadline_with_growing_pauses(clock):
    pauses = []

    def wait(seconds):
        pauses.append(seconds)
        clock.advance(seconds)

    began_ns = clock.mono_ns()
    call = Calls(*[OSError("no")] * 1000)
    with pytest.raises(CheckpointError, match=r"cannot list y: OSError: no \(\d+ attempts\)"):
        Retrying(60.0, clock, sleep=wait, random=lambda: 0.5).call("list y", call)

    assert (clock.mono_ns() - began_ns) / 1e9 <= 60
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.5
    assert max(pauses) == PAUSE_MAX_S
    assert call.n_calls == len(pauses) + 1 < 20


def test_pauses_vary_so_that_many_nodes_do_not_ask_together(clock):
    spread = set()
    for share in (0.0, 0.5, 0.99):
        pauses = []
        Retrying(60.0, clock, sleep=pauses.append, random=lambda share=share: share).call(
            "x", Calls(OSError())
        )
        spread.update(pauses)

    assert len(spread) == 3
    assert max(spread) / min(spread) > 2


def test_a_secret_in_an_error_is_not_passed_on(retrying):
    error = PermissionError("https://user:hunter2hunter2@host/bucket refused")

    with pytest.raises(CheckpointError) as raised:
        retrying.call("read x", Calls(error))

    assert "hunter2hunter2" not in str(raised.value)


def test_an_error_that_is_its_own_cause_ends():
    error = OSError("loop")
    error.__cause__ = error

    assert not is_final(error)


def test_interrupts_are_not_held_up(retrying):
    with pytest.raises(KeyboardInterrupt):
        retrying.call("read x", Calls(KeyboardInterrupt()))


@pytest.fixture
def stranger(clock):
    """Calls to a store that has never answered."""
    return Retrying(
        300.0, clock, sleep=clock.advance, random=lambda: 0.5, first_response_timeout_s=20.0
    )


def test_who_never_answered_is_given_up_sooner(stranger, clock):
    began_ns = clock.mono_ns()
    with pytest.raises(
        ObjectStoreUnreachableError, match="cannot list y: no answer, timed out after 20 s"
    ):
        stranger.call("list y", Calls(*[ConnectionRefusedError()] * 1000))

    assert (clock.mono_ns() - began_ns) / 1e9 <= 20


@pytest.mark.parametrize("first", [None, FileNotFoundError(), StatusError(503), StatusError(403)])
def test_who_has_answered_once_is_given_all_the_time(stranger, clock, first):
    try:
        stranger.call("ask for y", Calls(*[first] if first else []))
    except (FileNotFoundError, CheckpointError):
        assert first is not None

    began_ns = clock.mono_ns()
    with pytest.raises(CheckpointError, match="ConnectionRefusedError") as caught:
        stranger.call("list y", Calls(*[ConnectionRefusedError()] * 1000))

    assert not isinstance(caught.value, ObjectStoreUnreachableError)
    assert 270 < (clock.mono_ns() - began_ns) / 1e9 <= 300


def test_an_attempt_that_hangs_is_left_behind(clock):
    retrying = Retrying(300.0, clock, first_response_timeout_s=2.0)
    over = threading.Event()
    with pytest.raises(
        ObjectStoreUnreachableError, match=r"timed out after 2 s; check that the server is up"
    ):
        retrying.call("list y", over.wait)
    over.set()

    assert retrying.call("list y", lambda: "done") == "done"


def test_what_the_first_call_raises_is_passed_on(stranger):
    with pytest.raises(CorruptError, match="bad"):
        stranger.call("read y", Calls(CorruptError("bad")))
    with pytest.raises(CheckpointError, match="NoCredentialsError"):
        stranger.call("read y", Calls(NoCredentialsError()))
