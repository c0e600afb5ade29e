"""What an agent tells its workers of failures is what they save by."""

import pytest
import torch
from support.in_process_keeper import InProcessNode

from gpuops.plan.failure_rate import FAILURES_VARIABLE
from gpuops.worker.checkpointer import Checkpointer


@pytest.mark.parametrize(
    ("told", "source", "rate"), [("30/24000", "store", 26.9), (None, "published", 6.5)]
)
def test_the_rate_is_in_the_stats_with_where_it_is_from(monkeypatch, told, source, rate):
    if told is not None:
        monkeypatch.setenv(FAILURES_VARIABLE, told)
    else:
        monkeypatch.delenv(FAILURES_VARIABLE, raising=False)
    node = InProcessNode()
    with Checkpointer(keeper=node.connect(), model=torch.nn.Linear(2, 2)) as ck:
        ck.restore()
        found = ck.stats["failures"]
    node.close()

    assert found["source"] == source
    assert found["per_1000_node_days"] == pytest.approx(rate, rel=0.01)
