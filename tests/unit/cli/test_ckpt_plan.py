"""``gpuops ckpt plan``: what it prints, as text and JSON, and what it refuses."""

import json
import shlex
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuops.cli.ckpt.plan import nodes_and_domains, plan
from gpuops.cli.main import run_command
from gpuops.errors import UsageError

README = Path(__file__).parents[3] / "docs" / "checkpoints.md"
TOPOLOGY = """\
SwitchName=leaf0 Nodes=gpu[01-04]
SwitchName=leaf1 Nodes=gpu[05-08]
SwitchName=spine Switches=leaf[0-1]
"""
SIZE = ("--bytes-per-gpu", "12.0GB")
RATES = ("--nic-gbps", "84", "--disk-gbs", "30")


@pytest.fixture
def topology(tmp_path):
    path = tmp_path / "topology.conf"
    path.write_text(TOPOLOGY)
    return str(path)


def run(*args):
    return CliRunner().invoke(plan, args, catch_exceptions=False, standalone_mode=False)


def shown(*args):
    result = run(*args)
    assert result.return_value == 0, result.output
    return result.output


def as_json(*args):
    return json.loads(run(*args, "--json").output)


def test_the_paper_s_figures_are_printed():
    rows = [line.split() for line in shown("--nodes", "16", *SIZE).splitlines()]

    assert ["2", "93.3", "%", "93.33", "%", "86.7", "%"] in rows
    assert ["3", "80.0", "%", "80", "%", "62.9", "%"] in rows
    assert ["4", "61.5", "%", "60", "%", "36.3", "%"] in rows


def test_what_ranks_of_a_node_share_is_counted_once():
    figures = as_json("--nodes", "2", *SIZE, *RATES, "--shared-bytes", "11.9GB", "--replicas", "1")

    assert figures["ram"]["shared_bytes"] == 11.9e9
    assert figures["ram"]["state_bytes"] == 11.9e9 + 8 * 0.1e9
    assert figures["seconds"]["persist_s"] == figures["ram"]["state_bytes"] / 30e9
    once = as_json("--nodes", "2", *SIZE, *RATES, "--shared-bytes", "11.99GB", "--replicas", "1")
    assert once["seconds"]["persist_s"] == pytest.approx((11.99e9 / 2 + 8 * 0.01e9) / 30e9)
    assert once["seconds"]["read_s"] == once["ram"]["state_bytes"] / 30e9
    with pytest.raises(UsageError, match="--shared-bytes 13000000000 is more than"):
        run("--nodes", "2", *SIZE, "--shared-bytes", "13GB")


def test_of_what_all_ranks_share_no_copies_are_made():
    ddp = ("--bytes-per-gpu", "24.001GB", "--shared-bytes", "24GB")
    text, figures = (show("--nodes", "2", "--domains", "2", *ddp) for show in (shown, as_json))

    assert "no copies of the other 24.0 GB: holders have them themselves" in text
    assert figures["ram"]["peers_bytes"] == 2 * figures["ram"]["replica_bytes"] == 2 * 8e6
    apart = shown("--nodes", "2", *ddp, "--shards", "16")  # one replica: FSDP
    assert "no copies of" not in apart
    with pytest.raises(UsageError, match="--shards 32 with 16 ranks"):
        run("--nodes", "2", *ddp, "--shards", "32")


def test_a_topology_gives_the_nodes_their_groups_and_what_falls_with_a_switch(topology):
    text = shown("--domains", topology, *SIZE, *RATES, "--step", "10s")

    assert "8 nodes, 2 copies of each state: 4 groups of 2" in text
    assert "gpu[01,05]" in text
    assert "spine (8 states)" in text
    assert [line.split()[:6] for line in text.splitlines() if line.startswith("switch  ")] == [
        ["switch", "2", "4", "nodes", "2", "of"]
    ]
    assert "384.0 GB a node (2 slots x 8 ranks x 12.0 GB x 2 copies)" in text
    assert "9.14 s for 96.0 GB a node" in text
    assert "3.20 s for 96.0 GB a node" in text


def test_many_groups_are_cut_short_and_every_line_fits():
    text = shown("--nodes", "gpu[0001-2047]", "--domains", "32", "--replicas", "2", *SIZE, *RATES)

    assert "... 1015 more" in text
    assert "1022 groups of 2 and a ring of 3" in text
    assert "\n           ring: gpu" in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 45


def test_a_small_chance_is_not_rounded_to_certainty():
    text = shown("--nodes", "4096", *SIZE)

    assert " 99.98 %" in text
    assert "\n                 1                  100 %" in text


@pytest.mark.parametrize(
    ("n_nodes", "apart"), [("2", "0.60 s"), ("64", "1.92 s"), ("4096", "6.00 s")]
)
def test_how_far_apart_states_are_at_least_is_that_of_so_many_nodes(n_nodes, apart):
    line = f"\ncommit     {apart} or more between two states: all nodes agree on each\n"

    assert line in shown("--nodes", n_nodes, *SIZE)
    assert "\ncommit" not in shown("--nodes", "1", "--replicas", "1", *SIZE)


def test_json_has_all_figures_and_no_infinity():
    found = as_json(
        "--nodes", "16", "--domains", "4", *SIZE, *RATES, "--step", "2s", "--stall", "500ms"
    )

    assert found["schema"] == "gpuops.checkpoint-plan/1"
    assert list(found) == [
        "schema",
        "gpuops_version",
        "nodes",
        "replicas",
        "placement",
        "spreads",
        "recoveries",
        "domains",
        "ram",
        "seconds",
        "failures",
        "stall_s",
        "slowdown",
        "step_s",
        "tiers",
        "waste",
    ]
    assert found["recoveries"][1] == {
        "lost": 2,
        "probability": pytest.approx(14 / 15),
        "missed": pytest.approx(1 / 15),
        "bound": pytest.approx(14 / 15),
        "ring": pytest.approx(13 / 15),
    }
    assert sorted(chain(*found["placement"]["groups"])) == sorted(found["nodes"])
    assert found["domains"][0] == {
        "level": "domain",
        "domain": "domain0",
        "nodes": 4,
        "survived": True,
        "lost_states": [],
    }
    memory = found["tiers"]["memory"]
    assert memory["interval_steps"] == round(memory["interval_s"] / 2)
    assert found["ram"]["total_bytes"] == 384 * 10**9
    assert (found["ram"]["available_bytes"], found["ram"]["refused"]) == (None, None)
    assert 0 < found["waste"] < 0.01


def test_where_memory_serves_every_failure_or_none_a_tier_has_no_interval():
    every = as_json("--nodes", "16", *SIZE, *RATES, "--missed", "0")
    none = as_json("--nodes", "16", "--replicas", "1", *SIZE, *RATES)
    text = shown("--nodes", "16", *SIZE, *RATES, "--missed", "0")

    assert every["tiers"]["persistent"] is None
    assert none["tiers"]["memory"] is None
    assert "serves no counted failure" in text
    assert as_json("--nodes", "16", *SIZE)["tiers"] is None
    assert "intervals  with --nic-gbps and --disk-gbs" in shown("--nodes", "16", *SIZE)


def test_one_node_has_one_copy_unless_more_are_asked_for():
    text = shown("--nodes", "1", *SIZE)

    assert "1 node, 1 copy of each state" in text
    assert "there is no other node to hold a copy: a lost node loses its state" in text
    assert as_json("--nodes", "2", *SIZE)["replicas"] == 2
    with pytest.raises(UsageError, match="--replicas 2: at most 1, since"):
        run("--nodes", "1", *SIZE, "--replicas", "2")


def test_what_makes_a_resumed_run_differ_is_offered_only_where_memory_is_short():
    assert "with two slots" in shown("--nodes", "16", *SIZE, "--slots", "3")
    assert "optimizer" not in shown("--nodes", "16", *SIZE, "--slots", "3")


def test_what_does_not_fit_is_refused_with_figures_and_exit_code_1():
    refused = run("--nodes", "16", *SIZE, "--ram", "200GB")
    fits = run("--nodes", "16", *SIZE, "--ram", "384GB")

    assert refused.return_value == 1
    assert "checkpoints need 384.0 GB a node" in refused.output
    assert " ".join(refused.output.split()).count("200.0 GB are available; weights without") == 1
    assert fits.return_value == 0
    assert "of 384.0 GB" in fits.output
    assert run("--nodes", "16", *SIZE, "--ram", "1GB", "--json").return_value == 1


def test_what_was_assumed_says_so_and_what_was_given_does_not():
    assumed = " ".join(shown("--nodes", "16", *SIZE, *RATES).split())
    given = shown(
        *("--nodes", "16", *SIZE, *RATES, "--mtbf-hours", "24"),
        *("--stall", "2s", "--missed", "1", "--restart", "2m"),
    )

    for words in ("assumed: 6.5 failures", "as if each took two nodes", "assumed: 55 GB/s"):
        assert words in assumed
        assert words not in " ".join(given.split())
    assert "every 24 h, restart 2 min 00 s; memory cannot serve 1 %" in given


@pytest.mark.parametrize(
    "args",
    [
        ("--mtbf-hours", "1e-300"),
        ("--mtbf-hours", "1e7"),
        ("--nic-gbps", "1e-300"),
        ("--disk-gbs", "1e-12"),
        ("--missed", "99.99999999999999"),
        ("--missed", "0.000001"),
        ("--slowdown", "0"),
        ("--step", "30d"),
        ("--restart", "30d"),
    ],
)
def test_extreme_figures_give_a_plan(args):
    given = [*("--nodes", "16"), *SIZE, *RATES, *args]

    assert shown(*given)
    assert "Infinity" not in run(*given, "--json").output
    assert "NaN" not in run(*given, "--json").output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--nodes is required"),
        (("--domains", "4"), "--nodes is required"),
        (("--nodes", "0"), "from 1 to 65536"),
        (("--nodes", "9" * 40), "from 1 to 65536"),
        (("--nodes", ""), "names no node"),
        (("--nodes", "gpu[1-"), "is no host list"),
        (("--nodes", "gpu*"), "is a pattern"),
        (("--nodes", "4", "--domains", "0"), "4 nodes are in 1 to 4"),
        (("--nodes", "4", "--domains", "5"), "4 nodes are in 1 to 4"),
        (("--nodes", "4", "--replicas", "5"), "--replicas 5: at most 4, since"),
        (("--nodes", "4", "--replicas", "0"), "--replicas"),
        (("--nodes", "4", "--domains", "/no/such"), "/no/such: No such file or directory"),
        (("--nodes", "4", "--domains", "/tmp"), "Is a directory"),
        (("--nodes", "4", "--slots", "1"), "--slots"),
        (("--nodes", "4", "--mtbf-hours", "nan"), "no number above 0"),
        (("--nodes", "4", "--mtbf-hours", "0"), "no number above 0"),
        (("--nodes", "4", "--nic-gbps", "inf"), "no number above 0"),
        (("--nodes", "4", "--disk-gbs", "fast"), "no number above 0"),
        (("--nodes", "4", "--missed", "nan"), "no number above 0"),
        (("--nodes", "4", "--missed", "101"), "up to 100"),
        (("--nodes", "4", "--missed", "1e-9"), "neither 0 nor"),
        (("--nodes", "4", "--slowdown", "-1"), "no number above 0"),
        (("--nodes", "4", "--step", "soon"), "--step"),
        (("--nodes", "4", "--ram", "much"), "--ram"),
        (("--nodes", "4", "--bytes-per-gpu", "100TB"), "--bytes-per-gpu"),
    ],
)
def test_a_mistake_is_one_clear_usage_error(args, words, capsys):
    assert run_command(["ckpt", "plan", *SIZE, *args]) == 64
    printed = capsys.readouterr()

    assert printed.out == ""
    assert words in " ".join(printed.err.split())
    assert "Traceback" not in printed.err


def test_a_number_of_nodes_does_not_go_with_names(topology):
    with pytest.raises(UsageError, match=r"give a host list .* omit --nodes for all 8"):
        nodes_and_domains("4", topology)
    with pytest.raises(UsageError, match="is known of x1, x2: the topology names 8"):
        nodes_and_domains("x[1-2],gpu01", topology)
    names, domains = nodes_and_domains("gpu[02-03]", topology)

    assert names == ("gpu02", "gpu03")
    assert domains.levels == ("switch 1 up", "switch")


def test_a_file_that_is_no_text_or_too_large_is_a_usage_error(tmp_path):
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"\xff\xfe\x00")
    with large.open("wb") as file:
        file.truncate(16 * 2**20 + 1)

    for path, words in ((binary, "is not text"), (large, "has more than")):
        with pytest.raises(UsageError, match=words):
            nodes_and_domains(None, str(path))


def test_names_that_a_terminal_would_obey_are_shown_and_not_sent(tmp_path):
    path = tmp_path / "labels"
    path.write_text("a\x1bc r\x1bc/1\nb\x1bc r\x1bc/1\n")

    for replicas in ("1", "2"):
        text = shown("--domains", str(path), "--replicas", replicas, *SIZE)
        assert "\x1b" not in text
        assert "/1 (2 states)" in text


def test_the_example_of_the_readme_is_what_the_command_prints(tmp_path, monkeypatch):
    _, topology, _, example, *_ = README.read_text().split("```\n")
    command, _, printed = example.partition("\n")
    (tmp_path / "topology.conf").write_text(topology)
    monkeypatch.chdir(tmp_path)

    assert command.startswith("$ gpuops ckpt plan ")
    assert shown(*shlex.split(command)[4:]) == printed
