"""The state file is worth little: whatever is wrong with it costs a note, and bounded time."""

import contextlib
import fcntl
import json
import os
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot
from support.runs import wait_until

from gpuops.gate import node_state
from gpuops.gate.node_state import (
    NewerStateError,
    StateError,
    change_state,
    load_state,
    parse_state,
    read_state,
    save_state,
    state_json,
    state_path,
)
from gpuops.host.node_state import (
    CounterSample,
    DriverHang,
    NodeState,
    Repair,
    Strikes,
)
from gpuops.host.process.abandoned import AbandonedProbes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.quick_disk,
]

UID = os.geteuid()
BOOT = "11111111-2222-3333-4444-555555555555"
STATE = NodeState(persistence=True)

names = st.text(max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
# A time or a count has 64 bits at the most.
whole = st.integers(-(2**64) + 1, 2**64 - 1)
samples = st.builds(
    CounterSample,
    boot_id=names,
    since_boot_s=numbers,
    t_us=whole,
    values=st.dictionaries(names, numbers, max_size=3),
)
states = st.builds(
    NodeState,
    samples=st.lists(samples, max_size=3).map(tuple),
    jobs=st.dictionaries(names, samples, max_size=2),
    hangs=st.lists(
        st.builds(
            DriverHang,
            boot_id=names,
            t_us=whole,
            call=names,
            state=st.none() | names,
        ),
        max_size=2,
    ).map(tuple),
    persistence=st.none() | st.booleans(),
    repairs=st.lists(
        st.builds(Repair, entity_kind=names, entity_id=names, t_us=whole, by=names, what=names),
        max_size=2,
    ).map(tuple),
    strikes=st.lists(
        st.builds(
            Strikes,
            entity_kind=names,
            entity_id=names,
            count=whole,
            last_us=whole,
            why=names,
        ),
        max_size=2,
    ).map(tuple),
    profile=st.none() | names,
)


@given(states)
def test_a_state_survives_the_file(state):
    assert parse_state(json.dumps(state_json(state))) == state


def parsed(text):
    """Return whether *text* is a state; what is none is a StateError and nothing else."""
    with contextlib.suppress(StateError):
        return isinstance(parse_state(text), NodeState)
    return True


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", errors="replace")))
def test_whatever_the_file_holds_is_a_state_or_a_reason(text):
    assert parsed(text)


keys = st.sampled_from(["samples", "jobs", "hangs", "persistence", "incidents", "x"])
bodies = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
    max_leaves=8,
)


@given(bodies)
def test_whatever_stands_for_the_state_is_a_state_or_a_reason(body):
    assert parsed(json.dumps({"schema": "gpuops.node-state/1", "state": body}))


def remembered(tmp_path, root=None, deadline_s=30.0):
    root = root or FakeRoot(tmp_path / "root").write("proc/uptime", "4000.5 1.0\n")
    return load_state(tmp_path, root.path, UID, AbandonedProbes(), deadline_s=deadline_s)


def test_a_node_without_a_file_knows_its_boot_and_complains_of_nothing(tmp_path):
    known = remembered(tmp_path)

    assert known.state == NodeState()
    assert (known.boot_id, known.since_boot_s, known.note) == (BOOT, 4000.5, None)


def test_what_was_kept_is_recalled(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)

    assert remembered(tmp_path).state == STATE


def test_the_file_is_its_owners_alone(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)

    assert state_path(tmp_path).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.json", "node.lock"]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("", "it is not JSON: torn, or not ours"),
        ('{"schema": "gpuops.node-st', "it is not JSON: torn, or not ours"),
        ("[]", "it is not a node's state"),
        ('{"schema": "other/1"}', "it is not a node's state"),
        ('{"schema": "gpuops.node-state/2", "state": {}}', "it is of version 2"),
        ('{"schema": "gpuops.node-state/1", "state": {"hangs": 7}}', "hangs of the state"),
        ('{"schema": "gpuops.node-state/1", "state": {"new": 7}}', "unknown key 'new'"),
    ],
)
def test_a_file_that_is_no_state_is_left_out_with_a_note(tmp_path, text, note):
    state_path(tmp_path).write_text(text)
    known = remembered(tmp_path)

    assert known.state == NodeState()
    assert known.boot_id == BOOT
    assert note in known.note


@pytest.mark.parametrize("text", ["", "{", '{"schema": "gpuops.node-state/1", "state": 3}'])
def test_a_torn_file_is_replaced_by_the_next_check(tmp_path, text):
    state_path(tmp_path).write_text(text)
    change_state(tmp_path, UID, lambda _state: STATE)

    assert read_state(tmp_path, UID) == STATE


def test_the_file_of_a_later_gpuops_is_left_alone(tmp_path):
    text = '{"schema": "gpuops.node-state/2", "state": {}}'
    state_path(tmp_path).write_text(text)

    with pytest.raises(NewerStateError):
        change_state(tmp_path, UID, lambda _state: STATE)
    assert state_path(tmp_path).read_text() == text
    wait = save_state(tmp_path, UID, lambda _state: STATE, AbandonedProbes(), deadline_s=60.0)
    assert "version 2" in wait()


@pytest.mark.skipif(UID != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_believed(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)
    os.chown(state_path(tmp_path), 1000, 1000)

    assert "belongs to user 1000" in remembered(tmp_path).note


@pytest.mark.skipif(UID != 0, reason="only root is held to root's own files")
def test_root_does_not_believe_a_file_that_others_may_write(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)
    state_path(tmp_path).chmod(0o666)

    assert "root does not read" in remembered(tmp_path).note


def make_link(path):
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("make", "why"),
    [(os.mkfifo, "it is not a file"), (os.mkdir, "it is not a file"), (make_link, "it is a link")],
)
def test_what_is_no_plain_file_is_left_out(tmp_path, make, why):
    make(state_path(tmp_path))
    known = remembered(tmp_path)

    assert known.note == f"{state_path(tmp_path)} is left out: {why}"
    assert known.boot_id == BOOT


def test_a_huge_file_is_left_out(tmp_path):
    with state_path(tmp_path).open("wb") as file:
        file.truncate(node_state._BYTES_MAX + 1)
    state_path(tmp_path).chmod(0o600)

    assert "is larger than" in remembered(tmp_path).note


def test_a_disk_that_hangs_costs_little_more_than_its_half_second(tmp_path):
    """Nobody ever writes into the pipe that stands where the boot's id is read."""
    root = FakeRoot(tmp_path / "root")
    pipe = root.path / "proc/sys/kernel/random/boot_id"
    pipe.unlink()
    os.mkfifo(pipe)

    def is_within_the_bound():
        started = time.monotonic()
        known = remembered(tmp_path, root, node_state.READ_S)
        took_s = time.monotonic() - started
        assert known.boot_id == ""
        assert "gave no answer in " in known.note
        return took_s < node_state.READ_S + 0.2

    # A busy machine makes one wait longer, and not every one.
    wait_until(is_within_the_bound, what=f"an answer in {node_state.READ_S + 0.2} s")


def test_a_write_that_nothing_can_end_costs_little_more_than_its_half_second(tmp_path):
    def deaf(_state):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def is_within_the_bound():
        started = time.monotonic()
        trouble = save_state(tmp_path, UID, deaf, AbandonedProbes())()
        took_s = time.monotonic() - started
        assert "gave no answer in " in trouble
        return took_s < node_state.SAVE_S + 0.4

    wait_until(is_within_the_bound, what=f"an answer in {node_state.SAVE_S + 0.4} s")


def test_two_checks_at_once_lose_nothing(tmp_path):
    def one_more(name):
        def change(state):
            hang = DriverHang(boot_id="b", t_us=0, call=name)
            return NodeState(hangs=(*state.hangs, hang))

        return change

    def work(name):
        for n in range(10):
            change_state(tmp_path, UID, one_more(f"{name}{n}"), lock_s=20)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_state(tmp_path, UID).hangs) == 40


def test_a_lock_that_is_held_is_not_waited_for_long(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)

    def is_within_the_deadline():
        started = time.monotonic()
        trouble = save_state(
            tmp_path, UID, lambda _state: NodeState(), AbandonedProbes(), deadline_s=30
        )()
        took_s = time.monotonic() - started
        assert "node.lock is locked by another for 0.3 s" in trouble
        return took_s < node_state.SAVE_S

    with (tmp_path / "node.lock").open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        # A busy machine makes one wait longer, and not every one.
        wait_until(is_within_the_deadline, what=f"an answer in {node_state.SAVE_S} s")

    assert read_state(tmp_path, UID) == STATE


def test_nothing_is_written_where_nothing_changed(tmp_path):
    change_state(tmp_path, UID, lambda _state: STATE)
    before = state_path(tmp_path).stat().st_ino
    change_state(tmp_path, UID, lambda state: state)

    assert state_path(tmp_path).stat().st_ino == before


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")

    wait = save_state(
        tmp_path / "file", UID, lambda _state: STATE, AbandonedProbes(), deadline_s=60.0
    )

    assert "File exists" in wait()
