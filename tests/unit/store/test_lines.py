"""A spool line survives its way, and nothing else is taken for one."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stories import story

from gpuops.model import Event
from gpuops.store.spool import format as line_format
from gpuops.store.spool.format import (
    LINE_BYTES_MAX,
    LineEncoder,
    SpoolLineError,
    canonical_json,
    decode_line,
    encode_line,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def event(payload):
    return Event(
        id="01a1fa51-d523-777c-b8fe-ce320f93dce8",
        kind="tool.failed",
        t_us=5,
        node="n1",
        payload=payload,
    )


def source():
    return LineEncoder(node="n1", boot_id="b1", randomness=bytes)


def packed(fields):
    body = json.dumps(fields).encode()[1:]
    return b'{"crc":"%08x",%s\n' % (zlib.crc32(body), body)


def fields_of(line):
    return json.loads(encode_line(line))


@pytest.mark.parametrize("line", story(1), ids=lambda line: line.event.kind)
def test_a_line_comes_back_as_it_was(line):
    assert decode_line(encode_line(line)) == line


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_whatever_a_payload_holds_makes_a_line_that_is_read(payload):
    line = decode_line(source().encode(event(payload)))

    assert canonical_json(line.event.payload).isascii()
    assert set(map(str, line.event.payload)) is not None


def test_numbers_have_no_gaps_and_the_writer_has_a_name():
    numbering = source()

    lines = [decode_line(numbering.encode(event({}))) for _ in range(3)]

    assert [line.seq for line in lines] == [1, 2, 3]
    assert {line.origin for line in lines} == {"n1.000000000000"}


@pytest.mark.parametrize("node", ["", "-", "a b/../c", "ü" * 300, "n.domain"])
def test_any_node_name_makes_a_safe_origin(node):
    origin = LineEncoder(node=node, boot_id="b", randomness=bytes).origin

    assert "/" not in origin
    assert not origin.startswith((".", "-"))
    assert decode_line(LineEncoder(node=node, boot_id="b", randomness=bytes).encode(event({})))


def test_a_payload_that_is_too_long_keeps_its_last_lines():
    tail = [f"line {n} " + "x" * 1000 for n in range(2000)]

    raw = source().encode(event({"log_tail": tail, "what": "huge"}))
    payload = decode_line(raw).event.payload

    assert len(raw) <= LINE_BYTES_MAX
    assert payload["shortened"] is True
    assert payload["what"] == "huge"
    assert payload["log_tail"][-1].startswith("line 1999")


def test_a_payload_that_cannot_be_shortened_is_left_out():
    wide = {f"key {n}": "v" for n in range(100_000)}

    assert decode_line(source().encode(event(wide))).event.payload == {"shortened": True}


def test_secrets_and_odd_values_are_gone_from_a_line():
    payload = {"url": "postgresql://a:pw@h/d", "nul": "a\0b", "half": "\ud800", "inf": 1e999}

    assert decode_line(source().encode(event(payload))).event.payload == {
        "url": "postgresql://a:***@h/d",
        "nul": "a�b",
        "half": "?",
        "inf": "inf",
    }


@given(st.binary(max_size=200))
def test_noise_is_never_a_line(raw):
    with pytest.raises(SpoolLineError):
        decode_line(raw)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_damaged_byte_is_noticed(position, flip):
    raw = bytearray(encode_line(story(1)[0]).rstrip(b"\n"))
    raw[position % len(raw)] ^= flip

    with pytest.raises(SpoolLineError):
        decode_line(bytes(raw))


def changed(**changes):
    fields = fields_of(story(1)[3])
    del fields["crc"]
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = fields
        for name in parents:
            place = place[name]
        place[last] = value
    return packed(fields)


def test_a_line_that_waited_while_gpuops_was_upgraded_is_read(monkeypatch):
    line = source().encode(event({"a": 1}))
    monkeypatch.setattr(line_format, "VERSION", line_format.VERSION + 1)

    assert decode_line(line).event == event({"a": 1})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(v=2), "line version 2"),
        (changed(seq=0), "seq"),
        (changed(seq=True), "seq"),
        (changed(seq=2**60), "seq"),
        (changed(origin="../../etc"), "origin"),
        (changed(boot_id="a\nb"), "boot_id"),
        (changed(event=[]), "no event"),
        (changed(event__id="1"), "id"),
        (changed(event__id="01A1FA51-D523-777C-B8FE-CE320F93DCE8"), "id"),
        (changed(event__kind="x"), "kind"),
        (changed(event__t_us=-1), "t_us"),
        (changed(event__t_us=2**63), "t_us"),
        (changed(event__t_us=1.5), "t_us"),
        (changed(event__severity=7), "not an event"),
        (changed(event__node="a b"), "node"),
        (changed(event__run_id="a/b"), "run_id"),
        (changed(event__attempt=-1), "attempt"),
        (changed(event__payload=[]), "not an object"),
        (changed(event__payload={"a": "\0"}), "NUL"),
        (changed(event__payload={"a\0": 1}), "NUL"),
        (changed(event__payload={"a": "\ud800"}), "not Unicode"),
        (changed(event__payload={"a": float("nan")}), "NaN"),
        (changed(event__payload={"a": float("inf")}), "Infinity"),
        (packed([1]), "not JSON"),
    ],
)
def test_a_hostile_line_is_refused_with_its_reason(raw, words):
    with pytest.raises(SpoolLineError, match=words):
        decode_line(raw)


def body(text):
    return b'{"crc":"%08x",%s' % (zlib.crc32(text), text)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{}" * LINE_BYTES_MAX, "longer than"),
        (body(b'"a":' + b"[" * 100_000), "not JSON"),
        (body(b'"a":' + b"[" * 40 + b"]" * 40 + b"}"), "nested deeper"),
        (body(b'"a":1e999}'), "out of range"),
        (body(b'"a":' + b"9" * 5000 + b"}"), "not JSON"),
        (body(b'"a":"\xff"}'), "not JSON"),
    ],
)
def test_a_line_that_would_hurt_the_parser_is_refused(raw, words):
    with pytest.raises(SpoolLineError, match=words):
        decode_line(raw)


def test_a_backslash_before_u0000_is_text():
    raw = changed(event__payload={"a": "\\u0000"})

    assert decode_line(raw).event.payload == {"a": "\\u0000"}
