"""One plan from what was typed, the environment, the settings and Slurm; or one refusal."""

import pytest
from support.launches import requested, slurm_env

from gpuops.agent.launch.plan import EndpointKind
from gpuops.errors import UsageError
from gpuops.incident.decision import OnExhausted

pytestmark = pytest.mark.torch
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=head:29400")
SHRINK, REQUEUE = OnExhausted.SHRINK, OnExhausted.REQUEUE


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("flags", "low", "high", "spares", "on_exhausted"),
    [
        ([], 1, 1, 0, REQUEUE),
        (["--standalone"], 1, 1, 0, REQUEUE),
        (["--nnodes=4", *C10D], 4, 4, 0, REQUEUE),
        (["--nnodes=2:4", *C10D], 2, 4, 0, SHRINK),
        (["--nnodes=4", "--min-nodes=2", *C10D], 2, 4, 0, SHRINK),
        (["--nnodes=2:4", "--min_nodes=2", *C10D], 2, 4, 0, SHRINK),
        (["--nnodes=4", "--spares=2", *C10D], 4, 4, 2, REQUEUE),
        (["--nnodes=4", "--on-exhausted=requeue", *C10D], 4, 4, 0, REQUEUE),
        (["--nnodes=1", "--spares=1", *C10D], 1, 1, 1, REQUEUE),
    ],
)
def test_how_many_nodes_and_what_with_fewer(script, flags, low, high, spares, on_exhausted):
    plan = requested(*flags, script).plan

    assert (plan.restart_policy.nodes_min, plan.restart_policy.nodes_max, plan.spares) == (
        low,
        high,
        spares,
    )
    assert plan.restart_policy.on_exhausted is on_exhausted


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nnodes=4:2", *C10D], "--nnodes=4:2: 4 is more than 2"),
        (["--nnodes=x", *C10D], "--nnodes=x: a number of nodes"),
        (["--nnodes=2", "--min-nodes=3", *C10D], "--min-nodes=3 is more than .* --nnodes=2"),
        (["--nnodes=2:4", "--min-nodes=3", *C10D], "--min-nodes=3 and --nnodes=2:4 name different"),
        (["--nnodes=5", "--node-unit=2", *C10D], "--node-unit=2 does not divide the 5"),
        (["--nnodes=3:4", "--node-unit=2", *C10D], "--node-unit=2 does not divide the 3"),
        (["--spares=1"], "--spares=1: a run on one node"),
        (["--standalone", "--spares=1"], "--standalone .* --spares=1"),
        (["--standalone", "--nnodes=2"], "--standalone .* --nnodes=2"),
        (["--nnodes=2:4", "--on-exhausted=requeue", *C10D], "--on-exhausted=requeue .* --nnodes="),
        (
            ["--nnodes=4", "--min-nodes=2", "--on-exhausted=requeue", *C10D],
            "--on-exhausted=requeue contradicts --min-nodes=2",
        ),
        (["--nnodes=4", "--on-exhausted=shrink", *C10D], "--on-exhausted=shrink: .* --min-nodes"),
        (["--hang-timeout=soon"], "--hang-timeout=soon: "),
        (["--health-gate=maybe"], "--health-gate=maybe: expected on or off"),
        (["--preflight=on"], "--preflight=on: expected off, quick or sweep"),
        (["--http=host:80"], "--http=host:80: "),
        (["--restart-exit-codes=0"], "--restart-exit-codes=0: "),
        (["--decide=policy"], "--decide=policy: "),
        (["--grow-after=-1"], "--grow-after=-1: "),
        (["--ckpt=on"], "--ckpt=on: expected auto or off"),
        (["--ckpt-dir= "], "--ckpt-dir= : expected a directory"),
        (["--ckpt-dir=foo://x"], "--ckpt-dir=foo://x: .* unknown protocol 'foo'"),
        (["--nnodes=2"], "--nnodes=2: where do the nodes meet"),
        (["--nnodes=2", "--rdzv-backend=c10d"], "--rdzv-endpoint=HOST:PORT"),
        (["--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=h:1"], "etcd .*what works: "),
        (["--rdzv-backend=zzz"], "--rdzv-backend=zzz: what works: "),
        (["--nnodes=2", "--rdzv-endpoint=h:0"], "a port from 1 to 65535"),
        (["--nnodes=2", "--rdzv-endpoint=redis://h/1"], "redis"),
        (["--nnodes=2", "--rdzv-backend=postgres", "--rdzv-id=a"], "SQLite"),
        (["--nnodes=2", "--rdzv-endpoint=postgresql+psycopg://u@h/d"], "need --rdzv-id"),
        (["--nnodes=2", "--rdzv-endpoint=etcd://h"], "in etcd need --rdzv-id"),
        (["--nnodes=2", "--rdzv-endpoint=etcd://u:p@h:x"], r"etcd://u:\*\*\*@h:x: .* malformed"),
        (["--nnodes=2", *C10D, "--rdzv-conf=join_timeout"], "is not key=value"),
        (["--nnodes=2", *C10D, "--rdzv-conf=join_timeout=x"], "join_timeout=x"),
        (["--nnodes=2", "--master-port=70000", "--node-rank=0"], "--master-port=70000: a port"),
        (["--nnodes=2", "--node-rank=x", "--master-addr=h"], "--node-rank"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(script, flags, said):
    with pytest.raises(UsageError, match=said) as caught:
        requested(*flags, script)

    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 64


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PET_NNODES": "4:2"}, r"--nnodes=4:2 \(PET_NNODES\)"),
        ({"GPUOPS_SPARES": "1"}, r"run.spares = 1 \(GPUOPS_SPARES\)"),
        (
            {"GPUOPS_ON_EXHAUSTED": "requeue", "PET_NNODES": "1:2"},
            r"run.on_exhausted = requeue \(GPUOPS_ON_EXHAUSTED\) .* \(PET_NNODES\)",
        ),
        ({"PET_MAX_RESTARTS": "many"}, r"PET_MAX_RESTARTS"),
        (
            {"PET_NNODES": "2", "PET_MASTER_ADDR": "h", "PET_NODE_RANK": "x"},
            r"--node-rank=x \(PET_NODE_RANK\): a number",
        ),
    ],
)
def test_a_refusal_names_the_variable_that_it_is_about(script, env, said):
    with pytest.raises(UsageError, match=said):
        requested(script, env=env)


def test_a_refusal_names_the_file_that_it_is_about(script, tmp_path):
    file = tmp_path / "gpuops.toml"
    file.write_text("[run]\non_exhausted = 'requeue'\n")

    with pytest.raises(UsageError, match=rf"run.on_exhausted = requeue \(file {file}\)"):
        requested("--nnodes=1:2", *C10D, script, config_file=file)
    flags = ("--nnodes=1:2", *C10D, "--on-exhausted=shrink", script)
    assert requested(*flags, config_file=file).plan.restart_policy.on_exhausted is SHRINK


def test_flags_of_the_agent_reach_the_plan(script):
    flags = [
        "--hang-timeout=90",
        "--health-gate=off",
        "--preflight=quick",
        "--grow-after=never",
        "--drain-grace=2m",
    ]
    flags += ["--http=0.0.0.0:9100", "--restart-exit-codes=16,17", "--decide=site.policy:decide"]
    plan = requested(*flags, script).plan

    assert (plan.hang_timeout_s, plan.gate, plan.grow_after_s) == (90.0, False, None)
    assert plan.preflight == "quick"
    assert (plan.drain_grace_s, plan.http_address, plan.http_port) == (120.0, "0.0.0.0", 9100)
    assert plan.restart_policy.benign_exit_codes == {16, 17}
    assert plan.decide == "site.policy:decide"


def test_without_flags_the_plan_has_its_defaults(script):
    plan = requested(script).plan

    assert (plan.hang_timeout_s, plan.gate, plan.grow_after_s) == (None, True, 300.0)
    assert plan.preflight == "off"
    assert (plan.drain_grace_s, plan.http_address, plan.http_port) == (None, "127.0.0.1", 0)
    assert (plan.decide, plan.parks, plan.order) == (None, False, None)


@pytest.mark.parametrize(
    ("flags", "host", "port", "order", "is_host"),
    [
        (["--nnodes=2", *C10D], "head", 29400, None, None),
        (["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=h"], "h", 29400, None, None),
        (["--nnodes=2", "--rdzv-endpoint=[::1]:5"], "::1", 5, None, None),
        (["--nnodes=2", *C10D, "--rdzv-conf=is_host=1"], "head", 29400, None, True),
        (["--nnodes=2", *C10D, "--node-rank=1"], "head", 29400, 1, None),
        (["--nnodes=2", "--node-rank=1", "--master-addr=h"], "h", 29500, 1, False),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=h", "--master-port=77"],
            *("h", 77, 0, True),
        ),
    ],
)
def test_where_torchruns_flags_have_the_agents_meet(script, flags, host, port, order, is_host):
    plan = requested(*flags, script).plan

    meeting = plan.endpoint
    assert (meeting.kind, meeting.host, meeting.port) == (EndpointKind.TCP, host, port)
    assert (plan.order, meeting.is_host) == (order, is_host)


@pytest.mark.parametrize(
    "flags",
    [
        ["--rdzv-endpoint=postgresql+psycopg://u:hunter2@db/gpuops"],
        ["--rdzv-backend=postgres", "--rdzv-endpoint=postgresql://u:hunter2@db/gpuops"],
        ["--rdzv-backend=postgres"],
    ],
)
def test_postgres_as_the_meeting_point_and_its_password_in_no_repr(script, flags):
    env = {"GPUOPS_STORE": "postgresql+psycopg://u:hunter2@db/gpuops"}
    plan = requested("--nnodes=2", "--rdzv-id=a", *flags, script, env=env).plan

    assert plan.endpoint.kind is EndpointKind.POSTGRES
    assert plan.endpoint.url == "postgresql+psycopg://u:hunter2@db/gpuops"
    assert plan.endpoint.run_key == "a"
    assert "hunter2" not in repr(plan)


def test_etcd_as_the_meeting_point_and_its_password_in_no_repr(script):
    url = "etcd://u:hunter2@h:1,i:2"
    flags = ["--nnodes=2", "--rdzv-id=a", "--rdzv-backend=c10d", f"--rdzv-endpoint={url}"]
    plan = requested(*flags, script).plan

    assert (plan.endpoint.kind, plan.endpoint.url) == (EndpointKind.ETCD, url)
    assert plan.endpoint.run_key == "a"
    assert "hunter2" not in repr(plan)


def test_rdzv_conf_maps_on_what_there_is_and_names_the_rest(script):
    conf = "--rdzv-conf=join_timeout=900,last_call_timeout=2,keep_alive_interval=10,shoe_size=4"
    request = requested("--nnodes=2", *C10D, conf, script)

    plan = request.plan
    assert (plan.join_timeout_s, plan.last_call_s, plan.first_call_s) == (900.0, 2.0, 2.0)
    assert (plan.suspect_s, plan.fence_s, plan.dead_s) == (12.0, 20.0, 30.0)
    (line,) = [line for line in request.warnings if "shoe_size" in line]
    assert "join_timeout" not in line


def test_agents_on_several_nodes_have_a_given_token_or_that_of_their_user(script):
    own = requested("--nnodes=2", *C10D, script, env={"GPUOPS_STATE": "/state"})
    given = requested("--nnodes=2", *C10D, script, env={"GPUOPS_TOKEN": "4f" * 16})

    assert (own.plan.endpoint.token, str(own.plan.endpoint.own_token)) == ("", "/state/token")
    assert (given.plan.endpoint.token, given.plan.endpoint.own_token) == ("4f" * 16, None)
    assert not own.plan.endpoint.is_insecure
    assert not given.plan.endpoint.is_insecure
    assert (own.warnings, given.warnings) == ((), ())
    assert "4f4f" not in repr(given)
    assert requested(script).plan.endpoint.own_token is None


def test_what_is_not_seen_behind_a_shell_wrapper_is_said_in_one_line(tmp_path):
    wrapper = tmp_path / "run.sh"
    wrapper.write_text("#!/bin/sh\nexec python train.py\n")
    wrapper.chmod(0o755)

    (line,) = requested("--no-python", str(wrapper)).warnings
    assert "hangs are not detected" in line
    assert "`python -m gpuops.worker.shim SCRIPT …`" in line
    assert requested("--no-python", str(wrapper), env={"GPUOPS_DISABLE": "1"}).warnings == ()
    wrapper.write_text("#!/bin/sh\nexec python -m gpuops.worker.shim train.py\n")
    assert requested("--no-python", str(wrapper)).warnings == ()
    assert requested("--no-python", "env", "python", "-m", "gpuops.worker.shim").warnings == ()


def test_insecure_is_said_once_and_keeps_states_at_home(script):
    request = requested("--nnodes=2", "--insecure", *C10D, script)

    (line,) = request.warnings
    assert line.startswith("--insecure: whoever reaches the agents can read and stop this run")
    assert request.plan.endpoint.is_insecure
    assert request.plan.checkpoints.replicas == 1
    assert requested("--insecure", script).warnings == ()


def test_a_quorum_beside_a_store_of_the_site_is_needless(script):
    etcd = ("--nnodes=4", "--rdzv-id=a", "--rdzv-endpoint=etcd://h", "--rdzv-conf=quorum=1")
    (line,) = requested(*etcd, script).warnings
    assert line == "--rdzv-conf: quorum=1 changes nothing: Etcd holds the control record"
    assert requested("--nnodes=4", *C10D, "--rdzv-conf=quorum=1", script).warnings == ()


def test_insecure_contradicts_a_token_and_copies_on_other_nodes(script):
    with pytest.raises(UsageError, match=r"--insecure.*\(GPUOPS_TOKEN\); leave one out"):
        requested("--nnodes=2", "--insecure", *C10D, script, env={"GPUOPS_TOKEN": "4f" * 16})
    with pytest.raises(UsageError, match=r"--insecure.*--ckpt-replicas=3 asks; leave one out"):
        requested("--nnodes=2", "--insecure", "--ckpt-replicas=3", *C10D, script)


def test_srun_gives_nodes_order_place_and_name(script):
    request = requested(script, env=slurm_env(rank=2))

    plan = request.plan
    assert (plan.restart_policy.nodes_min, plan.restart_policy.nodes_max, plan.spares) == (4, 4, 0)
    assert (plan.order, plan.parks) == (2, True)
    meeting = plan.endpoint
    assert (meeting.kind, meeting.host, meeting.is_host) == (EndpointKind.TCP, "n1", False)
    assert 20_000 <= meeting.port < 30_000
    assert meeting.run_key == "slurm-81.0.0"
    assert requested(script, env=slurm_env(rank=0)).plan.endpoint.is_host is True


def test_a_requeued_job_is_another_run_at_the_same_port(script):
    first = requested(script, env=slurm_env()).plan.endpoint
    again = requested(script, env=slurm_env(SLURM_RESTART_COUNT="1")).plan.endpoint

    assert again.run_key == "slurm-81.0.1"
    assert again.port == first.port


@pytest.mark.parametrize(
    ("flags", "low", "high", "spares"),
    [
        (["--spares=1"], 3, 3, 1),
        (["--node-unit=3"], 3, 3, 1),
        (["--nnodes=3"], 3, 3, 1),
        (["--nnodes=2:3"], 2, 3, 1),
        (["--nnodes=2:4"], 2, 4, 0),
        (["--min-nodes=2"], 2, 4, 0),
        (["--spares=1", "--min-nodes=2"], 2, 3, 1),
        (["--nnodes=1", "--spares=1"], 1, 1, 1),
    ],
)
def test_spares_are_extra_nodes_of_slurms_step(script, flags, low, high, spares):
    plan = requested(*flags, script, env=slurm_env()).plan

    assert (plan.restart_policy.nodes_min, plan.restart_policy.nodes_max, plan.spares) == (
        low,
        high,
        spares,
    )


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--spares=4"], slurm_env(), "--spares=4 leaves no node"),
        (["--nnodes=5"], slurm_env(), "--nnodes=5, but Slurm's step has 4 nodes"),
        ([], slurm_env(SLURM_STEP_NUM_TASKS="8"), "srun started 8 tasks on 4 nodes"),
        ([], slurm_env("n1", 1, SLURM_STEP_NUM_TASKS="2"), "--ntasks-per-node=1"),
        ([], {"SLURM_JOB_ID": "81", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}, "`srun "),
    ],
)
def test_what_slurm_and_the_user_cannot_both_want(script, flags, env, said):
    with pytest.raises(UsageError, match=said):
        requested(*flags, script, env=env)


def test_in_a_batch_script_a_run_that_names_one_node_is_what_it_says(script):
    env = {"SLURM_JOB_ID": "81", "SLURM_JOB_NUM_NODES": "4", "SLURM_PROCID": "0"}

    assert requested("--standalone", script, env=env).is_private
    assert requested("--nnodes=1", script, env=env).is_private
    assert requested(script, env=env | {"SLURM_JOB_NUM_NODES": "1"}).is_private


def test_what_is_typed_wins_over_slurm(script):
    flags = ["--nnodes=2", "--rdzv-endpoint=10.0.0.9:4000", "--rdzv-id=mine", "--node-rank=3"]
    plan = requested(*flags, script, env=slurm_env(rank=2)).plan

    assert (plan.endpoint.host, plan.endpoint.port) == ("10.0.0.9", 4000)
    assert (plan.endpoint.run_key, plan.order) == ("mine", 3)


def test_one_node_under_srun_meets_nobody(script):
    plan = requested(script, env=slurm_env("n1", 1)).plan

    assert plan.endpoint.kind is EndpointKind.PRIVATE
    assert not plan.parks


@pytest.mark.parametrize(
    ("flags", "env", "workers"),
    [
        ([], slurm_env(), "1"),
        ([], slurm_env(SLURM_GPUS_ON_NODE="8"), "8"),
        ([], slurm_env(SLURM_GPUS_ON_NODE="8", CUDA_VISIBLE_DEVICES="0,1"), "2"),
        (["--nproc-per-node=3"], slurm_env(SLURM_GPUS_ON_NODE="8"), "3"),
        ([], slurm_env(SLURM_GPUS_ON_NODE="8", PET_NPROC_PER_NODE="gpu"), "gpu"),
        ([], {"SLURM_GPUS_ON_NODE": "8"}, "1"),
    ],
)
def test_under_srun_a_worker_is_started_for_each_gpu(script, flags, env, workers):
    assert requested(*flags, script, env=env).torch.nproc_per_node == workers


def test_what_a_site_wants_of_larger_runs_does_not_bind_a_run_on_one_node(script, tmp_path):
    file = tmp_path / "gpuops.toml"
    file.write_text("[run]\nspares = 1\nmin_nodes = 2\nnode_unit = 2\n")

    plan = requested(script, config_file=file).plan

    assert (plan.restart_policy.nodes_max, plan.restart_policy.node_unit, plan.spares) == (1, 1, 0)


def test_checkpoints_are_kept_in_memory_unless_said_otherwise(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = requested(script).plan.checkpoints
    said = requested("--ckpt=off", "--ckpt_dir=ckpt", script).plan.checkpoints
    table = tmp_path / "gpuops.toml"
    table.write_text("[checkpoint]\nlease = 30\nlast_save = '1m'\n")
    env = {"GPUOPS_CKPT_DIR": "s3://bucket/x"}
    found = requested(script, env=env, config_file=table).plan.checkpoints

    assert (plain.in_memory, plain.directory, plain.lease_s, plain.last_save_s) == (
        True,
        None,
        120.0,
        600.0,
    )
    assert (said.in_memory, said.directory) == (False, str(tmp_path / "ckpt"))
    assert (found.directory, found.lease_s, found.last_save_s) == ("s3://bucket/x", 30.0, 60.0)
    assert requested("--ckpt-dir=~/c", script).plan.checkpoints.directory.endswith("/c")
    assert "~" not in requested("--ckpt-dir=~/c", script).plan.checkpoints.directory
    assert not requested(script, env={"GPUOPS_DISABLE": "1"}).plan.checkpoints.in_memory
