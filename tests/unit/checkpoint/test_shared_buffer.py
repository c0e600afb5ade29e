"""Slots: sealed memory that two processes share, taken ahead, and given back only when unused."""

import errno
import fcntl
import gc
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.lock_free import seconds_beside

from gpuops.checkpoint.memory import shared_buffer
from gpuops.checkpoint.memory.raw_memory import address_of, copy_bytes, madvise
from gpuops.checkpoint.memory.shared_buffer import (
    POPULATE_BYTES,
    SEALS,
    SharedBuffer,
    available_bytes,
)
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError

MIB = 2**20


def open_fds():
    gc.collect()  # of earlier tests' slots, which a traceback may keep in a cycle
    return sorted(int(path.name) for path in Path("/proc/self/fd").iterdir())


def mappings_of(name):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"/memfd:{name} " in line]


def resident_bytes(name):
    """Return how much of a slot this process has in its page table."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f"/memfd:{name} ")
    return int(rest.partition("Rss:")[2].split()[0]) * 1024


def taken_bytes(slot):
    return os.fstat(slot.fd).st_blocks * 512


@contextmanager
def limit(kind, soft):
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, old)


@pytest.fixture
def poor_machine(tmp_path):
    """A machine with 3 MiB of memory left."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 3072 kB\n")
    return tmp_path


def test_new_memory_is_zeros_of_the_exact_size_and_takes_none_yet():
    with SharedBuffer.create("slot", 5 * MIB + 3) as slot:
        assert slot.nbytes == len(slot.view) == os.fstat(slot.fd).st_size == 5 * MIB + 3
        assert taken_bytes(slot) == 0
        assert not any(slot.view[:: mmap.PAGESIZE])
        slot.view[-1] = 7
        assert os.pread(slot.fd, 1, slot.nbytes - 1) == b"\x07"


def test_nobody_can_change_its_size_or_its_seals():
    with SharedBuffer.create("slot", 100) as slot:
        for size in (0, 99, 101):
            with pytest.raises(PermissionError):
                os.ftruncate(slot.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(slot.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert fcntl.fcntl(slot.fd, fcntl.F_GET_SEALS) & SEALS == SEALS


@pytest.mark.parametrize("nbytes", [0, -1, IMAGE_BYTES_MAX + 1])
def test_a_size_that_cannot_be_is_refused(nbytes):
    with pytest.raises(CheckpointError, match=f"a slot cannot have {nbytes} bytes"):
        SharedBuffer.create("slot", nbytes)


@pytest.mark.parametrize("name", ["", "rank 3/слот\0\n", "x" * 5000])
def test_a_name_is_only_shown_and_may_be_anything(name):
    with SharedBuffer.create(name, 10) as slot:
        assert slot.nbytes == 10


def test_its_descriptor_is_not_inherited_by_programs_that_are_started():
    with SharedBuffer.create("slot", 10) as slot:
        assert not os.get_inheritable(slot.fd)
        other = os.dup(slot.fd)
        os.set_inheritable(other, True)
        with SharedBuffer.attach(other) as attached:
            assert not os.get_inheritable(attached.fd)


def test_what_one_writes_the_other_reads():
    with SharedBuffer.create("slot", 10_000) as slot, SharedBuffer.attach(os.dup(slot.fd)) as other:
        other.view[5:9] = b"abcd"
        assert bytes(slot.view[4:10]) == b"\0abcd\0"


def test_a_reader_cannot_write():
    with SharedBuffer.create("slot", 10_000) as slot:
        slot.view[:3] = b"abc"
        with SharedBuffer.attach(os.dup(slot.fd), writable=False) as reader:
            assert reader.view.readonly
            assert not reader.writable
            assert bytes(reader.view[:3]) == b"abc"
            with pytest.raises(TypeError):
                reader.view[0] = 1


def test_a_descriptor_for_reading_alone_is_enough_for_a_reader_and_not_for_a_writer():
    with SharedBuffer.create("slot", 100) as slot:
        path = f"/proc/self/fd/{slot.fd}"
        with SharedBuffer.attach(os.open(path, os.O_RDONLY), writable=False) as reader:
            assert len(reader.view) == 100
        before = open_fds()
        with pytest.raises(CheckpointError, match=r"Permission denied$"):
            SharedBuffer.attach(os.open(path, os.O_RDONLY))
        assert open_fds() == before


def memfd(seals, size=100, flags=os.MFD_ALLOW_SEALING):
    fd = os.memfd_create("foreign", flags)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def temporary_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(100)
        return os.dup(file.fileno())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: memfd(0), "its size is not sealed"),
        (lambda: memfd(0, flags=0), "its size is not sealed"),
        (lambda: memfd(fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "its size is not sealed"),
        (lambda: memfd(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), "its size is not sealed"),
        (lambda: memfd(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "its size is not sealed"),
        (lambda: memfd(SEALS, size=0), "it has 0 bytes"),
        (lambda: memfd(SEALS, size=IMAGE_BYTES_MAX + 1), f"it has {IMAGE_BYTES_MAX + 1} bytes"),
        (lambda: memfd(SEALS, size=99), "it has 99 bytes, not 100"),
        (lambda: memfd(SEALS | fcntl.F_SEAL_WRITE), "Operation not permitted|Permission denied"),
        (temporary_file, "not sealed|no memfd"),
        (lambda: os.open("/dev/null", os.O_RDWR), "no memfd"),
        (lambda: os.open("/", os.O_RDONLY), "no memfd|not sealed"),
        (lambda: os.pipe2(os.O_CLOEXEC)[0], "no memfd"),
        (lambda: socket.socket().detach(), "no memfd"),
    ],
)
def test_what_could_shrink_under_us_is_not_mapped_and_is_closed(make, says):
    fd = make()

    with pytest.raises(CheckpointError, match=says):
        SharedBuffer.attach(fd, nbytes=100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_descriptor_that_is_not_open_is_refused():
    for fd in (-1, 10**6):
        with pytest.raises(CheckpointError, match="Bad file descriptor"):
            SharedBuffer.attach(fd)


def test_populating_takes_all_of_it_and_keeps_what_is_in_it():
    with SharedBuffer.create("slot", 2 * POPULATE_BYTES + 5) as slot:
        slot.view[POPULATE_BYTES : POPULATE_BYTES + 3] = b"abc"
        slot.view[-1] = 9
        asked = []
        assert slot.populate(lambda: bool(asked.append(1))) is True

        assert len(asked) == 3
        assert taken_bytes(slot) >= slot.nbytes
        assert bytes(slot.view[POPULATE_BYTES - 1 : POPULATE_BYTES + 4]) == b"\0abc\0"
        assert slot.view[-1] == 9
        assert slot.populate()


def test_populating_stops_when_it_is_told_to():
    with SharedBuffer.create("slot", 4 * POPULATE_BYTES) as slot:
        answers = iter([False, False, True])
        assert slot.populate(lambda: next(answers)) is False
        assert taken_bytes(slot) == 2 * POPULATE_BYTES

        assert slot.populate(lambda: True) is False
        assert slot.populate(lambda: False) is True


def test_populating_spares_the_copy_its_page_faults():
    def faults_of_a_copy(slot):
        before = resource.getrusage(resource.RUSAGE_THREAD)
        slot.view[:] = data
        after = resource.getrusage(resource.RUSAGE_THREAD)
        return after.ru_minflt - before.ru_minflt

    data = b"x" * (8 * MIB)
    with (
        SharedBuffer.create("slot", 8 * MIB) as slot,
        SharedBuffer.attach(os.dup(slot.fd)) as cold,
        SharedBuffer.attach(os.dup(slot.fd)) as warm,
    ):
        slot.populate()
        warm.populate()
        assert faults_of_a_copy(warm) < 20
        assert faults_of_a_copy(slot) < 20
        assert faults_of_a_copy(cold) > 100


def test_a_reader_may_populate_too():
    with SharedBuffer.create("slot", 4 * MIB) as slot:
        slot.view[:4] = b"abcd"
        with SharedBuffer.attach(os.dup(slot.fd), writable=False) as reader:
            assert reader.populate()
            assert bytes(reader.view[:4]) == b"abcd"


@pytest.mark.parametrize("writable", [True, False])
def test_a_kernel_without_the_advice_has_the_pages_touched(writable):
    with SharedBuffer.create("slot", 3 * MIB + 5) as slot:
        slot.view[MIB : MIB + 4] = b"abcd"
        with SharedBuffer.attach(os.dup(slot.fd), writable=writable) as other:
            shared_buffer._touch(other._map, other.fd, 0, MIB, writable=writable)
            shared_buffer._touch(other._map, other.fd, MIB, slot.nbytes, writable=writable)
            assert bytes(slot.view[MIB : MIB + 4]) == b"abcd"
        if writable:
            assert taken_bytes(slot) >= slot.nbytes


def test_an_advice_that_the_kernel_does_not_know_is_told_as_such():
    with SharedBuffer.create("slot", MIB) as slot:
        with pytest.raises(OSError, match="Invalid argument") as caught:
            madvise(slot.view, 0, MIB, 9999)
        assert caught.value.errno == errno.EINVAL


def test_memory_that_does_not_fit_is_refused_with_figures_before_any_is_taken(poor_machine):
    with SharedBuffer.create("slot", 8 * MIB) as slot:
        with pytest.raises(
            CheckpointError,
            match=r"a slot of 8.4 MB does not fit: 8.4 MB of it are not populated, "
            r"3.1 MB are available here",
        ):
            slot.populate(root=poor_machine)
        assert taken_bytes(slot) == 0


def test_memory_that_is_taken_already_need_not_fit_again(poor_machine):
    with SharedBuffer.create("slot", 8 * MIB) as slot:
        slot.populate()
        with SharedBuffer.attach(os.dup(slot.fd)) as other:
            assert other.populate(root=poor_machine)


def test_a_part_that_still_fits_is_taken(poor_machine):
    with SharedBuffer.create("slot", 8 * MIB) as slot:
        os.posix_fallocate(slot.fd, 0, 6 * MIB)
        assert slot.populate(root=poor_machine)


def test_memory_is_taken_where_the_machine_does_not_say_how_much_there_is(tmp_path):
    with SharedBuffer.create("slot", MIB) as slot:
        assert slot.populate(root=tmp_path)


def test_memory_that_others_take_meanwhile_is_missed(poor_machine):
    meminfo = poor_machine / "proc/meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n")

    def others():
        if taken_bytes(slot):
            meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 16384 kB\n")
        return False

    with SharedBuffer.create("slot", 3 * POPULATE_BYTES) as slot:
        with pytest.raises(CheckpointError, match=r"67.1 MB of it are not populated.* 16.8 MB are"):
            slot.populate(others, root=poor_machine)
        assert taken_bytes(slot) == POPULATE_BYTES


def test_bytes_are_copied_out_of_memory_that_may_only_be_read():
    with (
        SharedBuffer.create("slot", MIB) as slot,
        SharedBuffer.attach(os.dup(slot.fd), writable=False) as reader,
    ):
        slot.view[:] = random.Random(0).randbytes(MIB)
        target = bytearray(100)
        with memoryview(target)[10:90] as part:
            copy_bytes(part, reader.view[7:87])
        assert target == bytes(10) + slot.view[7:87] + bytes(10)
        assert address_of(reader.view[7:]) == address_of(reader.view) + 7
        with pytest.raises(AssertionError):
            copy_bytes(memoryview(target), reader.view[:99])


def test_other_threads_run_while_memory_is_taken():
    def is_beside():
        with SharedBuffer.create("slot", 256 * MIB) as slot:
            populating_s, here_s = seconds_beside(
                lambda: shared_buffer._populate(slot._map, slot.fd, 0, slot.nbytes, writable=True)
            )
        return here_s > 0.4 * populating_s > 0

    # A busy machine may favour one of two threads, and not every time.
    assert any(is_beside() for _ in range(10))


def test_no_more_descriptors_than_the_limit_is_an_error_that_says_so():
    says = "cannot create a slot of 1.0 MB: Too many open files$"
    with limit(resource.RLIMIT_NOFILE, 1), pytest.raises(CheckpointError, match=says):
        SharedBuffer.create("slot", 10**6)

    says = "cannot populate a slot: Too many open files$"
    slot = SharedBuffer.create("slot", 100)
    with limit(resource.RLIMIT_NOFILE, 1), pytest.raises(CheckpointError, match=says):
        slot.populate()
    slot.close()


def test_a_file_size_limit_is_an_error_that_says_so():
    before = open_fds()
    says = "cannot create a slot of 2.1 MB: File too large$"
    with limit(resource.RLIMIT_FSIZE, MIB), pytest.raises(CheckpointError, match=says):
        SharedBuffer.create("slot", 2 * MIB)

    assert open_fds() == before


def test_an_address_space_limit_is_an_error_with_figures():
    before = open_fds()
    says = r"cannot map 2\.2 TB of a slot: Cannot allocate memory; .* of memory are available$"
    with limit(resource.RLIMIT_AS, 2**40), pytest.raises(CheckpointError, match=says):
        SharedBuffer.create("slot", 2**41)

    assert open_fds() == before


def test_closed_memory_is_an_error_and_closing_again_is_none():
    slot = SharedBuffer.create("slot", 100)
    fd = slot.fd
    slot.close()
    slot.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for use in (lambda: slot.fd, lambda: slot.view, slot.populate):
        with pytest.raises(CheckpointError, match="this slot is closed"):
            use()


def test_closing_twice_does_not_close_what_took_the_number():
    slot = SharedBuffer.create("slot", 100)
    fd = slot.fd
    slot.close()
    with suppress(OSError):
        os.dup2(os.open("/dev/null", os.O_RDONLY), fd)
    slot.close()
    del slot
    gc.collect()

    os.fstat(fd)
    os.close(fd)


def test_views_outlive_the_slot_and_the_last_of_them_gives_the_memory_back():
    slot = SharedBuffer.create("outlived", 10 * mmap.PAGESIZE)
    part = slot.view[100:110]
    exported = memoryview(slot.view)
    slot.close()

    part[:] = b"0123456789"
    assert bytes(exported[100:110]) == b"0123456789"
    assert len(mappings_of("outlived")) == 1
    del part
    assert len(mappings_of("outlived")) == 1
    del exported
    assert mappings_of("outlived") == []


def test_closing_unmaps_at_once_where_nothing_refers_to_it():
    before = open_fds()
    slot = SharedBuffer.create("unmapped", 100)
    assert len(mappings_of("unmapped")) == 1
    slot.close()

    assert mappings_of("unmapped") == []
    assert open_fds() == before


def test_what_is_unmapped_bit_by_bit_is_still_there_for_who_reads_it():
    nbytes = 2 * shared_buffer._UNMAP_STEP_BYTES + 5
    with SharedBuffer.create("unmapped", nbytes) as slot:
        slot.view[-3:] = b"end"
        with SharedBuffer.attach(os.dup(slot.fd), writable=False) as reader:
            view = reader.view
            assert view[-3:] == b"end"
            reader.unmap()
            assert view[-3:] == b"end"
        reader.unmap()


def test_unmapping_stops_where_it_is_told_to():
    """As at the end of a program, which then ends a millisecond later, not a second."""
    n_pieces = 5
    asked = []

    def stop():
        asked.append(len(asked))
        return len(asked) > 2

    with SharedBuffer.create("unmapped", n_pieces * shared_buffer._UNMAP_STEP_BYTES) as slot:
        slot.populate()
        mapped_before = resident_bytes("unmapped")
        slot.unmap(stop)
        assert resident_bytes("unmapped") == mapped_before - 2 * shared_buffer._UNMAP_STEP_BYTES
        slot.unmap()
        assert resident_bytes("unmapped") == 0


def test_slots_that_are_dropped_or_closed_leave_no_descriptor():
    before = open_fds()
    for _ in range(50):
        SharedBuffer.create("dropped", 100)
        SharedBuffer.create("closed", 100).close()
        with SharedBuffer.create("left", 100) as slot:
            SharedBuffer.attach(os.dup(slot.fd))

    assert open_fds() == before
    assert mappings_of("dropped") == []


def test_closing_while_it_is_populated_ends_that():
    slot = SharedBuffer.create("ended", 4 * POPULATE_BYTES)
    before = [fd for fd in open_fds() if fd != slot.fd]

    def close_it():
        slot.close()
        return False

    assert slot.populate(close_it) is False
    assert mappings_of("ended") == []
    assert len(open_fds()) <= len(before)


CHILD = """
import os, signal, sys
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
slot = SharedBuffer.attach(int(sys.argv[1]))
slot.view[:] = b"x" * slot.nbytes
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_wrote_is_there():
    with SharedBuffer.create("slot", MIB) as slot:
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, str(slot.fd)], pass_fds=[slot.fd], check=False
        )

        assert done.returncode == -signal.SIGKILL
        assert bytes(slot.view) == b"x" * MIB


OWNER = """
import os, signal, socket, sys
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
slot = SharedBuffer.create("owned", 100)
slot.view[:5] = b"hello"
with socket.socket(fileno=int(sys.argv[1])) as line:
    socket.send_fds(line, [b"x"], [slot.fd])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_memory_outlives_the_process_that_created_it():
    here, there = socket.socketpair()
    with here, there:
        done = subprocess.run(
            [sys.executable, "-P", "-c", OWNER, str(there.fileno())],
            pass_fds=[there.fileno()],
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        _, fds, _, _ = socket.recv_fds(here, 1, 1)

    with SharedBuffer.attach(fds[0], nbytes=100) as slot:
        assert bytes(slot.view[:6]) == b"hello\0"


def test_the_room_is_that_of_the_machine():
    assert available_bytes() > 0
