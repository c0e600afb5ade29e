"""A user's FUSE mount that never answers drains no node: the exploit, with the real kernel."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from support import hung_fuse
from support.fake_root import FakeRoot

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK),
    reason="mounting FUSE needs root and /dev/fuse",
)

CHECKED = """
import json, sys
from pathlib import Path
from gpuops.checks.storage import mount_alive
from gpuops.checks.core.check import CheckLimit, JudgeContext
from gpuops.host.process.abandoned import abandoned
from gpuops.host.storage.mounts import read_filesystems
from gpuops.model import Entity, EntityKind

root, records = map(Path, sys.argv[1:])
facts = read_filesystems(root, 1.5, left=abandoned(records))
limits = mount_alive.Parameters(answer_s=CheckLimit(source="a test", warn=2))
found = mount_alive.judge(facts, limits, JudgeContext(node=Entity(EntityKind.NODE, "n1")))
(answer,) = [item for item in facts.answers if item.mount.point == "/hung"]
print(json.dumps([answer.stuck, [(item.entity.id, item.status.word) for item in found]]))
"""


@pytest.fixture
def hung(tmp_path):
    """A fake root with a real mount of a user on ``/hung``, in a namespace of its own."""
    root = FakeRoot(tmp_path / "root")
    root.mounts(
        "25 1 8:1 / / rw - ext4 /dev/sda1 rw",
        "30 25 0:50 / /hung rw - fuse /dev/sda1 rw,user_id=1000,group_id=1000,allow_other",
    )
    (root.path / "hung").mkdir()
    words = ["unshare", "--mount", sys.executable, hung_fuse.__file__, str(root.path / "hung")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ) as server:
        try:
            if server.stdout.readline() != hung_fuse.READY:
                pytest.skip("this kernel mounts no FUSE here")
            yield root.path, server.pid
        finally:
            with contextlib.suppress(OSError):
                os.kill(server.pid, signal.SIGKILL)


def test_a_users_mount_that_never_answers_warns(hung, tmp_path):
    root, server = hung
    words = ["nsenter", f"--mount=/proc/{server}/ns/mnt", sys.executable, "-c", CHECKED]
    words += [str(root), str(tmp_path / "gpuops" / "abandoned")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == '[true, [["/hung", "warn"]]]\n'
