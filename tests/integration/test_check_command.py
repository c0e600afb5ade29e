"""``gpuops check`` as its users meet it: exit codes, output, what is recorded, bad input."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import mock_nvml
from support.command import gpuops
from support.fake_root import FakeRoot
from support.mock_nvml import UUIDS, addresses

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk]

# Of a machine so busy that the second which recording has was not enough.
LATE = "this result is not recorded yet"
XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, name=python, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


class Node:
    """A node made of files and a mock NVML, and the command on it."""

    def __init__(self, tmp_path, mock):
        self.tmp_path = tmp_path
        self.root = FakeRoot(tmp_path / "root")
        self.mock = mock
        self.scenario = "init 12"
        self.spool = tmp_path / "spool"

    def gpus(self, count, **kwargs):
        for address in addresses(count):
            self.root.gpu(address)
        self.scenario = mock_nvml.gpus(count, **kwargs)
        return self

    def check(self, *args, env=None, record=False, timeout=100):
        return gpuops(
            "check",
            *args,
            *([] if record else ["--no-record"]),
            env={**self.env(), **(env or {})},
            timeout=timeout,
        )

    def env(self):
        return {
            "GPUOPS_ROOT": str(self.root.path),
            "GPUOPS_SPOOL": str(self.spool),
            "GPUOPS_STORE": f"sqlite:///{self.tmp_path}/store.db",
            "SLURMD_NODENAME": "n1",
            **self.mock.env(self.scenario),
        }

    def findings(self, *args, **kwargs):
        return json.loads(self.check("--json", *args, **kwargs).stdout)["findings"]


@pytest.fixture
def node(tmp_path, mock):
    return Node(tmp_path, mock)


def spooled(spool):
    """Return what waits in *spool*; a flusher may be removing files and folders meanwhile."""
    paths = [Path(at) / name for at, _, names in os.walk(spool) for name in names]
    texts = []
    for path in sorted(path for path in paths if path.suffix == ".ready"):
        with contextlib.suppress(FileNotFoundError):
            texts.append(path.read_text())
    return "".join(texts)


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_healthy_node_without_gpus_may_run(node):
    run = node.check()

    assert (run.returncode, run.stderr) == (0, "")
    assert "skip  gpu_count" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("n1: pass (suite default, ")


def test_a_healthy_node_with_its_gpus_passes(node):
    run = node.gpus(8).check("--gpus-expected", "8", "--json")
    body = json.loads(run.stdout)
    by_check = {finding["check"]: finding for finding in body["findings"]}

    assert run.returncode == 0
    # Some checks find nothing to judge on this node made of files.
    assert body["verdict"] == "pass"
    assert by_check["gpu_count"]["value"] == 8
    assert by_check["gpu_count"]["source"] == "flag"
    assert by_check["gpu_pci"]["status"] == "pass"


def test_the_json_has_its_frozen_keys(node):
    body = json.loads(node.check("--json", "--suite", "prolog").stdout)

    assert list(body) == [
        "schema",
        "gpuops_version",
        "node",
        "suite",
        "verdict",
        "start",
        "end",
        "late",
        "findings",
    ]
    assert body["schema"] == "gpuops.check/1"
    assert (body["node"], body["suite"]) == ("n1", "prolog")
    assert body["start"] < body["end"]
    assert {finding["check"] for finding in body["findings"]} >= {"memory", "load", "gpu_pci"}


def test_json_lines_are_findings_and_then_the_verdict(node):
    lines = [json.loads(line) for line in node.check("--jsonl").stdout.splitlines()]

    assert [line["schema"] for line in lines[:-1]] == ["gpuops.finding/1"] * (len(lines) - 1)
    assert len(lines) >= 9
    assert lines[-1]["schema"] == "gpuops.check-summary/1"
    assert lines[-1]["verdict"] == "pass"


def test_missing_gpus_fail_where_they_are_expected(node):
    run = node.check("--gpus-expected", "8")

    assert run.returncode == 1
    assert "fail    gpu_count" in run.stdout
    # Long messages are wrapped.
    text = " ".join(run.stdout.split())
    assert "no GPU on the PCI bus and no NVIDIA driver library" in text


def test_the_expectation_may_come_from_the_environment(node):
    (finding,) = node.findings("--only", "gpu_count", env={"GPUOPS_GPUS_EXPECTED": "2"})

    assert finding["status"] == "fail"
    assert finding["source"] == "environment GPUOPS_GPUS_EXPECTED"


def test_a_gpu_that_fell_off_the_bus_is_seen_three_ways(node):
    """The bus reads all ones, NVML says that it is lost, the kernel has logged Xid 79."""
    node.gpus(4, broken={0: 15}).root.gpu_off(addresses(4)[0]).kmsg("boot", XID_79)
    found = [item for item in node.findings() if item["status"] == "fail"]

    assert {item["check"] for item in found} >= {"gpu_pci", "gpu_xid"}
    assert {item["failure_class"] for item in found} == {"gpu_hw.fell_off_bus"}


def test_a_log_that_others_filled_since_takes_back_no_xid(node):
    node.gpus(2).root.kmsg("boot", XID_79)
    assert node.check("--only", "gpu_xid", record=True).returncode == 1
    flood = "".join(f"4,{n},{n}000000,-;tmpfs: mounted\n" for n in range(900, 999))
    node.root.write("dev/kmsg", flood)

    assert node.check("--only", "gpu_xid", record=True).returncode == 1
    node.root.write("proc/sys/kernel/random/boot_id", "another boot\n")
    assert node.check("--only", "gpu_xid", record=True).returncode == 0


def test_an_nvml_that_hangs_is_named_as_late_and_costs_bounded_time(node):
    node.gpus(2)
    node.scenario = "deaf\ndelay_ms 600000\n" + node.scenario
    started = time.monotonic()
    run = node.check("--only", "gpu_count", "--only", "gpu_pci", "--deadline", "5", "--json")

    assert run.returncode == 3
    assert time.monotonic() - started < 60
    by_check = {item["check"]: item for item in json.loads(run.stdout)["findings"]}
    assert by_check["gpu_count"]["unknown_reason"] == "timeout"
    assert "nvmlInit gave no answer" in by_check["gpu_count"]["message"]
    assert by_check["gpu_pci"]["status"] == "pass"
    assert json.loads(run.stdout)["late"] == ["gpu_count"]


def test_an_nvml_that_crashes_does_not_keep_the_job_from_starting(node):
    node.gpus(2)
    node.scenario = "segfault"
    run = node.check("--only", "gpu_count", "--json")
    (finding,) = json.loads(run.stdout)["findings"]
    assert run.returncode == 0
    assert (finding["status"], finding["unknown_reason"]) == ("warn", "crash")


def test_a_broken_rule_of_the_site_warns_and_lets_the_job_start(node, tmp_path):
    rules = tmp_path / "site" / "rules"
    rules.mkdir(parents=True)
    (rules / "own.toml").write_text('[[rule]]\nid = "x"\npattern = "("\n')
    env = {"GPUOPS_SITE_DIR": str(tmp_path / "site")}
    run = node.check("--only", "kernel_log", "--json", env=env, record=True)

    (finding,) = json.loads(run.stdout)["findings"]
    assert run.returncode == 0
    assert (finding["status"], finding["unknown_reason"]) == ("warn", "crash")
    assert "rule 'x' in" in finding["message"]


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        ([], 0, "OK"),
        (["--gpus-expected", "1"], 2, "CRITICAL"),
    ],
)
def test_nagios_gets_its_own_codes_and_one_line(node, args, code, word):
    run = node.check("--nagios", *args)

    assert run.returncode == code
    assert run.stdout.startswith(f"GPUOPS {word} - ")
    assert run.stdout.count("\n") == 1


def test_nagios_warnings_and_unknowns_have_codes_of_their_own(node):
    node.root.memory(total_kib=1000, available_kib=50)
    assert node.check("--nagios").returncode == 1

    node.gpus(1)
    node.scenario = "delay_ms 600000"
    assert node.check("--nagios", "--only", "gpu_count", "--deadline", "1").returncode == 3


def test_only_runs_what_is_named(node):
    assert [item["check"] for item in node.findings("--only", "memory")] == ["memory"]


def test_only_takes_patterns(node):
    names = {item["check"] for item in node.findings("--only", "mount_*", "--only", "load")}

    assert names == {"mount_alive", "mount_state", "mount_writable", "load"}


def test_gpus_that_are_not_asked_about_are_not_judged(node):
    node.gpus(4)
    node.scenario = mock_nvml.shape("h100", 4, per_gpu={3: {"remapped_failure": 1}})
    judged = ["--only", "gpu_row_remap", "--json"]
    all_of_them = node.check(*judged)
    others = node.check(*judged, "--gpus", f"0,{UUIDS[1]}")
    its_job = node.check(*judged, "--trigger", "prolog", env={"SLURM_JOB_GPUS": "3"})
    other_job = node.check(*judged, "--trigger", "epilog", env={"SLURM_JOB_GPUS": "0-2"})

    assert [run.returncode for run in (all_of_them, others, its_job, other_job)] == [1, 0, 1, 0]


def test_text_from_the_kernel_cannot_drive_the_terminal(node):
    node.root.kmsg("nfs: server a\\x1b[2Jb not responding", "nfs: server x not responding \x1b[31m")
    run = node.check("--only", "kernel_log")

    assert "\x1b" not in run.stdout
    assert "not responding" in run.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite", "prolgo"], "there is no suite 'prolgo'; did you mean 'prolog'?"),
        (["--only", "memroy"], "there is no check 'memroy'; did you mean 'memory'?"),
        (["--deadline", "0"], "0.0 is not in the range 0<x<=3600"),
        (["--gpus-expected", "-1"], "expected a number from 0 to 1024"),
        (["--json", "--nagios"], "--json, --jsonl and --nagios exclude each other"),
        (["--sweet"], "No such option"),
        (["--only", "memroy*"], "there is no check 'memroy*'"),
        (["--suite", "followup", "--only", "memory"], "does not run the check 'memory'"),
        (["--gpus", "first"], "'first' is not a GPU; use auto, all, or indices"),
        (["--job", "latest"], "the id of a Slurm job is a number"),
        (["--list", "--explain", "memory"], "--list and --explain exclude each other"),
        (["--list", "--nagios"], "check nothing; leave out --nagios"),
        (["--explain", "memory", "--prom", "x"], "check nothing; leave out --prom"),
        (["--deadline", "nan"], "a number of seconds is expected"),
        (["--explain", "mem*"], "there is no check 'mem*'"),
        (["--explain", "memroy"], "there is no check 'memroy'; did you mean 'memory'?"),
        (["--facts", "x", "--deadline", "3"], "with --facts nothing is probed"),
        (["--trigger", "whim"], "is not one of"),
    ],
)
def test_a_mistake_on_the_command_line_is_64_and_one_clear_line(node, args, message):
    run = node.check(*args)

    assert run.returncode == 64
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deadline_s = = 1", "as TOML"),
        ("deadline_s = 1\ndeadlin = 2", "unknown key 'deadlin'; did you mean 'deadline_s'"),
        ('deadline_s = 1\n[[check]]\nname = "disk"', "there is no check 'disk'"),
    ],
)
def test_a_mistake_in_a_suite_is_64_and_names_the_file(node, tmp_path, text, message):
    suites = tmp_path / "site" / "suites"
    suites.mkdir(parents=True)
    (suites / "own.toml").write_text(text)
    run = node.check("--suite", "own", env={"GPUOPS_SITE_DIR": str(tmp_path / "site")})

    assert run.returncode == 64
    assert message in run.stderr
    assert "own.toml" in run.stderr
    assert run.stderr.count("\n") == 1


def test_validating_the_configuration_reads_every_suite(tmp_path):
    suites = tmp_path / "site" / "suites"
    suites.mkdir(parents=True)
    env = {"GPUOPS_SITE_DIR": str(tmp_path / "site")}
    (suites / "own.toml").write_text("inherits = 'full'\ndeadline_s = 1\n")
    valid = gpuops("config", "validate", env=env)
    (suites / "own.toml").write_text("inherits = 'full'\ndeadline_s = 1\nx = 1\n")
    broken = gpuops("config", "validate", env=env)

    assert valid.returncode == 0
    assert "own" in valid.stdout
    assert broken.returncode == 64
    assert "own.toml has unknown key 'x'" in broken.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
def test_root_does_not_read_a_suite_that_others_may_write(node, tmp_path):
    suites = tmp_path / "site" / "suites"
    suites.mkdir(parents=True)
    (suites / "own.toml").write_text("deadline_s = 1\n")
    (suites / "own.toml").chmod(0o666)
    run = node.check("--suite", "own", env={"GPUOPS_SITE_DIR": str(tmp_path / "site")})

    assert run.returncode == 64
    assert "root does not read" in run.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
@pytest.mark.parametrize("how", ["flag", "environment"])
def test_root_does_not_read_a_configuration_that_others_may_write(tmp_path, how):
    file = tmp_path / "gpuops.toml"
    file.write_text('cluster.name = "planted"\n')
    file.chmod(0o666)
    args = ["--config", str(file)] if how == "flag" else []
    env = {} if how == "flag" else {"GPUOPS_CONFIG": str(file)}
    refused = gpuops(*args, "config", "show", env=env)
    file.chmod(0o644)
    believed = gpuops(*args, "config", "show", env=env)

    assert (refused.returncode, refused.stdout) == (64, "")
    assert "root does not read" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "planted" in believed.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
def test_root_does_not_validate_a_rule_that_others_may_write(tmp_path):
    rules = tmp_path / "site" / "rules"
    rules.mkdir(parents=True)
    (rules / "own.toml").write_text("")
    (rules / "own.toml").chmod(0o666)
    run = gpuops("config", "validate", env={"GPUOPS_SITE_DIR": str(tmp_path / "site")})

    assert run.returncode == 64
    assert "root does not read" in run.stderr


def test_the_list_shows_limits_and_their_sources(node):
    run = node.check("--list", "--suite", "prolog")

    assert run.returncode == 0
    assert "suites: default, " in run.stdout
    assert "available_percent: warn at 10  [gpuops judgement]" in run.stdout
    assert json.loads(node.check("--list", "--json").stdout)["schema"] == "gpuops.check-list/1"


def test_a_result_is_spooled_and_flushed_to_the_store(node, tmp_path):
    run = node.check("--trigger", "prolog", record=True)

    assert run.returncode == 0
    assert [line for line in run.stderr.splitlines() if LATE not in line] == []
    wait_until(lambda: (tmp_path / "store.db").exists() and not spooled(node.spool))


def test_what_is_spooled_is_the_run_and_our_own_failures(node):
    """The store's host does not exist, so that nothing leaves the spool."""
    node.scenario = "segfault"
    env = {"GPUOPS_STORE": "postgresql+psycopg://u@127.0.0.1:1/none"}
    node.check("--only", "gpu_count", "--trigger", "epilog", env=env, record=True)

    wait_until(lambda: '"check.ran"' in spooled(node.spool))
    assert '"epilog"' in spooled(node.spool)


def test_a_judge_of_ours_that_crashed_is_recorded_as_a_failure_of_the_tool(node, tmp_path):
    rules = tmp_path / "site" / "rules"
    rules.mkdir(parents=True)
    (rules / "own.toml").write_text("[[rule]]\nnonsense = 1\n")
    env = {
        "GPUOPS_SITE_DIR": str(tmp_path / "site"),
        "GPUOPS_STORE": "postgresql+psycopg://u@127.0.0.1:1/none",
    }
    node.check("--only", "kernel_log", env=env, record=True)

    wait_until(lambda: '"tool.failed"' in spooled(node.spool))
    assert "probe of check kernel_log" in spooled(node.spool)


@pytest.mark.parametrize("kind", ["a file", "a directory of another shape"])
def test_a_spool_that_cannot_be_written_changes_no_verdict(node, kind):
    if kind == "a file":
        node.spool.write_text("in the way")
    else:
        node.spool = Path("/proc/gpuops-spool")
    run = node.check("--gpus-expected", "1", record=True)

    assert run.returncode == 1
    assert run.stderr.startswith("gpuops: ")
    assert run.stderr.count("\n") == 1
    assert str(node.spool) in run.stderr


@pytest.mark.parametrize("form", [[], ["--json"], ["--jsonl"], ["--nagios"]], ids=str)
def test_a_reader_that_goes_away_changes_no_verdict_and_the_result_is_recorded(node, form):
    env = {
        **os.environ,
        "GPUOPS_ROOT": str(node.root.path),
        "GPUOPS_SPOOL": str(node.spool),
        "GPUOPS_STORE": "postgresql+psycopg://u@127.0.0.1:1/none",
        **node.mock.env(node.scenario),
    }
    argv = [sys.executable, "-m", "gpuops", "check", *form]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        errors = run.stderr.read()
        code = run.wait(timeout=60)

    assert code == 141
    assert b"Traceback" not in errors
    wait_until(lambda: '"check.ran"' in spooled(node.spool))


def test_a_driver_and_a_spool_that_hang_keep_the_prolog_below_its_eight_seconds(node):
    """Nobody writes into the pipe in the place of the boot id, so that recording waits for ever."""
    node.gpus(2)
    node.scenario = "deaf\ndelay_ms 600000\n" + node.scenario
    boot_id = node.root.path / "proc/sys/kernel/random/boot_id"
    boot_id.unlink()
    os.mkfifo(boot_id)

    def is_in_time():
        started = time.monotonic()
        run = node.check("--suite", "prolog", record=True)
        took_s = time.monotonic() - started
        assert run.returncode == 3
        assert f"{LATE}: {node.spool} gave no answer in 1." in run.stderr
        return took_s < 8

    # A busy machine makes one take longer, and not every one.
    wait_until(is_in_time, 60)


def test_a_spool_that_is_slow_has_the_result_after_the_command(node):
    boot_id = node.root.path / "proc/sys/kernel/random/boot_id"
    known = boot_id.read_text()
    boot_id.unlink()
    os.mkfifo(boot_id)
    run = node.check(record=True)
    with boot_id.open("w") as file:
        file.write(known)

    assert LATE in run.stderr
    wait_until((node.tmp_path / "store.db").exists)
    wait_until(lambda: "check_runs 1" in gpuops("db", "status", env=node.env()).stdout)


WHAT_IS_IMPORTED = """
import sys
from gpuops.cli.main import run_command
code = run_command(sys.argv[1:])
heavy = {"torch", "sqlalchemy", "alembic", "numpy", "rich", "psutil"} & set(sys.modules)
print(f"code {code} heavy {sorted(heavy)}", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args", [["check", "--suite", "prolog"], ["check", "--help"], ["--help"]], ids=" ".join
)
def test_check_imports_nothing_heavy(node, args):
    env = {
        **os.environ,
        "GPUOPS_ROOT": str(node.root.path),
        "GPUOPS_SPOOL": str(node.spool),
        "GPUOPS_STORE": "postgresql+psycopg://u@127.0.0.1:1/none",
        **node.mock.env(node.scenario),
    }
    run = subprocess.run(
        [sys.executable, "-c", WHAT_IS_IMPORTED, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    assert run.stderr.splitlines()[-1] == "code 0 heavy []"


def test_the_command_works_without_path_home_or_a_terminal(node):
    """Slurmd gives its hooks neither."""
    env = {"GPUOPS_ROOT": str(node.root.path), **node.mock.env(node.scenario)}
    run = subprocess.run(
        [sys.executable, "-m", "gpuops", "check", "--suite", "prolog", "--no-record"],
        env=env,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd="/",
        timeout=100,
        check=False,
    )

    assert (run.returncode, run.stderr) == (0, b"")


def test_the_uuid_of_a_gpu_names_it_where_nvml_knows_it(node):
    node.gpus(2).root.gpu_off(addresses(2)[1])
    found = [item for item in node.findings("--only", "gpu_pci") if item["status"] == "fail"]

    assert [item["entity"] for item in found] == [{"kind": "gpu", "id": UUIDS[1]}]


def test_explaining_a_check_shows_its_limits_with_their_files_and_its_runbooks(node, tmp_path):
    suites = tmp_path / "site" / "suites"
    suites.mkdir(parents=True)
    (suites / "own.toml").write_text(
        'inherits = "full"\ndeadline_s = 9\n[[check]]\nname = "memory"\n'
        'available_percent = { warn = 20, source = "ops" }\n'
    )
    env = {"GPUOPS_SITE_DIR": str(tmp_path / "site")}
    run = node.check("--explain", "memory", "--suite", "own", env=env)

    assert (run.returncode, run.stderr) == (0, "")
    assert f"available_percent: warn at 20  [ops]  ({suites}/own.toml)" in run.stdout
    assert "/proc/meminfo" in run.stdout
    assert "gpuops runbook host_mem.low" in run.stdout


def test_explaining_shows_what_the_profile_expects_once_the_gpus_were_seen(node):
    node.gpus(8)
    node.scenario = mock_nvml.shape("h100")

    def explained():
        return json.loads(node.check("--explain", "gpu_pcie_link", "--json").stdout)

    def remembers():
        # A busy machine may not keep in time what a check saw, and not with every check.
        node.check("--suite", "prolog", record=True)
        told.append(explained())
        return told[-1]["profile"]["name"] != "none"

    told = []
    before = explained()
    wait_until(remembers)
    after = told[-1]

    assert before["profile"]["name"] == "none"
    assert after["profile"] == {
        "name": "h100-sxm",
        "because": "it last matched this node's GPUs",
    }
    assert after["expectations"]["pcie_width"]["value"] == 16


def test_a_check_that_the_suite_does_not_run_is_explained_all_the_same(node):
    run = node.check("--explain", "dcgm_diag", "--suite", "prolog")

    assert run.returncode == 0
    assert "suite     full" in run.stdout


def test_metrics_are_replaced_as_a_whole_and_readable_by_all(node, tmp_path):
    path = tmp_path / "gpuops.prom"
    path.write_text("old")
    run = node.check("--suite", "prolog", "--prom", str(path))
    text = path.read_text()

    assert run.returncode == 0
    assert 'gpuops_check_status{check="memory",entity_id="n1",entity_kind="node"' in text
    assert 'gpuops_check_verdict{suite="prolog"} 0.0' in text
    assert path.stat().st_mode & 0o777 == 0o644
    assert [item.name for item in tmp_path.glob("*gpuops.prom*")] == ["gpuops.prom"]


def test_metrics_that_cannot_be_written_change_no_verdict(node):
    run = node.check("--gpus-expected", "1", "--prom", "/nowhere/gpuops.prom")

    assert run.returncode == 1
    assert run.stderr == "gpuops: cannot write /nowhere/gpuops.prom: No such file or directory\n"


def state_file(tmp_path):
    return tmp_path / "default" / "state" / "node.json"


def test_a_driver_that_hangs_is_unknown_once_and_a_failure_the_second_time(node, tmp_path):
    """Persistence mode was on when it last answered, so it is no cold start."""

    def remembered(key):
        # What a busy disk does not take within its second is kept later.
        path = state_file(tmp_path)
        return path.exists() and json.loads(path.read_text())["state"][key]

    node.gpus(2)
    node.scenario = mock_nvml.shape("h100", 2, persistence=1)
    node.check("--only", "gpu_driver", record=True)
    wait_until(lambda: remembered("persistence"))
    node.scenario = "deaf\ndelay_ms 600000\n" + node.scenario
    short = ["--only", "gpu_driver", "--deadline", "3", "--json"]
    codes = [node.check(*short, record=True).returncode]
    wait_until(lambda: remembered("hangs"))
    codes.append(node.check(*short, record=True).returncode)
    (found,) = json.loads(node.check(*short).stdout)["findings"]

    assert codes == [3, 1]
    assert found["failure_class"] == "gpu_sw.driver_hang"


def test_a_driver_that_answered_in_between_has_not_hung_twice(node):
    node.gpus(2)
    well = mock_nvml.shape("h100", 2, persistence=1)
    hung = "deaf\ndelay_ms 600000\n" + well
    codes = []
    for scenario in (well, hung, well, hung):
        node.scenario = scenario
        run = node.check("--only", "gpu_driver", "--deadline", "3", record=True)
        codes.append(run.returncode)

    assert codes == [0, 3, 0, 3]


def test_a_check_that_is_not_recorded_remembers_nothing(node, tmp_path):
    node.check("--suite", "prolog")

    assert not state_file(tmp_path).exists()


@pytest.mark.parametrize("text", ["", "{", '{"schema": "gpuops.node-state/9"}'])
def test_a_state_file_that_is_none_warns_and_fails_nothing(node, tmp_path, text):
    path = state_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    run = node.check("--suite", "prolog", "--json")
    (finding,) = (
        item for item in json.loads(run.stdout)["findings"] if item["check"] == "node_state"
    )

    assert (run.returncode, run.stderr) == (0, "")
    assert finding["status"] == "warn"
    assert f"{path} is left out: it is" in finding["message"]


def test_a_state_folder_that_cannot_be_written_is_said_and_changes_no_verdict(node, tmp_path):
    (tmp_path / "state").write_text("in the way")
    run = node.check("--gpus-expected", "1", record=True, env={"GPUOPS_STATE": f"{tmp_path}/state"})

    assert run.returncode == 1
    assert "cannot save the state of this node" in run.stderr


def test_two_profiles_that_match_warn_and_name_their_files(node, tmp_path):
    node.gpus(8)
    node.scenario = mock_nvml.shape("h100")
    profiles = tmp_path / "site" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "twin.toml").write_text("match = { gpu = 'NVIDIA H100.*' }\n")
    env = {"GPUOPS_SITE_DIR": str(tmp_path / "site")}
    (finding,) = (item for item in node.findings(env=env) if item["check"] == "profile")

    assert finding["status"] == "warn"
    assert str(profiles / "twin.toml") in finding["message"]


def test_a_silenced_failure_lets_the_job_start_and_says_who_silenced_it(node, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "silences.toml").write_text(
        '[[silence]]\ncheck = "gpu_count"\nnode = "n1"\nuntil = 2099-01-01\n'
        'owner = "ann"\nreason = "two GPUs are out"\n'
    )
    run = node.check(
        "--only", "gpu_count", "--gpus-expected", "1", "--json", env={"GPUOPS_SITE_DIR": str(site)}
    )
    (finding,) = json.loads(run.stdout)["findings"]

    assert (run.returncode, finding["status"]) == (0, "skip")
    assert "by ann: two GPUs are out (was fail: " in finding["message"]
