"""torch's own processes: what it does not wait for, and does not lose."""

import os
import sys

import pytest
from support.runs import is_alive

pytestmark = pytest.mark.torch

SLEEPING = "import time; time.sleep(60)"


@pytest.fixture
def context(tmp_path):
    from torch.distributed.elastic.multiprocessing.api import (
        DefaultLogsSpecs,
        Std,
        SubprocessContext,
    )

    made = SubprocessContext(
        name="worker",
        entrypoint=sys.executable,
        args={0: ("-c", SLEEPING), 1: ("-c", SLEEPING)},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path), tee=Std.OUT),
    )
    made.start()
    handlers = list(made.subprocess_handlers.values())
    yield made
    for handler in handlers:
        handler.proc.kill()
        handler.proc.wait(10)
        handler._stdout.close()  # torch leaves that to the garbage collector


def test_a_worker_that_is_left_behind_is_not_waited_for(context):
    from gpuops.agent.elastic.teardown import abandon_unkillable

    ended, left = (context.subprocess_handlers[rank].proc for rank in range(2))
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)

    abandon_unkillable(context, [1])

    assert ended.returncode == -9, "torch has reaped the one that ended"
    assert left.returncode is None
    assert is_alive(left.pid)
    assert all(log.stopped() for log in context._tail_logs), "no thread is left to be waited for"
