"""Baselines in files: what is read, inherited, refused, and written so that it is read again."""

import os
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from gpuops.burnin.baseline import Floor
from gpuops.burnin.baseline_file import (
    Baseline,
    baseline_for,
    baseline_text,
    load_baselines,
    outliers,
)
from gpuops.errors import ConfigError
from gpuops.host.trust import check_folders
from gpuops.resources import data_dir

LEARNED = """
[[floor]]
test = "gemm"
parameters = "size=8192 dtype=bf16"
driver = "570.124"
value = 760.0
median = 790.5
unit = "TFLOP/s"
results = 1024
parts = 1024
nodes = 128
source = "learned: 128 nodes, 2026-11-01 to 2026-11-22, driver 570.124"
"""
QUOTED = """
[[floor]]
test = "hbm"
value = 1905
unit = "GB/s"
source = "DCGM"
"""


@pytest.fixture
def folders(tmp_path):
    shipped, site = tmp_path / "shipped", tmp_path / "site"
    for folder in (shipped, site):
        folder.mkdir()
    return shipped, site


def read(folder, text, name="rack"):
    (folder / f"{name}.toml").write_text(f'shape = "h100-sxm"\n{text}')
    return load_baselines([folder])[name]


def test_a_baseline_is_what_its_file_says(tmp_path):
    found = read(tmp_path, f'about = "ours"\nverified = true\nuntil = 2026-11-22\n{LEARNED}')

    assert found == Baseline(
        name="rack",
        shape="h100-sxm",
        about="ours",
        path=str(tmp_path / "rack.toml"),
        verified=True,
        until=date(2026, 11, 22),
        floors=(
            Floor(
                test="gemm",
                parameters="dtype=bf16 size=8192",
                driver="570.124",
                value=760.0,
                median=790.5,
                unit="TFLOP/s",
                results=1024,
                parts=1024,
                nodes=128,
                source="learned: 128 nodes, 2026-11-01 to 2026-11-22, driver 570.124",
            ),
        ),
    )


def test_what_is_written_is_read_as_the_same_again(tmp_path):
    floors = (
        *read(tmp_path, LEARNED).floors,
        Floor(test='q"\\\x7f', value=3e-05, unit="GB/s", source="é", nccl="2.27"),
        Floor(test="up", value=9.0, unit="us", source="x", higher_is_better=False),
    )
    before = Baseline(name="rack", shape="h100-sxm", until=date(2026, 1, 2), floors=floors)
    before = replace(before, path=str(tmp_path / "rack.toml"), nodes_min=5, results_min=6)

    (tmp_path / "rack.toml").write_text(baseline_text(before))

    assert load_baselines([tmp_path]) == {"rack": before}


def test_a_site_inherits_and_replaces_floors_of_the_same_test_and_software(folders):
    shipped, site = folders
    read(shipped, QUOTED + LEARNED, "h100-sxm")
    changed = LEARNED.replace("760.0", "770.0") + LEARNED.replace("570.124", "580")
    (site / "ours.toml").write_text(f'inherits = "h100-sxm"\n{changed}')

    baselines = load_baselines(folders)

    shown = [(x.test, x.driver, x.value) for x in baselines["ours"].floors]
    assert shown == [("hbm", "", 1905), ("gemm", "570.124", 770.0), ("gemm", "580", 760.0)]
    assert baselines["ours"].shape == "h100-sxm"
    assert baseline_for(baselines, "h100-sxm") == (baselines["ours"], None)
    assert baseline_for(baselines, "a100") == (None, None)


def test_of_two_for_one_shape_none_is_used(folders):
    shipped, site = folders
    read(shipped, QUOTED, "h100-sxm")
    read(site, QUOTED, "ours")

    found, problem = baseline_for(load_baselines(folders), "h100-sxm")

    assert found is None
    assert "'h100-sxm' (" in problem
    assert "'ours' (" in problem
    assert "let one inherit from the other" in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 1", r"unknown key colour|colour"),
        ('verified = "yes"', "verified of the baseline .* must be true or false, got 'yes'"),
        ("nodes_min = true", "nodes_min of the baseline .* must be a whole number"),
        ("nodes_min = -5", r"the baseline .*\.toml: nodes_min = -5: at least 1 is needed"),
        ("results_min = 0", r"the baseline .*\.toml: results_min = 0: at least 1 is needed"),
        ('inherits = "h200"', "there is no baseline|h200"),
        ("floor = 3", r"write each as a table \[\[floor\]\]"),
        (QUOTED + "colour = 1", "floor 1 of the baseline .*colour"),
        (QUOTED.replace("source", "nccl"), "floor 1 of the baseline .* lacks 'source'"),
        (QUOTED.replace('"DCGM"', '" "'), r"floor 1 .* \(hbm\): test and source must not be empty"),
        (QUOTED.replace('"GB/s"', '"furlongs"'), "furlongs"),
        (QUOTED.replace("1905", "1905000000000"), "looks like another unit: GB/s are expected"),
        (QUOTED.replace("1905", '"fast"'), "value of floor 1 .* must be a number, got 'fast'"),
        (QUOTED.replace("1905", "nan"), "must be a finite number"),
        (
            QUOTED + 'higher_is_better = "no"',
            "higher_is_better of floor 1 .* must be true or false",
        ),
        (QUOTED + "nodes = -1", "parts and nodes must not be below zero"),
        (QUOTED + "nodes = 1.5", "nodes of floor 1 .* must be a whole number"),
        (
            LEARNED.replace("nodes = 128", "nodes = 7"),
            "learned from 1024 results of 7 nodes; this baseline asks for 20 of 8",
        ),
        (LEARNED.replace("results = 1024", "results = 19"), "learned from 19 results of 128 nodes"),
        (LEARNED.replace("median = 790.5", ""), "a learned floor has the median of its results"),
        (LEARNED.replace("790.5", "700.0"), "the floor 760 is above the median 700"),
        (LEARNED.replace("760.0", "0.76"), "the floor 0.76 is a thousand times off its median"),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as raised:
        read(tmp_path, text)

    assert "rack.toml" in str(raised.value)


def test_a_file_without_a_shape_or_of_another_than_its_base_is_refused(folders):
    shipped, site = folders
    (site / "none.toml").write_text(QUOTED)
    read(shipped, QUOTED, "h100-sxm")
    (site / "other.toml").write_text('inherits = "h100-sxm"\nshape = "a100"\n')
    errors = []

    found = load_baselines(folders, errors.append)

    assert list(found) == ["h100-sxm"]
    none, other = (str(x).partition(".toml")[2] for x in errors)
    assert none == " lacks 'shape'"
    assert other.startswith(": its shape is 'a100', and that of 'h100-sxm', its base, 'h100-sxm':")
    assert other.endswith(" floors hold for one shape")


def test_a_bad_floor_is_left_out_and_the_others_stay(tmp_path):
    (tmp_path / "rack.toml").write_text('shape = "x"\n' + QUOTED.replace("GB/s", "?") + LEARNED)
    errors = []

    found = load_baselines([tmp_path], errors.append)["rack"]

    assert [x.test for x in found.floors] == ["gemm"]
    assert len(errors) == 1


def test_a_floor_a_thousand_times_off_its_neighbours_or_of_another_unit_is_named(tmp_path):
    sizes = {8: 0.01, 1024: 1.5, 2**20: 90.0, 2**33: 440.0}
    floors = tuple(
        Floor(
            test="collectives",
            parameters=f"collective=all_reduce ranks=8 size={size}",
            value=value,
            unit="GB/s",
            source="ours",
        )
        for size, value in sizes.items()
    )
    whole = Baseline(name="x", shape="x", floors=floors)
    off = replace(whole, floors=(*floors[:3], replace(floors[3], value=440_000.0)))
    unit = replace(whole, floors=(*floors[:3], replace(floors[3], unit="us")))
    alone = replace(whole, floors=floors[:1])

    assert list(outliers(whole)) == list(outliers(alone)) == []
    (apart,) = outliers(off)
    (other,) = outliers(unit)
    about = "collectives collective=all_reduce ranks=8 size=8589934592"
    assert apart == f"{about}: 440000 GB/s is 4889 times off the nearest of its kind"
    assert other == f"{about}: its unit us is not that of others, GB/s"


def test_what_is_shipped_is_quoted_unverified_and_for_shipped_profiles():
    folder = data_dir("checks")
    found = load_baselines([folder / "baselines"])

    profiles = {path.stem for path in (folder / "profiles").glob("*.toml")}
    assert len(found) >= 4
    for item in found.values():
        assert item.name == item.shape
        assert item.shape in profiles
        assert not item.verified
        assert not any(floor.may_fail or floor.median for floor in item.floors)
        assert list(outliers(item)) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts what users can write")
def test_root_reads_no_baseline_that_a_user_can_write(tmp_path):
    site = tmp_path / "site"
    (site / "baselines").mkdir(parents=True)
    path = site / "baselines" / "ours.toml"
    path.write_text(QUOTED)
    path.chmod(0o666)

    with pytest.raises(ConfigError, match=r"root does not read .*ours\.toml: it belongs to uid 0"):
        check_folders(site, uid=0)
    path.chmod(0o644)
    assert check_folders(site, uid=0).baselines[-1] == Path(site / "baselines")
