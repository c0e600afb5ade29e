"""Every board against a model of a dozen lines, over many histories."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.boards import etcd_boards, memory_boards, postgres_boards, tcp_boards
from support.draws import draws

KEYS = st.sampled_from(["control", "a/1", "a/2", "a/b/1", "b/1", "ab"])
PREFIXES = st.sampled_from(["", "a", "a/", "a/b", "b/", "zz"])
VALUES = st.binary(max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES),
    st.tuples(st.just("compare_and_set"), KEYS, VALUES, st.integers(0, 4)),
    st.tuples(st.just("heartbeat"), KEYS, VALUES, KEYS, st.integers(0, 4)),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("list"), PREFIXES),
    st.tuples(st.just("delete"), PREFIXES),
)


class Model:
    """A dictionary in order of arrival; answers leave the numbers of the order out."""

    def __init__(self):
        self.held = {}

    def get(self, key):
        return self.held.get(key, (b"", 0))

    def put(self, key, value):
        self.held[key] = (value, self.get(key)[1] + 1)

    def compare_and_set(self, key, value, version):
        there = self.get(key)
        if there[1] == version:
            self.put(key, value)
            return True, self.get(key)
        return there == (value, version + 1), there

    def heartbeat(self, key, value, watch, seen):
        self.put(key, value)
        return self.get(watch) if watch != key and self.get(watch)[1] > seen else None

    def list(self, prefix):
        return [(key, *held) for key, held in self.held.items() if key.startswith(prefix)]

    def delete(self, prefix):
        self.held = {k: held for k, held in self.held.items() if not k.startswith(prefix)}


def ask(board, step):
    """Return the real board's answer to *step* in the model's words."""
    what, *given_ = step
    if what == "compare_and_set":
        done, entry = board.compare_and_set(*given_[:2], version=given_[2])
        return done, (entry.value, entry.version)
    if what == "heartbeat":
        key, value, watch, seen = given_
        found = board.heartbeat(key, value, watch=watch, seen_version=seen, hold_s=0).watched
        # Whether a beat sees itself is not said.
        return (found.value, found.version) if found and watch != key else None
    answer = getattr(board, what)(*given_)
    if what == "get":
        return answer.value, answer.version
    if what == "list":
        return [(key, entry.value, entry.version) for key, entry in answer.items()]
    return answer


@pytest.fixture(
    params=["memory", "tcp", pytest.param("postgres", marks=pytest.mark.postgres), "etcd"]
)
def board(request):
    if request.param == "memory":
        new = memory_boards()
    elif request.param == "tcp":
        new = tcp_boards()
    elif request.param == "etcd":
        new = etcd_boards(request.getfixturevalue("etcd_url"))
    else:
        new = postgres_boards(request.getfixturevalue("postgres_url"))
    with new as found:
        yield found.open()


@settings(max_examples=draws(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=25))
def test_a_board_does_what_the_model_does(board, steps):
    for entry in list(board.list("")):
        board.delete(entry)
    model = Model()
    for step in steps:
        what, *given_ = step
        assert ask(board, step) == getattr(model, what)(*given_), step
    assert ask(board, ("list", "")) == model.list("")
