"""A round trip through fake munge programs, and through the real one where it runs."""

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.munge import MungeTrip, read_munge


def programs(path, munge, unmunge):
    root = FakeRoot(path)
    for name, script in (("munge", munge), ("unmunge", unmunge)):
        root.write(f"usr/bin/{name}", f"#!/bin/sh\n{script}\n")
        (root.path / "usr/bin" / name).chmod(0o755)
    return root.path


def test_what_munge_prints_is_what_unmunge_reads(tmp_path):
    root = programs(tmp_path, "echo MUNGE:abc:", '[ "$(cat)" = MUNGE:abc: ] || exit 15')
    trip = read_munge(root, 20)

    assert (trip.installed, trip.error, trip.decoding) == (True, None, False)
    assert trip.elapsed_s > 0


def test_the_first_that_fails_is_told(tmp_path):
    made = read_munge(programs(tmp_path / "a", "echo down >&2; exit 6", "exit 0"), 20)
    read = read_munge(programs(tmp_path / "b", "echo x", "echo Expired >&2; exit 15"), 20)

    assert (made.error, made.decoding) == ("munge exited with code 6: down", False)
    assert (read.error, read.decoding) == ("unmunge exited with code 15: Expired", True)


def test_one_that_hangs_is_a_timeout(tmp_path):
    with pytest.raises(ProbeError, match="munge gave no answer") as caught:
        read_munge(programs(tmp_path, "exec sleep 1000", "exit 0"), 1.5)
    assert caught.value.reason == "timeout"


def test_without_the_programs_nothing_is_asked(tmp_path):
    assert read_munge(tmp_path, 5) == MungeTrip(installed=False)
