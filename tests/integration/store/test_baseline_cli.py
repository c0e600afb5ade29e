"""``gpuops baseline`` as an operator runs it, over a store and a site's folder."""

import json
import random
from dataclasses import dataclass, replace

import pytest
from support.stories import Teller, envelopes, measured

from gpuops.cli.main import run_command
from gpuops.errors import EXIT_OK, EXIT_TRY_LATER, EXIT_USAGE
from gpuops.host.clock import SystemClock
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest

NOW_US = SystemClock().now_us()
DAY_US = 86_400 * 10**6


@dataclass
class Done:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str


class Site:
    """A store that burn-ins of a fleet wrote, and a site's folder."""

    def __init__(self, folder, capsys):
        self.capsys = capsys
        self.url = f"sqlite:///{folder}/store.db"
        self.baselines = folder / "site" / "baselines"
        self.baselines.mkdir(parents=True)
        self.random = random.Random(1)

    def burn_in(self, days_ago, *, nodes=8, gpus=20, slow=1.0, driver="570.124", shape="h100-sxm"):
        """Record a burn-in of each node, *days_ago*."""
        teller = Teller(f"{days_ago} {driver} {shape}")
        for node in range(nodes):
            teller.now_us = NOW_US - days_ago * DAY_US
            run_id = teller.run_id()
            for gpu in range(gpus):
                changes = {"shape": shape, "software": {"driver": driver, "nccl": "2.27"}}
                changes["part"] = {"kind": "gpu", "id": f"GPU-{node}-{gpu}"}
                value = slow * self.random.gauss(790, 8) * (0.9 if node == 7 else 1)
                told = measured(run_id, value=value, **changes)
                teller.tell("burnin.measured", told, node=f"n{node}")
            at = {"start_us": teller.now_us, "end_us": teller.now_us, "parts": [], "findings": []}
            check = {"suite": "burnin", "trigger": "manual", "verdict": "pass", **at}
            event = teller.event("check.ran", check, node=f"n{node}")
            teller.add(replace(event, id=run_id))
        with open_store(self.url, mode="write") as store, store.begin() as connection:
            ingest(connection, envelopes(teller.lines, cluster="default"), 1)

    def gpuops(self, *args):
        return Done(run_command(["baseline", *args]), *self.capsys.readouterr())

    def json(self, *args):
        done = self.gpuops(*args, "--json")
        assert done.returncode == EXIT_OK, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path, monkeypatch, capsys):
    made = Site(tmp_path, capsys)
    monkeypatch.setenv("GPUOPS_STORE", made.url)
    monkeypatch.setenv("GPUOPS_SITE_DIR", str(tmp_path / "site"))
    return made


def test_learned_floors_are_a_file_that_burn_ins_find_and_that_moves_with_the_driver(site):
    site.burn_in(40)
    out = site.baselines / "rack.toml"

    learned = site.gpuops("learn", "--out", str(out))
    again = site.gpuops("learn", "--out", str(out))
    listed = {item["name"]: item for item in site.json("show")["baselines"]}
    site.burn_in(3, slow=0.95, driver="580.65")
    changed = site.json("diff", "rack")
    shown = site.gpuops("diff", "rack")

    assert (learned.returncode, learned.stdout) == (0, f"wrote {out}: 1 floors of h100-sxm\n")
    assert "n7 is unlike its fleet in h100-sxm: gemm dtype=bf16 size=8192" in learned.stderr
    assert (again.returncode, again.stderr) == (
        EXIT_USAGE,
        f"gpuops: {out} exists; use --force to replace it\n",
    )
    rack = listed["rack"]
    assert (rack["shape"], rack["inherits"], rack["verified"]) == ("h100-sxm", "h100-sxm", True)
    floor = next(item for item in rack["floors"] if item["test"] == "gemm")
    assert (floor["results"], floor["parts"], floor["nodes"]) == (160, 160, 8)
    assert floor["source"].startswith("learned: 8 nodes, ")
    assert floor["source"].endswith(", driver 570.124, NCCL 2.27")
    assert floor["may_fail"]
    assert 690 < floor["value"] < floor["median"] < 800
    (moved,) = changed["changes"]  # what is shipped, and nobody measured, is no change
    assert moved["percent"] == pytest.approx(-5, abs=0.7)
    assert "driver 570.124 -> 580.65, NCCL 2.27" in shown.stdout
    assert "-5." in shown.stdout or "-4." in shown.stdout


def test_too_few_results_are_said_with_what_there_is(site):
    site.burn_in(3, nodes=3, gpus=8)

    few = site.gpuops("learn")
    older = site.gpuops("learn", "--since", "1d")
    settled = site.gpuops("learn", "--nodes-min", "3")

    assert (few.returncode, few.stdout) == (EXIT_TRY_LATER, "")
    assert "no floor for h100-sxm: gemm" in few.stderr
    assert "24 results of 3 nodes passed" in few.stderr
    assert older.returncode == EXIT_TRY_LATER
    assert "the store has no burn-in of root's that passed" in older.stderr
    assert settled.returncode == EXIT_OK
    assert "nodes_min = 3" in settled.stdout


def test_several_shapes_are_named_and_one_is_learned_at_a_time(site):
    site.burn_in(3)
    site.burn_in(3, shape="EPYC 9654 x 192")

    both = site.gpuops("learn")
    none = site.gpuops("learn", "--shape", "nonsense")
    one = site.gpuops("learn", "--shape", "EPYC 9654 x 192")

    assert both.returncode == EXIT_USAGE
    assert "name one with --shape: 'EPYC 9654 x 192', 'h100-sxm'" in both.stderr
    assert (none.returncode, none.stdout) == (EXIT_TRY_LATER, "")
    assert "of the shape 'nonsense' (it has: 'EPYC 9654 x 192', 'h100-sxm')" in none.stderr
    assert 'shape = "EPYC 9654 x 192"' in one.stdout
    assert "inherits" not in one.stdout


def test_shipped_floors_are_shown_as_unverified(site):
    shown = site.gpuops("show", "h100-sxm")
    unknown = site.gpuops("show", "h1000-sxm")

    assert "not verified here: quoted floors only warn" in shown.stdout
    assert "440" in shown.stdout
    assert "oci-hpc" in shown.stdout
    assert unknown.returncode == EXIT_USAGE
    assert "h100-sxm" in unknown.stderr
