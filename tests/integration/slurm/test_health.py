"""Our HealthCheckProgram in a real Slurm: it drains, and takes back what it drained itself."""

import json

import pytest
from support.command import gpuops
from support.slurm import wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]


def checks(history, name):
    return history.runs(name, "health")


def test_an_idle_node_that_fails_is_drained_and_comes_back_after_its_repair(
    cluster, history, tmp_path
):
    node = cluster["n1"]
    node.xid(79)
    node.checks_health()
    assert cluster.drained_for("n1", "gpuops: fail gpu_xid GPU-0000 79")

    told = gpuops("repair", "n1", "--what", "swapped GPU 0", "--by", "ann", env=node.env)
    assert (told.returncode, told.stderr) == (0, "")

    cluster.in_use("n1")
    assert history.wait("node.resumed", "n1")["actor"] == "gpuops"
    assert node.drain_record() is None


def test_faulty_gpu_hardware_comes_back_after_a_diagnostic_of_the_idle_node(
    cluster, history, tmp_path
):
    node = cluster["n1"]
    site = tmp_path / "site" / "suites"
    site.mkdir(parents=True)
    # The shipped one has time for a diagnostic of minutes, and runs all checks.
    (site / "diag.toml").write_text(
        'about = "short"\ninherits = "full"\ndeadline_s = 60\nrun = ["dcgm_diag"]\n'
    )
    result = {"entity_group": "GPU", "entity_id": 0, "status": "Pass"}
    category = {"category": "Hardware", "tests": [{"name": "memory", "results": [result]}]}
    told = json.dumps({"DCGM Diagnostic": {"test_categories": [category]}})
    node.root.write("usr/bin/dcgmi", f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
    node.set(GPUOPS_SITE_DIR=str(site.parent))
    node.lose_gpu()
    node.checks_health()
    assert cluster.drained_for("n1", "gpuops: fail gpu_lost")
    node.reset_nvml()
    kept = history.wait("gate.decided", "n1", course="kept")
    assert "no diagnostic has passed since the drain" in kept["why"]

    (node.root.path / "usr/bin/dcgmi").chmod(0o755)
    (node.home / "state" / "diagnostic.json").unlink(missing_ok=True)

    cluster.in_use("n1")
    assert history.wait("check.ran", "n1", trigger="diag")


def test_a_manual_drain_is_never_undone(cluster, history):
    cluster.drain("n1", "ann: swapping a cable")
    cluster["n1"].set(GPUOPS_PASSES_TO_RESUME="1")
    cluster["n1"].checks_health()
    wait_until(lambda: checks(history, "n1") >= 2, "no health checks")

    assert cluster.state("n1") == ("IDLE+DRAIN", "ann: swapping a cable")


def test_our_drain_is_an_administrators_once_they_changed_its_reason(cluster, history):
    node = cluster["n1"]
    node.set(GPUOPS_PASSES_TO_RESUME="1")
    node.lose_gpu()
    node.checks_health()
    reason = cluster.drained_for("n1", "gpuops: fail gpu_lost")
    history.wait("node.drained", "n1", actor="gpuops")
    cluster.drain("n1", f"{reason}; ann keeps it")
    node.reset_nvml()
    seen = checks(history, "n1")
    wait_until(lambda: checks(history, "n1") >= seen + 2, "no health checks")

    assert cluster.state("n1") == ("IDLE+DRAIN", f"{reason}; ann keeps it")
    assert history.wait("node.drained", "n1", actor="administrator")["reason"].endswith("keeps it")


def test_a_node_that_a_person_resumed_is_recorded_as_such(cluster, history):
    node = cluster["n1"]
    node.set(GPUOPS_PASSES_TO_RESUME="100")
    node.lose_gpu()
    node.checks_health()
    cluster.drained_for("n1", "gpuops: fail gpu_lost")
    history.wait("node.drained", "n1", actor="gpuops")
    node.reset_nvml()
    # A check that asked NVML before would drain the resumed node again.
    wait_until(lambda: node.drain_record()["passes"] > 0, "no check has passed since")
    cluster.scontrol("update", "NodeName=n1", "State=RESUME")

    assert "by hand" in history.wait("node.resumed", "n1", actor="administrator")["reason"]


def test_observing_drains_nothing(cluster, history):
    cluster["n1"].set(GPUOPS_MODE="observe")
    cluster["n1"].lose_gpu()
    cluster["n1"].checks_health()

    assert history.wait("gate.decided", "n1")["course"] == "would_drain"
    assert cluster.state("n1") == ("IDLE", None)


def test_the_reason_is_brought_by_a_health_check_where_the_helper_could_not(cluster):
    """The node has slurmd's own reason: our record says that we failed that very hook."""
    node = cluster["n1"]
    node.lose_gpu()
    node.use_scontrol("exit 1")
    cluster.submit("exit 0", "-w", "n1", "--no-requeue")
    assert cluster.drained_for("n1", "Prolog error")

    node.env.pop("GPUOPS_SLURM_BIN_DIR")
    node.set()
    node.checks_health()

    assert cluster.drained_for("n1", "gpuops: fail gpu_lost")


def test_a_prolog_error_that_is_not_ours_keeps_its_reason(cluster, history):
    cluster.drain("n1", "Prolog error")
    cluster["n1"].set(GPUOPS_PASSES_TO_RESUME="1")
    cluster["n1"].checks_health()
    wait_until(lambda: checks(history, "n1") >= 2, "no health checks")

    assert cluster.state("n1") == ("IDLE+DRAIN", "Prolog error")


def test_a_scontrol_that_hangs_ends_no_health_check_late(cluster):
    cluster["n1"].use_scontrol("trap '' TERM; exec /bin/sleep 600")
    cluster["n1"].lose_gpu()
    cluster["n1"].checks_health()
    done = cluster.run_hook("n1", "health_check")

    assert done.returncode == 0
    assert "scontrol show node n1 gave no answer" in done.stderr
