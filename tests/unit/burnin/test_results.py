"""What programs print is read back, and what is no record is counted and never believed."""

import json
import math

import pytest

from gpuops.burnin.measurement import Measurement
from gpuops.burnin.results import (
    RECORDS_MAX,
    NotMeasured,
    ProgramEnd,
    ProgramNote,
    ProgramOutput,
    ResultDigest,
    SoftwareVersions,
    WrongResult,
    parse_line,
    shown,
    to_line,
)
from gpuops.model import Entity, EntityKind, UnknownReason

GPU = Entity(EntityKind.GPU, "GPU-1")
ABOUT = {"test": "gemm", "part": GPU}
RECORDS = (
    Measurement(**ABOUT, parameters={"dtype": "bf16"}, values=(1.0, 2.0), unit="TFLOP/s"),
    WrongResult(**ABOUT, parameters="dtype=bf16", message="3 elements"),
    ResultDigest(**ABOUT, parameters="dtype=bf16", model="H100", digest="ab"),
    NotMeasured(**ABOUT, reason=UnknownReason.NOT_SUPPORTED, message="no bf16"),
    ProgramNote(**ABOUT, message="80 GiB"),
    SoftwareVersions(versions={"torch": "2.13.0"}),
    ProgramEnd(test="gemm"),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_survives_its_line(record):
    assert parse_line(to_line(record).encode()) == record


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"record": "end"}',
        b'{"record": "surprise", "test": "gemm"}',
        b'{"record": ["end"]}',
        b'{"record": "measurement", "test": "gemm"}',
        b"[" * 100_000,
        to_line(RECORDS[1])[:-20].encode(),
    ],
)
def test_what_is_no_record_is_refused_and_counted(line):
    output = ProgramOutput(GPU)

    assert output.add_line(line) is None
    assert (output.records, output.garbage) == ([], 1)


def test_an_empty_line_is_neither_a_record_nor_a_fault():
    output = ProgramOutput(GPU)
    output.add_line(b" \n")

    assert (output.records, output.garbage) == ([], 0)


def test_nan_is_read_so_that_the_judge_can_say_that_nothing_was_measured():
    line = json.dumps({"record": "measurement", **RECORDS[0].to_json(), "values": [math.nan]})

    assert not parse_line(line.encode()).is_measured


def test_a_program_that_prints_without_end_fills_no_memory():
    output, line = ProgramOutput(GPU), to_line(RECORDS[6]).encode()
    for _ in range(RECORDS_MAX + 5):
        output.add_line(line)

    assert len(output.records) == RECORDS_MAX
    assert output.garbage == 5


def test_text_of_a_program_is_one_printable_line():
    assert shown("a\x1b[31m\n b" + "x" * 1000).startswith("a�[31m bx")
    assert len(shown("x" * 1000)) == 500
