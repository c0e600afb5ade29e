"""One bit in one rank's memory, under real training: found, named, and nothing else is."""

import re

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def test_a_flipped_bit_becomes_one_incident_that_names_rank_tensor_and_step(tmp_path):
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    words = ["--health-gate=off", JOBS / "flipped.py"]
    with Run(tmp_path, *words, nproc=3, env={"XDG_RUNTIME_DIR": str(runtime)}) as run:
        assert run.finish(180.0) == 0, run.said()

    flips = re.findall(r"flipped after step (\d+)", run.said())
    assert len(flips) == 1, run.said()
    flipped = int(flips[0])
    (incident,) = run.incidents()
    assert incident["failure_class"] == "numerics.replicas_differ"
    assert [c["id"] for c in incident["culprits"] if c["kind"] == "rank"] == ["1"]
    assert [c["kind"] for c in incident["culprits"]] == ["rank", "node"]
    found = re.fullmatch(
        r"rank 1 differs from ranks 0, 2 in model\.3\.weight at step (\d+) \(equal at step (\d+)\)",
        incident["title"],
    )
    assert found, incident["title"]
    assert int(found[2]) <= flipped < int(found[1])
    assert run.said().count("replicas of the training state differ") == 1
    assert run.payloads("checkpoint.replicas_apart") == []
