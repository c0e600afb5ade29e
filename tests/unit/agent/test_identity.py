"""Several agents agree on one run."""

from datetime import timedelta

import pytest

from gpuops.agent.identity import KEY, Identity, agree

FIRST = Identity("01a1fa5f-0ddb-70e5-a0e9-00493e185152", "20260302T091400Z-train-3e185152")
OTHER = Identity("01a1fa5f-0ddb-70e5-a0e9-00493e185999", "20260302T091401Z-train-3e185999")


class MemoryStore:
    """The store of one rendezvous round."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def wait(self, keys, timeout):
        assert timeout <= timedelta(seconds=5)
        if keys[0] not in self.values:
            raise RuntimeError("timed out")


def join(store, rank, mine, generation=0, *, alone=False):
    return agree(store, group_rank=rank, alone=alone, mine=mine, generation=generation)


def test_the_first_agent_names_the_run_and_the_generation():
    store = MemoryStore()

    assert join(store, 0, FIRST, 3) == (FIRST, 3)
    assert join(store, 1, OTHER, 0) == (FIRST, 3)


def test_a_generation_never_goes_back():
    store = MemoryStore()
    join(store, 0, FIRST, 1)

    assert join(store, 1, OTHER, 4) == (FIRST, 4)


def test_alone_nothing_is_published():
    store = MemoryStore()

    assert join(store, 0, FIRST, alone=True) == (FIRST, 0)
    assert store.values == {}


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "null",
        '["x", "f", 0]',
        '["01a1fa5f-0ddb-70e5-a0e9-00493e185152", "../../etc", 0]',
        '["01a1fa5f-0ddb-70e5-a0e9-00493e185152", "f", -1]',
        '["01a1fa5f-0ddb-70e5-a0e9-00493e185152", "f", 99999999999]',
    ],
)
def test_without_a_sound_word_an_agent_goes_on_under_its_own_name(text):
    store = MemoryStore()
    if text is not None:
        store.set(KEY, text)

    assert join(store, 1, OTHER, 2) == (OTHER, 2)
