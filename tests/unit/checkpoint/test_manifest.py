"""The manifest: what was written is read, and nothing else is."""

import json
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws

from gpuops.checkpoint.digest import digest_root
from gpuops.checkpoint.manifest import (
    MANIFEST_BYTES_MAX,
    SCHEMA,
    Manifest,
    ShardRecord,
    encode_manifest,
    format_utc,
    parse_manifest,
    record_from_json,
    record_to_json,
)
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Digest,
    Shard,
    StateId,
)

SOURCE = "/ckpt/step/manifest.json"


def record(rank, world, nbytes=100):
    table = blake3(f"{rank} {nbytes}".encode()).digest(8 * -(-nbytes // CHUNK_BYTES))
    digest = Digest(nbytes, table, digest_root(nbytes, table))
    return ShardRecord(Shard(rank, world), f"{rank:064x}", digest)


def manifest(world=2, **changes):
    values = {
        "state": StateId(3, 1200),
        "world": world,
        "shards": tuple(record(rank, world) for rank in range(world)),
        "created": "2026-02-28T23:59:59Z",
        "version": "0.1.0",
        "generation": 4,
        "job": "train [7], {x}: 'größe'",
    }
    return Manifest(**{**values, **changes})


def bound(values):
    """Return a file of *values* with a digest that is right, as an enemy would make it."""
    body = json.dumps(values)[1:].encode()
    return b'{"digest": "' + blake3(body).hexdigest().encode() + b'",\n' + body


def values_of(content):
    values = json.loads(content)
    del values["digest"]
    return values


@given(
    epoch=st.integers(0, 99_999),
    step=st.integers(0, 10**12 - 1),
    sizes=st.lists(st.integers(1, 4 * CHUNK_BYTES), min_size=1, max_size=5),
    now_us=st.integers(0, 4 * 10**15),
    job=st.text(max_size=256).filter(str.isprintable),
    generation=st.integers(0, 10**9),
)
def test_what_was_written_is_read(epoch, step, sizes, now_us, job, generation):
    made = manifest(
        len(sizes),
        state=StateId(epoch, step),
        shards=tuple(record(rank, len(sizes), nbytes) for rank, nbytes in enumerate(sizes)),
        created=format_utc(now_us),
        job=job,
        generation=generation,
    )

    assert parse_manifest(encode_manifest(made), SOURCE) == made
    assert made.created_s == now_us // 10**6
    assert made.nbytes == sum(sizes)


def test_a_person_can_read_it():
    lines = encode_manifest(manifest()).decode().splitlines()

    assert lines[1] == f'"schema": "{SCHEMA}",'
    assert '"state": {"epoch": 3, "step": 1200},' in lines
    assert sum(line.startswith('"shard-0000') for line in lines) == 2


@given(data=st.data())
def test_no_flipped_bit_is_overlooked(data):
    content = bytearray(encode_manifest(manifest()))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8

    # A digit of the version that turned into a greater one is told as what it looks like.
    with pytest.raises(CheckpointError) as raised:
        parse_manifest(bytes(content), SOURCE)
    assert SOURCE in str(raised.value)


@given(data=st.data())
def test_no_cut_and_no_tail_is_overlooked(data):
    content = encode_manifest(manifest())
    end = data.draw(st.integers(0, len(content) - 1))

    with pytest.raises(CorruptError):
        parse_manifest(content[:end], SOURCE)
    with pytest.raises(CorruptError):
        parse_manifest(content + data.draw(st.binary(min_size=1, max_size=4)), SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step": 1200', b'"step": 1201'),
        (b'"generation": 4', b'"generation": 40'),
        (b'"nbytes": 100', b'"nbytes": 101'),
        (b"\n", b"\r\n"),
        (b": ", b":  "),
    ],
)
def test_an_edit_by_hand_is_told_as_one(old, new):
    content = encode_manifest(manifest())
    assert old in content

    with pytest.raises(CorruptError, match="edited or damaged after it was written"):
        parse_manifest(content.replace(old, new, 1), SOURCE)


def test_one_formatted_anew_is_not_taken_either():
    values = json.loads(encode_manifest(manifest()))

    with pytest.raises(CorruptError, match="edited"):
        parse_manifest(json.dumps(values, indent=2).encode(), SOURCE)


def test_a_later_version_is_named_whatever_else_it_holds():
    for content in (
        b'{"schema": "gpuops.checkpoint/2", "new": {"things": [1, 2]}}',
        encode_manifest(manifest()).replace(b"checkpoint/1", b"checkpoint/12"),
    ):
        with pytest.raises(CheckpointError, match=r"has version (2|12) .* reads 1") as raised:
            parse_manifest(content, SOURCE)
        assert not isinstance(raised.value, CorruptError)


@pytest.mark.parametrize(
    "schema",
    ["gpuops.checkpoint/0", "gpuops.checkpoint/-2", "gpuops.checkpoint/2x", "other/2", "", 2, None],
)
def test_another_schema_is_no_later_version(schema):
    with pytest.raises(CorruptError, match="its schema is"):
        parse_manifest(json.dumps({"schema": schema}).encode(), SOURCE)


def test_a_schema_of_many_digits_costs_nothing():
    with pytest.raises(CorruptError):
        parse_manifest(b'{"schema": "gpuops.checkpoint/' + b"9" * 100_000 + b'"}', SOURCE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe{}",
        b'{"schema": NaN}',
        b'{"schema": ' + b"9" * 10_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"a": 1, "a": 2}',
        b" " * (MANIFEST_BYTES_MAX + 1),
    ],
    ids=range(13),
)
def test_what_is_no_manifest_is_refused_within_bounds(content):
    with pytest.raises(CorruptError, match="is not a checkpoint manifest"):
        parse_manifest(content, SOURCE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = [
    ("schema",),
    ("state",),
    ("state", "epoch"),
    ("state", "step"),
    ("world",),
    ("created",),
    ("version",),
    ("generation",),
    ("job",),
    ("shards",),
    *(
        ("shards", "shard-00001-of-00002.safetensors", *rest)
        for rest in [(), ("nbytes",), ("layout",), ("root",), ("table",)]
    ),
]


@settings(max_examples=draws(400))
@given(path=st.sampled_from(PATHS), value=JSON)
def test_no_other_type_or_value_gets_through(path, value):
    """Each place holds something else, and the file's own digest is right all the same."""
    values = values_of(encode_manifest(manifest()))
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    was, inner[path[-1]] = inner[path[-1]], value

    try:
        read = parse_manifest(bound(values), SOURCE)
    except CheckpointError:
        return
    # What does get through is of the type and the bounds of what it stands for.
    assert type(value) is type(was)
    assert encode_manifest(read)


@pytest.mark.parametrize("name", ["schema", "state", "world", "created", "shards", "job", "more"])
def test_a_member_too_few_or_too_many_is_refused(name):
    values = values_of(encode_manifest(manifest()))
    if name in values:
        del values[name]
    else:
        values[name] = 1

    with pytest.raises(CorruptError):
        parse_manifest(bound(values), SOURCE)


@pytest.mark.parametrize(
    "file",
    [
        "shard-00002-of-00002.safetensors",
        "shard-00000-of-00000.safetensors",
        "shard-0001-of-00002.safetensors",
        "shard-00001-of-000002.safetensors",
        "../shard-00001-of-00002.safetensors",
        "/etc/passwd",
        "shard-00001-of-00002.safetensors\n",
        "shard-\u0660\u0660\u0660\u0660\u0661-of-00002.safetensors",
        "",
    ],
)
def test_no_other_file_is_named(file):
    values = values_of(encode_manifest(manifest()))
    values["shards"][file] = values["shards"].pop("shard-00001-of-00002.safetensors")

    with pytest.raises(CorruptError):
        parse_manifest(bound(values), SOURCE)


def test_a_shard_too_few_or_too_many_is_refused():
    for changes in (
        {"shards": (record(0, 2), record(1, 2), record(2, 3))},
        {"shards": (record(0, 2),)},
        {"shards": (record(1, 2), record(0, 2))},
        {"shards": (record(0, 2), record(0, 2))},
        {"shards": (record(0, 2), record(1, 3))},
    ):
        with pytest.raises(ValueError, match="shards are not those"):
            manifest(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"created": "2026-02-30T00:00:00Z"},
        {"created": "2026-2-3T00:00:00Z"},
        {"created": "2026-02-03T00:00:00Z\n"},
        {"created": "\u0662026-02-03T00:00:00Z"},
        {"job": "x" * 257},
        {"job": "a\x1b[2J"},
        {"version": "1\n2"},
        {"generation": -1},
        {"generation": 10**9 + 1},
    ],
)
def test_values_out_of_bounds_are_refused(changes):
    with pytest.raises(ValueError, match=r".+"):
        manifest(**changes)


def test_a_digest_that_contradicts_itself_is_refused():
    good = record(0, 1, nbytes=CHUNK_BYTES + 1).digest
    for digest in (
        replace(good, nbytes=CHUNK_BYTES),
        replace(good, nbytes=0),
        replace(good, nbytes=2**44 + 1),
        replace(good, table=good.table[:-8]),
        replace(good, table=good.table[8:] + good.table[:8]),
        replace(good, root="0" * 64),
        replace(good, root=good.root.upper()),
    ):
        with pytest.raises(ValueError, match=r".+"):
            ShardRecord(Shard(0, 1), "0" * 64, digest)


def test_a_record_of_one_shard_is_read_as_it_was_written():
    made = record(1, 2)

    assert record_from_json(made.shard.file_name, record_to_json(made)) == made
    for bad in (
        None,
        [],
        {},
        {**record_to_json(made), "more": 1},
        {**record_to_json(made), "table": "!"},
    ):
        with pytest.raises(ValueError, match=r".+"):
            record_from_json(made.shard.file_name, bad)


def test_which_shard_is_asked_for_by_world():
    made = manifest(3)

    assert made.record(Shard(2, 3)) == record(2, 3)
    with pytest.raises(CheckpointError, match="by 3 ranks, not by 4"):
        made.record(Shard(2, 4))


def test_a_manifest_that_no_reader_would_accept_is_not_written():
    nbytes = 2**40
    table = bytes(8 * (nbytes // CHUNK_BYTES))
    big = ShardRecord(Shard(0, 1), "0" * 64, Digest(nbytes, table, digest_root(nbytes, table)))
    shards = tuple(replace(big, shard=Shard(rank, 100)) for rank in range(100))

    with pytest.raises(CheckpointError, match="the limit is"):
        encode_manifest(manifest(100, shards=shards))
