"""A container as Docker makes it: 64 MB of /dev/shm, no locked memory, memory that shrinks."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.services import unavailable

TESTS = Path(__file__).parents[1]
_MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
_RUN = f'{_MOUNT} && ulimit -l 0 && exec "$@"'

JOB = """
import os, resource, sys
from pathlib import Path
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.types import Shard
from support.keeper_ranks import holds, layout_of, ready, save_all

room = os.statvfs("/dev/shm")
print("shm", room.f_blocks * room.f_frsize, "memlock", *resource.getrlimit(resource.RLIMIT_MEMLOCK))
place = {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1}
keeper = start_or_adopt(Path(sys.argv[1]), lease_s=60)
try:
    for n in (1, 2):  # more than all of /dev/shm, in each of two slots
        line = connect_rank(keeper.socket_path, **place)
        (rank,) = ready([line], n_floats=18_000_000)
        save_all([rank], n)
        line.close()
    line = connect_rank(keeper.socket_path, **place)
    offer = line.restore_point(30)
    with line.open_shard(offer, Shard(0, 1)) as memory:
        print("step", offer.state.step, holds(memory, layout_of(n_floats=18_000_000), 2))
finally:
    keeper.kill()
"""


def test_states_larger_than_dev_shm_are_kept_without_locked_memory(tmp_path):
    words = ["unshare", "--mount", "sh", "-c"]
    probe = subprocess.run(
        [*words, _MOUNT], capture_output=True, text=True, timeout=30, check=False
    )
    if probe.returncode != 0:
        unavailable(f"no file system can be mounted here: {probe.stderr}")
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    job = [sys.executable, "-c", JOB, str(tmp_path / "keeper")]
    done = subprocess.run(
        [*words, _RUN, "sh", *job],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"shm {64 * 2**20} memlock 0 0", "step 2 True"]


LIMITED = """
import os, sys
from pathlib import Path
from gpuops.checkpoint.keeper.rank_client import connect_rank
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.types import KeeperError, Shard
from support.keeper_ranks import Rank, holds, layout_of, ready, save_all

folder, limit = Path(sys.argv[1]), Path(sys.argv[2])
(limit.parent / "cgroup.procs").write_text(str(os.getpid()))
limit.write_text(str(3 * 2**30))
keeper = start_or_adopt(folder, lease_s=60)
place = {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1}
line = connect_rank(keeper.socket_path, **place)
(rank,) = ready([line], n_floats=5_000_000)
save_all([rank], 1)
limit.write_text(str(2**30 + 2**27))
larger = Rank(line, n_floats=20_000_000)
try:
    larger.reserve()
except KeeperError as exc:
    print(exc)
save_all([rank.reserve()], 2)
line.close()
line = connect_rank(keeper.socket_path, **place)
offer = line.restore_point(30)
with line.open_shard(offer, Shard(0, 1)) as memory:
    print("step", offer.state.step, holds(memory, layout_of(n_floats=5_000_000), 2))
limit.write_text(str(3 * 2**30))
larger = Rank(line, n_floats=20_000_000)
save_all([larger.reserve()], 3)
print("step", line.stats()["newest"][1])
line.close()
keeper.kill()
"""


@pytest.fixture
def memory_limit():
    """Return the file with the limit of a memory cgroup of its own."""
    top, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not top.is_dir():
        top, name = Path("/sys/fs/cgroup"), "memory.max"
    folder = top / f"gpuops-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as exc:
        unavailable(f"no cgroup can be made here: {exc}")
    if not (folder / name).exists():
        folder.rmdir()
        unavailable("no memory cgroup can be made here")
    yield folder / name
    with suppress(OSError):
        folder.rmdir()


def test_a_limit_that_shrinks_refuses_what_does_not_fit_and_keeps_what_is_there(
    tmp_path, memory_limit
):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "keeper"), str(memory_limit)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    refused, kept, later = done.stdout.splitlines()
    assert "the checkpoints of rank 0 do not fit into memory" in refused
    assert (kept, later) == ("step 2 True", "step 3")
