"""A console whose reader has gone takes what is written, and says so once."""

import io
import os

from gpuops.agent.status.console import lasting


def pipe():
    read, write = os.pipe()
    return read, io.TextIOWrapper(io.FileIO(write, "w"), encoding="utf-8")


def test_lines_go_where_the_stream_went():
    read, stream = pipe()
    errors = []
    lasting(stream, errors.append).write("one\n")

    assert os.read(read, 100) == b"one\n"
    assert errors == []
    os.close(read)
    stream.close()


def test_what_nobody_reads_is_dropped_and_said_once():
    read, stream = pipe()
    errors = []
    os.close(read)
    lost = lasting(stream, errors.append)
    for _ in range(3):
        lost.write("x" * 100_000 + "\n")

    assert [type(error) for error in errors] == [BrokenPipeError]
    stream.close()
