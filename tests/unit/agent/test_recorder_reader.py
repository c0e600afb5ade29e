"""Whatever a recorder's socket answers, it is a dump or a RecorderError, in time and in bounds."""

import contextlib
import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuops.agent.monitors.recorder.reader import RecorderError, read_body, read_recorders
from gpuops.detect.recorder_dump import parse_dump

GENEROUS_S = 60.0


def entry(number, *, backend="gloo", group="0", retired=True, state="scheduled"):
    return {
        "collective_seq_id": number,
        "process_group": [group, "default_pg"],
        "profiling_name": f"{backend}:all_reduce",
        "retired": retired,
        "state": state,
        "pg_id": 0,
    }


def http(body, status="200 OK", length=None):
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def answer(body):
    return http(json.dumps(body).encode())


NONE = http(b"Handler not found", "404 Not Found")
EMPTY = {"entries": [], "pg_config": {"": {"name": "", "ranks": "[0, 1]"}}}


@dataclass
class Served:
    """Serves *answers* by handler; None: it accepts and is silent."""

    path: Path
    answers: dict
    rank: int = 3
    pid: int = os.getpid()
    ends: bool = True

    def __enter__(self):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.recorder))
        self.listener.listen()
        self.kept = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        for item in (self.listener, *self.kept):
            item.close()

    @property
    def recorder(self):
        return self.path / "r.sock"

    @property
    def groups(self):
        return self.path / "groups"

    def _serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.kept.append(connection)
            asked = connection.recv(4096).decode()
            reply = next((v for k, v in self.answers.items() if k in asked.split("\r\n")[0]), NONE)
            if reply is not None:
                try:
                    connection.sendall(reply)
                    if self.ends:
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def read(self, *, pid=None, deadline_s=GENEROUS_S, bytes_max=2**20):
        body = read_body(
            self.recorder,
            self.groups,
            pid=pid or self.pid,
            deadline_s=deadline_s,
            bytes_max=bytes_max,
        )
        return parse_dump(body, self.rank)


def gloo(reply):
    return {"fr_trace_json": reply}


def calls_of(dump):
    return [(call.group, call.number, call.is_complete) for call in dump.calls]


def test_gloo_leaves_out_who_is_in_a_group_and_the_worker_noted_it(tmp_path):
    body = EMPTY | {"entries": [entry(1), entry(2, retired=False)]}
    lines = [
        '{"group": "0", "ranks": [0]}',
        "nonsense",
        '{"group": "0", "ranks": [0, 1]}',
        '{"group": "1", "ranks": [3]}',
        '["group"]',
        '{"group": "2", "ranks": [0,',
    ]
    with Served(tmp_path, gloo(answer(body))) as served:
        served.groups.write_text("\n".join(lines))
        dump = served.read()

    assert dump.rank == 3
    assert calls_of(dump) == [("0", 1, True), ("0", 2, False)]
    assert dump.members == {"0": (0, 1), "1": (3,)}


def test_a_file_of_groups_that_is_a_link_is_not_read(tmp_path):
    other = tmp_path / "other"
    other.write_text('{"group": "0", "ranks": [0, 1]}')
    with Served(tmp_path, gloo(answer(EMPTY))) as served:
        served.groups.symlink_to(other)
        assert served.read().members == {}


def test_nccl_and_gloo_in_one_group_count_apart(tmp_path):
    nccl = {
        "entries": [entry(7, backend="nccl", state="completed"), entry(8, backend="nccl")],
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
    }
    answers = {
        "dump_nccl_trace_json": answer(nccl),
        "fr_trace_json": answer(EMPTY | {"entries": [entry(1), entry(2, retired=False)]}),
    }
    with Served(tmp_path, answers) as served:
        served.groups.write_text('{"group": "0", "ranks": [0, 1, 2, 3]}\n')
        dump = served.read()

    assert calls_of(dump) == [
        ("0", 7, True),
        ("0", 8, False),
        ("0/gloo", 1, True),
        ("0/gloo", 2, False),
    ]
    assert dump.members == {"0": (0, 1, 2, 3), "0/gloo": (0, 1, 2, 3)}


def test_before_its_first_collective_a_rank_has_called_none(tmp_path):
    # torch leaves empty entries out.
    for config in ({}, {"": {"name": "", "ranks": "[0]"}}):
        with Served(tmp_path, gloo(answer({"pg_config": config}))) as served:
            assert served.read().calls == ()
        served.recorder.unlink()


def test_a_recorder_that_is_off_is_not_one_of_a_rank_that_called_nothing(tmp_path):
    served = Served(tmp_path, gloo(answer({"pg_config": {}})))
    served.groups.write_text('{"group": "0", "ranks": [0, 1]}')
    with served, pytest.raises(RecorderError, match="TORCH_FR_BUFFER_SIZE=0"):
        served.read()


ANSWERS = {
    "no such handler": ({}, "does not give its flight recorder"),
    "an error": (gloo(http(b"", "500 Internal Server Error")), "500 Internal"),
    "no HTTP": (gloo(b"\x00" * 200), "it answers with b'"),
    "nothing": (gloo(b""), "it answers with b''"),
    "no JSON": (gloo(http(b"<html>")), "no JSON"),
    "a deep one": (gloo(http(b"[" * 200_000)), "no JSON"),
    "a list": (gloo(http(b"[1]")), "not with a dump"),
    "a foreign table": (gloo(http(b"{}")), "not with a dump"),
    "entries of another kind": (gloo(answer(EMPTY | {"entries": [[1]]})), "is no table"),
    "half of it": (gloo(http(b'{"entries": []}', length=99)), "ends after 15 of 99 bytes"),
    "too much": (gloo(http(b" " * 2**21)), "more than 1048576 bytes"),
    "text for NCCL": ({"nccl": answer(EMPTY | {"entries": "x"})}, "entries are no list"),
}


@pytest.mark.parametrize(("answers", "why"), ANSWERS.values(), ids=ANSWERS)
def test_what_is_no_dump_is_refused(tmp_path, answers, why):
    with Served(tmp_path, answers) as served, pytest.raises(ValueError, match=why):
        served.read()


def test_who_accepts_and_never_answers_is_left_at_the_deadline(tmp_path):
    with (
        Served(tmp_path, {"nccl": None}) as served,
        pytest.raises(RecorderError, match="timed out"),
    ):
        served.read(deadline_s=0.1)


def test_who_answers_drop_by_drop_is_left_at_the_deadline(tmp_path):
    stop = threading.Event()
    served = Served(tmp_path, {"nccl": http(b"", length=10**6)[:-2]})

    def drip():
        while not stop.wait(0.01):
            for connection in served.kept:
                with contextlib.suppress(OSError):
                    connection.send(b" ")

    served.ends = False
    dripping = threading.Thread(target=drip)
    with served:
        dripping.start()
        try:
            with pytest.raises(RecorderError, match="timed out"):
                served.read(deadline_s=0.3)
        finally:
            stop.set()
            dripping.join()


def test_who_never_accepts_is_not_waited_for_beyond_the_deadline(tmp_path):
    served = Served(tmp_path, {})
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(served.recorder))
        listener.listen(1)
        for _ in range(9):  # beyond the backlog none connects
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(served.recorder))
        with pytest.raises(RecorderError, match="does not answer"):
            served.read(deadline_s=0.3)


def test_another_process_than_the_worker_is_not_asked(tmp_path):
    why = rf"process {os.getpid()} .* not the worker 1$"
    served = Served(tmp_path, gloo(answer(EMPTY)))
    with served, pytest.raises(RecorderError, match=why):
        served.read(pid=1)


def test_another_user_is_not_asked(tmp_path, monkeypatch):
    served = Served(tmp_path, gloo(answer(EMPTY)))
    uid = os.geteuid()
    why = f"of user {uid} listens there"
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    with served, pytest.raises(RecorderError, match=why):
        served.read()


def test_a_socket_in_whose_place_is_something_else_is_not_asked(tmp_path):
    (tmp_path / "other").mkdir()
    with Served(tmp_path / "other", gloo(answer(EMPTY))) as other:
        served = Served(tmp_path, {})
        with pytest.raises(RecorderError, match="No such file"):
            served.read()
        served.recorder.symlink_to(other.recorder)
        with pytest.raises(RecorderError, match="is no socket"):
            served.read()
        served.recorder.unlink()
        served.recorder.write_text("")
        with pytest.raises(RecorderError, match="is no socket"):
            served.read()


def test_a_rank_that_fails_is_left_out_and_the_others_are_read(tmp_path):
    @dataclass
    class Without:
        rank = 9
        pid = 1
        recorder = None
        groups = None

    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    with (
        Served(tmp_path / "good", gloo(answer(EMPTY)), rank=1) as good,
        Served(tmp_path / "bad", gloo(http(b"{}")), rank=2) as bad,
    ):
        assert [*read_recorders([good, bad, Without()], GENEROUS_S)] == [1]
    assert read_recorders([], GENEROUS_S) == {}
