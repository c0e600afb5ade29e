"""A burn-in of one node: real processes, whose programs are planted ones but for the last test."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.command import gpuops
from support.fake_root import FakeRoot
from support.planted_burnin import plant
from support.small_disk import small_disk

from gpuops.burnin.baseline import Floor
from gpuops.burnin.baseline_file import Baseline
from gpuops.burnin.plan import TESTS
from gpuops.burnin.results import (
    Measurement,
    ProgramEnd,
    ProgramOutput,
    ResultDigest,
    WrongResult,
    to_line,
)
from gpuops.errors import BusyError, ConfigError, UsageError
from gpuops.gate.burnin import Burnin, BurninRequest, BurninWatcher, program_command
from gpuops.gate.burnin_counters import counting_plan
from gpuops.gate.burnin_parts import PartsUnderTest, PartUnderTest
from gpuops.gate.burnin_progress import BurninProgress, progress_path, save_progress
from gpuops.gate.drain import read_diagnostic
from gpuops.gate.node_lock import node_lock
from gpuops.gate.session import CheckRequest, check_node, make_plan
from gpuops.host.clock import FakeClock
from gpuops.host.process.inspect import process_state
from gpuops.model import Entity, EntityKind, FailureClass, Status, UnknownReason

# What was recorded stays in the spool.
NO_STORE = "sqlite:////dev/null/gpuops.db"
NODE = Entity(EntityKind.NODE, "n1")
CPUS = [Entity(EntityKind.CPU, str(number)) for number in range(3)]
GEMM = dataclasses.replace(TESTS["gemm"], seconds=0.1)
HBM = dataclasses.replace(TESTS["hbm"], seconds=0.1)
NIC = "sys/bus/pci/devices/0000:1c:00.0"


def rate(part, value=100.0):
    return Measurement(
        test="gemm", part=part, parameters={"dtype": "fp32"}, values=(value,), unit="TFLOP/s"
    )


def digest(part, text="good"):
    about = {"test": "gemm", "part": part, "parameters": "dtype=fp32", "model": "m"}
    return ResultDigest(**about, digest=text)


def healthy(part):
    return (rate(part), digest(part), ProgramEnd(test="gemm"))


def says(*records, then="", first=""):
    """Return the command of a program that prints *records*, between *first* and *then*."""
    lines = "".join(to_line(record) + "\n" for record in records)
    code = f"import os, signal, sys, time\n{first}\nsys.stdout.write({lines!r})\n"
    return [sys.executable, "-I", "-S", "-c", f"{code}sys.stdout.flush()\n{then}"]


@pytest.fixture
def root(tmp_path):
    fake = FakeRoot(tmp_path / "root")
    fake.write(f"{NIC}/vendor", "0x15b3\n").write(f"{NIC}/class", "0x020700\n")
    return fake.write(f"{NIC}/aer_dev_fatal", "DLP 0\nTOTAL_ERR_FATAL 0\n")


@pytest.fixture
def burnin(root, tmp_path):
    """Return what makes a burn-in whose programs are those that *command* returns for a part."""

    def make(command, tests=(GEMM,), watcher=None, **changes):
        state_dir = changes.pop("state_dir", tmp_path / "state")
        state_dir.mkdir(exist_ok=True)
        plan = counting_plan(
            CheckRequest(
                suite="full", node="n1", root=root.path, state_dir=state_dir, uid=os.geteuid()
            )
        )
        bad_part, code = changes.pop("real_but", (None, None))

        def choose(test, part, more):
            if command is not None:
                return command(test, part.entity)
            real = program_command(test, part, more)
            planted = [sys.executable, "-c", code, *real[real.index("gemm") :]]
            return planted if part.entity.id == bad_part else real

        request = BurninRequest(
            plan=plan,
            tests=tests,
            asked="--tier 10m",
            **{"cpus": (0, 1, 2), "disks": (), "environ": dict(os.environ), **changes},
            command=choose,
        )
        return Burnin(request, FakeClock(), watcher or BurninWatcher())

    return make


def run(made):
    made.run()
    return made.result()


def bad(check_run):
    return [item for item in check_run.findings if item.status > Status.SKIP]


def test_equal_parts_pass_and_each_measurement_is_told(burnin):
    made = burnin(lambda _test, part: says(*healthy(part)))
    result = run(made)

    assert (result.suite, result.node, result.verdict) == ("burnin", "n1", Status.PASS)
    assert [item.message for item in result.findings if item.check == "burnin/gemm"] == [
        "dtype=fp32: median of 1, spread 0.0 %; the worst of 3 (cpu 0); the same bits on 3"
    ]
    told = made.measured()
    assert [item["part"]["id"] for item in told] == ["0", "1", "2"]
    assert told[0]["parameters"] == "dtype=fp32"
    assert told[0]["shape"].startswith("3 x ")


def floor(**changes):
    values = {"test": "gemm", "parameters": "dtype=fp32", "value": 120.0, "unit": "TFLOP/s"}
    return Floor(**{**values, "source": "ours", **changes})


def site(shape, *floors):
    return {"ours": Baseline(name="ours", path="ours.toml", shape=shape, floors=floors)}


def shape_of(burnin):
    made = burnin(lambda _test, part: says(*healthy(part)))
    run(made)
    return made.measured()[0]["shape"]


def test_a_floor_of_this_machine_is_what_its_parts_are_held_to(burnin):
    baselines = site(shape_of(burnin), floor(), floor(parameters="dtype=bf16"))
    result = run(burnin(lambda _test, part: says(*healthy(part)), baselines=baselines))

    slow = [item for item in result.findings if item.status is Status.WARN]
    assert [(item.entity, item.threshold, item.source) for item in slow] == [
        (cpu, ">= 120 TFLOP/s", "ours") for cpu in CPUS
    ]
    (wanted,) = [item for item in result.findings if item.status is Status.SKIP]
    assert (wanted.value, wanted.message) == (None, "dtype=bf16: not measured")


def test_a_baseline_of_another_shape_is_not_used_and_that_is_said_once(burnin):
    result = run(burnin(lambda _test, part: says(*healthy(part)), baselines=site("h100", floor())))

    assert result.verdict is Status.PASS
    (note,) = [item for item in result.findings if item.check == "burnin/baseline"]
    assert note.status is Status.SKIP
    assert note.message.endswith("(there is: h100); only parts of this node are compared")


def test_a_floor_a_thousand_times_off_its_neighbours_stops_the_burn_in_before_any_test(burnin):
    ran, shape = [], shape_of(burnin)
    off = site(shape, floor(), floor(parameters="dtype=bf16", value=0.012))

    with pytest.raises(ConfigError, match=r"the baseline ours\.toml: gemm dtype=.* times off"):
        burnin(lambda *about: ran.append(about), baselines=off).run()
    assert ran == []


BASELINE = """
shape = "x"
[[floor]]
test = "gemm"
unit = "TFLOP/s"
value = 700.0
median = 710.0
results = 60
parts = 20
nodes = 4
source = "learned: 4 nodes"
"""


def test_a_baseline_of_fewer_nodes_than_its_minimum_is_a_mistake(tmp_path):
    folder = tmp_path / "site" / "baselines"
    folder.mkdir(parents=True)
    (folder / "x.toml").write_text(BASELINE)
    result = gpuops("burnin", "--duration", "1", env={"GPUOPS_SITE_DIR": str(tmp_path / "site")})

    assert (result.returncode, result.stdout) == (64, "")
    assert "x.toml (gemm): it was learned from 60 results of 4 nodes" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts what users can write")
def test_root_refuses_a_baseline_that_a_user_can_write(tmp_path):
    path = tmp_path / "site" / "baselines" / "x.toml"
    path.parent.mkdir(parents=True)
    path.write_text(BASELINE.replace("nodes = 4", "nodes = 8"))
    path.chmod(0o666)
    result = gpuops("burnin", "--duration", "1", env={"GPUOPS_SITE_DIR": str(tmp_path / "site")})

    assert (result.returncode, result.stdout) == (64, "")
    assert "root does not read" in result.stderr
    assert "x.toml" in result.stderr


def test_a_part_with_other_bits_is_named_and_fails(burnin):
    def command(_test, part):
        return says(rate(part), digest(part, "bad" if part.id == "1" else "good"), healthy(part)[2])

    made = burnin(command)
    (found,) = bad(run(made))

    assert (found.entity, found.status) == (CPUS[1], Status.FAIL)
    assert found.failure_class is FailureClass.HOST_CPU
    assert [item["status"] for item in made.measured()] == ["pass", "fail", "pass"]


def test_a_wrong_result_of_one_part_fails_it(burnin):
    def command(_test, part):
        wrong = WrongResult(test="gemm", part=part, parameters="dtype=fp32", message="3 differ")
        return says(*([wrong] if part.id == "2" else []), *healthy(part))

    (found,) = bad(run(burnin(command)))

    assert (found.entity, found.status, found.message) == (
        CPUS[2],
        Status.FAIL,
        "dtype=fp32: 3 differ",
    )


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        ({"first": "print('garbage\\n\\x00\\x1b[2J{\"record\": 7}')"}, None),
        ({"then": 'sys.stdout.write(\'{"record": "e\'); sys.exit(7)'}, "exited with code 7"),
        ({"then": "sys.exit('CUDA error: device lost')"}, "CUDA error: device lost"),
        ({"then": "os.kill(os.getpid(), 11)"}, "ended by SIGSEGV"),
        (
            {"then": "for _ in range(100): sys.stdout.write('x' * 2**20 + '\\n')"},
            "bytes more than a test prints",
        ),
        ({"then": "sys.stdout.write('y' * 100 * 2**20)"}, "bytes more than a test prints"),
    ],
    ids=["garbage", "half a line", "error", "crash", "100 MB", "a line of 100 MB"],
)
def test_what_one_program_prints_costs_no_other_part_its_result(burnin, planted, text):
    def command(_test, part):
        return says(*healthy(part), **(planted if part.id == "1" else {}))

    result = run(burnin(command))

    rates = [item for item in result.findings if item.unit == "TFLOP/s"]
    assert [item.status for item in rates] == [Status.PASS]
    unknown = [(item.entity, item.unknown_reason) for item in bad(result)]
    assert unknown == ([] if text is None else [(CPUS[1], UnknownReason.CRASH)])
    assert text is None or text in bad(result)[0].message


def test_a_program_that_ignores_sigterm_and_outlives_its_limit_is_ended_and_named(burnin, tmp_path):
    def command(_test, part):
        stays = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        stays += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        stays += "time.sleep(600)"
        return says(*healthy(part)[:2], then=stays) if part.id == "0" else says(*healthy(part))

    # The others have this long to start and end: no test of how quick the machine is.
    result = run(burnin(command, start_s=8.0))

    (found,) = bad(result)
    pid = int((tmp_path / "pid").read_text())
    assert (found.entity, found.unknown_reason) == (CPUS[0], UnknownReason.TIMEOUT)
    assert f"pid {pid}" in found.message
    assert result.late == ("burnin/gemm",)
    assert process_state(pid) is None or process_state(pid).ended


def test_errors_that_grow_during_a_test_fail_it_though_it_is_fast(burnin, root):
    counter = root.path / NIC / "aer_dev_fatal"

    def command(_test, part):
        grow = f"open({str(counter)!r}, 'w').write('DLP 1\\nTOTAL_ERR_FATAL 1\\n')"
        return says(*healthy(part), then=grow if part.id == "0" else "")

    result = run(burnin(command, tests=(GEMM, HBM)))

    (found,) = bad(result)
    assert (found.check, found.status) == ("pci_aer", Status.FAIL)
    assert str(found.entity) == "link pci 0000:1c:00.0"
    assert found.message.endswith("; new during the burn-in test gemm")


class InterruptedClock(FakeClock):
    """A clock whose call with that number is interrupted, as is the callback `step`."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def step(self, *_):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def now_us(self):
        self.step()
        return super().now_us()


def test_wherever_it_is_interrupted_what_was_done_is_the_result_and_resume_goes_on(burnin):
    """During the counters, between tests, and while one is saved."""
    n_done, number = set(), 0
    while number < 100:
        number += 1
        clock = InterruptedClock(number)
        made = burnin(
            lambda _test, part: says(*healthy(part)),
            tests=(GEMM, HBM),
            cpus=(0,),
            watcher=BurninWatcher(on_start=clock.step, on_done=clock.step),
        )
        made.clock = clock
        try:
            made.run()
        except KeyboardInterrupt:
            partial = made.result()
        else:
            break
        (found,) = bad(partial)
        rates = {item.check for item in partial.findings if item.unit == "TFLOP/s"}
        n_done.add(len(rates))
        missing = [name for name in ("gemm", "hbm") if f"burnin/{name}" not in rates]
        text = f"interrupted: not run: {', '.join(missing)};" if missing else "interrupted: all"
        assert (found.status, found.unknown_reason) == (Status.UNKNOWN, UnknownReason.NOT_RECORDED)
        assert found.message.startswith(text)

    assert n_done == {0, 1, 2}
    assert number > 6


def interrupts(marker):
    """Return the code of a program that interrupts its parent as Ctrl-C does, and goes on."""
    stays = f"open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
    return stays + f"os.kill(os.getppid(), {int(signal.SIGINT)})\ntime.sleep(600)"


def test_ctrl_c_leaves_nothing_running_keeps_what_was_done_and_resume_goes_on(burnin, tmp_path):
    ran, marker = [], tmp_path / "pid"

    def command(test, part):
        ran.append((test.name, part.id))
        waits = interrupts(marker) if test.name == "hbm" and part.id == "0" else ""
        return says(*healthy(part), then=waits if not marker.exists() else "")

    made = burnin(command, tests=(GEMM, HBM))
    with pytest.raises(KeyboardInterrupt):
        made.run()
    found = process_state(int(marker.read_text()))
    partial = made.result()

    assert found is None or found.ended
    assert partial.verdict is Status.UNKNOWN
    assert "not run: hbm" in bad(partial)[0].message
    assert len(made.measured()) == 3

    ran.clear()
    again = burnin(command, tests=(GEMM, HBM), resume=True)
    result = run(again)

    assert {name for name, _ in ran} == {"hbm"}
    assert result.verdict is Status.PASS
    assert {item.check for item in result.findings if item.unit} == {"burnin/gemm", "burnin/hbm"}
    assert len(again.measured()) == 6
    assert not progress_path(tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("number", "code", "text"), [("SIGINT", 130, ""), ("SIGTERM", 143, " by SIGTERM")]
)
def test_the_command_records_what_was_done_and_leaves_nothing(tmp_path, number, code, text):
    """Interrupted in its second test, where its store is a file that is no database."""
    (tmp_path / "store.db").write_text("no database" * 1000)
    (tmp_path / "tmp").mkdir()
    env = {
        **plant(tmp_path / "site", f"{number} in hbm"),
        "GPUOPS_STATE": str(tmp_path / "state"),
        "GPUOPS_SPOOL": str(tmp_path / "spool"),
        "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    done = gpuops("burnin", "--only", "gemm,hbm", "--json", env=env)

    assert done.returncode == code, done.stderr
    spooled, interrupted = filter(None, done.stderr.splitlines())
    assert spooled.startswith(f"gpuops: spooled in {tmp_path}/spool, the store has it after")
    assert "file is not a database" in spooled
    assert interrupted == f"gpuops: interrupted{text}"
    body = json.loads(done.stdout)
    assert {item["test"] for item in body["measurements"]} == {"gemm"}
    pids = [int(path.name) for path in (tmp_path / "site" / "pids").iterdir()]
    assert pids
    assert all(process_state(pid) is None or process_state(pid).ended for pid in pids)
    assert list((tmp_path / "tmp").iterdir()) == []
    lines = "".join(p.read_text() for p in (tmp_path / "spool").rglob("*") if p.is_file())
    assert lines.count('"burnin.measured"') == len(body["measurements"])
    assert "interrupted: not run: hbm" in lines

    env["PLANTED"] = "right"
    assert gpuops("burnin", "--only", "gemm,hbm", "--resume", env=env).returncode == 0


def test_resume_refuses_what_was_not_begun_or_was_another_burn_in(burnin, tmp_path):
    made = burnin(lambda _test, part: says(*healthy(part)), resume=True)
    with pytest.raises(UsageError, match="holds no interrupted burn-in"):
        made.run()

    other = {"schema": "gpuops.burnin-progress/1", "plan": "--tier 60m", "start_us": 1, "done": []}
    progress_path(tmp_path / "state").write_text(json.dumps(other))
    with pytest.raises(UsageError, match="the interrupted burn-in was --tier 60m"):
        made.run()


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"plan": "x", "start_us": 1e400, "done": []}',
        '{"plan": "x", "start_us": 99999999999999999999, "done": []}',
        '{"plan": "x", "start_us": 1, "done": [1]}',
        '{"plan": "x", "start_us": 1, "done": [{"name": "gemm", "findings": ["x"]}]}',
    ],
)
def test_resume_refuses_a_damaged_file(burnin, tmp_path, body):
    text = body.replace("{", '{"schema": "gpuops.burnin-progress/1",', 1).replace(",}", "}")
    path = progress_path(tmp_path / "state")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)

    made = burnin(lambda _test, part: says(*healthy(part)), resume=True)
    with pytest.raises(UsageError, match="is damaged"):
        made.run()


def test_a_result_that_cannot_be_printed_is_recorded(tmp_path):
    state, spool = tmp_path / "state", tmp_path / "spool"
    env = {
        **plant(tmp_path / "site", "right"),
        "GPUOPS_STATE": str(state),
        "GPUOPS_SPOOL": str(spool),
        "GPUOPS_STORE": NO_STORE,
    }
    with open("/dev/full", "w") as full:  # noqa: PTH123 a device
        done = subprocess.run(
            [sys.executable, "-m", "gpuops", "burnin", "--json"],
            env={**os.environ, **env},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            check=False,
        )

    assert (done.returncode, "no space left on the output" in done.stderr) == (70, True)
    spooled = "".join(path.read_text() for path in spool.rglob("*") if path.is_file())
    assert '"burnin.measured"' in spooled


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk_costs_the_resume_and_no_result(burnin, tmp_path, resume):
    problems = []
    with small_disk(tmp_path / "disk", "64k") as disk:
        if resume:  # the disk fills up between the two
            save_progress(disk, BurninProgress(plan="--tier 10m", start_us=1))
        (disk / "filler").write_bytes(b"")
        with (disk / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        made = burnin(
            lambda _test, part: says(*healthy(part)),
            watcher=BurninWatcher(on_problem=problems.append),
            state_dir=disk,
            resume=resume,
        )
        result = run(made)

    assert result.verdict is Status.PASS
    assert len(problems) == 1
    assert "No space left on device; --resume will not know of this test" in problems[0]


def test_a_second_burn_in_is_refused_and_names_the_first(tmp_path):
    with node_lock(tmp_path / "state", "burnin") as problem:
        assert problem is None
        with (
            pytest.raises(BusyError, match=rf"burnin \(pid {os.getpid()}\) holds"),
            node_lock(tmp_path / "state", "burnin"),
        ):
            pass
        env = {"GPUOPS_STATE": str(tmp_path / "state")}
        result = gpuops("burnin", "--duration", "1", env=env)

    assert (result.returncode, result.stdout) == (75, "")
    assert f"burnin (pid {os.getpid()})" in result.stderr


def test_dcgm_diag_is_skipped_while_the_node_is_tested_and_holds_it_while_it_runs(root, tmp_path):
    state_dir, seen = tmp_path / "state", tmp_path / "seen"
    state_dir.mkdir()
    root.write("usr/bin/dcgmi", f"#!/bin/sh\ncat {state_dir}/node-test.lock > {seen}\n")
    (root.path / "usr/bin/dcgmi").chmod(0o755)
    request = CheckRequest(
        suite="diag", node="n1", root=root.path, state_dir=state_dir, uid=os.geteuid()
    )
    plan = make_plan(dataclasses.replace(request, only=("dcgm_diag",)))

    with node_lock(state_dir, "burnin"):
        (busy,) = check_node(plan, FakeClock()).findings
    assert (busy.check, busy.status) == ("dcgm_diag", Status.SKIP)
    assert f"this node is being tested: burnin (pid {os.getpid()})" in busy.message
    assert not seen.exists()

    check_node(plan, FakeClock())
    assert json.loads(seen.read_text()) == {"pid": os.getpid(), "suite": "dcgm_diag"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--only", "golden"), "corruption checks"),
        (("--only", "gem"), "did you mean 'gemm'"),
        (("--only", ","), "--only ',' names no test"),
        (("--duration", "nan"), "'nan' is not a number"),
        (("--json", "--jsonl"), "exclude each other"),
        (("--resume",), "holds no interrupted burn-in"),
    ],
)
def test_mistakes_on_the_command_line_are_64(words, text):
    result = gpuops("burnin", "--duration", "1", *words)

    assert result.returncode == 64
    assert text in result.stderr


@pytest.mark.parametrize(
    ("words", "planted", "code", "is_kept"),
    [
        ((), "right", 0, True),
        ((), "wrong", 1, False),
        (("--only", "gemm,hbm,collectives,host"), "right", 0, False),
        (("--duration", "600"), "right", 0, False),
        (("--no-record",), "right", 0, False),
    ],
)
def test_only_a_whole_burn_in_that_passed_lets_a_drained_node_return(
    tmp_path, words, planted, code, is_kept
):
    env = {**plant(tmp_path / "site", planted), "GPUOPS_STATE": str(tmp_path / "state")}
    result = gpuops("burnin", *words, env=env)

    assert result.returncode == code, result.stdout + result.stderr
    kept = read_diagnostic(tmp_path / "state", uid=os.geteuid())
    assert (kept.burnin_us is not None) == is_kept
    assert kept.passed_us is None


FLIPS = """
import sys, torch
from gpuops.worker.burnin import __main__ as program, gemm

calls = []

def flips(a, b, out):
    torch.matmul(a, b, out=out)
    calls.append(1)
    # The first product is what the others are compared with.
    if a.dtype == torch.float32 and len(calls) > 3:
        out.view(torch.int32)[7, 9] ^= 1

program.RUNS["gemm"] = lambda device, options, emit: gemm.measure_gemm(
    device, options.seconds, emit, flips
)
sys.exit(program.main(sys.argv[1:]))
"""


@pytest.mark.torch
def test_one_element_that_one_part_flips_fails_the_burn_in_and_names_the_part(burnin):
    """The real programs; in that of one part an element of later products has another bit."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:2]
    made = burnin(None, cpus=cpus, real_but=(str(cpus[0]), FLIPS))
    result = run(made)

    (found,) = [item for item in result.findings if item.status is Status.FAIL]
    assert result.verdict is Status.FAIL
    assert (found.check, found.entity) == ("burnin/gemm", Entity(EntityKind.CPU, str(cpus[0])))
    assert found.failure_class is FailureClass.HOST_CPU
    assert "differed in 1 of 1048576 elements" in found.message
    assert "row 7, column 9" in found.message
    failed = {item["part"]["id"] for item in made.measured() if item["status"] == "fail"}
    assert failed == {str(cpus[0])}


def test_a_burn_in_that_is_not_recorded_leaves_the_interrupted_one(tmp_path):
    path = progress_path(tmp_path / "state")
    path.parent.mkdir()
    path.write_text("the interrupted one")
    env = {**plant(tmp_path / "site", "right"), "GPUOPS_STATE": str(tmp_path / "state")}

    assert gpuops("burnin", "--no-record", env=env).returncode == 0
    assert path.read_text() == "the interrupted one"


@pytest.mark.torch
def test_this_machine_passes_a_short_burn_in_of_its_processors(tmp_path):
    env = {"GPUOPS_STORE": NO_STORE}
    result = gpuops("burnin", "--duration", "5", "--json", env=env, timeout=110)

    assert result.returncode == 0, result.stdout + result.stderr
    body = json.loads(result.stdout)
    assert body["schema"] == "gpuops.burnin/1"
    tests = {"burnin/gemm", "burnin/hbm", "burnin/links", "burnin/host"}
    if len(os.sched_getaffinity(0)) > 1:
        tests.add("burnin/collectives")
    else:
        (skip,) = [item for item in body["findings"] if item["check"] == "burnin/collectives"]
        assert (skip["status"], skip["unknown_reason"]) == ("skip", "not_supported")
        assert "there is one part: nothing to exchange" in skip["message"]
    assert {item["check"] for item in body["findings"] if item["unit"]} == tests
    measured = body["measurements"]
    assert all(item["value"] > 0 for item in measured)
    assert "torch" in measured[0]["software"]
    lines = "".join(
        path.read_text(errors="replace")
        for path in (tmp_path / "default" / "spool").rglob("*")
        if path.is_file()
    )
    assert lines.count("burnin.measured") == len(measured)


@pytest.mark.parametrize(("status", "verdict"), [("Pass", Status.PASS), ("Fail", Status.FAIL)])
def test_dcgm_runs_at_level_3_and_its_own_judge_decides(burnin, root, tmp_path, status, verdict):
    result = {"entity_group": "GPU", "entity_id": 0, "status": status}
    test = {"name": "memory", "results": [result], "test_summary": {"status": status}}
    told = {"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [test]}]}}
    words = tmp_path / "words"
    script = f"#!/bin/sh\necho $@ > {words}\ncat <<'END'\n{json.dumps(told)}\nEND\n"
    root.write("usr/bin/dcgmi", script)
    (root.path / "usr/bin/dcgmi").chmod(0o755)

    made = burnin(lambda _test, _part: pytest.fail("no program"), (TESTS["dcgm"],))
    found = [item for item in run(made).findings if item.check == "dcgm_diag"]

    assert [item.status for item in found] == [verdict]
    assert words.read_text() == "diag -r 3 -j\n"


def test_dcgm_which_tests_all_gpus_does_not_run_where_one_is_left_out(burnin, root, tmp_path):
    root.write("usr/bin/dcgmi", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (root.path / "usr/bin/dcgmi").chmod(0o755)
    made = burnin(lambda _test, _part: pytest.fail("no program"), (TESTS["dcgm"],))
    node = made.request.node
    host = PartUnderTest(node, "cpu:0")
    parts = PartsUnderTest(parts=(), host=host, disks=(), shape="", n_left_out=1)

    (found,) = made.diagnose(parts)

    assert (found.check, found.status) == ("burnin/dcgm", Status.SKIP)
    assert not (tmp_path / "ran").exists()


def test_ctrl_c_ends_dcgm_too(burnin, root, tmp_path):
    marker, new = tmp_path / "pid", tmp_path / "new"
    interrupt = f"kill -INT {os.getpid()}"
    script = f"#!/bin/sh\necho $$ > {new}; mv {new} {marker}; {interrupt}; exec sleep 100\n"
    root.write("usr/bin/dcgmi", script)
    (root.path / "usr/bin/dcgmi").chmod(0o755)
    made = burnin(lambda _test, _part: pytest.fail("no program"), (TESTS["dcgm"],))

    with pytest.raises(KeyboardInterrupt):
        made.run()

    while (found := process_state(int(marker.read_text()))) is not None and not found.ended:
        time.sleep(0.02)
    assert "not run: dcgm" in bad(made.result())[0].message


REPORT = """NCCL DIAG === NCCL Diagnostics ===
NCCL DIAG [OK]   p2p: verified P2P access in both directions between every GPU pair
n1:7 NCCL DIAG [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification
NCCL DIAG NCCL diagnostics completed in 245.3 ms across 8 ranks
"""


def test_the_diagnostics_of_nccl_are_asked_for_and_told(burnin):
    asks = f"print({REPORT!r} if os.environ['NCCL_RUN_DIAGNOSTICS'] == '1' else 'no')"
    made = burnin(lambda _test, part: says(*healthy(part), first=asks), cpus=(0,))
    found = [item for item in run(made).findings if "NCCL" in item.message]

    assert [(item.status, item.entity, item.failure_class) for item in found] == [
        (Status.PASS, NODE, None),
        (Status.WARN, NODE, FailureClass.GPU_DIAGNOSTIC),
    ]
    assert found[1].message == (
        "NCCL diagnostics: [INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification"
    )


def test_lines_of_nccls_diagnostics_are_no_garbage():
    output = ProgramOutput(NODE)
    for line in REPORT.encode().splitlines():
        output.add_line(line)

    assert (output.garbage, len(output.diagnostics)) == (0, 2)
