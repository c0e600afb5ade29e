"""The layout of an image: a safetensors file to the byte, read back only when it is whole."""

import json
import struct
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws

from gpuops.checkpoint.image import (
    ALIGN_BYTES,
    HEADER_BYTES_MAX,
    ITEMSIZE_BYTES,
    METADATA_PREFIX,
    NAME_BYTES_MAX,
    SMALL_TENSOR_BYTES,
    ImageLayout,
    TensorSpec,
    metadata_blob_name,
    plan_image,
    read_layout,
    read_metadata_blob,
    write_metadata_blob,
)
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError, CorruptError, Shard

SHARD = Shard(1, 4)


def spec(name="w", dtype="F32", shape=(2, 3), offsets=None, global_shape=None, nbytes=None):
    size = ITEMSIZE_BYTES.get(dtype, 1)
    for dim in shape:
        size *= dim
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        nbytes=size if nbytes is None else nbytes,
        offsets=tuple([0] * len(shape) if offsets is None else offsets),
        global_shape=tuple(shape if global_shape is None else global_shape),
    )


def image_of(layout):
    return layout.header + bytes(layout.nbytes - len(layout.header))


def written(tree, data=b"", begin=ALIGN_BYTES):
    """An image whose header is *tree*, JSON text or what makes JSON."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", begin - 8) + text.ljust(begin - 8) + data


def good_tree():
    layout = plan_image(SHARD, [spec("a", "F64", (2,)), spec("b", "U8", (3,), (1,), (9,))], 4)
    return json.loads(layout.header[8:]), bytes(layout.nbytes - len(layout.header))


dims = st.integers(0, 6)
free_names = st.text(st.characters(codec="utf-8"), max_size=30).filter(
    lambda name: name != "__metadata__" and not name.startswith(METADATA_PREFIX)
)


@st.composite
def specs_of_a_shard(draw):
    names = draw(st.lists(free_names, unique=True))
    made = []
    for name in names:
        shape = draw(st.lists(dims, max_size=4))
        offsets = [draw(dims) for _ in shape]
        whole = [s + o + draw(dims) for s, o in zip(shape, offsets, strict=True)]
        dtype = draw(st.sampled_from(sorted(ITEMSIZE_BYTES)))
        made.append(spec(name, dtype, shape, offsets, whole))
    return made


@settings(deadline=None)
@given(specs_of_a_shard(), st.integers(0, 9000))
def test_every_tensor_has_its_place_and_there_is_nothing_else(specs, capacity):
    layout = plan_image(SHARD, specs, capacity)
    parts = sorted([*layout.tensors, layout.metadata_blob], key=lambda part: (part.begin, part.end))

    assert sorted(part.spec.name for part in layout.tensors) == sorted(s.name for s in specs)
    assert {part.spec.name: part.spec for part in layout.tensors} == {s.name: s for s in specs}
    assert len(layout.header) % ALIGN_BYTES == 0
    assert layout.header[8:9] == b"{"
    assert [part.begin for part in parts] == [len(layout.header), *(p.end for p in parts[:-1])]
    assert parts[-1].end == layout.nbytes
    for part in parts:
        assert part.end - part.begin == part.spec.nbytes
        assert part.begin % ITEMSIZE_BYTES[part.spec.dtype] == 0
    assert layout.metadata_capacity_bytes == capacity


@settings(deadline=None)
@given(specs_of_a_shard(), st.randoms())
def test_an_image_tells_its_own_layout_whatever_the_order_of_the_tensors(specs, random):
    layout = plan_image(SHARD, specs, 10)
    random.shuffle(specs)

    assert plan_image(SHARD, specs, 10) == layout
    assert read_layout(image_of(layout)) == layout
    assert read_layout(memoryview(layout.header), nbytes=layout.nbytes) == layout


def test_the_wider_item_comes_first_and_what_is_copied_together_lies_together():
    layout = plan_image(
        SHARD,
        [spec("b", "U8"), spec("z", "C64"), spec("a", "BOOL"), spec("m", "BF16"), spec("l", "I64")],
        0,
    )

    assert [part.spec.name for part in layout.tensors] == ["z", "l", "m", "a", "b"]
    small = [spec("c"), spec("d", "I32"), spec("e")]
    large = spec("a", shape=(SMALL_TENSOR_BYTES // 4,))
    layout = plan_image(SHARD, [large, spec("b", shape=()), *small], 0)
    assert [part.spec.name for part in layout.tensors] == ["b", "c", "e", "d", "a"]


def test_the_hash_names_the_structure():
    base = plan_image(SHARD, [spec()], 10)
    others = [
        plan_image(SHARD, [spec()], 11),
        plan_image(Shard(2, 4), [spec()], 10),
        plan_image(Shard(1, 5), [spec()], 10),
        plan_image(SHARD, [spec("v")], 10),
        plan_image(SHARD, [spec(dtype="I32")], 10),
        plan_image(SHARD, [spec(shape=(3, 2))], 10),
        plan_image(SHARD, [spec(offsets=(1, 0), global_shape=(3, 3))], 10),
        plan_image(SHARD, [spec(global_shape=(4, 3))], 10),
    ]

    assert len({base.header_hash, *(other.header_hash for other in others)}) == len(others) + 1
    assert plan_image(SHARD, [spec()], 10).header_hash == base.header_hash
    assert len(base.header_hash) == 64


def test_the_header_has_what_torch_needs_for_each_key():
    layout = plan_image(
        SHARD, [spec("w", offsets=(4, 0), global_shape=(8, 3)), spec("step", "I64", ())], 8
    )
    metadata = json.loads(layout.header[8:])["__metadata__"]

    assert metadata["format"] == "pt"
    assert metadata["DCP_VERSION"] == "1.0"
    assert json.loads(metadata["DCP_SHARDING_INFO"]) == {
        "w": {"saved_offsets": [4, 0]},
        "step": {"saved_offsets": []},
        metadata_blob_name(1): {"saved_offsets": [0]},
    }
    assert json.loads(metadata["gpuops"]) == {
        "rank": 1,
        "world": 4,
        "format": 1,
        "shapes": {"w": [8, 3]},
    }


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([spec("w"), spec("v"), spec("w")], "two tensors have the name 'w'"),
        ([spec("__metadata__")], "tensor name '__metadata__' is reserved"),
        ([spec(metadata_blob_name(1))], "is reserved"),
        ([spec(metadata_blob_name(2))], "is reserved"),
        ([spec("\ud800")], "is not Unicode text"),
        ([spec("é" * NAME_BYTES_MAX)], f"has {2 * NAME_BYTES_MAX} bytes"),
        ([spec(dtype="C128")], "the dtype 'C128', which images do not support"),
        ([spec(nbytes=25)], r"25 bytes are not F32 of shape \(2, 3\)"),
        ([spec(nbytes=-24)], "-24 bytes are not"),
        ([spec(shape=(-2, -3))], "-2 items from 0 on exceed a dimension of -2"),
        ([spec(offsets=(1, 0))], "2 items from 1 on exceed a dimension of 2"),
        ([spec(offsets=(-1, 0))], "2 items from -1 on"),
        ([spec(offsets=(0,))], "differ in length"),
        ([spec(global_shape=(2, 3, 1))], "differ in length"),
        ([spec(shape=[1] * 65)], "are too long"),
        ([spec(shape=(0, 2**63))], "exceed a dimension of 9223372036854775808"),
        ([spec("a", "U8", (IMAGE_BYTES_MAX,))], "an image has at most 17592186044416"),
        ([spec(dtype="F64", shape=(2**60, 2**60))], "an image has at most"),
    ],
)
def test_what_no_image_can_hold_is_refused_by_name(specs, says):
    with pytest.raises(CheckpointError, match=says):
        plan_image(SHARD, specs, 0)


@pytest.mark.parametrize("capacity", [-1, IMAGE_BYTES_MAX + 1])
def test_a_capacity_that_cannot_be_is_refused(capacity):
    with pytest.raises(CheckpointError, match=f"a metadata blob cannot have {capacity} bytes"):
        plan_image(SHARD, [], capacity)


def test_a_header_that_the_library_would_not_read_is_refused_when_planned():
    long = [spec(f"{i:06d}" + "x" * (NAME_BYTES_MAX - 6), "U8", (1,)) for i in range(13_000)]
    assert 2 * 13_000 * NAME_BYTES_MAX > HEADER_BYTES_MAX
    with pytest.raises(CheckpointError, match=r"a header of 10\d{7} bytes for 13001 tensors"):
        plan_image(SHARD, long, 0)

    with pytest.raises(CheckpointError, match="brackets"):
        plan_image(SHARD, [spec(f"{i}" + "[" * 4000, "U8", (1,)) for i in range(700)], 0)


def test_20_000_tensors_are_planned_and_read_in_a_moment():
    specs = [spec(f"model.layers.{i}.experts.w", "BF16", (4, 4)) for i in range(20_000)]
    began_s = time.process_time()
    layout = plan_image(SHARD, specs, 2**20)
    planned_s = time.process_time() - began_s

    assert read_layout(layout.header, nbytes=layout.nbytes) == layout
    assert planned_s < 2
    assert time.process_time() - began_s < 5


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_the_extra_comes_back_and_the_rest_of_it_is_zero(data):
    layout = plan_image(SHARD, [spec("w", "U8", (5,))], 300)
    image = bytearray(b"\xff" * layout.nbytes)
    view = memoryview(image)
    write_metadata_blob(view, layout, b"longer than what comes after it" * 9)
    write_metadata_blob(view, layout, data)

    assert read_metadata_blob(view, layout) == data
    assert image[layout.metadata_blob.begin : layout.metadata_blob.end] == (
        struct.pack("<Q", len(data)) + data.ljust(300, b"\0")
    )
    outside = image[: layout.metadata_blob.begin] + image[layout.metadata_blob.end :]
    assert set(outside) == {0xFF}


def test_extras_that_do_not_fit_are_refused_before_a_byte_is_written():
    layout = plan_image(SHARD, [], 10)
    image = bytearray(layout.nbytes)

    with pytest.raises(CheckpointError, match="has 11 bytes of metadata; the capacity is 10"):
        write_metadata_blob(memoryview(image), layout, b"x" * 11)
    assert not any(image)
    write_metadata_blob(memoryview(image), layout, b"x" * 10)


@pytest.mark.parametrize("length", [11, 2**63, 2**64 - 1])
def test_a_metadata_blob_that_says_it_is_too_long_is_corrupt(length):
    layout = plan_image(SHARD, [], 10)
    image = bytearray(layout.nbytes)
    image[layout.metadata_blob.begin : layout.metadata_blob.begin + 8] = struct.pack("<Q", length)

    with pytest.raises(CorruptError, match=f"declares {length} bytes of 10"):
        read_metadata_blob(memoryview(image), layout)
    with pytest.raises(CorruptError, match="the image ends at"):
        read_metadata_blob(memoryview(image)[:-1], layout)


def test_a_tree_that_is_not_tampered_with_is_read():
    tree, data = good_tree()

    assert isinstance(read_layout(written(tree, data)), ImageLayout)


def set_at(tree, path, value):
    *parents, last = path
    for key in parents:
        tree = tree[key]
    if value is ...:
        del tree[last]
    else:
        tree[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("a",), ..., "other tensors"),
        (("c",), {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "other tensors"),
        (("a",), 3, "not an object"),
        (("a",), [], "not an object"),
        (("a", "dtype"), "F65", "dtype 'F65'"),
        (("a", "dtype"), 7, "incomplete"),
        (("a", "dtype"), ..., "incomplete"),
        (("a", "dtype"), "F32", "16 bytes are not F32"),
        (("a", "shape"), ..., "not a list of whole numbers"),
        (("a", "shape"), [2.0], "not a list of whole numbers"),
        (("a", "shape"), [True, 2], "not a list of whole numbers"),
        (("a", "shape"), [-2], "not a list of whole numbers"),
        (("a", "shape"), [float("nan")], "NaN is not a valid number"),
        (("a", "shape"), [10**400], "not a list of whole numbers"),
        (("a", "shape"), ["2"], "not a list of whole numbers"),
        (("a", "shape"), {"0": 2}, "not a list of whole numbers"),
        (("a", "shape"), [1] * 65, "not a list of whole numbers"),
        (("a", "shape"), [2, 1], "differ in length"),
        (("a", "shape"), [2**62, 2**62], "differ in length"),
        (("a", "data_offsets"), [0, 16, 16], "incomplete"),
        (("a", "data_offsets"), [16, 0], "-16 bytes are not"),
        (("a", "data_offsets"), [8, 24], "begins at|ends at"),
        (("a", "data_offsets"), [4, 20], "not aligned"),
        (("a", "data_offsets"), [2**62, 2**62 + 16], "begins at|ends at"),
        (("b", "data_offsets"), [0, 3], "begins at"),
        (("__metadata__",), ..., "metadata is not an object"),
        (("__metadata__",), "text", "metadata is not an object"),
        (("__metadata__", "format"), 1, "a value that is not text"),
        (("__metadata__", "gpuops"), ..., "gpuops is not text"),
        (("__metadata__", "gpuops"), "[1]", "gpuops is not an object"),
        (("__metadata__", "gpuops"), "{", "cannot be read"),
        (
            ("__metadata__", "gpuops"),
            '{"format": 3}',
            "has the format 3, this gpuops reads 1 and 2",
        ),
        (("__metadata__", "gpuops"), '{"format": 1, "rank": 1.0, "world": 4}', "of rank float"),
        (("__metadata__", "gpuops"), '{"format": 1, "rank": true, "world": 4}', "of rank bool"),
        (("__metadata__", "gpuops"), '{"format": 1, "rank": 4, "world": 4}', "no world of 4"),
        (("__metadata__", "gpuops"), '{"format": 1, "rank": 1, "world": 4}', "shapes"),
        (
            ("__metadata__", "gpuops"),
            '{"format": 1, "rank": 2, "world": 4, "shapes": {"b": [9]}}',
            "has no byte tensor __gpuops_extra__/rank00002",
        ),
        (
            ("__metadata__", "gpuops"),
            '{"format": 1, "rank": 1, "world": 4, "shapes": {"q": [1]}}',
            "other tensors",
        ),
        (
            ("__metadata__", "gpuops"),
            '{"format": 1, "rank": 1, "world": 4, "shapes": {"b": [3]}}',
            "3 items from 1 on",
        ),
        (("__metadata__", "DCP_SHARDING_INFO"), "null", "not an object"),
        (("__metadata__", "DCP_SHARDING_INFO"), "{}", "other tensors"),
        (("__metadata__", "DCP_SHARDING_INFO"), '{"a": 1, "a": 1}', "twice"),
    ],
)
def test_a_header_that_is_tampered_with_is_corrupt(path, value, says):
    tree, data = good_tree()
    set_at(tree, path, value)

    with pytest.raises(CorruptError, match=says):
        read_layout(written(tree, data))


def test_a_metadata_blob_of_another_kind_is_corrupt():
    tree, data = good_tree()
    tree[metadata_blob_name(1)]["dtype"] = "BOOL"

    with pytest.raises(CorruptError, match="no byte tensor"):
        read_layout(written(tree, data))


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"", "header of 0 bytes"),
        (b"\x10", "header of 16 bytes"),
        (struct.pack("<Q", 2**64 - 1), "header of 18446744073709551615 bytes"),
        (struct.pack("<Q", HEADER_BYTES_MAX + 1) + b"{}", "declares a header of"),
        (struct.pack("<Q", 4088) + b"{}", "declares a header of 4088"),
        (struct.pack("<Q", 2) + b"{}", "begin at 10, not at a page"),
        (written(b" {}"), "does not begin with a brace"),
        (written(b"[]"), "does not begin with a brace"),
        (written(b'{"a":1,"a":2}'), "a key occurs twice"),
        (written(b'{"a":{"b":1,"\\u0062":2}}'), "a key occurs twice"),
        (written(b'{"a":NaN}'), "NaN is not a valid number"),
        (written(b'{"a":-Infinity}'), "-Infinity is not a valid number"),
        (written(b'{"a":' + b"9" * 4060 + b"}"), "metadata is not an object"),
        (written(b'{"a":' + b"9" * 8000 + b"}", begin=8192), "cannot be read"),
        (written(b'{"a":"\xff"}'), "not UTF-8"),
        (written('{"a":1}'.encode("utf-16-le")), "cannot be read"),
        (written(b'{"a":1} {'), "cannot be read"),
        (written(b'{"a":' * 1500, begin=8192), "cannot be read|nested too deeply"),
        (written(b'{"a":' + b"[" * 100_000, begin=102_400), "nested too deeply"),
    ],
)
def test_bytes_that_are_no_image_are_corrupt(image, says):
    with pytest.raises(CorruptError, match=says):
        read_layout(image)


def test_a_name_of_half_a_character_is_corrupt():
    tree, data = good_tree()
    text = json.dumps(tree).replace('"a"', '"\\ud800"').replace('\\"a\\"', '\\"\\\\ud800\\"')

    with pytest.raises(CorruptError, match="is not Unicode text"):
        read_layout(written(text.encode(), data))


def test_an_image_that_is_cut_short_or_too_long_is_corrupt():
    image = image_of(plan_image(SHARD, [spec()], 10))

    for wrong in (image[:-1], image + b"\0"):
        with pytest.raises(CorruptError, match="its header describes"):
            read_layout(wrong)
    with pytest.raises(CorruptError, match="its header describes"):
        read_layout(image[:4096], nbytes=len(image) + 1)


@settings(max_examples=draws(300))
@given(st.data())
def test_a_header_with_some_bytes_changed_is_read_or_corrupt(data):
    layout = plan_image(SHARD, [spec("a", "F64", (2,)), spec("b", "U8", (3,), (1,), (9,))], 4)
    image = bytearray(image_of(layout))
    length = len(layout.header.rstrip(b" "))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, length - 1))
        change = data.draw(st.sampled_from(["flip", "set", "drop", "repeat"]))
        if change == "flip":
            image[at] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "set":
            image[at] = data.draw(st.sampled_from(b'{}[]",:0123456789eE.-\\ \x00'))
        elif change == "drop":
            del image[at]
        else:
            image[at:at] = image[at : at + data.draw(st.integers(1, 40))]

    try:
        found = read_layout(bytes(image))
    except CorruptError:
        return
    assert found.nbytes == len(image)
    assert all(part.end <= len(image) for part in found.tensors)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63 - 2, 2**63 + 2)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths_in(tree, here=()):
    for key, value in tree.items():
        yield (*here, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*here, key))


@settings(max_examples=draws(300))
@given(st.data())
def test_a_header_with_another_value_in_one_place_is_read_or_corrupt(data):
    tree, body = good_tree()
    inner = data.draw(st.sampled_from([None, "gpuops", "DCP_SHARDING_INFO"]))
    aim = tree if inner is None else json.loads(tree["__metadata__"][inner])
    set_at(aim, data.draw(st.sampled_from(sorted(paths_in(aim)))), data.draw(json_values))
    if inner is not None:
        tree["__metadata__"][inner] = json.dumps(aim)

    try:
        found = read_layout(written(tree, body))
    except CorruptError:
        return
    assert found.nbytes == ALIGN_BYTES + len(body)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_any_bytes_at_all_are_corrupt(data):
    with pytest.raises(CorruptError):
        read_layout(data)


@pytest.mark.parametrize(
    "bomb",
    [
        b'{"a":[' + b"[]," * 4_000_000 + b"[]]}",
        b'{"a":[' + b"0," * 9_000_000 + b"0]}",
        b'{"a":[' + b"{}," * 4_000_000 + b"{}]}",
        b'{"__metadata__":{"gpuops":"[' + rb"\u005b\u005d\u002c" * 3_000_000 + b'[]]"}}',
    ],
    ids=["lists", "numbers", "mappings", "hidden"],
)
def test_a_header_that_would_fill_the_memory_is_refused_before_it_is_parsed(bomb):
    begin = -(-(8 + len(bomb)) // ALIGN_BYTES) * ALIGN_BYTES
    image = written(bomb, begin=begin)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="too many"):
            read_layout(image)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 5 * len(image)
