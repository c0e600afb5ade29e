"""Hardware profiles: what a file becomes, what a mistake brings, which one is a node's."""

from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from gpuops.checks.core.profile import (
    NO_PROFILE,
    FlagExpectation,
    NumberExpectation,
    NumbersExpectation,
    Profile,
    ProfileMatch,
    TextExpectation,
)
from gpuops.checks.core.profile_files import BOUNDS, load_profiles, parse_profile, profile_for
from gpuops.errors import ConfigError
from gpuops.resources import data_dir

H100 = "NVIDIA H100 80GB HBM3"
FILE = Path("/etc/site/profiles/h100.toml")


def told(value, source="a test"):
    return {"value": value, "source": source}


def profile(name, **match):
    return Profile(name=name, path=f"/profiles/{name}.toml", match=ProfileMatch(**match))


def found(*profiles, node="gpu007", gpu_names=(H100,) * 8, gpu_count=8, named=None):
    return profile_for(
        {item.name: item for item in profiles},
        node=node,
        gpu_names=gpu_names,
        gpu_count=gpu_count,
        named=named,
    )


def test_a_profile_is_what_its_file_says(tmp_path):
    (tmp_path / "h100.toml").write_text(
        """
        about = "eight of them"
        power_limit_w = { value = 700, source = "data sheet" }
        ecc = { value = true, source = "ours" }
        driver = { value = ["570.1", "575.2"], source = "ours" }
        clock_source = { value = "tsc", source = "ours" }
        [match]
        gpu = "NVIDIA H100 .*"
        gpu_count = 8
        nodes = ["gpu[001-128]", "dgx*"]
        """
    )

    assert load_profiles([tmp_path]) == {
        "h100": Profile(
            name="h100",
            path=str(tmp_path / "h100.toml"),
            about="eight of them",
            match=ProfileMatch(gpu="NVIDIA H100 .*", gpu_count=8, nodes=("gpu[001-128]", "dgx*")),
            power_limit_w=NumberExpectation(value=700.0, source="data sheet"),
            ecc=FlagExpectation(value=True, source="ours"),
            driver=TextExpectation(value=("570.1", "575.2"), source="ours"),
            clock_source=TextExpectation(value=("tsc",), source="ours"),
        )
    }


def test_a_sites_profile_replaces_the_shipped_one_of_its_name(tmp_path):
    for folder, watts in (("shipped", 700), ("site", 650)):
        (tmp_path / folder).mkdir()
        text = f'power_limit_w = {{ value = {watts}, source = "{folder}" }}'
        (tmp_path / folder / "h100.toml").write_text(text)

    profiles = load_profiles([tmp_path / "shipped", tmp_path / "site"])

    assert profiles["h100"].power_limit_w == NumberExpectation(value=650.0, source="site")


def test_the_shipped_profiles_can_be_read_and_match_something():
    profiles = load_profiles([data_dir("checks") / "profiles"])
    assert profiles
    for shipped in profiles.values():
        assert shipped.match != ProfileMatch(), shipped.name


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"power_limit": told(1)}, "unknown key 'power_limit'; did you mean 'power_limit_w'"),
        ({"power_limit_w": 700}, r"write it as { value = …, source = \"…\" }, got 700"),
        ({"power_limit_w": {**told(700), "unit": "W"}}, "write it as { value"),
        ({"power_limit_w": {"value": 700}}, "must name the source of its value"),
        ({"power_limit_w": told(700, "  ")}, "must name the source of its value"),
        ({"power_limit_w": told("700 MW")}, "a number of watts is expected, got '700 MW'"),
        ({"power_limit_w": told(True)}, "a number of watts is expected, got True"),
        (
            {"power_limit_w": told(float("nan"))},
            "nan looks like another unit: watts are expected",
        ),
        (
            {"power_limit_w": told(700_000)},
            "700000 looks like another unit: watts are expected",
        ),
        ({"dimm_bytes": told(80)}, "80 looks like another unit: bytes are expected"),
        ({"gpu_count": told(7.5)}, "a whole number of GPUs is expected, got 7.5"),
        ({"ecc": told("on")}, "ecc of the profile .*: true or false is expected, got 'on'"),
        ({"ecc": told(1)}, "true or false is expected, got 1"),
        ({"driver": told(570.86)}, "a text or a list of texts is expected, got 570.86"),
        ({"driver": told([])}, r"a text or a list of texts is expected, got \[\]"),
        (
            {"interfaces": told(["ens1f0", "en/0"])},
            "name of a network interface is expected, got 'en",
        ),
        ({"interfaces": told("enp129s0f0np0np0")}, "the name of a network interface is expected"),
        ({"ib_pkeys": told(["0x8001", "32769"])}, "P_Key such as 0x8001 is expected, got '32769'"),
        ({"ib_pkeys": told("0x8000")}, "a P_Key such as 0x8001 is expected"),
        ({"ib_pkeys": told("0x0")}, "a P_Key such as 0x8001 is expected"),
        ({"nic_pcie_generation": told(32)}, "32 looks like another unit: PCIe generations"),
        ({"services": told(["munge", 3])}, "every item must be a text that is not empty"),
        (
            {"nic_rate_gbs": told(400)},
            "400 looks like another unit: gigabytes a second are expected",
        ),
        ({"nic_rate_gbs": told([50, 400])}, "400 looks like another unit: gigabytes a second"),
        ({"nic_rate_gbs": told([])}, r"gigabytes a second is expected, got \[\]"),
        ({"inherits": "h10"}, r"inherits of .*: there is no profile 'h10'; did you mean 'h100'"),
        ({"inherits": ["h100"]}, "there is no profile"),
        ({"match": "H100"}, "match of the profile .* is a table, got 'H100'"),
        ({"match": {"gpus": 8}}, "unknown key 'gpus'; did you mean 'gpu'"),
        ({"match": {"gpu": "H100("}}, r"gpu of match .*the pattern 'H100\(' cannot be read"),
        ({"match": {"gpu": r"(\w+\s?)+"}}, "repeats a repetition"),
        ({"match": {"gpu": ["H100"]}}, "a pattern of the GPU's name is expected"),
        ({"match": {"gpu_count": "8"}}, "a whole number of GPUs is expected, got '8'"),
        ({"match": {"nodes": "gpu[3-1]"}}, "nodes of match .*runs backwards"),
    ],
)
def test_a_mistake_is_answered_with_what_is_wanted(table, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_profile(FILE, table, {"h100": Profile(name="h100")})

    assert str(FILE) in str(caught.value)


def test_whoever_collects_mistakes_gets_all_of_them_and_the_rest_of_the_profile():
    mistakes = []
    table = {"ecc": told(3), "gpu_cuont": told(8), "nic_count": told(8), "match": {"gpu": "("}}

    kept = parse_profile(FILE, table, {}, mistakes.append)

    assert [str(item).split()[0] for item in mistakes] == ["the", "ecc", "gpu"]
    assert (kept.nic_count, kept.ecc) == (NumberExpectation(value=8.0, source="a test"), None)


def test_a_sites_profile_takes_over_what_it_inherits_and_is_the_one_that_is_taken(tmp_path):
    files = {
        "shipped/h100": 'match = { gpu = ".*" }\necc = { value = true, source = "shipped" }',
        "site/ours": 'inherits = "h100"\nnic_count = { value = 8, source = "ours" }',
        "site/h100": 'inherits = "h100"\nnic_count = { value = 4, source = "ours" }',
    }
    for name, text in files.items():
        path = tmp_path / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    folders = [tmp_path / "shipped", tmp_path / "site"]
    profiles = load_profiles(folders)
    (folders[1] / "ours.toml").unlink()

    taken, problem = found(*profiles.values())
    alone, _ = found(*load_profiles(folders).values())

    assert (taken.name, taken.nic_count.value, taken.ecc.source) == ("ours", 8, "shipped")
    assert problem is None
    assert (alone.name, alone.nic_count.value, alone.ecc.source) == ("h100", 4, "shipped")


@pytest.mark.parametrize("key", BOUNDS)
def test_a_number_is_believed_up_to_its_bounds_and_not_beyond(key):
    bounds = BOUNDS[key]

    low, high = (int(end) if bounds.whole else end for end in (bounds.low, bounds.high))

    assert (bounds.check(low), bounds.check(high)) == (low, high)
    for beyond in (low - 1, high + 1):
        with pytest.raises(ValueError, match="another unit"):
            bounds.check(beyond)


def test_every_number_of_a_profile_has_bounds():
    hints = get_type_hints(Profile)
    numbers = {
        item.name
        for item in fields(Profile)
        if {NumberExpectation, NumbersExpectation} & set(get_args(hints[item.name]))
    }

    assert set(BOUNDS) == numbers


def test_the_profile_that_matches_is_taken():
    mine = profile("h100", gpu="NVIDIA H100 .*", gpu_count=8, nodes=("gpu[001-128]",))

    assert found(mine, profile("h200", gpu="NVIDIA H200.*")) == (mine, None)


@pytest.mark.parametrize(
    "match",
    [
        {"gpu": "NVIDIA H200.*"},
        {"gpu": "H100"},  # the whole name is wanted
        {"gpu_count": 4},
        {"nodes": ("gpu[008-128]", "dgx*")},
        {},
    ],
)
def test_all_that_a_profile_asks_for_must_hold(match):
    taken, problem = found(profile("other", **match))

    assert taken is NO_PROFILE
    assert problem == (
        "no profile matches this node (8 GPUs, NVIDIA H100 80GB HBM3): it is judged only by"
        " what the devices themselves report"
    )


def test_a_node_without_gpus_needs_no_profile():
    mine = profile("h100", gpu="NVIDIA H100 .*")

    assert found(mine, gpu_names=(), gpu_count=0) == (NO_PROFILE, None)


def test_a_model_that_nvml_does_not_tell_matches_no_profile_that_asks_for_one():
    by_model, by_node = profile("h100", gpu=".*"), profile("rack", nodes=("gpu*",))

    assert found(by_model, gpu_names=())[0] is NO_PROFILE
    assert "of unknown model" in found(by_model, gpu_names=())[1]
    assert found(by_node, gpu_names=()) == (by_node, None)


def test_a_node_of_two_models_is_no_profiles_of_one():
    mine = profile("h100", gpu="NVIDIA H100 .*")

    taken, problem = found(mine, gpu_names=(H100, "NVIDIA A100-SXM4-80GB"))

    assert taken is NO_PROFILE
    assert "NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3" in problem


def test_of_two_that_match_none_is_applied_and_both_are_named_with_their_files():
    taken, problem = found(profile("h100", gpu=".*H100.*"), profile("rack7", nodes=("gpu*",)))

    assert taken is NO_PROFILE
    assert "'h100' (/profiles/h100.toml) and 'rack7' (/profiles/rack7.toml) all match" in problem


def test_a_profile_that_is_named_is_taken_whatever_matches():
    mine, other = profile("h100", gpu=".*H100.*"), profile("lab")

    assert found(mine, other, named="lab") == (other, None)
    with pytest.raises(ConfigError, match=r"no profile 'h10'; did you mean 'h100'\? .*h100, lab"):
        found(mine, other, named="h10")


def test_what_a_sites_profile_says_itself_is_not_a_shipped_value(tmp_path):
    (tmp_path / "ours.toml").write_text(
        'inherits = "h100-sxm"\npcie_width = { value = 8, source = "ours" }'
    )

    ours = load_profiles([data_dir("checks") / "profiles", tmp_path])["ours"]

    assert (ours.pcie_width.is_shipped, ours.nvlink_count.is_shipped) == (False, True)


# The names of NVIDIA open-gpu-kernel-modules, "Compatible GPUs"; those without a shipped profile
# are beside the ones that have one.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "none"),
        ("NVIDIA A100 80GB PCIe", "none"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100", "none"),
        ("NVIDIA H800", "none"),
        ("NVIDIA H800 PCIe", "none"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20-sxm"),
        ("NVIDIA H20-3e", "h20-sxm"),
        ("NVIDIA H20 NVL16", "none"),
        ("NVIDIA GH200 120GB", "gh200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200"),
        ("NVIDIA L40", "none"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB10", "none"),
        ("NVIDIA GB200 MIG 1g.23gb", "none"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "none"),
        ("GRID H100-8C", "none"),
    ],
)
def test_a_shipped_profile_is_found_by_the_name_that_nvml_gives(name, expected):
    profiles = load_profiles([data_dir("checks") / "profiles"])

    taken, problem = profile_for(profiles, node="n1", gpu_names=(name,) * 8, gpu_count=8)

    assert taken.name == expected
    assert (problem is None) == (expected != "none")


def test_no_shipped_profile_judges_the_link_of_a_card_that_any_slot_may_hold():
    profiles = load_profiles([data_dir("checks") / "profiles"])

    for name in ("h100-pcie", "h100-nvl", "h200-nvl", "l40s", "gh200", "gb200", "gb300"):
        assert profiles[name].pcie_width is None, name
        assert profiles[name].pcie_generation is None, name
