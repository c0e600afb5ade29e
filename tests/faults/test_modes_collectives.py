"""Ranks that all wait in a collective, by their stacks: what they called tells whose fault."""

import pytest
from support.faulty import FaultyRun, culprits

pytestmark = [pytest.mark.quick_disk, pytest.mark.torch, pytest.mark.timeout(240)]


class HungRun(FaultyRun):
    """A run of which a rank calls its collectives in another way than the others at a step."""

    def __init__(self, folder, drill, *flags, **options):
        # Without a save, so that the next attempt comes to the same step.
        env = {"JOB_STEPS": "20", "JOB_SAVE_EVERY": "50", "GPUOPS_DRILL": drill}
        flags = ("--allow-drills", "--hang-timeout", 5, *flags)
        super().__init__(folder, flags, (), script="elastic_train.py", env=env, **options)


@pytest.mark.parametrize(
    ("kind", "failure_class", "says"),
    [
        (
            "skip-collective",
            "hang.deadlock",
            "group 1 (all ranks); rank 1 waits in all_reduce(1 Float), call ",
        ),
        (
            "other-operation",
            "collective.mismatch",
            "call 1 of group 1 (all ranks) is all_reduce(8 Float) on ranks 0,2 and broadcast(8",
        ),
        pytest.param(
            *("cross-groups", "hang.deadlock", "rank 1 waits in all_reduce(8 Float), call 1 of"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("receive-alone", "hang.collective", "rank 1 has not called all_reduce(1 Float)"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_rank_that_calls_something_else_is_named_with_the_call(
    tmp_path, kind, failure_class, says
):
    drill = f"{kind}:rank=1,step=4"
    with HungRun(tmp_path, drill, "--max-restarts", 0, nproc=3) as run:
        run.start()
        assert run.ended() == 1, run.said()

    incident = run.incident(failure_class)
    ranks = {name for what, name in culprits(incident) if what == "rank"}
    assert ranks == {"1"}, incident["culprit_how"]
    assert says in incident["culprit_how"]
    (decision,) = run.decisions()
    (report,) = decision["reports"]
    assert all(end["collectives"]["calls"] for end in report["ends"])


def test_a_rank_on_a_node_that_noticed_nothing_is_named_and_the_second_time_stops_the_run(tmp_path):
    """Each of three nodes sees of its one rank that it waits, and nothing that is wrong."""
    drill = "cross-groups:rank=1,step=4,generation=all"
    with HungRun(tmp_path, drill, n_nodes=3, nproc=1) as run:
        run.start()
        assert set(run.finish().values()) == {93}, run.said()

    assert run.rules() == ["restart", "software.same_step"]
    incidents = [found for found in run.incidents() if found["authority"] == 3]
    for decision, incident in zip(run.decisions(), incidents, strict=True):
        reports = decision["reports"]
        (node,) = [told["node"] for told in reports if told["ends"][0]["rank"] == 1]
        assert {told["failure_class"] for told in reports} == {"hang.collective"}
        assert not decision["decision"]["exclude"]
        assert incident["failure_class"] == "hang.deadlock"
        assert culprits(incident) == {("rank", "1"), ("node", node)}
        what = "waits in another collective than the ranks that wait for it"
        assert incident["title"] == f"rank 1 on {node} {what}"
        assert "rank 1 waits in all_reduce(8 Float), call 1 of group" in incident["culprit_how"]
