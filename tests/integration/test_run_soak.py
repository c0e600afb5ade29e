"""Many kills, by seed: every one recovered, every one blamed on the rank that was killed."""

import random

import pytest
from support.runs import JOBS, Run

pytestmark = [pytest.mark.torch, pytest.mark.soak]


@pytest.mark.parametrize("seed", range(20))
def test_seeded_kills_are_recovered_and_blamed_rightly(tmp_path, seed):
    draw = random.Random(seed)
    world, kills = draw.choice([2, 3]), draw.choice([1, 2])
    victims = [draw.randrange(world) for _ in range(kills)]
    steps = [draw.randint(1, 12) for _ in range(kills)]
    with Run(tmp_path, JOBS / "train.py", "--steps", "40", nproc=world) as run:
        for generation, (victim, step) in enumerate(zip(victims, steps, strict=True)):
            run.kill_rank(victim, at_step=step, generation=generation)

        assert run.finish(180) == 0, run.said()

    incidents = sorted(run.incidents(), key=lambda incident: incident["attempt"])
    blamed = [
        [c["id"] for c in incident["culprits"] if c["kind"] == "rank"] for incident in incidents
    ]
    assert blamed == [[str(victim)] for victim in victims]
    assert {incident["state"] for incident in incidents} == {"closed"}
