"""Any order, doubling, splitting or cutting of a spool's stream leaves the same rows."""

import itertools
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.draws import draws
from support.stories import dump, envelopes, story

from gpuops.host.clock import SystemClock
from gpuops.store.engine import memory_store, open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.spool.format import encode_line
from gpuops.store.spool.send import flush

SEEDS = st.integers(0, 5)


def rows_after(batches, uid=0):
    with memory_store() as store, store.begin() as connection:
        for now_us, batch in enumerate(batches):
            ingest(connection, envelopes(batch, uid=uid), now_us)
        return dump(connection)


@st.composite
def scrambled(draw):
    """Return a story, and the same as batches in another order with some lines doubled."""
    lines = story(draw(SEEDS), attempts=draw(st.integers(1, 3)), minutes=1)
    doubled = draw(st.lists(st.sampled_from(lines), max_size=10))
    order = draw(st.permutations([*lines, *doubled]))
    cuts = draw(st.lists(st.integers(0, len(order)), max_size=6).map(sorted))
    edges = [0, *cuts, len(order)]
    return lines, [order[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.timeout(400)
@settings(max_examples=draws(40))
@given(scrambled())
def test_order_doubling_and_splitting_leave_the_same_rows(case):
    lines, batches = case

    assert rows_after(batches) == rows_after([lines])


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("empty") / "store.db"
    with open_store(f"sqlite:///{path}", mode="write"):
        return path


@settings(max_examples=draws(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=SEEDS, cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3).map(sorted))
def test_a_spool_cut_anywhere_arrives_whole_in_the_end(seed, cuts, empty_store, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("cut")
    lines = story(seed, attempts=1, minutes=1)
    shutil.copy(empty_store, tmp_path / "store.db")
    url = f"sqlite:///{tmp_path}/store.db"
    streams = {}
    for line in lines:
        streams[line.origin] = streams.get(line.origin, b"") + encode_line(line)
    sent = 0
    for cut in [*cuts, 1.0]:
        for origin, data in streams.items():
            _arrived(tmp_path / "spool" / origin, data[: int(len(data) * cut)])
        sent += flush(tmp_path / "spool", url, cluster="c1", clock=SystemClock()).sent

    with open_store(url, mode="read") as store, store.begin() as connection:
        rows = dump(connection)
    assert sent == len(lines)
    assert rows == rows_after([lines], uid=os.getuid())


def _arrived(directory, data):
    """Write a segment as far as it has come, as a crashed writer leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "00000001.open").write_bytes(data)
