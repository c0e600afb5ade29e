"""A worker's end as one record: from files and facts, without processes."""

import json
import signal

import pytest

from gpuops.agent.elastic.exits import (
    ExceptionNote,
    ExitContext,
    RankFiles,
    read_exception,
    read_tail,
    to_exit,
)
from gpuops.agent.elastic.teardown import ObservedExit, SentSignal, signal_name, was_ours
from gpuops.agent.monitors.progress import RankProgress
from gpuops.scrub import scrub_lines

TERM = SentSignal(at_mono_ns=1000, signals=(signal.SIGTERM,))
TERM_KILL = SentSignal(at_mono_ns=1000, signals=(signal.SIGTERM, signal.SIGKILL))


@pytest.mark.parametrize(
    ("sent", "name", "error_ns", "ours"),
    [
        (None, "SIGKILL", None, False),
        (TERM, "SIGTERM", None, True),
        (TERM, None, None, True),
        (TERM, "SIGKILL", None, False),
        (TERM_KILL, "SIGKILL", None, True),
        (TERM, "SIGTERM", 999, False),
        (TERM, None, 1001, True),
        (TERM, "SIGSEGV", None, False),
    ],
)
def test_teardown_is_what_our_signal_did(sent, name, error_ns, ours):
    assert was_ours(sent, name, error_ns) is ours


def test_codes_below_zero_are_signals():
    assert signal_name(-9) == "SIGKILL"
    assert signal_name(-64) == "SIGRTMAX"
    assert signal_name(-50) == "signal 50"
    assert signal_name(3) is None
    assert signal_name(None) is None


def test_an_exit_holds_everything_that_is_known():
    note = ExceptionNote("ValueError", "bad", ("Traceback",), 900)
    exit_ = to_exit(
        ExitContext(node="n1", rank=5, local_rank=1, pid=7),
        ObservedExit(7, 1, 10, 1100),
        sent=TERM,
        note=note,
        progress=RankProgress(beats=4, last_step=104, last_mono_ns=800),
        tail=["last words"],
    )

    assert (exit_.exit_code, exit_.signal, exit_.terminated) == (1, None, False)
    assert (exit_.last_step, exit_.beats, exit_.last_beat_mono_ns) == (104, 4, 800)
    assert (exit_.exception_type, exit_.error_mono_ns) == ("ValueError", 900)


@pytest.mark.parametrize(
    ("sent", "finished_ns", "told_ns"),
    [(None, 900, 900), (TERM, 900, 900), (TERM, 1001, None), (TERM, None, None)],
)
def test_who_came_to_its_end_before_our_signal_was_done(sent, finished_ns, told_ns):
    exit_ = to_exit(
        ExitContext(node="n1", rank=5, local_rank=1, pid=7),
        ObservedExit(7, -15, 10, 1100),
        sent=sent,
        note=None,
        progress=RankProgress(finished_ns=finished_ns),
    )

    assert exit_.finished_mono_ns == told_ns


def test_our_exception_file_comes_before_torchs(tmp_path):
    ours, torchs = tmp_path / "exception.json", tmp_path / "error.json"
    torchs.write_text(
        json.dumps({"message": {"message": "KeyError: 'k'", "extraInfo": {"py_callstack": "a\nb"}}})
    )
    files = RankFiles(torch_error=torchs, exception=ours)

    assert read_exception(files, scrub_lines) == ExceptionNote("KeyError", "'k'", ("a", "b"))

    ours.write_text(json.dumps({"type": "E", "message": "m", "traceback": ["t"], "mono_ns": 3}))
    assert read_exception(files, scrub_lines) == ExceptionNote("E", "m", ("t",), 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": 3}', "\x00"])
def test_a_broken_error_file_is_no_exception(tmp_path, text):
    path = tmp_path / "error.json"
    path.write_text(text)

    assert read_exception(RankFiles(torch_error=path), scrub_lines) is None
    assert read_exception(RankFiles(torch_error=tmp_path / "gone"), scrub_lines) is None


def test_the_tail_ends_with_standard_error_and_is_clean(tmp_path):
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text("".join(f"step {n}\n" for n in range(100)))
    err.write_text("50%|###  \r100%|######\n\n\x1b[31mred password=abc\n" + "x" * 9000)

    lines, path = read_tail(RankFiles(stdout=out, stderr=err), scrub_lines)

    assert path == err
    assert len(lines) == 30
    assert lines[-4:-3] == ("step 99",)
    assert lines[-3] == "100%|######"
    assert "\x1b" not in lines[-2]
    assert "abc" not in lines[-2]
    assert len(lines[-1]) <= 400


@pytest.mark.parametrize("current", ["Thread", "Current thread"])
def test_the_reason_of_an_abort_is_not_pushed_out_by_the_dump_that_follows(tmp_path, current):
    frames = [f'  File "/x/a.py", line {n} in f' for n in range(9)]
    dump = [line for n in range(40) for line in (f"Thread 0x{n:x} (most recent):", *frames, "")]
    dump += [f"{current} 0xff (most recent call first):", *frames, ""]
    words = ["terminate called after throwing an instance of 'x::E'", "  what():  4 vs 1"]
    err = tmp_path / "stderr.log"
    last = ["Fatal Python error: Aborted", "", *dump, "Extension modules: a.b, c.d (total: 2)"]
    err.write_text("\n".join([*words, *last, "after it", ""]))
    lines, _path = read_tail(RankFiles(stderr=err), scrub_lines)

    first = "Thread 0x0 (" if current == "Thread" else "Current thread 0xff"
    assert lines[:2] == tuple(words)
    assert lines[3].startswith(first)
    assert lines[-1] == "after it"
    assert not any("Extension modules" in line for line in lines)


def test_a_key_that_begins_above_the_tail_is_not_in_it(tmp_path):
    out, error = tmp_path / "stdout.log", tmp_path / "exception.json"
    key = ["-----BEGIN PRIVATE KEY-----", *(f"MIIE{n:060}" for n in range(52)), "-----END PRIVATE"]
    out.write_text("\n".join([*key, "KeyError: 3"]))
    note = {"type": "E", "message": "\n".join(key), "traceback": ["\n".join(key), "last"]}
    error.write_text(json.dumps(note))

    lines, _path = read_tail(RankFiles(stdout=out), scrub_lines)
    seen = read_exception(RankFiles(exception=error), scrub_lines)

    assert lines[-1] == "KeyError: 3"
    assert seen.traceback[-1] == "last"
    assert "MIIE" not in f"{lines}{seen}"


def test_a_rank_without_files_has_no_tail(tmp_path):
    assert read_tail(RankFiles(), scrub_lines) == ((), None)
    assert read_tail(RankFiles(stdout=tmp_path / "gone"), scrub_lines) == ((), tmp_path / "gone")
