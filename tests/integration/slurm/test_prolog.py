"""Our prolog in a real Slurm: who runs, who is drained, and what may go wrong without draining."""

import contextlib

import pytest
from support.command import gpuops
from support.slurm import HOOK_LIMIT_S, SHIFTED, wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]


def test_a_healthy_node_runs_the_job(cluster, history):
    job_id = cluster.submit("exit 0", "-w", "n1", "--gres=gpu:2")
    job = cluster.finished(job_id)
    ran = history.wait("check.ran", "n1", trigger="prolog")

    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n1")
    assert cluster.state("n1") == ("IDLE", None)
    assert (ran["job_id"], ran["gpus"], ran["mode"]) == (job_id, ["slurm:0", "slurm:1"], "enforce")


def test_slurm_numbers_gpus_by_their_place_in_gres_conf_and_not_by_their_device_file(
    cluster, tmp_path
):
    told = tmp_path / "told"
    node = cluster[SHIFTED]
    node.write_env((node.home / "env").read_text() + f'echo "$SLURM_JOB_GPUS" >>{told}\n')
    cluster.finished(cluster.submit("exit 0", "-w", SHIFTED, "--gres=gpu:3"))

    assert set(told.read_text().split()) == {"0,1,2"}


def test_an_injected_xid_79_drains_its_node_for_our_reason_and_the_job_runs_elsewhere(
    cluster, history
):
    cluster["n1"].xid(79)
    job_id = cluster.submit("exit 0", "--exclude=n[3-6]")
    job = cluster.finished(job_id)
    reason = cluster.drained_for("n1", "gpuops: ")
    drained = history.wait("node.drained", "n1", job_id=job_id)
    incident = history.wait("incident.recorded", "n1")

    # A disk that takes more than a second for the incident leaves the drain without its number.
    named, _, number = reason.partition(" #")
    numbers = {item["id"][-8:] for item in history.events("incident.recorded", "n1")}
    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n2")
    assert named == "gpuops: fail gpu_xid GPU-0000 79 -> drain"
    assert number in {"", *numbers}
    assert incident["failure_class"] == "gpu_hw.fell_off_bus"
    assert (drained["reason"], drained["check"]) == (reason, "gpu_xid")
    assert cluster.state("n2") == ("IDLE", None)


def test_observing_says_what_would_be_drained_and_lets_the_job_start(cluster, history):
    cluster["n1"].lose_gpu()
    cluster["n1"].set(GPUOPS_MODE="observe")
    job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))
    decided = history.wait("gate.decided", "n1")

    assert job["JobState"] == "COMPLETED"
    assert decided["course"] == "would_drain"
    assert decided["reason"].startswith("gpuops: fail gpu_lost n1 15 -> drain")
    assert cluster.state("n1") == ("IDLE", None)


BROKEN_CLICK = "raise ImportError('no module named click')"
FAULTS = {
    "a typing mistake in the hooks' environment": "if then fi ((",
    "an environment that ends the shell": "exit 1",
    "a setting that does not exist": "export GPUOPS_MODE=enforced",
    "a dependency that is not installed": "export PYTHONPATH={home}/broken",
    "a crash of ours": "ulimit -c 0; kill -SEGV $$",
    "a verdict of another invocation": 'echo refuse >"${{3%.*}}.other"; exit 1',
    "a verdict but another exit code": 'echo refuse >"$3"; exit 70',
}


@contextlib.contextmanager
def changed(script, old, new):
    """Have *new* in the place of *old* in a hook for a while."""
    whole = script.read_text()
    assert old in whole
    script.write_text(whole.replace(old, new))
    try:
        yield
    finally:
        script.write_text(whole)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_is_wrong_with_gpuops_itself_the_job_starts(cluster, fault):
    node = cluster["n1"]
    node.lose_gpu()
    package = node.home / "broken" / "click"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(BROKEN_CLICK)
    with (node.home / "env").open("a") as file:
        file.write(FAULTS[fault].format(home=node.home) + "\n")
    job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    assert job["JobState"] == "COMPLETED"
    assert cluster.state("n1") == ("IDLE", None)


def test_a_prolog_that_takes_too_long_drains_nothing(cluster):
    cluster["n1"].write_env("case $3 in *prolog*) exec /bin/sleep 60 ;; *) exit ;; esac\n")
    with changed(cluster.home / "hooks" / "prolog.sh", f"LIMIT_S={HOOK_LIMIT_S}", "LIMIT_S=1"):
        job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    assert job["JobState"] == "COMPLETED"
    assert cluster.state("n1") == ("IDLE", None)


def test_a_gpuops_that_is_not_there_drains_nothing(cluster):
    program = cluster.home / "gpuops"
    hidden = program.rename(cluster.home / "gpuops.hidden")
    try:
        job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))
    finally:
        hidden.rename(program)

    assert job["JobState"] == "COMPLETED"
    assert cluster.state("n1") == ("IDLE", None)


def test_a_mistake_in_the_prolog_itself_drains_nothing(cluster):
    with changed(cluster.home / "hooks" / "prolog.sh", "code=1", 'if [ "${oops" then'):
        job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    assert job["JobState"] == "COMPLETED"
    assert cluster.state("n1") == ("IDLE", None)


NOWHERE = "postgresql+psycopg://u@127.0.0.1:1/none"


def test_without_a_database_a_limit_of_ours_drains_nothing(cluster):
    cluster["n1"].lack_gpus()
    cluster["n1"].set(GPUOPS_STORE=NOWHERE)
    job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    assert job["JobState"] == "COMPLETED"
    assert cluster.state("n1") == ("IDLE", None)


def test_without_a_database_the_drivers_own_verdict_drains(cluster):
    cluster["n1"].lose_gpu()
    cluster["n1"].set(GPUOPS_STORE=NOWHERE)
    refused = cluster.run_hook("n1")

    assert refused.returncode == 1
    assert "Connection refused" in refused.stderr
    assert cluster.drained_for("n1", "gpuops: fail gpu_lost")


def test_the_fuse_lets_the_job_start_on_a_node_more_than_may_fail_the_same_way(
    cluster, postgres_url
):
    for name in ("n1", "n2", "n3"):
        cluster[name].lack_gpus()
        cluster[name].set(GPUOPS_STORE=postgres_url, GPUOPS_FUSE_NODES="2")
    gpuops("db", "upgrade", "--store", postgres_url)
    assert [cluster.run_hook(name).returncode for name in ("n1", "n2")] == [1, 1]
    job = cluster.finished(cluster.submit("exit 0", "-w", "n3"))

    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n3")
    assert cluster.drained_for("n1", "gpuops: fail gpu_count")
    assert cluster.drained_for("n2", "gpuops: fail gpu_count")
    assert cluster.state("n3") == ("IDLE", None)


def test_a_tripped_fuse_lets_no_job_start_on_hardware_that_reports_a_fault(cluster, postgres_url):
    for name in ("n1", "n2", "n3"):
        cluster[name].lose_gpu()
        cluster[name].set(GPUOPS_STORE=postgres_url, GPUOPS_FUSE_NODES="1")
    gpuops("db", "upgrade", "--store", postgres_url)

    assert [cluster.run_hook(name).returncode for name in ("n1", "n2", "n3")] == [1, 1, 1]
    assert cluster.drained_for("n3", "gpuops: fail gpu_lost")


def test_no_command_of_slurm_is_in_the_way_of_a_job(cluster):
    calls = cluster.home / "calls"
    cluster["n1"].use_scontrol(f"echo called >>{calls}; exec /bin/sleep 3000")
    job = cluster.finished(cluster.submit("exit 0", "-w", "n1"))
    assert job["JobState"] == "COMPLETED"
    assert not calls.exists()

    cluster["n1"].lose_gpu()
    # It ends while scontrol is running.
    refused = cluster.run_hook("n1")

    assert refused.returncode == 1


def test_the_helper_outlives_its_hooks_process_group_and_a_slurmctld_that_is_down(cluster):
    """Here slurmctld is gone when slurmd wants to tell it that the prolog failed."""
    cluster["n1"].lose_gpu()
    cluster["n1"].write_env(
        (cluster["n1"].home / "env").read_text() + f"touch {cluster.home}/begun; /bin/sleep 1\n"
    )
    begun = cluster.home / "begun"
    begun.unlink(missing_ok=True)
    cluster.submit("exit 0", "-w", "n1", "--no-requeue")
    wait_until(begun.exists, "no prolog began")
    cluster.stop_controller()
    try:
        wait_until(cluster["n1"].drain_record, "the prolog did not fail")
    finally:
        cluster.start_controller()

    assert cluster.drained_for("n1", "gpuops: fail gpu_lost")
