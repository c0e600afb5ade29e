"""The pause of Python's garbage collection."""

import gc

import pytest

from gpuops.host.gc_pause import paused_gc


def test_it_is_off_within_and_on_again_after_an_error():
    assert gc.isenabled()
    within = []

    @paused_gc()
    def fails():
        within.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (within, gc.isenabled()) == ([False], True)


def test_where_the_user_has_turned_it_off_it_stays_off():
    gc.disable()
    try:
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
