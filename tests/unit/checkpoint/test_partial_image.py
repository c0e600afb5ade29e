"""Of an image only what is asked for is read, in whole pieces, from the first intact holder."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import PartialImage
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError

CONTENT = random.Random(5).randbytes(4_000_037) * 9  # two chunks and the beginning of a third
SIZE = len(CONTENT)


class Holder:
    """Serves CONTENT, whole chunks if *is_coarse*; raises *error* where there is one."""

    def __init__(self, *, error=None, is_coarse=False):
        self.error, self.is_coarse, self.reads = error, is_coarse, []

    def read(self, ranges, put):
        for begin, end in ranges:
            self.reads.append((begin, end))
            if self.error:
                raise self.error
            at = begin - begin % CHUNK_BYTES if self.is_coarse else begin
            put(at, memoryview(CONTENT)[at : at + CHUNK_BYTES if self.is_coarse else end])


def image_of(*holders):
    return PartialImage("an image", SharedBuffer.create("test", SIZE), holders)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=4),
        max_size=4,
    ),
    is_coarse=st.booleans(),
)
def test_each_range_is_there_and_no_piece_is_read_twice(asked, is_coarse):
    holder = Holder(is_coarse=is_coarse)
    image = image_of(holder)

    for ranges in asked:
        image.ensure(map(tuple, ranges))
        for begin, end in ranges:
            assert image.view[begin:end] == CONTENT[begin:end]

    pieces = [n for a, b in holder.reads for n in range(a // PIECE_BYTES, -(-b // PIECE_BYTES))]
    wanted = {
        number
        for ranges in asked
        for begin, end in ranges
        if begin < end
        for number in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES))
    }
    assert len(pieces) == len(set(pieces))
    assert is_coarse or set(pieces) == wanted
    assert all(a // CHUNK_BYTES == (b - 1) // CHUNK_BYTES for a, b in holder.reads)
    image.close()


def test_the_next_holder_serves_what_is_damaged_or_unreachable():
    bad = Holder(error=CorruptError("flipped")), Holder(error=CheckpointError("gone"))
    good = Holder()
    image = image_of(*bad, good)

    image.ensure([(10, 20)])

    assert image.view[10:20] == CONTENT[10:20]
    assert [len(holder.reads) for holder in (*bad, good)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([CorruptError("flipped"), CheckpointError("gone")], CorruptError),
        ([CheckpointError("gone")], CheckpointError),
    ],
)
def test_where_no_holder_has_it_the_error_names_each_reason(errors, kind):
    image = image_of(*(Holder(error=error) for error in errors))

    with pytest.raises(kind) as refused:
        image.ensure([(CHUNK_BYTES, CHUNK_BYTES + 1)])

    assert type(refused.value) is kind
    assert all(str(error) in str(refused.value) for error in errors)
    assert not any(image.view[CHUNK_BYTES : CHUNK_BYTES + PIECE_BYTES])


def test_a_range_beyond_the_image_is_refused():
    with pytest.raises(CorruptError, match="has no bytes"):
        image_of(Holder()).ensure([(SIZE - 1, SIZE + 1)])
