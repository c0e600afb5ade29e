"""A signature is equal for two failures of one bug, and exists only for a root in user code."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exits import PEER_CLOSED, RULES, WATCHDOG, finished, killed, raised, worker

from gpuops.incident.classify import classify
from gpuops.incident.signature import (
    MESSAGE_CHARS_MAX,
    SIGNATURE_CHARS_MAX,
    innermost_frame,
    is_weak,
    normalize,
    signature_of,
    waiting_place,
)


def signed(end):
    return signature_of(classify(end, RULES))


def test_a_signature_has_type_place_function_and_message():
    assert signed(raised(0, "KeyError: 'labels'")) == "KeyError at train.py:88 in main: 'labels'"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bad loss 1.5 at step 57", "bad loss -2e-7 at step 58"),
        ("shapes [32, 128] and [64] differ", "shapes [16, 128] and [64] differ"),
        ("no file /scratch/a/b-1.pt", "no file /home/ada/x.pt"),
        ("object at 0x7f797fe00000", "object at 0x55d0aa"),
        ("peer 10.0.4.17:3504 said no", "peer 10.0.4.18:51222 said no"),
        ("peer [::1]:3504 said no", "peer [fe80::2]:1 said no"),
        ("GPU-1c7a5e38-0c43-1d5b-6ab1-4f3a2b1c0d9e", "1c7a5e38-0c43-1d5b-6ab1-4f3a2b1c0d9f"),
        ("[rank3]: wrong sum", "[rank12]: wrong sum"),
        ("loss is nan", "loss is inf"),
        ("commit deadbeef12 is bad", "commit 0123456789ab is bad"),
        ("see s3://bucket/a?x=1", "see s3://bucket/b?x=2"),
        ("two\n lines", "two"),
    ],
)
def test_what_differs_from_try_to_try_is_not_in_it(one, other):
    assert normalize(one.partition("\n")[0]) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("no key 'labels'", "no key 'images'"), ("bad loss", "bad sample"), ("", "x")],
)
def test_other_words_are_another_failure(one, other):
    assert normalize(one) != normalize(other)


@given(st.text())
def test_a_message_is_one_bounded_line(text):
    told = normalize(text)

    assert len(told) <= MESSAGE_CHARS_MAX
    assert "\n" not in told


def test_another_line_or_type_is_another_failure():
    base = signed(raised(0, "ValueError: x"))

    assert base != signed(raised(0, "ValueError: x", line=89))
    assert base != signed(raised(0, "TypeError: x"))
    assert base == signed(raised(5, "ValueError: x", at_s=7.0, last_step=3))


def test_the_place_is_the_innermost_frame_of_the_user_s_own_code():
    lines = [
        '  File "/home/ada/train.py", line 3, in <module>',
        '  File "/home/ada/data.py", line 88, in collate',
        '  File "/opt/venv/lib/python3.11/site-packages/torch/x.py", line 5, in stack',
        '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode',
    ]

    assert innermost_frame(lines) == "data.py:88 in collate"
    assert innermost_frame(lines[2:]) == "decoder.py:355 in raw_decode"
    assert innermost_frame([]) is None


INFRASTRUCTURE = [
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: device-side assert triggered",
    "torch.AcceleratorError: CUDA error: unspecified launch failure",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx`",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    "RuntimeError: NCCL error in: NCCLUtils.cpp:94, unhandled system error",
    "torch.distributed.DistBackendError: [3] is setting up NCCL communicator",
    "torch.distributed.DistStoreError: something new",
    f"RuntimeError: {PEER_CLOSED}",
    "RuntimeError: Gloo connectFullMesh failed with",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='x', port=443)",
    "urllib.error.URLError: <urlopen error x>",
    "OSError: [Errno 5] Input/output error: '/data/a'",
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 98] Address already in use",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/a'",
    "PermissionError: [Errno 13] Permission denied: '/data/a'",
    "TimeoutError: ",
    "EOFError: Ran out of input",
    "MemoryError: ",
    "RuntimeError: Caught OSError in DataLoader worker process 0.",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "zipfile.BadZipFile: File is not a zip file",
    "_pickle.UnpicklingError: invalid load key",
    "botocore.exceptions.ClientError: An error occurred (503)",
    "mylib.StorageError: [Errno 107] Transport endpoint is not connected",
    "RuntimeError: the queue timed out",
]


@pytest.mark.parametrize("what", INFRASTRUCTURE)
def test_what_is_not_the_program_s_own_has_no_signature(what):
    assert signed(raised(0, what)) is None


def test_a_cause_in_the_traceback_counts_too():
    trace = (
        "Traceback (most recent call last):",
        '  File "/home/ada/data.py", line 5, in read',
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 9, in main',
        "ValueError: no batch",
    )

    assert signed(raised(0, "ValueError: no batch", traceback=trace)) is None


@pytest.mark.parametrize(
    "what",
    [
        "KeyError: 'x'",
        "ImportError: No module named foo",
        "ModuleNotFoundError: No module named 'foo'",
        "RuntimeError: Expected all tensors to be on the same device, cuda:0 and cpu",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)",
        "mylib.errors.ConfigError: unknown key",
        "AssertionError: ",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running",
    ],
)
def test_the_program_s_own_exceptions_have_one(what):
    assert signed(raised(0, what)) is not None


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGBUS"])
def test_a_signal_has_none(signal):
    assert signed(killed(0, signal=signal)) is None
    assert signed(killed(0, signal=signal, log_tail=("ValueError: x",))) is None


def aborted(*words, dump=("Fatal Python error: Aborted", "Thread 0x1 (most recent call first):")):
    return killed(0, signal="SIGABRT", log_tail=(*words, *dump))


def thrown(kind, what):
    return aborted(f"terminate called after throwing an instance of '{kind}'", f"  what():  {what}")


ENFORCED = (
    "[enforce fail at /w/third_party/gloo/gloo/transport/tcp/pair.cc:456] length <= n. {} vs 4"
)

MISMATCH = (
    "Received data size doesn't match expected size."
    " Is there a distributed collective mismatch in your code?"
)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (thrown("std::runtime_error", "no field 7"), "abort by std::runtime_error: no field #"),
        (
            thrown("gloo::EnforceNotMet", ENFORCED.format(20)),
            "abort by gloo::EnforceNotMet: [enforce fail at pair.cc:#] length <= n. # vs #",
        ),
        (
            aborted("python: /src/a/b.cc:12: int f(int): Assertion `n > 0' failed."),
            "abort by python: b.cc:#: int f(int): Assertion `n > #' failed.",
        ),
        (
            thrown("gloo::EnforceNotMet", f"{ENFORCED.format(8)}. {MISMATCH}"),
            "abort by gloo::EnforceNotMet: [enforce fail at pair.cc:#] length <= n. # vs # "
            + MISMATCH.partition(" in your")[0],
        ),
        (thrown("gloo::IoException", "[/w/pair.cc:5] the ring is broken"), None),
        (thrown("std::bad_alloc", "std::bad_alloc"), None),
        (thrown("c10::Error", "CUDA error: an illegal memory access was encountered"), None),
        (thrown("std::runtime_error", "[/w/a.cc:5] Connection refused"), None),
        (aborted("malloc(): corrupted top size"), None),
    ],
)
def test_an_abort_has_that_of_its_reason_unless_the_machine_may_have_caused_it(end, told):
    assert signed(end) == told
    assert told is None or not is_weak(told)


def test_a_symptom_in_the_log_has_none():
    assert signed(killed(0, signal="SIGABRT", log_tail=(WATCHDOG.format(rank=0),))) is None


def test_a_finished_rank_has_none():
    assert signed(finished(0)) is None


def test_a_traceback_that_was_only_printed_counts():
    tail = (
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 88, in main',
        "ValueError: bad batch 7",
    )

    assert signed(worker(0, log_tail=tail)) == "ValueError at train.py:88 in main: bad batch #"


def test_an_exit_code_with_last_words_is_weak_and_a_bare_one_is_nothing():
    told = signed(worker(0, exit_code=3, log_tail=("config 7 is not valid",)))

    assert told == "exit 3: config # is not valid"
    assert is_weak(told)
    assert signed(worker(0, exit_code=3, log_tail=())) is None
    assert signed(worker(0, exit_code=3, log_tail=("lost: Connection refused",))) is None


def test_words_that_a_rule_knows_as_the_program_s_own_are_not_weak():
    line = "python: can't open file '/home/ada/trian.py': [Errno 2] No such file or directory"
    told = signed(worker(0, exit_code=2, log_tail=(line,)))

    assert told is not None
    assert not is_weak(told)


def test_a_rank_that_was_ended_while_it_raised_the_same_shares_the_signature():
    assert signed(raised(1, terminated=True)) == signed(raised(0))


def test_a_secret_in_a_message_is_in_no_signature():
    told = signed(raised(0, "ValueError: password=hunter2 is wrong"))

    assert "hunter2" not in told


@pytest.mark.parametrize("part", ["a.", "[::", "0x", "/", "1e+", "'", "dead", "Error: ", " OS"])
def test_a_hostile_message_costs_a_bounded_time(part):
    begin = time.process_time()
    told = signed(raised(0, "ValueError: " + part * 4000, traceback=(part * 4000,) * 50))

    assert time.process_time() - begin < 5
    assert told is None or len(told) <= SIGNATURE_CHARS_MAX


def test_the_place_of_a_waiting_thread_is_all_frames_of_the_users_own():
    frames = [
        ("/venv/site-packages/torch/distributed/distributed_c10d.py", "all_reduce (c10d.py:9)"),
        ("/job/train.py", "step (train.py:40)"),
        ("/job/train.py", "main (train.py:90)"),
    ]

    assert waiting_place(frames) == "step (train.py:40) < main (train.py:90)"
    assert waiting_place(frames[:1]) is None
    assert len(waiting_place(frames * 500)) == SIGNATURE_CHARS_MAX
