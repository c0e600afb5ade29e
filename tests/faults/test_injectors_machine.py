"""Disk, memory and kernel log: taken and written as said, given back in the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import gpuops
from support.runs import is_alive, wait_until
from support.small_disk import small_disk

from gpuops.host.kmsg import parse_kmsg

MIB = 2**20


@pytest.fixture
def disk(tmp_path):
    """A file system of 32 MiB that nobody else writes to."""
    with small_disk(tmp_path / "disk", "32m") as folder:
        yield folder


def start_drill(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "gpuops", "drill", *map(str, words), "--yes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def free(folder):
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def test_a_disk_is_filled_but_for_what_is_left_and_emptied_again(disk):
    before = free(disk)
    injector = start_drill("fill-disk", "--dir", disk, "--leave", "1MiB", "--for", "3600")
    wait_until(lambda: free(disk) <= MIB)
    assert free(disk) >= MIB - 65536
    assert list(disk.iterdir()) == [], "the file has no name to be left behind"
    with pytest.raises(OSError, match="No space left"):
        (disk / "mine").write_bytes(bytes(2 * MIB))

    injector.kill()

    injector.wait(20)
    (disk / "mine").unlink()
    wait_until(lambda: free(disk) == before)


def test_a_size_is_taken_for_its_time(disk):
    before = free(disk)

    done = gpuops("drill", "fill-disk", "--dir", disk, "--size", "8MiB", "--for", "0.2", "--yes")

    assert done.returncode == 0, done.stderr
    assert "8 MiB of the file system" in done.stderr
    assert free(disk) == before


def test_memory_is_taken_by_a_child_that_ends_with_the_injector():
    injector = start_drill("memory-hog", "--size", "64MiB", "--for", "3600")
    hog = wait_until(lambda: child_of(injector.pid, b"gpuops.drill.machine"))
    wait_until(lambda: resident_bytes(hog) >= 64 * MIB)
    assert Path(f"/proc/{hog}/oom_score_adj").read_text().strip() == "1000"

    injector.send_signal(signal.SIGKILL)

    injector.wait(20)
    wait_until(lambda: not is_alive(hog))


def test_the_kernel_log_gets_its_line_and_no_other(tmp_path):
    log = tmp_path / "dev/kmsg"
    log.parent.mkdir()
    log.write_text("6,1,1,-;Linux version 6.1\n")

    done = gpuops(
        *("drill", "sick-gpu", "--address", "0000:3b:00", "--yes"),
        env={"GPUOPS_ROOT": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    first, second = parse_kmsg(log.read_text(), rehearsals=True)
    assert first.text == "Linux version 6.1"
    assert second.text.startswith("NVRM: Xid (PCI:0000:3b:00): 79, ")
    assert second.text.endswith("gpuops drill 1")


def child_of(pid, word):
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            words = (path.parent / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == pid and word in words:
            return int(path.parent.name)
    return None


def resident_bytes(pid):
    try:
        text = Path(f"/proc/{pid}/statm").read_text()
    except OSError:
        return 0
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
