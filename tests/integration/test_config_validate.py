"""``gpuops config validate``: every mistake in what an operator writes, in one go."""

import os

import pytest
from support.command import gpuops

SILENCE = """
[[silence]]
check = "memory"
node = "gpu[001-008]"
until = {until}
owner = "ann"
reason = "DIMM swap CHG7"
"""
SUITE = """
deadline_s = 5
[[check]]
name = "site/fan"
timeout_s = 2
"""


class Site:
    """A site's folder, in which one thing after another can go wrong."""

    def __init__(self, path):
        self.path = path / "site"
        self.config = path / "gpuops.toml"
        self.path.mkdir()
        self.write("suites/own.toml", SUITE)
        self.write("profiles/lab.toml", 'nic_count = { value = 8, source = "ours" }\n')
        self.write("silences.toml", SILENCE.format(until="2099-01-01"))
        self.write("checks.d/fan", "#!/bin/sh\nexit 0\n").chmod(0o755)
        self.configure("")

    def write(self, name, text):
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def configure(self, more):
        self.config.write_text(f'{more}\n[check]\nsite_dir = "{self.path}"\nsuite = "own"\n')

    def validate(self, env=None):
        return gpuops("--config", str(self.config), "config", "validate", env=env)

    def mistakes(self, env=None):
        run = self.validate(env)
        assert (run.returncode, run.stdout) == (64, "")
        lines = run.stderr.splitlines()
        return [line.removeprefix("mistake: ") for line in lines if line.startswith("mistake: ")]


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_what_is_shipped_is_valid():
    run = gpuops("config", "validate", env={"GPUOPS_CONFIG": ""})

    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("valid: configuration (")


def test_a_site_without_mistakes_is_told_what_was_read(site):
    run = site.validate()

    assert run.returncode == 0
    assert f"valid: configuration ({site.config}); suites: default, " in run.stdout
    assert "own" in run.stdout
    assert "lab" in run.stdout
    assert run.stdout.endswith("; silences: 1; site checks: 1\n")


def test_what_is_only_doubtful_is_said_and_is_no_mistake(site):
    site.write("checks.d/forgotten", "").chmod(0o755)
    run = site.validate()

    assert run.returncode == 0
    long, forgotten = run.stderr.splitlines()
    assert long.startswith("warning: silence 1 of ")
    assert long.endswith("by ann) lasts until 2099-01-02T00:00Z, more than 90 days")
    assert forgotten.startswith(f"warning: no suite runs {site.path}/checks.d/forgotten")


def test_every_mistake_of_every_file_is_said_in_one_line_each(site):
    site.configure('[gate]\nmode = "enforced"\nfuse_nodez = 3\n')
    site.write("suites/own.toml", SUITE.replace("fan", "fin") + "[[check]]\nname = 'memroy'\n")
    site.write("suites/other.toml", "deadline_s = '8s'\n[unknown]\ncrashed = 'warn'\n")
    site.write("profiles/lab.toml", 'power_limit_w = { value = "700 MW", source = "x" }\n')
    site.write("xid/own.toml", "source = 'x'\n[[xid]]\ncodes = 1\n[[xid]]\ncodes = [1]\n")
    site.write("rules/own.toml", "[[rule]]\nid = 'a'\n[[rule]]\nid = 'b'\n")
    site.write(
        "silences.toml",
        SILENCE.format(until="2020-01-01") + SILENCE.format(until="2099-01-01T00:00:00"),
    )

    told = site.mistakes({"GPUOPS_PROFILE": "labb"})
    for wanted in (
        "gate.mode = 'enforced'",
        "unknown key 'gate.fuse_nodez'; did you mean 'gate.fuse_nodes'",
        "no check 'memroy'; did you mean 'memory'",
        f"there is no file {site.path}/checks.d/fin",
        "deadline_s of the suite",
        "suites/other.toml runs no check",
        "unknown key 'crashed'; did you mean 'crash'",
        "a number of watts is expected, got '700 MW'",
        "no profile 'labb'; did you mean 'lab'",
        "xid 1 in ",
        "xid [1] in ",
        "rule 'a' in",
        "rule 'b' in",
        "by ann) ended 2020-01-02T00:00Z: remove it, or renew it",
        "a time needs its offset",
    ):
        assert [line for line in told if wanted in line], wanted
    assert len(told) == 15


def test_a_file_that_is_no_toml_does_not_hide_the_others(site):
    site.write("suites/own.toml", "deadline_s = = 3\n")
    site.write("profiles/lab.toml", "[[")
    site.write("silences.toml", "silence\n")

    told = site.mistakes()

    assert sorted(line.split(" as TOML")[0].split("site/")[1] for line in told) == [
        "profiles/lab.toml",
        "silences.toml",
        "suites/own.toml",
    ]


def test_a_store_of_an_unknown_kind_is_a_mistake_that_shows_no_password(site):
    """A check only spools, and its flusher has nobody to complain to."""
    (told,) = site.mistakes({"GPUOPS_STORE": "mysql://ann:hunter2@db/gpuops"})

    assert "store.url: the store URL" in told
    assert "is of kind 'mysql', which is not known" in told
    assert "hunter2" not in told


def test_a_configuration_that_cannot_be_read_is_one_mistake_of_many(site):
    site.config.write_text("[check\n")
    site.write("profiles/lab.toml", "[[")

    told = site.mistakes({"GPUOPS_SITE_DIR": str(site.path)})

    assert len(told) == 2
    assert f"cannot read {site.config} as TOML" in told[0]


def test_a_sites_folder_and_a_suite_that_are_not_there_are_mistakes(site):
    told = site.mistakes({"GPUOPS_SITE_DIR": "/no/such/site", "GPUOPS_SUITE": "ownn"})

    assert told[0] == "the site's folder /no/such/site (check.site_dir) does not exist"
    assert told[1].startswith("check.suite: there is no suite 'ownn'")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
def test_every_file_that_root_would_refuse_is_named(site):
    for name in ("suites/own.toml", "profiles/lab.toml", "checks.d/fan"):
        os.chown(site.path / name, 12345, 0)

    told = site.mistakes()

    assert len(told) == 3
    assert all("it belongs to uid 12345" in line for line in told)


def test_control_characters_in_a_file_do_not_reach_the_terminal(site):
    site.write("suites/own.toml", '"\\u001b[31m" = 1\ndeadline_s = 3\n')

    run = site.validate()

    assert run.returncode == 64
    assert "\x1b" not in run.stderr


BASELINE = """
shape = "lab"
[[floor]]
test = "gemm"
parameters = "dtype={name}"
unit = "{unit}"
value = {value}
source = "ours"
"""


def test_a_baseline_is_checked_floor_by_floor_and_against_the_others(site):
    fast = BASELINE.format(name="bf16", unit="TFLOP/s", value=790)
    slow = BASELINE.format(name="fp32", unit="TFLOP/s", value=0.05).replace('shape = "lab"', "")
    few = 'median = 800\nsource = "learned: 3 nodes"\nnodes = 3\nresults = 24\n'
    learned = fast.replace('source = "ours"', few).replace("lab", "other")
    site.write("baselines/lab.toml", fast + slow)
    site.write("baselines/twin.toml", BASELINE.format(name="bf16", unit="miles", value=1))
    site.write("baselines/other.toml", learned)

    found = site.mistakes()

    assert len(found) == 5
    text = "\n".join(found)
    assert "lab.toml: gemm dtype=bf16: 790 TFLOP/s is 15800 times off the nearest" in text
    assert "lab.toml: gemm dtype=fp32: 0.05 TFLOP/s is 15800 times off the nearest" in text
    assert "twin.toml (gemm dtype=bf16): " in text
    assert "miles" in text
    assert "24 results of 3 nodes; this baseline asks for 20 of 8" in text
    assert "the baselines 'lab' (" in text
