"""A smaller form of the benchmark of 64 agents: eight real ones on this machine."""

import pytest
from support.many_agents import gather

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_eight_agents_are_seated_soon_after_the_last_is_ready(tmp_path):
    times = gather(8, tmp_path, limit_s=200)

    assert times["seated_s"] < 25, times  # those of a run wait 30 s for others that may come
