"""The order of the time limits of a launch, checked before it starts."""

import json
import re

import pytest
from support.launches import requested, slurm_env

from gpuops.agent.launch.timeouts import timeouts_of
from gpuops.agent.launch.torch_compat import HEARTBEAT
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch
NOW_S = 1_700_000_000.0
SEVERAL = ("--nnodes=2", "--rdzv-endpoint=h:29400", "-m", "train")


def ladder(*flags, env=None):
    return timeouts_of(requested(*flags, env=env), env or {}, NOW_S)


def limits(found):
    return {rung.name: rung.limit_s for rung in found.timeouts}


@pytest.mark.parametrize("flags", [("-m", "train"), SEVERAL], ids=["one node", "several"])
def test_nothing_crosses_by_default(flags):
    assert ladder(*flags).problems == ()


def test_from_the_shortest_to_the_longest():
    found = limits(ladder("--hang-timeout=60", *SEVERAL))

    names = ["monitor", "suspect", "fence", "dead", "hang", "process group", "NCCL heartbeat"]
    values = [found[name] for name in names]
    assert values == [0.1, 6.0, 10.0, 15.0, 60.0, 600.0, 720.0]
    assert (found["health gate"], found["join"], found["last call"]) == (20.0, 600.0, 5.0)
    assert found["first call"] == 30.0


def test_a_test_under_load_must_end_before_its_node_gives_up_joining():
    assert limits(ladder("--preflight=quick", *SEVERAL))["preflight"] == 30.0
    flags = ("--preflight=quick", "--rdzv-conf=join_timeout=29", *SEVERAL)
    assert any("preflight" in problem.text for problem in ladder(*flags).problems)


def test_a_sweep_has_most_of_the_time_in_which_nodes_must_join():
    assert limits(ladder("--preflight=sweep", *SEVERAL))["preflight"] == 480.0
    short = ladder("--preflight=sweep", "--rdzv-conf=join_timeout=60", *SEVERAL)
    assert limits(short)["preflight"] == 48.0
    assert "preflight" not in limits(ladder("--preflight=sweep", "-m", "train"))


def test_one_node_has_no_peers_to_wait_for():
    assert "dead" not in limits(ladder("-m", "train"))
    assert ladder("--hang-timeout=10", "-m", "train").problems == ()


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--hang-timeout=10"], {}, "dead .* must be shorter than --hang-timeout=10"),
        (["--hang-timeout=20m"], {}, "--hang-timeout=20m must be shorter than process group"),
        (
            ["--rdzv-conf=keep_alive_interval=30", "--hang-timeout=60"],
            {},
            "keep_alive_interval=30 must be shorter than --hang-timeout=60",
        ),
        ([], {"SLURM_JOB_END_TIME": f"{NOW_S + 100:.0f}"}, "join .* SLURM_JOB_END_TIME"),
    ],
)
def test_what_may_be_meant_is_a_warning_that_names_both(flags, env, said):
    found = ladder(*flags, *SEVERAL, env=env)

    assert any(re.search(said, line) for line in found.refuse())


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--rdzv-conf=join_timeout=10"], {}, "dead .* must be shorter than .*join_timeout=10"),
        (["--rdzv-conf=store_lost_timeout=9"], {}, "fence .* shorter than .*lost_timeout=9"),
        (["--rdzv-conf=keep_alive_interval=0.5"], {}, "beat .* shorter than .*interval=0.5"),
        (["--rdzv-conf=last_call_timeout=700"], {}, "last_call_timeout=700 .* join "),
        (
            ["--hang-timeout=300"],
            {HEARTBEAT: "200"},
            f"--hang-timeout=300 must be shorter than {HEARTBEAT}=200",
        ),
    ],
)
def test_what_cannot_work_is_refused(flags, env, said):
    with pytest.raises(UsageError, match=said):
        ladder(*flags, *SEVERAL, env=env).refuse()


def test_torchs_interval_delays_no_look_beyond_a_second():
    found = ladder("--monitor-interval=100", *SEVERAL)

    assert found.refuse() == ()
    assert found.timeouts[0].limit_s == 1


def test_learned_and_off_are_said_so():
    by_flag = {text: ladder(f"--hang-timeout={text}", "-m", "x") for text in ("auto", "off")}

    shown = {text: found.to_text() for text, found in by_flag.items()}
    assert " learned  a run without progress" in shown["auto"]
    assert " off  a run without progress" in shown["off"]


def test_the_table_as_text_and_as_json():
    found = ladder("--hang-timeout=10", *SEVERAL)

    lines = found.to_text().splitlines()
    assert any(line.startswith("dead") and "15.0 s" in line for line in lines)
    assert lines[-1].startswith("warning: dead (15.0 s, default) must be shorter than")
    data = json.loads(json.dumps(found.to_json()))
    assert {"name", "limit_s", "shown", "source", "what"} == set(data["timeouts"][0])
    assert [problem["is_error"] for problem in data["problems"]] == [False]


def test_slurms_time_is_the_last_rung():
    env = slurm_env(SLURM_JOB_END_TIME=f"{NOW_S + 7200:.0f}")

    found = ladder("-m", "train", env=env)

    assert found.timeouts[-1].limit_s == 7200.0
    assert found.problems == ()


def test_phases_of_the_job_are_shown_between():
    request = requested("-m", "train")

    found = timeouts_of(request, {}, NOW_S, {"evaluation": 1800.0, "first step": 1200.0})

    assert [rung.name for rung in found.timeouts][-3:] == [
        "first step",
        "evaluation",
        "health gate",
    ]
